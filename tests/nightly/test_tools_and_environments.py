"""Tools and environments raise their rewards in whole runs: a calculator, a search over a folder, a game of turns."""

import json
import shutil

import pytest
from runs import call, metrics, recipe_command, write_model_folder
from safetensors import safe_open

COVERS = (
    "jaxtune/rollout",
    "jaxtune/recipes/qwen_grpo_tools.py",
    "jaxtune/inference/generation.py",
    "jaxtune/data/formats/prompts.py",
)
OWN = '''
from pathlib import Path

FOLDER = Path(__file__).parent / "notes"


def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: one
        b: two
    """
    return a + b


async def search(text: str) -> str:
    """Search.

    Args:
        text: words
    """
    return ", ".join(sorted(file.name for file in FOLDER.glob("*.txt") if text in file.read_text())) or "nothing"


def told(completions, answer, **columns):
    """1 if a tool gave the answer."""
    return [
        float(any(one["role"] == "tool" and one["content"] == right for one in episode))
        for episode, right in zip(completions, answer)
    ]


class Letters:
    """A game of two turns: each is rewarded for its share of small letters."""

    def reset(self, **row):
        self.turn = 0

    def step(self, answer):
        self.turn += 1
        text = answer["content"]
        share = sum("a" <= letter <= "z" for letter in text) / max(1, len(text))
        return "more" if share > 0.3 else "letters", share / 2, self.turn == 2
'''
SUMS = {f"{a}+{b}": (a, b) for a, b in ((1, 2), (2, 2), (3, 4), (4, 5))}
WORDS = {"red": "a.txt", "green": "b.txt", "blue": "c.txt", "pink": "d.txt"}
OPTIONS = {
    "model.dtype": "float32",
    "precision.recipe": "fp32",
    "chat.template": "lfm2_5",
    "data.special_tokens": "('<|tool_call_start|>', '<|tool_call_end|>')",
    "data.seq_len": 640,
    "data.validation_split": 0,
    "data.datasets[0].type": "auto",
    "data.datasets[0].subset": None,
    "train.micro_batch_size": 8,
    "train.grad_accum_steps": 2,
    "lora.enabled": False,
}
ROLLOUT = {"rollout.group_size": 8, "rollout.max_new_tokens": 96, "rollout.max_turns": 2, "train.max_steps": 12}


