"""The vision tower: patches of packed images become embeddings of image tokens."""
