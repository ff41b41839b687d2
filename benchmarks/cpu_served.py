"""The cost of serve.format on a CPU: the time of a step with it, as a multiple of the same step without it.

    python benchmarks/cpu_served.py [--steps 5] --out=benchmarks/results/cpu_served.json

Both train LoRA on the dense model of cpu_vs_hf.py, in float32 and without rematerialisation. Steps alternate between
the two, so that other load on the machine affects both. A ratio is of the fastest steps, or the median of the ratios of
neighbours.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import torch
import transformers
from cpu_vs_hf import MODEL, ROWS, SEQUENCE, jaxtune_step

# (serve.format, micro-batches in a step)
CASES = (("int4", 1), ("int4", 4))


def timed(step) -> float:
    """Return the seconds of a step."""
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def compare(folder: str, served: str, micro_batches: int, steps: int) -> dict:
    """Return the ratios of a case. The first step of each, which compiles, is not counted."""
    kinds = (None, served)
    pair = [jaxtune_step(folder, "dense", True, False, micro_batches, kind) for kind in kinds]
    seconds = [[timed(step) for step in pair] for _ in range(steps + 1)][1:]
    plain, quantized = zip(*seconds, strict=True)
    return {
        "format": served,
        "micro_batches": micro_batches,
        "seconds": {"without": min(plain), "with": min(quantized)},
        "ratio_of_fastest": min(quantized) / min(plain),
        "median_ratio": statistics.median(b / a for a, b in seconds),
    }


def main() -> None:
    """Print the ratios, and write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(transformers.Qwen3Config(**MODEL)).save_pretrained(folder)
        results = []
        for case in CASES:
            results.append(compare(folder, *case, options.steps))
            print(results[-1], flush=True)
    report = {"model": MODEL, "rows": ROWS, "sequence": SEQUENCE, "load_average": load, "results": results}
    options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
