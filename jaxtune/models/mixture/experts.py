"""A mixture of experts (Shazeer et al. 2017): a router chooses a few feed-forward layers for each token.

Shape letters: b rows of the batch, s positions in a row, d features of the residual stream, e experts, m rows of a
grouped product (one for each chosen expert of a token, sorted by expert and padded).
"""

from dataclasses import fields
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Num

from jaxtune.errors import UserError
from jaxtune.models.forward_options import ForwardOptions
from jaxtune.models.layers.linear import Linear, scale
from jaxtune.models.layers.mlp import MLP
from jaxtune.models.layers.norm import NormLayer
from jaxtune.models.mixture.expert_all_to_all import through_experts
from jaxtune.models.mixture.expert_sort import from_rows, to_rows
from jaxtune.models.mixture.router import Router, Routing
from jaxtune.models.structure import layer_spec
from jaxtune.models.structure.model_spec import ModelSpec
from jaxtune.parallel.layout import RULES, Axes, Layout, P, Rules, axes_of, by_token, gather, shards
from jaxtune.parallel.random import Noise
from jaxtune.precision.matmul import LowPrecision
from jaxtune.quant.array import QuantizedArray
from pallas_kernels import cost, registry
from pallas_kernels.gpus import Device, current_device
from pallas_kernels.grouped_matmul import Arrangement, Groups, arrange, block_of, triton
from pallas_kernels.registry import ANY_GPU, Backend, CannotRun

# Layout rules inside a shard_map: nothing is sharded, and no weight is gathered.
ON_DEVICE = Rules(
    *[Layout(*[()] * len(fields(Layout)))] * 3, gathered=(), batch=(), positions=(), context=(), residual=()
)


