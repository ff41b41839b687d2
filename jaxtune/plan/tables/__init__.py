"""What a plan reads instead of a file or a page: the config.json of common models, and prices of GPUs."""
