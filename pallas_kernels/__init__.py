"""GPU kernels for language models, each behind one public function. Knows nothing of jaxtune."""

import os

# With a CUDA plugin but no CUDA libraries jax prints a traceback as it looks for devices. Where none of these files is
# there (the last is WSL's) jax uses no NVIDIA card whatever the plugin says, so nothing is lost with its check.
if not any(map(os.path.exists, ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg"))):
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
