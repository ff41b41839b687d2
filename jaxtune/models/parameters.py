"""Parameters of a decoder: a record for each, with its Hugging Face tensors, and random initialisation."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxtune.models.declared import Init, Kind
from jaxtune.models.decoder import Decoder, Parameters
from jaxtune.models.families import names_of
from jaxtune.models.places import Place, Tensor
from jaxtune.models.stack import make_block
from jaxtune.models.structure.layer_spec import Experts, Layer, Treatment
from jaxtune.models.structure.mixers import DeltaNet, Heads, Mamba2, OneMixer, ShortConv
from jaxtune.models.structure.model_spec import ModelSpec, with_every_layer
from jaxtune.parallel.layout import RULES, Axes, axes_in, axes_of, by_head, sharding
from jaxtune.parallel.layout import spec as partition_spec
from jaxtune.parallel.mesh import misfit
from jaxtune.parallel.offload import on_host
from jaxtune.parallel.random import named_key
from jaxtune.precision.linears import Frozen
from jaxtune.precision.operands import MatmulFormat
from jaxtune.quant.format import Format

# Names, inside a layer, of parameters with an axis of experts. A layer has as many experts of images as of texts.
OF_EXPERTS = ("mlp.experts.", "mlp.vision_experts.")


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


class Site(NamedTuple):
    """A parameter of one layer, or one outside the layers (layer None)."""

    layer: int | None
    local: str
    kind: Kind

    @property
    def of_experts(self) -> bool:
        """Whether it is a parameter of a mixture's experts."""
        return self.local.startswith(OF_EXPERTS)

    def of_module(self, spec: ModelSpec) -> bool:
        """Whether it is a parameter of a multi-token-prediction module."""
        return self.layer is not None and len(spec.layers) <= self.layer < spec.tower_start

    @property
    def of_projector(self) -> bool:
        """Whether it is a parameter of a vision tower's projectors."""
        return self.local.startswith(("vision.projector.", "vision.deepstack."))

    def of_vision(self, spec: ModelSpec) -> bool:
        """Whether it is a parameter of the vision tower or its projectors."""
        return self.local.startswith("vision.") if self.layer is None else self.layer >= spec.tower_start


class _Declaration(NamedTuple):
    """A parameter as its module declares it, without the leading axes of layers and experts."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: Init
    kind: Kind
    float32: bool
    frozen: bool


def _declarations(module: nnx.Module) -> dict[str, _Declaration]:
    """Return the parameters that a module declares, by dotted name."""
    return {
        ".".join(map(str, path)): _Declaration(
            variable.get_value().shape, *(variable.get_metadata(name) for name in _Declaration._fields[1:])
        )
        for path, variable in nnx.to_flat_state(nnx.state(module))
    }


def declare(spec: ModelSpec) -> tuple[nnx.GraphDef, dict[str, Parameter]]:
    """Return the decoder's graph, for `bind`, and every parameter by its dotted name."""
    decoder, outside = Decoder(spec), names_of(spec)
    # Modules declare one layer and one expert; the leading axes of stacks and experts are added here.
    declared, adapted = _declarations(decoder), spec.has_adapters
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
            lead = () if layer is None else (len(layers), *_experts(layer, local))
            treatment = treatments.get(_weight_of(local, one.kind), Treatment())
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
                places=_places(names, local, in_prefix, tuple(map(spec.number_in_files, layers)), lead, treatment),
                treatment=treatment,
                storage=None if one.kind == "adapter" else _storage(treatment, adapted),
            )
    return nnx.graphdef(decoder), {name: records[name] for name in declared}  # in the order of declaration


def _experts(layer: Layer, local: str) -> tuple[int, ...]:
    """Return the leading axis of experts of a layer's parameter: (count,), or () if it has none."""
    slot = layer.feed_forward
    return (slot.count,) if isinstance(slot, Experts) and local.startswith(OF_EXPERTS) else ()


def _weight_of(local: str, kind: Kind) -> str:
    """Return the name of the weight that an adapter's parameter belongs to; for another parameter its own name."""
    return f"{local.rsplit('.', 1)[0]}.weight" if kind == "adapter" else local


