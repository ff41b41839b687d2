"""LLM training and fine-tuning in JAX for NVIDIA GPUs, from one GPU to many hosts."""

from jaxtune import interrupt

if interrupt.is_command():  # before anything that takes a second to import
    interrupt.leave_at_once()

import pallas_kernels  # noqa: F401 (so that jax's CUDA plugin is quiet without a GPU)
