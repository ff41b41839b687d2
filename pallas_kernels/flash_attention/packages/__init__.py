"""FlashAttention 2 and 3 by packages that register their kernels with XLA."""
