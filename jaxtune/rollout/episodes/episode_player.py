"""Episodes: completions of several turns, in which tools and environments answer the model.

An episode is one completion. The tokens that the model samples are never tokenised again: the tokens of an observation,
as the chat template writes them after the assistant's turn, are appended to them. Only sampled tokens are trained. The
limits and the order of things are those of TRL's GRPOTrainer with `tools` and `environment_factory`.
"""

import asyncio
import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Int16

from jaxtune.config.schema import Config
from jaxtune.data.chat.chat_template import ChatTemplate
from jaxtune.data.chat.messages import Message, check_messages
from jaxtune.data.formats.prompts import Prompt
from jaxtune.data.reading import user_files
from jaxtune.errors import UserError
from jaxtune.inference.generation import Completion
from jaxtune.parallel import multihost
from jaxtune.rollout.completers import Complete
from jaxtune.rollout.episodes.answer_parser import AnswerParser
from jaxtune.rollout.episodes.calls import Caller
from jaxtune.rollout.episodes.environments import EnvironmentClass, EnvironmentFailed, read_step
from jaxtune.rollout.episodes.observations import Observations
from jaxtune.rollout.episodes.toolbox import Toolbox
from jaxtune.rollout.episodes.tools import Tool, describe, run_tool
from jaxtune.tokenizer_type import Tokenizer

log = logging.getLogger("jaxtune")


@dataclass
class Episode:
    """An episode. Processes share its tokens; only process 0 has its environment and its messages.

    Attributes:
        prompt: with what the environment's reset adds.
        number: of the completion, which selects its random numbers.
        tokens: of the completion, sampled and observed.
        observed: whether each token is observed.
        log_probs: of each token, 0 for observed ones, if they are known.
        entropies: of sampled tokens, if they are known.
        routed_experts: as in `Completion`; each token's from the turn that read it first.
        finished: whether the last turn ended before its limit.
        open: whether the model has another turn.
        failed: whether the environment failed.
        kind: the class of the environment; None: no environment.
        environment: the environment.
        tools: that the episode may call, by name.
        messages: of the model, its tools and its environment.
        step_rewards: of the environment's steps.
        reward: of the environment; None: none.
        turns, calls, failed_calls: their numbers.
        reply: tokens to observe; None: the episode ends.
    """

    prompt: Prompt
    number: int
    tokens: list[int] = field(default_factory=list)
    observed: list[bool] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    routed_experts: Int16[np.ndarray, "tokens mixtures active"] | None = None
    finished: bool = False
    open: bool = True
    failed: bool = False
    kind: EnvironmentClass | None = None
    environment: Any = None
    tools: dict[str, Tool] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    step_rewards: list[float] = field(default_factory=list)
    reward: float | None = None
    turns: int = 0
    calls: int = 0
    failed_calls: int = 0
    reply: list[int] | None = None

    @property
    def completion(self) -> Completion:
        """The completion; nothing of a failed episode is trained."""
        observed = [True] * len(self.tokens) if self.failed else self.observed
        return Completion(self.tokens, self.finished, self.log_probs, self.entropies, observed, self.routed_experts)

    def sample(self, turn: Completion) -> None:
        """Append a turn of the model."""
        self.turns += 1
        self.finished = turn.finished
        self.tokens += turn.tokens
        self.observed += [False] * len(turn.tokens)
        self.log_probs += turn.log_probs
        self.entropies += turn.entropies
        if self.routed_experts is None or turn.routed_experts is None:
            self.routed_experts = turn.routed_experts
        else:
            new = turn.routed_experts[len(self.routed_experts) :]
            self.routed_experts = np.concatenate([self.routed_experts, new])

    def observe(self, tokens: Sequence[int], scored: bool) -> None:
        """Append an observation; scored: whether tokens have log-probabilities."""
        self.finished = False
        self.tokens += tokens
        self.observed += [True] * len(tokens)
        self.log_probs += [0.0] * len(tokens) if scored else []


# (weights, the prompt of each completion, the number of each) -> episodes.
Play = Callable[[Any, list[Prompt], Sequence[int]], list[Episode]]


