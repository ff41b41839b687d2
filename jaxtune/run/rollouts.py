"""A step that learns from the model's own completions: make them, reward them, update by them."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Array, Float64

from jaxtune import data
from jaxtune.config.schema import Config
from jaxtune.data.columns import ADVANTAGE, LOSS_WEIGHT, OLD_LOG_PROB, TOKENS, Column
from jaxtune.data.prompt_feed import Asked
from jaxtune.data.prompts import Prompt, Prompts
from jaxtune.data.units import Documents, Part
from jaxtune.models.decode import Sampling
from jaxtune.models.decoder import Parameters, bind
from jaxtune.models.score import Batch, score
from jaxtune.objectives.grpo import advantages
from jaxtune.parallel import multihost
from jaxtune.precision.recipes import recipe_of
from jaxtune.run.assembly import Program, call_of
from jaxtune.run.generation import Completion, completed, ending, make_generate, stop_tokens, text_of
from jaxtune.run.model import Model
from jaxtune.run.process import compiler_options
from jaxtune.run.rewards import Reward, rewards_of, total
from jaxtune.run.state import State
from jaxtune.run.step import weights_of_step

# (trained, frozen, the tokens of each prompt, the number of each completion) -> completions.
Complete = Callable[[Parameters, Parameters, list[list[int]], Sequence[int]], list[Completion]]


def with_rollouts(
    config: Config,
    program: Program,
    tokenizer,
    functions: Mapping[str, Reward],
    train_step: Callable[..., tuple[State, dict[str, Any]]],
) -> Callable[..., tuple[State, dict[str, Any]]]:
    """(state, frozen, prompts of a step, learning rate) -> (state, metrics), in the place of `train_step`.

    Metrics are those of the last update, and as TRL names them: reward, reward_std, rewards/NAME/mean,
    frac_reward_zero_std, completions/mean_length, completions/clipped_ratio. Raises UserError as `rewards_of`.
    """
    options = config.rollout
    complete, weights = _on_devices(config, program, tokenizer), _weights(functions, options.reward_weights)
    scored = jax.jit(_make_scored(config, program.model), compiler_options=compiler_options(config))

    def step(state: State, frozen: Parameters, asked: Asked, rate: Any) -> tuple[State, dict[str, Any]]:
        prompts = [prompt for prompt in asked.prompts for _ in range(options.group_size)]
        numbers = range(asked.first, asked.first + len(prompts))
        found = complete(state.trained, frozen, [prompt.tokens for prompt in prompts], numbers)
        texts = [text_of(completion, tokenizer) for completion in found]
        each = _rewarded(functions, prompts, texts, found)
        rewards = total(each, weights)
        above = advantages(rewards, options.group_size, config.grpo.advantage_scale)
        batch = _batch(config, program, prompts, found, above)
        if config.grpo.iterations > 1:
            batch[OLD_LOG_PROB.name] = scored(state.trained, frozen, batch)
        metrics = {}
        for _ in range(config.grpo.iterations):
            state, metrics = train_step(state, frozen, batch, rate)
        return state, {**metrics, **_described(functions, each, rewards, found, options.group_size)}

    return step


def _weights(functions: Mapping[str, Reward], factors: Sequence[str]) -> list[float]:
    """The weight of each function."""
    weights = dict.fromkeys(functions, 1.0)
    for factor in factors:
        pattern, _, value = factor.rpartition("=")
        weights |= {name: float(value) for name in functions if re.search(pattern, name)}
    return list(weights.values())


def _on_devices(config: Config, program: Program, tokenizer) -> Complete:
    """Completions that the devices of the run make, a group's each with random numbers of its own."""
    options, model, recipe = config.rollout, program.model, recipe_of(config.precision, program.model.linears)
    sampling = Sampling(**{name: getattr(options, name) for name in Sampling._fields})
    how = {"max_new_tokens": options.max_new_tokens, "sampling": sampling, "seed": config.train.seed}
    generate = make_generate(model.graph, model.spec, dtype=recipe.dtype, **how)
    stop, end = stop_tokens(model.folder, tokenizer), Prompts(tokenizer, config.chat).turn_end
    stop |= frozenset() if end is None else {tokenizer.added_tokens_encoder[end]}
    ended = ending(stop, options.stop, tokenizer)

    def complete(
        trained: Parameters, frozen: Parameters, prompts: list[list[int]], numbers: Sequence[int]
    ) -> list[Completion]:
        return completed(generate({**frozen, **trained}, prompts, numbers), len(prompts), ended)

    return complete