def _places(
    names: Mapping[str, str | Tensor],
    local: str,
    siblings: Mapping[str, _Declaration],
    layers: tuple[int | None, ...],
    lead: tuple[int, ...],
    treatment: Treatment,
) -> tuple[Place, ...]:
    """Return a parameter's places in the files. Parameters of a layer with the same tensor name are its rows, in order.

    Adapters have peft's names, such as "q_proj.lora_A.weight". `siblings`: all parameters that the layer declares.
    """
    weight, part = _weight_of(local, siblings[local].kind), local.rsplit(".", 1)[-1]
    tensor, experts = _tensor(names[weight]), lead[1] if len(lead) > 1 else 1
    alike = [other for other in names if names[other] == names[weight]]
    parts = [other for other in alike if other in siblings]
    of_stacked = weight != local and tensor.stacked
    of_vectors = tensor.stacked and len(lead) < 2  # some may have no parameter in this model
    if weight != local:
        module = _wrapper(names, tensor, siblings) if of_stacked else _loaded_name(tensor).removesuffix(".weight")
        tensor = Tensor(f"{module}.{treatment.adapter.peft_names[part]}", interleaved=tensor.interleaved)
        parts = parts if part not in treatment.adapter.shared else []
    # The parts' rows are in the order of the family's names: in a fused qkv, k begins after the rows of q. A tensor
    # that is one parameter has one part, and no offset.
    rows = [siblings[other].shape[0] for other in parts]
    first, rows_of_whole, step = 0, None, 1
    if len(parts) > 1:
        number, rows_of_whole = parts.index(weight), sum(rows)
        first, step = (number, len(parts)) if tensor.interleaved else (sum(rows[:number]), 1)

    def place(layer: int | None, expert: int) -> Place:
        name = tensor.name.format(layer=layer, expert=expert, later_expert=experts + expert)
        how = {"transposed": tensor.transposed, "scalar": tensor.scalar}
        whole = Place(name, first, rows_of_whole, step, **how)
        if of_vectors:
            return Place(name, element=alike.index(weight), stack=len(alike))
        if not of_stacked:
            return dataclasses.replace(whole, element=expert, stack=experts) if tensor.stacked else whole
        # peft has one pair of matrices for all experts: A (experts * rank, in), expert after expert; and B
        # (out, rank * experts), in whose columns the expert runs fastest.
        if (axis := siblings[local].axes.index("rank")) == 0:
            rank = siblings[local].shape[axis]
            return dataclasses.replace(whole, first=expert * rank, of=experts * rank)
        return dataclasses.replace(whole, column=expert, columns=experts)

    return tuple(place(layer, expert) for layer, expert in itertools.product(layers or (None,), range(experts)))


def _wrapper(names: Mapping[str, str | Tensor], tensor: Tensor, siblings: Mapping[str, _Declaration]) -> str:
    """Return peft's name of the module that a stacked tensor's adapter is in.

    peft wraps the tensor's module once for each adapted tensor in it, the first one innermost, and each wrapper adds
    ".base_layer" to the names inside it.
    """
    adapted = {names[_weight_of(local, one.kind)] for local, one in siblings.items() if one.kind == "adapter"}
    module = _loaded_name(tensor).rpartition(".")[0]
    inside = [one for one in map(_tensor, dict.fromkeys(names.values())) if one in adapted and one.stacked]
    outer = [one for one in inside[inside.index(tensor) + 1 :] if _loaded_name(one).rpartition(".")[0] == module]
    return module + ".base_layer" * len(outer)


def _tensor(entry: str | Tensor) -> Tensor:
    return Tensor(entry) if isinstance(entry, str) else entry


def _loaded_name(tensor: Tensor) -> str:
    return tensor.name if tensor.loaded is None else tensor.loaded


def _storage(treatment: Treatment, adapted: bool) -> Storage | None:
    """Return the storage format of a parameter, or None.

    A frozen weight under adapters is stored as the operands of its low-precision products, which are computed once. A
    weight frozen by train.freeze is exported with the model, so it keeps its values.
    """
    if treatment.multiplied is None or treatment.trained or not adapted:
        return treatment.stored
    return Frozen(treatment.multiplied, treatment.stored)


@functools.cache
def sites(spec: ModelSpec) -> dict[str, tuple[Site, ...]]:
    """Return the parameters in each Hugging Face tensor (several if it is fused), without adapters."""
    by_tensor: dict[str, tuple[Site, ...]] = {}
    # A decoder without layers declares only the parameters outside the layers.
    without = dataclasses.replace(with_every_layer(spec, ()), stages=1, chunks=1)
    outside = _declarations(Decoder(without))
    # Equal layers declare the same parameters, so one block is built for each kind of layer.
    inside = {layer: _declarations(make_block(spec, layer)) for layer in set(spec.every_layer)}
    every = [(None, None, outside), *((number, layer, inside[layer]) for number, layer in enumerate(spec.every_layer))]
    for number, layer, declared in every:
        for local, tensor in names_of(spec, layer).items():
            if local not in declared:
                continue
            tensor = _tensor(tensor)
            experts = 1 if layer is None or tensor.stacked else math.prod(_experts(layer, local))
            for expert in range(experts):
                numbers = {"expert": expert, "later_expert": experts + expert}
                name = tensor.name.format(layer=spec.number_in_files(number), **numbers)
                by_tensor[name] = (*by_tensor.get(name, ()), Site(number, local, declared[local].kind))
    return by_tensor


