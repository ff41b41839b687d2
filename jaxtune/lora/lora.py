"""Low-rank adapters (Hu et al. 2021)."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxtune.models.call import Call
from jaxtune.models.declared import declared
from jaxtune.models.dropout import dropout
from jaxtune.models.linear import PRODUCT, Linear, matmul


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

    def __call__(
        self, linear: Linear, first: Linear, x: Float[Array, "b s i"], y: Float[Array, "b s o"], call: Call
    ) -> Float[Array, "b s o"]:
        """y plus the adapter's output; the parts of a fused module drop the same elements of x."""
        a = (linear if self.owner is None else first).part("lora_a")
        if call.noise is not None and self.dropout:
            x = dropout(x, self.dropout, call.noise.site(self.owner or linear.name))
        low = checkpoint_name(matmul(x, a, None), PRODUCT)
        return y + matmul(low, linear.part("lora_b"), linear.out) * jnp.asarray(self.scale, y.dtype)

    def merged(self, weight: Float[Array, "o i"], values: Mapping[str, Array]) -> Float[Array, "o i"]:
        """W + scale · B A."""
        product = jnp.einsum("or,ri->oi", values["lora_b"], values["lora_a"], precision=jax.lax.Precision.HIGHEST)
        return weight + self.scale * product


def _uniform(key: Array, shape: tuple[int, ...], dtype: jnp.dtype, bound: float) -> Array:
    return jax.random.uniform(key, shape, dtype, -bound, bound)
