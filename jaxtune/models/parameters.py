"""The parameters that a decoder declares: a record of each, with its Hugging Face tensors, and random values."""

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
from jaxtune.models.decoder import Block, Decoder, Parameters
from jaxtune.models.families import names_of
from jaxtune.models.places import Place, Tensor
from jaxtune.models.spec import DeltaNet, Experts, Heads, Layer, ModelSpec, Treatment
from jaxtune.parallel.layout import RULES, Axes, axes_in, axes_of, by_head, sharding
from jaxtune.parallel.layout import spec as partition_spec
from jaxtune.parallel.mesh import misfit
from jaxtune.parallel.offload import on_host
from jaxtune.parallel.random import named_key
from jaxtune.precision.linears import Frozen
from jaxtune.precision.operands import Numbers
from jaxtune.quant.format import Format


class Storage(Protocol):
    """What matrices are stored as, in place of an array: a `quant.Format`, a `precision.Numbers`, or both."""

    def abstract(self, shape: tuple[int, ...], dtype: Any, axes: tuple[str | None, ...]) -> Any:
        """Shapes, dtypes and shardings of a stack of matrices (..., o, i) on the current mesh."""
        ...

    def make(self, weight: Float[Array, "*stack o i"], axes: tuple[str | None, ...]) -> Any:
        """A matrix, or a stack of them, on the devices that hold it."""
        ...


@dataclass(frozen=True)
class Parameter:
    """One leaf of the flat parameter dict.

    Attributes:
        shape, axes: with the leading axes, and the logical name of each dimension.
        init: draws values of one element of the leading axes.
        kind: what it is, said where it is declared.
        local: its name inside its layer, "mlp.down.weight", or the whole name outside the layers.
        layers: those that are stacked here; empty outside the layers.
        lead: sizes of the leading axes: layers, or layers and experts; () outside the layers.
        places: where each element of the leading axes is in Hugging Face's files, the last axis running fastest.
        treatment: how it is treated; of an adapter, that of the weight that it is beside.
        storage: what it is stored as; None: an array.
        dtype: of its elements; of a quantized one, that of the dequantized elements.
        float32: that is its dtype, whatever the model's.
        on_host: whether it waits in the host's memory, from where each layer comes to the device when it is used.
        frozen: of an adapter, that no step changes it.
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
        """Whether a step changes it."""
        return not self.frozen if self.kind == "adapter" else self.treatment.trained

    @property
    def matrix(self) -> tuple[int, ...]:
        """Shape of one element of the leading axes."""
        return self.shape[len(self.lead) :]

    @property
    def matrix_axes(self) -> tuple[str | None, ...]:
        """Logical names of its dimensions."""
        return self.axes[len(self.lead) :]

    @property
    def sharding(self) -> jax.NamedSharding:
        """Where it is used on the current mesh."""
        return sharding(*self.axes)

    def abstract(self) -> Any:
        """Shape, dtype and sharding; of a quantized one, those of the arrays that it is stored as."""
        if self.storage is not None:
            return self.storage.abstract(self.shape, self.dtype, self.axes)
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=self.sharding)

    def elements(self) -> list[tuple[tuple[int, ...], Place]]:
        """Index in the leading axes, and place, of each tensor or part of one."""
        return list(zip(itertools.product(*map(range, self.lead)), self.places, strict=True))


class Site(NamedTuple):
    """A parameter of one layer, or one outside the layers (layer None)."""

    layer: int | None
    local: str
    kind: Kind


class _Declared(NamedTuple):
    """A parameter as its module declares it, without the leading axes of layers and experts."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: Init
    kind: Kind
    float32: bool
    frozen: bool


def _declared(module: nnx.Module) -> dict[str, _Declared]:
    """By dotted name."""
    return {
        ".".join(map(str, path)): _Declared(
            variable.get_value().shape, *(variable.get_metadata(name) for name in _Declared._fields[1:])
        )
        for path, variable in nnx.to_flat_state(nnx.state(module))
    }


