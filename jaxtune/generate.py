"""Continue prompts with a Hugging Face folder, a PEFT adapter or a run: one to the terminal, or a file of them.

    python -m jaxtune.generate --model=runs/quickstart/export --prompt="def "
    python -m jaxtune.generate --model=MODEL --adapter=runs/mine/export --input=prompts.jsonl --output=answers.jsonl

Samples of --input have a column `prompt`, text or messages, or `messages`, of which an answer at the end is left out.
A line of the output is the sample with `completion`, and `finish_reason`: stop, or length.
"""

import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TextIO, get_args, get_type_hints

import jax
from absl import flags

from jaxtune import command, hf
from jaxtune.config.schema import Config, Data, Dataset, Mesh, Quant
from jaxtune.config.schema import Model as ModelOptions
from jaxtune.data.prompts import Prompt, Prompts
from jaxtune.data.sources import open_source
from jaxtune.errors import UserError
from jaxtune.models.decode import Sampling
from jaxtune.models.decoder import Parameters
from jaxtune.parallel.layout import AXES
from jaxtune.parallel.mesh import make_mesh
from jaxtune.run.folder import RunFolder
from jaxtune.run.generation import Generate, completed, ending, make_generate, stop_tokens, stream_text, text_of, until
from jaxtune.run.model import Model, declare_model, read_base
from jaxtune.run.values import initial_parameters, of_model, open_run, read_parameters, tokenizer_folder


def _define_flags(values: flags.FlagValues) -> None:
    text = partial(flags.DEFINE_string, flag_values=values)
    number = partial(flags.DEFINE_float, flag_values=values)
    whole = partial(flags.DEFINE_integer, flag_values=values)
    text("model", None, "Hugging Face folder, hub id, adapter, or run folder", required=True)
    text("adapter", None, "folder of a PEFT adapter of --model, a base")
    text("prompt", None, "text to continue, or to answer with --chat")
    text("input", None, "file of prompts: jsonl, json, csv, parquet, or a dataset on the hub")
    text("output", None, "JSON lines file for what follows the prompts of --input; default: the terminal")
    flags.DEFINE_bool("chat", False, "put prompts that are text into the tokenizer's chat template", flag_values=values)
    whole("max_new_tokens", 256, "maximum number of tokens to add", lower_bound=1)
    number("temperature", 0.7, "0 takes the likeliest token", lower_bound=0.0)
    number("top_p", 0.95, "only the likeliest tokens of this total probability", lower_bound=0.0, upper_bound=1.0)
    whole("top_k", None, "only so many of the likeliest tokens", lower_bound=1)
    number("min_p", 0.0, "only tokens of this share of the likeliest one's probability", lower_bound=0, upper_bound=1)
    number(
        "repetition_penalty", 1.0, "above 1, tokens that were there are less likely", lower_bound=0.01, upper_bound=99
    )
    flags.DEFINE_multi_string("stop", [], "text that ends what is made; may be given several times", flag_values=values)
    whole("seed", 0, "seed of the sampling", lower_bound=0, upper_bound=2**31 - 1)
    whole("batch_size", 8, "prompts of --input that are continued together", lower_bound=1)
    whole("step", None, "checkpoint of a run; default: the newest good one")
    formats = get_args(get_args(get_type_hints(Quant)["format"])[0])
    flags.DEFINE_enum("quant", None, formats, "quantize the weights of the base as they are read", flag_values=values)
    flags.DEFINE_list("mesh", [], "devices of each axis, such as fsdp=4,tensor=2; default: one", flag_values=values)


class Opened(NamedTuple):
    """A model with its values, and where its tokenizer is."""

    config: Config
    model: Model
    parameters: Parameters
    home: Path


def _mesh(axes: list[str]) -> jax.sharding.Mesh:
    """The mesh that --mesh describes: one device, or all of them."""
    if not axes:
        return make_mesh(Mesh(), jax.devices()[:1])
    sizes = {}
    for entry in axes:
        axis, _, size = entry.partition("=")
        if axis not in AXES or axis == "stage" or not size.removeprefix("-").isdigit():
            known = ", ".join(axis for axis in AXES if axis != "stage")
            raise UserError(f"--mesh: {entry!r} is not AXIS=DEVICES, with an axis of {known}")
        if axis in sizes:
            raise UserError(f"--mesh: {axis} is there twice")
        sizes[axis] = int(size)
    return make_mesh(Mesh(**{"fsdp": 1} | sizes))


