"""A weight with its adapter merged, inside a compiled program on any mesh."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxtune.models.layers.linear import Adapter
from jaxtune.parallel.layout import P
from jaxtune.quant.array import QuantizedArray


def merged_weight(
    adapter: Adapter | None, weight: Any, parts: Mapping[str, Float[Array, "..."]]
) -> Float[Array, "*experts o i"]:
    """Return a weight, or a layer's experts, dequantized and with a low-rank adapter merged in float32.

    adapter: None returns the dequantized weight. parts: A and B, as the adapter names them.
    """
    plain = weight.dequantize() if isinstance(weight, QuantizedArray) else weight
    if adapter is None:
        return plain
    *experts, rows, columns = jax.typeof(plain).sharding.spec
    # Shard A like W's columns and B like its rows, so that B A needs no communication.
    places = {"lora_a": P(*experts, None, columns), "lora_b": P(*experts, rows, None)}
    values = {
        part: jax.reshard(value.astype(jnp.float32), places[part.removesuffix("_start")])
        for part, value in parts.items()
    }
    return adapter.merged(plain.astype(jnp.float32), values)  # in bfloat16 small changes would be rounded away