def declare(spec: ModelSpec) -> tuple[nnx.GraphDef, dict[str, Parameter]]:
    """The decoder's graph, for `bind`, and every parameter by its dotted name."""
    decoder, names = Decoder(spec), names_of(spec)
    declared, adapted = _declared(decoder), spec.adapted
    inside = [
        (f"stacks.{number}.blocks.{position}.", tuple(stack.layer_numbers(position)), layer, stack.stages > 1)
        for number, stack in enumerate(spec.stacks)
        for position, layer in enumerate(stack.period)
    ]
    found = {}
    for prefix, layers, layer, staged in [("", (), None, False), *inside]:
        of = {n.removeprefix(prefix): one for n, one in declared.items() if n.startswith(prefix or tuple(names))}
        treatments = dict(spec.treatments if layer is None else layer.treatments)
        for local, one in of.items():
            lead = () if layer is None else (len(layers), *_experts(layer, local))
            treatment = treatments.get(_weight_of(local, one.kind), Treatment())
            found[prefix + local] = Parameter(
                shape=(*lead, *one.shape),
                axes=(*("stages" if staged else "layers", "experts")[: len(lead)], *one.axes),
                init=one.init,
                kind=one.kind,
                float32=one.float32,
                frozen=one.frozen,
                local=local,
                layers=layers,
                lead=lead,
                places=_places(names, local, of, layers, lead, treatment),
                treatment=treatment,
                storage=None if one.kind == "adapter" else _storage(treatment, adapted),
            )
    return nnx.graphdef(decoder), {name: found[name] for name in declared}


def _experts(layer: Layer, local: str) -> tuple[int, ...]:
    """The leading axis of experts that a parameter of a layer has, or none."""
    slot = layer.feed_forward
    return (slot.count,) if isinstance(slot, Experts) and local.startswith("mlp.experts.") else ()


def _weight_of(local: str, kind: Kind) -> str:
    """The weight that an adapter's parameter is beside; of another parameter its own name."""
    return f"{local.rsplit('.', 1)[0]}.weight" if kind == "adapter" else local


def _places(
    names: Mapping[str, str | Tensor],
    local: str,
    beside: Mapping[str, _Declared],
    layers: tuple[int, ...],
    lead: tuple[int, ...],
    treatment: Treatment,
) -> tuple[Place, ...]:
    """Where a parameter is in the files; parameters of a layer that share one name there are its rows, in order.

    Adapters have peft's names, "q_proj.lora_A.weight". `beside`: all that is declared in the layer.
    """
    weight, part = _weight_of(local, beside[local].kind), local.rsplit(".", 1)[-1]
    tensor, experts = _tensor(names[weight]), lead[1] if len(lead) > 1 else 1
    parts = [other for other in names if names[other] == names[weight] and other in beside]
    of_stacked = weight != local and tensor.stacked
    if weight != local:
        module = _wrapper(names, tensor, beside) if of_stacked else tensor.name.removesuffix(".weight")
        tensor = Tensor(f"{module}.{treatment.adapter.peft_names[part]}", interleaved=tensor.interleaved)
        parts = parts if part not in treatment.adapter.shared else []
    # Rows of the parts in the order of the family's names: of a fused qkv, k begins where the rows of q end. A tensor
    # that is a parameter of its own has one part, and no offset.
    rows = [beside[other].shape[0] for other in parts]
    first, of, step = 0, None, 1
    if len(parts) > 1:
        number, of = parts.index(weight), sum(rows)
        first, step = (number, len(parts)) if tensor.interleaved else (sum(rows[:number]), 1)

    def place(layer: int | None, expert: int) -> Place:
        found = Place(tensor.name.format(layer=layer, expert=expert), first, of, step, transposed=tensor.transposed)
        if not of_stacked:
            return dataclasses.replace(found, element=expert, stack=experts) if tensor.stacked else found
        # peft's matrices of all experts: A (experts * rank, in), B (out, rank * experts), a column of each in turn.
        if (axis := beside[local].axes.index("rank")) == 0:
            rank = beside[local].shape[axis]
            return dataclasses.replace(found, first=expert * rank, of=experts * rank)
        return dataclasses.replace(found, column=expert, columns=experts)

    return tuple(place(layer, expert) for layer, expert in itertools.product(layers or (None,), range(experts)))


