"""Rewards of completions, by Python functions of the user, called as TRL calls them.

    function(prompts=[...], completions=[...], completion_ids=[[...], ...], **columns) -> [1.0, None, ...]

Prompts are as in the data: text, or messages. A completion is text, or the assistant's one message after messages; with
tools or an environment it is the messages of an episode, and `environments` has the environment of each completion.
Each other column of the data is a list with a value for each completion. None: no reward for that completion.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType

import numpy as np
from jaxtyping import Float64

from jaxtune.data.chat.messages import Message, clip
from jaxtune.data.formats.prompts import Prompt
from jaxtune.data.reading import user_files
from jaxtune.errors import UserError
from jaxtune.tokenizer_type import Tokenizer

OPTION = "rollout.rewards"
MADE_UP = "The answer is 1."
_OURS = ("prompts", "completions", "completion_ids")


@dataclass(frozen=True)
class Reward:
    """A reward function and its file."""

    name: str
    file: Path
    function: Callable[..., object]

    def error(self, problem: str, where: str | None = None) -> UserError:
        """A UserError about the function; where: the line in its file, if known."""
        return UserError(f"{OPTION}: {where or self.file}: {self.name} {problem}")


def load_rewards(names: Sequence[str]) -> dict[str, Reward]:
    """Load the functions FILE.py:NAME, by NAME. A file is executed once, for all of its functions.

    Raises:
        UserError: a function is missing, cannot be called as above, or has the same name as another one.
    """
    modules: dict[Path, ModuleType] = {}
    rewards: dict[str, Reward] = {}
    for path_and_name in names:
        file, name = user_files.split(path_and_name, OPTION)
        if name in rewards:
            raise UserError(f"{OPTION}: two functions are called {name} ({rewards[name].file} and {file}); rename one")
        if file not in modules:
            modules[file] = user_files.module_of(path_and_name, OPTION)
        reward = Reward(name, file, user_files.find(modules[file], path_and_name, OPTION))
        _check_callable(reward)
        rewards[name] = reward
    return rewards


def rewards_of(
    functions: Mapping[str, Reward],
    prompts: Sequence[str | list[Message]],
    completions: Sequence[str | list[Message]],
    completion_ids: Sequence[Sequence[int]],
    columns: Mapping[str, Sequence[object]],
    more: Mapping[str, Sequence[object]] = MappingProxyType({}),
) -> Float64[np.ndarray, "completions functions"]:
    """The reward of each completion by each function, in the functions' order; NaN for None.

    Args:
        functions: from load_rewards.
        prompts: one a completion, so a prompt is repeated for its group.
        completions: their texts, also after messages; or the messages of episodes.
        completion_ids: their tokens.
        columns: the other columns of the data, a value for each completion.
        more: further arguments, likewise.

    Raises:
        UserError: a function fails, or does not return a finite number or None for each completion.
    """
    if taken := sorted(columns.keys() & {*_OURS, *more}):
        raise UserError(f"{OPTION}: the data has a column {taken[0]!r}, a name that jaxtune passes itself; rename it")
    answers = [
        one if isinstance(prompt, str) or not isinstance(one, str) else [{"role": "assistant", "content": one}]
        for prompt, one in zip(prompts, completions, strict=True)
    ]
    arguments = {"prompts": prompts, "completions": answers, "completion_ids": completion_ids, **columns, **more}
    return np.stack([_values(reward, arguments, len(answers)) for reward in functions.values()], axis=1)


def try_rewards(
    functions: Mapping[str, Reward],
    prompt: Prompt,
    tokenizer: Tokenizer,
    count: int,
    more: Mapping[str, Sequence[object]] = MappingProxyType({}),
    chat: bool = False,
    which: str = "first prompt",
) -> None:
    """Call each function once, with `count` made-up completions of a prompt, before anything is compiled.

    more: further arguments. chat: whether completions are messages, also of a prompt that is a text. which: the name of
    the prompt for errors.

    Raises:
        UserError: as `rewards_of`.
    """
    columns = {name: [value] * count for name, value in prompt.sample.items()}
    tokens = tokenizer(MADE_UP, add_special_tokens=False)["input_ids"]
    made_up: str | list[Message] = [{"role": "assistant", "content": MADE_UP}] if chat else MADE_UP
    try:
        rewards_of(functions, [prompt.given] * count, [made_up] * count, [tokens] * count, columns, more)
    except UserError as error:
        tried = f"tried before the first step, on the {which} with {count} completions {MADE_UP!r}"
        raise UserError(f"{error} ({tried})") from error


def total(
    values: Float64[np.ndarray, "completions functions"], weights: Sequence[float]
) -> Float64[np.ndarray, " completions"]:
    """The weighted sum of each completion's rewards; NaN if no function gives one, as in TRL."""
    silent = np.isnan(values).all(axis=1)
    return np.where(silent, np.nan, np.nan_to_num(values, nan=0.0) @ np.asarray(weights, np.float64))


def _check_callable(reward: Reward) -> None:
    """Raise UserError, before anything is generated, if the function is async or does not take every column."""
    if inspect.iscoroutinefunction(reward.function) or inspect.iscoroutinefunction(type(reward.function).__call__):
        raise reward.error("is async, which is not supported; write it with `def`")
    kinds = {parameter.kind for parameter in inspect.signature(reward.function).parameters.values()}
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        raise reward.error(
            f"must take **columns as its last parameter: it is passed {', '.join(_OURS)} and every other column of "
            "the data by name"
        )


def _values(
    reward: Reward, arguments: Mapping[str, Sequence[object]], count: int
) -> Float64[np.ndarray, " completions"]:
    try:
        # Copy the lists: a function that changes its arguments must not affect the next function.
        returned = reward.function(**{name: list(column) for name, column in arguments.items()})
        values = (
            list(returned)
            if isinstance(returned, Iterable) and not isinstance(returned, str | bytes | Mapping)
            else None
        )
    except (Exception, SystemExit) as error:  # the function is the user's program: it can fail in any way
        where = user_files.raised_at(error, reward.file)
        problem = f"fails: {type(error).__name__}: {error}"
        if where == str(reward.file) and isinstance(error, TypeError):  # the call itself failed
            problem += f" (it was passed {', '.join(arguments)})"
        raise reward.error(problem, where) from error
    if values is None:
        raise reward.error(f"must return a list with a number for each completion, not {clip(repr(returned))}")
    if len(values) != count:
        raise reward.error(f"returned {len(values)} values for {count} completions; it must return one for each")
    return np.array([_number(reward, index, value) for index, value in enumerate(values)], np.float64)


def _number(reward: Reward, index: int, value: object) -> float:
    if value is None:
        return math.nan
    try:
        number = None if isinstance(value, str | bytes) else float(value)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError, OverflowError):
        number = None
    if number is None or not math.isfinite(number):
        raise reward.error(
            f"returned {clip(repr(value))} for completion {index}; it must be a finite number, or None for no reward"
        )
    return number
