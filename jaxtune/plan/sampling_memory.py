"""The memory of sampling the answers of a step: weights in the dtype of products, and the cache of keys and values."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtune.columns import image_columns
from jaxtune.config.schema import Config
from jaxtune.inference.decode import Decoding, rules_of_decoding
from jaxtune.inference.generation import (
    FEWEST_ROWS,
    DecodePrograms,
    decode_programs,
    decoding_weights,
    padded_shape,
    row_shards,
)
from jaxtune.inference.prompt_images import padded_patches
from jaxtune.models.parameters import abstract
from jaxtune.parallel.layout import RULES
from jaxtune.precision.recipes import recipe_of
from jaxtune.precision.served import ServedWeight
from jaxtune.rollout.completers import completions_at_once, decode_options
from jaxtune.training.assembly import Program
from jaxtune.training.memory import device_bytes
from pallas_kernels import aot


def sampling_bytes(run: Program, config: Config, gpu: str, mesh: jax.sharding.Mesh) -> int:
    """Return the bytes on a device that sampling takes in addition to the run's state; 0 if it samples nothing there.

    Prompts are taken to be as long as their longest (data.seq_len less rollout.max_new_tokens). `mesh` is one of
    compile-only devices of the GPU.
    """
    if not config.samples or config.rollout.server is not None:
        return 0
    stored, weights = abstract(run.model.parameters), _cast(run, config, mesh)
    copies = sum(device_bytes(leaf) for name in stored for leaf in _copies_of(stored[name], weights[name]))
    held = sum(map(device_bytes, jax.tree.leaves(weights)))
    sampling = _sampling(run, config, mesh)
    peaks = [one.memory.peak - held for one in _compile(sampling, gpu, mesh)]
    return copies + max(*peaks, _bytes_of_leaving(sampling, mesh))


def compile_sampling(
    run: Program, config: Config, gpu: str, mesh: jax.sharding.Mesh
) -> tuple[aot.Compiled, aot.Compiled]:
    """Compile for the GPU what reads the prompts, and what adds a token to each completion."""
    return _compile(_sampling(run, config, mesh), gpu, mesh)


class _Sampling(NamedTuple):
    """The programs that sample, and their abstract arguments.

    Attributes:
        programs: the programs.
        prompts: of the prompts, padded.
        images: the columns of their images, if the model sees: vision.patches_per_row, rounded up.
        of_rows: of integers, one a row.
        decoding: after the prompts.
        weights: the parameters.
    """

    programs: DecodePrograms
    prompts: jax.ShapeDtypeStruct
    images: tuple[dict[str, jax.ShapeDtypeStruct], ...]
    of_rows: jax.ShapeDtypeStruct
    decoding: Decoding
    weights: dict[str, Any]


def _sampling(run: Program, config: Config, mesh: jax.sharding.Mesh) -> _Sampling:
    model, weights = run.model, _cast(run, config, mesh)
    how = decode_options(config, recipe_of(config.precision, model.linears).dtype)
    with jax.set_mesh(mesh):
        longest = config.data.seq_len - config.rollout.max_new_tokens
        rows, length = padded_shape(completions_at_once(config, mesh), longest)
        programs = decode_programs(model.graph, model.spec, **how)
        prompts, of_rows = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((rows, length), (rows,)))
        images, vision, patches = (), model.spec.vision, config.vision.patches_per_row
        if vision is not None and patches is not None:
            columns = image_columns(vision.layout, padded_patches(patches, vision.layout))
            images = ({one.name: jax.ShapeDtypeStruct(one.shape(rows, length), one.dtype) for one in columns},)
        with RULES(rules_of_decoding(RULES.value)):
            _, decoding = jax.eval_shape(programs.first, prompts, of_rows, of_rows, of_rows, weights, *images)
    return _Sampling(programs, prompts, images, of_rows, decoding, weights)


def _compile(sampling: _Sampling, gpu: str, mesh: jax.sharding.Mesh) -> tuple[aot.Compiled, aot.Compiled]:
    programs, prompts, images, of_rows, decoding, weights = sampling
    rest = (of_rows, of_rows, weights)  # the numbers of completions, the indices of tokens, the parameters
    with RULES(rules_of_decoding(RULES.value)):
        return (
            aot.compile_for(gpu, programs.first, prompts, of_rows, *rest, *images, mesh=mesh),
            aot.compile_for(gpu, programs.following, of_rows, decoding, *rest, mesh=mesh),
        )


def _bytes_of_leaving(sampling: _Sampling, mesh: jax.sharding.Mesh) -> int:
    """The bytes on a device when half of the rows leave (`decode.keep_rows`): one cache after another is copied."""
    with jax.set_mesh(mesh):
        if sampling.of_rows.shape[0] // row_shards() < 2 * FEWEST_ROWS:
            return 0
    caches = [device_bytes(cache) for cache in jax.tree.leaves(sampling.decoding.cache)]
    return sum(caches) + max(caches) // 2


def _copies_of(stored: Any, weight: Any) -> list[jax.ShapeDtypeStruct]:
    """The arrays of a weight that sampling makes from the stored one."""
    if isinstance(weight, ServedWeight):
        return jax.tree.leaves(weight.served)
    return [weight] if isinstance(stored, jax.ShapeDtypeStruct) and weight.dtype != stored.dtype else []


def _cast(run: Program, config: Config, mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """The abstract parameters that products take while sampling."""
    dtype = recipe_of(config.precision, run.model.linears).dtype
    with jax.set_mesh(mesh):
        return jax.eval_shape(partial(decoding_weights, run.model, dtype=dtype), abstract(run.model.parameters))
