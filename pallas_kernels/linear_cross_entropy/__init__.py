"""Cross-entropy of a linear head without the logits of the whole batch: the public op."""

from pallas_kernels.linear_cross_entropy.xla import linear_cross_entropy

__all__ = ["linear_cross_entropy"]
