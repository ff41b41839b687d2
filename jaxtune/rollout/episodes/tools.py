"""Tools that a model may call: Python functions of the user, described and called as TRL describes and calls them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxtune.data.chat.messages import Message
from jaxtune.data.reading import user_files
from jaxtune.errors import UserError
from jaxtune.rollout.episodes.calls import Caller

OPTION = "rollout.tools"


class Tool(NamedTuple):
    """A function that the model may call.

    Attributes:
        name: its name in calls.
        function: the function, asynchronous or not.
        schema: the description that chat templates write: name, text, and the JSON schema of the arguments.
    """

    name: str
    function: Callable[..., Any]
    schema: dict[str, Any]


def load_tools(names: Sequence[str]) -> list[Tool]:
    """Load the functions FILE.py:NAME.

    Raises:
        UserError: a function is missing, is not documented as `describe` needs it, or has the name of another one.
    """
    tools: dict[str, Tool] = {}
    for path_and_name in names:
        file, name = user_files.split(path_and_name, OPTION)
        if name in tools:
            raise UserError(f"{OPTION}: two functions are called {name}; rename one")
        tools[name] = describe(user_files.load(path_and_name, OPTION), f"{OPTION}: {file}")
    return list(tools.values())


def describe(function: Callable[..., Any], where: str) -> Tool:
    """Return the tool of a function, with the description that transformers makes of it.

    Raises:
        UserError: an argument lacks a type hint, or a line under `Args:` in the docstring (Google's style).
    """
    from transformers.utils.chat_template_utils import get_json_schema  # seconds to import

    name = getattr(function, "__name__", type(function).__name__)
    try:
        return Tool(name, function, get_json_schema(function))
    except Exception as error:  # the function is the user's: its hints and its docstring can be anything
        raise UserError(
            f"{where}: {name} cannot be described to the model: {error}; a tool needs a docstring with a line for each "
            "argument under `Args:`, and a type hint for each"
        ) from error


async def run_tool(caller: Caller, tools: Mapping[str, Tool], call: Mapping[str, Any]) -> tuple[Message, bool]:
    """Run a parsed call; return the tool's message and whether the call failed.

    A call of an unknown tool, with arguments that the function does not take, or of a function that fails or takes too
    long gives a message {'error': ...}, as in TRL: the model can learn from it.
    """
    function = call.get("function", call)
    name, arguments = function["name"], function.get("arguments") or {}
    failed = False
    try:
        if name not in tools:
            raise ValueError(f"Tool {name} not found.")
        if not isinstance(arguments, dict):
            raise TypeError(f"arguments must be an object, not {type(arguments).__name__}")
        result = await caller.call(tools[name].function, **arguments)
    except Exception as error:  # the tool is the user's program: it can fail in any way
        result, failed = {"error": str(error)}, True
    return {"role": "tool", "name": name, "content": str(result)}, failed
