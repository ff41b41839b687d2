"""A teacher's top-k tokens for each target, computed once before training, so that no step runs the teacher."""

import dataclasses
import hashlib
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from jaxtune import data, hf
from jaxtune.checkpoint import fingerprint
from jaxtune.columns import teacher_columns
from jaxtune.config.schema import Config, MemoryOptions
from jaxtune.data.rows.splits import cache_folder
from jaxtune.errors import UserError, format_bytes
from jaxtune.host.process import compiler_options
from jaxtune.models.decoder import Decoder, Parameters
from jaxtune.models.forward_options import ForwardOptions
from jaxtune.models.head.divergence import likeliest
from jaxtune.models.head.score import Batch, hidden_states
from jaxtune.models.options import ExpertsOptions
from jaxtune.objectives.options import is_server
from jaxtune.parallel.layout import P, by_token
from jaxtune.parallel.mesh import data_shards
from jaxtune.precision.options import PrecisionOptions
from jaxtune.quant.options import QuantOptions
from jaxtune.scoring.memmap_cache import load_or_compute
from jaxtune.tokenizer_type import Tokenizer
from jaxtune.training.assembly import forward_of
from jaxtune.weights.base import Base, read_base
from jaxtune.weights.model import Model, declare_model
from jaxtune.weights.values import check_files, config_for_model, initial_parameters, read_parameters, tokenizer_folder

log = logging.getLogger("jaxtune")
BASE = "base"  # the value of distill.teacher for the student without its adapters
SPAN = 2 * 4096  # bytes: a span of targets can take two partly filled blocks of the file, at its start and its end


class Teacher(NamedTuple):
    """A declared teacher; its weights are not read yet.

    Attributes:
        config: of the teacher, as if it was a run.
        model: the declared model.
        vocabulary: number of tokens for which both teacher and student have embeddings. Either may have unused rows.
    """

    config: Config
    model: Model
    vocabulary: int


def configs_of_teachers(config: Config) -> dict[str, Config]:
    """Return the config of a run with each of its teachers, as if distill.teacher was that one, by its name."""
    return {
        name: dataclasses.replace(config, distill=dataclasses.replace(config.distill, teacher=teacher))
        for name, teacher in config.teachers.items()
    }


def declare_teachers(
    config: Config, tokenizer: Tokenizer, vocabulary: int, mesh: jax.sharding.Mesh
) -> dict[str, Teacher | None]:
    """Return the teachers of a run by their names; arguments and errors as in `declare_teacher`."""
    return {
        name: declare_teacher(one, tokenizer, vocabulary, mesh) for name, one in configs_of_teachers(config).items()
    }


def declare_teacher_model(
    config: Config, mesh: jax.sharding.Mesh, read: Callable[[Config], Base] = read_base
) -> tuple[Config, Model] | None:
    """Declare the model distill.teacher on the mesh of its student; None without one, for a server, and for the base.

    Returns the teacher's config, as if it was a run, and its model. `read` reads what the files of a base say. Raises
    UserError if the teacher is not a language model, or does not fit the mesh.
    """
    name = config.distill.teacher
    if name is None or name == BASE or is_server(name):
        return None
    try:
        teacher_config = _config_of(name, config)
        return teacher_config, declare_model(
            read(teacher_config), teacher_config, mesh, train=False, low_precision=False
        )
    except UserError as error:
        raise UserError(f"distill.teacher={name!r}: {error}") from error


def declare_teacher(config: Config, tokenizer: Tokenizer, vocabulary: int, mesh: jax.sharding.Mesh) -> Teacher | None:
    """Declare the teacher as `declare_teacher_model`, and check its files.

    tokenizer, vocabulary: the student's. Raises UserError as `declare_teacher_model`, and if the teacher has other
    tokens.
    """
    declared = declare_teacher_model(config, mesh)
    if declared is None:
        return None
    name, (teacher_config, model) = config.distill.teacher, declared
    try:
        check_files(model, teacher_config)
        teacher_tokenizer = hf.load_tokenizer(tokenizer_folder(model, teacher_config))
    except UserError as error:
        raise UserError(f"distill.teacher={name!r}: {error}") from error
    known = teacher_tokenizer.get_vocab()
    differ = {token: number for token, number in tokenizer.get_vocab().items() if known.get(token) != number}
    if differ:
        token, number = min(differ.items(), key=lambda item: item[1])
        instead = f"token {known[token]} of the teacher" if token in known else "unknown to the teacher"
        raise UserError(
            f"distill.teacher={name!r} has another tokenizer than model.path={config.model.path!r}: {len(differ)} of "
            f"the student's tokens differ, such as {token!r}, which is token {number} and {instead}; take a teacher of "
            "the student's family, and data.special_tokens that both have"
        )
    vocabulary = min(vocabulary, model.spec.vocabulary)
    check_top_k(config.distill.top_k, vocabulary)
    return Teacher(teacher_config, model, vocabulary)


