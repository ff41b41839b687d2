"""What a run would take on GPUs that are not there: memory and time, read from its compiled step."""