def _wrapper(names: Mapping[str, str | Tensor], tensor: Tensor, beside: Mapping[str, _Declared]) -> str:
    """What peft calls the module of a stacked tensor's adapter.

    It wraps the tensor's module once for each tensor in it that has one, the first of them innermost.
    """
    adapted = {names[_weight_of(local, one.kind)] for local, one in beside.items() if one.kind == "adapter"}
    module = _loaded(tensor).rpartition(".")[0]
    inside = [one for one in map(_tensor, dict.fromkeys(names.values())) if one in adapted and one.stacked]
    outer = [one for one in inside[inside.index(tensor) + 1 :] if _loaded(one).rpartition(".")[0] == module]
    return module + ".base_layer" * len(outer)


def _tensor(found: str | Tensor) -> Tensor:
    return Tensor(found) if isinstance(found, str) else found


def _loaded(tensor: Tensor) -> str:
    return tensor.name if tensor.loaded is None else tensor.loaded


def _storage(treatment: Treatment, adapted: bool) -> Storage | None:
    """A frozen weight under adapters is stored as the operands of its low-precision products, made once.

    A weight that is frozen by train.freeze is exported with the model, so it is stored as it is.
    """
    if treatment.multiplied is None or treatment.trained or not adapted:
        return treatment.stored
    return Frozen(treatment.multiplied, treatment.stored)


@functools.cache
def sites(spec: ModelSpec) -> dict[str, tuple[Site, ...]]:
    """The parameters in each Hugging Face tensor of the model, several where it is fused; without adapters."""
    found: dict[str, tuple[Site, ...]] = {}
    names = names_of(spec)
    outside = _declared(Decoder(dataclasses.replace(spec, layers=())))
    inside = {layer: _declared(Block(spec, layer)) for layer in set(spec.layers)}
    every = [(None, None, outside), *((number, layer, inside[layer]) for number, layer in enumerate(spec.layers))]
    for number, layer, declared in every:
        for local, tensor in names.items():
            if local not in declared:
                continue
            tensor = _tensor(tensor)
            experts = 1 if layer is None or tensor.stacked else math.prod(_experts(layer, local))
            for expert in range(experts):
                name = tensor.name.format(layer=number, expert=expert)
                found[name] = (*found.get(name, ()), Site(number, local, declared[local].kind))
    return found


def loaded_names(spec: ModelSpec) -> dict[str, str]:
    """What transformers calls each Hugging Face tensor once it is read: another name for some that are stacked."""
    names = names_of(spec)
    found = {name: _tensor(names[site.local]) for name, (site, *_) in sites(spec).items()}
    return {
        name: name if tensor.loaded is None else tensor.loaded.format(layer=sites(spec)[name][0].layer)
        for name, tensor in found.items()
    }


def abstract(parameters: Mapping[str, Parameter]) -> Parameters:
    """Shapes, dtypes and shardings of them, or of what they are stored as, in the memory where they are in a run."""

    def waiting(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=on_host(leaf.sharding))

    found = {name: parameter.abstract() for name, parameter in parameters.items()}
    return {n: jax.tree.map(waiting, leaf) if parameters[n].on_host else leaf for n, leaf in found.items()}


def randomize(parameters: Mapping[str, Parameter], seed: int) -> Parameters:
    """Random values straight into their shards: a function of seed, name and layer, not of the mesh or the stacks."""

    def make_all():
        return {name: drawn(parameter, jax.random.key(seed)) for name, parameter in parameters.items()}

    return jax.jit(make_all, out_shardings={name: p.sharding for name, p in parameters.items()})()


