"""Micro-batches of token rows, and a model's logits for them.

B batch (rows), S sequence, V vocabulary, D hidden.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from tiny import VOCABULARY

from jaxtune.columns import further_columns
from jaxtune.models.decoder import bind
from jaxtune.models.forward_options import ForwardOptions, Remat
from jaxtune.models.head.score import hidden_states, score
from jaxtune.objectives.objective import Sums
from jaxtune.parallel.layout import by_token


def tokens(batch: int, sequence: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCABULARY, (batch, sequence))


def make_batch(rows: np.ndarray, mesh, lengths: list[int] | None = None, modules: int = 0) -> dict[str, jax.Array]:
    """Return a micro-batch of rows, each packed with documents of these lengths (default: one), all tokens trained.

    modules: number of multi-token-prediction modules to have further targets for.
    """
    return put_columns(columns_of(rows, lengths, modules), mesh)


def put_columns(columns: dict[str, np.ndarray], mesh) -> dict[str, jax.Array]:
    """Return the columns of a micro-batch on the devices of a mesh."""

    def sharding(name: str) -> jax.NamedSharding:
        return jax.NamedSharding(mesh, jax.P(by_token()[0]) if name == "row" else by_token())

    return {name: jax.device_put(column, sharding(name)) for name, column in columns.items()}


def columns_of(rows: np.ndarray, lengths: list[int] | None = None, modules: int = 0) -> dict[str, np.ndarray]:
    """Return the columns of `make_batch`."""
    batch, sequence = rows.shape
    lengths = lengths or [sequence]
    starts = np.cumsum([0, *lengths])
    fields = {
        name: np.zeros((batch, sequence), np.int32) for name in ("targets", "positions", "segment_ids", "key_start")
    }
    fields["tokens"] = rows.astype(np.int32)
    fields["loss_weight"] = np.zeros((batch, sequence), np.float32)
    fields["key_start"][:] = np.arange(sequence)
    for column in further_columns(modules) if modules else ():
        fields[column.name] = np.zeros((batch, sequence, modules), column.dtype)
    for number, (start, length) in enumerate(zip(starts, lengths), start=1):
        part = slice(start, start + length)
        fields["targets"][:, start : start + length - 1] = rows[:, start + 1 : start + length]
        fields["loss_weight"][:, start : start + length - 1] = 1.0
        fields["positions"][:, part] = np.arange(length)
        fields["segment_ids"][:, part] = number
        fields["key_start"][:, part] = start
        for module in range(min(modules, length - 2)):
            predicting, ahead = slice(start, start + length - 2 - module), module + 2
            fields["further_targets"][:, predicting, module] = rows[:, start + ahead : start + length]
            fields["further_loss_weight"][:, predicting, module] = 1.0
    return fields | {"row": np.arange(batch, dtype=np.int32)}


def compute_logits(model, parameters, batch, dtype=jnp.float32) -> jax.Array:
    """Return logits [B, S, V], computed by the training path."""
    with jax.default_matmul_precision("highest"):
        decoder = bind(model.graph, parameters)
        return logits_of(decoder, hidden_states(decoder, batch, ForwardOptions(dtype))[0])


def logits_of(decoder, hidden: jax.Array) -> jax.Array:
    """Return logits [B, S, V] of hidden states [B, S, D]."""
    head = jax.reshard(decoder.head_weight.astype(hidden.dtype), jax.P())
    logits = jnp.einsum("bsd,vd->bsv", hidden, head, out_sharding=by_token())[..., : decoder.spec.vocabulary]
    cap = decoder.spec.logit_cap
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def sums_and_logits(model, objective, parameters, batch, remat: Remat = "none") -> tuple[Sums, jax.Array]:
    """Return (an objective's sums, logits [B, S, V]) from one forward pass in float32."""
    with jax.default_matmul_precision("highest"):
        decoder, call = bind(model.graph, parameters), ForwardOptions(jnp.dtype("float32"), remat=remat)
        hidden = hidden_states(decoder, batch, call)
        scores = score(decoder, batch, call, hidden, objective.score, head_gradient=True)
        return objective.loss(scores, batch), logits_of(decoder, hidden[0])


def logits_on_host(model, parameters, batch, dtype=jnp.float32) -> np.ndarray:
    """Return `compute_logits`, compiled, as a numpy array."""
    return np.asarray(jax.jit(partial(compute_logits, model, dtype=dtype))(parameters, batch).astype(jnp.float32))
