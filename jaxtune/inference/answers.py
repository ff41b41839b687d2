"""What a model writes after prompts: of a Hugging Face folder, an adapter on its base, or a run."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxtune import hf
from jaxtune.config.schema import Config, Data, Dataset, Mesh, Quant
from jaxtune.config.schema import Model as ModelOptions
from jaxtune.data.formats.prompts import Prompt, Prompts, Sample
from jaxtune.errors import UserError
from jaxtune.host.run_folder import RunFolder
from jaxtune.inference.generation import (
    Generate,
    completed,
    ending,
    make_generate,
    stop_tokens,
    stream_text,
    text_of,
    until,
)
from jaxtune.inference.sampling import Manner
from jaxtune.models.decode import Sampling
from jaxtune.models.decoder import Parameters
from jaxtune.parallel.layout import AXES
from jaxtune.parallel.mesh import make_mesh
from jaxtune.weights.model import Model, declare_model, read_base
from jaxtune.weights.trusted_code import with_plugins
from jaxtune.weights.values import initial_parameters, of_model, open_run, read_parameters, tokenizer_folder


class Opened(NamedTuple):
    """A model with its values, and where its tokenizer is."""

    config: Config
    model: Model
    parameters: Parameters
    home: Path


class Answer(NamedTuple):
    """What was written after a prompt; finished: whether the model ended, not max_new_tokens."""

    prompt: Prompt
    text: str
    finished: bool


def open_model(
    name: str,
    mesh: jax.sharding.Mesh,
    adapter: str | None = None,
    step: int | None = None,
    quant: str | None = None,
    plugins: Sequence[str] = (),
) -> Opened:
    """A model for text on a mesh.

    Args:
        name: Its Hugging Face folder or hub id, an adapter's folder, or that of a run.
        mesh: Its devices.
        adapter: The folder of an adapter of the model, which is a base.
        step: The checkpoint of a run; None: the newest good one.
        quant: The format in which the weights of the base are quantized as they are read.
        plugins: That may be run, for a family of one's own; those that a run's config.json names are not.

    Raises:
        UserError: A classifier, or these do not fit each other.
    """
    folder = RunFolder(Path(name))
    if folder.checkpoints.is_dir():
        for flag, value in (("adapter", adapter), ("quant", quant)):
            if value is not None:
                raise UserError(f"--{flag}: {name} is a run, whose own adapter and formats are used")
        _refuse_classifier(name, folder.read_config())
        run = open_run(folder, mesh, step, plugins)
        return Opened(run.config, run.model, {**run.frozen, **run.trained}, run.model.folders.tokenizer)
    if step is not None:
        raise UserError(f"--step={step}: {name} is not a run folder, so it has no checkpoints")
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    # A row length that any axis of the mesh divides, for the checks of a model that is trained.
    plain = Config(model=ModelOptions(dtype=dtype), data=Data(seq_len=mesh.size))
    config = with_plugins(of_model(adapter or name, plain), plugins)
    if adapter is not None and not config.lora.enabled:
        raise UserError(f"--adapter={adapter}: it has no adapter_config.json, so it is not an adapter")
    if adapter is not None:
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, path=name, revision=None))
    config = dataclasses.replace(config, quant=Quant(quant))  # type: ignore[arg-type]
    _refuse_classifier(name, config)
    # Nothing is trained, so everything is stored as model.dtype says.
    model = declare_model(read_base(config), config, mesh, train=False)
    parameters = read_parameters(model, model.whole)
    if config.lora.enabled:
        parameters |= initial_parameters(model, config)
    return Opened(config, model, parameters, tokenizer_folder(model, config))


def _refuse_classifier(name: str, config: Config) -> None:
    """Raises UserError for a run or an adapter whose model has labels; `read_base` does for a whole model."""
    if config.model.head == "classification":
        raise UserError(f"{name} is a classifier: it gives a text one of {config.model.num_labels} labels, and no text")


def mesh_of(entries: Sequence[str]) -> jax.sharding.Mesh:
    """The mesh of entries such as fsdp=4: all devices; without one a single device. Sets it as the current one."""
    if not entries:
        return make_mesh(Mesh(), jax.devices()[:1])
    sizes = {}
    for entry in entries:
        axis, _, size = entry.partition("=")
        if axis not in AXES or axis == "stage" or not size.removeprefix("-").isdigit():
            known = ", ".join(axis for axis in AXES if axis != "stage")
            raise UserError(f"--mesh: {entry!r} is not AXIS=DEVICES, with an axis of {known}")
        if axis in sizes:
            raise UserError(f"--mesh: {axis} is there twice")
        sizes[axis] = int(size)
    return make_mesh(Mesh(**{"fsdp": 1} | sizes))


class Answering:
    """A model that is asked."""

    def __init__(self, opened: Opened, manner: Manner) -> None:
        config, self._manner = opened.config, manner
        self._tokenizer = hf.load_tokenizer(opened.home, config.chat.template, config.data.special_tokens)
        sampling = Sampling(**{name: getattr(manner, name) for name in Sampling._fields})
        dtype = opened.parameters["embed.weight"].dtype
        how = {"max_new_tokens": manner.max_new_tokens, "dtype": dtype, "sampling": sampling, "seed": manner.seed}
        self._generate: Generate = partial(
            make_generate(opened.model.graph, opened.model.spec, **how), opened.parameters
        )
        self._prompts = Prompts(self._tokenizer, config.chat, manner.chat)
        self._stop = stop_tokens(opened.home, self._tokenizer)
        self._most = opened.model.spec.max_positions - manner.max_new_tokens

    def each(self, samples: Iterable[tuple[str, Sample]]) -> Iterator[Answer]:
        """The answer to each sample, in order, several made together. Samples come with where they are from.

        Raises UserError, which says where, for one without a prompt, or with more tokens than the model has room for.
        """
        ended = ending(self._ends(turns=True), self._manner.stop, self._tokenizer)
        at_once, numbered = self._manner.batch_size, enumerate(samples)
        while chunk := list(islice(numbered, at_once)):
            asked = [self._prompt(where, sample) for _, (where, sample) in chunk]
            # Always as many rows, so that one number of them is compiled.
            rows = [asked[min(row, len(asked) - 1)].tokens for row in range(at_once)]
            numbers = [chunk[min(row, len(chunk) - 1)][0] for row in range(at_once)]
            found = completed(self._generate(rows, numbers), len(asked), ended)
            for prompt, completion in zip(asked, found):
                text = prompt.begun + text_of(completion, self._tokenizer, self._manner.stop, prompt.continued)
                yield Answer(prompt, text, completion.finished)

    def stream(self, text: str) -> Iterator[str]:
        """What follows a text, part by part as it becomes certain."""
        prompt = self._prompts(Dataset(), {"prompt": text})
        yield prompt.begun
        tokens = until(self._generate([prompt.tokens]), self._ends(turns=self._manner.chat))
        yield from stream_text(self._tokenizer, tokens, self._manner.stop, prompt.continued)

    def _ends(self, turns: bool) -> frozenset[int]:
        """The tokens that end an answer; `turns`: also the one that ends a turn of the chat template."""
        turn_end = self._prompts.turn_end if turns else None
        return self._stop if turn_end is None else self._stop | {self._tokenizer.added_tokens_encoder[turn_end]}

    def _prompt(self, where: str, sample: Any) -> Prompt:
        try:
            prompt = self._prompts(Dataset(), sample)
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
        if len(prompt.tokens) > self._most:
            raise UserError(
                f"{where}: {len(prompt.tokens)} tokens of prompt, and the model's positions leave {self._most} beside "
                "--max_new_tokens"
            )
        return prompt
