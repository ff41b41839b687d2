"""Continue prompts with a Hugging Face folder, a PEFT adapter or a run: one prompt in the terminal, or a file.

    python -m jaxtune.generate --model=runs/quickstart/export --prompt="def " --temperature=1
    python -m jaxtune.generate --model=MODEL --adapter=runs/mine/export --input=prompts.jsonl --output=answers.jsonl

Samples of --input have a column `prompt` (text or messages) or `messages`; an answer at the end of `messages` is left
out. They may have images, as in training (docs/guides/images.md). Each line of the output is the sample with
`completion` and `finish_reason` (stop or length).

    python -m jaxtune.generate --model=runs/mine --image=cat.png --prompt="What is it?"

With --image, which may be given several times, --prompt is a message of the user about pictures. They come before its
text, or in place of each <image>.

    python -m jaxtune.generate --model=runs/qwen_decision --decide --input=questions.jsonl

With --decide, samples have the columns `state` and `questions` (docs/guides/decision_models.md), and each line of the
output is the sample with `answers`: the probability of each option, from one forward pass.
"""

import sys

from jaxtune import command

if __name__ == "__main__":  # parse flags and recipe before the slow imports below
    sys.exit(command.main("generate"))

import contextlib
import json
import logging
from collections.abc import Iterator, Set
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from absl import flags

from jaxtune.config.schema import Dataset
from jaxtune.data.formats.image_messages import PLACEHOLDER, has_images
from jaxtune.data.reading.sources import open_source
from jaxtune.errors import UserError, format_count
from jaxtune.host.missing_kernels import explain_missing_kernels
from jaxtune.host.preflight import check_writable
from jaxtune.host.run_folder import RunFolder
from jaxtune.inference.answers import AnswerGenerator, Opened, mesh_of, open_model
from jaxtune.inference.decisions import Decider, evaluated_temperatures, read_temperatures
from jaxtune.inference.sampling import BOUNDS, SamplingOptions
from jaxtune.json_file import as_text

log = logging.getLogger("jaxtune")


def _samples(path: str, columns: Set[str]) -> Iterator[tuple[str, Any]]:
    """Yield (source, sample) for the samples of --input. Raises UserError if a sample has a column of the output."""
    for where, sample in open_source(Dataset(path=path)).read(_raise):
        if taken := columns & sample.keys():
            raise UserError(f"{where}: it has a column {min(taken)!r}, which the answer would replace; rename it")
        yield where, sample


def _asks_about_images(path: str) -> bool:
    """Return whether a sample of --input has an image, which needs the model's vision tower.

    A pipe can be read once only, so its samples must not have images.
    """
    return not Path(path).is_fifo() and any(
        has_images(sample) for _, sample in open_source(Dataset(path=path)).read(_raise)
    )


def _check_images(values: flags.FlagValues) -> None:
    """Raise UserError if --image does not fit the other flags; warn of a prompt that may lack it."""
    if not values.image:
        if PLACEHOLDER in (values.prompt or ""):
            log.warning("--prompt has %s, and without --image it is text", PLACEHOLDER)
        return
    if values.decide:
        raise UserError("--image with --decide: decision models read texts")
    if values.prompt is None:
        raise UserError("--image needs --prompt; samples of --input name their images themselves")
    if values["chat"].present and not values.chat:
        raise UserError("--nochat with --image: a prompt with images is a message, in the chat template")
    if (places := values.prompt.count(PLACEHOLDER)) not in (0, len(values.image)):
        raise UserError(
            f"--prompt has {format_count(places, PLACEHOLDER)} for {format_count(len(values.image), 'image')} "
            "(--image): write one for each, or none, and the images come first"
        )


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


def _decide(values: flags.FlagValues, opened: Opened) -> None:
    """Print or write the answers to the questions of --input."""
    if values.input is None:
        raise UserError("--decide needs --input: a file of states with questions")
    run = RunFolder(Path(values.model))
    if run.checkpoints.is_dir():
        temperatures = evaluated_temperatures(run, values.step)
    else:
        temperatures = read_temperatures(opened.home)
    decider, count = Decider(opened, temperatures, values.batch_size), 0
    with _open_output(values.output) as file:
        for sample, answers in decider.each(_samples(values.input, {"answers"})):
            line = json.dumps({**sample, "answers": answers}, ensure_ascii=False, default=str)
            print(line, file=file, flush=True)
            count += 1
    if values.output is not None:
        print(f"answers to the questions of {count} samples in {values.output}")


@explain_missing_kernels()
def run_command(values: flags.FlagValues, _: None) -> None:
    """Print or write the model's answers to the prompts."""
    if (values.prompt is None) == (values.input is None):
        raise UserError("give either --prompt=... or --input=FILE")
    if values.decide and (given := [name for name in (*BOUNDS, "stop", "chat") if values[name].present]):
        raise UserError(f"--{given[0]} has no effect with --decide, which reads probabilities and samples nothing")
    if values.output is not None and values.input is None:
        raise UserError("--output needs --input; a --prompt is continued in the terminal")
    if values.output is not None:
        check_writable(Path(values.output).parent, f"--output={values.output}")
    manner = SamplingOptions(
        **{name: getattr(values, name) for name in BOUNDS}, stop=tuple(values.stop), chat=values.chat
    )
    _check_images(values)
    mesh, options = mesh_of(values.mesh), (values.adapter, values.step, values.quant, values.plugin)
    sees = bool(values.image) or (not values.decide and values.input is not None and _asks_about_images(values.input))
    opened = open_model(values.model, mesh, *options, decides=values.decide, sees=sees)
    if values.decide:
        return _decide(values, opened)
    answering = AnswerGenerator(opened, manner)
    if values.input is not None:
        finished = []
        with _open_output(values.output) as file:
            for answer in answering.each(_samples(values.input, {"completion", "finish_reason"})):
                finished.append(answer.finished)
                columns = {"completion": answer.text, "finish_reason": "stop" if answer.finished else "length"}
                line = json.dumps({**answer.prompt.sample, **columns}, ensure_ascii=False, default=as_text)
                print(line, file=file, flush=True)
        if values.output is not None:
            cut = finished.count(False)
            print(f"{len(finished)} answers in {values.output}" + (f", {cut} cut at --max_new_tokens" if cut else ""))
        return
    for text in answering.stream(values.prompt, values.image):
        print(text, end="", flush=True)
    print()


main = partial(command.main, "generate")