class ExpertsLayer(nnx.Module):
    """The weighted sum of the chosen experts' outputs, plus the shared expert's output if there is one.

    Each parameter of the experts has a leading axis of experts.

    With `Vision.experts` there are two mixtures, of texts and of images. They are not one mixture in which a token
    chooses among one half of the experts, because the two differ in the size of experts. Each runs its own tokens only,
    in arrays that have room for all tokens, because shapes are static and the number of image tokens varies.
    """

    def __init__(self, spec: ModelSpec, layer: layer_spec.Layer, options: layer_spec.Experts):
        def feed_forward(size: int, name: str, width: int | None = None) -> MLP:
            one = layer_spec.FeedForward(size, options.bias, options.activation, options.gated)
            return MLP(spec, layer, one, f"mlp.{name}", width)

        def latent(name: str, shape: tuple[int, int], axes: tuple[str | None, str | None]) -> Linear | None:
            return Linear(spec, layer, f"mlp.{name}", shape, axes) if options.latent else None

        self.router = Router(spec, options)
        self.latent_down = latent("latent_down", (options.latent, spec.hidden), (None, "embed"))
        self.latent_up = latent("latent_up", (spec.hidden, options.latent), ("embed", None))
        self.experts = feed_forward(options.size, "experts", options.latent)
        visual = None if spec.vision is None else spec.vision.experts
        self.vision_router = None if visual is None else Router(spec, visual)
        self.vision_experts = None if visual is None else feed_forward(visual.size, "vision_experts")
        self.shared = feed_forward(options.shared, "shared") if options.shared else None
        gate = Linear(spec, layer, "mlp.shared_gate", (1, spec.hidden), (None, "embed"), kind="gate")
        self.shared_gate = gate if options.shared_gate else None

        def norm() -> NormLayer | None:
            return NormLayer(spec.hidden, spec.norm) if options.parallel else None

        self.experts_norm, self.experts_out_norm, self.shared_out_norm = norm(), norm(), norm()
        self.options = options

    @jax.named_scope("experts")
    def __call__(
        self,
        x: Float[Array, "b s d"],
        call: ForwardOptions,
        valid: Bool[Array, "b s"],
        residual: Float[Array, "b s d"],
        replayed: Int[Array, "b s k"] | None = None,
        visual: Bool[Array, "b s"] | None = None,
    ) -> tuple[Float[Array, "b s d"], dict[str, Num[Array, "..."]]]:
        """Return the output, and sums over the `valid` tokens of each row, for `objectives.balanced`.

        residual: the residual stream before the norm whose output is x; only parallel experts read it.
        replayed: as in `Router`.
        visual: the tokens that go to the mixture of images; None: none do.
        router_choices (b, e): how often each expert is chosen. router_probability (b, e): sum of its probabilities.
        router_z (b): sum of the squares of `Routing.log_sum`. router_tokens (b): the number of tokens. With `visual`
        they have a leading axis of the two mixtures.
        """
        routed, into = x, x
        if self.experts_norm is not None:
            routed = jax.reshard(residual, by_token(None))
            into = self.experts_norm(routed)
        routing = self.router(routed, replayed)
        into = into if self.latent_down is None else self.latent_down(into, call)
        y = self._run(self.experts, into, routing if visual is None else routing.only(~visual), call)
        y = y if self.latent_up is None else self.latent_up(y, call)
        y = y if self.experts_out_norm is None else self.experts_out_norm(y)
        if visual is None:
            sums = _sum_routing(routing, valid)
        else:
            assert self.vision_router is not None and self.vision_experts is not None
            of_images = self.vision_router(x)
            y += self._run(self.vision_experts, x, of_images.only(visual), call)
            both = _sum_routing(routing, valid & ~visual), _sum_routing(of_images, valid & visual)
            sums = jax.tree.map(lambda *of_mixtures: jnp.stack(of_mixtures), *both)
        if call.record_routing:
            sums["routed_experts"] = routing.chosen
        return (y if self.shared is None else y + self._run_shared(self.shared, x, call)), sums

    def _run(
        self, experts: MLP, x: Float[Array, "b s d"], routing: Routing, call: ForwardOptions
    ) -> Float[Array, "b s d"]:
        """Return the weighted sum of the chosen experts' outputs, zeros for tokens without experts."""
        # Weights are rounded to the dtype of activations, but multiplied and summed in float32.
        routing = routing._replace(weights=routing.weights.astype(x.dtype).astype(jnp.float32))
        try:
            backend = registry.choose("experts", BACKENDS, current_device(), experts, call.experts)
        except CannotRun as error:
            raise UserError(f"experts.backend={call.experts!r}: {error}") from None
        return backend.run(experts, x, routing, call).astype(x.dtype)

    def _run_shared(self, shared: MLP, x: Float[Array, "b s d"], call: ForwardOptions) -> Float[Array, "b s d"]:
        y = shared(x, call)
        y = y if self.shared_out_norm is None else self.shared_out_norm(y)
        y = y if self.shared_gate is None else y * jax.nn.sigmoid(self.shared_gate(x, call))
        return scale(y, self.options.shared_scale)


def _sum_routing(routing: Routing, counted: Bool[Array, "b s"]) -> dict[str, Num[Array, "..."]]:
    """Return the sums of a mixture over the counted tokens of each row."""
    # (b, s, active, e)
    is_chosen = jax.nn.one_hot(routing.chosen, routing.probability.shape[-1], dtype=jnp.float32)
    weights, by_row = counted.astype(jnp.float32), by_token()[:1]

    def over_tokens(values: Float[Array, "b s *of"]) -> Float[Array, "b *of"]:
        return jnp.einsum("bs...,bs->b...", values, weights, out_sharding=P(*by_row, *[None] * (values.ndim - 2)))

    return {
        "router_choices": over_tokens(is_chosen.sum(-2)),
        "router_probability": over_tokens(routing.probability),
        "router_z": over_tokens(routing.log_sum**2),
        "router_tokens": over_tokens(jnp.ones_like(weights)),
    }


