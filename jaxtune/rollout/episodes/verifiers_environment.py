"""Environments of the package `verifiers` below 0.4: they ask a client for answers, which is the model here."""

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

from jaxtune.data.chat.messages import Message
from jaxtune.errors import UserError

Asked = tuple[list[Message], list[dict[str, Any]]]  # a conversation that wants an answer, and descriptions of tools


def is_of_verifiers(environment: object) -> bool:
    """Whether an object's class, or a class that it inherits from, is one of the package verifiers."""
    return any(base.__module__.partition(".")[0] == "verifiers" for base in type(environment).__mro__)


class VerifiersEpisode:
    """An episode of an environment of verifiers, with the methods of the environments of `rollout.environment`.

    The environment's own loop runs in a task, from its first question to its last. It must continue a conversation and
    not rewrite it, because the tokens of an episode are only appended to.
    """

    def __init__(self, environment: Any, where: str):
        """Check the environment; `where` begins messages.

        Raises:
            UserError: it is of another version of verifiers, or its rewards compare the completions of a group.
        """
        if not all(hasattr(environment, name) for name in ("rollout", "rubric", "tool_defs")):
            raise UserError(
                f"{where}: {type(environment).__name__} is not a verifiers.Environment; environments of verifiers 0.4 "
                "run programs of their own and are not supported: pip install 'jaxtune[verifiers]'"
            )
        if environment.rubric.has_group_rewards:
            raise UserError(
                f"{where}: the rubric has a reward function of whole groups, which is not supported; name one of TRL's "
                "shape in rollout.rewards instead"
            )
        self._environment = environment
        self._client = _make_client(self)
        self._rollout: asyncio.Future[Any] | None = None
        self.tools = [_describe(tool) for tool in environment.tool_defs or ()]

    async def reset(self, /, **row: Any) -> list[Message]:
        """Begin an episode of a row of the environment's dataset; return its first messages, and set `tools`."""
        if self._rollout is not None:  # of an episode that failed, or that was only tried
            self._rollout.cancel()
        self._asked: asyncio.Queue[Asked] = asyncio.Queue()
        self._answers: asyncio.Queue[Message | None] = asyncio.Queue()
        self._conversation: list[Message] = []
        rollout = self._environment.rollout({"example_id": 0} | row, self._client, "policy", {})
        running = self._rollout = asyncio.ensure_future(rollout)
        asked = await self._next()
        if asked is None:
            raise ValueError(f"the episode ended before its first answer: {running.result().get('error')!r}")
        self._conversation, self.tools = asked
        return self._conversation

    async def step(self, answer: Message) -> tuple[list[Message] | None, None, bool]:
        """Give the environment an answer; return what it says to it, no reward, and whether the episode ends."""
        before = len(self._conversation) + 1
        self._conversation = [*self._conversation, answer]
        self._answers.put_nowait(answer)
        asked = await self._next()
        if asked is None:
            return None, None, True
        if [_parts_known_to_both(message) for message in asked[0][:before]] != [
            _parts_known_to_both(message) for message in self._conversation
        ]:
            raise ValueError("the environment rewrites earlier messages; tokens of an episode are only appended to")
        self._conversation = asked[0]
        return asked[0][before:], None, False

    async def get_reward(self) -> float:
        """Return the rubric's reward. An episode with an open question ends as one whose prompt is too long."""
        assert self._rollout is not None
        self._answers.put_nowait(None)
        state = await self._rollout
        if state.get("error") is not None:
            raise state["error"]
        await self._environment.rubric.score_rollout(state)
        await self._environment.rubric.cleanup(state)
        return state["reward"]

    async def _answer(self, asked: Asked) -> Message | None:
        """Ask for an answer, in the task of the environment; None: there will be none."""
        self._asked.put_nowait(asked)
        return await self._answers.get()

    async def _next(self) -> Asked | None:
        """Wait for the environment's next question; None: its episode has ended. Raises what it raises."""
        assert self._rollout is not None
        asked = asyncio.ensure_future(self._asked.get())
        try:
            done, _ = await asyncio.wait({asked, self._rollout}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:  # it took longer than rollout.call_seconds
            self._rollout.cancel()
            asked.cancel()
            raise
        if asked in done:
            return asked.result()
        asked.cancel()
        self._rollout.result()
        return None


def _make_client(episode: VerifiersEpisode) -> Any:
    """Return a client whose answers come from `episode.step`."""
    from verifiers.clients import Client  # pyright: ignore[reportMissingImports]
    from verifiers.errors import OverlongPromptError  # pyright: ignore[reportMissingImports]
    from verifiers.types import Response, ResponseMessage, ToolCall  # pyright: ignore[reportMissingImports]

    class Policy(Client):
        async def get_response(self, prompt: Any, model: str, *, tools: Any = None, **more: Any) -> Any:
            names: dict[str, str] = {}
            messages = [_plain(message, names) for message in prompt]
            answer = await episode._answer((messages, [_describe(tool) for tool in tools or ()]))
            if answer is None:
                raise OverlongPromptError("no further answer")
            functions = [call.get("function", call) for call in answer.get("tool_calls") or ()]
            calls = [
                ToolCall(id=f"call_{len(names) + n}", name=one["name"], arguments=json.dumps(one["arguments"]))
                for n, one in enumerate(functions)
            ]
            message = ResponseMessage(
                content=answer["content"],
                reasoning_content=answer.get("reasoning_content"),
                tool_calls=calls or None,
                finish_reason="tool_calls" if calls else "stop",
                is_truncated=False,
            )
            return Response(id="", created=int(time.time()), model=model, message=message)

    Policy.__abstractmethods__ = frozenset()  # environments call only get_response
    return Policy(None)


def _plain(message: Any, names: dict[str, str]) -> Message:
    """Return a message of verifiers as a dictionary.

    names: the names of earlier calls by their ids, to which those in the message are added.
    """
    given = message.model_dump(exclude_none=True)
    plain: Message = {"role": given["role"], "content": given.get("content", "")}
    if given["role"] == "tool":
        plain["name"] = names.get(given["tool_call_id"], "tool")
    if calls := given.get("tool_calls"):
        names |= {call["id"]: call["name"] for call in calls}
        functions = [{"name": call["name"], "arguments": json.loads(call["arguments"])} for call in calls]
        plain["tool_calls"] = [{"type": "function", "function": function} for function in functions]
    return plain


def _parts_known_to_both(message: Message) -> Sequence[Any]:
    """Return the parts of a message that both sides know."""
    return message["role"], message["content"], message.get("tool_calls") or []


def _describe(tool: Any) -> dict[str, Any]:
    """Return the description of a tool that chat templates write."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}
