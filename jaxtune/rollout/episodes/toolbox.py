"""The user's functions of a rollout: rewards, tools and environments, loaded and tried before anything is compiled."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxtune.config.schema import Config
from jaxtune.data.formats.prompts import Prompt, RowTools, Sample
from jaxtune.data.reading import user_files
from jaxtune.errors import UserError
from jaxtune.rollout.episodes.calls import Caller
from jaxtune.rollout.episodes.environments import COLUMN, REWARDS, EnvironmentClass, load_environments, own_rewards
from jaxtune.rollout.episodes.tools import Tool, load_tools
from jaxtune.rollout.rewards import Reward, load_rewards, try_rewards
from jaxtune.tokenizer_type import Tokenizer


class Toolbox(NamedTuple):
    """Tools and environments of episodes.

    Attributes:
        tools: functions that every episode may call, by name.
        environments: as `load_environments` returns them; empty without rollout.environment.
    """

    tools: dict[str, Tool]
    environments: Mapping[str | None, EnvironmentClass]

    def environment_of(self, sample: Sample) -> EnvironmentClass | None:
        """Return the class of a row's environment. Raises UserError if the row names an unknown one."""
        if not self.environments or None in self.environments:
            return self.environments.get(None)
        if (name := sample.get(COLUMN)) not in self.environments:
            known = ", ".join(map(str, self.environments))
            raise UserError(f"column {COLUMN!r} is {name!r}, which rollout.environment does not have: {known}")
        return self.environments[name]

    def row_of(self, sample: Sample) -> dict[str, Any]:
        """Return the arguments of `reset`: all columns but the one that selects the environment, as in TRL."""
        return {name: value for name, value in sample.items() if name != COLUMN or None in self.environments}

    def schemas(self, sample: Sample) -> list[dict[str, Any]]:
        """Return the descriptions of a row's tools. Raises UserError as `environment_of`."""
        environment = self.environment_of(sample)
        return [tool.schema for tool in self.tools.values()] + list(environment.schemas if environment else ())


class RolloutFunctions(NamedTuple):
    """The user's functions of a rollout.

    Attributes:
        rewards: reward functions by name, environments last.
        toolbox: tools and environments; None without both.
    """

    rewards: dict[str, Reward]
    toolbox: Toolbox | None

    @property
    def row_tools(self) -> RowTools | None:
        """What prompts need to know about tools and environments."""
        return None if self.toolbox is None else RowTools(self.toolbox.schemas, bool(self.toolbox.environments))


def load_functions(config: Config) -> RolloutFunctions:
    """Load the functions that section `rollout` names.

    Environments that reward their episodes are reward functions too, with the name of their class, as in TRL.
    rollout.rewards may name the environment itself, if there is no other reward.

    Raises:
        UserError: as `load_rewards`, `load_tools` and `load_environments`.
    """
    options = config.rollout
    rewards = load_rewards([name for name in options.rewards if name != options.environment])
    environments = {} if options.environment is None else load_environments(options.environment)
    owned = own_rewards(environments)
    if options.environment in options.rewards and not owned:
        raise UserError(
            f"rollout.rewards names the environment {options.environment}, which has neither get_reward() nor "
            "step(answer)"
        )
    if again := sorted(rewards.keys() & owned.keys()):
        raise UserError(f"rollout.rewards: a function has the name of the environment's class {again[0]}; rename it")
    tools = {tool.name: tool for tool in load_tools(options.tools)}
    for environment in environments.values():
        if again := sorted(tools.keys() & set(environment.methods)):
            raise UserError(f"rollout.tools: {again[0]} is also a method of {environment.name}; rename one")
    return RolloutFunctions(rewards | owned, Toolbox(tools, environments) if tools or environments else None)


def try_functions(
    config: Config,
    functions: RolloutFunctions,
    prompt: Prompt,
    tokenizer: Tokenizer,
    columns: Sequence[str] = (),
    which: str = "first prompt",
) -> None:
    """Call each reward function with made-up completions of a prompt, after resetting the environment of its row.

    columns: of all prompts; functions get None for those that this one lacks. which: its name for errors.

    Raises:
        UserError: as `rewards_of`; the environment fails.
    """
    whole = prompt._replace(sample=dict.fromkeys(columns) | dict(prompt.sample))
    count = config.rollout.group_size
    toolbox = functions.toolbox
    if toolbox is None:
        return try_rewards(functions.rewards, whole, tokenizer, count, which=which)
    more: dict[str, list[Any]] = {}
    if (kind := toolbox.environment_of(prompt.sample)) is not None:
        environment, caller = kind.pool[0], Caller(config.rollout.call_seconds)
        problems: list[Exception] = []

        async def reset() -> None:
            try:
                await caller.call(environment.reset, **toolbox.row_of(prompt.sample))
            except Exception as error:  # the environment is the user's program: it can fail in any way
                problems.append(error)

        caller.run_all([reset()])
        for error in problems:
            where = user_files.raised_at(error, kind.file)
            raise UserError(
                f"rollout.environment: {where}: {kind.name}.reset fails: {type(error).__name__}: {error} (tried before "
                f"the first step, on the {which})"
            ) from error
        more = {"environments": [environment] * count, REWARDS: [None] * count}
    try_rewards(functions.rewards, whole, tokenizer, count, more, chat=True, which=which)
