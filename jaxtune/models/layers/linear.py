"""Linear layers: the one `matmul`, and layers with optional adapters; layers of the same input run together.

Shape letters: b rows of the batch, s positions in a row, i input features, o output features.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxtune.models.declared import Kind, declare_parameter
from jaxtune.models.forward_options import ForwardOptions
from jaxtune.models.structure.layer_spec import BOUNDS, Layer
from jaxtune.models.structure.model_spec import ModelSpec
from jaxtune.parallel.layout import RULES, P, by_token, gather, gathered_entry, shards
from jaxtune.parallel.random import Noise
from jaxtune.precision.matmul import LowPrecision
from jaxtune.precision.served import ServedWeight, round_inputs, straight_through
from jaxtune.quant.array import QuantizedArray
from pallas_kernels.grouped_matmul import Groups, by_row, grouped_matmul

# Names of linear layers' outputs in policies of jax.checkpoint: projections before a mixer, layers of
# a feed-forward, layers of experts, and all others.
QKV_PRODUCT, FFN_PRODUCT, EXPERT_PRODUCT = "linear before a mixer", "linear of a feed-forward", "linear of an expert"
PRODUCT = "linear"


class Adapter(Protocol):
    """A parameter-efficient method for one linear layer: parameters trained in addition to a frozen weight.

    Implementations are frozen and hashable.

    Attributes:
        shared: names of the parameters that the parts of one Hugging Face module (a fused qkv) share; the first part
            holds them.
        owner: name of that first part ("attention.q"); None in the first part itself, and if the module is not fused.
        from_weight: whether the initial values depend on the weight; then `begin` computes them.
    """

    shared: ClassVar[frozenset[str]]

    @property
    def peft_names(self) -> Mapping[str, str]:
        """peft's name of each parameter, after the name of the module."""
        ...

    @property
    def from_weight(self) -> bool:
        """See above."""
        ...

    @property
    def owner(self) -> str | None:
        """The part that holds the `shared` parameters; None in that part itself."""
        ...

    def declare(self, shape: tuple[int, int], axes: tuple[str | None, ...]) -> dict[str, Any]:
        """Declare the adapter's parameters for a weight (out, in) with the given shape and axes."""
        ...

    def begin(self, weight: Float[Array, "o i"], values: Mapping[str, Array]) -> dict[str, Array]:
        """Return the initial parameters, float32, from the weight (all rows of a module together) and drawn values."""
        ...

    @staticmethod
    def outputs(
        linears: "Sequence[Linear]", x: Float[Array, "b s i"], ys: Sequence[Float[Array, "b s o"]], call: ForwardOptions
    ) -> list[Float[Array, "b s o"]]:
        """Return the outputs of layers of the same input with their adapters; `ys`: base outputs, with biases.

        All parts of a Hugging Face module are in `linears`; the first one holds the `shared` parameters.
        """
        ...

    def merged(self, weight: Float[Array, "o i"], values: Mapping[str, Array]) -> Float[Array, "o i"]:
        """Return the merged weight, which gives the same output without the adapter; float32, from float32 values."""
        ...

    def merged_bias(self, bias: Float[Array, " o"], values: Mapping[str, Array]) -> Float[Array, " o"]:
        """Return the merged bias of the layer."""
        ...


