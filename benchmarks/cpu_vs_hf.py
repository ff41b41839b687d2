"""Compare jaxtune with transformers + peft on a CPU: ratio of step times, and peak RSS of both.

    python benchmarks/cpu_vs_hf.py [--model moe] [--steps 7] [--python PYTHON ...]

Each system runs in its own process, so that peak memory is measured separately. Steps take turns, so that other load on
the machine affects all. All read the same random Qwen3, dense or with experts, and train on the same tokens with AdamW
and gradient clipping in float32. With --python jaxtune runs on each of these interpreters, which may have different
versions of jax; transformers + peft run on the one that runs this file.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

MODEL = {
    "vocab_size": 32_000,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
EXPERTS = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "norm_topk_prob": True}
ROWS, SEQUENCE, RANK, RATE = 4, 512, 16, 1e-4
# Modules with adapters: linear layers that are separate modules in transformers too, which excludes experts.
ADAPTED = {"dense": "all-linear", "moe": ["q_proj", "k_proj", "v_proj", "o_proj"]}
RESULTS = Path(__file__).parent / "results"


def hf_step(folder: str, model_kind: str, lora: bool, remat: bool):
    """Return a function that runs one step of transformers (+ peft) and returns the loss."""
    import numpy as np
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    model.config.use_cache = False
    if remat:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if lora:
        import peft

        targets = ADAPTED[model_kind]
        model = peft.get_peft_model(
            model, peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=targets, task_type="CAUSAL_LM")
        )
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE)
    tokens = torch.tensor(np.random.default_rng(0).integers(0, MODEL["vocab_size"], (ROWS, SEQUENCE)))

    def step() -> float:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def jaxtune_step(
    folder: str, model_kind: str, lora: bool, remat: bool, micro_batches: int = 1, served: str | None = None
):
    """Return a function that runs one step of jaxtune and returns the loss; served: serve.format."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxtune.config.schema import Config, DataOptions, MemoryOptions, ModelOptions, TrainOptions
    from jaxtune.lora.options import LoraOptions
    from jaxtune.optim.options import OptimOptions
    from jaxtune.parallel.mesh import make_mesh
    from jaxtune.parallel.options import MeshOptions
    from jaxtune.precision.options import PrecisionOptions
    from jaxtune.quant.options import ServeOptions
    from jaxtune.training.assembly import assemble
    from jaxtune.weights.base import read_base
    from jaxtune.weights.values import frozen_parameters, initial_parameters

    mesh, targets = make_mesh(MeshOptions()), ADAPTED[model_kind]
    config = Config(
        model=ModelOptions(path=folder, dtype="float32"),
        data=DataOptions(seq_len=SEQUENCE),
        train=TrainOptions(micro_batch_size=ROWS, grad_accum_steps=micro_batches),
        optim=OptimOptions(weight_decay=0.01),
        lora=LoraOptions(enabled=lora, rank=RANK, alpha=2.0 * RANK, target_modules=targets),
        memory=MemoryOptions("block" if remat else "none"),
        precision=PrecisionOptions("fp32"),
        serve=ServeOptions(served),
    )
    program = assemble(read_base(config), config, mesh)
    train_step = jax.jit(program.step, donate_argnums=0)
    state = program.start(initial_parameters(program.model, config))
    frozen, rate = frozen_parameters(program.model, config), jnp.float32(RATE)
    shape = (micro_batches, ROWS, SEQUENCE)
    tokens = np.random.default_rng(0).integers(0, MODEL["vocab_size"], shape).astype(np.int32)
    shifted = np.roll(tokens, -1, axis=2)
    fields = {
        "tokens": tokens,
        "targets": shifted,
        "positions": np.broadcast_to(np.arange(SEQUENCE, dtype=np.int32), tokens.shape),
        "segment_ids": np.ones_like(tokens),
        "key_start": np.zeros_like(tokens),
        "loss_weight": np.broadcast_to(np.arange(SEQUENCE) < SEQUENCE - 1, tokens.shape).astype(np.float32),
        "row": np.arange(micro_batches * ROWS, dtype=np.int32).reshape(micro_batches, ROWS),
    }
    batch = {name: jax.device_put(fields[name], leaf.sharding) for name, leaf in program.batch.items()}

    def step() -> float:
        nonlocal state
        state, metrics = train_step(state, frozen, batch, rate)
        return metrics["loss"].item()

    return step