def tensors_of(spec: ModelSpec) -> dict[str, Tensor]:
    """Return the entry of the family's table for each Hugging Face tensor."""
    layers: dict[int | None, Layer | None] = {None: None, **dict(enumerate(spec.every_layer))}
    return {name: _tensor(names_of(spec, layers[site.layer])[site.local]) for name, (site, *_) in sites(spec).items()}


def loaded_names(spec: ModelSpec) -> dict[str, str]:
    """Return transformers' name of each Hugging Face tensor after loading; it differs for some stacked tensors."""
    return {
        name: name
        if tensor.loaded is None
        else tensor.loaded.format(layer=spec.number_in_files(sites(spec)[name][0].layer))
        for name, tensor in tensors_of(spec).items()
    }


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


def find_undivided(spec: ModelSpec, parameters: Mapping[str, Parameter], mesh: jax.sharding.Mesh) -> list[str]:
    """Return complaints about dimensions that the mesh does not divide, each with sizes that would fit."""
    rules, divided = RULES.value, set()
    mixers = {mixer for layer in spec.every_layer for mixer in layer.mixers}
    for stack in (*spec.stacks, *spec.tower_stacks):
        # Layers in a pipeline see a mesh without the axis of stages, and that decides how heads are divided.
        with RULES(rules.apart("stage") if stack.stages > 1 else rules):
            divided |= {("heads", *_mixed_heads(mixer)) for layer in stack.period for mixer in layer.mixers}
    for layout in {rules.parameters, rules.gradients, rules.optimizer}:
        # A head is never split, so the number of heads must be divided, not the number of their features.
        divided |= {(name, size, axes_of(name, layout)) for mixer in mixers for name, size in _heads(mixer)}
        for parameter in parameters.values():
            # Linear weights with heads have them as (heads * features): the check above is the stricter one.
            places = partition_spec(*parameter.axes, layout=layout)
            named = zip(parameter.axes, parameter.shape, map(axes_in, places))
            divided |= {(name, size, axes) for name, size, axes in named if name not in ("heads", "kv_heads")}
    complaints = (misfit(mesh, axes, size, f"{name}={size}") for name, size, axes in sorted(divided, key=str))
    return list(dict.fromkeys(complaint for complaint in complaints if complaint))


def _heads(mixer: OneMixer) -> list[tuple[str, int]]:
    """Return the logical names of a mixer's heads, or of its channels, and their numbers."""
    if isinstance(mixer, ShortConv):
        return [("heads", mixer.channels)]
    if isinstance(mixer, DeltaNet):
        return [("heads", mixer.key_heads), ("heads", mixer.value_heads)]
    if isinstance(mixer, Mamba2):  # groups that devices do not divide are replicated
        return [("heads", mixer.heads)]
    return [("heads", mixer.heads), *[("kv_heads", mixer.kv_heads)] * (not mixer.kv_whole)]


def _mixed_heads(mixer: OneMixer) -> tuple[int, Axes]:
    """Return the number of heads or channels that are mixed independently, and the mesh axes that divide them.

    Key and value heads need not be divided: they are repeated if there are fewer.
    """
    if isinstance(mixer, Heads):
        return mixer.heads, axes_in(by_head(RULES.value.context)[2])
    if isinstance(mixer, ShortConv):
        return mixer.channels, axes_in(by_head()[2])
    return mixer.value_heads if isinstance(mixer, DeltaNet) else mixer.heads, axes_in(by_head()[2])


def undivided_blocks(
    parameters: Mapping[str, Parameter],
    formats: Mapping[str, Format | MatmulFormat],
    mesh: jax.sharding.Mesh,
    remedy: str,
) -> list[str]:
    """Return complaints about parameters with a block that the mesh would split, each with the remedy."""
    complaints = set()
    for name, format in formats.items():
        parameter = parameters[name]
        block = format.block_of(parameter.matrix)
        places = partition_spec(*parameter.axes)[len(parameter.lead) :]
        for axis_name, size, elements, place in zip(parameter.matrix_axes, parameter.matrix, block, places):
            blocks, what = size // elements, f"the {size} features of {axis_name} in blocks of {elements}"
            # A stored matrix of one block can be split, because every device has its scale; a product's block cannot.
            if (blocks > 1 or isinstance(format, MatmulFormat)) and (
                text := misfit(mesh, axes_in(place), blocks, what)
            ):
                complaints.add(f"{text} (mesh.data takes the rest); or {remedy}")
    return sorted(complaints)


def count(parameters: Mapping[str, Parameter]) -> int:
    """Return the total number of elements."""
    return sum(math.prod(parameter.shape) for parameter in parameters.values())
