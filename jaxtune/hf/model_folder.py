"""Find a model's folder, locally or on the Hugging Face hub, and read the JSON files in it."""

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxtune.errors import UserError, near_paths
from jaxtune.json_file import read_json

# Never *.bin (pickle) and never *.py (remote code).
_TEXT_FILES = ["*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt"]
STAGE = ".partial"  # the temporary folder in which `staging_folder` collects files


def resolve(path: str, revision: str | None = None, *, weights: bool = True, holds: str | None = "config.json") -> Path:
    """Return the local folder of a model or adapter.

    Args:
        path: a folder, or the id of a model on the hub, which is then downloaded into the hub's cache.
        revision: branch, tag or commit on the hub; must be None for a local folder.
        weights: whether to download the safetensors files too.
        holds: the file that must be in the folder (`adapter_config.json` for an adapter); None: no check.

    Raises:
        UserError: the folder or model does not exist, is the folder of a run, or lacks `holds`.
    """
    local = Path(path).expanduser()
    if local.is_dir():
        if revision is not None:
            raise UserError(f"revision '{revision}' has no meaning for the local folder {path}; leave it out")
        folder = local
        _refuse_run(path, local)
    elif local.exists():
        raise UserError(f"{path} is a file; give the folder that holds {holds or 'it'}")
    elif local.is_absolute() or path.startswith((".", "~")) or not is_hub_id(path):
        raise UserError(f"no folder {path}{near_paths(local)}")
    else:
        folder = _download(path, revision, _TEXT_FILES + ["*.safetensors"] * weights, near_paths(local))
    if holds is not None and not (folder / holds).is_file():
        present = ", ".join(sorted(file.name for file in folder.iterdir())[:8]) or "nothing"
        raise UserError(
            f"{path} has no {holds}, so it cannot be used here; it holds {present}{_holders(folder, holds)}"
        )
    return folder