def _open(values: flags.FlagValues, mesh: jax.sharding.Mesh) -> Opened:
    """The model that the flags name. Raises UserError for a classifier, and where flags do not fit each other."""
    folder = RunFolder(Path(values.model))
    if folder.checkpoints.is_dir():
        for flag in ("adapter", "quant"):
            if getattr(values, flag) is not None:
                raise UserError(f"--{flag}: {values.model} is a run, whose own adapter and formats are used")
        _refuse_classifier(values.model, folder.read_config())
        run = open_run(folder, mesh, values.step)
        return Opened(run.config, run.model, {**run.frozen, **run.trained}, run.model.folders.tokenizer)
    if values.step is not None:
        raise UserError(f"--step={values.step}: {values.model} is not a run folder, so it has no checkpoints")
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    # A row length that any axis of the mesh divides, for the checks of a model that is trained.
    plain = Config(model=ModelOptions(dtype=dtype), data=Data(seq_len=mesh.size))
    config = of_model(values.adapter or values.model, plain)
    if values.adapter is not None and not config.lora.enabled:
        raise UserError(f"--adapter={values.adapter}: it has no adapter_config.json, so it is not an adapter")
    if values.adapter is not None:
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, path=values.model, revision=None))
    config = dataclasses.replace(config, quant=Quant(values.quant))
    _refuse_classifier(values.model, config)
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


def _answers(
    values: flags.FlagValues, generate: Generate, prompts: Prompts, stop: frozenset[int], tokenizer, most: int
) -> Iterator[str]:
    """A line of JSON for each sample of --input, in its order; `most`: tokens of a prompt."""
    entry, ended = Dataset(path=values.input), ending(stop, values.stop, tokenizer)
    samples = enumerate(open_source(entry).read(_stop_at))
    while chunk := list(islice(samples, values.batch_size)):
        asked = [_asked(prompts, entry, where, sample, most) for _, (where, sample) in chunk]
        # Always as many rows, so that one number of them is compiled.
        rows = [asked[min(row, len(asked) - 1)].tokens for row in range(values.batch_size)]
        numbers = [chunk[min(row, len(chunk) - 1)][0] for row in range(values.batch_size)]
        found = completed(generate(rows, numbers), len(asked), ended)
        for prompt, completion in zip(asked, found):
            made = {"completion": prompt.begun + text_of(completion, tokenizer, values.stop)}
            made["finish_reason"] = "stop" if completion.finished else "length"
            yield json.dumps({**prompt.sample, **made}, ensure_ascii=False, default=str)


def _stop_at(error: UserError) -> None:
    raise error


def _asked(prompts: Prompts, entry: Dataset, where: str, sample: Any, most: int) -> Prompt:
    """The prompt of a sample. Raises UserError, which says where, if it cannot be continued or what is made written."""
    if taken := {"completion", "finish_reason"} & sample.keys():
        raise UserError(f"{where}: it has a column {min(taken)!r}, which what is made would replace; rename it")
    try:
        prompt = prompts(entry, sample)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    if len(prompt.tokens) > most:
        raise UserError(
            f"{where}: {len(prompt.tokens)} tokens of prompt, and the model's positions leave {most} beside "
            "--max_new_tokens"
        )
    return prompt


@contextlib.contextmanager
def _written(output: str | None) -> Iterator[TextIO]:
    """A file that has its name once it is whole: until then the earlier one is there, and OUTPUT.part."""
    if output is None:
        yield sys.stdout
        return
    part = Path(f"{output}.part")
    with part.open("w", encoding="utf-8") as file:
        yield file
    part.replace(output)


def _main(values: flags.FlagValues, _: None) -> None:
    if not math.isfinite(values.temperature):
        raise UserError(f"--temperature={values.temperature}: must be a finite number, at least 0")
    if (values.prompt is None) == (values.input is None):
        raise UserError("give --prompt=... or --input=FILE, one of them")
    if "" in values.stop:
        raise UserError("--stop= is empty, and would end everything at once")
    if values.output is not None and values.input is None:
        raise UserError("--output is of --input; a --prompt is continued in the terminal")
    opened = _open(values, _mesh(values.mesh))
    tokenizer = hf.load_tokenizer(opened.home, opened.config.chat.template, opened.config.data.special_tokens)
    sampling = Sampling(**{name: getattr(values, name) for name in Sampling._fields})
    dtype = opened.parameters["embed.weight"].dtype
    how = {"max_new_tokens": values.max_new_tokens, "dtype": dtype, "sampling": sampling, "seed": values.seed}
    generate = partial(make_generate(opened.model.graph, opened.model.spec, **how), opened.parameters)
    prompts = Prompts(tokenizer, opened.config.chat, values.chat)
    stop = stop_tokens(opened.home, tokenizer)
    if prompts.turn_end is not None and (values.chat or values.input is not None):
        stop |= {tokenizer.added_tokens_encoder[prompts.turn_end]}
    if values.input is not None:
        with _written(values.output) as file:
            most = opened.model.spec.max_positions - values.max_new_tokens
            for line in _answers(values, generate, prompts, stop, tokenizer, most):
                print(line, file=file, flush=True)
        return
    prompt = prompts(Dataset(), {"prompt": values.prompt})
    print(prompt.begun, end="")
    tokens = generate([prompt.tokens])
    for text in stream_text(tokenizer, until(tokens, stop), values.stop):
        print(text, end="", flush=True)
    print()


main = partial(command.run, _define_flags, _main, with_config=False)

if __name__ == "__main__":
    sys.exit(main())
