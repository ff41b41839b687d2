"""Products of rows with the weights of their experts: our kernels, torch's grouped product, and a loop; bfloat16.

FLOPs count only rows of tokens, not the padding of the kernels' blocks.
"""

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gpu.quantized import largest_error, wrong
from gpu.timing import Call, seconds_per_call
from gpu.workers import Job, Piece, Row
from pallas_kernels.gpus import current_device
from pallas_kernels.grouped_matmul import Arrangement, arrange, triton, xla_by_block

# (experts, their rows, their columns, experts per token): gate projections of Qwen3-30B-A3B and gpt-oss-20b.
MODELS = {"qwen3-30b-a3b": (128, 768, 2048, 8), "gpt-oss-20b": (32, 2880, 2880, 4)}
TOKENS = (2048, 16_384)
SMOKE_MODELS, SMOKE_TOKENS = {"tiny": (4, 64, 128, 2)}, (24,)
CONTENDERS = ("triton", "torch", "torch-loop")
PARTS = ("forward", "dx", "dw")
TOLERANCE = 6e-2  # error of an element over the root mean square: the largest element's rounding to bfloat16


def piece(smoke: bool) -> Piece:
    """The jobs: contenders by models and tokens."""
    absent = None if importlib.util.find_spec("torch") else "torch is not installed"
    jobs = [
        Job(
            contender,
            f"{model}-{tokens}",
            __name__,
            {"contender": contender, "model": model, "tokens": tokens, "smoke": smoke},
            None if contender == "triton" else absent,
        )
        for model in (SMOKE_MODELS if smoke else MODELS)
        for tokens in (SMOKE_TOKENS if smoke else TOKENS)
        for contender in CONTENDERS
    ]
    columns = tuple(
        column
        for part in PARTS
        for column in ((f"{part} us", f"{part}_microseconds", ",.0f"), ("TFLOP/s", f"{part}_tflops", ",.0f"))
    )
    title = "rows by the weights of their experts, bfloat16"
    return Piece("grouped_matmul", title, jobs, columns, 0.05, 60, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"})


def measure(contender: str, model: str, tokens: int, smoke: bool) -> Row:
    """Time one contender, after checking its results."""
    experts, out, into, active = (MODELS | SMOKE_MODELS)[model]
    keys = jax.random.split(jax.random.key(0), 3)
    everyone = np.tile(np.arange(experts), (tokens, 1))
    items = np.sort(np.random.default_rng(0).permuted(everyone, axis=1)[:, :active], axis=None)
    arrangement = jax.jit(arrange, static_argnums=1)(jnp.asarray(items), experts)
    x, dy = (jax.random.normal(key, (len(items), width), jnp.bfloat16) for key, width in zip(keys, (into, out)))
    weight = jax.random.normal(keys[2], (experts, out, into), jnp.bfloat16) * into**-0.5
    if contender == "triton":
        if not smoke and (reason := triton.refuses(current_device(), weight)):
            return {"refused": reason}
        calls = _kernels(x, dy, weight, arrangement, smoke)
    else:
        from gpu.torch_kernels import device

        if not smoke and device() != "cuda":
            return {"refused": "this torch has no CUDA"}
        calls = _by_torch(x, dy, weight, np.bincount(items, minlength=experts), contender == "torch")
    row: Row = {"items": len(items), "weight": weight.shape}
    for part, wanted in _expected(x, dy, weight, arrangement).items():
        result = calls[part].run()
        calls[part].wait(result)
        if contender != "triton":
            result = jnp.from_dlpack(result.contiguous())
        elif part != "dw":  # the kernel's rows are padded to blocks
            result = result[arrangement.row_of]
        row[f"{part}_error"] = largest_error(result, wanted).item()
        if failure := wrong(part, row[f"{part}_error"], TOLERANCE):
            return row | failure
    for part, seconds in seconds_per_call(calls, *((2, 0.0) if smoke else (7, 0.02))).items():
        row[f"{part}_microseconds"] = seconds * 1e6
        row[f"{part}_tflops"] = 2 * len(items) * out * into / seconds / 1e12
    return row


def _in_rows(x: jax.Array, arrangement: Arrangement) -> jax.Array:
    return jnp.take(x, arrangement.item_of, axis=0, mode="fill", fill_value=0)


def _kernels(x: jax.Array, dy: jax.Array, weight: jax.Array, arrangement: Arrangement, smoke: bool) -> dict[str, Call]:
    """Calls of our kernels on rows that are already arranged in blocks; on a CPU the kernels are interpreted."""
    x, dy = (_in_rows(each, arrangement) for each in (x, dy))
    functions: dict[str, tuple[Callable[..., jax.Array], Any]] = {
        "forward": (partial(triton.multiply, transposed=False, interpret=smoke), (x, weight)),
        "dx": (partial(triton.multiply, transposed=True, interpret=smoke), (dy, weight)),
        "dw": (partial(triton.outer, interpret=smoke), (dy, x)),
    }
    return {
        part: Call(partial(jax.jit(function), *arguments, arrangement.groups), jax.block_until_ready)
        for part, (function, arguments) in functions.items()
    }


def _by_torch(x: jax.Array, dy: jax.Array, weight: jax.Array, counts: np.ndarray, grouped: bool) -> dict[str, Call]:
    """Calls of torch._grouped_mm, or of torch.mm for one expert after the other."""
    import torch

    from gpu.torch_kernels import synchronize

    x, dy, weight = (torch.from_dlpack(array) for array in (x, dy, weight))
    ends = torch.tensor(np.cumsum(counts), dtype=torch.int32, device=x.device)
    if grouped:
        runs = {
            "forward": lambda: torch._grouped_mm(x, weight.transpose(1, 2), offs=ends),
            "dx": lambda: torch._grouped_mm(dy, weight, offs=ends),
            "dw": lambda: torch._grouped_mm(dy.t(), x, offs=ends),
        }
    else:
        sizes = counts.tolist()
        runs = {
            "forward": lambda: torch.cat([rows @ held.t() for rows, held in zip(x.split(sizes), weight)]),
            "dx": lambda: torch.cat([rows @ held for rows, held in zip(dy.split(sizes), weight)]),
            "dw": lambda: torch.stack([left.t() @ right for left, right in zip(dy.split(sizes), x.split(sizes))]),
        }
    return {part: Call(run, synchronize) for part, run in runs.items()}


def _expected(x: jax.Array, dy: jax.Array, weight: jax.Array, arrangement: Arrangement) -> dict[str, jax.Array]:
    """The expected results, one row for each item, by XLA in float32."""
    x, dy = (_in_rows(each.astype(jnp.float32), arrangement) for each in (x, dy))
    weight, groups = weight.astype(jnp.float32), arrangement.groups
    by_row = {
        "forward": jax.jit(xla_by_block.multiply, static_argnums=3)(x, weight, groups, False),
        "dx": jax.jit(xla_by_block.multiply, static_argnums=3)(dy, weight, groups, True),
    }
    of_items = {part: rows[arrangement.row_of] for part, rows in by_row.items()}
    return {**of_items, "dw": jax.jit(xla_by_block.outer)(dy, x, groups)}
