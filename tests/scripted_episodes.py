"""Episodes whose turns are given texts, for tests of tools and environments."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from tiny import byte_tokenizer

from jaxtune.config.schema import ChatOptions, Config, DataOptions, Dataset, RolloutOptions
from jaxtune.data.formats.prompts import Prompts
from jaxtune.hf.chat_templates import find_template
from jaxtune.inference.generation import Completion
from jaxtune.rollout.episodes.episode_player import Episode, EpisodePlayer
from jaxtune.rollout.episodes.episode_rewards import reward_episodes
from jaxtune.rollout.episodes.toolbox import load_functions

CALL = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call><|im_end|>'


def call(name: str, arguments: str) -> str:
    return CALL.format(name, arguments)


def chat_tokenizer(folder: Path):
    """Return a tokenizer of bytes with Qwen3's template, whose answers may call tools."""
    made = byte_tokenizer(folder, special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    made.chat_template = find_template("qwen3_nothinking", made.get_vocab())
    return made


class Scripted:
    """Samples given texts: `script[number][turn]`. It keeps what it was asked."""

    def __init__(self, tokenizer, script: list[list[str]], limit: int):
        self.tokenizer, self.script, self.limit, self.asked = tokenizer, script, limit, []

    def __call__(self, weights, prompts, numbers, written=None) -> list[Completion]:
        self.asked.append([prompts, list(numbers), written])
        made = []
        for number, there in zip(numbers, written):
            turn = sum(number in earlier[1] for earlier in self.asked) - 1
            tokens = self.tokenizer(self.script[number][turn])["input_ids"]
            kept = tokens[: self.limit - there]
            ends = kept[-1] == self.tokenizer.eos_token_id
            made.append(Completion(kept, ends, [-0.5] * len(kept), [1.0] * len(kept)))
        return made


def play(tokenizer, options: RolloutOptions, rows: list[dict[str, Any]], script: list[list[str]], seq_len=2000):
    """Return episodes of rows whose turns are scripted, the completer, and the rollout."""
    config = Config(data=DataOptions(seq_len=seq_len), rollout=options)
    functions = load_functions(config)
    assert functions.toolbox is not None
    prompts = Prompts(tokenizer, ChatOptions(), row_tools=functions.row_tools)
    made = [prompts(Dataset(), row) for row in rows]
    complete = Scripted(tokenizer, script, options.max_new_tokens)
    stops = frozenset({tokenizer.eos_token_id})
    player = EpisodePlayer(config, tokenizer, stops, functions.toolbox, complete)
    episodes = player({}, made, range(len(made)))
    return episodes, complete, reward_episodes(functions.rewards, [1.0] * len(functions.rewards), episodes)


def parts(tokenizer, episode: Episode) -> list[tuple[str, bool]]:
    """Return the texts of an episode's completion with whether each was observed."""
    cuts = [0, *(np.flatnonzero(np.diff(episode.observed)) + 1).tolist(), len(episode.tokens)]
    pairs = pairwise(cuts)
    return [(tokenizer.decode(episode.tokens[a:b]), episode.observed[a]) for a, b in pairs]
