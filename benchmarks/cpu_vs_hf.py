"""Compare jaxtune with transformers + peft on a CPU: ratio of step times, and peak RSS of both.

    python benchmarks/cpu_vs_hf.py [--model moe] [--steps 7]

Each system runs in its own process, so that peak memory is measured separately. Steps alternate between the two, so
that other load on the machine affects both. Both read the same random Qwen3, dense or with experts, and train on the
same tokens with AdamW and gradient clipping in float32.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
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
    """Run a step for each line on standard input; answer with seconds, loss and peak RSS in MB."""
    step = (jaxtune_step if system == "jaxtune" else hf_step)(*what)
    for _ in sys.stdin:
        begin = time.perf_counter()
        loss = step()
        seconds = time.perf_counter() - begin
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        print(json.dumps({"seconds": seconds, "loss": loss, "peak_rss_mb": peak}), flush=True)


def compare(folder: str, model: str, lora: bool, remat: bool, steps: int) -> dict:
    """Run steps of both systems in turn. The first step of each, which compiles or warms up, is not counted."""
    systems = {}
    for system in ("jaxtune", "hf"):
        command = [sys.executable, __file__, "--serve", system, "--folder", folder, "--model", model]
        command += ["--lora"] * lora + ["--remat"] * remat
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        systems[system] = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
    answers = {system: [] for system in systems}
    for _ in range(steps + 1):
        for system, process in systems.items():
            process.stdin.write("step\n")
            process.stdin.flush()
            answers[system].append(json.loads(process.stdout.readline()))
    for process in systems.values():
        process.stdin.close()
        process.wait()
    best = {system: min(step["seconds"] for step in measured[1:]) for system, measured in answers.items()}
    peak = {system: measured[-1]["peak_rss_mb"] for system, measured in answers.items()}
    first_losses = [measured[0]["loss"] for measured in answers.values()]
    assert abs(first_losses[0] - first_losses[1]) < 1e-4, f"not the same work: {first_losses}"
    return {
        "step": "LoRA" if lora else "full",
        "remat": remat,
        "seconds": best,
        "time_ratio": best["jaxtune"] / best["hf"],
        "peak_rss_mb": peak,
        "rss_ratio": peak["jaxtune"] / peak["hf"],
    }


def main() -> None:
    """Print a row for each kind of step and rematerialisation policy, and write all rows as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=["dense", "moe"], default="dense")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--only", choices=["lora", "full"])
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
        columns = ("step", "remat", "jaxtune s", "hf s", "ratio", "jaxtune MB", "hf MB", "ratio")
        print("".join(f"{column:>11}" for column in columns))
        results = []
        for lora in (True, False):
            if options.only and lora != (options.only == "lora"):
                continue
            for remat in (False, True):
                row = compare(folder, options.model, lora, remat, options.steps)
                results.append(row)
                seconds, peak = row["seconds"], row["peak_rss_mb"]
                times = f"{seconds['jaxtune']:>11.2f}{seconds['hf']:>11.2f}{row['time_ratio']:>11.2f}"
                sizes = f"{peak['jaxtune']:>11.0f}{peak['hf']:>11.0f}{row['rss_ratio']:>11.2f}"
                print(f"{row['step']:>11}{row['remat']!s:>11}{times}{sizes}", flush=True)
    if not options.only:
        report = {"model": shape, "rows": ROWS, "sequence": SEQUENCE, "results": results}
        name = "cpu_vs_hf.json" if options.model == "dense" else "cpu_vs_hf_moe.json"
        (RESULTS / name).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
