"""The declared model of a run: config.json with the config's changes, on a mesh, before any weight is read."""

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
from jaxtune.host import plugins
from jaxtune.lora.inject import inject
from jaxtune.lora.lora import FROM_WEIGHT, LoRA
from jaxtune.models import families
from jaxtune.models.parameters import Parameter, declare, find_undivided, undivided_blocks
from jaxtune.models.spec import DeltaNet, Experts, Heads, Layer, ModelSpec, classifier
from jaxtune.models.treatment import freeze, freeze_corrections, multiply, select_linears, treat_sites
from jaxtune.models.treatment import linears as linears_by_name
from jaxtune.monitor.throughput import Work
from jaxtune.parallel.layout import RULES, axes_of, shards
from jaxtune.parallel.mesh import misfit
from jaxtune.precision.linears import Frozen, Linears
from jaxtune.precision.operands import MatmulFormat
from jaxtune.precision.recipes import check_device, linears_of
from jaxtune.quant.format import Format
from jaxtune.quant.format_names import format_of
from jaxtune.weights.architecture import spec_of
from pallas_kernels.gpus import current_device

log = logging.getLogger("jaxtune")
LARGE = 2**20  # elements; a smaller parameter may stay whole on every device


@dataclass(frozen=True)
class Base:
    """The base model of a run as its folder describes it, without adapters and with nothing frozen.

    Attributes:
        spec: The model, with embeddings for the tokens of data.special_tokens.
        folders: Folders of the weights, config.json and the tokenizer; None for a model without files.
        described: config.json with the recipe's changes.
        scheme: How the files quantize the weights; None: they are not quantized, and quant.format quantizes them while
            they are read.
        saved_vocabulary: Number of tokens with embeddings in the files; the spec may have more. 0 without files.
        new_head: Whether the model needs a head that the files lack: a classifier that starts from a language model.
    """

    spec: ModelSpec
    folders: hf.Folders | None = None
    described: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    scheme: hf.Scheme | None = None
    saved_vocabulary: int = 0
    new_head: bool = False


@dataclass(frozen=True)
class Model:
    """A declared model, before any weight is read.

    Attributes:
        base: The base model.
        spec: The model with the config's adapters, formats and frozen parameters, and its pipeline.
        graph: The module graph, which `bind` joins with parameters.
        parameters: Every parameter by name.
        linears: The linear layers that are multiplied in low precision while training, if there are any.
    """

    base: Base
    spec: ModelSpec
    graph: nnx.GraphDef
    parameters: Mapping[str, Parameter]
    linears: Linears | None

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
        """Return the parameter name of each part of a weight's adapter; shared parts belong to the adapter's owner."""
        site, local = name.removesuffix(".weight"), self.parameters[name].local.removesuffix(".weight")
        adapter = self.parameters[name].treatment.adapter
        first = site.removesuffix(local) + (adapter.owner or local)
        return {part: f"{first if part in adapter.shared else site}.{part}" for part in adapter.peft_names}

    @property
    def adapted_linears(self) -> list[list[str]]:
        """The frozen linear layers with low-rank adapters, grouped by Hugging Face module."""
        modules: dict[str, list[str]] = {}
        for name, parameter in self.frozen.items():
            if parameter.kind == "linear" and isinstance(parameter.treatment.adapter, LoRA):
                modules.setdefault(self.adapter_of(name)["lora_a"], []).append(name)
        return list(modules.values())

    def work(self, seq_len: int) -> Work:
        """Return the work of a token: the active experts and the head's product count, embedding lookups do not."""
        matrices = {name: p for name, p in self.parameters.items() if len(p.matrix) == 2}
        if not self.spec.tied:
            # An untied embedding is only looked up; a tied one is also the head's matrix.
            matrices.pop("embed.weight")
        mixers = [layer.mixer for layer in self.spec.layers if isinstance(layer.mixer, Heads)]
        # Each token reads a recurrent state twice and writes it once. These are products of activations, which have two
        # gradients as trained weights have.
        states = [layer.mixer for layer in self.spec.layers if isinstance(layer.mixer, DeltaNet)]
        recurrence = sum(3 * net.value_heads * net.key_dim * net.value_dim for net in states)
        windows = {mixer.window for mixer in mixers}
        return Work(
            trained=recurrence + sum(self._active_elements(p) for p in matrices.values() if p.trained),
            frozen=sum(self._active_elements(p) for p in matrices.values() if not p.trained),
            layers=len(mixers),
            attention_width=max((mixer.heads * mixer.head_dim for mixer in mixers), default=0),
            seq_len=seq_len,
            # Layers with different windows count as if they had none, which overestimates their work.
            window=windows.pop() if len(windows) == 1 else None,
        )

    def _active_elements(self, parameter: Parameter) -> int:
        """Return the number of a parameter's elements that multiply a token; of experts, only the active ones count."""
        if len(parameter.lead) < 2:
            return math.prod(parameter.shape)
        experts = self.spec.layers[parameter.layers[0]].feed_forward
        assert isinstance(experts, Experts)
        return math.prod(parameter.shape) // experts.count * experts.active