def _refuse_run(path: str, folder: Path) -> None:
    """Raise UserError for the folder of a run, whose config.json has the options of the run."""
    file = folder / "config.json"
    if file.is_file() and {"model", "data", "train"} <= read_json(file).keys():
        exported = (folder / "export").is_dir()
        instead = f"; its result is in {path.rstrip('/')}/export" if exported else ", and has exported nothing yet"
        raise UserError(f"{path} is the folder of a run, not of a model or adapter{instead}")


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.json of a model folder. Raises UserError if it is missing or malformed."""
    return read_json(folder / "config.json")


def label_names(config: dict[str, Any]) -> tuple[str, ...] | None:
    """Return the labels of the classifier that a config.json describes, in order of number; None: not a classifier."""
    classes = config.get("architectures") or []
    if not isinstance(classes, list):
        raise UserError(f"config.json: architectures is {classes!r:.60}; it must be a list of names")
    if not any(str(name).endswith("ForSequenceClassification") for name in classes):
        return None
    names = config.get("id2label") or {"0": "LABEL_0", "1": "LABEL_1"}  # the default, which transformers omits
    if not isinstance(names, dict) or not all(str(number).isdecimal() for number in names):
        raise UserError(f"config.json: id2label is {names!r:.60}; it must be an object, number to name")
    return tuple(str(names[number]) for number in sorted(names, key=int))


def write_config(
    source: Path,
    target: Path,
    dtype: str,
    vocabulary: int,
    changes: Mapping[str, Any] | None = None,
    described: Mapping[str, Any] | None = None,
) -> None:
    """Copy config.json from one model folder to another, byte for byte if no entry differs.

    `quantization_config` is left out, because exported weights are never quantized.

    Args:
        source, target: the two model folders; `target` is created if it does not exist.
        dtype: dtype of the exported weights.
        vocabulary: number of rows of the embedding; for a decoder inside a larger model it goes into `text_config`.
        changes: further keys and their values.
        described: the config to write instead of the source's; None: the source's.
    """
    saved = read_config(source)
    config = saved if described is None else dict(described)
    dtypes = {"dtype", "torch_dtype"}  # transformers before 4.56 calls it torch_dtype
    written = {key: value for key, value in config.items() if key != "quantization_config"}
    written |= dict.fromkeys(dtypes & config.keys() or {"dtype"}, dtype)
    if "text_config" in config:
        text = config["text_config"]
        written["text_config"] = text | dict.fromkeys(dtypes & text.keys(), dtype) | _vocabularies(text, vocabulary)
    else:
        written |= _vocabularies(config, vocabulary)
    written |= changes or {}
    target.mkdir(parents=True, exist_ok=True)
    if written == saved:
        shutil.copyfile(source / "config.json", target / "config.json")
    else:
        (target / "config.json").write_text(json.dumps(written, indent=2) + "\n")


def _vocabularies(config: Mapping[str, Any], vocabulary: int) -> dict[str, int]:
    """Return the entries of a config that say the number of tokens, with another number."""
    further = "vocab_size_per_layer_input"
    return dict.fromkeys(
        ["vocab_size", *[further] * (further in config and config[further] == config["vocab_size"])], vocabulary
    )


def read_generation_config(folder: Path) -> dict[str, Any]:
    """Return generation_config.json of a model folder; empty if the folder has none."""
    path = folder / "generation_config.json"
    return read_json(path) if path.exists() else {}


@contextmanager
def staging_folder(folder: Path, replaces: re.Pattern[str]) -> Iterator[Path]:
    """Yield a temporary folder whose files move into `folder` once the block has ended without an error.

    Args:
        folder: created if it does not exist.
        replaces: files of `folder` whose whole name matches are removed before the new ones move in.

    Raises:
        UserError: the folder cannot be written to (no permission, disk full).
    """
    stage = folder / STAGE
    try:
        shutil.rmtree(stage, ignore_errors=True)  # left by a run that was killed
        stage.mkdir(parents=True)
        yield stage
        for file in folder.iterdir():
            if replaces.fullmatch(file.name):
                file.unlink()
        for file in sorted(stage.iterdir(), key=lambda file: file.suffix == ".json"):  # an index after its files
            os.replace(file, folder / file.name)
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def is_hub_id(path: str) -> bool:
    """Whether a path has the form of a model id on the hub."""
    from huggingface_hub.errors import HFValidationError  # takes long to import, and a local model needs none of it
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(path)
    except HFValidationError:
        return False
    return True


def _download(repo_id: str, revision: str | None, patterns: list[str], nearest: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    at = f" at revision '{revision}'" if revision else ""
    duplicates = ["*/*", "consolidated*"]  # the same weights again, in the model maker's own layout
    try:
        return Path(snapshot_download(repo_id, revision=revision, allow_patterns=patterns, ignore_patterns=duplicates))
    except GatedRepoError as error:
        raise UserError(
            f"the hub model {repo_id} needs its owner's permission: ask for it on https://huggingface.co/{repo_id}, "
            "then set HF_TOKEN or run `hf auth login`"
        ) from error
    except RevisionNotFoundError as error:
        raise UserError(
            f"the hub model {repo_id} has no revision '{revision}'; give a branch, tag or commit"
        ) from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"{repo_id} is neither a folder here{nearest} nor a model on the Hugging Face hub "
            "(a private one needs HF_TOKEN or `hf auth login`)"
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise UserError(
            f"{repo_id}{at} is not a folder here{nearest}, is not in the hub's cache, and the hub cannot be reached; "
            "give a local folder, or try again with a network connection"
        ) from error
    except Exception as error:  # network failures reach us as many unrelated exception types
        raise UserError(f"downloading {repo_id}{at} from the hub failed: {error}") from error


def _holders(folder: Path, holds: str) -> str:
    """A hint for an error message: an adapter's base model, or the subfolders that have the missing file."""
    if (folder / "adapter_config.json").is_file():
        base = read_json(folder / "adapter_config.json").get("base_model_name_or_path")
        return f"; it is an adapter of {base}: train on from it with model.path={base} and lora.path={folder}"
    near = sorted(str(file.parent) for file in folder.glob(f"*/{holds}"))[:3]
    return f"; did you mean {' or '.join(near)}?" if near else ""
