"""The values of a run's parameters: random, or read from a model folder, an adapter or a checkpoint."""

import dataclasses
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxtune import hf
from jaxtune.checkpoint import CheckpointManager, RestoredCheckpoint, verify_fingerprint
from jaxtune.config.schema import Config
from jaxtune.errors import UserError
from jaxtune.host.run_folder import RunFolder
from jaxtune.lora.lora import LoRA
from jaxtune.lora.options import LoraOptions
from jaxtune.models import families
from jaxtune.models.decoder import Parameters, cast_like
from jaxtune.models.parameters import Parameter, abstract, randomize
from jaxtune.models.sites import loaded_names
from jaxtune.precision.linears import Frozen
from jaxtune.quant.mxfp4_format import Mxfp4
from jaxtune.quant.options import QuantOptions
from jaxtune.weights.adapter_start import begin_adapters
from jaxtune.weights.base import check_same_config, read_base
from jaxtune.weights.model import Model, abstract_average, declare_model
from jaxtune.weights.reference import abstract_reference
from jaxtune.weights.relora import merge_targets
from jaxtune.weights.trusted_code import base_of_run


def check_files(model: Model, config: Config) -> None:
    """Raise the UserErrors of reading the weights and the adapter; reads only the headers of the files."""
    if config.lora.path is not None:
        _adapter_tensors(model, config)
    if not config.model.from_scratch:
        saved = {name: p for name, p in model.parameters.items() if name not in model.new}
        hf.check_weights(model.folder, *_targets(model, saved))


def read_parameters(model: Model, wanted: Mapping[str, Parameter]) -> Parameters:
    """Read parameters from the model's folder, directly into their shards; `wanted` must not contain adapters."""
    parameters = hf.read(model.folder, *_targets(model, wanted))
    if model.spec.vocabulary > model.base.saved_vocabulary:
        embeddings = [name for name, parameter in wanted.items() if parameter.kind == "table"]
        parameters |= {name: _with_new_tokens(parameters[name], model) for name in embeddings}
    if model.base.scheme is not None:
        stored = {
            name: (p.treatment.stored.abstract(p.shape, p.dtype, p.axes), tuple(place.name for place in p.places))
            for name, p in wanted.items()
            if name in model.quantized
        }
        for name, array in hf.read_quantized(model.folder, model.base.scheme, stored).items():
            storage = wanted[name].storage
            parameters[name] = storage.holding(array) if isinstance(storage, Frozen) else array
    return parameters


def _with_new_tokens(embeddings: jax.Array, model: Model) -> jax.Array:
    """Set the rows (vocabulary, hidden) of new tokens to the mean of the others, as transformers resizes embeddings."""
    old, new = model.base.saved_vocabulary, model.spec.vocabulary

    # The table is donated: it is filled in place, and never exists twice on the device.
    @partial(jax.jit, donate_argnums=0, out_shardings=embeddings.sharding)
    def fill(embeddings):
        row = jax.lax.broadcasted_iota(jnp.int32, embeddings.shape, 0, out_sharding=jax.typeof(embeddings).sharding)
        mean = embeddings.sum(0, keepdims=True, dtype=jnp.float32) / old  # rows of padding are zeros
        return jnp.where((row >= old) & (row < new), mean.astype(embeddings.dtype), embeddings)

    return fill(embeddings)


def _targets(model: Model, wanted: Mapping[str, Parameter]) -> tuple[dict[str, hf.Target], Callable[[str], bool]]:
    """The targets of parameters that the files hold unquantized; and a test for other tensors that may be present."""
    scheme = model.base.scheme
    targets = {
        name: _target(model, parameter)
        for name, parameter in wanted.items()
        if scheme is None or name not in model.quantized
    }
    other_tensors = {place.name for name, p in model.parameters.items() if name not in targets for place in p.places}

    def ignorable(hf_name: str) -> bool:
        weight = hf_name if scheme is None else scheme.weight_of(hf_name)
        return weight in other_tensors or families.is_ignorable(model.spec, hf_name)

    return targets, ignorable


