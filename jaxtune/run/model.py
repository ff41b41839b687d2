"""The declared model of a run: what the config makes of config.json, on a mesh; no weight is read."""

import dataclasses
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtune import hf
from jaxtune.config.schema import Config
from jaxtune.errors import UserError
from jaxtune.lora.inject import inject
from jaxtune.models import families
from jaxtune.models.decoder import Parameters
from jaxtune.models.mark import freeze, mark, mark_precision, selected, undivided_blocks
from jaxtune.models.parameters import Parameter, declare, undivided
from jaxtune.models.spec import ModelSpec
from jaxtune.monitor.throughput import Work
from jaxtune.parallel.layout import RULES
from jaxtune.precision.linears import Linears
from jaxtune.precision.operands import Numbers, abstract_operands
from jaxtune.precision.recipes import check_device, linears_of
from jaxtune.quant import Format, QuantizedArray, format_of
from pallas_kernels.gpus import current_device

log = logging.getLogger("jaxtune")
LARGE = 2**20  # elements; a smaller parameter may stay whole on every device


@dataclass(frozen=True)
class Model:
    """A declared model: no weight has been read."""

    folder: Path  # holds config.json, the tokenizer and, unless from scratch, the weights
    spec: ModelSpec
    graph: nnx.GraphDef
    parameters: Mapping[str, Parameter]
    dtypes: Mapping[str, Any]
    formats: Mapping[str, Format]  # of the parameters that are quantized
    linears: Linears | None  # those that multiply in few bits while training
    scheme: hf.Scheme | None  # how the files quantize them; None: they are quantized while they are read
    saved_vocabulary: int  # tokens that the files have embeddings of; the spec may have more, data.special_tokens

    @property
    def trained(self) -> list[str]:
        """Names of the parameters that are trained."""
        return [name for name, parameter in self.parameters.items() if parameter.trained]

    @property
    def frozen(self) -> list[str]:
        """Names of the others."""
        return [name for name, parameter in self.parameters.items() if not parameter.trained]

    def hf_names(self, name: str) -> tuple[str, ...]:
        """Hugging Face names of a parameter, one a stacked layer."""
        return families.hf_names(self.spec.family, self.parameters[name])

    def work(self, seq_len: int) -> Work:
        """What a token costs: the head's product counts, the lookup of an embedding does not."""
        matrices = {name: p for name, p in self.parameters.items() if len(p.shape) - bool(p.layers) == 2}
        if not self.spec.tied:
            matrices.pop("embed.weight")
        windows = {layer.window for layer in self.spec.layers}
        return Work(
            trained=sum(math.prod(p.shape) for p in matrices.values() if p.trained),
            frozen=sum(math.prod(p.shape) for p in matrices.values() if not p.trained),
            layers=len(self.spec.layers),
            attention_width=self.spec.heads * self.spec.head_dim,
            seq_len=seq_len,
            window=windows.pop() if len(windows) == 1 else None,
        )

    def abstract(self, names: list[str]) -> Parameters:
        """Shapes, dtypes and shardings of parameters; of what stands in their place where they are few bits."""

        def one(name: str) -> Any:
            parameter, dtype = self.parameters[name], self.dtypes[name]
            if name in self.formats:
                return self.multiplied(name, self.quantized(name))
            if numbers := self.operands_of(name):
                return self.multiplied(name, abstract_operands(numbers, parameter.shape, dtype, parameter.axes))
            return jax.ShapeDtypeStruct(parameter.shape, dtype, sharding=parameter.sharding)

        return {name: one(name) for name in names}

    def quantized(self, name: str) -> QuantizedArray:
        """Shapes, dtypes and shardings of a parameter that has a format."""
        parameter = self.parameters[name]
        return self.formats[name].abstract(parameter.shape, self.dtypes[name], parameter.axes)

    def operands_of(self, name: str) -> Numbers | None:
        """How a frozen weight under adapters multiplies in few bits; None for any other.

        Such a weight is quantized once and stored as the operands of its products, unless it has a format already.
        """
        if self.linears is None or self.spec.adapter is None or name not in self.linears.parameters:
            return None
        return self.linears.numbers

    def multiplied(self, name: str, stored: Any) -> Any:
        """What stands for a quantized weight or its operands: with its recipe, if it multiplies in few bits."""
        return stored if self.operands_of(name) is None else self.linears.frozen(stored)  # type: ignore[union-attr]


