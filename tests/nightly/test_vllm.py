"""A real vLLM, its build for CPUs, writes the completions of runs and loads their adapters, or all their weights."""

import json
import random
import re
import shutil
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import call, metrics, recipe_command, write_model_folder
from safetensors.numpy import load_file, save_file
from vllm_program import SIZES, find_vllm, serve

from jaxtune.data.chat.sandbox import Template
from jaxtune.hf.chat_templates import find_template
from jaxtune.rollout.episodes.tools import load_tools
from jaxtune.rollout.server_weights import send_weights

TAKES_LONG = True
COVERS = (
    "jaxtune/rollout",
    "jaxtune/objectives/distillation.py",
    "jaxtune/objectives/grpo.py",
    "jaxtune/objectives/rollout_correction.py",
)
AGREES = 0.02
"""Mean difference of log-probabilities that bfloat16 explains, in nats."""
REWARDS = """
def letters(completions, **columns):
    return [sum("a" <= letter <= "z" for letter in text) / max(1, len(text)) for text in completions]
"""
CALCULATOR = "jaxtune.recipes.qwen_grpo_tools:calculate"
PRODUCTS = {f"{a}*{b}": str(a * b) for a in range(2, 10) for b in range(2, 10) if a * b >= 10}


@pytest.fixture(scope="module")
def vllm(tmp_path_factory):
    """Return the program."""
    return find_vllm(tmp_path_factory.mktemp("vllm"))


def conversation(question: str, product: str) -> list[dict[str, Any]]:
    """Return a conversation of three answers: the calculator is called twice with the question."""
    function = {"name": "calculate", "arguments": {"expression": question}}
    called = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    told = {"role": "tool", "content": product}
    return [{"role": "user", "content": question}, *[called, told] * 2, {"role": "assistant", "content": product}]


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Return a folder with a tiny model of random weights, prompts, a reward function, and conversations with calls.

    Each text that the chat template writes is a token, so that episodes are short.
    """
    home = tmp_path_factory.mktemp("home")
    write_lines(home / "prompts.jsonl", [{"prompt": f"say {i}"} for i in range(30)])
    (home / "rewards.py").write_text(REWARDS)
    asked = [([{"role": "user", "content": question}], product) for question, product in PRODUCTS.items()]
    write_lines(home / "products.jsonl", [{"prompt": prompt, "answer": product} for prompt, product in asked])
    tools = [load_tools([CALCULATOR])[0].schema]
    rows = [{"messages": conversation(*pair), "tools": json.dumps(tools)} for pair in PRODUCTS.items()] * 16
    random.Random(0).shuffle(rows)
    write_lines(home / "taught.jsonl", rows)
    template = Template(find_template("qwen3_nothinking", {"<|im_start|>": 0, "<|im_end|>": 0}))
    text = template.render(messages=conversation("@", "@"), tools=tools)[0]
    words = set(re.split(r"@|<\|im_\w+\|>|(?<=</think>\n\n)", text)) - {"", "\n"}
    # vLLM 0.32 for CPUs with AVX-512 BF16 packs a tied head once, and does not pack it again for new weights.
    sizes = SIZES | {"max_position_embeddings": 256, "tie_word_embeddings": False}
    write_model_folder(home / "model", words=tuple(sorted(words)), **sizes)
    return home


@pytest.fixture(scope="module")
def reloading(vllm, home):
    """Return the address of a server whose weights can all be replaced."""
    with serve(vllm, home, VLLM_SERVER_DEV_MODE="1") as url:
        yield url


def train(home: Path, recipe: str, name: str, **options: Any) -> list[dict[str, Any]]:
    """Train with a recipe of rollouts; return the rows of metrics."""
    shared = {
        "model.path": home / "model",
        "data.datasets[0].path": home / "prompts.jsonl",
        "data.datasets[0].type": "auto",
        "data.datasets[0].subset": None,
        "data.validation_split": 0,
        "train.micro_batch_size": 8,
        "train.grad_accum_steps": 2,
        "export.at_end": False,
    }
    call(*recipe_command(home, recipe, name, **shared | options))
    return [row for row in metrics(home / "runs" / name) if "loss" in row]


def train_letters(home: Path, name: str, **options: Any) -> list[dict[str, Any]]:
    """Train on rewards for small letters."""
    shared = {
        "chat.template": "chatml",
        "data.seq_len": 64,
        "rollout.rewards": f"('{home / 'rewards.py'}:letters',)",
        "rollout.max_new_tokens": 12,
        "rollout.group_size": 4,
    }
    return train(home, "qwen_grpo.py", name, **shared | options)


def check_agreement(rows: list[dict[str, Any]], steps: int) -> None:
    """The server's log-probabilities are the run's, within what bfloat16 explains."""
    differences = [row["sampling/sampling_logp_difference/mean"] for row in rows]
    print("difference of log-probabilities:", differences)
    assert len(rows) == steps and max(differences) < AGREES
    assert all(row["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=0.1) for row in rows)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("temperature", "options"), [(1.0, ()), (0.7, ("--logprobs-mode=processed_logprobs",))], ids=["raw", "processed"]
)
def test_a_run_samples_from_vllm_whose_probabilities_are_its_own_within_bfloat16(vllm, home, temperature, options):
    adapters = ("--enable-lora", "--max-lora-rank=64")
    with serve(vllm, home, *adapters, *options, VLLM_ALLOW_RUNTIME_LORA_UPDATING="True") as url:
        how = {"rollout.server": url, "rollout.temperature": temperature, "train.max_steps": 3}
        rows = train_letters(home, f"served-{temperature}", **how)
    check_agreement(rows, 3)


def score(url: str, tokens: list[int]) -> np.ndarray:
    """Return the server's log-probability of each token but the first."""
    body = {"prompt": [tokens], "max_tokens": 1, "prompt_logprobs": 0}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=60) as answer:
        (choice,) = json.load(answer)["choices"]
    return np.array([of[str(token)]["logprob"] for of, token in zip(choice["prompt_logprobs"][1:], tokens[1:])])


