"""How far a merged export is from the quantized model it was made of: both on the same random tokens."""

import dataclasses
import math
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxtune.config.schema import Config
from jaxtune.errors import UserError
from jaxtune.models.attend import attend_packed
from jaxtune.models.decoder import Parameters, bind
from jaxtune.parallel.layout import TOKENS
from jaxtune.parallel.mesh import data_shards
from jaxtune.precision.recipes import RECIPES
from jaxtune.run.model import Model, declare_model
from jaxtune.run.values import read_parameters

PROBE = 64  # random tokens a row, to compare logits


def merge_difference(model: Model, parameters: Parameters, config: Config, output: Path) -> str:
    """How far the logits of a merged export are from those of the quantized base with its adapter, in words."""
    mesh = jax.sharding.get_mesh()
    merged = dataclasses.replace(config.model, path=str(output), revision=None)
    options = Config(model=merged, data=config.data, precision=config.precision)
    exported = declare_model(options, mesh, train=False, low_precision=False)
    size = sum(math.prod(p.shape) for p in exported.parameters.values()) * jnp.dtype(config.model.dtype).itemsize
    memory = jax.local_devices()[0].memory_stats() or {}
    free = memory.get("bytes_limit", math.inf) - memory.get("bytes_in_use", 0)
    if size / mesh.size > free:
        return f"logits not compared: the merged model does not fit beside the quantized one ({size / 1e9:.1f} GB)"
    dtype = RECIPES[config.precision.recipe].dtype
    tokens = jax.random.randint(jax.random.key(0), (data_shards(mesh), PROBE), 0, model.spec.vocabulary)
    before = _logits(model, parameters, tokens, dtype)
    after = _logits(exported, read_parameters(exported, list(exported.parameters)), tokens, dtype)
    if not (jnp.isfinite(before).all() and jnp.isfinite(after).all()):
        raise UserError(f"{output} is no use: its logits, or those of the run it was merged from, are not finite")
    return (
        f"merged onto the dequantized base: over {tokens.size} random tokens the logits, of which the largest is "
        f"{jnp.abs(before).max():.3g}, differ by {jnp.abs(after - before).max():.2g} at most"
    )


def _logits(model: Model, parameters: Parameters, tokens: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Float32 logits of rows of one document each."""

    @jax.jit
    def compute(tokens, parameters):
        tokens = jax.reshard(tokens, TOKENS)
        positions = jax.reshard(jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape), TOKENS)
        decoder = bind(model.graph, parameters)
        hidden, _ = decoder(tokens, positions, attend_packed(jnp.zeros_like(tokens)), dtype=dtype)
        head = jax.reshard(decoder.head_weight.astype(dtype), jax.P())
        return jnp.einsum("bsd,vd->bsv", hidden, head, preferred_element_type=jnp.float32)[..., : model.spec.vocabulary]

    return compute(tokens, parameters)
