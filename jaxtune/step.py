"""One optimizer step, and one evaluation step, as pure functions."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxtune.models.decoder import Parameters, Remat, bind
from jaxtune.models.dropout import Noise
from jaxtune.optim.build import clip_factor
from jaxtune.precision.recipes import Recipe

Batch = dict[str, Array]
Metrics = dict[str, Array]
# (decoder, micro-batch, *, noise, remat, dtype, head_gradient) -> (sum of weighted losses, number of target tokens)
Objective = Callable[..., tuple[Float[Array, ""], Int[Array, ""]]]


class State(NamedTuple):
    """What a step changes. Frozen parameters stand beside it."""

    step: Int[Array, ""]
    trained: Parameters
    optimizer: optax.OptState


def initial_state(optimizer: optax.GradientTransformation, trained: Parameters) -> State:
    """The state before the first step."""
    return State(jnp.zeros((), jnp.int32), trained, optimizer.init(trained))


class Summed(NamedTuple):
    """Gradients and losses summed over micro-batches, not yet divided by the weight."""

    gradients: Parameters
    loss: Float[Array, ""]
    tokens: Int[Array, ""]


# (trained, frozen, batch with a leading axis of micro-batches, step) -> sums. A pipeline can take its place.
Gradients = Callable[[Parameters, Parameters, Batch, Array], Summed]


def accumulated_gradients(
    graph: nnx.GraphDef, objective: Objective, recipe: Recipe, remat: Remat, seed: int
) -> Gradients:
    """Gradients of the objective, one micro-batch after the other."""

    def gradients(trained: Parameters, frozen: Parameters, batch: Batch, step: Array) -> Summed:
        key = jax.random.fold_in(jax.random.key(seed), step)

        def add(total: Summed, micro: Batch) -> tuple[Summed, None]:
            def loss(trained: Parameters) -> tuple[Array, Array]:
                decoder = bind(graph, {**frozen, **trained})
                head = "embed.weight" if decoder.head is None else "head.weight"
                return objective(
                    decoder,
                    micro,
                    noise=Noise(key, micro["row"]),
                    dtype=recipe.dtype,
                    remat=remat,
                    head_gradient=head in trained,
                )

            (value, tokens), grads = jax.value_and_grad(loss, has_aux=True)(trained)
            return jax.tree.map(jnp.add, total, Summed(grads, value, tokens)), None

        # Sums and everything up to the new parameter are float32, whatever the parameter is stored in.
        in_float32 = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), trained)
        zeros = Summed(in_float32, jnp.zeros(()), jnp.zeros((), jnp.int32))
        return jax.lax.scan(add, zeros, batch)[0]

    return gradients


def make_train_step(
    gradients: Gradients,
    optimizer: optax.GradientTransformation,
    learning_rate: Callable[[Array], Array],
    max_grad_norm: float,
    recipe: Recipe,
) -> Callable[[State, Parameters, Batch], tuple[State, Metrics]]:
    """(state, frozen, batch) -> (state, metrics).

    The sums are divided once, by the number of target tokens in the whole batch over all devices. A step whose loss
    or gradient is not finite changes nothing but the step number.
    """

    def step(state: State, frozen: Parameters, batch: Batch) -> tuple[State, Metrics]:
        with jax.default_matmul_precision(recipe.matmul_precision):
            summed = gradients(state.trained, frozen, batch, state.step)
        tokens = jnp.maximum(summed.tokens, 1).astype(jnp.float32)
        loss = summed.loss / tokens
        grads = jax.tree.map(lambda g: g / tokens, summed.gradients)
        norm = optax.tree.norm(grads)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        grads = jax.tree.map(lambda g: g * clip_factor(norm, max_grad_norm), grads)

        rate = learning_rate(state.step)
        updates, optimizer_state = optimizer.update(grads, state.optimizer, state.trained)
        trained = jax.tree.map(lambda p, u: (p - rate * u).astype(p.dtype), state.trained, updates)
        keep = lambda new, old: jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)  # noqa: E731
        after = State(state.step + 1, keep(trained, state.trained), keep(optimizer_state, state.optimizer))
        metrics = {
            "loss": loss,
            "grad_norm": norm,
            "learning_rate": rate,
            "target_tokens": summed.tokens,
            "tokens": jnp.sum(batch["segment_ids"] > 0, dtype=jnp.int32),
        }
        return after, metrics

    return step


def make_eval_step(
    graph: nnx.GraphDef, objective: Objective, recipe: Recipe
) -> Callable[[Parameters, Parameters, Batch], tuple[Float[Array, ""], Int[Array, ""]]]:
    """(trained, frozen, batch) -> (sum of weighted losses, target tokens): scalars, never logits."""

    def step(trained: Parameters, frozen: Parameters, batch: Batch):
        def add(total, micro: Batch):
            with jax.default_matmul_precision(recipe.matmul_precision):
                decoder = bind(graph, {**frozen, **trained})
                found = objective(decoder, micro, noise=None, dtype=recipe.dtype, remat="none", head_gradient=False)
            return jax.tree.map(jnp.add, total, found), None

        return jax.lax.scan(add, (jnp.zeros(()), jnp.zeros((), jnp.int32)), batch)[0]

    return step
