"""A LoRA step of Qwen3 with random weights: jaxtune against transformers + peft, one at a time on the GPU.

The load is that in Surogate's published table: rank 16 on every linear layer, 2 rows of 2048 tokens, accumulation 4; on
a bfloat16 base, and on one quantized as in configs/qwen_qlora_nf4.py and _fp8.py. MFU counts 4 N + 3 F_attention (and 6
per adapter parameter) FLOPs a token, without recomputation and dequantization, relative to the GPU's dense bf16 peak.
"""

import importlib.util
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gpu import models
from gpu.predicted import compare_prediction, compile_and_read
from gpu.qwen3 import CONFIGS, adapter_parameters, matrix_parameters
from gpu.workers import Job, Piece, Row
from jaxtune.monitor import throughput

ACCUMULATION, ROWS, LENGTH = 4, 2, 2048
SIZES = ("8B", "0.6B", "1.7B", "4B")  # the most important first
QUANT = {"jaxtune": None, "jaxtune-nf4": "nf4", "jaxtune-fp8": "fp8"}  # format of the base
TARGETS = {  # tokens/s on one H100; for quantized bases below 8B, Surogate's figures
    "jaxtune": {"0.6B": 110_000, "1.7B": 51_000, "4B": 24_000, "8B": 14_700},
    "jaxtune-nf4": {"0.6B": 16_600, "1.7B": 16_100, "4B": 11_000, "8B": 13_500},
    "jaxtune-fp8": {"0.6B": 16_500, "1.7B": 15_800, "4B": 11_200, "8B": 9_600},
}
SMOKE_SYSTEMS = ("jaxtune", "jaxtune-nf4")
SMOKE_LENGTH = 32
REMATS = ("none", "dots", "block")
RESERVE = 0.02  # share of the GPU's memory kept free for allocations that the compiler does not count
PEERS = ("torch", "transformers", "peft")


def piece(smoke: bool) -> Piece:
    """The jobs: systems by sizes."""
    missing = [package for package in PEERS if not importlib.util.find_spec(package)]
    refused = f"{', '.join(missing)} not installed" if missing else None
    jobs = []
    for size in ("tiny",) if smoke else SIZES:
        arguments = {"size": size, "smoke": smoke}
        systems = SMOKE_SYSTEMS if smoke else QUANT
        jobs += [Job(name, size, __name__, {"contender": name, **arguments}) for name in systems]
        jobs.append(Job("hf+peft", size, "gpu.train_step_hf", arguments, refused))
    columns = (
        ("tokens/s", "tokens_per_second", ",.0f"),
        ("target", "target", ",.0f"),
        ("MFU %", "mfu_percent", ".1f"),
        ("plan error %", "error_percent", "+.1f"),
        ("base GB", "frozen_gb", ".1f"),
        ("peak GB", "peak_gb", ".1f"),
        ("remat", "remat", ""),
    )
    title = f"LoRA r16 step of Qwen3, {ACCUMULATION} x {ROWS} x {LENGTH} tokens, bfloat16"
    # jax preallocates this share of memory, so that fragmentation does not decide what fits.
    environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.93"}
    return Piece("train_step", title, jobs, columns, 0.36, 150, environment, fresh=True, conclude=quantized_over_bf16)


def quantized_over_bf16(rows: dict[str, Row]) -> dict[str, Any]:
    """Return tokens/s on each quantized base over tokens/s on the bfloat16 base of the same size."""
    ratios = {}
    for size in CONFIGS:
        rates = {name: rows.get(f"{name}/{size}", {}).get("tokens_per_second") for name in QUANT}
        plain = rates.pop("jaxtune")
        ratios |= {f"{name}/{size} over bfloat16": rate / plain for name, rate in rates.items() if rate and plain}
    return ratios


def shape(smoke: bool) -> tuple[int, int, int]:
    """Return the shape of a step's tokens, (accumulation, rows, positions)."""
    return ACCUMULATION, ROWS, SMOKE_LENGTH if smoke else LENGTH


def row(config: dict, shape: tuple[int, int, int], seconds: list[float], device: str, lora: bool = True) -> Row:
    """Return tokens/s and MFU of the median step, for LoRA or for the whole model."""
    second = statistics.median(seconds)
    width = config["num_attention_heads"] * config["head_dim"]
    matrices = (adapter_parameters(config), matrix_parameters(config)) if lora else (matrix_parameters(config), 0)
    work = throughput.Work(*matrices, config["num_hidden_layers"], width, seq_len=shape[-1])
    rate = math.prod(shape) / second
    result: Row = {"seconds": second, "tokens_per_second": rate, "flops_per_token": throughput.flops_per_token(work)}
    utilisation = throughput.mfu(work, rate, device, 1)
    if utilisation is not None:
        result["mfu_percent"] = 100 * utilisation
    return result


def time_steps(step, steps: int) -> list[float]:
    """Time blocking steps, after two that compile and warm up; return the seconds of each."""
    for _ in range(2):
        step()
    seconds = []
    for _ in range(steps):
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    return seconds


def measure(contender: str, size: str, smoke: bool) -> Row:
    """Measure jaxtune's step on one base."""
    target = {"target": TARGETS[contender][size]} if size in TARGETS[contender] else {}
    return target | measure_step(CONFIGS[size], shape(smoke), 2 if smoke else 7, quant=QUANT[contender])


def measure_step(
    config: dict,
    shape: tuple[int, int, int],
    steps: int,
    remats: Sequence[str] = REMATS,
    measured: Mapping[str, float] = {},
    **options: Any,
) -> Row:
    """Measure jaxtune's step with the first rematerialisation policy that fits the GPU.

    The row also has the time that `jaxtune plan` predicts for the same program, with its assumptions and with
    `measured` rates. `options` go to models.training.
    """
    chosen = models.log_choices()
    device = jax.devices()[0]
    jax.set_mesh(models.one_device_mesh(device))
    data = models.batch(np.random.default_rng(0).integers(0, config["vocab_size"], shape))
    rate = jnp.float32(models.RATE)
    state = frozen = None
    tried = {}
    for remat in remats:
        built = models.training(config, remat=remat, **options)
        if state is None:
            trained, frozen = models.values(built)
            # Donated, so that the parameters are not in memory twice.
            state = jax.jit(built.start, donate_argnums=0)(trained)
            del trained
        begin = time.perf_counter()
        step, read = compile_and_read(built.step, state, frozen, data, rate, donate_argnums=0)
        compiled = time.perf_counter() - begin
        memory = step.memory_analysis()
        needed = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        tried[remat] = (needed + memory.temp_size_in_bytes) / 1e9
        limit = (device.memory_stats() or {}).get("bytes_limit", float("inf"))
        if tried[remat] * 1e9 <= limit * (1 - RESERVE):
            break
    losses = []

    def one() -> None:
        nonlocal state
        state, metrics = step(state, frozen, data, rate)
        losses.append(metrics["loss"].item())

    seconds = time_steps(one, steps)
    stats = device.memory_stats() or {}
    result = row(config, shape, seconds, device.device_kind, options.get("lora", True))
    predicted = compare_prediction(read, result["seconds"], measured) if read else {}
    return (
        result
        | predicted
        | {
            "remat": remat,
            "frozen_gb": sum(array.nbytes for array in jax.tree.leaves(frozen)) / 1e9,
            "peak_gb": stats.get("peak_bytes_in_use", tried[remat] * 1e9) / 1e9,
            "compiled_gb": tried,
            "compile_seconds": compiled,
            "losses": losses,
            "kernels": chosen,
        }
    )