def _target(model: Model, parameter: Parameter) -> hf.Target:
    """How to read a parameter from its places; each tensor is converted to its storage as soon as it is read."""

    def convert(weight: jax.Array, hf_name: str) -> Any:
        if not _all_moderate(weight):
            raise UserError(
                f"{hf_name} in {model.folder} holds NaN, infinite or huge values (beyond 1e30), so it cannot be "
                "quantized; the file is damaged, or its training broke down: use another copy"
            )
        assert parameter.storage is not None
        return parameter.storage.make(weight, parameter.axes if weight.ndim > 2 else parameter.matrix_axes)

    return hf.Target(
        shape=parameter.shape,
        dtype=parameter.dtype,
        sharding=parameter.sharding,
        places=parameter.places,
        lead=len(parameter.lead),  # leading axes of layers and experts
        rows=model.base.saved_vocabulary if parameter.kind == "table" else None,  # the rest is filled with zeros
        conversion=None
        if parameter.storage is None
        else hf.Conversion(convert, parameter.abstract(), isinstance(parameter.storage, Mxfp4)),
    )


@jax.jit
def _all_moderate(weight: jax.Array) -> jax.Array:
    """Whether all values are finite and small enough that scales, and sums of scales, do not overflow."""
    return (jnp.abs(weight) < 1e30).all()


def initial_parameters(model: Model, config: Config) -> Parameters:
    """The trained parameters before step 0: random, or read from the model's folder; adapters new or read.

    Adapters that are initialized from the weights of their layer get these values later, in `start_parameters`.
    """
    return _initial(model, model.trained, config)


def _initial(model: Model, wanted: Mapping[str, Parameter], config: Config) -> Parameters:
    if config.lora.path is None:
        return _values(model, wanted, config)
    targets, tensors = _adapter_tensors(model, config)
    return hf.read_tensors(tensors, {name: targets[name] for name in wanted}) if wanted else {}


def frozen_parameters(model: Model, config: Config, but: Collection[str] = ()) -> Parameters:
    """The parameters that are not trained, without `but`; random if the model is trained from scratch."""
    wanted = {name: p for name, p in model.frozen.items() if name not in but}
    # Frozen parts of adapters are read from lora.path or drawn, never from the model's files.
    starts = {name: wanted.pop(name) for name in model.starts if name in wanted}
    return _values(model, wanted, config) | _initial(model, starts, config)


def start_parameters(model: Model, config: Config) -> tuple[Parameters, Parameters, Parameters]:
    """(trained, base, frozen) before the first step; base: weights that adapters are merged into (`weights.relora`)."""
    base = _values(model, merge_targets(model, config), config)
    frozen = frozen_parameters(model, config, but=base)
    trained, frozen = begin_adapters(model, config, initial_parameters(model, config), frozen)
    return trained, base, frozen


def read_reference(model: Model, config: Config, like: Parameters) -> Parameters:
    """Read the values that preference.reference names, of a model or an adapter like the trained one.

    like: arrays with the wanted dtypes. Raises UserError if the reference has another structure, and as
    `initial_parameters`.
    """
    name = config.preference.reference
    if config.lora.enabled:
        if model.starts:
            raise UserError(
                f"preference.reference={name!r}: not with lora.freeze_a or lora.init={config.lora.init!r}, because "
                "parts of the adapter would come from this run"
            )
        other = dataclasses.replace(config, lora=dataclasses.replace(config.lora, path=name))
        try:
            return cast_like(initial_parameters(model, other), like)
        except UserError as error:
            raise UserError(f"preference.reference={name!r}: {error}") from error
    model_options = dataclasses.replace(config.model, path=name, revision=None, from_scratch=False)
    other = dataclasses.replace(config, model=model_options)
    base = read_base(other)
    if base.spec != model.base.spec or base.scheme is not None:
        raise UserError(
            f"preference.reference={name!r}: its config.json describes another model than model.path has; take one "
            "of the same family and sizes"
        )
    return cast_like(initial_parameters(declare_model(base, other, jax.sharding.get_mesh()), other), like)


