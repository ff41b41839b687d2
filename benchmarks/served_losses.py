"""Losses of a small model: not quantized, quantized after training, and trained as served (serve.format).

    python benchmarks/served_losses.py --work=/tmp/served --out=benchmarks/results/served_losses.json

A base model is trained once on the Python standard library. It is then trained further on the text of one package, all
weights or adapters, from several seeds: without serve.format, and with each format. Losses are on held-out text of that
package. It takes two CPU cores about half an hour. Runs that are finished in --work are not repeated.

Take more --base-steps than the default for a table that says something: a model that has hardly learned loses less than
0.001 by quantizing.
"""

import argparse
import dataclasses
import json
import os
import statistics
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

import jaxtune
from jaxtune import data, hf
from jaxtune.config.schema import Config
from jaxtune.evaluation.evaluator import make_evaluate
from jaxtune.host.run_folder import RunFolder
from jaxtune.parallel.mesh import make_mesh
from jaxtune.parallel.options import MeshOptions
from jaxtune.quant.options import ServeOptions
from jaxtune.recipes.quickstart import MODEL, make_model_folder
from jaxtune.training.assembly import task_of
from jaxtune.weights.model import Model, declare_model
from jaxtune.weights.values import open_run

# Blocks of 128 divide these.
SIZES = MODEL | {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
FORMATS = ("int4", "fp8", "nvfp4", "nf4")
SEEDS = (0, 1, 2)
# (adapters, learning rate)
KINDS = {"LoRA": (True, 1e-3), "full": (False, 3e-4)}


def train(work: Path, name: str, recipe: str, model: Path, **sections) -> Path:
    """Train a run, unless it is finished, and return its folder."""
    folder = work / "runs" / name
    if not (folder / "export").exists():
        train_options = {"output_dir": str(work / "runs"), "run_name": name, **sections.pop("train", {})}
        sections = {"model": {"path": str(model)}, "eval": {"sample_prompt": None}, **sections}
        jaxtune.train(recipe, train=train_options, **sections)
    return folder


def validation_rows(config: Config, model: Model) -> dict[str, data.Rows]:
    """Return the rows of a run's held-out text."""
    tokenizer = hf.load_tokenizer(model.folders.tokenizer, config.chat.template, config.data.special_tokens)
    documents = data.open_validation(config, tokenizer, model.spec.vocabulary)
    return data.rows_to_evaluate(documents, config, task_of(model, config).columns)


def losses(folder: Path, formats: tuple[str | None, ...]) -> dict[str | None, float]:
    """Return the validation loss of a run's last step, with the weights quantized in each format."""
    mesh = make_mesh(MeshOptions(), jax.devices()[:1])
    run, found = open_run(RunFolder(folder), mesh, None), {}
    for format in formats:
        config = dataclasses.replace(run.config, serve=ServeOptions(format))  # type: ignore[arg-type]
        model = declare_model(run.model.base, config, mesh)
        evaluate = make_evaluate(config, model, validation_rows(config, model), mesh)
        found[format] = float(evaluate(run.trained, run.frozen, {})["eval_loss"])
    return found


def main() -> None:
    """Train what is missing, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of the models and runs")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of results")
    parser.add_argument("--base-steps", type=int, default=500, help="steps of the base model")
    parser.add_argument("--steps", type=int, default=100, help="steps of each run")
    arguments = parser.parse_args()
    work = arguments.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    os.chdir(work)
    make_model_folder(work / "model", "Qwen3", SIZES)
    base_steps = {"max_steps": arguments.base_steps}
    base = train(work, f"base-{arguments.base_steps}", "quickstart", work / "model", train=base_steps) / "export"
    rows = {}
    for kind, (adapters, rate) in KINDS.items():
        by_format: dict[str, list[tuple[float, float, float]]] = {format: [] for format in FORMATS}
        for seed in SEEDS:
            options = {
                "train": {"seed": seed, "max_steps": arguments.steps},
                "optim": {"learning_rate": rate},
                **({} if adapters else {"lora": {"enabled": False}}),
            }
            name = f"{kind}-{seed}-{arguments.steps}-of-{arguments.base_steps}"
            plain = losses(train(work, name, "quickstart_lora", base, **options), (None, *FORMATS))
            for format in FORMATS:
                served = train(work, f"{name}-{format}", "quickstart_lora", base, **options, serve={"format": format})
                by_format[format].append((plain[None], plain[format], losses(served, (format,))[format]))
        for format, found in by_format.items():
            unquantized, after, trained = map(statistics.mean, zip(*found))
            share = (trained - unquantized) / (after - unquantized)
            rows[f"{kind}, {format}"] = {
                "unquantized": unquantized,
                "quantized after training": after,
                "trained as served": trained,
                "share of the loss added": share,
                "by seed": found,
            }
            print(f"{kind:5} {format:6} {unquantized:.4f} {after:.4f} {trained:.4f}  share {share:.2f}", flush=True)
    settings = {"jax": jax.__version__, "steps": arguments.steps, "sizes": SIZES, "seeds": SEEDS}
    arguments.out.write_text(json.dumps({"settings": settings, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
