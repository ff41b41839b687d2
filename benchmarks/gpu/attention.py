"""Attention at head dimension 128 in bfloat16: TFLOP/s of every backend, and of torch's SDPA in the same process.

Only necessary operations count: p is the number of visible pairs of a query and a key, the sum over documents of
length * w - w^2 / 2, where w = min(length, window) (so length^2 / 2 without a window), and

    forward 4 * p * heads * head_dim, backward 2.5 times as many.

Torch has no packed or windowed kernel that can be selected, so its rows are always dense and causal: for packed rows,
their length is chosen to give the same work; for a window, they are the same rows without one. Compare TFLOP/s, or
their ratio.
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gpu.timing import Call, seconds_per_call
from gpu.workers import Job, Piece, Row
from pallas_kernels.flash_attention import BACKENDS, MaskSpec, differentiate, flash_attention, triton
from pallas_kernels.flash_attention.mask import intervals
from pallas_kernels.flash_attention.variant import Variant

# Lengths of the documents of an 8192-token row, off every block boundary: 0.6 % less work than four of 2048.
DOCUMENTS = (3071, 2049, 1537, 511, 513, 389, 122)


def _case(rows: int, length: int, *, heads: int = 16, kv_heads: int = 16, head_dim: int = 128, **features: Any) -> dict:
    return {"rows": rows, "length": length, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, **features}


# 16384 tokens each, the most important first, because time may run out.
CASES = {
    "causal-8k": _case(2, 8192),
    "packed-8k": _case(2, 8192, documents=DOCUMENTS, peer_length=2048),
    "packed-8k-gqa": _case(2, 8192, heads=32, kv_heads=8, documents=DOCUMENTS, peer_length=2048),
    "causal-2k": _case(8, 2048),
    "window-8k": _case(2, 8192, window=1024),
    "causal-16k": _case(1, 16384),
    "causal-4k": _case(4, 4096),
    "packed-16k": _case(1, 16384, documents=tuple(2 * length for length in DOCUMENTS), peer_length=4096),
}
TINY = {"heads": 2, "kv_heads": 1, "head_dim": 16}
SMOKE_CASES = {
    "packed": _case(1, 64, documents=(39, 25), peer_length=32, **TINY),
    "window": _case(1, 64, window=16, **TINY),
}
NAMES = tuple(backend.name for backend in BACKENDS)
PEERS = {"tokamax": "tokamax", "torch-flash": "torch"}  # contender: the package that it needs
XLA_CASES = ("causal-8k", "packed-8k", *SMOKE_CASES)  # the others would take minutes to compile
# Targets: TFLOP/s of the forward pass; ratio to cuDNN of forward and backward, on dense rows of the same work.
FORWARD_TARGETS = {"mosaic/causal-8k": 480, "triton/causal-8k": 350}
RATIO_TARGETS = {f"{backend}/packed-8k": 0.85 for backend in ("mosaic", "triton")}


def piece(smoke: bool) -> Piece:
    """The jobs: contenders by cases. Cases that a kernel refuses are found when they run."""
    jobs = []
    for name in SMOKE_CASES if smoke else CASES:
        for contender in (*NAMES, *PEERS):
            absent = contender in PEERS and not importlib.util.find_spec(PEERS[contender])
            refused = f"{PEERS[contender]} is not installed" if absent else None
            if contender == "xla" and name not in XLA_CASES:
                refused = "left out: minutes to compile"
            jobs.append(Job(contender, name, __name__, {"contender": contender, "name": name, "smoke": smoke}, refused))
    columns = (
        ("fwd TFLOP/s", "forward_tflops", ".0f"),
        ("torch cuDNN", "forward_peer_tflops", ".0f"),
        ("ratio", "forward_ratio", ".2f"),
        ("target", "forward_target", ""),
        ("fwd+bwd", "both_tflops", ".0f"),
        ("torch cuDNN", "both_peer_tflops", ".0f"),
        ("ratio", "both_ratio", ".2f"),
        ("target", "both_ratio_target", ""),
    )
    title = "attention, bfloat16, TFLOP/s of necessary work; torch: dense rows of the same work"
    return Piece("attention", title, jobs, columns, 0.15, 40, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"})


def measure(contender: str, name: str, smoke: bool) -> Row:
    """Time one contender on one case, in turn with torch's cuDNN attention if torch is installed."""
    case = (SMOKE_CASES if smoke else CASES)[name]
    work = flops(_peer(case) if contender == "torch-flash" else case)
    row: Row = {"flops_forward": work}
    if contender == "torch-flash":
        calls, row["kernels"] = _torch_calls(case, "FLASH_ATTENTION")
    else:
        attend, row["how"] = _attend(contender, case, smoke)
        arrays, d_out = _arrays(case)
        if reason := refusal(attend, *arrays):
            return {"refused": reason}
        calls = _jax_calls(attend, arrays, d_out)
    if importlib.util.find_spec("torch"):
        peers, row["peer_kernels"] = _torch_calls(case, "CUDNN_ATTENTION")
    else:
        peers, row["peer"] = {}, "torch is not installed"
    for part, factor in (("forward", 1.0), ("both", 3.5)):
        pair = {"own": calls[part]} | ({"peer": peers[part]} if peers else {})
        seconds = seconds_per_call(pair, *((2, 0.0) if smoke else (7, 0.03)))
        row[f"{part}_seconds"] = seconds["own"]
        row[f"{part}_tflops"] = factor * work / seconds["own"] / 1e12
        if peers:
            row[f"{part}_peer_tflops"] = factor * flops(_peer(case)) / seconds["peer"] / 1e12
            row[f"{part}_ratio"] = row[f"{part}_tflops"] / row[f"{part}_peer_tflops"]
    targets = (("forward_target", FORWARD_TARGETS), ("both_ratio_target", RATIO_TARGETS))
    return row | {key: target[f"{contender}/{name}"] for key, target in targets if f"{contender}/{name}" in target}