class EpisodePlayer:
    """Plays the episodes of a batch turn by turn: one call of `complete` for all that are open."""

    def __init__(
        self, config: Config, tokenizer: Tokenizer, stops: frozenset[int], toolbox: Toolbox, complete: Complete
    ):
        """Read the chat template.

        Args:
            config: the sections chat, data and rollout.
            tokenizer: the model's tokenizer.
            stops: tokens that end an answer.
            toolbox: tools and environments.
            complete: samples turns.

        Raises:
            UserError: the chat template does not write calls or results of tools, or in an unknown form.
        """
        self._options, self._most_tokens = config.rollout, config.data.seq_len
        self._toolbox, self._complete, self._stops = toolbox, complete, stops
        self._template = ChatTemplate(tokenizer, chat=config.chat)
        called = bool(toolbox.tools) or any(one.called for one in toolbox.environments.values())
        self._parse = AnswerParser(tokenizer, self._template, called)
        self._observations = Observations(tokenizer, self._template, stops)
        for role, is_written in (("tool", called), ("user", any(one.steps for one in toolbox.environments.values()))):
            if is_written:
                self._observations.check(role)
        self._caller = Caller(config.rollout.call_seconds)

    def __call__(self, weights: Any, prompts: list[Prompt], numbers: Sequence[int]) -> list[Episode]:
        """Play an episode of each prompt; `weights` and `numbers` as in `Complete`.

        An environment that fails costs its episode, whose `failed` is then true on all processes. Raises UserError as
        `complete`.
        """
        episodes = [Episode(prompt, number) for prompt, number in zip(prompts, numbers)]
        self._begin(episodes)
        most = self._options.max_turns or math.inf
        while open_ones := [episode for episode in episodes if episode.open]:
            turns = self._complete(
                weights,
                [[*episode.prompt.tokens, *episode.tokens] for episode in open_ones],
                [episode.number for episode in open_ones],
                [len(episode.tokens) for episode in open_ones],
            )
            for episode, turn in zip(open_ones, turns):
                episode.sample(turn)
            if multihost.is_main():
                jobs = [self._react(one, turn, one.turns >= most) for one, turn in zip(open_ones, turns)]
                self._caller.run_all(jobs)
            for episode, reply in zip(open_ones, _from_main([episode.reply for episode in open_ones])):
                episode.open = reply is not None
                if reply is not None:
                    episode.observe(reply, bool(episode.log_probs))
                    episode.open = len(episode.tokens) < self._options.max_new_tokens
        self._end(episodes)
        return episodes

    def _begin(self, episodes: list[Episode]) -> None:
        """Reset the environments; an episode whose environment fails, or writes a longer prompt than fits, is over."""
        if multihost.is_main():
            for episode in episodes:
                kind = episode.kind = self._toolbox.environment_of(episode.prompt.sample)
                if kind is not None and kind.pool:
                    episode.environment = kind.pool.pop(0)
            self._caller.run_all([self._reset(episode) for episode in episodes])
        prompts = _from_main([None if episode.failed else episode.prompt.tokens for episode in episodes])
        for episode, tokens in zip(episodes, prompts):
            episode.failed, episode.open = tokens is None, tokens is not None
            if tokens is not None:
                episode.prompt = episode.prompt._replace(tokens=tokens)

    def _end(self, episodes: list[Episode]) -> None:
        """Take the environments' rewards; environments that did not fail serve later episodes."""
        if multihost.is_main():
            self._caller.run_all([self._reward(episode) for episode in episodes])
            for episode in episodes:
                if episode.kind is not None and not episode.failed:
                    episode.kind.pool.append(episode.environment)
        for episode, failed in zip(episodes, _from_main([episode.failed for episode in episodes])):
            episode.failed = failed

    async def _reset(self, episode: Episode) -> None:
        episode.tools = dict(self._toolbox.tools)
        kind, prompt = episode.kind, episode.prompt
        if kind is None:
            return
        row = self._toolbox.row_of(prompt.sample)
        try:
            if episode.environment is None:
                episode.environment = await self._of_user(kind, kind.make)
            episode.tools |= kind.tools(episode.environment)
            given = await self._of_user(kind, episode.environment.reset, **row)
            more = getattr(episode.environment, "tools", None)
            more = more if isinstance(more, list | tuple) else ()
            if given is not None or more:
                prompt = self._with_reset(prompt, given, more)
            if len(prompt.tokens) + self._options.max_new_tokens > self._most_tokens:
                raise EnvironmentFailed(
                    f"after reset the prompt has {len(prompt.tokens)} tokens, too many for data.seq_len = "
                    f"{self._most_tokens} less rollout.max_new_tokens"
                )
            episode.prompt = prompt  # not of an episode that failed: other processes have the data's prompt
        except (EnvironmentFailed, UserError) as error:
            _fail(episode, error)

    def _with_reset(self, prompt: Prompt, given: Any, more: Sequence[Any]) -> Prompt:
        """Return the prompt with what `reset` returned, and with the environment's own descriptions of tools."""
        messages, tools = list(prompt.messages), list(prompt.tools)
        tools += [describe(tool, "rollout.environment: tools").schema if callable(tool) else tool for tool in more]
        shown: str | list[Message] = prompt.given
        if isinstance(given, str):
            messages[-1] = messages[-1] | {"content": messages[-1]["content"] + given}
            shown = prompt.given + given if isinstance(prompt.given, str) else messages
        elif given is not None:
            messages = shown = check_messages(given)
        tokens = self._template.prompt(messages, tools or None)
        return prompt._replace(given=shown, tokens=tokens, messages=messages, tools=tools)

    async def _react(self, episode: Episode, turn: Completion, last: bool) -> None:
        """Run the calls of an answer, or let the environment step; set `reply`."""
        episode.reply = None
        stopped = bool(turn.tokens) and turn.tokens[-1] in self._stops
        before = [*episode.prompt.tokens, *episode.tokens[: len(episode.tokens) - len(turn.tokens)]]
        answer = self._parse(turn.tokens, stopped, before, episode.prompt.tools)
        if episode.prompt.begun:
            answer["content"] = episode.prompt.begun + answer["content"]
        episode.messages.append(answer)
        calls, kind = answer.get("tool_calls") or [], episode.kind
        steps = kind if kind is not None and kind.steps else None
        known = any(call.get("function", call)["name"] in episode.tools for call in calls)
        try:
            if calls and (known or not steps):
                # As in TRL: a call that no turn follows is not run; one in a cut answer is, but its result never fits.
                observed = [] if last else await self._run_calls(episode, calls)
            elif steps:
                returned = await self._of_user(steps, episode.environment.step, answer)
                observed, reward, ends = read_step(returned)
                episode.step_rewards += [] if reward is None else [reward]
                observed = [] if ends or last or not turn.finished else observed
            else:
                observed = []
            reply = self._observations.tokens(observed, stopped) if observed else None
        except (EnvironmentFailed, UserError) as error:
            return _fail(episode, error)
        if reply is not None and len(episode.tokens) + len(reply) <= self._options.max_new_tokens:
            episode.messages += observed
            episode.reply = reply

    async def _run_calls(self, episode: Episode, calls: Sequence[Message]) -> list[Message]:
        results = await asyncio.gather(*(run_tool(self._caller, episode.tools, call) for call in calls))
        episode.calls += len(results)
        episode.failed_calls += sum(failed for _, failed in results)
        return [message for message, _ in results]

    async def _reward(self, episode: Episode) -> None:
        """Set the reward: of `get_reward`, else the sum of the steps' rewards."""
        kind = episode.kind
        if kind is None or not kind.rewards or episode.failed:
            return
        try:
            reward = sum(episode.step_rewards) if episode.step_rewards else None
            if hasattr(episode.environment, "get_reward"):
                reward = await self._of_user(kind, episode.environment.get_reward)
            episode.reward = None if reward is None else float(reward)
            if episode.reward is not None and not math.isfinite(episode.reward):
                raise EnvironmentFailed(f"{kind.name} has the reward {reward!r}, which is not finite")
        except (EnvironmentFailed, TypeError, ValueError) as error:
            _fail(episode, error)

    async def _of_user(self, kind: EnvironmentClass, function: Callable[..., Any], /, *args: Any, **row: Any) -> Any:
        """Call a method of an environment. Raises EnvironmentFailed if it fails or takes too long."""
        try:
            return await self._caller.call(function, *args, **row)
        except Exception as error:  # the environment is the user's program: it can fail in any way
            name = getattr(function, "__name__", kind.name)
            where = user_files.raised_at(error, kind.file)
            raise EnvironmentFailed(f"{where}: {kind.name}.{name}: {type(error).__name__}: {error}") from error


def _fail(episode: Episode, error: Exception) -> None:
    episode.failed, episode.reply = True, None
    log.warning("rollout.environment: %s; its episode is left out", error)


def _from_main(values: list[Any]) -> list[Any]:
    """Return the values of process 0, which JSON can hold, on all processes."""
    if jax.process_count() == 1:
        return values
    written = np.frombuffer(json.dumps(values).encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.array(len(written), np.int32)))
    whole = np.zeros(size, np.uint8)
    if multihost.is_main():
        whole[:] = written
    return json.loads(bytes(multihost_utils.broadcast_one_to_all(whole)))