def _values(model: Model, wanted: Mapping[str, Parameter], config: Config) -> Parameters:
    """Read parameters from the model's folder; those that it does not hold are random."""
    random = wanted if config.model.from_scratch else {name: wanted[name] for name in wanted if name in model.new}

    def values(names: list[str]) -> Parameters:
        new, saved = ({n: wanted[n] for n in names if (n in random) == is_new} for is_new in (True, False))
        if config.model.zero_projections:
            new = {name: _zero(parameter) if _is_added(parameter) else parameter for name, parameter in new.items()}
        arrays = randomize(new, config.train.seed) if new else {}
        return arrays | (read_parameters(model, saved) if saved else {})

    # Read the parameters that are offloaded to the host one at a time, so that only one is on the device.
    on_host = [name for name, parameter in wanted.items() if parameter.on_host]
    arrays = values([name for name in wanted if name not in on_host])
    for name in on_host:
        places = jax.tree.map(lambda leaf: leaf.sharding, abstract({name: wanted[name]}))
        arrays |= jax.device_put(values([name]), places)
    return arrays


def _is_added(parameter: Parameter) -> bool:
    """Whether the layer's output is added to the residual stream: the projection after a mixer or a feed-forward."""
    return parameter.kind == "linear" and parameter.matrix_axes[0] == "embed"  # (out, in)


def _zero(parameter: Parameter) -> Parameter:
    return dataclasses.replace(parameter, init=jax.nn.initializers.zeros)


def _adapter_tensors(model: Model, config: Config) -> tuple[dict[str, hf.Target], Mapping[str, Any]]:
    """The targets and tensors of lora.path. Raises UserError unless its rank, scale and modules match the config."""
    adapter = hf.read_adapter(hf.resolve(config.lora.path or "", holds="adapter_config.json"))
    different = {key: value for key, value in adapter.options.items() if value != getattr(config.lora, key)}
    if bool(whole := adapter.module_options["modules_to_save"]) != bool(config.lora.modules_to_save):
        different["modules_to_save"] = whole
    if different:
        ours = ", ".join(f"lora.{key}={getattr(config.lora, key)!r}" for key in different)
        flags = " ".join(shlex.quote(f"--config.lora.{key}={value}") for key, value in different.items())
        raise UserError(f"{ours}: the adapter in {config.lora.path} has other values; set {flags}")
    wanted = model.trained | model.starts
    adapters = [parameter for parameter in wanted.values() if parameter.kind == "adapter"]
    modules = hf.adapted_modules(place.name for parameter in adapters for place in parameter.places)
    if modules != adapter.modules:
        difference = sorted(modules ^ adapter.modules)
        raise UserError(
            f"lora.target_modules and the adapter in {config.lora.path} differ in {', '.join(difference[:6])}"
        )
    loaded = loaded_names(model.base.spec)
    for parameter in model.frozen.values():
        lora = parameter.treatment.adapter
        for module in (loaded.get(place.name, place.name).removesuffix(".weight") for place in parameter.places):
            if (
                isinstance(lora, LoRA)
                and module in adapter.modules
                and adapter.of_module(module) != lora.exported_rank_alpha
            ):
                raise UserError(
                    f"lora.rank_pattern and alpha_pattern give {module} rank {lora.rank} and alpha {lora.alpha:g}, but "
                    f"the adapter in {config.lora.path} has {adapter.of_module(module)}"
                )
    targets = {name: _target(model, parameter) for name, parameter in wanted.items()}
    complaint = f"the tensors in {config.lora.path} do not fit adapters of this model:"
    in_files = {new: name for name, new in loaded.items()}
    tensors = {in_files.get(name, name): source for name, source in adapter.tensors.items()}
    hf.check_tensors(complaint, tensors, targets, lambda name: False)
    return targets, tensors


@dataclass(frozen=True)
class TrainedModel:
    """The model of a checkpoint, on a mesh.

    Attributes:
        config: of the run.
        model: declared parameters.
        trained, frozen, reference: values of the parameters.
        step: of the checkpoint.
        tokens: trained on until then.
    """

    config: Config
    model: Model
    trained: Parameters
    frozen: Parameters
    reference: Parameters
    step: int
    tokens: int


