"""Losses of a small model: not quantized, quantized after training, and trained as served (serve.format).

    python benchmarks/served_losses.py --work=/tmp/served --out=benchmarks/results/served_losses.json
    python benchmarks/served_losses.py --model=moe --steps=200 --work=/tmp/served-moe \
        --out=benchmarks/results/served_losses_moe.json

A base model is trained on the Python standard library, long enough that int4 loses something: a model that has hardly
learned loses less than 0.001 by quantizing. It is then trained further on the text of one package, all weights or
adapters, from several seeds, which also order the text: without serve.format, and with each format. In the rows that
--distill names, the model that was trained without it is also trained further, quantized, with itself as the teacher
(serve.distill). Losses are on held-out text of that package, the same for all. Runs that are finished in --work are not
repeated, and --out has the rows of all finished runs.
"""

import argparse
import dataclasses
import itertools
import json
import os
import statistics
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

import jaxtune
from jaxtune import data, hf
from jaxtune.config.schema import Config
from jaxtune.evaluation.evaluator import make_evaluate
from jaxtune.host.run_folder import RunFolder
from jaxtune.objectives.options import DistillOptions
from jaxtune.parallel.mesh import make_mesh
from jaxtune.parallel.options import MeshOptions
from jaxtune.quant.options import ServeOptions
from jaxtune.recipes.quickstart import MODEL, make_model_folder
from jaxtune.training.assembly import task_of
from jaxtune.weights.model import Model, declare_model
from jaxtune.weights.values import open_run

