"""Low-rank adapters (Hu et al. 2021)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxtune.models.call import Call
from jaxtune.models.declared import declared
from jaxtune.models.dropout import dropout
from jaxtune.models.linear import Linear, matmul, named


@dataclass(frozen=True)
class LoRA:
    """y + scale · dropout(x) A^T B^T: an `Adapter` of models.linear."""

    rank: int
    scale: float
    dropout: float = 0.0
    owner: str | None = None

    peft_names: ClassVar[Mapping[str, str]] = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight"}
    shared: ClassVar[frozenset[str]] = frozenset({"lora_a"})

    def declare(self, shape: tuple[int, int], axes: tuple[str | None, ...]) -> dict[str, Any]:
        """A (rank, in), drawn as in peft, and B (out, rank), zeros."""
        out, inner = shape
        a_init = partial(_uniform, bound=inner**-0.5)  # peft's: Kaiming uniform with a = sqrt(5)
        parts = {
            "lora_a": declared((self.rank, inner), ("rank", axes[1]), a_init, "adapter"),
            "lora_b": declared((out, self.rank), (axes[0], "rank"), nnx.initializers.zeros, "adapter"),
        }
        return {name: part for name, part in parts.items() if self.owner is None or name not in self.shared}

    @staticmethod
    def outputs(
        linears: Sequence[Linear], x: Float[Array, "b s i"], ys: Sequence[Float[Array, "b s o"]], call: Call
    ) -> list[Float[Array, "b s o"]]:
        """Each y plus the adapter's output; the parts of a fused module drop the same elements of x.

        Scaled at the rank, where it costs nothing. The barriers keep the small products apart from the large ones,
        which then add to them as part of their own work: to y in the forward pass, to dx in the backward pass.
        """
        lows = _low(linears, jax.lax.optimization_barrier(x), call)
        scaled = [low * jnp.asarray(linear.adapter.scale, low.dtype) for linear, low in zip(linears, lows)]
        multiply = partial(matmul, groups=call.groups)
        more = [multiply(low, linear.part("lora_b"), linear.out) for linear, low in zip(linears, scaled)]
        return [y + jax.lax.optimization_barrier(extra) for y, extra in zip(ys, more)]

    def merged(self, weight: Float[Array, "o i"], values: Mapping[str, Array]) -> Float[Array, "o i"]:
        """W + scale · B A."""
        product = jnp.einsum("or,ri->oi", values["lora_b"], values["lora_a"], precision=jax.lax.Precision.HIGHEST)
        return weight + self.scale * product

    def merged_bias(self, bias: Float[Array, " o"], values: Mapping[str, Array]) -> Float[Array, " o"]:
        """As it is."""
        return bias


def _low(linears: Sequence[Linear], x: Float[Array, "b s i"], call: Call) -> list[Float[Array, "b s r"]]:
    """x A^T of each layer, in one product where no elements of x are dropped."""
    owners = [linear for linear in linears if linear.adapter.owner is None]
    multiply = partial(matmul, out=None, groups=call.groups)
    if call.noise is not None and any(linear.adapter.dropout for linear in owners):
        sites = [(linear, call.noise.site(linear.name)) for linear in owners]
        inputs = [dropout(x, linear.adapter.dropout, noise) for linear, noise in sites]
        found = [multiply(dropped, linear.part("lora_a")) for linear, dropped in zip(owners, inputs)]
        found = [named(low, call) for low in found]
    else:
        product = multiply(x, jnp.concatenate([linear.part("lora_a") for linear in owners], axis=-2))
        ends = list(accumulate(linear.adapter.rank for linear in owners))
        found = jnp.split(named(product, call), ends[:-1], axis=-1)
    by_name = {linear.name: low for linear, low in zip(owners, found)}
    return [by_name[linear.adapter.owner or linear.name] for linear in linears]


def _uniform(key: Array, shape: tuple[int, ...], dtype: jnp.dtype, bound: float) -> Array:
    return jax.random.uniform(key, shape, dtype, -bound, bound)
