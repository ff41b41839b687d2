"""Scores of a preference loss's reference, computed once before training, so that no step computes them."""

import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from jaxtune import data, hf
from jaxtune.checkpoint import fingerprint
from jaxtune.columns import REFERENCE
from jaxtune.config.schema import Config
from jaxtune.data.rows.splits import cache_folder
from jaxtune.host.process import compiler_options
from jaxtune.models.decoder import Parameters
from jaxtune.models.head.score import Batch, score
from jaxtune.objectives.document_sums import sum_documents
from jaxtune.objectives.preference import preference
from jaxtune.parallel.layout import P, by_token
from jaxtune.parallel.mesh import data_shards
from jaxtune.scoring.memmap_cache import load_or_compute
from jaxtune.training.assembly import forward_of
from jaxtune.weights.model import Model
from jaxtune.weights.values import read_reference, start_parameters

log = logging.getLogger("jaxtune")


def add_reference_scores(config: Config, model: Model, mesh: jax.sharding.Mesh, rows: data.Rows) -> data.Rows:
    """Add the reference's scores as a column, if preference.precompute_reference is set; else return rows unchanged.

    Scores are cached in the folder of tokenised documents, by a hash of their inputs. Raises UserError as
    `start_parameters` and `read_reference`.
    """
    if config.preference.loss is None or REFERENCE not in preference(config.preference).columns:
        return rows
    file = cache_folder(config) / f"reference-{_key(config, model, rows)}.npy"

    def write(path: Path) -> None:
        log.info("preference.precompute_reference: scoring %d documents", len(rows.documents))
        with path.open("wb") as stream:
            np.save(stream, _scores(config, model, mesh, rows))

    return rows.with_column(REFERENCE, load_or_compute(file, write))


def _key(config: Config, model: Model, rows: data.Rows) -> str:
    """A hash of everything that the scores depend on."""
    folders = [None if config.model.from_scratch else model.folder]
    holds = "adapter_config.json" if config.lora.enabled else "config.json"
    for name in (config.lora.path, config.preference.reference):
        folders += [] if name in (None, "start") else [hf.resolve(name, holds=holds)]
    sections = [dataclasses.asdict(section) for section in (config.model, config.lora, config.quant, config.precision)]
    files = [folder and fingerprint(folder) for folder in folders]
    documents = [rows.documents.key, hashlib.sha256(rows.documents.chosen.tobytes()).hexdigest()]
    # Drawn weights, and drawn parts of adapters, depend on the seed.
    seed = config.train.seed if config.model.from_scratch or model.starts else 0
    parts = [documents, files, sections, seed, config.data.seq_len]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _scores(config: Config, model: Model, mesh: jax.sharding.Mesh, rows: data.Rows) -> np.ndarray:
    """Compute the log-probability of the trained tokens of each document, in nats."""
    trained, _, frozen = start_parameters(model, config)
    if config.preference.reference != "start":
        trained = read_reference(model, config, trained)
    step = jax.jit(_make_step(config, model), compiler_options=compiler_options(config))
    shape = (1, config.train.micro_batch_size * data_shards(mesh), config.data.seq_len)  # (A, B, S): one micro-batch
    sharding = jax.NamedSharding(mesh, P(None, *by_token()))
    values = np.zeros(len(rows.documents), np.float32)
    first = 0
    for after, batch in data.batches(rows, shape, sharding, 0, rows.total(1)):
        scores = np.asarray(step(trained, frozen, batch).addressable_data(0))  # replicated: (rows, documents)
        for row in range(first, after):
            documents = rows.documents_in(row)
            values[documents] = scores[row - first, : len(documents)]
        first = after
    return values


def _make_step(config: Config, model: Model) -> Callable[[Parameters, Parameters, Batch], jax.Array]:
    """Return (trained, frozen, batch of one micro-batch) -> sums of each row's documents, on every device."""
    forward = forward_of(config, model)
    forward = dataclasses.replace(forward, call=forward.call._replace(served=False))

    def step(trained: Parameters, frozen: Parameters, batch: Batch) -> jax.Array:
        micro = jax.tree.map(lambda column: column[0], batch)
        scores = forward.run(score, forward.bind(trained, frozen), micro)
        most = max(2, micro["tokens"].shape[1] // 2)  # a document has two tokens at least
        return jax.reshard(sum_documents(-scores.loss, micro["segment_ids"], most), P())

    return step
