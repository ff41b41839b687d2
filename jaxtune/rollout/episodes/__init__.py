"""Completions of several turns: tools and environments that answer the model, and what an episode earns."""
