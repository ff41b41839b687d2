"""What a step changes; one optimizer step, and one evaluation step, as pure functions."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxtune.models.decoder import Parameters, Remat, bind
from jaxtune.models.dropout import Noise, named_key
from jaxtune.optim import build
from jaxtune.optim.build import Optimizer, OptimizerState
from jaxtune.precision import loss_scale
from jaxtune.precision.linears import Amax
from jaxtune.precision.loss_scale import LossScale
from jaxtune.precision.recipes import Recipe

Batch = dict[str, Array]
Metrics = dict[str, Array]
# (decoder, micro-batch, *, noise, remat, dtype, head_gradient) -> (sum of weighted losses, number of target tokens)
Objective = Callable[..., tuple[Float[Array, ""], Int[Array, ""]]]


class Scaling(NamedTuple):
    """What a precision recipe carries from step to step."""

    loss: LossScale | None = None
    amax: Amax = {}  # noqa: RUF012


class State(NamedTuple):
    """What a step changes. Frozen parameters stand beside it."""

    step: Int[Array, ""]
    trained: Parameters
    optimizer: OptimizerState
    scaling: Scaling = Scaling()


def initial_state(optimizer: Optimizer, trained: Parameters, recipe: Recipe | None = None) -> State:
    """The state before the first step."""
    scaling = Scaling()
    if recipe is not None and recipe.loss_scale is not None:
        scaling = scaling._replace(loss=loss_scale.initial(recipe.loss_scale))
    if recipe is not None and recipe.linears is not None:
        scaling = scaling._replace(amax=recipe.linears.initial_amax())
    return State(jnp.zeros((), jnp.int32), trained, optimizer.init(trained), scaling)


class Summed(NamedTuple):
    """Sums over micro-batches, not yet divided by the weight."""

    gradients: Parameters
    loss: Float[Array, ""]
    tokens: Int[Array, ""]
    amax: dict[str, Array] = {}  # noqa: RUF012  largest magnitudes found, of linears with delayed scaling
    magnified: Any = 1.0  # the gradients are this many times those of the loss


# (trained, frozen, batch with a leading axis of micro-batches, step, scaling) -> sums. A pipeline can take its place.
Gradients = Callable[..., Summed]


def accumulated_gradients(
    graph: nnx.GraphDef, objective: Objective, recipe: Recipe, remat: Remat, seed: int
) -> Gradients:
    """Gradients of the objective, one micro-batch after the other."""

    def gradients(
        trained: Parameters, frozen: Parameters, batch: Batch, step: Array, scaling: Scaling = Scaling()
    ) -> Summed:
        key = jax.random.fold_in(jax.random.key(seed), step)
        weights_of, scales = _weights(recipe, trained, frozen, scaling, step)
        # A scale is of the mean loss, so that it means the same whatever the size of a micro-batch.
        magnified = 1.0 if scaling.loss is None else scaling.loss.scale / batch["tokens"][0].size

        def add(total: Summed, micro: Batch) -> tuple[Summed, None]:
            def loss(trained: Parameters, scales: dict[str, Array]):
                decoder = bind(graph, weights_of(trained, scales))
                head = "embed.weight" if decoder.head is None else "head.weight"
                value, tokens = objective(
                    decoder,
                    micro,
                    noise=Noise(key, micro["row"]),
                    dtype=recipe.dtype,
                    remat=remat,
                    head_gradient=head in trained,
                )
                return value * magnified, (value, tokens)

            (_, (value, tokens)), (grads, amax) = jax.value_and_grad(loss, (0, 1), has_aux=True)(trained, scales)
            summed = jax.tree.map(lambda a, b: (a + b).astype(a.dtype), total.gradients, grads)
            largest = jax.tree.map(jnp.maximum, total.amax, amax)
            return total._replace(
                gradients=summed, loss=total.loss + value, tokens=total.tokens + tokens, amax=largest
            ), None

        # Whatever the parameters are stored in.
        zeros = jax.tree.map(lambda p: jnp.zeros_like(p, recipe.gradient_dtype), trained)
        start = Summed(zeros, jnp.zeros(()), jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, scales))
        return jax.lax.scan(add, start, batch)[0]._replace(magnified=magnified)

    return gradients


def _weights(
    recipe: Recipe, trained: Parameters, frozen: Parameters, scaling: Scaling, step: Array
) -> tuple[Callable[[Parameters, dict[str, Array]], Parameters], dict[str, Array]]:
    """(trained, scales) -> what the decoder is bound to; and the delayed scales of the step.

    What is made here of the parameters is made once for all micro-batches.
    """
    linears = recipe.linears
    if linears is None:
        return lambda trained, _: {**frozen, **trained}, {}
    operands = linears.operands({**frozen, **trained})
    scales = linears.scales(scaling.amax, step)
    return lambda trained, scales: linears.wrapped({**frozen, **trained}, operands, scales), scales


def make_train_step(
    gradients: Gradients,
    optimizer: Optimizer,
    learning_rate: Callable[[Array], Array],
    max_grad_norm: float,
    recipe: Recipe,
    seed: int = 0,
) -> Callable[[State, Parameters, Batch], tuple[State, Metrics]]:
    """(state, frozen, batch) -> (state, metrics).

    The sums are divided once, by the number of target tokens in the whole batch over all devices. A step whose loss
    or gradient is not finite changes nothing but the step number and the loss scale.
    """

    def step(state: State, frozen: Parameters, batch: Batch) -> tuple[State, Metrics]:
        at = optimizer.point(state.trained, state.optimizer)
        with jax.default_matmul_precision(recipe.matmul_precision):
            summed = gradients(at, frozen, batch, state.step, state.scaling)
        tokens = jnp.maximum(summed.tokens, 1).astype(jnp.float32)
        loss = summed.loss / tokens
        norm = _norm(summed.gradients) / (tokens * summed.magnified)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        factor = build.clip_factor(norm, max_grad_norm) / (tokens * summed.magnified)

        rate = learning_rate(state.step)
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        update = build.Step(rate, factor, finite, named_key(key, "rounding"))
        with jax.default_matmul_precision(recipe.matmul_precision):
            trained, optimizer_state = optimizer.update(summed.gradients, state.optimizer, state.trained, update)
        metrics = {
            "loss": loss,
            "grad_norm": norm,
            "learning_rate": rate,
            "target_tokens": summed.tokens,
            "tokens": jnp.sum(batch["segment_ids"] > 0, dtype=jnp.int32),
        }
        scaling = state.scaling
        if scaling.loss is not None and recipe.growth_steps is not None:
            after = loss_scale.updated(scaling.loss, finite, recipe.growth_steps)
            metrics |= {"loss_scale": scaling.loss.scale, "skipped_steps": after.skipped_steps}
            scaling = scaling._replace(loss=after)
        if recipe.linears is not None:
            scaling = scaling._replace(amax=recipe.linears.extended(scaling.amax, summed.amax, finite))
        return State(state.step + 1, trained, optimizer_state, scaling), metrics

    return step


def _norm(gradients: Parameters) -> Float[Array, ""]:
    """Of all of them together, in float32."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(g.astype(jnp.float32))) for g in gradients.values()))


def make_eval_step(
    graph: nnx.GraphDef, objective: Objective, recipe: Recipe
) -> Callable[[Parameters, Parameters, Batch], tuple[Float[Array, ""], Int[Array, ""]]]:
    """(trained, frozen, batch) -> (sum of weighted losses, target tokens): scalars, never logits.

    Computed as in training, but for delayed scaling: a tensor's scale is its own.
    """

    def step(trained: Parameters, frozen: Parameters, batch: Batch):
        weights_of, _ = _weights(recipe, trained, frozen, Scaling(), jnp.zeros((), jnp.int32))

        def add(total, micro: Batch):
            with jax.default_matmul_precision(recipe.matmul_precision):
                decoder = bind(graph, weights_of(trained, {}))
                found = objective(decoder, micro, noise=None, dtype=recipe.dtype, remat="none", head_gradient=False)
            return jax.tree.map(jnp.add, total, found), None

        return jax.lax.scan(add, (jnp.zeros(()), jnp.zeros((), jnp.int32)), batch)[0]

    return step