@pytest.mark.timeout(3600)
def test_vllm_gets_all_weights_of_each_step(home, reloading):
    """Its probabilities are the run's in each step, and differ from the probabilities by the first weights."""
    tokens = [int(token) for token in np.random.default_rng(0).integers(97, 123, 64)]
    how = {"rollout.server": reloading, "lora.enabled": False, "optim.learning_rate": 3e-3, "train.max_steps": 4}
    rows = train_letters(home, "whole", **how)
    trained = score(reloading, tokens)
    check_agreement(rows, 4)
    send_weights(reloading, home / "model", timeout=600)
    moved = np.abs(trained - score(reloading, tokens)).mean()
    print("change of log-probabilities by three steps:", moved)
    assert moved > 10 * AGREES


@pytest.mark.timeout(3600)
def test_vllm_is_the_teacher_of_a_student(home, reloading):
    """A teacher with the student's own weights differs from it by what bfloat16 explains, and one with others more."""
    send_weights(reloading, home / "model", timeout=300)
    options = {"chat.template": "chatml", "data.seq_len": 64, "rollout.max_new_tokens": 12, "train.max_steps": 1}
    options |= {"distill.teacher": reloading, "distill.top_k": 16, "distill.divergence": "forward_kl"}
    (row,) = train(home, "qwen_opd.py", "teacher-on-vllm", **options)
    assert 0 <= row["divergence"] < AGREES
    shutil.copytree(home / "model", home / "other")
    weights = {name: 3 * value for name, value in load_file(home / "model" / "model.safetensors").items()}
    save_file(weights, home / "other" / "model.safetensors", {"format": "pt"})
    (other,) = train(home, "qwen_opd.py", "taught-other", **options | {"model.path": home / "other"})
    print("divergences:", row["divergence"], other["divergence"])
    assert other["divergence"] > 3 * row["divergence"]


@pytest.mark.timeout(3600)
def test_a_model_calls_a_tool_twice_and_answers_on_vllm(home, reloading):
    """Observations are not trained: the server has no probabilities for them, so a difference would show."""
    chat = {"chat.template": "qwen3_nothinking", "data.seq_len": 128, "lora.enabled": False}
    teaching = {"optim.name": "muon", "optim.learning_rate": 2e-2, "train.max_steps": 150, "eval.steps": 0}
    data = {"data.datasets[0].path": home / "taught.jsonl", "export.at_end": True, "train.grad_accum_steps": 1}
    train(home, "qwen_lora.py", "taught", **chat | teaching | data)
    rows = train(
        home,
        "qwen_grpo_tools.py",
        "episodes",
        **chat,
        **{
            "model.path": home / "runs" / "taught" / "export",
            "data.datasets[0].path": home / "products.jsonl",
            "rollout.server": reloading,
            "rollout.max_new_tokens": 48,
            "optim.learning_rate": 1e-4,
            "train.max_steps": 3,
        },
    )
    lines = [json.loads(line) for line in (home / "runs" / "episodes" / "completions.jsonl").read_text().splitlines()]
    played = [[message["role"] for message in line["completion"]] for line in lines]
    print("calls:", [row["tools/call_frequency"] for row in rows], "reward:", [row["reward"] for row in rows])
    print("difference:", [row["sampling/sampling_logp_difference/max"] for row in rows])
    assert played.count(["assistant", "tool"] * 2 + ["assistant"]) > len(played) / 2
    check_agreement(rows, 3)
