"""A step of reinforcement learning: sample completions from the model, reward them, update the model."""

import dataclasses
import hashlib
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Array, Float64

from jaxtune import data
from jaxtune.columns import ADVANTAGE, LOSS_WEIGHT, OLD_LOG_PROB, SAMPLED_LOG_PROB, TOKENS, Column
from jaxtune.config.schema import Config
from jaxtune.data.formats.prompts import Prompt, Prompts
from jaxtune.data.formats.units import Documents, TokenisedDataset
from jaxtune.data.rows.prompt_feed import PromptBatch
from jaxtune.errors import UserError
from jaxtune.exports.write import export_adapter
from jaxtune.host.process import compiler_options
from jaxtune.host.run_folder import RunFolder
from jaxtune.inference.decode import Sampling
from jaxtune.inference.generation import (
    Completion,
    cast_weights,
    collect_completions,
    completion_text,
    make_generate,
    make_stop_test,
    stop_tokens,
)
from jaxtune.models.decoder import Decoder, Parameters
from jaxtune.models.forward_options import ForwardOptions
from jaxtune.models.score import Batch, ScoreOptions, score
from jaxtune.monitor.metrics import cut
from jaxtune.objectives.grpo import advantages, gdpo_advantages
from jaxtune.objectives.options import RolloutOptions
from jaxtune.objectives.rollout_correction import engine_difference
from jaxtune.parallel import multihost
from jaxtune.parallel.mesh import data_shards
from jaxtune.precision.recipes import recipe_of
from jaxtune.rollout import completion_server
from jaxtune.rollout.rewards import Reward, rewards_of, total
from jaxtune.training.assembly import Program, forward_of
from jaxtune.training.state import State
from jaxtune.weights.model import Model

log = logging.getLogger("jaxtune")

# (trained, frozen, the tokens of each prompt, the number of each completion) -> completions.
Complete = Callable[[Parameters, Parameters, list[list[int]], Sequence[int]], list[Completion]]


class Rollout(NamedTuple):
    """Completions and their rewards.

    Attributes:
        prompts: one a completion.
        completions: their tokens.
        texts: of the completions.
        each: rewards by function; NaN: none.
        rewards: the weighted sum over functions; NaN: none.
    """

    prompts: list[Prompt]
    completions: list[Completion]
    texts: list[str]
    each: dict[str, Float64[np.ndarray, " completions"]]
    rewards: Float64[np.ndarray, " completions"]


# (trained, frozen, the prompt of each completion, the number of each) -> rollout.
MakeRollout = Callable[[Parameters, Parameters, list[Prompt], Sequence[int]], Rollout]


