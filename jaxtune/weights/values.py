"""The values of a run's parameters: from the model's folder, random, an adapter's, or those of a checkpoint."""

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
from jaxtune.checkpoint import CheckpointManager, Restored, verify_fingerprint
from jaxtune.config.schema import Config, Lora, Quant
from jaxtune.errors import UserError
from jaxtune.host.run_folder import RunFolder
from jaxtune.lora.lora import LoRA
from jaxtune.models import families
from jaxtune.models.decoder import Parameters, cast_like
from jaxtune.models.parameters import Parameter, abstract, randomize
from jaxtune.precision.linears import Frozen
from jaxtune.quant.mxfp4_format import Mxfp4
from jaxtune.weights.adapter_start import begin_adapters
from jaxtune.weights.model import Model, abstract_average, declare_model, read_base
from jaxtune.weights.reference import abstract_reference
from jaxtune.weights.relora import merged_into
from jaxtune.weights.trusted_code import base_of_run


def check_files(model: Model, config: Config) -> None:
    """Raises UserError as reading the weights and the adapter would, from the headers of the files alone."""
    if config.lora.path is not None:
        _adapter_tensors(model, config)
    if not config.model.from_scratch:
        saved = {name: p for name, p in model.parameters.items() if name not in model.new}
        hf.check_weights(model.folder, *_wanted(model, saved))


def read_parameters(model: Model, wanted: Mapping[str, Parameter]) -> Parameters:
    """These parameters from the model's folder, straight into their shards; adapters cannot be among them."""
    parameters = hf.read(model.folder, *_wanted(model, wanted))
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
    """Rows (vocabulary, hidden) of new tokens become the mean of the others, as transformers resizes embeddings."""
    old, new = model.base.saved_vocabulary, model.spec.vocabulary

    @partial(jax.jit, donate_argnums=0, out_shardings=embeddings.sharding)
    def fill(embeddings):
        row = jax.lax.broadcasted_iota(jnp.int32, embeddings.shape, 0, out_sharding=jax.typeof(embeddings).sharding)
        mean = embeddings.sum(0, keepdims=True, dtype=jnp.float32) / old  # rows of padding are zeros
        return jnp.where((row >= old) & (row < new), mean.astype(embeddings.dtype), embeddings)

    return fill(embeddings)


def _wanted(model: Model, wanted: Mapping[str, Parameter]) -> tuple[dict[str, hf.Target], Callable[[str], bool]]:
    """How these parameters are read, without those that files hold quantized; and which other tensors may be there."""
    scheme = model.base.scheme
    targets = {
        name: _target(model, parameter)
        for name, parameter in wanted.items()
        if scheme is None or name not in model.quantized
    }
    others = {place.name for name, p in model.parameters.items() if name not in targets for place in p.places}

    def ignorable(hf_name: str) -> bool:
        weight = hf_name if scheme is None else scheme.weight_of(hf_name)
        return weight in others or families.is_ignorable(model.spec, hf_name)

    return targets, ignorable


def _target(model: Model, parameter: Parameter) -> hf.Target:
    """How a parameter is read from its places, each stored as soon as it is read."""

    def convert(weight: jax.Array, hf_name: str) -> Any:
        if not _ordinary(weight):
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
        lead=len(parameter.lead),
        rows=model.base.saved_vocabulary if parameter.kind == "table" else None,
        conversion=None
        if parameter.storage is None
        else hf.Conversion(convert, parameter.abstract(), isinstance(parameter.storage, Mxfp4)),
    )


@jax.jit
def _ordinary(weight: jax.Array) -> jax.Array:
    """Whether no value is NaN or so large that scales, or sums of scales, would overflow."""
    return (jnp.abs(weight) < 1e30).all()


def initial_parameters(model: Model, config: Config) -> Parameters:
    """The trained parameters before step 0: random, read from the model's folder, or new or read adapters.

    Adapters that begin as something of the weights beside them do not, yet: see `start_parameters`.
    """
    return _initial(model, model.trained, config)


def _initial(model: Model, wanted: Mapping[str, Parameter], config: Config) -> Parameters:
    if config.lora.path is None:
        return _values(model, wanted, config)
    targets, tensors = _adapter_tensors(model, config)
    return hf.read_tensors(tensors, {name: targets[name] for name in wanted}) if wanted else {}


def frozen_parameters(model: Model, config: Config, but: Collection[str] = ()) -> Parameters:
    """The parameters that are not trained, `but` these; random ones where a model from scratch has some."""
    wanted = {name: p for name, p in model.frozen.items() if name not in but}
    starts = {name: wanted.pop(name) for name in model.starts if name in wanted}
    return _values(model, wanted, config) | _initial(model, starts, config)


