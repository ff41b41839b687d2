"""GPU kernels for language models, each behind one public function. The package does not depend on jaxtune."""

import os

# With a CUDA plugin but no CUDA libraries jax prints a traceback when it looks for devices. If none of the files below
# exists (the last is WSL's), jax cannot use an NVIDIA GPU in any case, so the plugin's check can be skipped.
if not any(map(os.path.exists, ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg"))):
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
