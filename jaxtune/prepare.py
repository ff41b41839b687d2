"""Tokenise and pack the data of a recipe, count it, and show which tokens would be trained.

    python -m jaxtune.prepare --config=qwen_lora --show=3

No weights are read. Each sample is shown up to the length of a row, with trained and context tokens on separate lines.
With --ids each token is shown as token(id|label|weight), with its label and weight in the loss: -100 and 0 for context.

With --shard=0/4, 1/4, 2/4 and 3/4 four machines that share data.cache_dir tokenise a quarter each. The run that
follows, or prepare without --shard, joins the shards and tokenises missing ones.
"""

import sys

from jaxtune import command
from jaxtune.tokenizer_type import Tokenizer

if __name__ == "__main__":  # parse flags and recipe before the slow imports below
    sys.exit(command.main("prepare"))

import itertools
import re
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
from absl import flags
from rich.console import Console
from rich.text import Text

from jaxtune import hf
from jaxtune.columns import ASKED, LABEL, LABELLED, NEXT_TOKEN, NOT_AN_OPTION, OPTION_SHARES, image_columns
from jaxtune.config.schema import Config
from jaxtune.data import (
    Documents,
    Rows,
    Stream,
    is_chat,
    open_documents,
    open_prompt_sets,
    open_validation,
    prepare_documents,
    rows_to_evaluate,
    say_template,
)
from jaxtune.data.formats.questions import HEAD_LABELS
from jaxtune.data.formats.sample_formats import IGNORED_LABEL
from jaxtune.data.images.image_files import describe_place
from jaxtune.data.images.image_reader import ImageReader, open_reader
from jaxtune.errors import UserError
from jaxtune.image_layout import ImageLayout, ImageRef
from jaxtune.rollout.episodes.toolbox import load_functions
from jaxtune.weights.architecture import spec_of
from jaxtune.weights.class_labels import resolve_labels

STYLES = {True: "green", False: "bright_black"}  # trained or not


def describe(
    documents: Documents,
    i: int,
    tokenizer: Tokenizer,
    length: int,
    ids: bool,
    labels: tuple[str, ...] = (),
) -> Text:
    """Describe the first `length` tokens of document i: trained and context parts in turn or, with `ids`, each token.

    Image tokens of an image are written as one with their number, and each image has a line: where it is, its size
    after preprocessing, and the place of its tokens in the document.

    If documents have labels, the name of the document's label is added, or its value if there is only one label. For a
    question it is the share of each option.
    """
    whole = int(documents.lengths[i])
    read, weights = documents.read(i, 0, min(whole, length))
    tokens = list(zip(read.tolist(), [0.0, *weights.tolist()[1:]]))  # the first is never predicted
    text, seen = Text(), []  # `seen`: tokens before a span, which decide how its first ones are decoded
    for trained, span in itertools.groupby(tokens, key=lambda token: token[1] != 0):
        style = STYLES[trained]
        if not ids:
            text.append(f"\n  {'trained' if trained else 'context'} | ", "dim")
            ids_of_span = [token for token, _ in span]
            text.append(_in_a_line(tokenizer, ids_of_span, seen, documents.layout), style)
            seen += ids_of_span
            continue
        for token, weight in span:
            text.append(_in_a_line(tokenizer, [token], seen), style)
            seen.append(token)
            text.append(f"({token}|{token if trained else IGNORED_LABEL}|{weight:g}) ", f"{style} dim")
    text.append(f"\n  ... and {whole - length} tokens more" if whole > length else "", "dim")
    for line in _describe_images(documents.read(i, 0, whole)[0], documents.images(i), documents.layout):
        text.append("\n  image   | ", "dim").append(line, STYLES[False])
    if OPTION_SHARES.name in documents.parts[int(documents.part_of[i])].columns:
        shares = documents.values(OPTION_SHARES.name, i, 0, whole)
        options = [f"{HEAD_LABELS[row]} {shares[row]:g}" for row in np.flatnonzero(shares != NOT_AN_OPTION)]
        text.append("\n  label   | ", "dim").append(", ".join(options), STYLES[True])
    if labels:
        label = documents.values("label", i, 0, whole)
        text.append("\n  label   | ", "dim").append(
            f"{label:g}" if len(labels) == 1 else labels[int(label)], STYLES[True]
        )
    return text


def _choose(documents: Documents, count: int) -> list[int]:
    """Choose the first documents of each dataset in turn, so that every dataset is shown."""
    by_part = [np.flatnonzero(documents.part_of == part)[:count].tolist() for part in range(len(documents.parts))]
    alternating = itertools.chain.from_iterable(itertools.zip_longest(*by_part))
    return [i for i in alternating if i is not None][:count]