def read_base(config: Config) -> Base:
    """Read a config's base model from its folder or the hub, without its weights. Raises UserError."""
    plugins.load(config)  # first, because a plugin may define the model's family
    folders = hf.find_folders(config.model)
    folder, saved = folders.weights, hf.read_config(folders.config)
    described = hf.apply_options(saved, config.model)
    spec, new_head = _with_head(spec_of(described, saved, config.model), described, config)
    if config.model.from_scratch and spec.untouched is not None:
        raise UserError(
            f"model.from_scratch: only the text decoder of {spec.family} is trained, so its other parts would stay "
            "random; give a folder whose config.json is the text_config of this one"
        )
    if spec.tied and not config.model.from_scratch and _has_own_head(spec, folder):
        spec = dataclasses.replace(spec, tied=False)
    saved_vocabulary = spec.vocabulary
    if config.data.special_tokens:
        spec = _with_special_tokens(spec, folders.tokenizer, config)
    scheme = None if config.model.from_scratch else hf.read_scheme(folder, described)
    return Base(spec, folders, described, scheme, saved_vocabulary, new_head)


def declare_model(
    base: Base, config: Config, mesh: jax.sharding.Mesh, train: bool = True, low_precision: bool = True
) -> Model:
    """Declare a config's model and check it against the mesh, without reading any file.

    `train=False` stores every weight in model.dtype. `low_precision=False` multiplies no linear layer in low precision,
    whatever precision.recipe is. Raises UserError.
    """
    spec = _on_mesh(_apply_treatments(base, config, train), mesh, config)
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
    if train:
        _refuse_without_effect(model, config, mesh)
    _check_adapters(model, config)
    _check_mesh(model, config, mesh)
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
    if config.data.seq_len > spec.max_positions:
        raise UserError(
            f"data.seq_len={config.data.seq_len} is more than the model's {spec.max_positions} positions "
            "(max_position_embeddings); shorten the rows, or stretch rope: model.max_positions and model.rope_scaling"
        )
    for field in dataclasses.fields(config.experts):
        if not spec.has_experts and (value := getattr(config.experts, field.name)) != field.default:
            raise UserError(f"experts.{field.name}={value!r}: the model, a {spec.family}, has no experts")
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
        return inject(spec, config.lora)
    if not config.experts.bias_update_rate:
        spec = freeze_corrections(spec)
    return spec if config.train.freeze is None else freeze(spec, config.train.freeze)


def _on_mesh(spec: ModelSpec, mesh: jax.sharding.Mesh, config: Config) -> ModelSpec:
    """Return the spec with its pipeline, and keys and values replicated if there are fewer heads than devices.

    Raises UserError if the model cannot be split into these pipeline stages.
    """
    parts = shards(axes_of("kv_heads"), mesh)

    def replicate_kv(layer: Layer) -> Layer:
        mixer = layer.mixer
        # Numbers of heads that devices do not divide are refused later (`find_undivided`).
        if not isinstance(mixer, Heads) or mixer.latent or mixer.kv_heads >= parts or parts % mixer.kv_heads:
            return layer
        return dataclasses.replace(layer, mixer=dataclasses.replace(mixer, kv_whole=True))

    stages, chunks = mesh.shape["stage"], config.parallel.virtual_stages
    spec = dataclasses.replace(spec, layers=tuple(map(replicate_kv, spec.layers)), stages=stages, chunks=chunks)
    name, delta_net = config.optim.name, any(isinstance(layer.mixer, DeltaNet) for layer in spec.layers)
    if stages > 1 and config.optim.properties.for_matrices and delta_net and jax.__version_info__ < (0, 11):
        raise UserError(
            f"mesh.stage={stages}: with optim.name={name!r} and linear-attention layers XLA of jax {jax.__version__} "
            "aborts the process while it compiles; use mesh.fsdp, another optimizer, or jax 0.11 or later (Python 3.12)"
        )
    if stages > 1 and all(stack.stages == 1 for stack in spec.stacks):
        most = max(stack.repeats for stack in spec.stacks)
        raise UserError(
            f"mesh.stage={stages}, parallel.virtual_stages={chunks}: {stages * chunks} virtual stages need as "
            f"many equal layers, or periods of layers, in a row, and the model, a {spec.family}, has {most}"
        )
    return spec


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


def _check_mesh(model: Model, config: Config, mesh: jax.sharding.Mesh) -> None:
    """Raise UserError if blocks or the mesh do not divide a weight, or if the device cannot run the recipe."""
    parameters, quant, precision = model.parameters, config.quant, config.precision
    formats = {name: p.treatment.stored for name, p in model.quantized.items()}
    _refuse_misfits(model, formats, f"quant.format={quant.format!r}", "quant", quant.exclude)
    complaints = find_undivided(model.spec, parameters, mesh)
    if axes_of("experts") and not model.spec.has_experts:
        complaints.append(
            f"mesh.expert={mesh.shape['expert']}: the model, a {model.spec.family}, has no experts; take mesh.fsdp"
        )
    if complaint := misfit(mesh, RULES.value.residual, config.data.seq_len, f"data.seq_len={config.data.seq_len}"):
        complaints.append(complaint)
    complaints += undivided_blocks(parameters, formats, mesh, "choose a smaller quant.block_size")
    if model.linears is not None:
        if note := check_device(precision.recipe, current_device()):
            log.info(note)
        numbers = dict.fromkeys(model.linears.parameters, model.linears.numbers)
        _refuse_misfits(model, numbers, f"precision.recipe={precision.recipe!r}", "precision", precision.exclude)
        complaints += undivided_blocks(parameters, numbers, mesh, "leave them out with precision.exclude")
    if complaints:
        raise UserError("\n  ".join(["the mesh does not divide the model or its rows:", *complaints]))
    _refuse_unsharded(parameters, mesh)


