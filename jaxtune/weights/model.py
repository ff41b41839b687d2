"""The declared model of a run: the base with the config's changes, on a mesh, before any weight is read."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtune import hf
from jaxtune.config.schema import Config
from jaxtune.errors import UserError
from jaxtune.lora.inject import inject
from jaxtune.lora.lora import FROM_WEIGHT, LoRA
from jaxtune.models.parameters import Parameter, adapter_parts, declare
from jaxtune.models.structure.layer_spec import Experts
from jaxtune.models.structure.mixers import DeltaNet, Heads, Mamba2, OneMixer
from jaxtune.models.structure.model_spec import ModelSpec
from jaxtune.models.treatment import (
    freeze,
    freeze_body,
    freeze_corrections,
    freeze_vision,
    multiply,
    select_linears,
    treat_sites,
)
from jaxtune.models.treatment import linears as linears_by_name
from jaxtune.monitor.throughput import Work
from jaxtune.precision.linears import Frozen, Linears
from jaxtune.precision.recipes import linears_of
from jaxtune.quant.format_names import format_of
from jaxtune.weights.base import Base
from jaxtune.weights.mesh_fit import check_mesh, fit_to_mesh
from jaxtune.weights.served_linears import ServedLinears, served_linears


@dataclass(frozen=True)
class Model:
    """A declared model, before any weight is read.

    Attributes:
        base: The base model.
        spec: The model with the config's adapters, formats and frozen parameters, and its pipeline.
        graph: The module graph, which `bind` joins with parameters.
        parameters: Every parameter by name.
        linears: The linear layers that training multiplies in low precision, or as they will be served, if any.
    """

    base: Base
    spec: ModelSpec
    graph: nnx.GraphDef
    parameters: Mapping[str, Parameter]
    linears: Linears | ServedLinears | None

    @property
    def folders(self) -> hf.Folders:
        """The folders of the base's files."""
        assert self.base.folders is not None, "a model that was made from a spec only has no files"
        return self.base.folders

    @property
    def folder(self) -> Path:
        """The folder of the base's weights."""
        return self.folders.weights

    @property
    def trained(self) -> dict[str, Parameter]:
        """The parameters that are trained."""
        return {name: parameter for name, parameter in self.parameters.items() if parameter.trained}

    @property
    def frozen(self) -> dict[str, Parameter]:
        """The parameters that are not trained."""
        return {name: parameter for name, parameter in self.parameters.items() if not parameter.trained}

    @property
    def whole(self) -> dict[str, Parameter]:
        """The parameters of the model itself, without adapters."""
        return {name: parameter for name, parameter in self.parameters.items() if parameter.kind != "adapter"}

    @property
    def new(self) -> dict[str, Parameter]:
        """The parameters that are not in the model's files, so they start random."""
        return {
            name: parameter
            for name, parameter in self.parameters.items()
            if parameter.kind == "adapter" or (parameter.kind == "score" and self.base.new_head)
        }

    @property
    def starts(self) -> dict[str, Parameter]:
        """The parts of adapters that are not trained: frozen like the base's weights, but in checkpoints only."""
        return {name: p for name, p in self.parameters.items() if p.kind == "adapter" and not p.trained}

    @property
    def quantized(self) -> dict[str, Parameter]:
        """The parameters that are stored in a quantized format."""
        return {name: p for name, p in self.whole.items() if p.treatment.stored is not None}

    @property
    def grouping(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Local name and stacked layers of each parameter, by which a checkpoint finds layers in any stacking."""
        return {name: (parameter.local, parameter.layers) for name, parameter in self.parameters.items()}

    def adapter_of(self, name: str) -> dict[str, str]:
        """Return the parameter's name of each part of a weight's adapter, as `adapter_parts`."""
        return adapter_parts(name, self.parameters[name])

    @property
    def adapted_linears(self) -> list[list[str]]:
        """The frozen linear layers with low-rank adapters, grouped by Hugging Face module."""
        modules: dict[str, list[str]] = {}
        for name, parameter in self.frozen.items():
            if parameter.kind == "linear" and isinstance(parameter.treatment.adapter, LoRA):
                modules.setdefault(self.adapter_of(name)["lora_a"], []).append(name)  # parts of a fused module share A
        return list(modules.values())

    def work(self, seq_len: int) -> Work:
        """Return the work of a token: the active experts and the head's product count, embedding lookups do not."""
        matrices = {name: p for name, p in self.parameters.items() if len(p.matrix) == 2}
        matrices.pop("layer_embeddings.weight", None)  # only looked up
        # Patches, not tokens, go through the tower, and an image token has other experts than a text token.
        elsewhere = ("vision.", "mlp.vision_")
        matrices = {n: p for n, p in matrices.items() if not (n.startswith(elsewhere) or p.local.startswith(elsewhere))}
        if not self.spec.tied:
            # An untied embedding is only looked up; a tied one is also the head's matrix.
            matrices.pop("embed.weight")
        layers = self.spec.layers + self.spec.mtp
        mixers = [one for layer in layers for one in layer.mixers if isinstance(one, Heads)]
        recurrence = sum(_state_accesses(mixer) for layer in self.spec.layers for mixer in layer.mixers)
        windows = {mixer.window for mixer in mixers}
        # Each multi-token-prediction module multiplies by the head once more.
        times = {name: 1 + len(self.spec.mtp) * (p.kind == "table") for name, p in matrices.items()}
        work = {name: times[name] * self._active_elements(p) for name, p in matrices.items()}
        return Work(
            trained=recurrence + sum(work[name] for name, p in matrices.items() if p.trained),
            frozen=sum(work[name] for name, p in matrices.items() if not p.trained),
            layers=len(mixers),  # of softmax attention
            attention_width=max((mixer.heads * mixer.head_dim for mixer in mixers), default=0),
            seq_len=seq_len,
            # Layers with different windows count as if they had none, which overestimates their work.
            window=windows.pop() if len(windows) == 1 else None,
        )

    def _active_elements(self, parameter: Parameter) -> int:
        """Return the number of a parameter's elements that multiply a token; of experts, only the active ones count."""
        if len(parameter.lead) < 2:
            return math.prod(parameter.shape)
        experts = self.spec.every_layer[parameter.layers[0]].feed_forward
        assert isinstance(experts, Experts)
        return math.prod(parameter.shape) // experts.count * experts.active  # (layers, experts, out, in)


def _state_accesses(mixer: OneMixer) -> int:
    """Return the products of a token with a mixer's recurrent state; 0 if it has none.

    A token of a delta net reads the state twice and writes it once; one of Mamba-2 writes it and reads it. These are
    products of activations, which have two gradients as trained weights have.
    """
    match mixer:
        case DeltaNet() as net:
            return 3 * math.prod(net.state_shape)  # S k, S q, and the outer product with k
        case Mamba2() as net:
            return 2 * math.prod(net.state_shape)
    return 0


def declare_model(
    base: Base, config: Config, mesh: jax.sharding.Mesh, train: bool = True, low_precision: bool = True
) -> Model:
    """Declare a config's model and check it against the mesh, without reading any file.

    `train=False` stores every weight in model.dtype, and serves none quantized. `low_precision=False` multiplies no
    linear layer in low precision, whatever precision.recipe is. Raises UserError.
    """
    spec = fit_to_mesh(_apply_treatments(base, config, train), mesh, config)
    graph, parameters = declare(spec)

    def choose_storage(parameter: Parameter) -> Parameter:
        dtype = config.precision.master_dtype if train and parameter.trained else config.model.dtype
        with_adapters = parameter.kind == "adapter" or (config.lora.enabled and parameter.trained)
        dtype = "float32" if parameter.float32 else config.lora.dtype if with_adapters else dtype
        # Change the storage, not the treatment: layers must stack as in training, because checkpoints are read into
        # these stacks.
        storage = parameter.storage if low_precision or parameter.kind == "adapter" else parameter.treatment.stored
        waits = config.memory.offload_master if parameter.trained else config.memory.offload_quants and storage
        on_host = bool(parameter.lead and waits)
        return dataclasses.replace(parameter, dtype=jnp.dtype(dtype), storage=storage, on_host=on_host)

    parameters = {name: choose_storage(parameter) for name, parameter in parameters.items()}
    multiplied = {
        name: p for name, p in parameters.items() if p.kind == "linear" and p.treatment.multiplied is not None
    }
    linears = linears_of(config.precision, multiplied) if low_precision else None
    if config.serve.format is not None and train:
        linears = served_linears(spec, parameters, config.serve, config.model.dtype)
    model = Model(base, spec, graph, parameters, linears)
    if (rate := config.experts.bias_update_rate) and not any(p.kind == "correction" for p in model.trained.values()):
        raise UserError(
            f"experts.bias_update_rate={rate}: this {spec.family} trains no correction of a router; "
            "experts.router_loss balances the experts of any model"
        )
    if config.memory.offload_quants and not any(p.on_host for p in model.frozen.values()):
        raise UserError(
            "memory.offload_quants=True: no weight is quantized; set quant.format, or take a model that is quantized"
        )
    if train and not model.trained:
        raise UserError(
            f"train.freeze={config.train.freeze!r} with vision.train={config.vision.train!r}: no parameter is trained; "
            "freeze less by train.freeze, or train more by vision.train"
        )
    if train:
        _refuse_without_effect(model, config, mesh)
    _check_adapters(model, config)
    check_mesh(spec, parameters, linears, config, mesh)
    return model


def abstract_average(model: Model, config: Config) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shapes and shardings of the trained parameters' average; {} without optim.ema_decay.

    Raises UserError if the trained parameters are offloaded to the host.
    """
    if config.optim.ema_decay is None:
        return {}
    if any(parameter.on_host for parameter in model.trained.values()):
        raise UserError("optim.ema_decay: the average would stay on the device; leave out memory.offload_master")
    return {name: jax.ShapeDtypeStruct(p.shape, jnp.float32, sharding=p.sharding) for name, p in model.trained.items()}


def _apply_treatments(base: Base, config: Config, train: bool) -> ModelSpec:
    """Return the spec with the config's quantization, low-precision products, adapters and frozen parameters."""
    spec = base.spec
    if config.longest_document > spec.max_positions:
        raise UserError(
            f"data.seq_len={config.data.seq_len} is more than the model's {spec.max_positions} positions "
            "(max_position_embeddings); shorten the rows, or stretch rope: model.max_positions and model.rope_scaling"
        )
    for field in dataclasses.fields(config.experts):
        if not spec.has_experts and (value := getattr(config.experts, field.name)) != field.default:
            raise UserError(f"experts.{field.name}={value!r}: the model, a {spec.family}, has no experts")
    if config.rollout.replay_routing and not spec.has_experts:
        raise UserError(f"rollout.replay_routing: the model, a {spec.family}, has no experts; leave it out")
    if config.rollout.replay_routing and spec.vision is not None and spec.vision.experts is not None:
        raise UserError(
            f"rollout.replay_routing: image tokens have experts of their own in a {spec.family}, and those are not "
            "replayed; leave it out, or leave out vision.patches_per_row"
        )
    if config.memory.remat == "experts" and not spec.has_experts:
        raise UserError(f"memory.remat='experts': the model, a {spec.family}, has no experts; 'dots' keeps less")
    names, options = frozenset(), config.quant
    if base.scheme is not None:
        _refuse_scheme(base, config, train)
        names, options = base.scheme.modules, base.scheme.options
    elif config.quant.format is not None:
        names = select_linears(spec, config.quant, "quant")
    # A format may differ between the linear layers of a block, so group the layers by format.
    known, formats = linears_by_name(spec), {}
    for site in {site for name in names for site in known[name]}:
        formats.setdefault(format_of(options, site.local), []).append(site)
    for format, sites in formats.items():
        spec = treat_sites(spec, sites, stored=format)
    spec = multiply(spec, config.precision)
    if config.lora.enabled:
        if spec.vision is not None and config.vision.train != "none":
            raise UserError(
                f"vision.train={config.vision.train!r} with lora.enabled: only adapters are trained; choose layers of "
                "the tower or the projector by lora.target_modules, or train modules whole by lora.modules_to_save"
            )
        return inject(spec, config.lora, config.mtp.only)
    if spec.vision is not None:
        spec = freeze_vision(spec, config.vision.train)
    if not config.experts.bias_update_rate:
        spec = freeze_corrections(spec)
    if config.mtp.only:
        spec = freeze_body(spec)
    return spec if config.train.freeze is None else freeze(spec, config.train.freeze)


def _refuse_without_effect(model: Model, config: Config, mesh: jax.sharding.Mesh) -> None:
    """Raise UserError for training options that have no effect with this model or mesh."""
    stages, chunks, count = mesh.shape["stage"], config.parallel.virtual_stages, config.train.grad_accum_steps
    if chunks > 1 and (stages == 1 or count % stages):
        raise UserError(
            f"parallel.virtual_stages={chunks}: stages take turns by groups of as many micro-batches as there are "
            f"stages, so mesh.stage={stages} must be more than 1, and train.grad_accum_steps={count} a multiple of "
            "mesh.stage"
        )
    for option in ("offload_master", "offload_gradients"):
        if getattr(config.memory, option) and not any(p.lead for p in model.trained.values()):
            raise UserError(f"memory.{option}=True: no weight of a layer is trained; train.freeze leaves none")


def _check_adapters(model: Model, config: Config) -> None:
    """Raise UserError for an adapter that needs a weight it cannot read, or that starts with more than its rank."""
    for names in model.adapted_linears:
        first, rows = model.parameters[names[0]], sum(model.parameters[name].matrix[0] for name in names)
        adapter, name = first.treatment.adapter, first.places[0].name.removesuffix(".weight")
        if adapter.from_weight and isinstance(first.storage, Frozen):
            raise UserError(
                f"lora.use_dora and lora.init={config.lora.init!r} need the original weights, and {name} is stored in "
                f"the format of its products by precision.recipe={config.precision.recipe!r}; take 'bf16'"
            )
        if adapter.init in FROM_WEIGHT and adapter.rank > (least := min(rows, first.matrix[1])):
            raise UserError(f"lora.rank={adapter.rank}, lora.init={adapter.init!r}: {name} is of rank {least} at most")


def _refuse_scheme(base: Base, config: Config, train: bool) -> None:
    """Raise UserError if an already quantized checkpoint does not fit the config."""
    assert base.scheme is not None and base.folders is not None
    folder, scheme = base.folders.weights, base.scheme
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
    known = linears_by_name(base.spec)
    if unknown := sorted(name for name in scheme.modules if len(known.get(name, ())) != 1):
        what = "a fused one is not supported" if unknown[0] in known else "only the layers' linear layers can"
        raise UserError(
            f"{folder}: {', '.join(unknown[:3])} cannot be quantized here, {what}; take the checkpoint that is not "
            "quantized: quant.format quantizes it while it is read"
        )
