"""Write the tables of measured and predicted figures into the documentation, from benchmarks/results/*.json.

    python benchmarks/tables.py            writes them
    python benchmarks/tables.py --check    exit code 1 if a page has another table

A page has `<!-- table: NAME -->` above a table and `<!-- end of table -->` below it. NAME is a function of this file.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
VERSIONS = ROOT / "jaxtune" / "plan" / "jax_versions.json"
SIZES = ("0.6B", "1.7B", "4B", "8B")


def read(name: str) -> dict[str, Any]:
    """Return a file of results."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table."""
    lines = [list(head), ["---"] * len(list(head)), *map(list, rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def predicted() -> str:
    """Predicted speed of Qwen3 on one H100: thousands of tokens a second, their range, MFU."""
    rows = read("predicted_speeds")

    def cell(recipe: str, size: str) -> str:
        three = rows.get(f"{recipe}, 3 rows {size}")  # the rows for which nothing needs to be recomputed
        return _speed(three or rows[f"{recipe} {size}"])

    recipes = ("LoRA, bf16", "LoRA on NF4", "LoRA, FP8", "full, 8-bit AdamW")
    return table(
        ["Qwen3 on one H100", *SIZES], ([recipe, *(cell(recipe, size) for size in SIZES)] for recipe in recipes)
    )


# Tokens a second that the project aims at on one H100, by row of predicted_speeds.json.
GOALS = {
    "LoRA, bf16 0.6B": 105_000,
    "LoRA, bf16 8B": 17_500,
    "LoRA on NF4 8B": 16_450,
    "LoRA, FP8 8B": 20_000,
    "full, 8-bit AdamW, 3 rows 8B": 13_900,
}


def parts() -> str:
    """Predicted ms of a micro-batch by part of the step, and the ms that the goal allows for the whole."""
    rows = {name: read("predicted_speeds")[name] for name in GOALS}
    ms = {name: sum(row["parts"].values()) for name, row in rows.items()}
    allowed = {name: ms[name] * row["tokens_per_second"]["central"] / GOALS[name] for name, row in rows.items()}
    lines = [[part, *(f"{row['parts'][part]:.1f}" for row in rows.values())] for part in rows["LoRA, bf16 8B"]["parts"]]
    lines += [[what, *(f"{of[name]:.1f}" for name in rows)] for what, of in {"all": ms, "at the goal": allowed}.items()]
    return table(["ms of a micro-batch", *(name.replace(", 3 rows", "") for name in rows)], lines)


def predicted_variants() -> str:
    """Predicted speed of the other rows of the file."""
    rows = read("predicted_speeds")
    names = {
        "LoRA, bf16, in a loop 0.6B": ("Qwen3-0.6B, LoRA, `memory.unroll=False`", "one H100"),
        "full, 8-bit AdamW 8B": ("Qwen3-8B, `qwen_full_8bit`, 8 rows", "one H100"),
        "full, 8-bit AdamW, 8 GPUs 8B": ("Qwen3-8B, `qwen_full_8bit`", "8 H100, for each"),
        "LoRA on NF4 Llama-3 70B": ("Llama 3 70B, LoRA on NF4", "one H200"),
        "LoRA on NF4 Qwen3.5 27B": ("Qwen3.5 27B, `qwen3_5_27b_qlora`", "one H100"),
        "LoRA on NF4 Gemma 4 31B": ("Gemma 4 31B, `gemma4_31b_qlora`", "one H100"),
        "LoRA, bf16 Gemma 4 26B-A4B": ("Gemma 4 26B-A4B, `gemma4_lora`", "one H100"),
        "LoRA, bf16 Nemotron-3 Nano": ("Nemotron-3 Nano 30B-A3B, `nemotron3_lora`, a row", "one H100"),
    }
    return table(
        ["model and recipe", "GPU", "`memory.remat`", "thousands of tokens a second", "peak GB", "date"],
        (
            [*cells, f"`{row['remat']}`", _speed(row), f"{row['memory_gb']:.1f}", row["date"]]
            for cells, row in ((cells, rows[name]) for name, cells in names.items())
        ),
    )


def versions() -> str:
    """Predicted speed by version of jax, and how much slower than with the fastest one."""
    speeds = {name: row["tokens_per_second"] for name, row in json.loads(VERSIONS.read_text()).items()}
    recipes = next(iter(speeds.values()))

    def cell(recipe: str, version: str) -> str:
        rate, best = speeds[version][recipe], max(rates[recipe] for rates in speeds.values())
        return f"{rate / 1e3:.1f}" + (f" ({rate / best - 1:.1%})" if rate < best else "")

    head = ["Qwen3 on one H100, thousands of tokens a second", *(f"jax {version}" for version in speeds)]
    return table(head, ([recipe, *(cell(recipe, version) for version in speeds)] for recipe in recipes))


def _speed(row: dict[str, Any]) -> str:
    speed = {name: value / 1e3 for name, value in row["tokens_per_second"].items()}
    spread = f"{speed['pessimistic']:.1f} - {speed['optimistic']:.1f}"
    return f"{speed['central']:.1f} ({spread}), {row['mfu']['central']:.0%}"


def clusters() -> str:
    """Speeds that others published on several GPUs, and the prediction for jaxtune's own step of that shape."""
    expected, others = read("predicted_speeds"), read("published_speeds")
    published = others["rows"]
    sources = "\n".join(f"- {system}: {source}" for system, source in others["sources"].items())

    def cells(name: str) -> list[str]:
        row, theirs = expected[name], published[name]
        speed = row["tokens_per_second"]
        spread = f"{speed['pessimistic'] / 1e3:#.3g} - {speed['optimistic'] / 1e3:#.3g}"
        return [
            theirs["system"],
            theirs["what"],
            f"{row['gpus'] * row['hosts']} {row['gpu'].split()[0].upper()}",
            f"{theirs['tokens_per_second'] / 1e3:#.3g}",
            f"{speed['central'] / 1e3:#.3g} ({spread})",
            f"{speed['central'] / theirs['tokens_per_second'] - 1:+.0%}",
            f"{row['exposed_communication']:.0%}",
            row["date"],
        ]

    head = [
        "system",
        "step",
        "GPUs",
        "published",
        "predicted for jaxtune",
        "difference",
        "exposed communication",
        "date",
    ]
    return f"{table(head, map(cells, published))}\n\n{sources}"


def scaling() -> str:
    """Speed per GPU on more GPUs over that on fewer, of the same step: published, and predicted."""
    expected, published = read("predicted_speeds"), read("published_speeds")["rows"]
    pairs = (
        ("AutoModel LoRA 32B", 8, 16),
        ("AutoModel LoRA 70B", 8, 16),
        ("torchtitan 8B", 8, 128),
        ("LLM Foundry 7B", 8, 256),
    )

    def cells(name: str, few: int, many: int) -> list[str]:
        theirs, ours = (
            [value(rows[f"{name}, {count}"]["tokens_per_second"]) for count in (few, many)]
            for rows, value in ((published, float), (expected, lambda speed: speed["central"]))
        )
        what = f"{published[f'{name}, {few}']['what']} ({published[f'{name}, {few}']['system']})"
        return [what, f"{few} to {many}", f"{theirs[1] / theirs[0]:.2f}", f"{ours[1] / ours[0]:.2f}"]

    return table(["step", "H100", "published", "predicted"], (cells(*pair) for pair in pairs))


def measured() -> str:
    """Measured on one H200: thousands of tokens a second, the prediction for the same program, transformers + PEFT."""
    results = read("nvidia_h200")
    choices, peft = results["step_choices"]["rows"], results["train_step"]["rows"]
    rows = {
        "Qwen3-0.6B, LoRA, bf16": (choices["0.6B/mosaic-unroll"], peft["hf+peft/0.6B"]),
        "the same with `memory.unroll=False`": (choices["0.6B/mosaic"], None),
        "Qwen3-8B, LoRA, bf16": (choices["8B/mosaic"], peft["hf+peft/8B"]),
        "Qwen3-8B, LoRA, FP8 products": (choices["8B/mosaic-fp8"], None),
        "Qwen3-8B, LoRA on NF4": (choices["8B/nf4 (fourth call, attention by Mosaic)"], None),
        "Qwen2.5-7B, all weights, 8-bit AdamW, 16 x 1024, `block`, attention by Triton": (
            results["precision_step"]["rows"]["whole-bf16/Qwen2.5-7B"],
            None,
        ),
    }

    def cells(row: dict[str, Any], other: dict[str, Any] | None) -> list[str]:
        # error_percent is the prediction of the time over its measurement.
        expected = row["tokens_per_second"] / (1 + row["error_percent"] / 100)
        theirs = f"{other['tokens_per_second'] / 1e3:.1f}" if other else ""
        return [f"{row['tokens_per_second'] / 1e3:.1f}", f"{expected / 1e3:.1f}", f"{row['peak_gb']:.1f}", theirs]

    head = ["one H200, thousands of tokens a second", "measured", "predicted", "peak GB", "transformers + PEFT"]
    return table(head, ([name, *cells(*row)] for name, row in rows.items()))


_OF_CPU = {"time ratio": "time_ratio", "peak RSS ratio": "rss_ratio"}


def cpu() -> str:
    """The same steps by jaxtune, on each version of jax, and by transformers + PEFT on two CPU cores."""
    models = {"dense": "cpu_vs_hf", "mixture": "cpu_vs_hf_moe"}
    rows = [
        (model, row)
        for model, name in models.items()
        for row in sorted(read(name)["results"], key=lambda row: (row["step"], not row["remat"]))
    ]
    versions = list(rows[0][1]["jaxtune"])
    head = [
        "model",
        "step",
        "remat",
        "transformers + PEFT",
        *(f"{what}, {jax}" for jax in versions for what in _OF_CPU),
    ]
    return table(
        head,
        (
            [
                *(model, row["step"], "block" if row["remat"] else "none", f"{row['hf']['seconds']:.1f} s"),
                *(f"{row['jaxtune'][jax][field]:.2f}" for jax in versions for field in _OF_CPU.values()),
            ]
            for model, row in rows
        ),
    )


def tokenising() -> str:
    """One large text tokenised on two cores."""
    head = ["text, MB", "seconds", "thousands of tokens a second", "peak RSS, MB"]
    rows = read("tokenising")["rows"]
    return table(
        head,
        (
            [f"{row['megabytes']}", f"{row['seconds']}", f"{row['tokens_per_second'] / 1e3:.0f}", f"{row['rss_mb']}"]
            for row in rows
        ),
    )


TABLES: dict[str, Callable[[], str]] = {
    "predicted": predicted,
    "predicted variants": predicted_variants,
    "parts": parts,
    "versions": versions,
    "clusters": clusters,
    "scaling": scaling,
    "measured": measured,
    "cpu": cpu,
    "tokenising": tokenising,
}
_PLACE = re.compile(r"(<!-- table: (?P<name>.+?) -->\n)(.*?)(<!-- end of table -->)", re.DOTALL)


def filled(text: str) -> str:
    """Return a page with its tables made anew."""
    return _PLACE.sub(lambda found: f"{found[1]}\n{TABLES[found['name']]()}\n\n{found[4]}", text)


def main() -> int:
    """Write or check the tables of all pages; return the exit code."""
    changed = {
        page: new
        for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
        if (new := filled(old := page.read_text("utf-8"))) != old
    }
    for page, new in changed.items():
        print(page.relative_to(ROOT))
        if "--check" not in sys.argv:
            page.write_text(new, "utf-8")
    return int("--check" in sys.argv and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
