"""Completions sampled during training, on the devices or by a server, and the rewards that they get."""