def start_parameters(model: Model, config: Config) -> tuple[Parameters, Parameters, Parameters]:
    """(trained, base, frozen) before the first step: base is what adapters are merged into (`weights.relora`)."""
    base = _values(model, merged_into(model, config), config)
    frozen = frozen_parameters(model, config, but=base)
    trained, frozen = begin_adapters(model, config, initial_parameters(model, config), frozen)
    return trained, base, frozen


def read_reference(model: Model, config: Config, like: Parameters) -> Parameters:
    """The values that preference.reference names, of a model or an adapter like the one that is trained.

    like: the dtypes. Raises UserError where it is of another form, and as `initial_parameters`.
    """
    name = config.preference.reference
    if config.lora.enabled:
        if model.starts:
            raise UserError(
                f"preference.reference={name!r}: not with lora.freeze_a or lora.init={config.lora.init!r}, as parts of "
                "the adapter would be those of this run"
            )
        other = dataclasses.replace(config, lora=dataclasses.replace(config.lora, path=name))
        try:
            return cast_like(initial_parameters(model, other), like)
        except UserError as error:
            raise UserError(f"preference.reference={name!r}: {error}") from error
    own = dataclasses.replace(config.model, path=name, revision=None, from_scratch=False)
    other = dataclasses.replace(config, model=own)
    base = read_base(other)
    if base.spec != model.base.spec or base.scheme is not None:
        raise UserError(
            f"preference.reference={name!r}: its config.json describes another model than that of model.path; take "
            "one of the same family and sizes"
        )
    return cast_like(initial_parameters(declare_model(base, other, jax.sharding.get_mesh()), other), like)


def _values(model: Model, wanted: Mapping[str, Parameter], config: Config) -> Parameters:
    """These parameters from the model's folder; random ones where it has none."""
    random = wanted if config.model.from_scratch else {name: wanted[name] for name in wanted if name in model.new}

    def values(names: list[str]) -> Parameters:
        new, saved = ({n: wanted[n] for n in names if (n in random) == is_new} for is_new in (True, False))
        if config.model.zero_projections:
            new = {name: _zero(parameter) if _is_added(parameter) else parameter for name, parameter in new.items()}
        found = randomize(new, config.train.seed) if new else {}
        return found | (read_parameters(model, saved) if saved else {})

    # Of those that wait on the host, one at a time is on the device.
    waiting = [name for name, parameter in wanted.items() if parameter.on_host]
    found = values([name for name in wanted if name not in waiting])
    for name in waiting:
        places = jax.tree.map(lambda leaf: leaf.sharding, abstract({name: wanted[name]}))
        found |= jax.device_put(values([name]), places)
    return found


def _is_added(parameter: Parameter) -> bool:
    """Whether its products are added to the residual stream: the projection after a mixer or a feed-forward layer."""
    return parameter.kind == "linear" and parameter.matrix_axes[0] == "embed"


def _zero(parameter: Parameter) -> Parameter:
    return dataclasses.replace(parameter, init=jax.nn.initializers.zeros)


def _adapter_tensors(model: Model, config: Config) -> tuple[dict[str, hf.Target], Mapping[str, Any]]:
    """How adapters are read from lora.path, whose adapter must be of the rank, scale and targets of the config."""
    adapter = hf.read_adapter(hf.resolve(config.lora.path or "", holds="adapter_config.json"))
    others = {key: found for key, found in adapter.options.items() if found != getattr(config.lora, key)}
    if bool(whole := adapter.chosen["modules_to_save"]) != bool(config.lora.modules_to_save):
        others["modules_to_save"] = whole
    if others:
        ours = ", ".join(f"lora.{key}={getattr(config.lora, key)!r}" for key in others)
        flags = " ".join(shlex.quote(f"--config.lora.{key}={found}") for key, found in others.items())
        raise UserError(f"{ours}: the adapter in {config.lora.path} has others; set {flags}")
    wanted = model.trained | model.starts
    adapters = [parameter for parameter in wanted.values() if parameter.kind == "adapter"]
    modules = hf.adapted_modules(place.name for parameter in adapters for place in parameter.places)
    if modules != adapter.modules:
        difference = sorted(modules ^ adapter.modules)
        raise UserError(
            f"lora.target_modules and the adapter in {config.lora.path} differ in {', '.join(difference[:6])}"
        )
    for parameter in model.frozen.values():
        kept = parameter.treatment.adapter
        for module in (place.name.removesuffix(".weight") for place in parameter.places):
            if isinstance(kept, LoRA) and module in adapter.modules and adapter.of_module(module) != kept.exported:
                raise UserError(
                    f"lora.rank_pattern and alpha_pattern give {module} rank {kept.rank} and alpha {kept.alpha:g}, but "
                    f"the adapter in {config.lora.path} has {adapter.of_module(module)}"
                )
    targets = {name: _target(model, parameter) for name, parameter in wanted.items()}
    complaint = f"the tensors in {config.lora.path} are not those of adapters of this model:"
    hf.check_tensors(complaint, adapter.tensors, targets, lambda name: False)
    return targets, adapter.tensors


