"""Losses: pure functions (decoder, batch, options) -> (sum of weighted token losses, number of target tokens)."""
