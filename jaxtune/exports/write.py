"""A run's model as Hugging Face safetensors, or its adapter as PEFT."""

import dataclasses
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune import data, hf
from jaxtune.config.schema import Config, Lora
from jaxtune.data.formats.sample_formats import ends_texts
from jaxtune.errors import UserError
from jaxtune.exports.card import card_datasets, card_evaluation, card_recipe, card_rows
from jaxtune.exports.copied_tensors import copied_layers, name_lost
from jaxtune.exports.quantizable import choose
from jaxtune.host.lock import locked
from jaxtune.host.run_folder import RunFolder
from jaxtune.lora.lora import LoRA
from jaxtune.models import families
from jaxtune.models.decoder import Parameters
from jaxtune.models.parameters import Parameter, loaded_names
from jaxtune.models.places import Place
from jaxtune.parallel import multihost
from jaxtune.weights.elements import gather_element
from jaxtune.weights.model import Model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

log = logging.getLogger("jaxtune")

CARD = "README.md"
UNFINISHED = ".jaxtune-unfinished"  # in a folder from the start of an export until it is whole


def export_full(
    model: Model, parameters: Parameters, config: Config, output: Path, quantize: str | None = None
) -> None:
    """A folder that transformers loads, in model.dtype; adapters among the parameters are merged into their weights.

    Quantized weights are written dequantized. Unless `quantize`, one of `hf.SCHEMES`, asks for it, they are not
    quantized again: a small adapter that is merged into 4 bits may mostly be rounded away.

    Tensors are gathered and written one at a time. A tied head is not written; padded rows are cut; config.json, the
    tokenizer's files and the tensors that are no part of the decoder are copied byte for byte.
    """
    dtype = jnp.dtype(config.model.dtype)

    def merged(name: str, index: tuple[int, ...]) -> jax.Array:
        """One matrix or vector, with the adapter beside it, rounded once."""
        parameter, weight = model.parameters[name], gather_element(parameters[name], index)
        beside = re.sub(r"\.bias$", ".weight", name)  # of a bias, the weight of its layer
        adapter = model.parameters[beside].treatment.adapter if beside in model.parameters else None
        if adapter is not None:
            parts = model.adapter_of(beside)
            values = {
                part: gather_element(parameters[other], index).astype(jnp.float32) for part, other in parts.items()
            }
            merged_into = adapter.merged if beside == name else adapter.merged_bias
            weight = merged_into(weight.astype(jnp.float32), values)
        return weight.astype(_exported_as(parameter, dtype))

    tensors = _tensors(model, model.whole, dtype, merged)
    copied = copied_layers(model, config)
    name_lost(model, config)
    if model.spec.untouched is not None or copied:
        tensors = hf.in_place(model.folder, tensors, partial(families.is_untouched, model.spec))
    changes = _classifier_config(model, config) if model.spec.labels else {}
    if quantize is not None:
        chosen = choose(model, quantize, config.model.dtype, copied)
        changes["quantization_config"] = chosen.config
        tensors = hf.quantize(tensors, quantize, chosen.weights)
    hf.write(output, tensors, config.export.max_shard_bytes)
    if multihost.is_main():
        options = (config.model.dtype, model.spec.vocabulary, changes, model.base.described)
        hf.write_config(model.folders.config, output, *options)
        _write_tokenizer(model, config, output)
        _write_ends(model, config, output)


def _classifier_config(model: Model, config: Config) -> dict[str, Any]:
    """What config.json says of a classifier: its class, its labels, and which token is padding, as batches need it."""
    names = config.model.id2label
    return {
        "architectures": [f"{families.classifiers()[model.spec.family]}ForSequenceClassification"],
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
        "pad_token_id": _classifier_tokenizer(model, config)[1],
    }


def _classifier_tokenizer(model: Model, config: Config) -> tuple["PreTrainedTokenizerFast", int | None]:
    """The tokenizer of a classifier, with a padding token that no document ends with, and that token."""
    tokenizer = hf.load_tokenizer(model.folders.tokenizer, config.chat.template, config.data.special_tokens)
    own = None if tokenizer.eos_token is None else tokenizer.get_vocab()[str(tokenizer.eos_token)]
    ends = {own} if ends_texts(tokenizer) else set()
    if config.preference.loss is not None:  # its documents are answers
        ends = {own, _turn_end(model, config)}
    described, ends = model.base.described.get("pad_token_id"), {end for end in ends if end is not None}
    return tokenizer, hf.choose_padding(tokenizer, ends, described, model.spec.vocabulary)


