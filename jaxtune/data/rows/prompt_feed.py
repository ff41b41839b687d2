"""The data of a run that learns from its own completions: shuffled prompts, one step's prompts at a time."""

import hashlib
import json
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np

from jaxtune.config.schema import Config
from jaxtune.data.chat.template_line import say_template
from jaxtune.data.formats.answer_reader import AnswerReader
from jaxtune.data.formats.image_messages import ImageMessages
from jaxtune.data.formats.prompts import Prompt, RowTools, read_prompts
from jaxtune.data.images.image_reader import ImageReader
from jaxtune.data.rows.feed import count_steps
from jaxtune.data.rows.packing import stable_permutation
from jaxtune.data.rows.splits import validation_seed
from jaxtune.errors import UserError, format_count
from jaxtune.parallel.mesh import data_shards
from jaxtune.tokenizer_type import Tokenizer

log = logging.getLogger("jaxtune")


class PromptBatch(NamedTuple):
    """The prompts of a step.

    Attributes:
        prompts: the prompts.
        first: number of the first completion of the first prompt, counted through the run.
        spare: rollout.spare_prompts further prompts; their completions have the numbers that follow.
        later: the prompts of the rollout.ahead steps that follow, or of as many as are left.
    """

    prompts: list[Prompt]
    first: int
    spare: Sequence[Prompt] = ()
    later: "Sequence[PromptBatch]" = ()


@dataclass(frozen=True)
class PromptSet:
    """All prompts of a run."""

    prompts: list[Prompt]

    @property
    def key(self) -> str:
        """A hash of the prompts' tokens and of all columns, because rewards may read any column.

        The places of images in a table are left out: they change when its file is moved.
        """
        content = hashlib.sha256()
        for prompt in self.prompts:
            # default=str, because columns may hold dates and other values that JSON has no type for.
            columns = _without_places(dict(prompt.sample))
            content.update(json.dumps([prompt.tokens, columns], sort_keys=True, default=str).encode())
        return content.hexdigest()

    def has_key(self, key: str) -> bool:
        """Whether `key` is the key of the same prompts."""
        return key == self.key


def _without_places(value: Any) -> Any:
    """Return a sample's value without the places that `place_images` has written next to images' bytes."""
    if isinstance(value, dict):
        return {name: _without_places(one) for name, one in value.items() if name != "place" or "bytes" not in value}
    return [_without_places(one) for one in value] if isinstance(value, list) else value


def columns_of(prompts: Iterable[Prompt]) -> tuple[str, ...]:
    """Return all columns that any of the prompts has."""
    return tuple(dict.fromkeys(name for prompt in prompts for name in prompt.sample))