def schema(name: str, **arguments: str) -> dict:
    properties = {one: {"type": kind, "description": text} for one, (kind, text) in arguments.items()}
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {
        "type": "function",
        "function": {"name": name, "description": f"{name.capitalize()}.", "parameters": parameters},
    }


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Return a folder with a random model, tools, an environment, and their prompts."""
    home = tmp_path_factory.mktemp("home")
    sizes = dict(
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
    )
    write_model_folder(home / "model", **sizes)
    (home / "own.py").write_text(OWN)
    (home / "notes").mkdir()
    rows, sums, words = [], [], []
    for question, (a, b) in SUMS.items():
        rows.append((question, schema("add", a=("integer", "one"), b=("integer", "two")), {"a": a, "b": b}, str(a + b)))
        sums.append({"prompt": [{"role": "user", "content": question}], "answer": str(a + b)})
    for word, name in WORDS.items():
        (home / "notes" / name).write_text(f"a note about {word}")
        rows.append((word, schema("search", text=("string", "words")), {"text": word}, name))
        words.append({"prompt": [{"role": "user", "content": word}], "answer": name})
    lines = []
    for question, tool, arguments, result in rows:
        asked, name = {"role": "user", "content": question}, tool["function"]["name"]
        made = {"type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        called = [{"role": "assistant", "content": "", "tool_calls": [made]}]
        called += [{"role": "tool", "name": name, "content": result}, {"role": "assistant", "content": "ok"}]
        for answer in (called, [{"role": "assistant", "content": "no"}]):
            lines.append({"messages": [asked, *answer], "tools": json.dumps([tool])})
    for name, those in (("taught", lines * 40), ("sums", sums), ("words", words)):
        (home / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in those))
    (home / "letters.jsonl").write_text("".join(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(20)))
    return home


@pytest.fixture(scope="module")
def taught(home):
    """Return a model that calls a tool for half of the questions, and says "no" to the other half."""
    options = OPTIONS | {"data.datasets[0].path": home / "taught.jsonl", "data.datasets[0].type": "conversation"}
    options |= {"data.datasets[0].tools_field": "tools", "data.packing": False, "eval.steps": 0}
    options |= {"train.max_steps": 80, "optim.learning_rate": 3e-3, "ckpt.save_steps": 80}
    call(*recipe_command(home, "qwen_lora.py", "taught", **options))
    return home / "runs" / "taught" / "export"


def play(home, model, name, **options):
    """Train a model with the recipe; return the rows of metrics, and the command."""
    settings = OPTIONS | ROLLOUT | {"optim.learning_rate": 1e-3, "export.at_end": False} | options
    command = recipe_command(home, "qwen_grpo_tools.py", name, **settings)
    command[1] = command[1].rpartition(":")[0] + f":{model}"
    call(*command)
    return [row for row in metrics(home / "runs" / name) if "loss" in row], command


def mean(rows, key="reward"):
    return sum(row[key] for row in rows) / len(rows)


@pytest.mark.parametrize(("name", "tool"), [("sums", "add"), ("words", "search")])
def test_a_tool_raises_its_reward(home, taught, name, tool):
    """A calculator, and an asynchronous search over a folder."""
    own = home / "own.py"
    options = {"data.datasets[0].path": home / f"{name}.jsonl", "rollout.rewards": f"('{own}:told',)"}
    rows, _ = play(home, taught, name, **options, **{"rollout.tools": f"('{own}:{tool}',)"})
    assert mean(rows[-3:]) > mean(rows[:3]) + 0.2
    assert mean(rows[-3:], "tools/call_frequency") > mean(rows[:3], "tools/call_frequency")
    lines = [json.loads(line) for line in (home / "runs" / name / "completions.jsonl").read_text().splitlines()]
    assert {message["role"] for line in lines for message in line["completion"]} == {"assistant", "tool"}


def test_a_game_raises_its_reward_resumes_in_equal_bits_and_loads(home):
    """With a correction, spare prompts and an evaluation, which go by the same tokens."""
    own = home / "own.py"
    options = {
        "data.datasets[0].path": home / "letters.jsonl",
        "data.datasets[0].subset": None,
        "data.validation_split": 4,
        "data.seq_len": 128,
        "eval.steps": 8,
        "rollout.rewards": f"('{own}:Letters',)",
        "rollout.environment": f"{own}:Letters",
        "rollout.tools": "()",
        "rollout.max_new_tokens": 64,
        "rollout.correction": "token_truncate",
        "rollout.spare_prompts": 1,
        "grpo.iterations": 2,
        "optim.learning_rate": 1e-2,
        "train.max_steps": 16,
        "ckpt.save_steps": 8,
        "export.at_end": True,
    }
    rows, command = play(home, home / "model", "game", **options)
    assert mean(rows[-3:]) > mean(rows[:3]) + 0.2
    assert mean(rows, "episodes/turns") > 1 and mean(rows, "episodes/failed_ratio") == 0
    assert max(row["sampling/sampling_logp_difference/max"] for row in rows) < 1e-3
    run = home / "runs" / "game"
    shutil.rmtree(run / "checkpoints" / "16")
    shutil.rmtree(run / "export")
    written = (run / "completions.jsonl").read_text()
    assert "resumed from step 8" in call(*command)
    assert (run / "completions.jsonl").read_text() == written
    again = [row for row in metrics(run) if "loss" in row]
    compared = ("loss", "grad_norm", "reward", "completions/mean_length", "episodes/turns")
    assert [[row[key] for key in compared] for row in again] == [[row[key] for key in compared] for row in rows]
    with safe_open(run / "export" / "model.safetensors", "np") as file:
        assert len(list(file.keys())) > 10
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    assert transformers.AutoModelForCausalLM.from_pretrained(run / "export").num_parameters() > 0
