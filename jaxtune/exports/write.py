"""A run's model as Hugging Face safetensors, or its adapter as PEFT."""

import dataclasses
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune import hf
from jaxtune.config.schema import Config
from jaxtune.errors import UserError
from jaxtune.exports.card import card_datasets, card_evaluation, card_recipe, card_rows
from jaxtune.exports.copied_tensors import copied_layers, warn_lost_layers
from jaxtune.exports.decision_model import jev_tensors, write_jev_config
from jaxtune.exports.peft_targets import is_of_experts, peft_patterns, peft_targets
from jaxtune.exports.tokenizer_files import classifier_tokenizer, write_ends, write_tokenizer
from jaxtune.exports.vllm_limits import adapter_limit, format_limit
from jaxtune.host.lock import hold_lock
from jaxtune.host.run_folder import RunFolder
from jaxtune.inference.decisions import DECISION_FILE, evaluated_temperatures, write_decision
from jaxtune.lora.lora import LoRA
from jaxtune.models import families
from jaxtune.models.decoder import Parameters
from jaxtune.models.parameters import Parameter
from jaxtune.models.places import Place
from jaxtune.models.sites import loaded_names
from jaxtune.parallel import multihost
from jaxtune.quant.options import served_as
from jaxtune.weights.elements import gather_element
from jaxtune.weights.model import Model
from jaxtune.weights.mtp_files import copied_by_modules
from jaxtune.weights.quantizable import Quantizable, quantizable

log = logging.getLogger("jaxtune")

CARD = "README.md"
UNFINISHED = ".jaxtune-unfinished"  # in a folder from the start of an export until it is whole


def export_full(
    model: Model, parameters: Parameters, config: Config, output: Path, quantize: str | None = None
) -> None:
    """Write a folder that transformers loads, in model.dtype, with adapters merged into their weights.

    Quantized weights are written dequantized. `quantize`, one of `hf.SCHEMES`, quantizes them again; that is not the
    default because a small adapter that is merged into 4 bits may mostly be rounded away.

    A tensor is gathered while the one before is written. A tied head is not written, and padded rows are cut.
    config.json, the tokenizer's files and the tensors outside the decoder are copied byte for byte.
    """
    tensors, copies = _whole_tensors(model, parameters, config)
    warn_lost_layers(model, config)
    decides = config.decision.loss is not None and bool(model.spec.labels)
    changes = _classifier_config(model, config) if model.spec.labels and not decides else {}
    if quantize is not None:
        options, dtype_of_others = served_as(config.serve, quantize), config.model.dtype
        selected = quantizable(model.spec, model.whole, options, f"--quantize={quantize}", copies)
        changes["quantization_config"] = hf.quantization_config(options, dtype_of_others, selected.unquantized)
        tensors = hf.quantize(tensors, options, selected.weights)
        _say_quantized(selected, quantize, dtype_of_others)
    tensors = _named_as_in_files(model, config, tensors)
    if decides:
        tensors = jev_tensors(tensors, model.spec.hidden)
    hf.write(output, tensors, config.export.max_shard_bytes)
    with multihost.write_together(output):
        if multihost.is_main():
            options = (config.model.dtype, model.spec.vocabulary, changes, model.base.described)
            hf.write_config(model.folders.config, output, *options)
            if decides:
                write_jev_config(output, model.spec.hidden)
            write_tokenizer(model, config, output)
            write_ends(model, config, output)


def export_weights(model: Model, parameters: Parameters, config: Config, output: Path) -> None:
    """Write only the safetensors of `export_full`, for a server that has the other files of the model."""
    tensors, _ = _whole_tensors(model, parameters, config)
    hf.write(output, _named_as_in_files(model, config, tensors), config.export.max_shard_bytes)


def _whole_tensors(model: Model, parameters: Parameters, config: Config) -> tuple[Iterator[hf.OutputTensor], list[str]]:
    """Return the tensors of the whole model, with adapters merged, and the names of its copied tensors."""
    dtype = jnp.dtype(config.model.dtype)

    def merge(name: str, index: tuple[int, ...]) -> jax.Array:
        """Return one matrix or vector with its adapter merged, rounded once."""
        parameter, weight = model.parameters[name], gather_element(parameters[name], index)
        owner = re.sub(r"\.bias$", ".weight", name)  # an adapter belongs to a weight, but may change the layer's bias
        adapter = model.parameters[owner].treatment.adapter if owner in model.parameters else None
        if adapter is not None:
            parts = model.adapter_of(owner)
            values = {
                part: gather_element(parameters[other], index).astype(jnp.float32) for part, other in parts.items()
            }
            merge_into = adapter.merged if owner == name else adapter.merged_bias
            weight = merge_into(weight.astype(jnp.float32), values)
        return weight.astype(_export_dtype(parameter, dtype))

    copies, copied = copied_by_modules(model.spec, config, model.folder), copied_layers(model, config)
    tensors = _tensors(model, model.whole, dtype, merge, copies)
    if not config.model.from_scratch and (model.spec.untouched is not None or copied):
        # The other parts of a larger model and the copied layers are read from the base and written unchanged.
        tensors = hf.with_untouched(model.folder, tensors, partial(families.is_untouched, model.spec))
    return tensors, [*copied, *copies]


