"""How far an exported model is from the run that it was written from: by its loss, or by its logits."""

import dataclasses
import logging
import math
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxtune import data, hf
from jaxtune.config.schema import Config, Memory
from jaxtune.errors import UserError
from jaxtune.evaluation.evaluator import make_evaluate
from jaxtune.models.decoder import Parameters, bind
from jaxtune.models.forward_options import Call
from jaxtune.models.score import hidden_states, logits
from jaxtune.parallel.layout import by_token
from jaxtune.parallel.mesh import data_shards
from jaxtune.training.assembly import task_of
from jaxtune.weights.model import Model, declare_model, read_base
from jaxtune.weights.values import of_model, read_parameters

log = logging.getLogger("jaxtune")

PROBE = 64  # random tokens a row, to compare logits
TRAINING_BATCHES = 4  # whose loss is compared where there are no validation data


def loss_difference(model: Model, parameters: Parameters, config: Config, output: Path, kind: str) -> str:
    """The loss of a run's model, and that of its export, read again from its folder, in words.

    Over the run's validation data, or without any over a few batches of its training data; where neither can be had,
    or what was trained on are preferences or prompts, their logits are compared.

    kind: what the export is quantized in.
    """
    if not _fits(output):
        return _no_room(output) + f"; afterwards: python -m jaxtune.evaluate --config=... --model={output}"
    where, rows = _rows(model, config)
    exported_config = dataclasses.replace(of_model(str(output), config), memory=Memory())  # nothing waits on the host
    mesh = jax.sharding.get_mesh()
    exported = declare_model(read_base(exported_config), exported_config, mesh, train=False, low_precision=False)
    after = read_parameters(exported, exported.parameters)
    if not rows:
        return _logits_apart(model, parameters, exported, after, output)
    if where == "training":
        config, exported_config = (
            dataclasses.replace(one, eval=dataclasses.replace(one.eval, max_batches=TRAINING_BATCHES))
            for one in (config, exported_config)
        )
    trained = {name: parameters[name] for name in model.trained}
    frozen = {name: value for name, value in parameters.items() if name not in trained}
    losses = [
        make_evaluate(one_config, one, rows, mesh)(*of_one, {})["eval_loss"]
        for one, one_config, of_one in (
            (model, config, (trained, frozen)),
            (exported, exported_config, ({}, after)),
        )
    ]
    if not all(map(math.isfinite, losses)):
        raise UserError(f"{output} is not usable: its loss, or that of the run, is not finite: {losses}")
    return f"{where} loss {losses[0]:.4f} as trained, {losses[1]:.4f} as written in {kind}"


def _rows(model: Model, config: Config) -> tuple[str, dict[str, data.Rows]]:
    """("validation" or "training", rows by the name of their set); no rows where there are none to take a loss of."""
    if config.rollout.rewards or config.preference.loss is not None:
        return "", {}
    tokenizer = hf.load_tokenizer(model.folders.tokenizer, config.chat.template, config.data.special_tokens)
    try:
        where, documents = "validation", data.open_validation(config, tokenizer, model.spec.vocabulary)
        if not documents and not config.data.streaming:
            where, documents = "training", {"": data.open_documents(config, tokenizer, model.spec.vocabulary)[0]}
        return where, data.rows_to_evaluate(documents, config, task_of(model, config).columns)
    except UserError as error:
        log.warning("the run's data cannot be read again, so that logits are compared, not losses: %s", error)
        return "", {}


def merge_difference(model: Model, parameters: Parameters, config: Config, output: Path) -> str:
    """How far the logits of a merged export are from those of the quantized base with its adapter, in words."""
    if not _fits(output):
        return _no_room(output)
    merged = dataclasses.replace(config.model, path=str(output), revision=None, **hf.OF_ONE_MODEL)
    options = Config(model=merged, data=config.data, precision=config.precision)
    exported = declare_model(read_base(options), options, jax.sharding.get_mesh(), train=False, low_precision=False)
    after = read_parameters(exported, exported.parameters)
    return "merged onto the dequantized base: " + _logits_apart(model, parameters, exported, after, output)


def _fits(output: Path) -> bool:
    """Whether the weights of an export fit beside what is on the devices."""
    memory = jax.local_devices()[0].memory_stats() or {}
    free = memory.get("bytes_limit", math.inf) - memory.get("bytes_in_use", 0)
    return _size(output) / jax.sharding.get_mesh().size <= free


def _size(output: Path) -> int:
    """Bytes of its weights."""
    return sum(file.stat().st_size for file in hf.weight_files(output))


def _no_room(output: Path) -> str:
    return f"not compared: the exported model does not fit beside the run's ({_size(output) / 1e9:.1f} GB)"


def _logits_apart(model: Model, before: Parameters, exported: Model, after: Parameters, output: Path) -> str:
    """How far the logits of two models are apart, in words.

    Both are computed in float32: what differs is the rounding of what was written, not that of activations.
    """
    tokens = jax.random.randint(
        jax.random.key(0), (data_shards(jax.sharding.get_mesh()), PROBE), 0, model.spec.vocabulary
    )
    ours, theirs = _logits(model, before, tokens), _logits(exported, after, tokens)
    if not (jnp.isfinite(ours).all() and jnp.isfinite(theirs).all()):
        raise UserError(f"{output} is not usable: its logits, or those of the run it was merged from, are not finite")
    return (
        f"over {tokens.size} random tokens the logits, of which the largest is {jnp.abs(ours).max():.3g}, differ by "
        f"{jnp.abs(theirs - ours).max():.2g} at most"
    )


def _logits(model: Model, parameters: Parameters, tokens: jax.Array) -> jax.Array:
    """Float32 logits of rows of one document each."""

    @jax.jit
    def compute(tokens, parameters):
        tokens = jax.reshard(tokens, by_token())
        positions = jax.reshard(jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape), by_token())
        decoder, call = bind(model.graph, parameters), Call(jnp.dtype("float32"))
        of_one = {"key_start": jnp.zeros_like(tokens), "segment_ids": jnp.ones_like(tokens)}
        hidden, _ = hidden_states(decoder, {"tokens": tokens, "positions": positions, **of_one}, call)
        return logits(decoder, hidden, call.dtype)

    with jax.default_matmul_precision("highest"):  # no TF32 on a GPU
        return compute(tokens, parameters)
