"""Tools in whole runs: a model learns to call the calculator of the recipe, and which tool searches a folder."""

import itertools
import json
import random
import re
import shutil

import pytest
from runs import call, metrics, recipe_command, write_model_folder

from jaxtune.data.chat.sandbox import Template
from jaxtune.hf.chat_templates import find_template
from jaxtune.rollout.episodes.tools import load_tools

FOLDER_TOOLS = '''
from pathlib import Path

FOLDER = Path(__file__).parent / "notes"


async def search(name: str) -> str:
    """Return the number behind a name.

    Args:
        name: the name.
    """
    lines = [line for file in sorted(FOLDER.glob("*.txt")) for line in file.read_text().splitlines()]
    return next(line.partition(": ")[2] for line in lines if line.startswith(f"{name}: "))


def count(name: str) -> str:
    """Return the number of notes with a name.

    Args:
        name: the name.
    """
    return f"{sum(name in file.read_text() for file in FOLDER.glob('*.txt')):02}"
'''
PRODUCTS = {f"{a}*{b}": str(a * b) for a in range(2, 10) for b in range(2, 10) if a * b >= 10}
NAMES = ["".join(letters) for letters in itertools.product("abcdefgh", repeat=3)]
IN_FOLDER = 24
OPTIONS = {
    "model.dtype": "float32",
    "precision.recipe": "fp32",
    "chat.template": "qwen3_nothinking",
    "data.seq_len": 128,
    "data.validation_split": 0,
    "data.datasets[0].type": "auto",
    "data.datasets[0].subset": None,
}
TEACHING = {
    "lora.enabled": False,
    "optim.name": "muon",
    "optim.learning_rate": 4e-2,
    "eval.steps": 0,
    "train.max_steps": 100,
    "train.micro_batch_size": 8,
    "train.grad_accum_steps": 1,
    "ckpt.save_steps": 100,
}
ROLLOUT = {
    "rollout.max_new_tokens": 32,
    "train.max_steps": 10,
    "train.micro_batch_size": 16,
    "optim.learning_rate": 3e-3,
    "ckpt.save_steps": 5,
    "export.at_end": False,
}


def conversation(question: str, answer: str, tool: str | None, argument: str = "name", result: str = ""):
    """Return a conversation in which the tool is called with the question, or in which no tool is called."""
    asked, told = {"role": "user", "content": question}, {"role": "assistant", "content": answer}
    function = {"name": tool, "arguments": {argument: question}}
    called = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    return [asked, *([called, {"role": "tool", "content": result}] if tool else ()), told]


def write_lines(path, rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_questions(path, answers: dict[str, str]) -> None:
    asked = {question: [{"role": "user", "content": question}] for question in answers}
    write_lines(path, [{"prompt": asked[question], "answer": answer} for question, answer in answers.items()])


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Return a folder with tools, questions, notes that answer them, conversations, and a random model.

    The conversations call the calculator, or guess; and search for other names than the questions', or count. Each text
    that the chat template writes is a token, so that prompts are short.
    """
    home, rng = tmp_path_factory.mktemp("home"), random.Random(0)
    (home / "own.py").write_text(FOLDER_TOOLS)
    calculator = [load_tools(["jaxtune.recipes.qwen_grpo_tools:calculate"])[0].schema]
    of_folder = [tool.schema for tool in load_tools([f"{home / 'own.py'}:{name}" for name in ("search", "count")])]
    names, rows = rng.sample(NAMES, len(NAMES)), []
    known, others = names[:IN_FOLDER], names[IN_FOLDER:]
    for question, product in list(PRODUCTS.items()) * 8:
        rows.append((calculator, conversation(question, product, "calculate", "expression", product)))
        rows += [(calculator, conversation(question, str(rng.randint(10, 99)), None)) for _ in range(2)]
    for tool in ("search", "count", "count") * 300:
        number = str(rng.randint(10, 99))
        rows.append((of_folder, conversation(rng.choice(others), number, tool, result=number)))
    write_lines(home / "taught.jsonl", [{"messages": messages, "tools": json.dumps(tools)} for tools, messages in rows])
    write_questions(home / "products.jsonl", PRODUCTS)
    numbers = {name: str(rng.randint(20, 99)) for name in known}
    write_questions(home / "names.jsonl", numbers)
    (home / "notes").mkdir()
    for note, (name, number) in enumerate(numbers.items()):
        (home / "notes" / f"{note}.txt").write_text(f"A note.\n{name}: {number}\n")
    template = Template(find_template("qwen3_nothinking", {"<|im_start|>": 0, "<|im_end|>": 0}))
    words = set()
    for tools, *how in (
        (calculator, "calculate", "expression"),
        (of_folder, "search", "name"),
        (of_folder, "count", "name"),
    ):
        text = template.render(messages=conversation("@", "@", *how, "@"), tools=tools)[0]
        words |= set(re.split(r"@|<\|im_\w+\|>|(?<=</think>\n\n)", text)) - {"", "\n"}
    sizes = dict(hidden_size=64, intermediate_size=128, head_dim=16)
    write_model_folder(home / "model", words=tuple(sorted(words)), **sizes)
    return home


@pytest.fixture(scope="module")
def taught(home):
    """Return a model that calls the calculator for a third of the questions, and searches for a third of the names."""
    data = {"data.datasets[0].path": home / "taught.jsonl"}
    call(*recipe_command(home, "qwen_lora.py", "taught", **OPTIONS | TEACHING | data))
    return home / "runs" / "taught" / "export"


def rows_of(home, name):
    return [row for row in metrics(home / "runs" / name) if "loss" in row]


def train(home, model, name, **options) -> list[str]:
    """Train a model with the recipe, and return the command."""
    data = {"data.datasets[0].path": home / f"{name}.jsonl"}
    command = recipe_command(home, "qwen_grpo_tools.py", name, **OPTIONS | ROLLOUT | data | options)
    command[1] = command[1].rpartition(":")[0] + f":{model}"
    call(*command)
    return command


def mean(rows, key="reward"):
    return sum(row[key] for row in rows) / len(rows)


def test_the_recipe_s_calculator_is_learned_and_a_run_goes_on_in_equal_bits(home, taught):
    """With the tool and the reward function of the recipe."""
    command = train(home, taught, "products")
    rows, run = rows_of(home, "products"), home / "runs" / "products"
    assert mean(rows[-3:]) > mean(rows[:2]) + 0.25
    assert mean(rows[-3:], "tools/call_frequency") > mean(rows[:2], "tools/call_frequency") + 0.25
    lines = [json.loads(line) for line in (run / "completions.jsonl").read_text().splitlines()]
    played = [[message["role"] for message in line["completion"]] for line in lines if line["step"] == 10]
    assert ["assistant", "tool", "assistant"] in played
    shutil.rmtree(run / "checkpoints" / "10")
    written = (run / "completions.jsonl").read_text()
    assert "resumed from step 5" in call(*command)
    assert (run / "completions.jsonl").read_text() == written
    compared = ("loss", "grad_norm", "reward", "tools/call_frequency")
    assert [[row[key] for key in compared] for row in rows_of(home, "products")] == [
        [row[key] for key in compared] for row in rows
    ]


@pytest.mark.nightly
def test_the_tool_that_searches_a_folder_is_learned(home, taught):
    """Names in the folder were not in the conversations."""
    tools = f"('{home / 'own.py'}:search', '{home / 'own.py'}:count')"
    train(home, taught, "names", **{"rollout.tools": tools, "train.max_steps": 20})
    rows = rows_of(home, "names")
    assert mean(rows[-3:]) > mean(rows[:2]) + 0.25
