"""Layers of a decoder: attention, feed-forwards, experts, delta net, norms, rotary embeddings."""
