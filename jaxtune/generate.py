"""Continue prompts with a Hugging Face folder, a PEFT adapter or a run: one to the terminal, or a file of them.

    python -m jaxtune.generate --model=runs/quickstart/export --prompt="def " --temperature=1
    python -m jaxtune.generate --model=MODEL --adapter=runs/mine/export --input=prompts.jsonl --output=answers.jsonl

Samples of --input have a column `prompt`, text or messages, or `messages`, of which an answer at the end is left out.
A line of the output is the sample with `completion`, and `finish_reason`: stop, or length.
"""

import contextlib
import json
import math
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, TextIO, get_args, get_type_hints

from absl import flags

from jaxtune import command
from jaxtune.config.schema import Dataset, Quant
from jaxtune.data.sources import open_source
from jaxtune.errors import UserError
from jaxtune.run.answers import BOUNDS, Answering, Manner, mesh_of, open_model
from jaxtune.run.ready import check_writable

NUMBERS = {
    "max_new_tokens": "maximum number of tokens to add",
    "temperature": "0 takes the likeliest token",
    "top_p": "only the likeliest tokens of this total probability",
    "top_k": "only so many of the likeliest tokens",
    "min_p": "only tokens of this share of the likeliest one's probability",
    "repetition_penalty": "above 1, tokens that were there are less likely",
    "seed": "seed of the sampling",
    "batch_size": "prompts of --input that are continued together",
}


def _define_flags(values: flags.FlagValues) -> None:
    text = partial(flags.DEFINE_string, flag_values=values)
    text("model", None, "Hugging Face folder, hub id, adapter, or run folder", required=True)
    text("adapter", None, "folder of a PEFT adapter of --model, a base")
    text("prompt", None, "text to continue, or to answer with --chat")
    text("input", None, "file of prompts: jsonl, json, csv, parquet, or a dataset on the hub")
    text("output", None, "JSON lines file for what follows the prompts of --input; default: the terminal")
    flags.DEFINE_bool("chat", False, "put prompts that are text into the tokenizer's chat template", flag_values=values)
    for name, meaning in NUMBERS.items():
        low, high = BOUNDS[name]
        define = flags.DEFINE_integer if isinstance(low, int) else flags.DEFINE_float
        bounds = {"lower_bound": low, "upper_bound": None if math.isinf(high) else high}
        define(name, getattr(Manner(), name), meaning, flag_values=values, **bounds)  # type: ignore[arg-type]
    flags.DEFINE_multi_string("stop", [], "text that ends what is made; may be given several times", flag_values=values)
    flags.DEFINE_integer("step", None, "checkpoint of a run; default: the newest good one", flag_values=values)
    formats = get_args(get_args(get_type_hints(Quant)["format"])[0])
    flags.DEFINE_enum("quant", None, formats, "quantize the weights of the base as they are read", flag_values=values)
    meaning = "Python file of your own with the model's family (docs/plugins.md); again for more"
    flags.DEFINE_multi_string("plugin", [], meaning, flag_values=values)
    flags.DEFINE_list("mesh", [], "devices of each axis, such as fsdp=4,tensor=2; default: one", flag_values=values)


def _samples(path: str) -> Iterator[tuple[str, Any]]:
    """Those of --input, each with where it is. Raises UserError for one with a column that an answer would replace."""
    for where, sample in open_source(Dataset(path=path)).read(_stop_at):
        if taken := {"completion", "finish_reason"} & sample.keys():
            raise UserError(f"{where}: it has a column {min(taken)!r}, which what is made would replace; rename it")
        yield where, sample


def _stop_at(error: UserError) -> None:
    raise error


@contextlib.contextmanager
def _written(output: str | None) -> Iterator[TextIO]:
    """A file that has its name once it is whole: until then the earlier one is there, and OUTPUT.part."""
    if output is None:
        yield sys.stdout
        return
    part = Path(f"{output}.part")
    part.parent.mkdir(parents=True, exist_ok=True)
    with part.open("w", encoding="utf-8") as file:
        yield file
    part.replace(output)


def _main(values: flags.FlagValues, _: None) -> None:
    if (values.prompt is None) == (values.input is None):
        raise UserError("give --prompt=... or --input=FILE, one of them")
    if values.output is not None and values.input is None:
        raise UserError("--output is of --input; a --prompt is continued in the terminal")
    if values.output is not None:
        check_writable(Path(values.output).parent, f"--output={values.output}")
    manner = Manner(**{name: getattr(values, name) for name in NUMBERS}, stop=tuple(values.stop), chat=values.chat)
    mesh, named = mesh_of(values.mesh), (values.adapter, values.step, values.quant, values.plugin)
    opened = open_model(values.model, mesh, *named)
    answering = Answering(opened, manner)
    if values.input is not None:
        finished = []
        with _written(values.output) as file:
            for answer in answering.each(_samples(values.input)):
                finished.append(answer.finished)
                made = {"completion": answer.text, "finish_reason": "stop" if answer.finished else "length"}
                line = json.dumps({**answer.prompt.sample, **made}, ensure_ascii=False, default=str)
                print(line, file=file, flush=True)
        if values.output is not None:
            cut = finished.count(False)
            print(f"{len(finished)} answers in {values.output}" + (f", {cut} cut at --max_new_tokens" if cut else ""))
        return
    for text in answering.stream(values.prompt):
        print(text, end="", flush=True)
    print()


main = partial(command.run, _define_flags, _main, with_config=False)

if __name__ == "__main__":
    sys.exit(main())
