"""The number formats of a run: a `PrecisionRecipe` from the options under `precision`."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxtune.errors import UserError
from jaxtune.precision.fp8 import Fp8Matmul
from jaxtune.precision.linears import Linears, LinearWeight, StepWeights
from jaxtune.precision.nvfp4 import Nvfp4Matmul, native
from jaxtune.precision.operands import MatmulFormat
from jaxtune.precision.options import PrecisionOptions
from pallas_kernels.gpus import Device


@dataclass(frozen=True)
class PrecisionRecipe:
    """The number formats that a training step computes in.

    Attributes:
        dtype: dtype of activations, to which weights are cast at each use.
        matmul_precision: value for jax.default_matmul_precision; 'highest' keeps float32 products from becoming TF32.
        gradient_dtype: dtype in which gradients are summed over micro-batches.
        loss_scale: scale of the mean loss at the first step; None: the loss is not scaled.
        growth_steps: steps without an overflow after which the scale doubles.
        linears: the linear layers multiplied in low precision, or as they will be served.
    """

    dtype: jnp.dtype
    matmul_precision: str
    gradient_dtype: Any = jnp.float32
    loss_scale: float | None = None
    growth_steps: int | None = None
    linears: StepWeights | None = None


BF16 = PrecisionRecipe(jnp.dtype("bfloat16"), "default")
# By the value of precision.recipe, before other options change the record.
RECIPES = {
    "bf16": BF16,
    "fp32": PrecisionRecipe(jnp.dtype("float32"), "highest"),
    "fp16": PrecisionRecipe(jnp.dtype("float16"), "default"),
    "fp8_hybrid": BF16,
    "nvfp4": BF16,
}


def recipe_of(precision: PrecisionOptions, linears: StepWeights | None) -> PrecisionRecipe:
    """Return the recipe for the options under `precision`; `linears`: as in `PrecisionRecipe`."""
    recipe = dataclasses.replace(
        RECIPES[precision.recipe], gradient_dtype=jnp.dtype(precision.gradient_dtype), linears=linears
    )
    if precision.recipe != "fp16":
        return recipe
    return dataclasses.replace(recipe, loss_scale=precision.fp16.loss_scale, growth_steps=precision.fp16.growth_steps)


def matmul_format(precision: PrecisionOptions) -> MatmulFormat | None:
    """Return the number format in which a low-precision recipe multiplies linear layers; None for another recipe."""
    match precision.recipe:
        case "fp8_hybrid":
            return Fp8Matmul(precision.fp8.hadamard, online=precision.fp8.online_scale_steps > 0)
        case "nvfp4":
            return Nvfp4Matmul(**dataclasses.asdict(precision.nvfp4))
    return None


def linears_of(precision: PrecisionOptions, weights: Mapping[str, LinearWeight]) -> Linears | None:
    """Return how the recipe multiplies these weights in low precision; None if it multiplies none."""
    numbers = matmul_format(precision)
    if numbers is None:
        return None
    if precision.recipe == "fp8_hybrid" and precision.fp8.scaling == "delayed":
        return Linears(numbers, weights, precision.fp8.amax_history, precision.fp8.online_scale_steps)
    return Linears(numbers, weights)


def check_device(name: str, device: Device) -> str | None:
    """Return a note for the user about a recipe on a device, or None.

    Raises UserError if the device cannot run the recipe, with recipes that it can.
    """
    if name == "fp8_hybrid" and device.capability is not None and device.capability < (8, 9):
        raise UserError(
            f"precision.recipe='fp8_hybrid': {device} has no FP8 units, which Ada, Hopper and Blackwell have; "
            "use precision.recipe='bf16', or 'fp16' on a GPU before Ampere"
        )
    if name == "fp8_hybrid" and device.platform != "gpu":
        return f"precision.recipe='fp8_hybrid' is emulated on {device}: FP8 numbers, float32 products"
    if name == "nvfp4" and not native(device):
        return f"precision.recipe='nvfp4' is emulated on {device}: NVFP4 numbers, bfloat16 products"
    return None
