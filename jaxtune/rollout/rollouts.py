"""A step of reinforcement learning: sample completions from the model, reward them, update the model."""

import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Array, Float64, Int16

from jaxtune.columns import ADVANTAGE, OLD_LOG_PROB, SAMPLED_LOG_PROB, TOKENS, Column, routed_experts
from jaxtune.config.schema import Config
from jaxtune.data.formats.prompts import Prompt
from jaxtune.data.images.image_reader import ImageReader, KeepingReader
from jaxtune.data.rows.prompt_feed import PromptBatch, columns_of
from jaxtune.errors import UserError
from jaxtune.host.process import compiler_options
from jaxtune.inference.generation import Completion, completion_text
from jaxtune.inference.prompt_images import PromptImages
from jaxtune.models.decoder import Decoder, Parameters
from jaxtune.models.forward_options import ForwardOptions
from jaxtune.models.head.score import Batch, ScoreOptions, score
from jaxtune.objectives.grpo import advantages, gdpo_advantages, keep_uncertain
from jaxtune.parallel import multihost
from jaxtune.rollout.ahead import RolloutsAhead
from jaxtune.rollout.completers import completer, stops_of
from jaxtune.rollout.completion_rows import batch_of_documents
from jaxtune.rollout.completions_file import completions_file
from jaxtune.rollout.engine_comparison import EngineComparison
from jaxtune.rollout.episodes.episode_player import EpisodePlayer
from jaxtune.rollout.episodes.episode_rewards import reward_episodes
from jaxtune.rollout.episodes.toolbox import Toolbox
from jaxtune.rollout.groups import (
    Rollout,
    concatenate,
    means,
    replace_alike,
    split,
    spread,
    spread_over_prompts,
    teaches,
)
from jaxtune.rollout.rewards import Reward, rewards_of, total
from jaxtune.training.assembly import Program, forward_of, open_images
from jaxtune.training.state import State
from jaxtune.training.step import count_filled, over_filled
from jaxtune.weights.model import Model

log = logging.getLogger("jaxtune")

# (weights, the prompt of each completion, the number of each) -> rollout.
MakeRollout = Callable[[Any, list[Prompt], Sequence[int]], Rollout]


class Rollouts(NamedTuple):
    """A source of rewarded completions.

    Attributes:
        prepare: as in `Completer`.
        make: samples from the prepared weights, and rewards.
        close: as in `Completer`.
    """

    prepare: Callable[[Parameters, Parameters], Any]
    make: MakeRollout
    close: Callable[[], None] = lambda: None