class PromptFeed:
    """Prompts for a mesh, with the interface of `data.Feed`; a position is {"prompt": number of the next prompt}."""

    counts = None
    eval_rows: ClassVar[dict[str, Any]] = {}

    def __init__(
        self, prompts: PromptSet, validation: list[Prompt] | None, config: Config, completions_per_step: int, chat: bool
    ):
        """`chat`: whether a chat template renders the prompts."""
        self.documents, self.eval_prompts, self.chat = prompts, validation, chat
        self.rows_per_step = completions_per_step
        self._data, self._group_size = config.data, config.answers_per_prompt
        self._per_step, self._spare = completions_per_step // self._group_size, config.rollout.spare_prompts
        self._ahead = config.rollout.ahead
        completions = math.ceil(config.train.epochs * len(prompts.prompts)) * self._group_size
        at_most = completions_per_step + self._spare * self._group_size
        steps = config.train.max_steps or count_steps(completions, at_most, config.data.drop_last)
        self.total_steps = steps
        self._order = lru_cache(2)(self._make_order)  # a step may have prompts of two epochs

    @property
    def eval_keys(self) -> dict[str, str]:
        """The key of the validation prompts."""
        return {"": PromptSet(self.eval_prompts).key} if self.eval_prompts else {}

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns that any prompt has, of training or validation."""
        return columns_of([*self.documents.prompts, *(self.eval_prompts or ())])

    @property
    def content_key(self) -> str:
        """A hash of the training prompts, as in `data.Feed`."""
        return self.documents.key

    def with_rows(self, change: Any) -> "PromptFeed":
        """Return the feed unchanged: completions are generated in each step, so they cannot be scored beforehand."""
        return self

    def epoch(self, position: dict[str, Any]) -> float:
        """Return the number of passes over the prompts up to a position."""
        return position.get("prompt", 0) / len(self.documents.prompts)

    def batches(self, position: dict[str, Any], steps: int) -> Iterator[tuple[dict[str, Any], PromptBatch]]:
        """Yield (position after a step, its prompts) from a position; a step may span two epochs."""
        first, taken = position.get("prompt", 0), self._per_step + self._spare
        starts = range(first, first + steps * taken, taken)
        for step, start in enumerate(starts):
            later = [self._batch(start) for start in starts[step + 1 : step + 1 + self._ahead]]
            yield {"prompt": start + taken}, self._batch(start)._replace(later=later)

    def _batch(self, start: int) -> PromptBatch:
        prompts = [self._prompt(number) for number in range(start, start + self._per_step + self._spare)]
        return PromptBatch(prompts[: self._per_step], start * self._group_size, prompts[self._per_step :])

    def _prompt(self, number: int) -> Prompt:
        epoch, place = divmod(number, len(self.documents.prompts))
        return self.documents.prompts[self._order(epoch)[place]]

    def _make_order(self, epoch: int) -> np.ndarray:
        count = len(self.documents.prompts)
        return stable_permutation(count, self._data.seed, epoch) if self._data.shuffle else np.arange(count)


def open_prompts(
    config: Config,
    tokenizer: Tokenizer,
    mesh: jax.sharding.Mesh,
    row_tools: RowTools | None = None,
    reader: ImageReader | None = None,
) -> PromptFeed:
    """Open the prompts of a config; reader: of their images.

    Raises UserError as `read_prompts`, and if a step is not made of whole groups.
    """
    train, options = config.train, config.rollout
    completions = train.grad_accum_steps * train.micro_batch_size * data_shards(mesh)
    if completions % config.answers_per_prompt:
        # The smallest multiple of the steps with which a step has whole groups.
        least = train.grad_accum_steps * options.group_size // math.gcd(completions, options.group_size)
        raise UserError(
            f"a step has {completions} completions (train.micro_batch_size={train.micro_batch_size} times "
            f"train.grad_accum_steps={train.grad_accum_steps} on {data_shards(mesh)} data shards), not a multiple of "
            f"rollout.group_size={options.group_size}; change one of these, for example to "
            f"train.grad_accum_steps={least}"
        )
    prompts, validation = open_prompt_sets(config, tokenizer, row_tools, reader)
    feed = PromptFeed(PromptSet(prompts), validation, config, completions, bool(tokenizer.chat_template))
    for line in say_template(tokenizer, config.chat, masks=False):
        log.info("data: %s", line)
    per_step = completions // config.answers_per_prompt
    steps, prompts_of_a_step = format_count(feed.total_steps, "step"), format_count(per_step, "prompt")
    log.info("%s of %s, each completed %s", steps, prompts_of_a_step, format_count(config.answers_per_prompt, "time"))
    return feed


def open_prompt_sets(
    config: Config, tokenizer: Tokenizer, row_tools: RowTools | None = None, reader: ImageReader | None = None
) -> tuple[list[Prompt], list[Prompt] | None]:
    """Return training and validation prompts; None for the latter if the config has none.

    reader: of their images; None: prompts with images are refused. Raises UserError as `read_prompts`.
    """
    data = config.data
    # A prompt and its completion are trained in one row.
    most, skip = data.seq_len - config.rollout.max_new_tokens, data.on_bad_row == "skip"
    share = config.distill.own_answers
    add_answer = AnswerReader(tokenizer, config.chat, data.seq_len) if 0 < share < 1 else None
    images = None if reader is None else ImageMessages(reader, tokenizer)
    shared = {"row_tools": row_tools, "images": images, "most_patches": config.vision.patches_per_row}
    prompts = read_prompts(data.datasets, tokenizer, config.chat, most, skip, add_answer, **shared)
    if data.eval_datasets:
        return prompts, read_prompts(data.eval_datasets, tokenizer, config.chat, most, skip, **shared)
    if not data.validation_split:
        return prompts, None
    count = (
        int(data.validation_split)
        if data.validation_split >= 1
        else max(1, round(data.validation_split * len(prompts)))
    )
    if count >= len(prompts):
        raise UserError(f"data.validation_split = {data.validation_split:g}, but there are only {len(prompts)} prompts")
    # Purpose 3, so that this order differs from the orders of rows and steps with the same seed.
    order = stable_permutation(len(prompts), validation_seed(data), 0, 3)
    held, kept = np.sort(order[:count]), np.sort(order[count:])
    return [prompts[number] for number in kept], [prompts[number] for number in held]
