"""Parameters of a decoder: a record for each, as its module declares it, and random initialisation."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxtune.models.declared import Init, Kind, declarations
from jaxtune.models.decoder import Decoder, Parameters
from jaxtune.models.families import names_of
from jaxtune.models.places import Place
from jaxtune.models.sites import experts_of, places_of, weight_of
from jaxtune.models.structure.layer_spec import Treatment
from jaxtune.models.structure.model_spec import ModelSpec
from jaxtune.parallel.layout import sharding
from jaxtune.parallel.offload import on_host
from jaxtune.parallel.random import named_key
from jaxtune.precision.linears import Frozen


class Storage(Protocol):
    """A storage format for matrices of an array: a quantized `Format`, a low-precision `MatmulFormat`, or both."""

    def abstract(self, shape: tuple[int, ...], dtype: Any, axes: tuple[str | None, ...]) -> Any:
        """Return the shapes, dtypes and shardings of a stored stack of matrices (..., o, i) on the current mesh."""
        ...

    def make(self, weight: Float[Array, "*stack o i"], axes: tuple[str | None, ...]) -> Any:
        """Return a matrix, or a stack of matrices, in this format, on the devices that hold it."""
        ...


@dataclass(frozen=True)
class Parameter:
    """One leaf of the flat parameter dict.

    Attributes:
        shape: the shape, with the leading axes.
        axes: the logical name of each dimension.
        init: draws the values of one element of the leading axes.
        kind: the kind that its module declares, such as "linear" (`models.declared`).
        local: its name inside its layer, such as "mlp.down.weight"; outside the layers its whole name.
        layers: numbers of the stacked layers; empty outside the layers.
        lead: sizes of the leading axes: layers, or layers and experts; () outside the layers.
        places: location in Hugging Face's files of each element of the leading axes, the last axis running fastest.
        treatment: its `Treatment`; an adapter has its weight's treatment.
        storage: the storage format; None: an array.
        dtype: dtype of the elements, after dequantization if it is quantized.
        float32: whether it is float32 regardless of the model's dtype.
        on_host: whether it is kept in host memory; each layer is copied to the device when it is used.
        frozen: whether an adapter's parameter is never updated.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: Init
    kind: Kind
    local: str
    layers: tuple[int, ...]
    lead: tuple[int, ...]
    places: tuple[Place, ...]
    treatment: Treatment
    storage: Storage | None = None
    dtype: Any = jnp.float32
    float32: bool = False
    on_host: bool = False
    frozen: bool = False

    @property
    def trained(self) -> bool:
        """Whether a training step updates it."""
        if self.kind == "adapter":
            return not self.frozen
        return self.kind != "constant" and self.treatment.trained

    @property
    def matrix(self) -> tuple[int, ...]:
        """Shape of one element of the leading axes."""
        return self.shape[len(self.lead) :]

    @property
    def matrix_axes(self) -> tuple[str | None, ...]:
        """Logical names of the dimensions of one element of the leading axes."""
        return self.axes[len(self.lead) :]

    @property
    def sharding(self) -> jax.NamedSharding:
        """Its sharding on the current mesh."""
        return sharding(*self.axes)

    def abstract(self) -> Any:
        """Return shape, dtype and sharding of the array, or of each array that the storage format consists of."""
        if self.storage is not None:
            return self.storage.abstract(self.shape, self.dtype, self.axes)
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=self.sharding)

    def elements(self) -> list[tuple[tuple[int, ...], Place]]:
        """Return the index in the leading axes, and the place in the files, of each element."""
        return list(zip(itertools.product(*map(range, self.lead)), self.places, strict=True))


def adapter_parts(name: str, parameter: Parameter) -> dict[str, str]:
    """Return the parameter's name of each part of a weight's adapter; shared parts belong to the adapter's owner."""
    site, local = name.removesuffix(".weight"), parameter.local.removesuffix(".weight")
    adapter = parameter.treatment.adapter
    first = site.removesuffix(local) + (adapter.owner or local)
    return {part: f"{first if part in adapter.shared else site}.{part}" for part in adapter.peft_names}


