"""Documents tokenised once, in parallel if asked for, and kept as memory-mapped files."""
