"""The data of a run that learns from its own completions: prompts in an order, those of a step at a time."""

import hashlib
import json
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
import numpy as np

from jaxtune.config.schema import Config
from jaxtune.data.formats.prompts import Prompt, read_prompts
from jaxtune.data.rows.feed import steps_of
from jaxtune.data.rows.packing import shuffled
from jaxtune.data.rows.splits import validation_seed
from jaxtune.errors import UserError
from jaxtune.parallel.mesh import data_shards

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

log = logging.getLogger("jaxtune")


class Asked(NamedTuple):
    """The prompts of a step, and the number of the first of their completions, counted through the run."""

    prompts: list[Prompt]
    first: int


@dataclass(frozen=True)
class PromptSet:
    """All prompts of a run."""

    prompts: list[Prompt]

    @property
    def key(self) -> str:
        """A hash of their tokens and of all columns, which are rewarded."""
        content = hashlib.sha256()
        for prompt in self.prompts:
            content.update(json.dumps([prompt.tokens, dict(prompt.sample)], sort_keys=True, default=str).encode())
        return content.hexdigest()

    def has_key(self, key: str) -> bool:
        """Whether they are the prompts of this key."""
        return key == self.key


class PromptFeed:
    """Prompts for a mesh, in the place of `data.Feed`; a position is {"prompt": the number of the next one}."""

    counts = None
    eval_rows: ClassVar[dict[str, Any]] = {}

    def __init__(
        self, prompts: PromptSet, validation: list[Prompt] | None, config: Config, completions_per_step: int, chat: bool
    ):
        """chat: whether prompts are written by a chat template."""
        self.documents, self.eval_prompts, self.chat = prompts, validation, chat
        self.rows_per_step = completions_per_step
        self._data, self._group_size = config.data, config.rollout.group_size
        self._per_step = completions_per_step // self._group_size
        completions = math.ceil(config.train.epochs * len(prompts.prompts)) * self._group_size
        steps = config.train.max_steps or steps_of(completions, completions_per_step, config.data.drop_last)
        self.total_steps = steps
        self._order = lru_cache(2)(self._order_of)

    @property
    def eval_keys(self) -> dict[str, str]:
        """The key of the prompts to validate with."""
        return {"": PromptSet(self.eval_prompts).key} if self.eval_prompts else {}

    def with_rows(self, change: Any) -> "PromptFeed":
        """The feed as it is: completions are made in each step, and nothing of them can be scored before."""
        return self

    def epoch(self, position: dict[str, Any]) -> float:
        """The number of passes over the prompts up to a position."""
        return position.get("prompt", 0) / len(self.documents.prompts)

    def batches(self, position: dict[str, Any], steps: int) -> Iterator[tuple[dict[str, Any], Asked]]:
        """(position after a step, its prompts), from a position on; the last epoch's end is filled with the next's."""
        first = position.get("prompt", 0)
        for start in range(first, first + steps * self._per_step, self._per_step):
            after = start + self._per_step
            yield {"prompt": after}, Asked([self._prompt(n) for n in range(start, after)], start * self._group_size)

    def _prompt(self, number: int) -> Prompt:
        epoch, place = divmod(number, len(self.documents.prompts))
        return self.documents.prompts[self._order(epoch)[place]]

    def _order_of(self, epoch: int) -> np.ndarray:
        count = len(self.documents.prompts)
        return shuffled(count, self._data.seed, epoch) if self._data.shuffle else np.arange(count)


def open_prompts(config: Config, tokenizer: "PreTrainedTokenizerFast", mesh: jax.sharding.Mesh) -> PromptFeed:
    """The prompts of a config. Raises UserError as `read_prompts`, and where a step has no whole groups."""
    train, options = config.train, config.rollout
    completions = train.grad_accum_steps * train.micro_batch_size * data_shards(mesh)
    if completions % options.group_size:
        least = train.grad_accum_steps * options.group_size // math.gcd(completions, options.group_size)
        raise UserError(
            f"a step has {completions} completions (train.micro_batch_size={train.micro_batch_size} times "
            f"train.grad_accum_steps={train.grad_accum_steps} on {data_shards(mesh)} data shards), which are no whole "
            f"groups of rollout.group_size={options.group_size}; make it a multiple, such as with "
            f"train.grad_accum_steps={least}"
        )
    prompts, validation = open_prompt_sets(config, tokenizer)
    feed = PromptFeed(PromptSet(prompts), validation, config, completions, bool(tokenizer.chat_template))
    per_step = completions // options.group_size
    log.info("%d steps of %d prompts, each completed %d times", feed.total_steps, per_step, options.group_size)
    return feed


def open_prompt_sets(config: Config, tokenizer: "PreTrainedTokenizerFast") -> tuple[list[Prompt], list[Prompt] | None]:
    """Prompts to train and to validate with; None: the config asks for none of these. Raises UserError."""
    data = config.data
    most, skip = data.seq_len - config.rollout.max_new_tokens, data.on_bad_row == "skip"
    found = read_prompts(data.datasets, tokenizer, config.chat, most, skip)
    if data.eval_datasets:
        return found, read_prompts(data.eval_datasets, tokenizer, config.chat, most, skip)
    if not data.validation_split:
        return found, None
    count = (
        int(data.validation_split) if data.validation_split >= 1 else max(1, round(data.validation_split * len(found)))
    )
    if count >= len(found):
        raise UserError(f"data.validation_split = {data.validation_split:g}, but there are only {len(found)} prompts")
    order = shuffled(len(found), validation_seed(data), 0, 3)
    held, kept = np.sort(order[:count]), np.sort(order[count:])
    return [found[number] for number in kept], [found[number] for number in held]
