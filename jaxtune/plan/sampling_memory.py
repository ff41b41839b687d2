"""The memory of sampling the answers of a step: weights in the dtype of products, and the cache of keys and values."""

from functools import partial

import jax
import jax.numpy as jnp

from jaxtune.config.schema import Config
from jaxtune.inference.decode import rules_of_decoding
from jaxtune.inference.generation import cast_weights, decode_programs, padded_shape
from jaxtune.models.parameters import abstract
from jaxtune.parallel.layout import RULES
from jaxtune.precision.recipes import recipe_of
from jaxtune.rollout.completers import completions_at_once, decode_options
from jaxtune.training.assembly import Program
from jaxtune.training.memory import device_bytes
from pallas_kernels import aot


def sampling_bytes(run: Program, config: Config, gpu: str, mesh: jax.sharding.Mesh) -> int:
    """Return the bytes on a device that sampling takes besides the run's state; 0 if it samples nothing there.

    Prompts are taken to be as long as their longest (data.seq_len less rollout.max_new_tokens). Both programs are
    compiled for the GPU: the one that reads the prompts, and the one that adds a token.
    """
    if not config.samples or config.rollout.server is not None:
        return 0
    model, dtype = run.model, recipe_of(config.precision, run.model.linears).dtype
    kept = abstract(model.parameters)
    with jax.set_mesh(mesh):
        weights = jax.eval_shape(partial(cast_weights, model, dtype=dtype), kept)
        new = config.rollout.max_new_tokens
        rows, length = padded_shape(completions_at_once(config, mesh), config.data.seq_len - new)
        programs = decode_programs(model.graph, model.spec, **decode_options(config, dtype))
    of_rows = jax.ShapeDtypeStruct((rows,), jnp.int32)
    prompts = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    with RULES(rules_of_decoding(RULES.value)):
        with jax.set_mesh(mesh):
            _, decoding = jax.eval_shape(programs.first, prompts, of_rows, of_rows, of_rows, weights)
        compiled = (
            aot.compile_for(gpu, programs.first, prompts, of_rows, of_rows, of_rows, weights, mesh=mesh),
            aot.compile_for(gpu, programs.following, of_rows, decoding, of_rows, of_rows, weights, mesh=mesh),
        )
    cast = (name for name, leaf in kept.items() if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct))
    copies = sum(device_bytes(weights[name]) for name in cast if weights[name].dtype != kept[name].dtype)
    held = sum(map(device_bytes, jax.tree.leaves(weights)))
    return copies + max(one.memory.peak - held for one in compiled)