def make_rollout_step(
    config: Config,
    program: Program,
    sampled: Rollouts,
    train_step: Callable[..., tuple[State, dict[str, Any]]],
    run: Path,
    at_end: ExitStack,
) -> Callable[..., tuple[State, dict[str, Any]]]:
    """Wrap `train_step`: return a function (state, frozen, prompts of a step, learning rate) -> (state, metrics).

    Completions are used for grpo.iterations of `train_step`. Metrics are from the last iteration and, named as in
    TRL: reward, reward_std, rewards/NAME/mean, frac_reward_zero_std, completions/mean_length,
    completions/clipped_ratio; without a server, entropy; and with a correction, the metrics of `EngineComparison`.
    With rollout.ahead, completions/seconds_waited is the time for which the step waited for its completions.

    run: the run folder; with log.jsonl, it gets the completions of the first prompt of each step. at_end: called when
    the run ends, however it does; it drops the rollouts of later steps, after `sampled` was closed.

    Raises UserError for rollout.ahead in a run of several processes.
    """
    if config.rollout.ahead and jax.process_count() > 1:
        raise UserError(
            f"rollout.ahead={config.rollout.ahead}: not available in a run of several processes, whose steps would "
            "have to agree on what has arrived; leave it out"
        )
    group_size, corrects = config.rollout.group_size, config.rollout.corrects != "none"
    compare = EngineComparison(config.rollout) if corrects else None
    score_batch = jax.jit(_make_score_batch(config, program.model), compiler_options=compiler_options(config))
    written = completions_file(config, run)
    useful, reader = partial(teaches, config.grpo.advantage_scale), open_images(program.model, config)
    silent = 0  # steps in a row

    def groups_of(weights: Any, asked: PromptBatch) -> list[Rollout]:
        def make_groups(first: int, prompts: Sequence[Prompt]) -> list[Rollout]:
            """Return a rollout of each prompt; first: number of the first one's first completion."""
            repeated = [prompt for prompt in prompts for _ in range(group_size)]
            numbers = range(first, first + len(repeated))
            return split(sampled.make(weights, repeated, numbers), group_size)

        return replace_alike(make_groups(asked.first, asked.prompts), asked, make_groups, useful)

    ahead = RolloutsAhead(groups_of) if config.rollout.ahead else None
    if ahead is not None:
        at_end.callback(ahead.close)

    def step(state: State, frozen: Parameters, asked: PromptBatch, rate: Any) -> tuple[State, dict[str, Any]]:
        nonlocal silent
        prepare = partial(sampled.prepare, state.trained, frozen)
        groups, waited = ahead.get(prepare, asked) if ahead is not None else (groups_of(prepare(), asked), 0.0)
        made = concatenate(groups)
        silent = silent + 1 if np.isnan(made.rewards).all() else 0
        if silent and multihost.is_main():
            log.warning("rollout.rewards: None for every completion of a step, so nothing is learned from it")
        if silent == config.train.max_bad_steps:
            raise UserError(
                f"rollout.rewards: None for every completion of {silent} steps in a row (train.max_bad_steps), so "
                "nothing is learned; return a number for each completion to reward, such as 0.0"
            )
        if config.grpo.advantage_scale == "gdpo":
            weights = _weights(made.each, config.rollout.reward_weights)
            above = gdpo_advantages(np.stack([*made.each.values()], -1), np.array(weights), group_size)
        else:
            above = advantages(made.rewards, group_size, config.grpo.advantage_scale)
        if written is not None:
            taken = group_size * (len(asked.prompts) + len(asked.spare))
            written.write(asked.first // taken + 1, _lines(made, above, group_size))
        batch = _batch(config, program, made, above, reader)
        of_completions = spread(made.rewards, group_size) | means(made)
        if ahead is not None:
            of_completions["completions/seconds_waited"] = waited
        # In a single iteration the policy is the one that sampled, unless a correction says otherwise: the importance
        # ratio is 1 and needs no old scores.
        if config.grpo.iterations > 1 or corrects:
            batch[OLD_LOG_PROB.name] = score_batch(state.trained, frozen, batch)
        if compare is not None:
            of_completions |= compare(batch)
        metrics = {}
        for _ in range(config.grpo.iterations):
            state, metrics = train_step(state, frozen, batch, rate)
        return state, metrics | {name: np.asarray(value) for name, value in of_completions.items()}

    return step


def make_rollouts(
    config: Config,
    model: Model,
    tokenizer,
    functions: Mapping[str, Reward],
    run: Path,
    toolbox: Toolbox | None = None,
    columns: Sequence[str] = (),
) -> Rollouts:
    """Return a source that samples and rewards completions, on the devices of the current mesh or by rollout.server.

    run: the run folder, for weights that are sent to the server. toolbox: tools and environments, with which
    completions are episodes. columns: of all prompts; functions get None for those that a prompt lacks. `make` raises
    UserError as `rewards_of` and, with a server, as `completion_server.complete`. With rollout.ahead two threads call
    it; it serves one after the other, because the server has one version of the weights.
    """
    factors = _weights(functions, config.rollout.reward_weights)
    prepare, complete, close = completer(config, model, tokenizer, run)
    if toolbox is not None:
        play = EpisodePlayer(config, tokenizer, stops_of(config, model, tokenizer), toolbox, complete)
        reward = _one_at_a_time(lambda *asked: reward_episodes(functions, factors, play(*asked), columns))
        return Rollouts(prepare, reward, close)

    def make(weights: Any, prompts: list[Prompt], numbers: Sequence[int]) -> Rollout:
        tokens, images = [prompt.tokens for prompt in prompts], [prompt.images for prompt in prompts]
        completions = complete(weights, tokens, numbers, images=images)
        # As TRL's `batch_decode(completion_ids)`: decode a completion without its prompt.
        texts = [
            prompt.begun + completion_text(completion, tokenizer, after=prompt.tokens if prompt.begun else ())
            for prompt, completion in zip(prompts, completions)
        ]
        each = _call_rewards(functions, prompts, texts, completions, columns)
        return Rollout(prompts, completions, texts, dict(zip(functions, each.T)), total(each, factors))

    return Rollouts(prepare, _one_at_a_time(make), close)


def _one_at_a_time(make: MakeRollout) -> MakeRollout:
    lock = threading.Lock()

    def make_under_lock(*asked: Any) -> Rollout:
        with lock:
            return make(*asked)

    return make_under_lock


def make_evaluate(
    config: Config, sampled: Rollouts, prompts: list[Prompt], at_once: int, beat: Callable[[], None] = lambda: None
) -> Callable[[Parameters, Parameters, Parameters], dict[str, float]]:
    """Return a function (trained, frozen, reference) -> eval_reward and more, from one completion of each prompt.

    eval_reward_std is the standard deviation over prompts, and eval_reward_stderr the standard error of the mean.
    at_once: prompts of a batch; eval.max_batches limits the number of batches. beat: is called after each batch.
    """
    if config.eval.max_batches is not None:
        prompts = prompts[: config.eval.max_batches * at_once]

    def evaluate(trained: Parameters, frozen: Parameters, reference: Parameters) -> dict[str, float]:
        parts, weights = [], sampled.prepare(trained, frozen)
        for first in range(0, len(prompts), at_once):
            numbers = range(first, min(first + at_once, len(prompts)))
            # Negative numbers select random bits that no training step uses, the same in each evaluation.
            negative_numbers = [-1 - number for number in numbers]
            parts.append(sampled.make(weights, [prompts[number] for number in numbers], negative_numbers))
            beat()
        made = concatenate(parts)
        return {
            f"eval_{name}": float(value) for name, value in (means(made) | spread_over_prompts(made.rewards)).items()
        }

    return evaluate


def _lines(made: Rollout, above: np.ndarray, count: int) -> Iterator[dict[str, Any]]:
    """Yield the lines of the first `count` completions, with their advantages."""
    for prompt, text, reward, advantage in zip(made.prompts[:count], made.texts, made.rewards, above):
        line = {"prompt": prompt.given, "completion": text}
        yield line | {"reward": float(reward), "advantage": float(advantage)}


def _weights(functions: Mapping[str, Any], factors: Sequence[str]) -> list[float]:
    """The weight of each function. Raises UserError for the name of an unknown function."""
    named = dict(factor.split("=") for factor in factors)
    if unknown := named.keys() - functions.keys():
        known = ", ".join(functions)
        raise UserError(
            f"rollout.reward_weights: {min(unknown)!r} is not one of the functions of rollout.rewards: {known}"
        )
    return [float(named.get(name, 1.0)) for name in functions]


def _call_rewards(
    functions: Mapping[str, Reward],
    prompts: Sequence[Prompt],
    texts: list[str],
    completions: list[Completion],
    names: Sequence[str],
) -> Float64[np.ndarray, "completions functions"]:
    """The reward of each completion by each function; process 0 calls the functions and broadcasts."""
    each = np.zeros((len(prompts), len(functions)))
    if multihost.is_main():
        columns = {name: [prompt.sample.get(name) for prompt in prompts] for name in names or columns_of(prompts)}
        given = [prompt.given for prompt in prompts]
        each = rewards_of(functions, given, texts, [completion.tokens for completion in completions], columns)
    # Broadcast float64 as integers: jax would round it to float32.
    return multihost_utils.broadcast_one_to_all(each.view(np.int32)).view(np.float64)


def _batch(
    config: Config, program: Program, made: Rollout, above: np.ndarray, reader: ImageReader | None = None
) -> Batch:
    """The batch of a step: prompts with their completions; reader: of the prompts' images."""
    pairs = list(zip(made.prompts, made.completions))
    tokens = [[*prompt.tokens, *completion.tokens] for prompt, completion in pairs]
    weights = [
        [0] * len(prompt.tokens)
        + [sampled and (completion.finished or not config.grpo.mask_truncated) for sampled in completion.sampled_mask]
        for prompt, completion in pairs
    ]
    of_tokens = np.repeat(above, [len(of_pair) for of_pair in tokens])
    if config.grpo.entropy_share < 1:
        entropies = np.concatenate([_entropies(*pair, trained) for pair, trained in zip(pairs, weights)])
        of_tokens = keep_uncertain(of_tokens, entropies, config.grpo.entropy_share)
    values: dict[Column, np.ndarray] = {ADVANTAGE: of_tokens}
    if config.rollout.corrects != "none":
        scores = [[0.0] * len(prompt.tokens) + [*completion.log_probs] for prompt, completion in pairs]
        values[SAMPLED_LOG_PROB] = np.concatenate(scores)
    if config.rollout.replay_routing:
        width = math.prod(program.model.spec.routed_shape)
        values[routed_experts(width)] = np.concatenate([_routing(*pair, width) for pair in pairs])
    columns = tuple(column for column in program.objective.columns if column != OLD_LOG_PROB)
    images = reader and PromptImages(KeepingReader.of(reader), [prompt.images for prompt in made.prompts])
    return batch_of_documents(config, columns, tokens, weights, values, program.batch[TOKENS.name], images=images)


def _entropies(prompt: Prompt, completion: Completion, trained: Sequence[float]) -> Float64[np.ndarray, " tokens"]:
    """Return the entropy of each trained token of a prompt and its completion; NaN for others."""
    entropies = np.full(len(trained), np.nan)
    if any(trained):  # then all sampled tokens are
        entropies[len(prompt.tokens) + np.flatnonzero(completion.sampled_mask)] = completion.entropies
    return entropies


def _routing(prompt: Prompt, completion: Completion, width: int) -> Int16[np.ndarray, "tokens width"]:
    """The column routed_experts of a prompt and its completion: of a token, the experts of the token before it.

    Tokens that were never read, such as the last observation of an episode, predict nothing that is trained.
    """
    routing = np.full((len(prompt.tokens) + len(completion.tokens), width), -1, np.int16)
    if completion.routed_experts is not None:  # an episode may fail before its first answer
        routing[1 : 1 + len(completion.routed_experts)] = completion.routed_experts.reshape(-1, width)
    return routing


def _make_score_batch(config: Config, model: Model) -> Callable[[Parameters, Parameters, Batch], Array]:
    """Return (trained, frozen, batch) -> log-probability of each target, (micro-batches, rows, positions).

    They are of the policy that sampled the completions, for the importance ratio of later iterations.
    """
    forward, rollout = forward_of(config, model), config.rollout
    options = ScoreOptions(temperature=rollout.temperature, replay_routing=rollout.replay_routing)

    def score_all(decoder: Decoder, batch: Batch, call: ForwardOptions) -> Array:
        def add(number: Array, micro: Batch, scores: Array) -> Array:
            of_micro = score(decoder, micro, call, options=options).log_prob
            return jax.lax.dynamic_update_index_in_dim(scores, of_micro, number, 0)

        scores = jnp.zeros_like(batch["loss_weight"])
        return over_filled(add, batch, count_filled(batch), scores)

    def score_batch(trained: Parameters, frozen: Parameters, batch: Batch) -> Array:
        return forward.run(score_all, forward.bind(trained, frozen), batch)

    return score_batch
