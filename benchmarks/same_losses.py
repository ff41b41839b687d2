"""Check that two versions of jaxtune compute the same bit for bit: compare every number of short runs of each.

    git clone . /tmp/before && git -C /tmp/before checkout fd87697
    python benchmarks/same_losses.py --before=/tmp/before --after=. --work=/tmp/same_losses

Each case is a run of the command line in its own process, on a CPU. All but those that make their own model start from
the one that the quickstart exports. In the last case each version resumes a checkpoint written by the earlier version.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

OWN_MODEL = ("quickstart.py", "deepseek_v3_tiny_pretrain.py")  # recipes that make the model they train
BASE = "runs/quickstart/export"
NUMBERS = (
    *("step", "loss", "eval_loss", "grad_norm", "learning_rate", "tokens", "target_tokens", "loss_scale"),
    *("rewards/margins", "reward", "router_loss"),
)
SMALL = {
    "data.datasets[0].path": str(Path(sysconfig.get_paths()["stdlib"]) / "json"),
    "data.datasets[0].type": "text",
    "data.validation_split": 0.2,
    "data.seq_len": 128,
    "train.max_steps": 8,
    "train.micro_batch_size": 2,
    "train.grad_accum_steps": 2,
    "optim.learning_rate": 1e-3,
    "eval.steps": 4,
}
# Files that cases read, in the folder that they run in.
PROMPTS = [
    f"def {name}({arguments}):" for name in ("add", "find", "sort") for arguments in ("", "a", "a, b", "a, b, c")
]
FILES = {
    "pairs.jsonl": [
        {"prompt": prompt, "chosen": f"\n    return {prompt[4:8]}", "rejected": "\n    pass\n" * number}
        for number, prompt in enumerate(PROMPTS, start=1)
    ],
    "prompts.jsonl": [{"prompt": prompt} for prompt in PROMPTS],
    "rewards.py": "def vowels(completions, **columns):\n"
    "    return [sum(text.count(vowel) for vowel in 'aeiou') / 8 for text in completions]\n",
}
FROM_FILE = {"data.datasets[0].type": "auto", "eval.steps": 0, "data.validation_split": 0.0}
PAIRS = {**FROM_FILE, "data.datasets[0].path": "pairs.jsonl"}
REWARDS = {
    **FROM_FILE,
    "data.datasets[0].path": "prompts.jsonl",
    "data.datasets[0].subset": None,
    "chat.template": "chatml",
    "rollout.rewards": "('rewards.py:vowels',)",
    "rollout.group_size": 4,
    "rollout.max_new_tokens": 12,
    "train.micro_batch_size": 4,
    "train.max_steps": 4,
}
OPTIMIZERS = ("adamw", "adamw_8bit", "sgd", "adafactor", "lion", "schedule_free", "muon", "normuon")
# case: (recipe, options in addition to SMALL, simulated devices, processes)
CASES = {
    "quickstart, 50 steps": ("quickstart.py", {"train.max_steps": 50, "eval.steps": 25, "log.every": 1}, 1, 1),
    "LoRA": ("qwen_lora.py", {"lora.dropout": 0.1}, 1, 1),
    "QLoRA nf4": ("qwen_qlora_nf4.py", {}, 1, 1),
    "QLoRA fp8": ("qwen_qlora_fp8.py", {"quant.block_size": 64}, 1, 1),
    "QLoRA nvfp4": ("qwen_qlora_nvfp4.py", {}, 1, 1),
    "QLoRA int8": ("qwen_qlora_int8.py", {}, 1, 1),
    "fp8_hybrid": ("qwen_fp8.py", {}, 1, 1),
    "nvfp4": ("qwen_nvfp4.py", {}, 1, 1),
    "fp16": ("qwen_lora.py", {"precision.recipe": "fp16", "model.dtype": "float16"}, 1, 1),
    **{
        f"full, {name}": (
            "qwen_full.py",
            {"optim.name": name} | ({"optim.schedule": "constant"} if name == "schedule_free" else {}),
            1,
            1,
        )
        for name in OPTIMIZERS
    },
    "mixture": ("deepseek_v3_tiny_pretrain.py", {"train.max_steps": 8, "eval.steps": 4, "log.every": 1}, 1, 1),
    "DPO": ("qwen_dpo.py", PAIRS, 1, 1),
    "GRPO": ("qwen_grpo.py", REWARDS, 1, 1),
    "distillation": ("qwen_distill.py", {"distill.teacher": BASE, "distill.top_k": 16}, 1, 1),
    "offload": ("qwen_full.py", {"memory.offload_optimizer": True, "memory.remat": "offload"}, 1, 1),
    "full, stage=2 x data=2": ("qwen_full.py", {"mesh.stage": 2, "mesh.data": 2}, 4, 1),
    "full, fsdp=4 x tensor=2": ("qwen_full.py", {"mesh.fsdp": 4, "mesh.tensor": 2}, 8, 1),
    "LoRA, two processes": ("qwen_lora.py", {"mesh.fsdp": 4}, 2, 2),
}


def command(checkout: Path, name: str, recipe: str, options: dict, processes: int, devices: int) -> list[str]:
    """Return the command of one training run; `name` is the run's folder."""
    own_model = recipe in OWN_MODEL
    base = "" if own_model else f":{BASE}"
    settings = {**({} if own_model else SMALL), "train.run_name": name, **options}
    train = [sys.executable, "-m", "jaxtune.train", f"--config={checkout / 'configs' / recipe}{base}"]
    train += [f"--config.{key}={value}" for key, value in settings.items()]
    if processes == 1:
        return train
    script = checkout / "launch" / "local.py"  # its place in older checkouts
    launch = [str(script)] if script.exists() else ["-m", "jaxtune.launch"]
    return [sys.executable, *launch, "--processes", str(processes), "--devices-per-process", str(devices), "--", *train]