def declare(spec: ModelSpec) -> tuple[nnx.GraphDef, dict[str, Parameter]]:
    """Return the decoder's graph, for `bind`, and every parameter by its dotted name."""
    decoder, outside = Decoder(spec), names_of(spec)
    # Modules declare one layer and one expert; the leading axes of stacks and experts are added here.
    declared, adapted = declarations(decoder), spec.has_adapters
    inside = [
        (f"stacks.{number}.blocks.{position}.", tuple(stack.layer_numbers(position)), layer, stack.stages > 1)
        for number, stack in enumerate(spec.stacks)
        for position, layer in enumerate(stack.period)
    ]
    inside += [
        (f"mtp.{module}.blocks.0.", (len(spec.layers) + module,), layer, False) for module, layer in enumerate(spec.mtp)
    ]
    inside += [
        (f"vision.stacks.{number}.blocks.{position}.", tuple(stack.layer_numbers(position)), layer, False)
        for number, stack in enumerate(spec.tower_stacks)
        for position, layer in enumerate(stack.period)
    ]
    records = {}
    for prefix, layers, layer, staged in [("", (), None, False), *inside]:
        apart = ("stacks.", "mtp.", "vision.stacks.") if layer is None else ()  # an empty prefix would match all names
        in_prefix = {
            n.removeprefix(prefix): one
            for n, one in declared.items()
            if n.startswith(prefix) and not n.startswith(apart)
        }
        names = outside if layer is None else names_of(spec, layer)
        treatments = dict(spec.treatments if layer is None else layer.treatments)
        for local, one in in_prefix.items():
            lead = () if layer is None else (len(layers), *experts_of(layer, local))
            treatment = treatments.get(weight_of(local, one.kind), Treatment())
            records[prefix + local] = Parameter(
                shape=(*lead, *one.shape),
                # As many names as leading axes: none, layers, or layers and experts.
                axes=(*("stages" if staged else "layers", "experts")[: len(lead)], *one.axes),
                init=one.init,
                kind=one.kind,
                float32=one.float32,
                frozen=one.frozen,
                local=local,
                layers=layers,
                lead=lead,
                places=places_of(names, local, in_prefix, tuple(map(spec.number_in_files, layers)), lead, treatment),
                treatment=treatment,
                storage=None if one.kind == "adapter" else _storage(treatment, adapted),
            )
    return nnx.graphdef(decoder), {name: records[name] for name in declared}  # in the order of declaration


def _storage(treatment: Treatment, adapted: bool) -> Storage | None:
    """Return the storage format of a parameter, or None.

    A frozen weight under adapters is stored as the operands of its low-precision products, which are computed once. A
    weight frozen by train.freeze is exported with the model, so it keeps its values.
    """
    if treatment.multiplied is None or treatment.trained or not adapted:
        return treatment.stored
    return Frozen(treatment.multiplied, treatment.stored)


def abstract(parameters: Mapping[str, Parameter]) -> Parameters:
    """Return shapes, dtypes and shardings of the parameters as stored, including whether they are in host memory."""

    def to_host(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=on_host(leaf.sharding))

    leaves = {name: parameter.abstract() for name, parameter in parameters.items()}
    return {n: jax.tree.map(to_host, leaf) if parameters[n].on_host else leaf for n, leaf in leaves.items()}


def randomize(parameters: Mapping[str, Parameter], seed: int) -> Parameters:
    """Draw random values directly into their shards; they depend on seed, name and layer, not on mesh or stacks."""

    def make_all():
        return {name: draw_parameter(parameter, jax.random.key(seed)) for name, parameter in parameters.items()}

    return jax.jit(make_all, out_shardings={name: p.sharding for name, p in parameters.items()})()


def draw_parameter(parameter: Parameter, key: Array) -> Array:
    """Draw random values of a parameter; they depend on the key, its name and its layers."""
    key = named_key(key, parameter.local)

    def draw(key: Array) -> Array:
        # Drawn in float32 and then rounded, so that all dtypes start from the same values.
        return parameter.init(key, parameter.matrix, jnp.float32).astype(parameter.dtype)

    if not parameter.layers:
        return draw(key)
    # A key for each layer by its number, so that values do not depend on how layers are stacked.
    keys = jax.vmap(lambda layer: jax.random.fold_in(key, layer))(jnp.asarray(parameter.layers))
    if len(parameter.lead) > 1:
        # Experts are never regrouped, so their keys may depend on their number in the stack.
        keys = jax.vmap(lambda key: jax.random.split(key, parameter.lead[1]))(keys)
        return jax.vmap(jax.vmap(draw))(keys)
    return jax.vmap(draw)(keys)


def count(parameters: Mapping[str, Parameter], spec: ModelSpec) -> int:
    """Return the total number of elements, without the rows that pad the vocabulary of `spec`."""
    size = {"vocabulary": spec.vocabulary}
    return sum(math.prod(size.get(axis or "", n) for n, axis in zip(p.shape, p.axes)) for p in parameters.values())
