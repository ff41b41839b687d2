"""Losses: pure functions (decoder, batch, noise) -> (sum, metrics), summed over the tokens' weights."""
