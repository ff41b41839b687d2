"""The tokenizer's files of an export, and the token that ends an answer."""

import logging
from pathlib import Path

from jaxtune import data, hf
from jaxtune.config.schema import Config
from jaxtune.data.formats.sample_formats import ends_texts
from jaxtune.errors import UserError
from jaxtune.tokenizer_type import Tokenizer
from jaxtune.training.assembly import open_images
from jaxtune.weights.model import Model

log = logging.getLogger("jaxtune")


def write_tokenizer(model: Model, config: Config, output: Path) -> None:
    """Copy the files of the tokenizer and of the image processor.

    They get the recipe's special tokens, chat template and limits of images' pixels, and a classifier's padding.
    """
    home, vision = model.folders.tokenizer, config.vision
    hf.copy_tokenizer_files(home, output)
    if (vision.max_pixels or vision.min_pixels) and (reader := open_images(model, config)) is not None:
        reader.write_limits(output)
    if model.spec.labels:
        tokenizer, _ = classifier_tokenizer(model, config)
        if tokenizer.pad_token != hf.load_tokenizer(home).pad_token or config.data.special_tokens:
            tokenizer.save_pretrained(output)
    elif config.data.special_tokens:
        hf.load_tokenizer(home, None, config.data.special_tokens).save_pretrained(output)
    if config.chat.template is not None:
        tokenizer = hf.load_tokenizer(home, config.chat.template, config.data.special_tokens)
        hf.write_chat_template(output, str(tokenizer.chat_template))


def write_ends(model: Model, config: Config, output: Path) -> list[int]:
    """Add the token that ends an answer to generation_config.json.

    Returns the tokens that end an answer if the base's own files lack one, else [].
    """
    if model.spec.labels:
        return []
    described = model.base.described.get("text_config") or model.base.described
    before = hf.end_tokens(hf.read_generation_config(model.folders.tokenizer)) or hf.end_tokens(described)
    end = _turn_end(model, config)
    return [] if end is None or end in before else hf.write_turn_end(output, end, described)


def _turn_end(model: Model, config: Config) -> int | None:
    """Return the token that ends an answer in the chat template; None without a template or if it has no such token."""
    try:
        tokenizer = hf.load_tokenizer(model.folders.tokenizer, config.chat.template, config.data.special_tokens)
        end = data.ChatTemplate(tokenizer).turn_end() if tokenizer.chat_template else None
    except UserError as error:
        log.warning("the token that ends an answer is not known, so the export may not stop there: %s", error)
        return None
    return None if end is None else tokenizer.get_vocab()[end]


def classifier_tokenizer(model: Model, config: Config) -> tuple[Tokenizer, int | None]:
    """Return a classifier's tokenizer with a padding token that no document ends with, and the id of that token.

    transformers' classifiers read the last token that is not padding, so a text must not end in the padding token.
    """
    tokenizer = hf.load_tokenizer(model.folders.tokenizer, config.chat.template, config.data.special_tokens)
    eos = None if tokenizer.eos_token is None else tokenizer.get_vocab()[str(tokenizer.eos_token)]
    ends = {eos} if ends_texts(tokenizer) else set()
    if config.preference.loss is not None:  # the documents are answers, which end as turns do
        ends = {eos, _turn_end(model, config)}
    described, ends = model.base.described.get("pad_token_id"), {end for end in ends if end is not None}
    return tokenizer, hf.choose_padding(tokenizer, ends, described, model.spec.vocabulary)
