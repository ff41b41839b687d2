"""Merging of whole models: Hugging Face folders with the same tensors."""

import json
import logging
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxtune import hf
from jaxtune.errors import UserError, format_count
from jaxtune.hf.tensors.tensor_sources import ALL_DTYPES, DTYPES, TensorSource, check_content
from jaxtune.json_file import read_json
from jaxtune.merging.methods import Read, Values, cast, merge_tensor
from jaxtune.merging.options import MergeOptions

log = logging.getLogger("jaxtune")

_HEAD = "lm_head.weight"
_EMBEDDING = re.compile(r"(model|model\.language_model|transformer)\.(embed_tokens|embeddings|wte)\.weight")
_TIES = "tie_word_embeddings"
_QUANTIZED = ("U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0")
# Entries of config.json that say nothing about what the weights compute.
_OF_FILES = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "use_cache", _TIES}
_OF_FILES |= {"bos_token_id", "eos_token_id", "pad_token_id"}


class WholeModel(NamedTuple):
    """A model to merge, or the base.

    Attributes:
        folder: its Hugging Face folder.
        config: its config.json.
        tensors: its tensors, by their current names in transformers.
    """

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorSource]


def merge_models(folders: Sequence[Path], base: Path | None, output: Path, options: MergeOptions) -> None:
    """Write the merged model to a folder, tensor by tensor. The files appear when all are complete.

    It has the names, dtypes, config.json, tokenizer and chat template of the base, or else of the first model. A head
    stays tied if it is tied in every model. If it is not, the result has a head of its own, to which a tied model
    contributes its embedding, and config.json says so.

    Raises:
        UserError: the models do not have the same tensors, or one is quantized.
    """
    models = [_open(folder) for folder in folders]
    first, *others = everyone = [*([_open(base)] if base else []), *models]
    _warn_other_configs(first, others)
    everyone, changes = _with_heads(everyone)
    _check_alike(everyone)
    check_content(source for model in everyone for source in model.tensors.values())
    tensors = hf.named_as_in_files(first.folder, _merged(everyone, base is not None, options))
    with hf.staging_folder(output, replaces=re.compile("(?!)")) as stage:  # (?!) matches no file: none is removed
        hf.write(stage, tensors)
        _write_config(first, stage, changes)
        hf.copy_tokenizer_files(first.folder, stage)
    _warn_lost_template(first, models)


def _open(folder: Path) -> WholeModel:
    model = WholeModel(folder, hf.read_config(folder), hf.open_weights(folder))
    bits = next((name for name, source in model.tensors.items() if source.dtype in _QUANTIZED), None)
    if model.config.get("quantization_config") or bits:
        what = f"{bits} is {model.tensors[bits].dtype}" if bits else "config.json has a quantization_config"
        raise UserError(f"{folder}: {what}; dequantize the model first (`dequantize` of transformers), then merge it")
    return model


def _with_heads(models: Sequence[WholeModel]) -> tuple[list[WholeModel], dict[str, bool]]:
    """Return the models, all with a head or all without, and the change to the first one's config.json."""
    first = models[0]
    embedding = next((name for name in first.tensors if _EMBEDDING.fullmatch(name)), None)
    comparable = all(embedding in model.tensors for model in models)
    if embedding is None or not comparable or not any(_HEAD in model.tensors for model in models):
        return list(models), {}  # differing names are refused later
    tied = [_is_tied(model, embedding) for model in models]
    if all(tied):
        without = [model._replace(tensors=_without_head(model.tensors)) for model in models]
        return without, {_TIES: True} if _HEAD in first.tensors else {}
    whole = [
        model._replace(tensors={**model.tensors, _HEAD: model.tensors[embedding]}) if is_tied else model
        for model, is_tied in zip(models, tied)
    ]
    return whole, {_TIES: False} if tied[0] else {}


def _is_tied(model: WholeModel, embedding: str) -> bool:
    """Whether a model's head is its embedding."""
    head = model.tensors.get(_HEAD)
    if head is None or head.equals(model.tensors[embedding]):
        return True
    if model.config.get(_TIES):
        raise UserError(
            f"{head.file}: {_HEAD} differs from {embedding}, but config.json has {_TIES}=true; set it to false if the "
            f"model has a head of its own, else remove the tensor"
        )
    return False