def dense(experts: MLP, x: Float[Array, "b s d"], routing: Routing, call: ForwardOptions) -> Float[Array, "b s d"]:
    """Run every token through every expert, one expert after another; most results are multiplied by zero."""
    graph, values = nnx.split(experts)
    count = routing.probability.shape[-1]
    is_chosen = jax.nn.one_hot(routing.chosen, count, dtype=jnp.float32)
    # (e, b, s): the weight of each expert for each token, 0 if it is not chosen.
    by_expert = jnp.moveaxis((is_chosen * routing.weights[..., None]).sum(-2), -1, 0)

    # Rematerialised, because the saved activations of all experts would take several times a layer's memory.
    @jax.checkpoint
    def add(total: Array, scanned: tuple) -> tuple[Array, None]:
        values, weight = scanned
        y = nnx.merge(graph, values)(x, call)
        return total + weight[..., None] * y.astype(jnp.float32), None

    return jax.lax.scan(add, jnp.zeros_like(x, jnp.float32), (values, by_expert))[0]


def compute_grouped(
    backend: str, experts: MLP, x: Float[Array, "b s d"], routing: Routing, call: ForwardOptions
) -> Float[Array, "b s d"]:
    """Run each token through its chosen experts: each device sorts its own tokens by expert.

    `backend`: a backend of `pallas_kernels.grouped_matmul`.
    """
    graph, values = nnx.split(experts)
    values = jax.tree.map(partial(gather, stacked=1), values)
    values = jax.tree.map(_with_kernel_scales, values, is_leaf=_is_quantized)
    summed_over, expert_axes, mesh = axes_of("mlp"), axes_of("experts"), jax.sharding.get_abstract_mesh()
    local_experts = routing.probability.shape[-1] // shards(expert_axes, mesh)
    positions = x.shape[1] // shards(RULES.value.positions, mesh)

    def run_rows(
        values: Any, rows: Float[Array, "m d"], groups: Groups, noise: Noise | None, items: float
    ) -> Float[Array, "m d"]:
        """Run the device's experts; items: rows with a token if routing is balanced, for cost estimates."""
        experts = nnx.merge(graph, values)
        if summed_over and experts.down.bias is not None:  # outputs are summed over devices: only one adds the bias
            is_first = jax.lax.axis_index(summed_over) == 0
            experts.down.bias.set_value(jnp.where(is_first, experts.down.bias.get_value(), 0))
        with RULES(ON_DEVICE), cost.filled(groups.filled(items, len(rows))):
            return experts(rows[:, None], call._replace(groups=groups, noise=noise))[:, 0]

    def run_received(items: int, values: Any, x: Array, expert: Array, token: Array) -> Array:
        """Run the device's experts on rows that devices sent; items: as in `run_rows`."""
        values, noise = values
        rows = arrange(expert, local_experts, backend)
        token_of = jnp.take(token, rows.item_of, mode="clip")  # rows without an item get any token
        noise = noise and _row_noise(noise, token_of, positions)
        y = run_rows(values, to_rows(x[None], rows.item_of, rows.row_of), rows.groups, noise, items)
        # Back to the order in which rows were received: an item here is a received row, with one expert.
        return to_rows(y[None], rows.row_of, rows.item_of)

    def on_device(values: Any, x: Array, routing: Routing, noise: Noise | None) -> Array:
        if expert_axes and call.capacity_factor is not None:
            noise = noise and noise.of_all(expert_axes)
            chosen, weights, factor = routing.chosen, routing.weights, call.capacity_factor
            run = partial(run_received, chosen.size)  # if routing is balanced, a device gets as many items as it has
            total = through_experts(run, (values, noise), x, chosen, weights, local_experts, expert_axes, factor)
            return jax.lax.psum(total, summed_over) if summed_over else total
        if expert_axes:
            # All-gather the tokens of the devices among which experts are divided. Each computes the contribution of
            # its own experts to all tokens; the psum_scatter below adds the contributions up.
            x, routing, noise = _gather_tokens(expert_axes, x, routing, noise)
        rows = _arrange(routing, expert_axes, backend)
        token_of = rows.item_of // routing.chosen.shape[-1]  # item = token * k + choice
        noise = noise and _row_noise(noise, token_of, positions)
        items = routing.chosen.size / shards(expert_axes, mesh)
        y = run_rows(values, to_rows(x, token_of, rows.row_of), rows.groups, noise, items)
        total = from_rows(y, rows.item_of, rows.row_of, routing.weights)
        total = jax.lax.psum(total, summed_over) if summed_over else total
        return jax.lax.psum_scatter(total, expert_axes, scatter_dimension=0, tiled=True) if expert_axes else total

    arguments = values, x, routing, call.noise
    layouts = jax.tree.map(lambda array: jax.typeof(array).sharding.spec, arguments)
    return jax.shard_map(on_device, in_specs=layouts, out_specs=by_token(None))(*arguments)


