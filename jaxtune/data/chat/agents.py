"""Write tools, tool calls and results as text, for chat templates that do not support tools (chat.agent_template)."""

import json
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any, Literal

from jaxtune.data.chat.messages import Message

Style = Literal["hermes", "react", "toolbench"]

# The prompts of Hermes, ReAct and ToolBench word for word, mistakes included: models know them in this wording.
_HERMES = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""

_REACT = """\
Answer the following questions as best you can. You have access to the following tools:

{tools}

Use the following format:

Question: the input question you must answer
Thought: you should always think about what to do
Action: the action to take, should be one of [{names}]
Action Input: the input to the action
Observation: the result of the action
... (this Thought/Action/Action Input/Observation can be repeated zero or more times)
Thought: I now know the final answer
Final Answer: the final answer to the original input question

Begin!"""

_TOOLBENCH = """\
You can use many tools(functions) to do the following task.
First I will give you the task description, and your task start.
At each step, you need to give your thought to analyze the status now and what to do next, with a function call to \
actually execute your step. Your output should follow this format:
Thought:
Action:
Action Input:

After the call, you will get the call result, and you are now in a new state.
Then you will analyze your status now, then decide what to do next...
After many (Thought-call) pairs, you finally perform the task, then you can give your final answer.
Remember:
1.the state change is irreversible, you can't go back to one of the former state, if you want to restart the task, say \
"I give up and restart".
2.All the thought is short, at most in 5 sentence.
3.You can do more then one try, so if your plan is to continuously try some conditions, you can do one of the \
conditions per try.
Let's Begin!
Task description: You should use functions to help handle the real time user queries. Remember:
1.ALWAYS call "Finish" function at the end of the task. And the final answer should contain enough information to \
show to the user,If you can't handle the task, or you find that function calls always fail(the function is not \
valid now), use function Finish->give_up_and_restart.
2.Do not use origin tool names, use only subfunctions' names.
Specifically, you have access to the following APIs: {tools}"""


def as_text(style: Style, messages: list[Message], tools: list[Any] | None) -> list[Message]:
    """Return the conversation with tools, calls and results as text, without messages of role 'tool'.

    The tools are appended to the system prompt, and a turn's calls to its content. Consecutive results become one
    message of role 'user'.
    """
    plain = [message for run in _runs(messages) for message in _plain(style, run)]
    if not tools:
        return plain
    functions = [tool.get("function", tool) for tool in tools]  # with or without {"type": "function"} around
    described = {
        "hermes": ("\n".join(map(_json, tools)), _HERMES),
        "react": ("\n\n".join(map(_json, functions)), _REACT),
        "toolbench": (_json(functions), _TOOLBENCH),
    }
    listed, prompt = described[style]
    text = prompt.format(tools=listed, names=",".join(function["name"] for function in functions))
    if plain[0]["role"] != "system":
        return [{"role": "system", "content": text}, *plain]
    return [plain[0] | {"content": f"{plain[0]['content']}\n\n{text}"}, *plain[1:]]


def _plain(style: Style, run: list[Message]) -> Iterator[Message]:
    """Yield the message of a run: one message of any other role, or consecutive results."""
    first = run[0]
    if first["role"] == "tool":
        form = {"hermes": "<tool_response>\n{}\n</tool_response>", "react": "Observation: {}", "toolbench": "{}"}[style]
        content = "\n".join(form.format(message["content"]) for message in run)
        yield {"role": "user", "content": content, "train": any(message.get("train") for message in run)}
    elif first.get("tool_calls"):
        calls = [_call(style, call.get("function", call)) for call in first["tool_calls"]]
        message = {key: value for key, value in first.items() if key != "tool_calls"}
        yield message | {"content": "\n".join(filter(None, [_with_thought(style, first["content"]), *calls]))}
    else:
        yield first


def _runs(messages: Iterable[Message]) -> Iterator[list[Message]]:
    """Yield runs of messages: consecutive results together, every other message by itself."""
    for is_result, group in groupby(messages, lambda message: message["role"] == "tool"):
        run = list(group)
        yield from [run] if is_result else ([message] for message in run)


def _with_thought(style: Style, content: str) -> str:
    return f"Thought: {content}" if style == "toolbench" and not content.startswith("Thought:") else content


def _call(style: Style, function: dict[str, Any]) -> str:
    arguments = function.get("arguments", {})
    if style == "hermes":
        return f"<tool_call>\n{_json({'name': function['name'], 'arguments': arguments})}\n</tool_call>"
    return f"Action: {function['name']}\nAction Input: {_json(arguments)}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
