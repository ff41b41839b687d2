"""LLM training and fine-tuning in JAX for NVIDIA GPUs, from one card to many hosts."""

import pallas_kernels  # noqa: F401 (so that jax's CUDA plugin is quiet where there is no card)