def flops(case: dict) -> float:
    """Return the floating-point operations that the forward pass of a case needs."""
    pairs = 0.0
    for length in case.get("documents", (case["length"],)):
        window = min(case.get("window", length), length)
        pairs += length * window - window**2 / 2
    return 4 * case["rows"] * pairs * case["heads"] * case["head_dim"]


def refusal(attend: Callable, *arguments: Any) -> str | None:
    """Return the reason if no kernel can run this here, found by tracing; other errors are raised."""
    try:
        jax.eval_shape(attend, *arguments)
    except ValueError as error:
        if "cannot run this on" not in str(error):
            raise
        return str(error)
    return None


def run_by(backend: str, smoke: bool) -> tuple[Callable[..., Any], str]:
    """Return the op with one backend, and how it runs: on a CPU the Triton kernels are interpreted."""
    if not (smoke and backend == "triton"):
        return functools.partial(flash_attention, backend=backend), "compiled"
    passes = (functools.partial(function, interpret=True) for function in (triton.forward, triton.backward))
    kernels = differentiate.attention(*passes)

    def interpreted(q, k, v, mask, *, soft_cap=None, sinks=None, return_lse=False):
        variant = Variant(q.shape[-1] ** -0.5, soft_cap, mask.causal, mask.window, None)
        out, lse = kernels(q, k, v, *intervals(mask, q.shape[0], q.shape[1], k.shape[1]), sinks, variant)
        return (out, lse) if return_lse else out

    return interpreted, "interpreted"


def _attend(contender: str, case: dict, smoke: bool) -> tuple[Callable[..., Any], str]:
    if contender == "tokamax":
        return _tokamax(case), "compiled"
    run, how = run_by(contender, smoke)
    most = len(case["documents"]) if "documents" in case else None

    def attend(q, k, v, key_start=None):
        return run(q, k, v, MaskSpec(True, case.get("window"), key_start, documents=most))

    return attend, how


def _tokamax(case: dict) -> Callable[..., Any]:
    import tokamax

    if "documents" in case:

        def packed(q, k, v, key_start):
            raise ValueError("tokamax cannot run this on any GPU: its public function has no packed rows")

        return packed
    window = None if "window" not in case else (case["window"] - 1, 0)
    return functools.partial(tokamax.dot_product_attention, is_causal=True, local_window_size=window)


def _arrays(case: dict) -> tuple[list[jax.Array], jax.Array]:
    """q, k, v (and key_start for packed rows), and the gradient of the output; all normal."""
    heads = (case["heads"], case["kv_heads"], case["kv_heads"], case["heads"])
    keys = jax.random.split(jax.random.key(0), len(heads))
    shapes = [(case["rows"], case["length"], h, case["head_dim"]) for h in heads]
    *arrays, d_out = (jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes))
    if "documents" in case:
        rows = []
        for row in range(case["rows"]):  # every other row has its documents in reverse order
            lengths = case["documents"][:: -1 if row % 2 else 1]
            rows.append(np.repeat(np.cumsum((0, *lengths[:-1])), lengths))
        arrays.append(jnp.asarray(np.stack(rows), jnp.int32))
    return arrays, d_out


def _jax_calls(attend: Callable, arrays: list[jax.Array], d_out: jax.Array) -> dict[str, Call]:
    forward = jax.jit(attend)

    @jax.jit
    def both(arrays, d_out):
        out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, *arrays[3:]), *arrays[:3])
        return out, pull(d_out)

    return {
        "forward": Call(lambda: forward(*arrays), jax.block_until_ready),
        "both": Call(lambda: both(arrays, d_out), jax.block_until_ready),
    }


def _peer(case: dict) -> dict:
    """The case for torch: dense causal rows with the same number of tokens."""
    length = case.get("peer_length", case["length"])
    same = {key: case[key] for key in ("heads", "kv_heads", "head_dim")}
    return {"rows": case["rows"] * case["length"] // length, "length": length, **same}


def _torch_calls(case: dict, wanted: str) -> tuple[dict[str, Call], list[str]]:
    """Torch's attention with one of its backends, on K and V expanded to all heads; and the kernels that ran."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from gpu.torch_kernels import attention_kernels, device, synchronize

    # On a CPU, which only the smoke run uses, flash is the only kernel.
    chosen = getattr(SDPBackend, wanted if device() == "cuda" else "FLASH_ATTENTION")
    dense = _peer(case)
    shape = (dense["rows"], dense["length"], dense["heads"], dense["head_dim"])
    q, k, v, d_out = (torch.randn(shape, dtype=torch.bfloat16, device=device()).transpose(1, 2) for _ in range(4))

    def attend(q, k, v):
        with sdpa_kernel(chosen):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    leaves = [x.detach().requires_grad_() for x in (q, k, v)]

    def both():
        return torch.autograd.grad(attend(*leaves), leaves, d_out)

    calls = {"forward": Call(lambda: attend(q, k, v), synchronize), "both": Call(both, synchronize)}
    return calls, attention_kernels(both)