def read_spec(config: Config) -> ModelSpec:
    """The model as its config.json describes it: without adapters, nothing frozen."""
    return families.read_spec(hf.read_config(hf.resolve(config.model.path or "", config.model.revision, weights=False)))


def declare_model(config: Config, mesh: jax.sharding.Mesh, train: bool = True, low_precision: bool = True) -> Model:
    """The model of a config, checked against the mesh; `train=False` stores every weight as model.dtype says.

    Without `low_precision` no linear multiplies in few bits, whatever precision.recipe says of training. Reads
    config.json and no weight. Raises UserError.
    """
    folder = hf.resolve(config.model.path or "", config.model.revision, weights=not config.model.from_scratch)
    spec = families.read_spec(hf.read_config(folder))
    if config.data.seq_len > spec.max_positions:
        raise UserError(
            f"data.seq_len={config.data.seq_len} is more than the model's {spec.max_positions} positions "
            "(max_position_embeddings); shorten the rows, or stretch them with rope_parameters in config.json"
        )
    saved_vocabulary = spec.vocabulary
    if config.data.special_tokens:
        spec = _with_special_tokens(spec, folder, config)
    scheme = None if config.model.from_scratch else hf.read_scheme(folder)
    if scheme is not None:
        _refuse_scheme(folder, scheme, spec, config, train)
        spec = mark(spec, scheme.modules, "quantized")
    elif config.quant.format is not None:
        spec = mark(spec, selected(spec, config.quant, "quant"), "quantized")
    spec = mark_precision(spec, config.precision)
    if config.lora.enabled:
        spec = inject(spec, config.lora)
    elif config.train.freeze is not None:
        spec = freeze(spec, config.train.freeze)
    graph, parameters = declare(spec)
    options = scheme.options if scheme is not None else config.quant
    formats = {name: format_of(options, p.local) for name, p in parameters.items() if p.quantized}
    _refuse_misfits(spec, parameters, formats, f"quant.format={config.quant.format!r}", "quant", config.quant.exclude)
    complaints = undivided(spec, parameters, mesh)
    complaints += undivided_blocks(parameters, formats, mesh, "choose a smaller quant.block_size")
    linears = linears_of(config.precision, parameters) if low_precision else None
    if linears is not None:
        if note := check_device(config.precision.recipe, current_device()):
            log.info(note)
        numbers = dict.fromkeys(linears.parameters, linears.numbers)
        recipe = f"precision.recipe={config.precision.recipe!r}"
        _refuse_misfits(spec, parameters, numbers, recipe, "precision", config.precision.exclude)
        complaints += undivided_blocks(parameters, numbers, mesh, "leave them out with precision.exclude")
    if complaints:
        raise UserError("\n  ".join(["the mesh does not divide the model:", *complaints]))

    def dtype(parameter: Parameter) -> Any:
        if parameter.is_adapter:
            return jnp.dtype(config.lora.dtype)
        return jnp.dtype(config.precision.master_dtype if train and parameter.trained else config.model.dtype)

    _refuse_unsharded(parameters, mesh)
    dtypes = {name: dtype(p) for name, p in parameters.items()}
    return Model(folder, spec, graph, parameters, dtypes, formats, linears, scheme, saved_vocabulary)


def _with_special_tokens(spec: ModelSpec, folder: Path, config: Config) -> ModelSpec:
    """With embeddings of the tokens of data.special_tokens, if there are no rows left for them (they are padded)."""
    tokens = len(hf.load_tokenizer(folder, None, config.data.special_tokens))
    if tokens > spec.vocabulary and config.lora.enabled:
        raise UserError(
            f"data.special_tokens makes {tokens} tokens of the model's {spec.vocabulary}, and adapters train no "
            "embeddings: peft could not load them on this base. Train the whole model (lora.enabled=False), or leave "
            "the tokens out and take a data.chat_template of tokens that there are"
        )
    return dataclasses.replace(spec, vocabulary=max(spec.vocabulary, tokens))