def write_files(home: Path) -> None:
    """Write the files that cases read."""
    home.mkdir(parents=True, exist_ok=True)
    for name, content in FILES.items():
        lines = content if isinstance(content, str) else "".join(f"{json.dumps(row)}\n" for row in content)
        (home / name).write_text(lines)


def run(checkout: Path, home: Path, name: str, recipe: str, options: dict, devices: int, processes: int) -> list[tuple]:
    """Train in `home`, unless an earlier call has done so; return every number of the run."""
    metrics = home / "runs" / name / "metrics.jsonl"
    done = metrics.with_name("done")
    if not done.exists():
        write_files(home)
        environment = {"PYTHONPATH": str(checkout), "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
        arguments = command(checkout, name, recipe, options, processes, devices)
        log = (home / f"{name}.log").open("w")
        code = subprocess.call(arguments, cwd=home, env=os.environ | environment, stdout=log, stderr=log)
        if code:
            raise SystemExit(f"{checkout}: exit code {code}; see {log.name}")
        done.touch()
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [tuple(repr(row.get(key)) for key in NUMBERS) for row in rows]


def run_resumed(checkouts: dict[str, Path], work: Path) -> dict[str, list[tuple]]:
    """Train four steps with the earlier version, then resume with each version for four more, from the same model."""
    options = {"train.max_steps": 4, "lora.dropout": 0.1, "optim.schedule": "constant", "eval.steps": 0}
    home = work / "before"
    run(checkouts["before"], home, "half", "qwen_lora.py", options, 1, 1)
    numbers = {}
    for side, checkout in checkouts.items():
        name = f"resumed-{side}"
        if not (home / "runs" / name).exists():
            shutil.copytree(home / "runs" / "half", home / "runs" / name)
            (home / "runs" / name / "done").unlink()
        numbers[side] = run(checkout, home, name, "qwen_lora.py", options | {"train.max_steps": 8}, 1, 1)
        assert "resumed from step 4" in (home / f"{name}.log").read_text()
    return numbers


def main() -> int:
    """Print a line for each case; return 1 if any two runs differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag, meaning in (("before", "a checkout"), ("after", "another"), ("work", "folder of all runs")):
        parser.add_argument(f"--{flag}", required=True, type=lambda path: Path(path).resolve(), help=meaning)
    parser.add_argument("--only-before", action="store_true", help="run the earlier version, to compare with later")
    options = parser.parse_args()
    checkouts = {"before": options.before, "after": options.after}
    if options.only_before:
        del checkouts["after"]
    different = 0
    for case, (recipe, settings, devices, processes) in [*CASES.items(), ("resumed", (None, {}, 1, 1))]:
        name = case.split(",")[0] if recipe == "quickstart.py" else case.replace(" ", "").replace(",", "-")
        if recipe is None:
            numbers = run_resumed(checkouts, options.work)
        else:
            numbers = {
                side: run(checkout, options.work / side, name, recipe, settings, devices, processes)
                for side, checkout in checkouts.items()
            }
        losses = [float(row[1]) for row in numbers["before"] if row[1] != "None"]
        same = all(rows == numbers["before"] for rows in numbers.values())
        different += not same
        print(f"{case:26} {len(losses):3} steps  loss {losses[0]:.6f} -> {losses[-1]:.6f}  ", end="")
        print("equal in every bit" if same else "DIFFERENT", flush=True)
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