def _rewarded(
    functions: Mapping[str, Reward], prompts: Sequence[Prompt], texts: list[str], found: list[Completion]
) -> Float64[np.ndarray, "completions functions"]:
    """What each function gives each completion; called by one process alone."""
    if not multihost.is_main():
        shape = (len(prompts), len(functions))
        return multihost_utils.broadcast_one_to_all(np.zeros(shape))
    names = dict.fromkeys(name for prompt in prompts for name in prompt.sample)
    columns = {name: [prompt.sample.get(name) for prompt in prompts] for name in names}
    given = [prompt.given for prompt in prompts]
    each = rewards_of(functions, given, texts, [completion.tokens for completion in found], columns)
    return multihost_utils.broadcast_one_to_all(each)


def _batch(
    config: Config, program: Program, prompts: Sequence[Prompt], found: list[Completion], above: np.ndarray
) -> Batch:
    """The batch of a step: each completion after its prompt, in a row of its own."""
    skipped = [config.grpo.mask_truncated and not completion.finished for completion in found]
    tokens = [[*prompt.tokens, *completion.tokens] for prompt, completion in zip(prompts, found)]
    weights = [
        [0] * len(prompt.tokens) + [not skip] * len(completion.tokens)
        for prompt, completion, skip in zip(prompts, found, skipped)
    ]
    part = Part(
        name="completions",
        key="",
        columns={column.name: column for column in (TOKENS, LOSS_WEIGHT, ADVANTAGE)},
        values={
            TOKENS.name: np.concatenate(tokens).astype(TOKENS.dtype),
            LOSS_WEIGHT.name: np.concatenate(weights).astype(LOSS_WEIGHT.dtype),
            ADVANTAGE.name: above.astype(ADVANTAGE.dtype),
        },
        offsets=np.cumsum([0, *map(len, tokens)]),
        units=np.arange(len(tokens) + 1),
        targets=np.array(list(map(sum, weights))),
        continuous=np.zeros(len(tokens), bool),
        skipped=0,
        notes=(),
    )
    plain = dataclasses.replace(config.data, packing=False, shuffle=False, num_workers=0, prefetch=0)
    columns: tuple[Column, ...] = tuple(c for c in program.objective.columns if c != OLD_LOG_PROB)
    rows = data.Rows(Documents.joined([part]), plain, 1, columns)
    like = program.batch[TOKENS.name]
    (_, batch), *_ = data.batches(rows, like.shape, like.sharding, 0, len(tokens), plain)
    return batch


def _make_scored(config: Config, model: Model) -> Callable[[Parameters, Parameters, Batch], Array]:
    """(trained, frozen, batch) -> the log-probability of each target, (micro-batches, rows, positions)."""
    recipe = recipe_of(config.precision, model.linears)
    call = call_of(config, recipe)._replace(remat="none")

    def scored(trained: Parameters, frozen: Parameters, batch: Batch) -> Array:
        weights_of, _ = weights_of_step(recipe.linears, trained, frozen, {}, jnp.zeros((), jnp.int32))

        def of_micro_batch(_: None, micro: Batch) -> tuple[None, Array]:
            with jax.default_matmul_precision(recipe.matmul_precision):
                return None, score(bind(model.graph, weights_of(trained, {})), micro, call).log_prob

        return jax.lax.scan(of_micro_batch, None, batch)[1]

    return scored


def _described(
    functions: Mapping[str, Reward],
    each: Float64[np.ndarray, "completions functions"],
    rewards: Float64[np.ndarray, " completions"],
    found: list[Completion],
    group_size: int,
) -> dict[str, Any]:
    """Metrics of the completions of a step."""
    groups = rewards.reshape(-1, group_size)
    return {
        "reward": np.nanmean(rewards),
        "reward_std": np.nanstd(rewards, ddof=1),
        "frac_reward_zero_std": np.mean(np.nanmax(groups, 1) - np.nanmin(groups, 1) < 1e-8),
        **{f"rewards/{name}/mean": np.nanmean(of_one) for name, of_one in zip(functions, each.T)},
        "completions/mean_length": np.mean([len(completion.tokens) for completion in found]),
        "completions/clipped_ratio": np.mean([not completion.finished for completion in found]),
    }
