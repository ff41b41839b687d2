"""The values of a run's parameters: read from the model's folder, random, an adapter's, or what a checkpoint holds."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxtune import hf
from jaxtune.checkpoint import CheckpointManager, verify_fingerprint
from jaxtune.config.schema import Config, Lora, Quant
from jaxtune.errors import UserError
from jaxtune.models import families
from jaxtune.models.decoder import Parameters
from jaxtune.models.parameters import randomize
from jaxtune.precision.operands import make_operands
from jaxtune.quant.format import quantized
from jaxtune.run.folder import RunFolder
from jaxtune.run.model import Model, declare_model


def check_files(model: Model, config: Config) -> None:
    """Raises UserError as reading the weights and the adapter would, from the headers of the files alone."""
    if config.lora.path is not None:
        _adapter(model, config)
    if not config.model.from_scratch:
        hf.check_weights(
            model.folder, *_wanted(model, [name for name, p in model.parameters.items() if not p.is_adapter])
        )


def read_parameters(model: Model, names: list[str]) -> Parameters:
    """These parameters from the model's folder, straight into their shards; adapters cannot be among them."""
    parameters = hf.read(model.folder, *_wanted(model, names))
    if model.spec.vocabulary > model.saved_vocabulary:
        embeddings = [name for name in names if model.parameters[name].axes[0] == "vocabulary"]
        parameters |= {name: _with_new_tokens(parameters[name], model) for name in embeddings}
    if model.scheme is not None:
        stored = {name: (model.quantized(name), model.hf_names(name)) for name in names if name in model.formats}
        read = hf.read_quantized(model.folder, model.scheme, stored)
        parameters |= {name: model.multiplied(name, array) for name, array in read.items()}
    return parameters


def _with_new_tokens(embeddings: jax.Array, model: Model) -> jax.Array:
    """Rows (vocabulary, hidden) of new tokens become the mean of the others, as transformers resizes embeddings."""
    old, new = model.saved_vocabulary, model.spec.vocabulary

    @partial(jax.jit, donate_argnums=0, out_shardings=embeddings.sharding)
    def fill(embeddings):
        row = jax.lax.broadcasted_iota(jnp.int32, embeddings.shape, 0, out_sharding=jax.typeof(embeddings).sharding)
        mean = embeddings.sum(0, keepdims=True, dtype=jnp.float32) / old  # rows of padding are zeros
        return jnp.where((row >= old) & (row < new), mean.astype(embeddings.dtype), embeddings)

    return fill(embeddings)


def _wanted(model: Model, names: list[str]) -> tuple[dict[str, hf.Target], Callable[[str], bool]]:
    """How these parameters are read, but for those that files hold quantized; and which other tensors may be there."""
    targets = {
        name: hf.Target(
            shape=model.parameters[name].shape,
            dtype=model.dtypes[name],
            sharding=model.parameters[name].sharding,
            names=model.hf_names(name),
            stacked=bool(model.parameters[name].layers),
            rows=model.saved_vocabulary if model.parameters[name].axes[0] == "vocabulary" else None,
            conversion=_quantization(model, name),
        )
        for name in names
        if model.scheme is None or name not in model.formats
    }
    others = {hf_name for name in model.parameters if name not in targets for hf_name in model.hf_names(name)}

    def ignorable(hf_name: str) -> bool:
        weight = hf_name if model.scheme is None else model.scheme.weight_of(hf_name)
        return weight in others or families.is_ignorable(model.spec, hf_name)

    return targets, ignorable


def _quantization(model: Model, name: str) -> hf.Conversion | None:
    """Quantize each tensor of a parameter as soon as it is read; None where it stays as it is."""
    format, numbers, axes = model.formats.get(name), model.operands_of(name), model.parameters[name].axes[1:]
    if format is None and numbers is None:
        return None

    def convert(weight: jax.Array, hf_name: str) -> Any:
        if not _ordinary(weight):
            raise UserError(
                f"{hf_name} in {model.folder} holds NaN, infinite or huge values (beyond 1e30), so it cannot be "
                "quantized; the file is damaged, or its training broke down: use another copy"
            )
        if format is not None:
            return model.multiplied(name, quantized(weight, format, axes))
        assert numbers is not None
        return model.multiplied(name, make_operands(weight, numbers, axes))

    return hf.Conversion(convert, model.abstract([name])[name])


@jax.jit
def _ordinary(weight: jax.Array) -> jax.Array:
    """Whether scales and sums of scales stay finite; False for NaN."""
    return (jnp.abs(weight) < 1e30).all()


def initial_parameters(model: Model, config: Config) -> Parameters:
    """The trained parameters before step 0: random, read from the model's folder, or new or read adapters."""
    trained = {name: model.parameters[name] for name in model.trained}
    if config.lora.path is not None:
        return _read_adapters(model, config)
    if config.lora.enabled or config.model.from_scratch:
        return randomize(trained, dict(model.dtypes), config.train.seed)
    return read_parameters(model, model.trained)