def check_top_k(top_k: int, vocabulary: int) -> None:
    """Raise UserError if distill.top_k is more than the number of tokens."""
    if top_k > vocabulary:
        raise UserError(f"distill.top_k={top_k}: there are {vocabulary} tokens")


def _config_of(name: str, config: Config) -> Config:
    """The teacher's config: the student's, without the options that change the student's layers."""
    low = config.precision.recipe in ("fp8_hybrid", "nvfp4")
    whole = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, special_tokens=()),
        train=dataclasses.replace(config.train, freeze=None),
        quant=QuantOptions(),
        experts=ExpertsOptions(),
        memory=MemoryOptions(remat="none"),  # no backward pass
        precision=PrecisionOptions("bf16" if low else config.precision.recipe),
    )
    of_teacher = config_for_model(name, whole)
    if name != config.model.path:
        return of_teacher
    return dataclasses.replace(of_teacher, model=dataclasses.replace(of_teacher.model, revision=config.model.revision))


def read_weights(teacher: Teacher) -> Parameters:
    """Read the weights of a teacher, and of its adapters if it has some. Raises UserError as `read_parameters`."""
    weights = read_parameters(teacher.model, teacher.model.whole)
    if teacher.config.lora.enabled:
        weights |= initial_parameters(teacher.model, teacher.config)
    return weights


def add_teacher_columns(
    teacher: Teacher | None, mesh: jax.sharding.Mesh, feed: data.Feed | data.PromptFeed
) -> data.Feed | data.PromptFeed:
    """Add the teacher's columns to the training rows of the feed; prompts, or a feed without a teacher, are unchanged.

    They are cached in the folder of tokenised documents, by a hash of their inputs. Raises UserError as
    `read_parameters`, and if the disk is too full.
    """
    if teacher is None or isinstance(feed, data.PromptFeed):
        return feed
    assert isinstance(feed, data.Feed) and isinstance(feed.rows, data.Rows), "config.checks refuses others"
    used = min(feed.rows.total(1), feed.total_steps * feed.rows_per_step)  # less than an epoch if the run is
    return dataclasses.replace(feed, rows=_with_columns(teacher, mesh, feed.rows, used))


def _with_columns(teacher: Teacher, mesh: jax.sharding.Mesh, rows: data.Rows, used: int) -> data.Rows:
    """Add the teacher's columns to the rows; they are computed for the first `used` rows, which the run needs."""
    config, options = teacher.config, teacher.config.distill
    file = cache_folder(config) / f"teacher-{_key(teacher, rows, used)}.npy"

    def write(path: Path) -> None:
        targets, spans = np.sum([_count_trained(rows, row) for row in range(used)], axis=0)
        needed, free = targets * _record(config).itemsize + spans * SPAN, shutil.disk_usage(path.parent).free
        room = f"{format_bytes(needed)} in {path.parent}"
        if needed > free:
            raise UserError(
                f"distill.teacher: the distill.top_k={options.top_k} likeliest tokens for {targets:,} targets take "
                f"{room}, which has {format_bytes(free)} free; lower distill.top_k, or set data.cache_dir"
            )
        log.info("distill.teacher: scoring %d targets in %d rows, to keep %s", targets, used, room)
        _write(path, teacher, mesh, rows, used)

    values = load_or_compute(file, write)
    for column in teacher_columns(options.top_k):
        rows = rows.with_column(column, values[column.name])
    return rows


def _count_trained(rows: data.Rows, row: int) -> tuple[int, int]:
    """(number of trained targets in a row, number of contiguous spans that they form)."""
    targets = spans = 0
    for document, start, _, count in rows.targets_in(row):
        trained = rows.documents.values("loss_weight", document, start, start + count) != 0
        targets += int(np.count_nonzero(trained))
        spans += int(np.count_nonzero(np.diff(trained, prepend=False) & trained))  # counts where spans begin
    return targets, spans