def drawn(parameter: Parameter, key: Array) -> Array:
    """Random values of a parameter: a function of the key, its name and its layers."""
    key = named_key(key, parameter.local)

    def draw(key: Array) -> Array:
        return parameter.init(key, parameter.matrix, jnp.float32).astype(parameter.dtype)

    if not parameter.layers:
        return draw(key)
    keys = jax.vmap(lambda layer: jax.random.fold_in(key, layer))(jnp.asarray(parameter.layers))
    if len(parameter.lead) > 1:
        keys = jax.vmap(lambda key: jax.random.split(key, parameter.lead[1]))(keys)
        return jax.vmap(jax.vmap(draw))(keys)
    return jax.vmap(draw)(keys)


def undivided(spec: ModelSpec, parameters: Mapping[str, Parameter], mesh: jax.sharding.Mesh) -> list[str]:
    """Complaints about dimensions that the mesh does not divide, each with the sizes that would."""
    rules, mixers, divided = RULES.value, {layer.mixer for layer in spec.layers}, set()
    for stack in spec.stacks:
        with RULES(rules.apart("stage") if stack.stages > 1 else rules):
            divided |= {("heads", *_mixed_apart(layer.mixer)) for layer in stack.period}
    for layout in {rules.parameters, rules.gradients, rules.optimizer}:
        # A head is never split, so that their number counts, not that of their features.
        divided |= {(name, size, axes_of(name, layout)) for mixer in mixers for name, size in _heads(mixer)}
        for parameter in parameters.values():
            places = partition_spec(*parameter.axes, layout=layout)
            named = zip(parameter.axes, parameter.shape, map(axes_in, places))
            divided |= {(name, size, axes) for name, size, axes in named if name not in ("heads", "kv_heads")}
    found = (misfit(mesh, axes, size, f"{name}={size}") for name, size, axes in sorted(divided, key=str))
    return list(dict.fromkeys(complaint for complaint in found if complaint))


def _heads(mixer: Heads | DeltaNet) -> list[tuple[str, int]]:
    """The logical names of a mixer's heads, and how many there are."""
    if isinstance(mixer, DeltaNet):
        return [("heads", mixer.key_heads), ("heads", mixer.value_heads)]
    return [("heads", mixer.heads), *[("kv_heads", mixer.kv_heads)] * (not mixer.kv_whole)]


def _mixed_apart(mixer: Heads | DeltaNet) -> tuple[int, Axes]:
    """Heads that are mixed each on its own, and axes that divide them; of keys and values fewer may be repeated."""
    if isinstance(mixer, DeltaNet):
        return mixer.value_heads, axes_in(by_head()[2])
    return mixer.heads, axes_in(by_head(RULES.value.context)[2])


def undivided_blocks(
    parameters: Mapping[str, Parameter], formats: Mapping[str, Format | Numbers], mesh: jax.sharding.Mesh, remedy: str
) -> list[str]:
    """Complaints about parameters of which the mesh would split a block, and what else would help."""
    complaints = set()
    for name, format in formats.items():
        parameter = parameters[name]
        block = format.block_of(parameter.matrix)
        places = partition_spec(*parameter.axes)[len(parameter.lead) :]
        for axis_name, size, elements, place in zip(parameter.matrix_axes, parameter.matrix, block, places):
            blocks, what = size // elements, f"the {size} features of {axis_name} in blocks of {elements}"
            # A stored matrix of one block can be split, as its scale is on every device; a block of a product cannot.
            if (blocks > 1 or isinstance(format, Numbers)) and (found := misfit(mesh, axes_in(place), blocks, what)):
                complaints.add(f"{found} (mesh.data takes the rest); or {remedy}")
    return sorted(complaints)


def count(parameters: Mapping[str, Parameter]) -> int:
    """Elements of all of them."""
    return sum(math.prod(parameter.shape) for parameter in parameters.values())