def _with_head(spec: ModelSpec, described: dict[str, Any], config: Config) -> tuple[ModelSpec, bool]:
    """Return the spec with the head that model.head names, and whether config.json lacks this head.

    Raises UserError if a classifier would be used as a language model, if transformers has no classifier of this
    family, or if the number of labels is missing or does not fit config.json.
    """
    model, saved = config.model, hf.label_names(described)
    if model.head == "lm":
        if saved is not None and not model.from_scratch:
            raise UserError(
                f"{model.path} is a classifier, {described['architectures'][0]}, with a head of {len(saved)} labels in "
                "place of the vocabulary: train and evaluate it with model.head='classification'; it cannot generate "
                "text"
            )
        return spec, False
    if spec.family not in families.classifiers():
        raise UserError(
            f"model.head='classification': transformers has no sequence classifier of only the decoder for "
            f"model_type={spec.family!r}, so it could not load the export; it has one for "
            f"{', '.join(families.classifiers())}"
        )
    if model.num_labels is None:
        raise UserError("model.num_labels: the number of labels is not known, as no data is read here; set it")
    task = "regression" if model.num_labels == 1 else "single_label_classification"
    if saved is not None and described.get("problem_type") not in (None, task):
        raise UserError(
            f"config.json: problem_type={described['problem_type']!r} is not supported with {model.num_labels} labels; "
            f"it must be {task!r}, which is cross-entropy, or the squared error of one label"
        )
    return classifier(spec, model.num_labels), saved is None


def _has_own_head(spec: ModelSpec, folder: Path) -> bool:
    """Whether the files hold a head that differs from the embedding although config.json ties the two.

    transformers does not tie them in this case either. Mistral Small 3.1 is an example: its config.json leaves the
    class's default.
    """
    if not any(folder.glob("*.safetensors")):  # `plan` needs no weights
        return False
    sources, names = hf.open_weights(folder), families.FAMILIES[spec.family].NAMES
    head, embedding = (sources.get(names[name]) for name in ("head.weight", "embed.weight"))
    return head is not None and embedding is not None and not head.equals(embedding)


def _with_special_tokens(spec: ModelSpec, folder: Path, config: Config) -> ModelSpec:
    """Return the spec with embeddings for data.special_tokens, if the padded rows of the embedding do not suffice."""
    tokens = len(hf.load_tokenizer(folder, None, config.data.special_tokens))
    if tokens > spec.vocabulary and config.lora.enabled:
        raise UserError(
            f"data.special_tokens makes {tokens} tokens of the model's {spec.vocabulary}, but adapters train no "
            "embeddings: peft could not load them on this base. Train the whole model (lora.enabled=False), or leave "
            "the tokens out and take a chat.template of tokens that the model has"
        )
    return dataclasses.replace(spec, vocabulary=max(spec.vocabulary, tokens))


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


def _refuse_misfits(
    model: Model, formats: Mapping[str, Format | MatmulFormat], option: str, section: str, exclude: str | None
) -> None:
    """Raise UserError for parameters that their format's blocks do not divide, and say how to exclude them."""
    reasons = {
        model.parameters[name].places[0].name.removesuffix(".weight"): reason
        for name, format in formats.items()
        if (reason := format.misfit(model.parameters[name].matrix)) is not None
    }
    if reasons:
        kinds = sorted({name.rsplit(".", 1)[1] for name in reasons})
        patterns = "|".join(([exclude] if exclude else []) + kinds)
        listed = "\n".join(f"  {name}: {reason}" for name, reason in reasons.items())
        raise UserError(
            f"{option}: these cannot be quantized in that format:\n{listed}\n"
            f"choose another {'quant.block_size or quant.format' if section == 'quant' else 'precision.recipe'}, "
            f"or leave them out: --config.{section}.exclude='{patterns}'"
        )


def _refuse_unsharded(parameters: Mapping[str, Parameter], mesh: jax.sharding.Mesh) -> None:
    """Raise UserError for a large parameter that is not sharded although the mesh has axes that shard parameters."""
    if shards({axis for axes in dataclasses.astuple(RULES.value.parameters) for axis in axes}, mesh) == 1:
        return
    for parameter in parameters.values():
        whole = parameter.sharding.shard_shape(parameter.shape) == parameter.shape
        if whole and math.prod(parameter.matrix) >= LARGE and parameter.kind != "adapter":
            raise UserError(f"{parameter.local} {parameter.shape} is not sharded on the mesh {dict(mesh.shape)}")