def _tensors(
    model: Model,
    parameters: Mapping[str, Parameter],
    dtype: jnp.dtype,
    value: Callable[[str, tuple[int, ...]], jax.Array],
) -> Iterator[hf.Tensor]:
    """The Hugging Face tensors of these parameters, made when they are asked for.

    `value`: that of a name and an index in its leading axes. Parts of a tensor are put together; rows of padding are
    cut.
    """
    parts: dict[str, list[tuple[Place, str, tuple[int, ...]]]] = {}
    for name, parameter in parameters.items():
        for index, place in parameter.elements():
            parts.setdefault(place.name, []).append((place, name, index))

    def whole(found: list[tuple[Place, str, tuple[int, ...]]], shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        tensor = np.empty(shape, dtype)
        for place, name, index in found:
            rows, part = place.rows_in(tensor), np.asarray(value(name, index))
            rows[: len(part)] = part[: len(rows)]
        return tensor

    for hf_name, found in parts.items():
        place, name, _ = found[0]
        rows, *rest = parameters[name].matrix
        shape = place.shape_in_file((model.spec.vocabulary if parameters[name].kind == "table" else rows, *rest))
        of_these = _exported_as(parameters[name], dtype)
        yield hf.Tensor(hf_name, shape, of_these, partial(whole, found, shape, of_these))


def _exported_as(parameter: Parameter, dtype: jnp.dtype) -> jnp.dtype:
    """The dtype in which a parameter of a model in `dtype` is written."""
    return jnp.dtype(jnp.float32) if parameter.float32 else dtype


def export_adapter(model: Model, parameters: Parameters, config: Config, output: Path) -> None:
    """A folder that peft loads: adapter_model.safetensors and adapter_config.json."""

    def value(name: str, index: tuple[int, ...]) -> jax.Array:
        own, start = gather_element(parameters[name], index), f"{name}_start"
        if start not in parameters:
            return own
        start = gather_element(parameters[start], index)  # which is subtracted (`lora.LoRA`): in twice the rank
        return jnp.concatenate([own, start]) if name.endswith("lora_a") else jnp.concatenate([own, -start], axis=1)

    every = model.trained | model.starts
    written = {name: _with_start(p) for name, p in every.items() if not name.endswith("_start")}
    tensors = list(_tensors(model, written, jnp.dtype(config.lora.dtype), value))
    lora, base = config.lora, _absolute(config.model.path or "")
    rank, alpha = LoRA(lora.rank, lora.alpha, lora.use_rslora, init=lora.init).exported
    lora = dataclasses.replace(lora, rank=rank, alpha=alpha)
    if lora.dropout and any(map(_is_of_experts, model.trained.values())):
        log.warning("lora.dropout=%s is written as 0: peft has no dropout for adapters of experts", lora.dropout)
        lora = dataclasses.replace(lora, dropout=0.0)
    if config.model.config or model.base.described != hf.read_config(model.folders.config):
        log.warning(
            "an adapter has no config.json, and this run has changed that of its base (model.config, "
            "model.overrides, model.rope_scaling): load the base so, or export a whole model with --merge"
        )
    hf.write_adapter(output, tensors, lora, base, config.model.revision, *_targets(model), *_patterns(model, lora))
    if multihost.is_main():
        _write_tokenizer(model, config, output)


def _with_start(parameter: Parameter) -> Parameter:
    """A or B as it is exported: of twice the rank, if it started as a part of the weight."""
    adapter = parameter.treatment.adapter
    if parameter.kind != "adapter" or "rank" not in parameter.axes or adapter.exported[0] == adapter.rank:
        return parameter
    axis = parameter.axes.index("rank")
    return dataclasses.replace(
        parameter, shape=tuple(size * (1 + (number == axis)) for number, size in enumerate(parameter.shape))
    )


def _patterns(model: Model, lora: Lora) -> tuple[dict[str, int], dict[str, float]]:
    """Rank and alpha of the modules that have others than `lora`."""
    linears = [p for p in model.frozen.values() if isinstance(p.treatment.adapter, LoRA) and not _is_of_experts(p)]
    found = {place.name.removesuffix(".weight"): p.treatment.adapter.exported for p in linears for place in p.places}
    ranks = {name: rank for name, (rank, _) in found.items() if rank != lora.rank}
    return ranks, {name: alpha for name, (_, alpha) in found.items() if alpha != lora.alpha}


def _write_tokenizer(model: Model, config: Config, output: Path) -> None:
    """The tokenizer's files as they are, but for special tokens, a chat template that the recipe names, and padding."""
    home = model.folders.tokenizer
    hf.copy_tokenizer_files(home, output)
    if model.spec.labels:
        tokenizer, _ = _classifier_tokenizer(model, config)
        if tokenizer.pad_token != hf.load_tokenizer(home).pad_token or config.data.special_tokens:
            tokenizer.save_pretrained(output)
    elif config.data.special_tokens:
        hf.load_tokenizer(home, None, config.data.special_tokens).save_pretrained(output)
    if config.chat.template is not None:
        tokenizer = hf.load_tokenizer(home, config.chat.template, config.data.special_tokens)
        hf.write_chat_template(output, str(tokenizer.chat_template))


def _write_ends(model: Model, config: Config, output: Path) -> list[int]:
    """Have generation_config.json name the token that ends an answer.

    Returns the tokens that end an answer if the base's own files do not name all of them, else [].
    """
    if model.spec.labels:
        return []
    described = model.base.described.get("text_config") or model.base.described
    before = hf.end_tokens(hf.read_generation_config(model.folders.tokenizer)) or hf.end_tokens(described)
    end = _turn_end(model, config)
    return [] if end is None or end in before else hf.write_turn_end(output, end, described)


def _turn_end(model: Model, config: Config) -> int | None:
    """The token that ends an answer by the chat template; None: there is no template, or it does not say."""
    try:
        tokenizer = hf.load_tokenizer(model.folders.tokenizer, config.chat.template, config.data.special_tokens)
        end = data.ChatTemplate(tokenizer).turn_end() if tokenizer.chat_template else None
    except UserError as error:
        log.warning("which token ends an answer is not known, so the export may not stop there: %s", error)
        return None
    return None if end is None else tokenizer.get_vocab()[end]


def _absolute(path: str) -> str:
    """A local folder by its whole path, so that peft finds it from anywhere; a hub id as it is."""
    return str(Path(path).resolve()) if Path(path).is_dir() else path


def _targets(model: Model) -> tuple[list[str], list[str]]:
    """Names by which peft finds exactly the adapted modules, and parameters: the experts of a layer in one tensor.

    transformers 5 makes such a parameter of experts that files have apart, and peft then takes every module of their
    names for one of them. So others of these names are named as parameters: by their weights.
    """
    loaded, short = loaded_names(model.base.spec), model.spec.untouched is None
    linears = {loaded[place.name]: p for p in model.parameters.values() if p.kind == "linear" for place in p.places}
    modules = {name.removesuffix(".weight"): p for name, p in linears.items() if name.endswith(".weight")}
    stacked = {name: p for name, p in linears.items() if not name.endswith(".weight")}
    experts = {name: p for name, p in modules.items() if _is_of_experts(p)}
    of_experts = {_ending(name) for name in _adapted(experts)}
    alike = {f"{name}.weight" for name in _adapted(modules) - experts.keys() if _ending(name) in of_experts}
    if bare := {_module(name) for name in experts.keys() - _adapted(experts)} & set(map(_module, _adapted(experts))):
        log.warning("peft cannot load this adapter: gate, up and down of an expert (%s) must all have one", min(bare))
    return _names(modules, short, 1), [*_names(stacked, short, 2), *sorted(alike)]


def _adapted(linears: Mapping[str, Parameter]) -> set[str]:
    return {name for name, parameter in linears.items() if parameter.treatment.adapter}


def _names(linears: Mapping[str, Parameter], short: bool, parts: int) -> list[str]:
    """The endings of those that are adapted (q_proj), where all that end so are; else, or if not `short`, whole names.

    Whole names inside a larger model, whose other parts may have a q_proj of their own.
    """
    adapted = _adapted(linears)
    endings = {_ending(name, parts) for name in adapted}
    whole_kinds = {name for name in linears if _ending(name, parts) in endings} == adapted
    return sorted(endings if whole_kinds and short else adapted)


def _ending(name: str, parts: int = 1) -> str:
    return ".".join(name.split(".")[-parts:])


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _is_of_experts(parameter: Parameter) -> bool:
    return len(parameter.lead) > 1


def export(
    model: Model,
    parameters: Parameters,
    config: Config,
    run: RunFolder,
    output: Path,
    kind: str,
    *,
    merge: bool = False,
    quantize: str | None = None,
    steps: int,
    tokens: int,
    hub_id: str | None = None,
) -> None:
    """Write one format, with a model card. `quantize`: as of `export_full`; `hub_id`: where it is to be uploaded to.

    Raises UserError where the format does not fit the run, or the output would destroy what it is made from.
    """
    check_apart(output, model)
    check_kind(config, kind, merge, quantize)
    with locked(output, ".jaxtune-lock", "export to another folder"):
        if multihost.is_main():
            (output / UNFINISHED).touch()
            (output / CARD).unlink(missing_ok=True)  # an earlier export is not whole any more
        if kind == "peft":
            export_adapter(model, parameters, config, output)
        else:
            export_full(model, parameters, config, output, quantize)
        if multihost.is_main():
            _write_card(model, config, run, output, kind, quantize, steps, tokens, hub_id)
            (output / UNFINISHED).unlink()


def _write_card(
    model: Model,
    config: Config,
    run: RunFolder,
    output: Path,
    kind: str,
    quantize: str | None,
    steps: int,
    tokens: int,
    hub_id: str | None,
) -> None:
    """Write the model card, arguments as of `export`; and say where an adapter's base does not stop."""
    written = {} if quantize is None else {"weights": f"linear layers in {quantize}"}
    ends = _write_ends(model, config, output) if kind == "peft" else []
    if ends:
        log.warning(
            "answers end with token %d, at which the base does not stop: with this adapter give generate() "
            "eos_token_id=%s, or vLLM stop_token_ids=%s; a whole model (--merge) says so itself",
            ends[-1],
            *(ends, ends[-1:]),
        )
    hf.write_card(
        output,
        title=config.train.run_name or output.name,
        name=hub_id or output.name,
        base_model=None if config.model.from_scratch else config.model.path,
        adapter=kind == "peft",
        auto_class=_auto_class(model),
        base_options=_base_options(model, config) if kind == "peft" else {},
        ends=ends,
        rows=card_rows(config, run, steps, tokens) | written,
        curve=run.loss_curve,
        recipe=card_recipe(config),
        datasets=card_datasets(config),
        evaluation=card_evaluation(config, run, steps),
    )


def _base_options(model: Model, config: Config) -> dict[str, Any]:
    """What transformers must be told of the base, before peft loads an adapter on it."""
    if not model.spec.labels:
        return {}
    return {"num_labels": model.spec.labels, "pad_token_id": _classifier_tokenizer(model, config)[1]}


def _auto_class(model: Model) -> str:
    """The class of transformers that loads the model, or the one that it is inside of."""
    if model.spec.labels:
        return "AutoModelForSequenceClassification"
    return "AutoModelForCausalLM" if model.spec.untouched is None else "AutoModelForImageTextToText"


def check_kind(config: Config, kind: str, merge: bool, quantize: str | None = None) -> None:
    """Raise UserError where a run cannot be exported in a format."""
    if kind == "peft" and not config.lora.enabled:
        raise UserError("--format=peft: this run trained the whole model; export it with --format=hf")
    if kind == "peft" and quantize is not None:
        raise UserError(
            f"--quantize={quantize}: an adapter is not quantized, only a whole model: --merge without --format=peft"
        )
    if kind == "hf" and config.lora.enabled and not merge:
        raise UserError("--format=hf: this run trained an adapter; add --merge for a whole model, or use --format=peft")
    if kind == "peft" and config.lora.merge_interval:
        raise UserError(
            "--format=peft: this run merged adapters into the model (lora.merge_interval), so that the last ones say "
            "nothing of its base; export the whole model with --merge"
        )


def check_apart(output: Path, model: Model) -> None:
    """Raise UserError where an export would destroy what it is made from."""
    if output.resolve() in {folder.resolve() for folder in model.folders}:
        raise UserError(f"{output} holds the model that the run started from; export to another folder")
    if RunFolder(output).checkpoints.exists():
        raise UserError(f"{output} is the folder of a run; export to another one, for example {output / 'export'}")