def _without_head(tensors: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
    return {name: source for name, source in tensors.items() if name != _HEAD}


def _check_alike(models: Sequence[WholeModel]) -> None:
    """Raise UserError unless all models have tensors of the same names and shapes."""
    first = models[0]
    for model in models[1:]:
        if model.config.get("model_type") != first.config.get("model_type"):
            raise UserError(
                f"{model.folder} is a {model.config.get('model_type')} and {first.folder} a "
                f"{first.config.get('model_type')}; merge models of the same base"
            )
        for ours, theirs in ((first, model), (model, first)):
            if lacking := sorted(ours.tensors.keys() - theirs.tensors.keys()):
                raise UserError(
                    f"{theirs.folder} has no {lacking[0]}, which {ours.tensors[lacking[0]].file} has "
                    f"({format_count(len(lacking), 'such tensor')}); merge models of the same base"
                )
        for name, source in first.tensors.items():
            if (shape := model.tensors[name].shape) == source.shape:
                continue
            of_tokens = name == _HEAD or _EMBEDDING.fullmatch(name)
            what = "the vocabularies differ in size: " if of_tokens and shape[1:] == source.shape[1:] else ""
            raise UserError(
                f"{model.tensors[name].file}: {what}{name} is {shape}, and {source.shape} in {source.file}; "
                "merge models of the same base and vocabulary"
            )


def _merged(models: Sequence[WholeModel], has_base: bool, options: MergeOptions) -> Iterator[hf.OutputTensor]:
    """Yield the merged tensors, whose data is read and merged when they are written."""
    for name, source in models[0].tensors.items():
        sources = [model.tensors[name] for model in models]  # of the base first, if there is one
        if source.dtype in DTYPES and 0 not in source.shape:
            get = partial(_merge, name, sources, has_base, options)
        else:
            get = partial(_same, name, sources)
        yield hf.OutputTensor(name, source.shape, ALL_DTYPES[source.dtype], get)


def _merge(name: str, sources: Sequence[TensorSource], has_base: bool, options: MergeOptions) -> np.ndarray:
    first = sources[0]
    reads: list[Read] = [partial(_read, name, source) for source in sources]
    merged = merge_tensor(name, reads[has_base:], reads[0] if has_base else None, options)  # True is 1
    try:
        return cast(merged, DTYPES[first.dtype], f"{first.file}: {name}").reshape(first.shape)
    except UserError:
        if all(source.equals(first) for source in sources[1:]):  # such as bounds that are infinite (Gemma 4's tower)
            return first.whole()
        raise


def _read(name: str, source: TensorSource) -> Values:
    if source.dtype not in DTYPES:
        raise UserError(f"{source.file}: {name} is {source.dtype}; only {', '.join(DTYPES)} are merged")
    return np.atleast_1d(source.whole().astype(np.float32))  # `out=` needs an array, also for a scalar


def _same(name: str, sources: Sequence[TensorSource]) -> np.ndarray:
    """Return a tensor of integers or the like, which must be the same in all models."""
    for source in sources[1:]:
        if not source.equals(sources[0]):
            raise UserError(
                f"{source.file}: {name} is {sources[0].dtype} and differs from the one in {sources[0].file}; "
                f"only {', '.join(DTYPES)} are merged"
            )
    return sources[0].whole()


def _write_config(first: WholeModel, stage: Path, changes: Mapping[str, bool]) -> None:
    """Copy config.json, byte for byte if nothing changes."""
    if not changes:
        shutil.copyfile(first.folder / "config.json", stage / "config.json")
        return
    config = {**first.config, **changes}
    if _TIES in (text := config.get("text_config") or {}):
        config["text_config"] = {**text, **changes}
    (stage / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _warn_other_configs(first: WholeModel, others: Sequence[WholeModel]) -> None:
    """Warn about entries of config.json that differ, such as the base of RoPE: the result has the first one's."""
    for model in others:
        keys = (first.config.keys() | model.config.keys()) - _OF_FILES
        if differing := sorted(key for key in keys if first.config.get(key) != model.config.get(key)):
            log.warning(
                "%s and %s differ in %s of config.json; the merged model has the values of the former",
                *(first.folder, model.folder, ", ".join(differing)),
            )


def _warn_lost_template(first: WholeModel, models: Sequence[WholeModel]) -> None:
    """Warn if the base has no chat template, but a model has one."""
    if _has_template(first.folder):
        return
    if having := next((model.folder for model in models if _has_template(model.folder)), None):
        log.warning(
            "%s has no chat template, so the merged model has none; to chat with it, copy the tokenizer's files and "
            "generation_config.json of %s",
            *(first.folder, having),
        )


def _has_template(folder: Path) -> bool:
    if any((folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    file = folder / "tokenizer_config.json"
    return file.is_file() and "chat_template" in read_json(file)