def _record(config: Config) -> np.dtype:
    """The record of a token in the file, 8 * distill.top_k + 4 bytes; all columns of a row are contiguous."""
    columns = teacher_columns(config.distill.top_k)
    return np.dtype([(column.name, column.dtype, (column.width or 1,)) for column in columns])


def _key(teacher: Teacher, rows: data.Rows, used: int) -> str:
    """A hash of everything that the teacher's columns depend on."""
    config, options = teacher.config, teacher.config.distill
    adapter = config.lora.path and fingerprint(hf.resolve(config.lora.path, holds="adapter_config.json"))
    documents = [rows.documents.key, hashlib.sha256(rows.documents.chosen.tobytes()).hexdigest()]
    # A run of less than one epoch needs only some documents, or parts of documents.
    targets = () if used == rows.total(1) else (target for row in range(used) for target in rows.targets_in(row))
    needed = sorted((document, start, count) for document, start, _, count in targets)
    how = [options.temperature, options.top_k, teacher.vocabulary, config.precision.recipe, config.model.dtype]
    cuts = [config.data.seq_len, config.data.truncation]
    scale = [config.lora.alpha, config.lora.use_rslora]
    parts = [documents, hashlib.sha256(json.dumps(needed).encode()).hexdigest(), cuts, how]
    parts += [fingerprint(teacher.model.folder), adapter, scale]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]  # 128 bits


def _write(path: Path, teacher: Teacher, mesh: jax.sharding.Mesh, rows: data.Rows, used: int) -> None:
    """Write an array with a record for every token of the documents; records of untrained tokens stay empty."""
    config, parameters = teacher.config, read_weights(teacher)
    step = jax.jit(_make_step(teacher), compiler_options=compiler_options(config))
    shape = (1, config.train.micro_batch_size * data_shards(mesh), config.data.seq_len)  # (micro-batches, b, s)
    sharding = jax.NamedSharding(mesh, P(None, *by_token()))
    length = int(sum(part.offsets[-1] for part in rows.documents.parts))  # tokens of all documents
    # The file is sparse: records of untrained tokens take no space on the disk.
    values = np.lib.format.open_memmap(path, "w+", _record(config), (length,))
    first_token, first, tenths_logged = rows.documents.first_token, 0, 0
    for after, batch in data.batches(rows, shape, sharding, 0, used, config.data):
        columns = {name: np.asarray(array.addressable_data(0)) for name, array in step(parameters, batch).items()}
        place = columns.pop("place", None)
        for number, row in enumerate(range(first, min(after, used))):
            # Dealt rows: `place` has the position of each element in the row; argsort gives the element of a position.
            order = np.arange(config.data.seq_len) if place is None else np.argsort(place[number])
            for document, start, position, count in rows.targets_in(row):
                weights = rows.documents.values("loss_weight", document, start, start + count)
                trained = np.flatnonzero(weights)
                for name, array in columns.items():
                    values[name][first_token[document] + start + trained] = array[number, order[position + trained]]
        first = after
        if 10 * first // used > tenths_logged:  # about ten lines in all
            tenths_logged = 10 * first // used
            log.info("distill.teacher: %d of %d rows", min(first, used), used)
    values.flush()


def _make_step(teacher: Teacher) -> Callable[[Parameters, Batch], dict[str, jax.Array]]:
    """Return (parameters, batch of one micro-batch) -> the teacher's columns, and `place` of dealt rows, replicated."""
    options, forward = teacher.config.distill, forward_of(teacher.config, teacher.model)

    def score(decoder: Decoder, micro: Batch, call: ForwardOptions) -> tuple[jax.Array, jax.Array]:
        hidden, _ = hidden_states(decoder, micro, call)
        return likeliest(decoder, hidden, call.dtype, options.top_k, teacher.vocabulary, options.temperature)

    def step(parameters: Parameters, batch: Batch) -> dict[str, jax.Array]:
        micro = jax.tree.map(lambda column: column[0], batch)
        top = forward.run(score, forward.bind({}, parameters), micro)
        columns = {column.name: values for column, values in zip(teacher_columns(options.top_k), top)}
        columns |= {"place": micro["place"]} if "place" in micro else {}
        return {name: jax.reshard(values, P()) for name, values in columns.items()}

    return step
