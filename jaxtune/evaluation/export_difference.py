"""Comparison of an exported model with the run that wrote it, by loss or by logits."""

import dataclasses
import logging
import math
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxtune import data, hf
from jaxtune.config.schema import Config, MemoryOptions
from jaxtune.errors import UserError, format_bytes
from jaxtune.evaluation.evaluator import make_evaluate
from jaxtune.models.decoder import Parameters, bind
from jaxtune.models.forward_options import ForwardOptions
from jaxtune.models.head.score import hidden_states, logits
from jaxtune.parallel.layout import by_token
from jaxtune.parallel.mesh import data_shards
from jaxtune.precision.served import ServedWeight
from jaxtune.training.assembly import open_images, task_of
from jaxtune.weights.base import read_base
from jaxtune.weights.model import Model, declare_model
from jaxtune.weights.served_linears import serve_weights
from jaxtune.weights.values import config_for_model, read_parameters

log = logging.getLogger("jaxtune")

PROBE = 64  # random tokens in a row for the comparison of logits
TRAINING_BATCHES = 4  # batches whose loss is compared if there is no validation data


def loss_difference(model: Model, parameters: Parameters, config: Config, output: Path, kind: str) -> str:
    """Describe the loss of a run's model and the loss of its export, which is read again from its folder.

    The loss is over the run's validation data, or over a few batches of its training data if it has none. If neither is
    available, or if the run trained on preferences or prompts, the logits are compared instead.

    `kind`: the format the export is quantized in.
    """
    if not _fits(output):
        return _no_room(output) + f"; compare afterwards: python -m jaxtune.evaluate --config=... --model={output}"
    where, rows = _rows(model, config)
    exported_config = dataclasses.replace(
        config_for_model(str(output), config), memory=MemoryOptions()
    )  # without offloading
    mesh = jax.sharding.get_mesh()
    exported = declare_model(read_base(exported_config), exported_config, mesh, train=False, low_precision=False)
    after = read_parameters(exported, exported.parameters)
    if config.serve.activations is not None and kind == config.serve.format:
        after |= {
            name: ServedWeight(after[name], None, trained=False, rounds_inputs=True) for name in exported.quantized
        }
    if not rows:
        return _compare_logits(model, parameters, exported, after, output)
    if where == "training":
        config, exported_config = (
            dataclasses.replace(one, eval=dataclasses.replace(one.eval, max_batches=TRAINING_BATCHES))
            for one in (config, exported_config)
        )
    trained = {name: parameters[name] for name in model.trained}
    frozen = {name: value for name, value in parameters.items() if name not in trained}
    losses = [
        make_evaluate(one_config, one, rows, mesh)(*values, {})["eval_loss"]
        for one, one_config, values in (
            (model, config, (trained, frozen)),
            (exported, exported_config, ({}, after)),
        )
    ]
    if not all(map(math.isfinite, losses)):
        raise UserError(f"{output} is not usable: the run's loss or its own is not finite: {losses}")
    return f"{where} loss {losses[0]:.4f} as trained, {losses[1]:.4f} as written in {kind}"


def _rows(model: Model, config: Config) -> tuple[str, dict[str, data.Rows]]:
    """Return ("validation" or "training", rows by the name of their set), without rows if no loss can be computed."""
    if config.samples or config.preference.loss is not None:
        return "", {}
    tokenizer = hf.load_tokenizer(model.folders.tokenizer, config.chat.template, config.data.special_tokens)
    try:
        opened = config, tokenizer, model.spec.vocabulary, open_images(model, config)
        where, documents = "validation", data.open_validation(*opened)
        if not documents and not config.data.streaming:
            where, documents = "training", {"": data.open_documents(*opened)[0]}
        return where, data.rows_to_evaluate(documents, config, task_of(model, config).columns)
    except UserError as error:
        log.warning("the run's data cannot be read again, so logits are compared instead of losses: %s", error)
        return "", {}


def merge_difference(model: Model, parameters: Parameters, config: Config, output: Path) -> str:
    """Describe how far a merged export's logits are from the logits of the quantized base with its adapter."""
    if not _fits(output):
        return _no_room(output)
    merged = dataclasses.replace(config.model, path=str(output), revision=None, **hf.SINGLE_MODEL_DEFAULTS)
    options = Config(model=merged, data=config.data, precision=config.precision)
    exported = declare_model(read_base(options), options, jax.sharding.get_mesh(), train=False, low_precision=False)
    after = read_parameters(exported, exported.parameters)
    return "merged onto the dequantized base: " + _compare_logits(model, parameters, exported, after, output)


def _fits(output: Path) -> bool:
    """Whether the weights of an export fit in the devices' free memory."""
    memory = jax.local_devices()[0].memory_stats() or {}  # CPUs have no statistics
    free = memory.get("bytes_limit", math.inf) - memory.get("bytes_in_use", 0)
    # The export is sharded over all devices.
    return _size(output) / jax.sharding.get_mesh().size <= free


def _size(output: Path) -> int:
    """Return the bytes of an export's weights."""
    return sum(file.stat().st_size for file in hf.weight_files(output))


def _no_room(output: Path) -> str:
    return f"not compared: the exported model does not fit next to the run's ({format_bytes(_size(output), 1)})"


def _compare_logits(model: Model, before: Parameters, exported: Model, after: Parameters, output: Path) -> str:
    """Describe how far the logits of two models differ.

    Both are computed in float32, so that they differ by the rounding of the written weights, not of activations.
    """
    tokens = jax.random.randint(
        jax.random.key(0), (data_shards(jax.sharding.get_mesh()), PROBE), 0, model.spec.vocabulary
    )
    ours, theirs = _logits(model, serve_weights(model.linears, before), tokens), _logits(exported, after, tokens)
    if not (jnp.isfinite(ours).all() and jnp.isfinite(theirs).all()):
        raise UserError(f"{output} is not usable: its logits or the logits of the run are not finite")
    return (
        f"over {tokens.size} random tokens the logits, at most {jnp.abs(ours).max():.3g} in magnitude, differ by "
        f"{jnp.abs(theirs - ours).max():.2g} at most"
    )


def _logits(model: Model, parameters: Parameters, tokens: jax.Array) -> jax.Array:
    """Return float32 logits of rows of one document each."""

    @jax.jit
    def compute(tokens, parameters):
        tokens = jax.reshard(tokens, by_token())
        positions = jax.reshard(jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape), by_token())
        decoder, call = bind(model.graph, parameters), ForwardOptions(jnp.dtype("float32"))
        one_document = {"key_start": jnp.zeros_like(tokens), "segment_ids": jnp.ones_like(tokens)}
        hidden, _ = hidden_states(decoder, {"tokens": tokens, "positions": positions, **one_document}, call)
        return logits(decoder, hidden, call.dtype)

    with jax.default_matmul_precision("highest"):  # no TF32 on a GPU
        return compute(tokens, parameters)
