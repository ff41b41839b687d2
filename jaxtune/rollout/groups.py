"""Completions with their rewards: what a group teaches, and how groups are put together."""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64

from jaxtune.data.chat.messages import Message
from jaxtune.data.formats.prompts import Prompt
from jaxtune.data.rows.prompt_feed import PromptBatch
from jaxtune.inference.generation import Completion


class Rollout(NamedTuple):
    """Completions and their rewards.

    Attributes:
        prompts: one a completion.
        completions: their tokens.
        texts: of the completions; or the messages of episodes.
        each: rewards by function; NaN: none.
        rewards: the weighted sum over functions; NaN: none.
        counts: numbers of turns, calls, failed_calls and failed (0 or 1) by completion, of episodes; else empty.
    """

    prompts: list[Prompt]
    completions: list[Completion]
    texts: Sequence[str | list[Message]]
    each: dict[str, Float64[np.ndarray, " completions"]]
    rewards: Float64[np.ndarray, " completions"]
    counts: Mapping[str, Float64[np.ndarray, " completions"]] = MappingProxyType({})


def replace_alike(
    groups: list[Rollout],
    asked: PromptBatch,
    make_groups: Callable[[int, Sequence[Prompt]], list[Rollout]],
    useful: Callable[[Rollout], bool],
) -> list[Rollout]:
    """Replace groups that teach nothing by groups of spare prompts, as many as are needed and there are."""
    number, left, size = asked.first + sum(len(group.rewards) for group in groups), asked.spare, len(groups[0].rewards)
    groups = [*groups]
    while left and (alike := [place for place, group in enumerate(groups) if not useful(group)]):
        tried, left = left[: len(alike)], left[len(alike) :]
        better = [group for group in make_groups(number, tried) if useful(group)]
        number += len(tried) * size
        for place, group in zip(alike, better):
            groups[place] = group
    return groups


def teaches(scale: str, group: Rollout) -> bool:
    """Whether two completions of a group have different rewards; for gdpo, of any function."""
    each = group.each.values() if scale == "gdpo" else [group.rewards]
    return any(_differ(rewards) for rewards in each)


def split(made: Rollout, size: int) -> list[Rollout]:
    """Split a rollout into groups of `size` completions; the opposite of `concatenate`."""
    parts = [slice(first, first + size) for first in range(0, len(made.prompts), size)]
    return [
        Rollout(
            made.prompts[part],
            made.completions[part],
            made.texts[part],
            {name: values[part] for name, values in made.each.items()},
            made.rewards[part],
            {name: values[part] for name, values in made.counts.items()},
        )
        for part in parts
    ]


def concatenate(parts: list[Rollout]) -> Rollout:
    """Concatenate rollouts."""
    return Rollout(
        [prompt for part in parts for prompt in part.prompts],
        [completion for part in parts for completion in part.completions],
        [text for part in parts for text in part.texts],
        {name: np.concatenate([part.each[name] for part in parts]) for name in parts[0].each},
        np.concatenate([part.rewards for part in parts]),
        {name: np.concatenate([part.counts[name] for part in parts]) for name in parts[0].counts},
    )


def means(made: Rollout) -> dict[str, Any]:
    """Return means over completions; for rewards, over the completions that have one, and NaN if none has."""

    def mean(values: Float64[np.ndarray, " n"]) -> float:
        known = values[~np.isnan(values)]
        return float(known.mean()) if len(known) else math.nan

    return {
        "reward": mean(made.rewards),
        **{f"rewards/{name}/mean": mean(values) for name, values in made.each.items()},
        **means_of_completions(made.completions),
        **(_episode_means(made.counts) if made.counts else {}),
    }


def means_of_completions(completions: Sequence[Completion]) -> dict[str, Any]:
    """Return their mean length, the share that did not end and, if it is known, the mean entropy of their tokens."""
    entropies = [entropy for completion in completions for entropy in completion.entropies]
    return {
        "completions/mean_length": np.mean([sum(completion.sampled_mask) for completion in completions]),
        "completions/clipped_ratio": np.mean([not completion.finished for completion in completions]),
        **({"entropy": np.mean(entropies)} if entropies else {}),
    }


def _episode_means(counts: Mapping[str, Float64[np.ndarray, " completions"]]) -> dict[str, Any]:
    calls = counts["calls"].sum()
    return {
        "tools/call_frequency": counts["calls"].mean(),
        "tools/failure_frequency": counts["failed_calls"].sum() / calls if calls else 0.0,
        "episodes/turns": counts["turns"].mean(),
        "episodes/failed_ratio": counts["failed"].mean(),
    }


def spread(rewards: Float64[np.ndarray, " n"], group_size: int) -> dict[str, Any]:
    """Return the standard deviation of rewards, and the fraction of groups whose known rewards are all equal."""
    groups = rewards.reshape(-1, group_size)
    alike = np.array([np.count_nonzero(~np.isnan(group)) > 1 and not _differ(group) for group in groups])
    return {"reward_std": _deviation(rewards), "frac_reward_zero_std": np.mean(alike)}


def spread_over_prompts(rewards: Float64[np.ndarray, " prompts"]) -> dict[str, float]:
    """Return the standard deviation of known rewards, one a prompt, and the standard error of their mean."""
    deviation = _deviation(rewards)
    return {
        "reward_std": deviation,
        "reward_stderr": deviation / math.sqrt(max(1, np.count_nonzero(~np.isnan(rewards)))),
    }


def _deviation(rewards: Float64[np.ndarray, " n"]) -> float:
    """The standard deviation of the known rewards; NaN if there are fewer than two."""
    known = rewards[~np.isnan(rewards)]
    return float(known.std(ddof=1)) if len(known) > 1 else math.nan


def _differ(rewards: Float64[np.ndarray, " group"]) -> bool:
    """Whether two of the known rewards are different."""
    known = rewards[~np.isnan(rewards)]
    return len(known) > 1 and bool(np.ptp(known) >= 1e-8)
