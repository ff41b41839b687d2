"""Two processes sample the completions of a step together: the same as one process, and rewarded once."""

import json
import subprocess
import sys

from runs import call, metrics, recipe

REWARDS = """
import pathlib


def letters(completions, **columns):
    with pathlib.Path(__file__).with_name("calls.txt").open("a") as file:
        print(len(completions), file=file)
    return [sum("a" <= letter <= "z" for letter in text) / max(1, len(text)) for text in completions]
"""


def test_two_processes_learn_as_one(tmp_path):
    file = recipe(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(6)))
    options = {
        "data.datasets[0].path": tmp_path / "prompts.jsonl",
        "rollout.rewards": f"{tmp_path / 'rewards.py'}:letters",
    }
    options |= {"rollout.group_size": 4, "rollout.max_new_tokens": 8, "train.max_steps": 3, "data.validation_split": 2}

    def command(name: str, rows: int) -> list[str]:
        settings = options | {"train.run_name": name, "train.micro_batch_size": rows}
        return ["jaxtune.train", f"--config={file}", *(f"--config.{key}={value}" for key, value in settings.items())]

    call(*command("one", 8))
    calls = (tmp_path / "calls.txt").read_text()
    launch = [sys.executable, "-m", "jaxtune.launch", "--processes=2", "--devices-per-process=2", "--"]
    subprocess.run([*launch, sys.executable, "-m", *command("two", 2)], check=True, timeout=300)
    assert (tmp_path / "calls.txt").read_text() == 2 * calls, "only one process calls the functions"
    one, two = (metrics(tmp_path / "runs" / name) for name in ("one", "two"))
    for key in ("reward", "eval_reward", "completions/mean_length"):
        assert [row[key] for row in one if key in row] == [row[key] for row in two if key in row]
    first = next(row for row in one if "loss" in row), next(row for row in two if "loss" in row)
    assert abs(first[0]["grad_norm"] / first[1]["grad_norm"] - 1) <= 1e-4
