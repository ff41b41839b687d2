"""Time of a GRPO step with completions of the run's own devices, in one checkout or compared with another.

    python benchmarks/rollout_step.py [--before=CHECKOUT] [--steps=8] [--rounds=3] [--precision=fp32]

A step samples 64 completions of up to 128 tokens (8 prompts, 8 each) from the quickstart's model with random weights,
and updates all weights. Each run is a process of its own; runs of the two checkouts alternate, so that other load on
the machine affects both, and CPU seconds are printed too, which it affects less. Sampling lasts from the end of a step
to the call of the reward function, the update from there to the end of the step. Medians leave out the first steps,
which compile.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

HERE = Path(__file__).resolve()
PROMPTS, GROUP, NEW = 8, 8, 128
COMPILING = 2  # steps
COLUMNS = ("sampling", "update", "step", "CPU s:", "sampling", "update", "step")


def get_config(folder: str):
    """Return the recipe of the benchmark; its files and runs are in a folder."""
    from jaxtune.config import dataset
    from jaxtune.recipes import quickstart, qwen_grpo

    quickstart.make_model_folder(Path(folder) / "model", "Qwen3", quickstart.MODEL)
    config = qwen_grpo.get_config(f"{folder}/model")
    config.model.from_scratch, config.model.dtype = True, "float32"
    config.lora.enabled = False
    config.data.datasets = (dataset(path=f"{folder}/prompts.jsonl"),)
    config.data.seq_len = 256
    config.chat.template = "chatml"
    config.rollout.rewards = (f"{HERE}:reward",)
    config.rollout.group_size, config.rollout.max_new_tokens = GROUP, NEW
    config.train.output_dir = f"{folder}/runs"
    config.train.plugins = (str(HERE),)
    config.ckpt.at_end = config.export.at_end = False
    return config


def reward(completions, **columns):
    """Return the share of small letters of each completion; print when it is called, which is the end of sampling."""
    print("moment", time.perf_counter(), time.process_time(), flush=True)
    return [sum("a" <= letter <= "z" for letter in text) / max(1, len(text)) for text in completions]


def on_epoch(run, step, epoch):
    """Print when a step ends: each is an epoch, after which its results are known."""
    print("moment", time.perf_counter(), time.process_time(), flush=True)


def run(checkout: Path, steps: int, precision: str) -> list[float]:
    """Return the medians of sampling, update and step of a run with a checkout's code: seconds, then CPU seconds."""
    with tempfile.TemporaryDirectory() as folder:
        rows = [{"prompt": f"say {number}"} for number in range(PROMPTS)]
        (Path(folder) / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        options = {"train.epochs": steps + COMPILING, "precision.recipe": precision}
        command = [sys.executable, "-m", "jaxtune.train", f"--config={HERE}:{folder}"]
        command += [f"--config.{key}={value}" for key, value in options.items()]
        environment = os.environ | {"PYTHONPATH": str(checkout.resolve()), "JAX_PLATFORMS": "cpu"}
        made = subprocess.run(command, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    printed = made.stdout.decode()
    moments = [list(map(float, line.split()[1:])) for line in printed.splitlines() if line.startswith("moment ")]
    if made.returncode or len(moments) <= 2 * steps:
        sys.exit(f"{' '.join(command)} failed:\n{printed}")
    ends, sampled = moments[-2 * steps - 1 :: 2], moments[-2 * steps :: 2]
    medians = []
    for clock in range(2):
        of_steps = [[moment[clock] for moment in three] for three in zip(ends, sampled, ends[1:])]
        times = [(middle - before, end - middle, end - before) for before, middle, end in of_steps]
        medians += [statistics.median(column) for column in zip(*times)]
    return medians


def main() -> None:
    """Run, and print a table of seconds and, with another checkout, of ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="another checkout, to compare this one with")
    parser.add_argument("--steps", type=int, default=8, help="of a run, without those that compile")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each checkout")
    parser.add_argument("--precision", default="fp32", help="precision.recipe")
    options = parser.parse_args()
    trees = {"before": options.before, "after": HERE.parents[1]} if options.before else {"now": HERE.parents[1]}
    print(f"{date.today()}, {os.cpu_count()} CPU cores, {options.precision}; medians of {options.steps} steps, seconds")
    print(" " * 10 + "".join(f"{column:>10}" for column in COLUMNS))
    ratios = []
    for _ in range(options.rounds):
        rows = {name: run(tree, options.steps, options.precision) for name, tree in trees.items()}
        for name, row in rows.items():
            show(name, row, ".3f")
        if options.before:
            ratios.append([old / new for old, new in zip(rows["before"], rows["after"])])
    if ratios:
        show("ratio", [statistics.median(column) for column in zip(*ratios)], ".2f")


def show(name: str, row: list[float], form: str) -> None:
    """Print a row of the table."""
    cells = [f"{value:>10{form}}" for value in row]
    print(f"{name:>10}" + "".join(cells[:3]) + " " * 10 + "".join(cells[3:]), flush=True)


if __name__ == "__main__":
    main()
