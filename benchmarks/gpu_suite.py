"""The measurements on a GPU: correctness and speed of the kernels, speed of a step, and the rates that a plan assumes.

    python benchmarks/gpu_suite.py                                   # 9 minutes; benchmarks/results/<device>.json
    python benchmarks/gpu_suite.py --only train_step                 # 9 more for that piece, added to the same file
    python benchmarks/gpu_suite.py --only attention,train_step/jaxtune/8B --out found.json
    python benchmarks/gpu_suite.py --smoke                           # every part, tiny, on a CPU; measures nothing

Pieces: assumptions, correctness, correct_step, low_precision_correct, attention, loss, dequantize, quant_matmul,
fp8_matmul, grouped_matmul, gated_delta_rule, mamba2_scan, optimizers, train_step, precision_step. `--only` takes names
of pieces, or of parts as piece/contender/case. Each piece has a share of the time and begins with the most important
cases.
precision_step needs a run or two to itself; a part of a piece replaces the whole piece in the file, so give the second
run another --out.
The file is a calibration for `python -m jaxtune.plan`: rates measured by `assumptions` replace the plan's assumptions.
A job that fails, crashes or hangs is recorded with its error, and the others continue; a job that a kernel refuses is
recorded with the reason. The exit status is 1 if a job failed or the time ran out before a job.
Peers (torch, transformers + peft, bitsandbytes, tokamax) are measured in the same run if they are installed.
"""

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(1, str(ROOT))  # so that the suite runs on a machine on which jaxtune is not installed

from gpu import (  # noqa: E402
    assumptions,
    attention,
    correct_step,
    correctness,
    dequantize,
    fp8_matmul,
    gated_delta_rule,
    grouped_matmul,
    loss,
    low_precision_correct,
    mamba2_scan,
    optimizers,
    precision_step,
    quant_matmul,
    train_step,
)
from gpu.workers import FAILURES, REASONS, Job, Piece, Row, run  # noqa: E402