def make_rollout_step(
    config: Config,
    program: Program,
    make: MakeRollout,
    train_step: Callable[..., tuple[State, dict[str, Any]]],
    run: Path,
) -> Callable[..., tuple[State, dict[str, Any]]]:
    """Wrap `train_step`: return a function (state, frozen, prompts of a step, learning rate) -> (state, metrics).

    Completions are used for grpo.iterations of `train_step`. Metrics are from the last iteration and, named as in
    TRL: reward, reward_std, rewards/NAME/mean, frac_reward_zero_std, completions/mean_length,
    completions/clipped_ratio; without a server, entropy; and with a correction, the metrics of `_Compare`.

    run: the run folder; with log.jsonl, it gets the completions of the first prompt of each step.
    """
    group_size, corrects = config.rollout.group_size, config.rollout.corrects != "none"
    compare = _Compare(config.rollout) if corrects else None
    scored = jax.jit(_make_scored(config, program.model), compiler_options=compiler_options(config))
    written = _CompletionsFile(RunFolder(run).completions) if config.log.jsonl and multihost.is_main() else None
    teaches = partial(_teaches, config.grpo.advantage_scale)
    silent = 0  # steps in a row

    def step(state: State, frozen: Parameters, asked: PromptBatch, rate: Any) -> tuple[State, dict[str, Any]]:
        nonlocal silent

        def make_groups(first: int, prompts: Sequence[Prompt]) -> list[Rollout]:
            """Return a rollout of each prompt; first: number of the first one's first completion."""
            repeated = [prompt for prompt in prompts for _ in range(group_size)]
            numbers = range(first, first + len(repeated))
            return _split(make(state.trained, frozen, repeated, numbers), group_size)

        groups = _replace_alike(make_groups(asked.first, asked.prompts), asked, make_groups, teaches)
        made = _concatenate(groups)
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
            written.write(asked.first // taken + 1, made, above, group_size)
        batch = _batch(config, program, made, above)
        of_completions = _spread(made.rewards, group_size) | _means(made)
        # In a single iteration the policy is the one that sampled: the importance ratio is 1 and needs no old scores.
        if config.grpo.iterations > 1 or corrects:
            batch[OLD_LOG_PROB.name] = scored(state.trained, frozen, batch)
        if compare is not None:
            of_completions |= compare(batch)
        metrics = {}
        for _ in range(config.grpo.iterations):
            state, metrics = train_step(state, frozen, batch, rate)
        return state, metrics | {name: np.asarray(value) for name, value in of_completions.items()}

    return step


class _Compare:
    """Compares the log-probabilities of completions by the model and by the engine that sampled them."""

    LARGE = 0.1  # nats, the mean of a step; a tiny model in bfloat16 and vLLM differed by 0.002

    def __init__(self, options: RolloutOptions):
        self._options, self._warned = options, False
        self._difference = jax.jit(partial(engine_difference, options))

    def __call__(self, batch: Batch) -> dict[str, Any]:
        """Return metrics of a step, by TRL's names; warn once if the difference is large."""
        columns = (batch[column.name] for column in (OLD_LOG_PROB, SAMPLED_LOG_PROB, LOSS_WEIGHT))
        found = self._difference(*columns)
        much = found.mean > self.LARGE or not 0.5 < found.mean_ratio < 2
        if much and not self._warned and multihost.is_main():
            self._warned = True
            advice = (
                "; the server must serve this model, in a similar precision. With another rollout.temperature than 1, "
                "start vLLM with --logprobs-mode=processed_logprobs, and leave rollout.top_p and its like out"
            )
            log.warning(
                "rollout.correction: the log-probabilities of the engine that samples differ from the model's by %.3f "
                "nats on average, and the mean weight of a token is %.3g, although it should be near 1%s",
                found.mean,
                found.mean_ratio,
                "" if self._options.server is None else advice,
            )
        return {
            "sampling/sampling_logp_difference/mean": found.mean,
            "sampling/sampling_logp_difference/max": found.largest,
            "sampling/kl": found.kl,
            "sampling/importance_sampling_ratio/min": found.smallest_ratio,
            "sampling/importance_sampling_ratio/mean": found.mean_ratio,
            "sampling/importance_sampling_ratio/max": found.largest_ratio,
        }


def make_rollouts(config: Config, model: Model, tokenizer, functions: Mapping[str, Reward], run: Path) -> MakeRollout:
    """Return a function that samples and rewards completions, on the devices of the current mesh or by rollout.server.

    run: the run folder, for adapters that are sent to the server. The function raises UserError as `rewards_of` and,
    with a server, as `completion_server.complete`.
    """
    weights = _weights(functions, config.rollout.reward_weights)
    if config.rollout.server is None:
        complete = _on_devices(config, model, tokenizer)
    else:
        complete = _by_server(config, model, tokenizer, run / "rollout_adapter")

    def make(trained: Parameters, frozen: Parameters, prompts: list[Prompt], numbers: Sequence[int]) -> Rollout:
        completions = complete(trained, frozen, [prompt.tokens for prompt in prompts], numbers)
        # As TRL's `batch_decode(completion_ids)`: decode a completion without its prompt.
        texts = [
            prompt.begun + completion_text(completion, tokenizer, after=prompt.tokens if prompt.begun else ())
            for prompt, completion in zip(prompts, completions)
        ]
        each = _call_rewards(functions, prompts, texts, completions)
        return Rollout(prompts, completions, texts, dict(zip(functions, each.T)), total(each, weights))

    return make


def make_evaluate(
    config: Config, make: MakeRollout, prompts: list[Prompt], at_once: int, beat: Callable[[], None] = lambda: None
) -> Callable[[Parameters, Parameters, Parameters], dict[str, float]]:
    """Return a function (trained, frozen, reference) -> eval_reward and more, from one completion of each prompt.

    at_once: prompts of a batch; eval.max_batches limits the number of batches. beat: is called after each batch.
    """
    if config.eval.max_batches is not None:
        prompts = prompts[: config.eval.max_batches * at_once]

    def evaluate(trained: Parameters, frozen: Parameters, reference: Parameters) -> dict[str, float]:
        parts = []
        for first in range(0, len(prompts), at_once):
            numbers = range(first, min(first + at_once, len(prompts)))
            # Negative numbers select random bits that no training step uses, the same in each evaluation.
            negative_numbers = [-1 - number for number in numbers]
            parts.append(make(trained, frozen, [prompts[number] for number in numbers], negative_numbers))
            beat()
        return {f"eval_{name}": float(value) for name, value in _means(_concatenate(parts)).items()}

    return evaluate


def _replace_alike(
    groups: list[Rollout],
    asked: PromptBatch,
    make_groups: Callable[[int, Sequence[Prompt]], list[Rollout]],
    teaches: Callable[[Rollout], bool],
) -> list[Rollout]:
    """Replace groups that teach nothing by groups of spare prompts, as many as are needed and there are."""
    number, left, size = asked.first + sum(len(group.rewards) for group in groups), asked.spare, len(groups[0].rewards)
    groups = [*groups]
    while left and (alike := [place for place, group in enumerate(groups) if not teaches(group)]):
        tried, left = left[: len(alike)], left[len(alike) :]
        better = [group for group in make_groups(number, tried) if teaches(group)]
        number += len(tried) * size
        for place, group in zip(alike, better):
            groups[place] = group
    return groups


def _teaches(scale: str, group: Rollout) -> bool:
    """Whether two completions of a group have different rewards; for gdpo, of any function."""

    def differ(rewards: Float64[np.ndarray, " group"]) -> bool:
        known = rewards[~np.isnan(rewards)]
        return len(known) > 1 and bool(np.ptp(known) >= 1e-8)

    return any(map(differ, group.each.values() if scale == "gdpo" else [group.rewards]))


def _split(made: Rollout, size: int) -> list[Rollout]:
    """Split a rollout into groups of `size` completions; the opposite of `_concatenate`."""
    parts = [slice(first, first + size) for first in range(0, len(made.prompts), size)]
    return [
        Rollout(
            made.prompts[part],
            made.completions[part],
            made.texts[part],
            {name: values[part] for name, values in made.each.items()},
            made.rewards[part],
        )
        for part in parts
    ]


def _concatenate(parts: list[Rollout]) -> Rollout:
    """Concatenate rollouts."""
    return Rollout(
        [prompt for part in parts for prompt in part.prompts],
        [completion for part in parts for completion in part.completions],
        [text for part in parts for text in part.texts],
        {name: np.concatenate([part.each[name] for part in parts]) for name in parts[0].each},
        np.concatenate([part.rewards for part in parts]),
    )


def _means(made: Rollout) -> dict[str, Any]:
    """Means over completions; for rewards, over the completions that have one, and NaN if none has."""

    def mean(values: Float64[np.ndarray, " n"]) -> float:
        known = values[~np.isnan(values)]
        return float(known.mean()) if len(known) else math.nan

    entropies = [entropy for completion in made.completions for entropy in completion.entropies]
    return {
        "reward": mean(made.rewards),
        **{f"rewards/{name}/mean": mean(values) for name, values in made.each.items()},
        "completions/mean_length": np.mean([len(completion.tokens) for completion in made.completions]),
        "completions/clipped_ratio": np.mean([not completion.finished for completion in made.completions]),
        **({"entropy": np.mean(entropies)} if entropies else {}),
    }


def _spread(rewards: Float64[np.ndarray, " n"], group_size: int) -> dict[str, Any]:
    """The standard deviation of rewards, and the fraction of groups whose rewards are all equal."""
    known = rewards[~np.isnan(rewards)]
    groups = (group[~np.isnan(group)] for group in rewards.reshape(-1, group_size))
    alike = [len(group) > 1 and np.ptp(group) < 1e-8 for group in groups]
    return {"reward_std": known.std(ddof=1) if len(known) > 1 else math.nan, "frac_reward_zero_std": np.mean(alike)}


class _CompletionsFile:
    """A file of completions, one line each, from the first step of this process."""

    def __init__(self, path: Path):
        self._path, self._begun = path, False

    def write(self, step: int, made: Rollout, above: np.ndarray, count: int) -> None:
        """Append the first `count` completions of a step, with their advantages."""
        if not self._begun:  # a resumed run repeats some steps
            cut(self._path, step - 1)
            self._begun = True
        with self._path.open("a", encoding="utf-8") as file:
            for prompt, text, reward, advantage in zip(made.prompts[:count], made.texts, made.rewards, above):
                line = {"step": step, "prompt": prompt.given, "completion": text}
                line |= {"reward": float(reward), "advantage": float(advantage)}
                file.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")


def _weights(functions: Mapping[str, Any], factors: Sequence[str]) -> list[float]:
    """The weight of each function. Raises UserError for the name of an unknown function."""
    named = dict(factor.split("=") for factor in factors)
    if unknown := named.keys() - functions.keys():
        known = ", ".join(functions)
        raise UserError(
            f"rollout.reward_weights: {min(unknown)!r} is not one of the functions of rollout.rewards: {known}"
        )
    return [float(named.get(name, 1.0)) for name in functions]


def _on_devices(config: Config, model: Model, tokenizer) -> Complete:
    """Sample completions on the devices of the run; each completion of a group has its own random numbers."""
    options, recipe = config.rollout, recipe_of(config.precision, model.linears)
    sampling = Sampling(**{name: getattr(options, name) for name in Sampling._fields})
    how = {"max_new_tokens": options.max_new_tokens, "sampling": sampling, "seed": config.train.seed}
    generate = make_generate(model.graph, model.spec, dtype=recipe.dtype, **how)
    ended = make_stop_test(_stops(config, model, tokenizer), options.stop, tokenizer)
    of_step = config.train.micro_batch_size * config.train.grad_accum_steps * data_shards(jax.sharding.get_mesh())
    size = options.completions_at_once or of_step

    def complete(
        trained: Parameters, frozen: Parameters, prompts: list[list[int]], numbers: Sequence[int]
    ) -> list[Completion]:
        completions, parameters = [], cast_weights(model, {**frozen, **trained}, recipe.dtype)
        for first in range(0, len(prompts), size):
            # Pad the last batch to the compiled size, by repeating the last prompt; its completions are dropped.
            rows = [min(row, len(prompts) - 1) for row in range(first, first + size)]
            steps = generate(parameters, [prompts[row] for row in rows], [numbers[row] for row in rows])
            completions += collect_completions(steps, min(size, len(prompts) - first), ended, scores=True)
        return completions

    return complete


def _by_server(config: Config, model: Model, tokenizer, folder: Path) -> Complete:
    """Get completions from an OpenAI-compatible server, after sending it the adapter; only process 0 talks to it."""
    options = config.rollout
    # The hash of the folder is part of the adapter's name on the server. So two runs of the same name, or a run and its
    # evaluation, unload only their own adapters.
    folder_hash = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:6]
    url, name = options.server or "", f"{config.train.run_name or 'run'}-{folder_hash}"
    sampling = {key: getattr(options, key) for key in Sampling._fields} | {"top_k": options.top_k or 0}
    ends = {"stop": _stops(config, model, tokenizer), "strings": options.stop}
    how = {**sampling, **ends, "max_tokens": options.max_new_tokens, "seed": config.train.seed}
    how |= {"vocabulary": model.spec.vocabulary, "log_probs": options.corrects != "none"}

    def complete(
        trained: Parameters, frozen: Parameters, prompts: list[list[int]], numbers: Sequence[int]
    ) -> list[Completion]:
        export_adapter(model, {**frozen, **trained}, config, folder)
        table = np.zeros((len(prompts), 2 + options.max_new_tokens), np.int32)  # finished, length, tokens
        scores = np.zeros((len(prompts), options.max_new_tokens), np.float32)
        if multihost.is_main():
            served = completion_server.send_adapter(url, name, folder)
            made = completion_server.complete(url, served, prompts, numbers, timeout=options.server_seconds, **how)
            for row, of_row, completion in zip(table, scores, made):
                row[:2] = completion.finished, len(completion.tokens)
                row[2 : 2 + len(completion.tokens)] = completion.tokens
                of_row[: len(completion.log_probs)] = completion.log_probs
        table, scores = multihost_utils.broadcast_one_to_all((table, scores))
        return [
            Completion(row[2 : 2 + row[1]].tolist(), bool(row[0]), of_row[: row[1]].tolist())
            for row, of_row in zip(table, scores)
        ]

    return complete


