"""Environments of episodes: objects of the user's classes, as TRL's `environment_factory` makes them, or with a `step`.

    class Game:
        def reset(self, **row): ...                # -> None, text after the last message, or messages
        def guess(self, number: int) -> str: ...   # each other public method is a tool, as in TRL
        def get_reward(self): ...                  # -> the reward of the episode
        def step(self, answer): ...                # or: -> (observation, reward, whether the episode ends)

`step` gets each answer without calls of tools: a message with `content`, and `reasoning_content` and `tool_calls` if
there are any. Its observation is text, which becomes a message of the user, messages, or None. A method `step` with
other parameters is a tool. An attribute `tools` (functions or JSON schemas) is described to the model; their calls go
to `step`. Environments of the package verifiers, and functions that return them, run by `verifiers_environment`.
"""

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from jaxtune.data.chat.messages import Message, check_messages, clip
from jaxtune.data.reading import user_files
from jaxtune.errors import UserError
from jaxtune.rollout.episodes.tools import Tool, describe
from jaxtune.rollout.episodes.verifiers_environment import VerifiersEpisode, is_of_verifiers
from jaxtune.rollout.rewards import Reward

log = logging.getLogger("jaxtune")

OPTION = "rollout.environment"
COLUMN = "environment"
"""The column that selects one of several environments, as in TRL."""
REWARDS = "environment_rewards"
"""The argument with which the rewards of environments come to `own_rewards`."""


class EnvironmentFailed(Exception):
    """An environment failed; its episode has no reward."""


@dataclass(frozen=True)
class EnvironmentClass:
    """Facts about a factory's environments, read from a first one.

    Attributes:
        make: the factory.
        file: of the factory.
        name: of the environments' class.
        methods: names of methods that are tools.
        schemas: their descriptions.
        steps: whether the environments have a `step` that takes an answer.
        rewards: whether they reward their episodes.
        called: whether the model may call tools of theirs.
        pool: environments that no episode uses.
    """

    make: Callable[[], Any]
    file: Path
    name: str
    methods: tuple[str, ...]
    schemas: tuple[dict[str, Any], ...]
    steps: bool
    rewards: bool
    called: bool
    pool: list[Any] = field(default_factory=list)

    def tools(self, environment: Any) -> dict[str, Tool]:
        """Return the tools of an environment, by name."""
        return {
            name: Tool(name, getattr(environment, name), schema) for name, schema in zip(self.methods, self.schemas)
        }


def load_environments(path_and_name: str) -> dict[str | None, EnvironmentClass]:
    """Load FILE.py:NAME, a factory (key None) or a dictionary of factories by the row's column `environment`.

    A first environment of each factory is made, which an episode uses later.

    Raises:
        UserError: NAME is missing; a factory fails; its environments have no `reset`, or tools without a description.
    """
    file, name = user_files.split(path_and_name, OPTION)
    member = getattr(user_files.module_of(path_and_name, OPTION), name, None)
    factories: Mapping[Any, Any] = member if isinstance(member, Mapping) else {None: member}
    # An environment of verifiers is an object that makes episodes, and has no state of its own.
    made = {key: one for key, one in factories.items() if is_of_verifiers(one)}
    factories = {**factories, **{key: lambda one=one: one for key, one in made.items()}}
    if not factories or not all(map(callable, factories.values())):
        raise UserError(
            f"{OPTION}={path_and_name!r}: {file} has no class, function or dictionary of these named {name}"
        )
    return {key: _examine(make, file, name) for key, make in factories.items()}


def own_rewards(classes: Mapping[Any, EnvironmentClass]) -> dict[str, Reward]:
    """Return reward functions, by the names of the classes, that return the rewards of the environments themselves."""

    def reward_of(name: str) -> Callable[..., object]:
        def function(environments: Sequence[Any], environment_rewards: Sequence[float | None], **columns: Any):
            pairs = zip(environments, environment_rewards)
            return [reward if type(environment).__name__ == name else None for environment, reward in pairs]

        return function

    return {one.name: Reward(one.name, one.file, reward_of(one.name)) for one in classes.values() if one.rewards}


def observed_messages(observation: Any) -> list[Message]:
    """Return an observation of `step` as messages. Raises EnvironmentFailed if it is none."""
    if observation is None or (isinstance(observation, str | list) and not observation):
        return []
    try:
        return check_messages(
            [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
        )
    except UserError as error:
        raise EnvironmentFailed(f"step returns an observation that is not text or messages: {error}") from error


def read_step(returned: Any) -> tuple[list[Message], float | None, bool]:
    """Return what a step returned: messages, reward, and whether the episode ends. Raises EnvironmentFailed."""
    if not isinstance(returned, tuple) or len(returned) != 3:
        shown = clip(repr(returned))
        raise EnvironmentFailed(f"step must return (observation, reward, whether the episode ends), not {shown}")
    observation, reward, ends = returned
    try:
        number = None if reward is None else float(reward)
    except (TypeError, ValueError) as error:
        raise EnvironmentFailed(f"step returns the reward {clip(repr(reward))}, which is not a number") from error
    return observed_messages(observation), number, bool(ends)


def _examine(make: Callable[[], Any], file: Path, name: str) -> EnvironmentClass:
    try:
        first = make()
    except Exception as error:  # the factory is the user's program: it can fail in any way
        where = user_files.raised_at(error, file)
        raise UserError(f"{OPTION}: {where}: {name} fails: {type(error).__name__}: {error}") from error
    if is_of_verifiers(first):
        make = partial(VerifiersEpisode, first, f"{OPTION}: {file}")
        first = make()
    where = f"{OPTION}: {file}: {type(first).__name__}"
    # Listed on the class, because listing an object's members evaluates its properties.
    methods = [method for method, _ in inspect.getmembers(type(first), predicate=inspect.isfunction)]
    if "reset" not in methods:
        raise UserError(f"{where} has no method reset(**row), with which an episode begins")
    steps = "step" in methods and list(inspect.signature(first.step).parameters) == ["answer"]
    other = ("reset", "get_reward", *(["step"] if steps else []))
    tools = [describe(getattr(first, one), where) for one in methods if one not in other and not one.startswith("_")]
    return EnvironmentClass(
        make,
        file,
        type(first).__name__,
        tuple(tool.name for tool in tools),
        tuple(tool.schema for tool in tools),
        steps,
        steps or "get_reward" in methods,
        bool(tools or getattr(first, "tools", None)),
        [first],
    )