def _describe_images(
    tokens: Sequence[int] | np.ndarray, images: Sequence[ImageRef], layout: ImageLayout | None
) -> Iterator[str]:
    """Yield a line about each image of a document: its place, its size, and where its tokens are."""
    if layout is None:
        return
    positions, end = np.flatnonzero(np.asarray(tokens) == layout.token), 0
    for image in images:
        start, end = end, end + image.patches // layout.merge**2
        height, width = (side * layout.patch for side in image.grid)
        size = f"{width}x{height} pixels after preprocessing, {image.patches:,} patches"
        where = f"{end - start:,} image tokens from {positions[start]} to {positions[end - 1]}"
        yield f"{describe_place(image.place)}: {size}, {where}"


def _in_a_line(tokenizer: Tokenizer, tokens: list[int], after: list[int], layout: ImageLayout | None = None) -> str:
    text = hf.decode(tokenizer, tokens, after).replace("\n", "\\n")
    if layout is None:
        return text
    token = str(tokenizer.convert_ids_to_tokens(layout.token))
    return re.sub(f"({re.escape(token)}){{2,}}", lambda run: f"{token}x{len(run[0]) // len(token)}", text)


def _shard(text: str) -> tuple[int, int]:
    numbers = re.fullmatch(r"(\d+)/(\d+)", text)
    if numbers is None or int(numbers[1]) >= int(numbers[2]):
        raise UserError(f"--shard={text}: must be I/N, a shard and the number of shards, such as 0/4 to 3/4")
    return int(numbers[1]), int(numbers[2])


def _open_images(config: Config, folders: hf.Folders) -> ImageReader | None:
    """Return the reader of images of the config's model; None without vision.patches_per_row."""
    if config.vision.patches_per_row is None:
        return None
    saved = hf.read_config(folders.config)
    spec = spec_of(hf.apply_options(saved, config.model), saved, config)
    layout = None if spec.vision is None else spec.vision.layout
    return open_reader(config.vision, folders.tokenizer, spec.family, layout)


def run_command(values: flags.FlagValues, config: Config) -> None:
    """Print counts and samples of the data."""
    config = resolve_labels(config)
    assert config.model.path is not None
    folders = hf.find_folders(config.model, weights=False)
    tokenizer = hf.load_tokenizer(folders.tokenizer, config.chat.template, config.data.special_tokens)
    console = Console(soft_wrap=True, highlight=False)
    columns = {"classification": LABELLED, "decision": ASKED}.get(config.sample_type or "", NEXT_TOKEN)
    labels = config.model.id2label if LABEL in columns else ()
    if (images := _open_images(config, folders)) is not None and config.vision.patches_per_row is not None:
        columns += image_columns(images.layout, config.vision.patches_per_row)
    if values.shard is not None and config.samples:
        raise UserError(f"--shard: prompts ({config.samples}) are read when a run starts, and are not cached")
    if values.shard is not None:
        if config.data.cache_only:
            raise UserError("--shard reads the sources, which data.cache_only=True forbids")
        for line in prepare_documents(config, tokenizer, _shard(values.shard), images):
            console.print(line, markup=False)
        return
    if config.samples:
        train, validation = open_prompt_sets(config, tokenizer, load_functions(config).row_tools, images)
        validating = f", {len(validation):,} to validate with" if validation else ""
        for line in say_template(tokenizer, config.chat, masks=False):
            console.print(line, markup=False)
        console.print(f"prompts: {len(train):,}, {sum(len(prompt.tokens) for prompt in train):,} tokens{validating}")
        for i, prompt in enumerate(train[: values.show]):
            layout = None if images is None else images.layout
            console.print(Text(f"\nprompt {i}: {_in_a_line(tokenizer, prompt.tokens, [], layout)}"))
            for line in _describe_images(prompt.tokens, prompt.images, layout):
                console.print(Text(f"  image | {line}"))
        return
    if config.data.streaming:
        window = next(Stream(config, tokenizer, columns=columns).windows())
        train, validation = window.documents, open_validation(config, tokenizer)
        console.print("data.streaming: only the first rows of the training data, which are not cached")
    else:
        train, validation = open_documents(config, tokenizer, images=images)
    training, validating = Rows(train, config.data, 1, columns), rows_to_evaluate(validation, config, columns)
    losses = (loss for rows in (training, *validating.values()) for loss in rows.losses)
    for loss in dict.fromkeys(losses):
        console.print(f"warning: {loss}", style="yellow", markup=False)
    notes = (note for documents in (train, *validation.values()) for note in documents.notes)
    template = say_template(tokenizer, config.chat) if is_chat(config, train) else ()
    for note in dict.fromkeys((*config.startup_notes, *template, *notes)):
        console.print(note, markup=False)
    console.print(f"training: {training.counts}")
    for name, rows in validating.items():
        console.print(f"validation{' ' + name if name else ''}: {rows.counts}")
    for i in _choose(train, values.show):
        shown = describe(train, i, tokenizer, config.data.seq_len, values.ids, labels)
        console.print(Text(f"\nsample {i}, {train.where(i)}: ") + shown)


main = partial(command.main, "prepare")