# Blocks of 128 divide these.
SIZES = MODEL | {
    "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 256
}  # fmt: skip
EXPERTS = {
    "moe_intermediate_size": 128, "num_local_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True,
    "num_hidden_layers": 2,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Measured:
    """A model of the benchmark.

    Attributes:
        kind: The family, as transformers names it.
        sizes: The sizes in its config.json.
        base: (learning rate, steps) of the runs that train the base, one after the other.
        seeds: The formats that it is served in, each with the number of seeds. A format that adds little to the loss
            needs more seeds to show which share remains.
    """

    kind: str
    sizes: dict[str, Any]
    base: tuple[tuple[float, int], ...]
    seeds: dict[str, int]


MODELS = {
    "dense": Measured("Qwen3", SIZES, ((5e-3, 3000), (2e-3, 3000)), {"int4": 3, "nf4": 3, "nvfp4": 3, "fp8": 12}),
    "moe": Measured("Qwen3Moe", SIZES | EXPERTS, ((5e-3, 1500),), {"int4": 3}),
}
# (rank of adapters, which is also their alpha; learning rate)
KINDS = {"full": (None, 1e-3), "LoRA": (64, 2e-3)}
DISTILL_STEPS = 400
# Learning rates of distilling for rows whose training had a higher one: its steps add more noise than fp8 adds loss.
DISTILL_RATES = {"fp8, full": 1e-4}


def train(work: Path, name: str, recipe: str, model: Path, sections: dict) -> Path:
    """Train a run, unless it is finished, and return its folder."""
    folder = work / "runs" / name
    if not (folder / "export").exists():
        common = {
            "model": {"path": str(model)},
            "train": {"output_dir": str(work / "runs"), "run_name": name},
            "data": {"seq_len": 128},
            "memory": {"remat": "none"},
            "eval": {"sample_prompt": None},
            "optim": {"weight_decay": 0.0},
            "ckpt": {"save_steps": 1000},
        }
        options = {key: common.get(key, {}) | sections.get(key, {}) for key in common | sections}
        if not jaxtune.train(recipe, **options).finished:
            raise SystemExit(f"{folder} was stopped; the same command continues it")
    return folder


def train_base(work: Path, base: tuple[tuple[float, int], ...]) -> Path:
    """Train the base from scratch, unless it is finished, and return its export."""
    model = work / "model"
    for part, (rate, steps) in enumerate(base):
        options = {"train": {"max_steps": steps, "seed": part}, "optim": {"learning_rate": rate}}
        options |= {"model": {"from_scratch": not part}, "eval": {"steps": 500}}
        model = train(work, f"base-{part}", "quickstart", model, options) / "export"
    return model


def validation_rows(config: Config, model: Model) -> dict[str, data.Rows]:
    """Return the rows of a run's held-out text."""
    tokenizer = hf.load_tokenizer(model.folders.tokenizer, config.chat.template, config.data.special_tokens)
    documents = data.open_validation(config, tokenizer, model.spec.vocabulary)
    return data.rows_to_evaluate(documents, config, task_of(model, config).columns)


def loss(folder: Path, format: str | None) -> float:
    """Return the loss of a run's last step on held-out text, with the weights quantized in a format."""
    file = folder / f"loss_{format}.json"
    if not file.exists():
        mesh = make_mesh(MeshOptions(), jax.devices()[:1])
        run = open_run(RunFolder(folder), mesh, None)
        served = ServeOptions(format)  # type: ignore[arg-type]
        config = dataclasses.replace(run.config, serve=served, distill=DistillOptions())
        model = declare_model(run.model.base, config, mesh)
        evaluate = make_evaluate(config, model, validation_rows(config, model), mesh)
        file.write_text(json.dumps(float(evaluate(run.trained, run.frozen, {})["eval_loss"])))
    return json.loads(file.read_text())


def measure(work: Path, base: Path, steps: int, kind: str, format: str, seed: int, distill: bool) -> dict[str, float]:
    """Train what is missing of one seed, and return the losses by column."""
    rank, rate = KINDS[kind]
    lora = {"enabled": False} if rank is None else {"rank": rank, "alpha": float(rank)}
    options = {
        "train": {"seed": seed, "max_steps": steps},
        "data": {"validation_split": 0.15, "seed": seed, "validation_seed": 0},
        "eval": {"steps": 0, "max_batches": None},
        "optim": {"learning_rate": rate},
        "lora": lora,
        "export": {"merge": rank is not None},
    }
    name, served = f"{kind}-{seed}", options | {"serve": {"format": format}}
    plain = train(work, name, "quickstart_lora", base, options)
    found = {"unquantized": loss(plain, None), "quantized after training": loss(plain, format)}
    trained = train(work, f"{name}-{format}", "quickstart_lora", base, served)
    found["trained as served"] = loss(trained, format)
    if distill:
        whole = plain / ("merged" if rank else "export")
        taught = options | {"serve": {"format": format, "distill": True}}
        taught["train"] = {"seed": seed, "max_steps": DISTILL_STEPS}
        taught["optim"] = {"learning_rate": DISTILL_RATES.get(f"{format}, {kind}", rate)}
        distilled = train(work, f"{name}-{format}-distilled", "quickstart_lora", whole, taught)
        found["distilled after training"] = loss(distilled, format)
    return found


def row(found: list[dict[str, float]]) -> dict:
    """Return the mean of each column over seeds, the losses of each, and which share of the added loss remains."""
    means = {column: statistics.mean(one[column] for one in found) for column in found[0]}
    unquantized, after = means["unquantized"], means["quantized after training"]
    shares = {column: (loss - unquantized) / (after - unquantized) for column, loss in list(means.items())[2:]}
    return means | {"share of the added loss": shares, "by seed": found}


def main() -> None:
    """Train what is missing, and write the table after each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of the models and runs")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of results")
    parser.add_argument("--model", choices=list(MODELS), default="dense")
    parser.add_argument("--steps", type=int, default=800, help="steps of each run")
    parser.add_argument(
        "--distill", nargs="*", default=[], metavar="ROW", help="rows that are distilled too, such as 'nf4, LoRA'"
    )
    arguments = parser.parse_args()
    work, out, measured = arguments.work.absolute(), arguments.out.absolute(), MODELS[arguments.model]
    work.mkdir(parents=True, exist_ok=True)
    os.chdir(work)
    make_model_folder(work / "model", measured.kind, measured.sizes)
    base = train_base(work, measured.base)
    steps = {"steps": arguments.steps, "distill_steps": DISTILL_STEPS, "distill_rates": DISTILL_RATES}
    settings = {"jax": jax.__version__, **steps, "sizes": measured.sizes, "base": measured.base, "kinds": KINDS}
    kept = work / "settings.json"  # finished runs are not repeated, so all must have the same settings
    if kept.exists() and json.loads(kept.read_text()) != json.loads(json.dumps(settings)):
        raise SystemExit(f"{work} has runs with other settings: take another --work")
    kept.write_text(json.dumps(settings, indent=1) + "\n")
    rows: dict[str, list[dict[str, float]]] = {}
    rows_of_seeds = ((format, seed) for format, seeds in measured.seeds.items() for seed in range(seeds))
    for (format, seed), kind in itertools.product(rows_of_seeds, KINDS):
        name = f"{format}, {kind}"
        found = measure(work, base, arguments.steps, kind, format, seed, name in arguments.distill)
        rows.setdefault(name, []).append(found)
        print(format, kind, seed, *(f"{column} {loss:.4f}" for column, loss in found.items()), flush=True)
        written = {"settings": settings, "rows": {name: row(found) for name, found in rows.items()}}
        out.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