def open_run(
    folder: RunFolder,
    mesh: jax.sharding.Mesh,
    step: int | None,
    plugins: Sequence[str] = (),
    low_precision: bool = False,
    reference: bool = False,
    patches: int | None = None,
) -> TrainedModel:
    """The model of a run at a step, or at its newest good checkpoint.

    Args:
        folder: of the run.
        mesh: its devices.
        step: the checkpoint; None: the newest good one.
        plugins: files that may be executed; plugins of the run that are not among them are refused.
        low_precision: whether to compute in the run's low precision.
        reference: whether to read the reference values, if the run's state holds them.
        patches: read the vision tower too, with this vision.patches_per_row if the run has none.
    """
    config, base = base_of_run(folder, plugins, patches)
    model = declare_model(base, config, mesh, low_precision=low_precision)
    compared = abstract_reference(model, config) if reference else {}
    checkpoints = CheckpointManager(folder.checkpoints)
    restored = _restore(checkpoints, model, config, step, compared)
    if restored is None:
        raise UserError(f"{folder.path} has no checkpoint yet")
    if not config.model.from_scratch:
        verify_fingerprint(model.folder, restored.host["base"])
    check_same_config(restored.host.get("config_json"), config, model.folders)
    trained, compared, starts = (restored.state[part] for part in ("result", "reference", "starts"))
    frozen = starts | frozen_parameters(model, config, but={**trained, **starts})
    return TrainedModel(config, model, trained, frozen, compared, restored.step, restored.host["tokens"])


def result_of(checkpoints: CheckpointManager, model: Model, config: Config, step: int) -> Parameters:
    """The trained parameters of a checkpoint, as evaluated and exported. Raises UserError as `restore`."""
    restored = _restore(checkpoints, model, config, step, {})
    assert restored is not None
    return restored.state["result"]


def _restore(
    checkpoints: CheckpointManager, model: Model, config: Config, step: int | None, reference: Parameters
) -> RestoredCheckpoint | None:
    """Restore `result`, `reference` and `starts` of a checkpoint, without the optimizer's state, which is larger."""
    average = abstract_average(model, config)
    result = "average" if average else "trained"
    wanted = {result: average or abstract(model.trained), "reference": reference}
    wanted["base"] = abstract(merge_targets(model, config) | model.starts)
    restored = checkpoints.restore(wanted, step, part=True, grouping=model.grouping)
    if restored is None:
        return None
    starts = {name: restored.state["base"].pop(name) for name in model.starts}
    changed = {**restored.state["base"], **restored.state[result]}
    state = {"result": changed, "reference": restored.state["reference"], "starts": starts}
    return dataclasses.replace(restored, state=state)


def config_for_model(name: str, config: Config) -> Config:
    """`config` for the model `name`: a folder or hub id, or the folder of an adapter, which names its base.

    The config's changes to config.json apply only to model.path and to adapters on it.
    The config's `quant` applies to an adapter's base; a whole model is not quantized. Nothing of its vision tower is
    trained, whatever the config's vision.train is.

    Raises UserError if an adapter does not name its base.
    """
    folder = Path(name).expanduser()
    lora, quant, base, revision, model = LoraOptions(), QuantOptions(), name, None, config.model
    if (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
        adapter = hf.read_adapter(folder)
        if adapter.base_model is None:
            raise UserError(f"{name} does not name the model that it adapts (base_model_name_or_path)")
        base, revision = adapter.base_model, adapter.revision  # base_model_name_or_path
        lora = LoraOptions(enabled=True, path=name, **adapter.options, **adapter.module_options)
        quant = config.quant
        if adapter.labels:
            model = dataclasses.replace(model, head="classification", num_labels=adapter.labels)
    if not _same(base, config.model.path):
        model = dataclasses.replace(model, **hf.SINGLE_MODEL_DEFAULTS)
    model = dataclasses.replace(model, path=base, revision=revision, from_scratch=False)
    vision = dataclasses.replace(config.vision, train="none")
    return dataclasses.replace(config, model=model, lora=lora, quant=quant, vision=vision)


def _same(base: str, path: str | None) -> bool:
    """Whether two names mean the same model; the path of a folder can be written in several ways."""
    return path is not None and Path(base).expanduser().resolve() == Path(path).expanduser().resolve()


def tokenizer_folder(model: Model, config: Config) -> Path:
    """The folder of the tokenizer: the adapter's, if it holds one, as exported adapters do; else the model's."""
    adapter = None if config.lora.path is None else Path(config.lora.path).expanduser()
    return adapter if adapter is not None and (adapter / "tokenizer.json").exists() else model.folders.tokenizer
