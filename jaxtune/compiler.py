"""Options of XLA for programs on a GPU, with the reason for each. Elsewhere there are none."""

import os

from pallas_kernels.gpus import current_device

Options = dict[str, str | bool | int]

GPU_OPTIONS: Options = {
    # Matrix products go to cuBLASLt. XLA's Triton fusions for them need timing on the card to be chosen well, which
    # costs start-up time; untimed, they are what every product falls to.
    "xla_gpu_enable_triton_gemm": False,
}
DETERMINISTIC_OPTIONS: Options = {
    # Scatters and reductions without atomics, whose order differs from run to run.
    "xla_gpu_deterministic_ops": True,
    # No algorithm chosen by timing, which may choose another one the next time.
    "xla_gpu_autotune_level": 0,
}


def compiler_options(deterministic: bool = False) -> Options:
    """`compiler_options` of jax.jit for the device of the mesh in use; what XLA_FLAGS names is left as it says."""
    if current_device().platform != "gpu":
        return {}
    options = GPU_OPTIONS | (DETERMINISTIC_OPTIONS if deterministic else {})
    return {name: value for name, value in options.items() if name not in os.environ.get("XLA_FLAGS", "")}