@jax.named_scope("collectives")
def _gather_tokens(axes: Axes, x: Array, routing: Routing, noise: Noise | None) -> tuple[Array, Routing, Noise | None]:
    """All-gather tokens, their routing and the row numbers in their noise over the given axes."""
    all_gather = partial(jax.lax.all_gather, axis_name=axes, tiled=True)
    return all_gather(x), jax.tree.map(all_gather, routing), noise and noise.of_all(axes)


def _arrange(routing: Routing, axes: Axes, backend: str) -> Arrangement:
    """Arrange tokens in rows by expert, for the experts of a device: all, or its share if `axes` divide them."""
    chosen, count = routing.chosen.reshape(-1), routing.probability.shape[-1]
    if not axes:
        return arrange(chosen, count, backend)
    parts = shards(axes, jax.sharding.get_abstract_mesh())
    local_experts = count // parts
    # Items for other devices get group `local_experts`, past the last: they have no row and cost no products.
    number = chosen - jax.lax.axis_index(axes) * local_experts
    group_of = jnp.where((number >= 0) & (number < local_experts), number, local_experts)
    return arrange(group_of, local_experts, backend, block_of(len(chosen) // parts, local_experts))


def _row_noise(noise: Noise, token_of: Int[Array, " m"], positions: int) -> Noise:
    """Return the noise for the rows of a grouped product; `positions`: the device's number of positions in a row."""
    axes = RULES.value.positions
    length = positions * shards(axes, jax.sharding.get_abstract_mesh())
    row, position = jnp.divmod(token_of, positions)
    position += jax.lax.axis_index(axes) * positions
    return noise._replace(token_of=row * length + position, length=length)


def _is_quantized(value: Any) -> bool:
    return isinstance(value, QuantizedArray)


def _with_kernel_scales(value: Any) -> Any:
    return value.with_kernel_scales() if _is_quantized(value) else value


def refuses_grouped(device: Device, experts: MLP) -> str | None:
    """Return why the products of these experts cannot be grouped, or None."""
    in_low_precision = any(isinstance(weight, LowPrecision) for weight in _weights(experts))
    return "there are no grouped products in low precision" if in_low_precision else None


def refuses_kernel(device: Device, experts: MLP) -> str | None:
    """Return why the kernels cannot run these experts on a device, or None."""
    if reason := refuses_grouped(device, experts):
        return reason
    reasons = (triton.refuses(device, jax.ShapeDtypeStruct(w.shape, w.dtype)) for w in _weights(experts))
    return next(filter(None, reasons), None)


def refuses_dense(device: Device, experts: MLP) -> str | None:
    """Return why a device cannot compute every expert, or None."""
    parts = shards(axes_of("experts"), jax.sharding.get_abstract_mesh())
    return "dense needs all experts on each device, but mesh.expert divides them: use mesh.fsdp" if parts > 1 else None


def _weights(experts: MLP) -> list[Any]:
    return [linear.weight.get_value() for linear in experts.linears]


# In order of preference.
BACKENDS = (
    Backend("kernel", partial(compute_grouped, "triton"), refuses_kernel, {ANY_GPU: "interpreted tests"}),
    Backend("loop", partial(compute_grouped, "xla"), refuses_grouped, {ANY_GPU: "tests"}),
    Backend("dense", dense, refuses_dense, {ANY_GPU: "tests"}),
)