def matmul(
    x: Float[Array, "b s i"],
    weight: Float[Array, "o i"] | QuantizedArray | LowPrecision | ServedWeight,
    out: str | None,
    noise: Noise | None = None,
    groups: Groups | None = None,
) -> Float[Array, "b s o"]:
    """Return x W^T in the dtype of x, with W in Hugging Face's (out, in) orientation; `out`: the logical name of o.

    `noise`: source of randomness for stochastic rounding in a low-precision backward pass. `groups`: inside a
    shard_map, which of the weights (experts, o, i) multiplies each token (b * s).
    """
    if isinstance(weight, ServedWeight):
        y = matmul(x, weight.served, out, noise, groups)
        if not weight.trained:
            return y
        # x gets its gradient from the served product only, the weight from the plain one only.
        return straight_through(y, matmul(jax.lax.stop_gradient(x), weight.plain, out, noise, groups))
    if groups is not None:
        assert not isinstance(weight, LowPrecision)  # models.experts uses its dense backend for low precision
        rows = x.reshape(-1, x.shape[-1])
        if isinstance(weight, QuantizedArray):
            product = weight.grouped_matmul(rows, groups)
        else:
            product = grouped_matmul(rows, weight, groups)
        return product.reshape(*x.shape[:2], -1)
    if not isinstance(weight, jax.Array):  # quantized and low-precision weights have their own product
        return weight.matmul(x, gathered_entry(out), noise)
    # Cast before the all-gather of FSDP, which then moves 2 bytes a weight in bfloat16.
    weight = gather(weight.astype(x.dtype))
    # Rows and positions are merged unless positions are sharded, because a product of two matrices is several times
    # faster on a CPU. Merging a sharded dimension would move every token, and would keep XLA from reduce-scattering the
    # product over positions.
    if shards(RULES.value.residual, jax.sharding.get_abstract_mesh()) > 1:
        return jnp.einsum("bsi,oi->bso", x, weight, out_sharding=by_token(out))
    # Positions are over axes of one device here, which jax merges with sharded rows, but not with whole ones.
    rows = jnp.reshape(x, (-1, x.shape[-1]), out_sharding=P(by_token()[0], jax.typeof(x).sharding.spec[2]))
    product = jnp.einsum("ti,oi->to", rows, weight, out_sharding=P(by_token()[0], gathered_entry(out)))
    return jax.reshard(product.reshape(*x.shape[:2], -1), by_token(out))


class Linear(nnx.Module):
    """y = x W^T + bias, with an adapter if there is one; x and y are clipped to bounds if the layer is `clipped`.

    `name` is its path in the layer ("mlp.down"), by which the layer's treatments name it; `kind`: its weight's kind.
    `layer`: the spec of the layer; the whole model's, for a linear layer outside the layers.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layer: Layer | ModelSpec,
        name: str,
        shape: tuple[int, int],
        axes: tuple[str | None, ...],
        bias: bool = False,
        kind: Kind = "linear",
    ):
        treatment = layer.treatment(f"{name}.weight")
        self.name, self.out = name, axes[0]
        self.float32, self.adapter = treatment.float32, treatment.adapter
        self.weight = declare_parameter(shape, axes, nnx.initializers.normal(spec.initializer_range), kind)
        self.bias = declare_parameter(shape[:1], axes[:1], nnx.initializers.zeros, "vector") if bias else None
        for part, variable in self.adapter.declare(shape, axes).items() if self.adapter else ():
            setattr(self, part, variable)
        self.clipped = isinstance(layer, Layer) and layer.clipped
        for bound, start in BOUNDS.items() if self.clipped else ():
            init = nnx.initializers.constant(start)
            setattr(self, bound, declare_parameter((1,), (None,), init, "constant"))

    def __call__(self, x: Float[Array, "b s i"], call: ForwardOptions) -> Float[Array, "b s o"]:
        """Return y in the dtype of x."""
        if not self.clipped:
            return _run([self], x, call)[0]
        return self._clip(_run([self], self._clip(x, "input"), call)[0], "output")

    def _clip(self, x: Float[Array, "b s f"], side: str) -> Float[Array, "b s f"]:
        """Clip to the bounds of the inputs or the outputs; a value at a bound has its gradient, as in torch."""
        least, most = (jax.reshard(self.part(f"{side}_{end}").astype(x.dtype), P(None)) for end in ("min", "max"))
        inside = (x >= least) & (x <= most)
        return jnp.where(inside, x, jnp.clip(jax.lax.stop_gradient(x), least, most))

    @property
    def is_served(self) -> bool:
        """Whether its weight is bound as it will be served, with the adapter merged."""
        return isinstance(self.weight.get_value(), ServedWeight)

    def served_input(self, x: Float[Array, "b s i"]) -> Float[Array, "b s i"]:
        """Return x as a `ServedWeight` is multiplied by it."""
        return round_inputs(x) if self.weight.get_value().rounds_inputs else x

    def part(self, name: str) -> Array:
        """Return the value of a parameter of the adapter, or of a bound."""
        return getattr(self, name).get_value()

    def base(self, x: Float[Array, "b s i"], call: ForwardOptions) -> Float[Array, "b s o"]:
        """Return y without the adapter."""
        noise = call.noise and call.noise.site(f"{self.name} rounding")
        weight = self.weight.get_value()
        if isinstance(weight, ServedWeight):
            weight, x = (weight, self.served_input(x)) if call.served else (weight.plain, x)
        y = matmul(x, weight, self.out, noise, call.groups)
        if self.bias is None:
            return y
        if call.groups is None:
            bias = jax.reshard(self.bias.astype(y.dtype), P(jax.typeof(y).sharding.spec[-1]))
        else:
            bias = by_row(self.bias.astype(y.dtype), call.groups, len(y))[:, None]
        # Added in float32, so that the bias's gradient is summed over the tokens in float32.
        return (y.astype(jnp.float32) + bias.astype(jnp.float32)).astype(y.dtype)


def run_linears(
    linears: Sequence[Linear], x: Float[Array, "b s i"], call: ForwardOptions
) -> list[Float[Array, "b s o"]]:
    """Return the outputs of layers of the same input, in the dtype of x; their adapters are computed together.

    `linears` has all parts of a fused Hugging Face module, the first part first: it holds the shared parameters of
    their adapters.
    """
    # Layers that are different modules: their inputs have bounds of their own, or their products other dtypes.
    if linears[0].clipped or len({linear.float32 for linear in linears}) > 1:
        return [linear(x, call) for linear in linears]
    return _run(linears, x, call)


def _run(linears: Sequence[Linear], x: Float[Array, "b s i"], call: ForwardOptions) -> list[Float[Array, "b s o"]]:
    if not linears[0].float32:
        # Names let a rematerialisation policy choose which outputs are saved.
        return [named(y, call, linear) for y, linear in zip(_outputs(linears, x, call), linears)]
    with jax.default_matmul_precision("highest"):  # no TF32 on a GPU, nor in the backward pass
        ys = _outputs(linears, x.astype(jnp.float32), call)
    return [named(y.astype(x.dtype), call, linear) for y, linear in zip(ys, linears)]


def scale(x: Float[Array, "..."], factor: float) -> Float[Array, "..."]:
    """Return x times a factor that is not rounded to the dtype of x, in that dtype."""
    return x if factor == 1 else (x.astype(jnp.float32) * factor).astype(x.dtype)


def named(y: Float[Array, "..."], call: ForwardOptions, linear: Linear | None = None) -> Float[Array, "..."]:
    """Return a linear layer's output, or a product of an adapter, named for the policies of jax.checkpoint."""
    part, _, of_part = ("", "", "") if linear is None else linear.name.partition(".")
    name = FFN_PRODUCT if part == "mlp" else PRODUCT if of_part in ("", "o") else QKV_PRODUCT
    return checkpoint_name(y, name if call.groups is None else EXPERT_PRODUCT)


