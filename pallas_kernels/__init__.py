"""GPU kernels for language models, each behind one public function. Does not depend on jaxtune."""

import os

# With a CUDA plugin but no CUDA libraries jax prints a traceback as it looks for devices. Where none of these files
# exists (the last is WSL's) jax uses no NVIDIA GPU whatever the plugin says, so its check can be skipped.
if not any(map(os.path.exists, ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg"))):
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