MODULES = (
    *(assumptions, correctness, correct_step, low_precision_correct, attention, loss, dequantize, quant_matmul),
    *(fp8_matmul, grouped_matmul, gated_delta_rule, mamba2_scan, optimizers, train_step, precision_step),
)
RESULTS = Path(__file__).parent / "results"
MINUTES = 8.7
SMOKE_MINUTES = 60.0  # generous, so that a busy machine does not fail the smoke run
PACKAGES = (
    *("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "flax"),
    *("optax", "torch", "triton", "transformers", "peft", "bitsandbytes", "tokamax", "flash-attn3-jax"),
)


def wanted_jobs(piece: Piece, only: list[str]) -> list[Job]:
    """Return the jobs of a piece that `only` names; all if `only` is empty."""

    def named(job: Job) -> bool:
        return any(f"{piece.name}/{job.name}/".startswith(f"{name}/") for name in only)

    return [job for job in piece.jobs if not only or named(job)]


def describe_machine(smoke: bool) -> dict[str, Any]:
    """Return device, driver and versions. A child process queries jax, so that this process never holds the GPU."""
    query = "import jax; device = jax.devices()[0]; print(device.platform, device.device_kind, sep='|')"
    answer = subprocess.run([sys.executable, "-c", query], capture_output=True, text=True)
    if answer.returncode:
        sys.exit(f"jax finds no device:\n{answer.stderr.strip()[-2000:]}")
    platform, device = answer.stdout.strip().splitlines()[-1].split("|")
    if platform != "gpu" and not smoke:
        sys.exit(f"jax runs on {device}, but this needs a GPU. `--smoke` tries every part on a CPU, without measuring.")
    smi = shutil.which("nvidia-smi")
    command = [smi, "--query-gpu=driver_version,power.limit", "--format=csv,noheader"]
    driver = subprocess.run(command, capture_output=True, text=True).stdout.strip() if smi else None
    installed = {package.metadata["Name"].lower(): package.version for package in importlib.metadata.distributions()}
    return {
        "device": device,
        "driver": driver,
        "python": sys.version.split()[0],
        "versions": {package: installed[package] for package in PACKAGES if package in installed},
        "commit": git_commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "smoke": smoke,
    }


def git_commit() -> str | None:
    """Return the commit, with a plus sign if tracked files are modified; None outside a git checkout."""
    commands = (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
    results = [subprocess.run(["git", "-C", str(ROOT), *args], capture_output=True, text=True) for args in commands]
    if results[0].returncode:
        return None
    return results[0].stdout.strip() + "+" * bool(results[1].stdout.strip())


def show(piece: Piece, rows: dict[str, Row], conclusions: dict[str, Any]) -> str:
    """Format the table of a piece and the conclusions from its rows; a row without figures shows the reason."""
    width = 2 + max(map(len, rows))
    lines = [
        "",
        f"{piece.name}: {piece.title}",
        " " * width + "".join(f"{header:>14}" for header, _, _ in piece.columns),
    ]
    for name, row in rows.items():
        values = [format(row[key], form) if key in row else "" for _, key, form in piece.columns]
        figures = "".join(f"{value:>14}" for value in values) if any(values) else ""
        why = next((f"  {reason}: {summary(row[reason])}" for reason in REASONS if reason in row), "")
        lines.append(f"{name:<{width}}{figures}{why}")
    lines += [f"{name}: {value:.4g}" for name, value in conclusions.items()]
    return "\n".join(lines)


def summary(reason: str) -> str:
    """Return the line of a traceback that names the exception, otherwise the last line."""
    lines = reason.splitlines()
    raised = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Interrupt)\b", line)]
    return (raised or lines)[-1][:150]


def main() -> None:
    """Run the pieces, print their tables, and write all results as JSON after each piece."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="PIECE[/CONTENDER[/CASE]],...")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/<device>.json; other pieces are kept")
    parser.add_argument("--minutes", type=float, help=f"time for the whole run (default: {MINUTES})")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on a CPU, to see that every part runs")
    options = parser.parse_args()
    only = [name.strip("/") for name in options.only.split(",") if name]
    pieces = [module.piece(options.smoke) for module in MODULES]
    if options.smoke:
        pieces = [dataclasses.replace(piece, limit=60 * SMOKE_MINUTES) for piece in pieces]
    chosen = [(piece, jobs) for piece in pieces if (jobs := wanted_jobs(piece, only))]
    unknown = [name for name in only if not any(wanted_jobs(piece, [name]) for piece in pieces)]
    if unknown:
        names = ", ".join(f"{piece.name}/{{{','.join({job.contender for job in piece.jobs})}}}" for piece in pieces)
        parser.error(f"--only: nothing is named {', '.join(unknown)}; choose from {names}")

    end = time.monotonic() + 60 * (options.minutes or (SMOKE_MINUTES if options.smoke else MINUTES))
    if options.smoke:
        os.environ["JAX_PLATFORMS"] = "cpu"
        # Programs that run once are not worth optimising.
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
    machine = describe_machine(options.smoke)
    print(json.dumps(machine, indent=1))
    slug = re.sub(r"[^a-z0-9]+", "_", machine["device"].lower())
    out = options.out or (None if options.smoke else RESULTS / f"{slug}.json")
    results = json.loads(out.read_text()) if out and out.exists() else {}

    failed = []
    for place, (piece, jobs) in enumerate(chosen):
        # Time that a piece leaves unused goes to the later pieces.
        began, rows = time.monotonic(), {}
        share = piece.share / sum(later.share for later, _ in chosen[place:])
        for job, row in run(piece, jobs, began + (end - began) * share):
            rows[job.name] = row
            print(f"{time.monotonic() - began:6.1f} s  {piece.name}/{job.name}", flush=True)
        rows = {job.name: rows[job.name] for job in jobs}
        failed += [f"{piece.name}/{name}" for name, row in rows.items() if any(reason in row for reason in FAILURES)]
        conclusions = piece.conclude(rows)
        print(show(piece, rows, conclusions), flush=True)
        results[piece.name] = {
            "run": machine,
            "title": piece.title,
            "seconds": time.monotonic() - began,
            "rows": rows,
            "conclusions": conclusions,
        }
        if out:
            out.write_text(json.dumps(results, indent=1) + "\n")
    if failed:
        sys.exit(f"failed or not run: {', '.join(failed)}")


if __name__ == "__main__":
    main()