def _outputs(linears: Sequence[Linear], x: Float[Array, "b s i"], call: ForwardOptions) -> list[Float[Array, "b s o"]]:
    ys = [linear.base(x, call) for linear in linears]
    adapted = [place for place, linear in enumerate(linears) if linear.adapter and call.adapters]
    for served in (False, True):
        places = [place for place in adapted if (call.served and linears[place].is_served) == served]
        if places:
            add = _adapter_gradients if served else _add_adapters
            outputs = add([linears[place] for place in places], x, [ys[place] for place in places], call)
            for place, output in zip(places, outputs):
                ys[place] = output
    return ys


@jax.named_scope("adapters")
def _add_adapters(
    linears: Sequence[Linear], x: Float[Array, "b s i"], ys: Sequence[Float[Array, "b s o"]], call: ForwardOptions
) -> list[Float[Array, "b s o"]]:
    return linears[0].adapter.outputs(linears, x, ys, call)  # a model has adapters of one class


def _adapter_gradients(
    linears: Sequence[Linear], x: Float[Array, "b s i"], ys: Sequence[Float[Array, "b s o"]], call: ForwardOptions
) -> list[Float[Array, "b s o"]]:
    """Return `ys`, to which the adapters are merged already, with gradients for the adapters' parameters."""
    x, bases = jax.lax.stop_gradient((linears[0].served_input(x), list(ys)))
    return [straight_through(y, output) for y, output in zip(ys, _add_adapters(linears, x, bases, call))]