def serve(system: str, *what: Any) -> None:
    """Print the system's version; then for each line of standard input run a step: seconds, loss, peak RSS in MB."""
    step = (jaxtune_step if system == "jaxtune" else hf_step)(*what)
    name = f"jax {version('jax')}" if system == "jaxtune" else f"transformers {version('transformers')}"
    print(json.dumps(name), flush=True)
    for _ in sys.stdin:
        begin = time.perf_counter()
        loss = step()
        seconds = time.perf_counter() - begin
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        print(json.dumps({"seconds": seconds, "loss": loss, "peak_rss_mb": peak}), flush=True)


def compare(pythons: list[str], folder: str, model: str, lora: bool, remat: bool, steps: int) -> dict:
    """Run steps of all systems in turn. The first step of each, which compiles or warms up, is not counted.

    Returns of transformers + peft ("hf") the seconds of its fastest step and its peak RSS, and of jaxtune the same on
    each version of jax with the ratios to "hf".
    """
    processes = []
    for system, python in [("hf", sys.executable), *(("jaxtune", python) for python in pythons)]:
        command = [python, __file__, "--serve", system, "--folder", folder, "--model", model]
        command += ["--lora"] * lora + ["--remat"] * remat
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        processes.append(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        )
    names = [json.loads(process.stdout.readline()) for process in processes]
    answers = [[] for _ in processes]
    for _ in range(steps + 1):
        for process, answered in zip(processes, answers, strict=True):
            process.stdin.write("step\n")
            process.stdin.flush()
            answered.append(json.loads(process.stdout.readline()))
    for process in processes:
        process.stdin.close()
        process.wait()
    losses = [answered[0]["loss"] for answered in answers]
    assert max(losses) - min(losses) < 1e-4, f"not the same work: {losses}"
    hf, *ours = (
        {"seconds": min(step["seconds"] for step in answered[1:]), "peak_rss_mb": answered[-1]["peak_rss_mb"]}
        for answered in answers
    )
    for row in ours:
        row["time_ratio"] = row["seconds"] / hf["seconds"]
        row["rss_ratio"] = row["peak_rss_mb"] / hf["peak_rss_mb"]
    jaxtune = dict(zip(names[1:], ours, strict=True))
    return {"step": "LoRA" if lora else "full", "remat": remat, "hf": hf, "jaxtune": jaxtune}


def main() -> None:
    """Print a row for each kind of step and rematerialisation policy, and write all rows as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=["dense", "moe"], default="dense")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--only", choices=["lora", "full"])
    parser.add_argument("--python", nargs="+", default=[sys.executable])
    parser.add_argument("--serve")
    parser.add_argument("--folder")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--remat", action="store_true")
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.folder, options.model, options.lora, options.remat)
        return
    import torch
    import transformers

    shape = MODEL | (EXPERTS if options.model == "moe" else {})
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        config = {"dense": transformers.Qwen3Config, "moe": transformers.Qwen3MoeConfig}[options.model](**shape)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        print(f"{ROWS} x {SEQUENCE} tokens, load {os.getloadavg()[0]:.2f}; best of {options.steps}")
        columns = ("step", "remat", "hf s", "hf MB", "jax", "jaxtune s", "ratio", "jaxtune MB", "ratio")
        print("".join(f"{column:>14}" for column in columns))
        results = []
        for lora in (True, False):
            if options.only and lora != (options.only == "lora"):
                continue
            for remat in (False, True):
                row = compare(options.python, folder, options.model, lora, remat, options.steps)
                results.append(row)
                hf = row["hf"]
                for name, ours in row["jaxtune"].items():
                    cells = [row["step"], str(remat), f"{hf['seconds']:.2f}", f"{hf['peak_rss_mb']:.0f}", name]
                    cells += [f"{ours['seconds']:.2f}", f"{ours['time_ratio']:.2f}"]
                    cells += [f"{ours['peak_rss_mb']:.0f}", f"{ours['rss_ratio']:.2f}"]
                    print("".join(f"{cell:>14}" for cell in cells), flush=True)
    if not options.only:
        report = {"model": shape, "rows": ROWS, "sequence": SEQUENCE, "results": results}
        name = "cpu_vs_hf.json" if options.model == "dense" else "cpu_vs_hf_moe.json"
        (RESULTS / name).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
