"""Predicts memory and time of a run on GPUs that are not present, from its compiled step."""
