"""GRPO of a Qwen3 chat model that may call a calculator, with LoRA; one GPU.

Hardware: a GPU of 24 GB or more (RTX 4090); 8 rows of 1024 tokens: 9.6 GB on an H100, according to the compiler.

    python -m jaxtune.train --config=qwen_grpo_tools
    python -m jaxtune.train --config=qwen_grpo_tools:PATH_OR_HUB_ID --config.rollout.tools=my_tools.py:search

A completion is an episode: the model writes, a tool answers, the model continues. Tokens that tools write are context
and are never trained. Name your own functions with rollout.tools, or an environment with rollout.environment. Watch
tools/call_frequency, the calls of a completion, and tools/failure_frequency, the share of calls that fail.
"""

import ast
import operator

from jaxtune.recipes import qwen_grpo

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
}
LONGEST = 200


def get_config(model="Qwen/Qwen3-0.6B"):
    """Return the config for a model: a Hugging Face folder or hub id."""
    config = qwen_grpo.get_config(model)
    config.rollout.rewards = ("jaxtune.recipes.qwen_grpo_tools:right",)
    config.rollout.tools = ("jaxtune.recipes.qwen_grpo_tools:calculate",)
    config.rollout.max_turns = 6
    return config


def calculate(expression: str) -> str:
    """Compute the value of an arithmetic expression.

    Args:
        expression: Numbers, parentheses and the operators + - * / // %, such as "(3 + 4) * 2".
    """
    if len(expression) > LONGEST:
        raise ValueError(f"an expression has at most {LONGEST} characters")
    return f"{_value(ast.parse(expression.strip(), mode='eval').body):.12g}"


def right(completions, answer, **columns):
    """Return 1 if the last number of an episode's last answer equals the answer in the data, else 0."""
    last = [[one[-1]] for one in completions]
    return qwen_grpo.right(last, answer)


def _value(node):
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.operand))
    raise ValueError("only numbers, parentheses and + - * / // % are known")
