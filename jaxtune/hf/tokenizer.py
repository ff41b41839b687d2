"""A model folder's tokenizer: load it, and copy its files unchanged."""

import json
import logging
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtune.errors import UserError, is_failure
from jaxtune.hf.chat_templates import find_template
from jaxtune.hf.model_folder import read_generation_config
from jaxtune.json_file import read_json
from jaxtune.tokenizer_type import Tokenizer

log = logging.getLogger("jaxtune")

_OLDER_TEMPLATE = "chat_template.json"  # of processors, before they used chat_template.jinja
_TAIL = 8  # preceding tokens that are decoded together with new ones; a character has at most four bytes
FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "vocab.json", "merges.txt", "tokenizer.model", "generation_config.json"),
    # of vision-language models
    *("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json", _OLDER_TEMPLATE),
)


def load_tokenizer(folder: Path, chat_template: str | None = None, special_tokens: tuple[str, ...] = ()) -> Tokenizer:
    """Return the tokenizer of a local model folder.

    Missing special tokens are added, and the chat template is replaced if `chat_template` is given (see
    `find_template`).

    Raises:
        UserError: the tokenizer is missing, cannot be read, needs remote code, or has no fast version.
    """
    from transformers import AutoTokenizer  # seconds to import

    if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json", "tokenizer.model")):
        raise UserError(f"{folder} has no tokenizer; tokenizer.json and tokenizer_config.json are needed")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        tokenizer("A text")  # some damaged files can be loaded
    except BaseException as error:  # tokenizers raises bare Exceptions for damaged files, and panics
        if not is_failure(error):
            raise
        raise UserError(f"the tokenizer in {folder} cannot be loaded: {error}") from error
    if not tokenizer.is_fast:
        raise UserError(
            f"the tokenizer in {folder} has no fast version; convert it with "
            "transformers' convert_slow_tokenizer, so that the folder has a tokenizer.json"
        )
    if tokenizer.chat_template is None and (folder / _OLDER_TEMPLATE).is_file():
        tokenizer.chat_template = read_json(folder / _OLDER_TEMPLATE).get("chat_template")
    tokenizer.add_tokens(list(special_tokens), special_tokens=True)
    if chat_template is not None:
        tokenizer.chat_template = find_template(chat_template, tokenizer.get_vocab())
    return tokenizer


def decode(
    tokenizer: Tokenizer,
    tokens: Sequence[int],
    after: Sequence[int] = (),
    *,
    skip_special_tokens: bool = False,
) -> str:
    """Decode tokens that follow the tokens `after`.

    The last tokens of `after` are decoded with them, because SentencePiece drops the space of a text's first token.

    Raises:
        UserError: the tokenizer fails.
    """
    tail = list(after[-_TAIL:])
    try:
        before = str(tokenizer.decode(tail, skip_special_tokens=skip_special_tokens)) if tail else ""
        whole = str(tokenizer.decode([*tail, *tokens], skip_special_tokens=skip_special_tokens))
        if not whole.startswith(before):  # the bytes of one character are in both
            before, whole = "", str(tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens))
    except BaseException as error:  # tokenizers panics
        if not is_failure(error):
            raise
        raise UserError(f"the tokenizer fails to decode {len(tail) + len(tokens)} tokens: {error}") from error
    return whole[len(before) :]


def copy_tokenizer_files(source: Path, target: Path) -> list[str]:
    """Copy tokenizer, processors, chat template and generation defaults byte for byte; return the file names.

    Files of these names that only the target has are removed, because they belong to an earlier export.
    """
    target.mkdir(parents=True, exist_ok=True)
    names = [name for name in FILES if (source / name).is_file()]
    for name in set(FILES) - set(names):
        (target / name).unlink(missing_ok=True)
    for name in names:
        shutil.copyfile(source / name, target / name)
    return names


def write_chat_template(target: Path, template: str) -> None:
    """Replace the chat template of an exported folder."""
    (target / "chat_template.jinja").write_text(template, encoding="utf-8")
    (target / _OLDER_TEMPLATE).unlink(missing_ok=True)


def end_tokens(generation: Mapping[str, Any]) -> list[int]:
    """Return the end-of-text tokens of a generation config or a config.json."""
    listed = generation.get("eos_token_id")
    return [] if listed is None else listed if isinstance(listed, list) else [listed]


def write_turn_end(target: Path, end: int, model_config: Mapping[str, Any]) -> list[int]:
    """Add the token that ends a turn to the end tokens of an exported folder; return all end tokens.

    A missing generation_config.json is made from config.json (`model_config`), as in transformers.
    """
    special = ("bos_token_id", "eos_token_id", "pad_token_id")
    defaults = {name: model_config[name] for name in special if model_config.get(name) is not None}
    config = read_generation_config(target) or defaults
    ends = end_tokens(config) or end_tokens(model_config)
    if end not in ends:
        ends = [*ends, end]
        config["eos_token_id"] = ends
        (target / "generation_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return ends


def choose_padding(tokenizer: Tokenizer, ends: Collection[int], configured: int | None, rows: int) -> int | None:
    """Choose the padding token of a classifier, set it in the tokenizer, and return it.

    It must not be one of `ends`: transformers classifies a document at its last token that is not padding, so one that
    ends with the padding token would be classified one token too early.

    Args:
        tokenizer: changed if its padding token is missing or one of `ends`.
        ends: tokens that documents end with.
        configured: the padding token of config.json; None: it has none.
        rows: number of tokens that have an embedding.
    """
    ids = tokenizer.get_vocab()
    padding, end, unknown = (ids.get(str(t)) for t in (tokenizer.pad_token, tokenizer.eos_token, tokenizer.unk_token))
    special = {number: token.content for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    candidates = sorted(special.keys() - set(ends))

    # False sorts first: a token named pad, then the end token, the unknown token, a reserved token.
    def preference(token: int) -> tuple[bool, ...]:
        name = special[token].lower()
        return "pad" not in name, token != end, token != unknown, "reserved" not in name

    if padding is not None and padding not in ends:
        return padding
    if configured is not None and configured not in ends:
        if configured < len(tokenizer):
            tokenizer.pad_token = tokenizer.convert_ids_to_tokens(configured)
        return configured
    if candidates:
        tokenizer.pad_token = special[min(candidates, key=preference)]
    elif len(tokenizer) < rows:
        tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
    else:
        log.warning(
            "the tokenizer has no token for padding but %s, which documents end with: transformers classifies a "
            "document one token too early. Add one with data.special_tokens='<|pad|>'",
            tokenizer.eos_token,
        )
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer.get_vocab().get(str(tokenizer.pad_token))
