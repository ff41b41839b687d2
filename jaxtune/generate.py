"""Continue prompts with a Hugging Face folder, a PEFT adapter or a run: one prompt in the terminal, or a file.

    python -m jaxtune.generate --model=runs/quickstart/export --prompt="def " --temperature=1
    python -m jaxtune.generate --model=MODEL --adapter=runs/mine/export --input=prompts.jsonl --output=answers.jsonl

Samples of --input have a column `prompt` (text or messages) or `messages`; an answer at the end of `messages` is left
out. Each line of the output is the sample with `completion` and `finish_reason` (stop or length).
"""

import sys

from jaxtune import command

if __name__ == "__main__":  # parse flags and recipe before the slow imports below
    sys.exit(command.main("generate"))

import contextlib
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from absl import flags

from jaxtune.config.schema import Dataset
from jaxtune.data.reading.sources import open_source
from jaxtune.errors import UserError
from jaxtune.host.preflight import check_writable
from jaxtune.inference.answers import AnswerGenerator, mesh_of, open_model
from jaxtune.inference.sampling import BOUNDS, SamplingOptions


def _samples(path: str) -> Iterator[tuple[str, Any]]:
    """Yield (source, sample) for the samples of --input. Raises UserError if a sample has a column of the output."""
    for where, sample in open_source(Dataset(path=path)).read(_raise):
        if taken := {"completion", "finish_reason"} & sample.keys():
            raise UserError(f"{where}: it has a column {min(taken)!r}, which the answer would replace; rename it")
        yield where, sample


def _raise(error: UserError) -> None:
    raise error


@contextlib.contextmanager
def _open_output(output: str | None) -> Iterator[TextIO]:
    """Open OUTPUT.part and rename it to OUTPUT once it is complete; an earlier file stays until then."""
    if output is None:
        yield sys.stdout
        return
    part = Path(f"{output}.part")
    part.parent.mkdir(parents=True, exist_ok=True)
    with part.open("w", encoding="utf-8") as file:
        yield file
    part.replace(output)


def run_command(values: flags.FlagValues, _: None) -> None:
    """Print or write the model's answers to the prompts."""
    if (values.prompt is None) == (values.input is None):
        raise UserError("give either --prompt=... or --input=FILE")
    if values.output is not None and values.input is None:
        raise UserError("--output needs --input; a --prompt is continued in the terminal")
    if values.output is not None:
        check_writable(Path(values.output).parent, f"--output={values.output}")
    manner = SamplingOptions(
        **{name: getattr(values, name) for name in BOUNDS}, stop=tuple(values.stop), chat=values.chat
    )
    mesh, options = mesh_of(values.mesh), (values.adapter, values.step, values.quant, values.plugin)
    opened = open_model(values.model, mesh, *options)
    answering = AnswerGenerator(opened, manner)
    if values.input is not None:
        finished = []
        with _open_output(values.output) as file:
            for answer in answering.each(_samples(values.input)):
                finished.append(answer.finished)
                columns = {"completion": answer.text, "finish_reason": "stop" if answer.finished else "length"}
                line = json.dumps({**answer.prompt.sample, **columns}, ensure_ascii=False, default=str)
                print(line, file=file, flush=True)
        if values.output is not None:
            cut = finished.count(False)
            print(f"{len(finished)} answers in {values.output}" + (f", {cut} cut at --max_new_tokens" if cut else ""))
        return
    for text in answering.stream(values.prompt):
        print(text, end="", flush=True)
    print()


main = partial(command.main, "generate")
