"""A model folder's tokenizer: load it, and copy its files as they are."""

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from jaxtune.errors import UserError, is_failure
from jaxtune.hf.chat_templates import find_template
from jaxtune.hf.folder import read_generation_config, read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_OLDER_TEMPLATE = "chat_template.json"  # of processors, before they had chat_template.jinja
FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "vocab.json", "merges.txt", "tokenizer.model", "generation_config.json"),
    # of a model that sees images
    *("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json", _OLDER_TEMPLATE),
)


def load_tokenizer(
    folder: Path, chat_template: str | None = None, special_tokens: tuple[str, ...] = ()
) -> "PreTrainedTokenizerFast":
    """Return the tokenizer of a local model folder.

    Special tokens that it lacks are added, and its chat template is replaced if one is named (`find_template`).

    Raises:
        UserError: there is no tokenizer, it cannot be read, it needs remote code, or it has no fast version.
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


def copy_tokenizer_files(source: Path, target: Path) -> list[str]:
    """Copy tokenizer, processors, chat template and generation defaults byte for byte; return the names of the files.

    Such files that only the target has are removed: they belong to an earlier export.
    """
    target.mkdir(parents=True, exist_ok=True)
    names = [name for name in FILES if (source / name).is_file()]
    for name in set(FILES) - set(names):
        (target / name).unlink(missing_ok=True)
    for name in names:
        shutil.copyfile(source / name, target / name)
    return names


def write_chat_template(target: Path, template: str, end: int | None) -> None:
    """Give an exported folder another chat template, and add the token that ends its turns to the generation config."""
    (target / "chat_template.jinja").write_text(template, encoding="utf-8")
    (target / _OLDER_TEMPLATE).unlink(missing_ok=True)
    config = read_generation_config(target)
    listed = config.get("eos_token_id")
    ends = [] if listed is None else listed if isinstance(listed, list) else [listed]
    if end is not None and end not in ends:
        config["eos_token_id"] = [*ends, end]
        (target / "generation_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
