"""Attention by Mosaic GPU, for Hopper."""