def _stops(config: Config, model: Model, tokenizer) -> frozenset[int]:
    """The tokens that end a completion."""
    end = Prompts(tokenizer, config.chat).turn_end
    turn_end = frozenset() if end is None else frozenset({tokenizer.added_tokens_encoder[end]})
    return stop_tokens(model.folders.tokenizer, tokenizer) | turn_end


def _call_rewards(
    functions: Mapping[str, Reward], prompts: Sequence[Prompt], texts: list[str], completions: list[Completion]
) -> Float64[np.ndarray, "completions functions"]:
    """The reward of each completion by each function; process 0 calls the functions and broadcasts."""
    each = np.zeros((len(prompts), len(functions)))
    if multihost.is_main():
        names = dict.fromkeys(name for prompt in prompts for name in prompt.sample)
        columns = {name: [prompt.sample.get(name) for prompt in prompts] for name in names}
        given = [prompt.given for prompt in prompts]
        each = rewards_of(functions, given, texts, [completion.tokens for completion in completions], columns)
    # Broadcast float64 as integers: jax would round it to float32.
    return multihost_utils.broadcast_one_to_all(each.view(np.int32)).view(np.float64)


def _batch(config: Config, program: Program, made: Rollout, above: np.ndarray) -> Batch:
    """The batch of a step: one row for each prompt with its completion."""
    pairs = list(zip(made.prompts, made.completions))
    tokens = [[*prompt.tokens, *completion.tokens] for prompt, completion in pairs]
    weights = [
        [0] * len(prompt.tokens) + [completion.finished or not config.grpo.mask_truncated] * len(completion.tokens)
        for prompt, completion in pairs
    ]
    values: dict[Column, Any] = {
        TOKENS: np.concatenate(tokens),
        LOSS_WEIGHT: np.concatenate(weights),
        ADVANTAGE: above,
    }
    if config.rollout.corrects != "none":
        scores = [[0.0] * len(prompt.tokens) + [*completion.log_probs] for prompt, completion in pairs]
        values[SAMPLED_LOG_PROB] = np.concatenate(scores)
    part = TokenisedDataset(
        name="completions",
        key="",
        columns={column.name: column for column in values},
        values={column.name: of_column.astype(column.dtype) for column, of_column in values.items()},
        offsets=np.cumsum([0, *map(len, tokens)]),
        units=np.arange(len(tokens) + 1),
        targets=np.array(list(map(sum, weights))),
        continuous=np.zeros(len(tokens), bool),
        skipped=0,
        notes=(),
    )
    # The step is compiled for one row per completion: no packing.
    plain = dataclasses.replace(config.data, packing=False, shuffle=False, num_workers=0, prefetch=0)
    columns: tuple[Column, ...] = tuple(c for c in program.objective.columns if c != OLD_LOG_PROB)
    rows = data.Rows(Documents.concatenate([part]), plain, 1, columns)
    like = program.batch[TOKENS.name]
    (_, batch), *_ = data.batches(rows, like.shape, like.sharding, 0, len(tokens), plain)
    return batch


def _make_scored(config: Config, model: Model) -> Callable[[Parameters, Parameters, Batch], Array]:
    """Return (trained, frozen, batch) -> log-probability of each target, (micro-batches, rows, positions).

    They are of the policy that sampled the completions, for the importance ratio of later iterations.
    """
    forward, options = forward_of(config, model), ScoreOptions(temperature=config.rollout.temperature)

    def score_all(decoder: Decoder, batch: Batch, call: ForwardOptions) -> Array:
        return jax.lax.map(lambda micro: score(decoder, micro, call, options=options).log_prob, batch)

    def scored(trained: Parameters, frozen: Parameters, batch: Batch) -> Array:
        return forward.run(score_all, forward.bind(trained, frozen), batch)

    return scored