def _named_as_in_files(model: Model, config: Config, tensors: Iterator[hf.OutputTensor]) -> Iterator[hf.OutputTensor]:
    return tensors if config.model.from_scratch else hf.named_as_in_files(model.folder, tensors)


def _say_quantized(selected: Quantizable, kind: str, dtype: str) -> None:
    """Log how many linear layers are quantized, and which are not; dtype: of all other weights."""
    log.info(
        "%d linear layers are written in %s; embedding, head and routers stay in %s",
        len(selected.weights),
        kind,
        dtype,
    )
    if selected.reasons:
        log.warning("%d linear layers stay in %s: %s", len(selected.reasons), dtype, selected.left_out)


def _classifier_config(model: Model, config: Config) -> dict[str, Any]:
    """Return a classifier's changes to config.json: class, labels, and the padding token, which batches need."""
    names = config.model.id2label
    return {
        "architectures": [f"{families.classifiers()[model.spec.family]}ForSequenceClassification"],
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
        "pad_token_id": classifier_tokenizer(model, config)[1],
    }


def _tensors(
    model: Model,
    parameters: Mapping[str, Parameter],
    dtype: jnp.dtype,
    value: Callable[[str, tuple[int, ...]], jax.Array],
    copies: Mapping[str, str],
) -> Iterator[hf.OutputTensor]:
    """Yield the parameters as Hugging Face tensors, whose data is computed when they are written.

    `value` returns the array of a parameter's name and an index in its leading axes. A tensor is assembled from its
    parts, without rows of padding. `copies`: tensors that are written again under other names.
    """
    # Parts of each Hugging Face tensor: (place in the tensor, parameter, index in the parameter's leading axes).
    parts: dict[str, list[tuple[Place, str, tuple[int, ...]]]] = {}
    for name, parameter in parameters.items():
        for index, place in parameter.elements():
            parts.setdefault(place.name, []).append((place, name, index))
    parts |= {copy: parts[original] for copy, original in copies.items()}
    base = cache(partial(hf.open_weights, model.folder))

    def gather(pieces: list[tuple[Place, str, tuple[int, ...]]]) -> None:
        for _, name, index in pieces:
            jax.block_until_ready(value(name, index))  # otherwise gathered pieces would pile up on the device

    def assemble(pieces: list[tuple[Place, str, tuple[int, ...]]], shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        first = pieces[0][0]
        if first.stack is not None and {place.element for place, *_ in pieces} != set(range(first.stack)):
            # The other elements belong to parts of a larger model that this run does not read.
            tensor = base()[first.name].whole().astype(dtype)
        else:
            tensor = np.empty(shape, dtype)
        for place, name, index in pieces:
            rows, part = place.rows_in(tensor), np.asarray(value(name, index))
            rows[: len(part)] = part[: len(rows)]  # cuts padded rows of the vocabulary
        return tensor

    for hf_name, pieces in parts.items():
        place, name, _ = pieces[0]
        rows, *rest = parameters[name].matrix
        shape = place.shape_in_file((model.spec.vocabulary if parameters[name].kind == "table" else rows, *rest))
        file_dtype = _export_dtype(parameters[name], dtype)
        get = partial(assemble, pieces, shape, file_dtype)
        yield hf.OutputTensor(hf_name, shape, file_dtype, get, partial(gather, pieces))


def _export_dtype(parameter: Parameter, dtype: jnp.dtype) -> jnp.dtype:
    """Return the dtype in which a parameter of a model in `dtype` is written."""
    return jnp.dtype(jnp.float32) if parameter.float32 else dtype


def export_adapter(model: Model, parameters: Parameters, config: Config, output: Path) -> None:
    """Write a folder that peft loads: adapter_model.safetensors and adapter_config.json."""

    def value(name: str, index: tuple[int, ...]) -> jax.Array:
        part, start = gather_element(parameters[name], index), f"{name}_start"
        if start not in parameters:
            return part
        # The adapter is B A - B_start A_start (`lora.lora.LoRA`), which peft reads as one product of twice the rank.
        start = gather_element(parameters[start], index)
        return jnp.concatenate([part, start]) if name.endswith("lora_a") else jnp.concatenate([part, -start], axis=1)

    every = model.trained | model.starts
    written = {name: _with_start(p) for name, p in every.items() if not name.endswith("_start")}
    loaded = loaded_names(model.base.spec)  # of modules that are trained whole, and of biases
    tensors = [
        tensor._replace(name=loaded.get(tensor.name, tensor.name))
        for tensor in _tensors(model, written, jnp.dtype(config.lora.dtype), value, {})
    ]
    lora, base = config.lora, _absolute(config.model.path or "")
    rank, alpha = LoRA(lora.rank, lora.alpha, lora.use_rslora, init=lora.init).exported_rank_alpha
    lora = dataclasses.replace(lora, rank=rank, alpha=alpha)
    targets, wrapped = peft_targets(model, lora)
    if lora.dropout and (wrapped or any(map(is_of_experts, model.trained.values()))):
        log.warning(
            "lora.dropout=%s is written as 0: peft has no dropout for adapters of experts, nor of other layers with "
            "the name of an expert's",
            lora.dropout,
        )
        lora = dataclasses.replace(lora, dropout=0.0)
    if config.model.config or model.base.described != hf.read_config(model.folders.config):
        log.warning(
            "an adapter has no config.json, and this run has changed its base's (model.config, model.overrides, "
            "model.rope_scaling): load the base with the same changes, or export a whole model with --merge"
        )
    hf.write_adapter(
        output, tensors, lora, base, config.model.revision, targets, wrapped, *peft_patterns(model, lora, wrapped)
    )
    with multihost.write_together(output):
        if multihost.is_main():
            write_tokenizer(model, config, output)


def _with_start(parameter: Parameter) -> Parameter:
    """Return the exported form of A or B, which has twice the rank if the adapter started as a part of the weight."""
    adapter = parameter.treatment.adapter
    if parameter.kind != "adapter" or "rank" not in parameter.axes or adapter.exported_rank_alpha[0] == adapter.rank:
        return parameter
    axis = parameter.axes.index("rank")
    return dataclasses.replace(
        parameter, shape=tuple(size * (1 + (number == axis)) for number, size in enumerate(parameter.shape))
    )


def _absolute(path: str) -> str:
    """Return the absolute path of a local folder, so that peft finds it from anywhere; a hub id stays as it is."""
    return str(Path(path).resolve()) if Path(path).is_dir() else path


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
    """Write a run's model to `output` in one format, with a model card.

    Args:
        model: The run's model.
        parameters: Its parameters.
        config: The run's config.
        run: The run's folder.
        output: The folder to write.
        kind: "hf" for a whole model, or "peft" for an adapter.
        merge: Whether the adapter of the run may be merged into a whole model.
        quantize: The scheme to quantize to, as in `export_full`.
        steps: Steps that the model was trained for, for the card.
        tokens: Tokens that it was trained on, for the card.
        hub_id: The hub repository that the export will be uploaded to, for the card.

    Raises:
        UserError: The format does not fit the run, the output would overwrite the base model or the run, or a process
            cannot write to it; all processes raise it.
    """
    check_apart(output, model)
    check_kind(config, kind, merge, quantize)
    with hold_lock(output, ".jaxtune-lock", "export to another folder"):
        with multihost.write_together(output):
            if multihost.is_main():
                (output / UNFINISHED).touch()
                (output / CARD).unlink(missing_ok=True)  # an earlier export is overwritten from here on
        if kind == "peft":
            export_adapter(model, parameters, config, output)
        else:
            export_full(model, parameters, config, output, quantize)
        with multihost.write_together(output):
            if multihost.is_main():
                if config.decision.loss is not None:
                    _write_decision(config, run, output, kind, steps)
                _write_card(model, config, run, output, kind, quantize, steps, tokens, hub_id)
                (output / UNFINISHED).unlink()
                if limit := adapter_limit(model, config) if kind == "peft" else format_limit(quantize):
                    log.warning("%s: %s", output, limit)


def _write_decision(config: Config, run: RunFolder, output: Path, kind: str, steps: int) -> None:
    """Write decision.json; warn if no temperature has been fitted, or if transformers cannot decide with the export."""
    temperatures = evaluated_temperatures(run, steps)
    write_decision(output, temperatures)
    if not temperatures:
        log.warning(
            "%s has no temperatures, so that probabilities are not calibrated: %s has no evaluation up to step %d, "
            "which fits them; set data.validation_split, eval.at_end and log.jsonl",
            *(output / DECISION_FILE, run.metrics, steps),
        )
    if config.decision.label_tokens:
        log.warning(
            "%s: transformers and `jaxtune generate --decide` read the tokens of the labels, and not those of "
            "decision.label_tokens: ask the run instead of its export",
            output,
        )
    if kind == "peft" and config.model.head == "classification":
        log.warning("%s: an adapter with a linear head is a sequence classifier; JevForDecision needs --merge", output)


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
    """Write the model card; also warn if an adapter's base does not stop at the end of an answer.

    The arguments are those `export` takes.
    """
    trained_so = ""
    if quantize == config.serve.format:
        inputs = " with inputs in fp8" if config.serve.activations else ""
        trained_so = f", as they were trained{inputs} (serve.format)"
    written = {} if quantize is None else {"weights": f"linear layers in {quantize}{trained_so}"}
    ends = write_ends(model, config, output) if kind == "peft" else []
    if ends:
        log.warning(
            "answers end with token %d, at which the base does not stop: with this adapter give generate() "
            "eos_token_id=%s, or vLLM stop_token_ids=%s; a whole model (--merge) has it in generation_config.json",
            ends[-1],
            *(ends, ends[-1:]),
        )
    hf.write_card(
        output,
        title=config.train.run_name or output.name,
        name=hub_id or output.name,
        base_model=None if config.model.from_scratch else config.model.path,
        adapter=kind == "peft",
        auto_class=_auto_class(model, config, kind == "peft"),
        base_options=_base_options(model, config) if kind == "peft" else {},
        ends=ends,
        rows=card_rows(config, run, steps, tokens) | written,
        curve=run.loss_curve,
        recipe=card_recipe(config),
        datasets=card_datasets(config),
        evaluation=card_evaluation(config, run, steps),
    )


def _base_options(model: Model, config: Config) -> dict[str, Any]:
    """Return the options with which transformers must load the base before peft loads an adapter on it."""
    if not model.spec.labels:
        return {}
    return {"num_labels": model.spec.labels, "pad_token_id": classifier_tokenizer(model, config)[1]}


def _auto_class(model: Model, config: Config, adapter: bool) -> str:
    """Return the transformers class that loads the model, the larger model that contains it, or an adapter's base."""
    if model.spec.labels and config.decision.loss is not None and not adapter:
        return "AutoModelForDecision"
    if model.spec.labels:
        return "AutoModelForSequenceClassification"
    return "AutoModelForCausalLM" if model.spec.untouched is None else "AutoModelForImageTextToText"


def check_kind(config: Config, kind: str, merge: bool, quantize: str | None = None) -> None:
    """Raise UserError if a run cannot be exported in a format."""
    if kind == "peft" and not config.lora.enabled:
        raise UserError("--format=peft: this run trained the whole model; export it with --format=hf")
    if quantize is not None and config.decision.loss is not None and config.model.head == "classification":
        raise UserError(
            f"--quantize={quantize}: transformers' JevForDecision is loaded in full precision; leave it out"
        )
    if kind == "peft" and quantize is not None:
        raise UserError(
            f"--quantize={quantize}: an adapter is not quantized, only a whole model: --merge without --format=peft"
        )
    if kind == "gguf" and quantize is not None:
        raise UserError(f"--quantize={quantize}: --format=gguf converts the unquantized model, to --gguf_type=q8_0 too")
    if kind != "peft" and config.lora.enabled and not merge:
        raise UserError(
            f"--format={kind}: this run trained an adapter; add --merge for a whole model, or use --format=peft"
        )
    if kind == "peft" and config.lora.merge_interval:
        raise UserError(
            "--format=peft: this run merged adapters into the model (lora.merge_interval), so the last adapter "
            "does not fit the base; export the whole model with --merge"
        )


def not_as_served(config: Config, quantize: str | None) -> str | None:
    """Return how to export a run's model as it was trained to be served; None if it is exported so."""
    if config.serve.format in (None, quantize):
        return None
    merge = "--merge " if config.lora.enabled else ""
    return f"not quantized; as the run was trained to be served: {merge}--quantize={config.serve.format}"


def check_apart(output: Path, model: Model) -> None:
    """Raise UserError if an export would overwrite the base model or a run's folder."""
    if output.resolve() in {folder.resolve() for folder in model.folders}:
        raise UserError(f"{output} holds the model that the run started from; export to another folder")
    if RunFolder(output).checkpoints.exists():
        raise UserError(f"{output} is the folder of a run; export to another one, for example {output / 'export'}")
