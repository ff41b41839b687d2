"""Layers of a decoder: attention, delta net, Mamba-2, short convolution, feed-forwards, experts, norms, ropes."""