@dataclass(frozen=True)
class TrainedModel:
    """A model as a checkpoint holds it, on a mesh."""

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
) -> TrainedModel:
    """The model of a run at a step, or at its newest good checkpoint.

    Args:
        folder: of the run.
        mesh: its devices.
        step: the checkpoint; None: the newest good one.
        plugins: that may be run; the run's own are not unless they are among these.
        low_precision: whether to compute as it was trained.
        reference: whether to read what the run's state compares with, if it holds that.
    """
    config, base = base_of_run(folder, plugins)
    model = declare_model(base, config, mesh, low_precision=low_precision)
    compared = abstract_reference(model, config) if reference else {}
    checkpoints = CheckpointManager(folder.checkpoints)
    restored = _restored(checkpoints, model, config, step, compared)
    if restored is None:
        raise UserError(f"{folder.path} has no checkpoint yet")
    if not config.model.from_scratch:
        verify_fingerprint(model.folder, restored.host["base"])
    trained, compared, starts = (restored.state[part] for part in ("result", "reference", "starts"))
    frozen = starts | frozen_parameters(model, config, but={**trained, **starts})
    return TrainedModel(config, model, trained, frozen, compared, restored.step, restored.host["tokens"])


def result_of(checkpoints: CheckpointManager, model: Model, config: Config, step: int) -> Parameters:
    """The trained parameters of a checkpoint as they are evaluated and exported. Raises UserError as `restore`."""
    restored = _restored(checkpoints, model, config, step, {})
    assert restored is not None
    return restored.state["result"]


def _restored(
    checkpoints: CheckpointManager, model: Model, config: Config, step: int | None, reference: Parameters
) -> Restored | None:
    """`result`, `reference` and `starts` of a checkpoint, without the optimizer's state, which is larger."""
    average = abstract_average(model, config)
    result = "average" if average else "trained"
    wanted = {result: average or abstract(model.trained), "reference": reference}
    wanted["base"] = abstract(merged_into(model, config) | model.starts)
    found = checkpoints.restore(wanted, step, part=True, grouping=model.grouping)
    if found is None:
        return None
    starts = {name: found.state["base"].pop(name) for name in model.starts}
    changed = {**found.state["base"], **found.state[result]}
    state = {"result": changed, "reference": found.state["reference"], "starts": starts}
    return dataclasses.replace(found, state=state)


def of_model(name: str, config: Config) -> Config:
    """`config` with the model that `name` is: a folder or hub id, or an adapter's folder, which names its base.

    What the config changes in config.json is of model.path, and of an adapter on it.
    The config's `quant` applies to an adapter's base; a whole model is taken as it is.

    Raises UserError where an adapter does not say what it is an adapter of.
    """
    folder = Path(name).expanduser()
    lora, quant, base, revision, model = Lora(), Quant(), name, None, config.model
    if (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
        adapter = hf.read_adapter(folder)
        if adapter.base_model is None:
            raise UserError(f"{name} does not say which model it is an adapter of (base_model_name_or_path)")
        base, revision = adapter.base_model, adapter.revision
        lora = Lora(enabled=True, path=name, **adapter.options, **adapter.chosen)
        quant = config.quant
        if adapter.labels:
            model = dataclasses.replace(model, head="classification", num_labels=adapter.labels)
    if not _same(base, config.model.path):
        model = dataclasses.replace(model, **hf.OF_ONE_MODEL)
    model = dataclasses.replace(model, path=base, revision=revision, from_scratch=False)
    return dataclasses.replace(config, model=model, lora=lora, quant=quant)


def _same(base: str, path: str | None) -> bool:
    """Whether two names are of one model: a folder is written in several ways."""
    return path is not None and Path(base).expanduser().resolve() == Path(path).expanduser().resolve()


def tokenizer_folder(model: Model, config: Config) -> Path:
    """Where the tokenizer is: in the folder of the adapter, if it has one, as exported ones do; else in the model's."""
    adapter = None if config.lora.path is None else Path(config.lora.path).expanduser()
    return adapter if adapter is not None and (adapter / "tokenizer.json").exists() else model.folders.tokenizer