def frozen_parameters(model: Model, config: Config) -> Parameters:
    """The parameters that are not trained; random ones where a model from scratch has some."""
    if config.model.from_scratch:
        frozen = {name: model.parameters[name] for name in model.frozen}
        return randomize(frozen, dict(model.dtypes), config.train.seed)
    return read_parameters(model, model.frozen) if model.frozen else {}


def _adapter(model: Model, config: Config) -> hf.Adapter:
    """The adapter of lora.path, which must be of the rank, scale and targets that the config asks for."""
    adapter = hf.read_adapter(hf.resolve(config.lora.path or "", holds="adapter_config.json"))
    for key, found in (("rank", adapter.rank), ("alpha", adapter.alpha), ("use_rslora", adapter.use_rslora)):
        if found != getattr(config.lora, key):
            raise UserError(
                f"lora.{key}={getattr(config.lora, key)}, and the adapter in {config.lora.path} has {found}"
            )
    modules = {hf_name.rsplit(".", 2)[0] for name in model.trained for hf_name in model.hf_names(name)}
    if modules != adapter.modules.keys():
        difference = sorted(modules ^ adapter.modules.keys())
        raise UserError(
            f"lora.target_modules and the adapter in {config.lora.path} differ in {', '.join(difference[:6])}"
        )
    return adapter


def _read_adapters(model: Model, config: Config) -> Parameters:
    adapter = _adapter(model, config)

    def stacked(name: str) -> jax.Array:
        which = 0 if name.endswith("lora_a") else 1
        parameter = model.parameters[name]
        modules = [hf_name.rsplit(".", 2)[0] for hf_name in model.hf_names(name)]
        matrices = [adapter.modules[module][which] for module in modules]
        for module, matrix in zip(modules, matrices):
            if matrix.shape != parameter.shape[1:]:
                raise UserError(f"{config.lora.path}: {module} has shape {matrix.shape}, not {parameter.shape[1:]}")
        layers = [jnp.asarray(matrix, model.dtypes[name]) for matrix in matrices]
        return jax.jit(lambda *layers: jnp.stack(layers), out_shardings=parameter.sharding)(*layers)

    return {name: stacked(name) for name in model.trained}


@dataclass(frozen=True)
class TrainedModel:
    """A model as a checkpoint holds it, on a mesh."""

    config: Config
    model: Model
    trained: Parameters
    frozen: Parameters
    step: int
    tokens: int


def open_run(folder: RunFolder, mesh: jax.sharding.Mesh, step: int | None, low_precision: bool = False) -> TrainedModel:
    """The model of a run at a step, or at its newest good checkpoint; `low_precision` to compute as it was trained."""
    config = folder.read_config()
    model = declare_model(config, mesh, low_precision=low_precision)
    wanted = {"trained": model.abstract(model.trained)}  # without the optimizer's state, which is larger
    restored = CheckpointManager(folder.checkpoints).restore(wanted, step, part=True)
    if restored is None:
        raise UserError(f"{folder.path} has no checkpoint yet")
    if not config.model.from_scratch:
        verify_fingerprint(model.folder, restored.host["base"])
    trained, frozen = restored.state["trained"], frozen_parameters(model, config)
    return TrainedModel(config, model, trained, frozen, restored.step, restored.host["tokens"])


def of_model(name: str, config: Config) -> Config:
    """`config` with the model that `name` is: a folder or hub id, or an adapter's folder, which names its base.

    What the config says of quantization is of an adapter's base; a whole model is taken as it is.

    Raises UserError where an adapter does not say what it is an adapter of.
    """
    folder = Path(name).expanduser()
    lora, quant, base, revision = Lora(), Quant(), name, None
    if (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
        adapter = hf.read_adapter(folder)
        if adapter.base_model is None:
            raise UserError(f"{name} does not say which model it is an adapter of (base_model_name_or_path)")
        modules, base, revision = tuple(sorted(adapter.modules)), adapter.base_model, adapter.revision
        lora = Lora(True, adapter.rank, adapter.alpha, 0.0, modules, use_rslora=adapter.use_rslora, path=name)
        quant = config.quant
    model = dataclasses.replace(config.model, path=base, revision=revision, from_scratch=False)
    return dataclasses.replace(config, model=model, lora=lora, quant=quant)


def tokenizer_folder(model: Model, config: Config) -> Path:
    """Where the tokenizer is: in the folder of the adapter, if it has one, as exported ones do; else in the model's."""
    adapter = None if config.lora.path is None else Path(config.lora.path).expanduser()
    return adapter if adapter is not None and (adapter / "tokenizer.json").exists() else model.folder