def _refuse_scheme(folder: Path, scheme: hf.Scheme, spec: ModelSpec, config: Config, train: bool) -> None:
    """Raise UserError where a checkpoint that is quantized already does not fit the config."""
    kind = scheme.options.format
    if config.quant.format is not None:
        raise UserError(
            f"quant.format={config.quant.format!r}: the weights in {folder} are quantized already, in {kind}, and load "
            "as they are; leave it out with --config.quant.format=None"
        )
    if train and not config.lora.enabled:
        raise UserError(
            f"the weights in {folder} are quantized, in {kind}, so they cannot be trained; train adapters on them with "
            "--config.lora.enabled=True, or take the checkpoint that is not quantized"
        )
    if unknown := sorted(scheme.modules - families.linears(spec).keys()):
        raise UserError(f"{folder}: {', '.join(unknown[:3])} cannot be quantized here, only linears of the layers can")


def _refuse_misfits(
    spec: ModelSpec,
    parameters: Mapping[str, Parameter],
    formats: Mapping[str, Format | Numbers],
    asked: str,
    section: str,
    exclude: str | None,
) -> None:
    """Raise UserError for parameters that their format's blocks do not divide, naming how to leave them out."""
    reasons = {
        families.hf_names(spec.family, parameters[name])[0].removesuffix(".weight"): reason
        for name, format in formats.items()
        if (reason := format.misfit(parameters[name].shape[-2:])) is not None
    }
    if reasons:
        kinds = sorted({name.rsplit(".", 1)[1] for name in reasons})
        patterns = "|".join(([exclude] if exclude else []) + kinds)
        listed = "\n".join(f"  {name}: {reason}" for name, reason in reasons.items())
        raise UserError(
            f"{asked}: these cannot be quantized so:\n{listed}\n"
            f"choose another {'quant.block_size or quant.format' if section == 'quant' else 'precision.recipe'}, "
            f"or leave them out: --config.{section}.exclude='{patterns}'"
        )


def _refuse_unsharded(parameters: Mapping[str, Parameter], mesh: jax.sharding.Mesh) -> None:
    """Raise UserError for a large parameter that no axis shards though the mesh has devices for it."""
    if mesh.shape["fsdp"] * mesh.shape["tensor"] == 1:
        return
    for parameter in parameters.values():
        whole = parameter.sharding.shard_shape(parameter.shape) == parameter.shape
        size = math.prod(parameter.shape[bool(parameter.layers) :])
        if whole and size >= LARGE and not parameter.is_adapter:
            raise UserError(f"{parameter.local} {parameter.shape} came out unsharded on {dict(mesh.shape)}")


def describe_layout(model: Model, mesh: jax.sharding.Mesh) -> str:
    """What the model is and where its parameters live, one line."""
    spread = {axis: size for axis, size in mesh.shape.items() if size > 1}
    count = lambda names: sum(math.prod(model.parameters[name].shape) for name in names)  # noqa: E731
    laid_out = {name: axis for name, axis in dataclasses.asdict(RULES).items() if axis in spread}
    where = f"mesh {spread}, sharded {laid_out}" if spread else "one device"
    base = ""
    if model.formats:
        arrays = jax.tree.leaves(model.abstract(list(model.formats)))
        size = sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays)
        kinds = ", ".join(sorted({format.elements for format in model.formats.values()}))
        base = f", {count(list(model.formats)):,} of them frozen in {kinds}: {size / 1e9:.2f} GB"
    return (
        f"{model.spec.family}, {len(model.spec.layers)} layers, {count(model.parameters):,} parameters{base}, "
        f"{count(model.trained):,} trained; {where}"
    )
