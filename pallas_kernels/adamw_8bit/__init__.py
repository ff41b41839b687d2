"""AdamW with 8-bit moments (Dettmers et al. 2022, arXiv:2110.02861): the public op and its backends."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import registry
from pallas_kernels.adamw_8bit import triton, xla
from pallas_kernels.adamw_8bit.adam import Adam, AdamStep, QuantizedMoment, Updated
from pallas_kernels.gpus import current_device
from pallas_kernels.registry import ANY_GPU, Backend

__all__ = ["BACKENDS", "Adam", "AdamStep", "QuantizedMoment", "Updated", "adamw_8bit"]

# In order of preference.
BACKENDS = (
    Backend("triton", triton.update, triton.refuses, {ANY_GPU: "interpreted tests"}),
    Backend("xla", xla.update, registry.never_refuses, {ANY_GPU: "tests"}),
)

FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32)


def adamw_8bit(
    gradient: Float[Array, "l o i"], before: Updated, step: AdamStep, adam: Adam, *, backend: str = "auto"
) -> Updated:
    """Return the parameter and both moments after a step.

    The arrays are a stack of matrices, (l layers, o rows, i columns), or in a shard_map the shard of a stack.

    The update is computed in float32, whatever the dtype of parameter and gradient (bfloat16, float16, float32). A
    moment's element is the value of its code in bitsandbytes' dynamic map times the absmax of its block; a block has
    r x c elements, inferred from the shapes. The parameter is updated with the new moments before the moments are
    rounded to the nearest value of their map; a mean of squares that is not 0 is never rounded to 0. A bfloat16
    parameter is rounded stochastically, with bits that depend only on `step.key` and an element's position in the whole
    stack. If `step.finite` is False nothing changes.

    The result can reuse the memory of `before` (jax.jit's donate_argnums): the arrays are then updated in place.

    `backend`: 'auto', or a name in BACKENDS. Raises ValueError for shapes and dtypes that do not fit together, and for
    a backend that cannot run this on the current device.
    """
    parameter, *moments = before
    _check(parameter.ndim == 3, f"the parameter is (layers, rows, columns), not {parameter.shape}")
    _check(gradient.shape == parameter.shape, f"gradient {gradient.shape} and parameter {parameter.shape} differ")
    for name, array in (("gradient", gradient), ("parameter", parameter)):
        _check(array.dtype in FLOATS, f"{name} has dtype {array.dtype}; bfloat16, float16 and float32 are supported")
    for codes, absmax in moments:
        _check(codes.dtype == jnp.uint8 and absmax.dtype == jnp.float32, "codes are uint8, and absmax float32")
        _check(codes.shape == parameter.shape, f"codes {codes.shape} and parameter {parameter.shape} differ")
        fits = absmax.ndim == 3 and len(absmax) == len(codes)
        fits &= all(blocks > 0 and not size % blocks for size, blocks in zip(codes.shape, absmax.shape))
        _check(fits, f"absmax {absmax.shape} does not cut codes {codes.shape} into equal blocks")
    _check(moments[0].absmax.shape == moments[1].absmax.shape, "the blocks of both moments must have the same size")
    for name, array in (("rate", step.rate), ("decay", step.decay)):
        _check(array.shape == (len(parameter),), f"{name} {array.shape} must have a value per layer ({len(parameter)})")
    chosen = registry.choose("adamw_8bit", BACKENDS, current_device(), triton.request_for(before), backend)
    return chosen.run(gradient, before, step, adam)


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(f"adamw_8bit: {message}")
