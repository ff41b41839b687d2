"""Tables of a plan: the config.json of common models, and prices of GPUs."""
