"""Rewards of episodes, as TRL calls reward functions after its tool loop."""

from collections.abc import Mapping, Sequence

import numpy as np
from jax.experimental import multihost_utils

from jaxtune.data.rows.prompt_feed import columns_of
from jaxtune.parallel import multihost
from jaxtune.rollout.episodes.environments import REWARDS
from jaxtune.rollout.episodes.episode_player import Episode
from jaxtune.rollout.groups import Rollout
from jaxtune.rollout.rewards import Reward, rewards_of, total


def reward_episodes(
    functions: Mapping[str, Reward], weights: Sequence[float], episodes: list[Episode], names: Sequence[str] = ()
) -> Rollout:
    """Return the rollout of episodes; those that failed have no reward. Raises UserError as `rewards_of`.

    Functions get the messages of each episode as its completion, all its tokens, and with rollout.environment the
    environments. names: columns of all prompts. Process 0 calls them and broadcasts.
    """
    each = np.full((len(episodes), len(functions)), np.nan)
    played = [number for number, episode in enumerate(episodes) if not episode.failed]
    if multihost.is_main() and played:
        kept = [episodes[number] for number in played]
        names = names or columns_of(episode.prompt for episode in kept)
        columns = {name: [episode.prompt.sample.get(name) for episode in kept] for name in names}
        more = {"environments": [episode.environment for episode in kept], REWARDS: [one.reward for one in kept]}
        each[played] = rewards_of(
            functions,
            [episode.prompt.given for episode in kept],
            [episode.messages for episode in kept],
            [episode.tokens for episode in kept],
            columns,
            more if any(episode.kind for episode in kept) else {},
        )
    # Broadcast float64 as integers: jax would round it to float32.
    each = multihost_utils.broadcast_one_to_all(each.view(np.int32)).view(np.float64)
    counts = ("turns", "calls", "failed_calls", "failed")
    return Rollout(
        [episode.prompt for episode in episodes],
        [episode.completion for episode in episodes],
        [episode.messages for episode in episodes],
        dict(zip(functions, each.T)),
        total(each, weights),
        {name: np.array([float(getattr(episode, name)) for episode in episodes]) for name in counts},
    )
