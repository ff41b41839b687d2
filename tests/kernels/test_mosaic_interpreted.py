"""The Mosaic GPU attention kernels in jax's interpreter: numbers, masks, barriers and races, but no wgmma.

The interpreter runs the three warpgroups as threads on memory that starts as NaN, and raises on a race and on a barrier
that is waited for out of turn; a wait that cannot end reaches the timeout. Plain products replace wgmma, so operand
layouts, registers and ptxas' output are proven only when a GPU runs the kernels; tests/aot compiles them.
"""

import importlib.metadata
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.attention_cases import (
    Case,
    arguments,
    assert_close,
    by_intervals_alone,
    in_float64,
    outputs_and_gradients,
    poison_unseen,
)

from pallas_kernels.flash_attention import reference
from pallas_kernels.flash_attention.differentiate import attention
from pallas_kernels.flash_attention.mosaic import mosaic_backward, mosaic_forward
from pallas_kernels.flash_attention.variant import AttentionRequest, Variant
from pallas_kernels.gpus import GPUS, Device
from pallas_kernels.registry import on_hopper

COVERS = ("pallas_kernels", "tests/kernels", "tests/conftest.py")

pytestmark = pytest.mark.timeout(300)
interpreted = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="jax's interpreter of Mosaic GPU can run these kernels from 0.12 on"
)
OP = attention(partial(mosaic_forward.forward, interpret=True), partial(mosaic_backward.backward, interpret=True))
# Three blocks of queries and keys in each direction, the last incomplete: rings wrap around, some blocks are skipped.
SMALL = partial(Case, queries=300, heads=(2, 1), head_dim=64, dtype="bfloat16")
PACKED = ((140, 1, -20, 100), (300,))
GRID = {
    "causal": SMALL(heads=(4, 2)),
    "head dim 128, float16": SMALL(head_dim=128, dtype="float16", documents=PACKED),
    "everything": SMALL(documents=PACKED, window=60, soft_cap=1.5, sinks=True, heads=(6, 2)),
    "not causal, few queries": SMALL(queries=70, keys=300, causal=False),
    "the first see nothing": SMALL(offset=-141, sinks=True),
    "bidirectional documents": SMALL(documents=PACKED, spans=(((0, 140), (140, 141), (161, 261)), ((0, 300),))),
    "images in text, window": SMALL(spans=(((30, 150), (160, 280)), ((0, 290),)), window=200, sinks=True),
    "all padding": SMALL(queries=130, documents=((), ())),
}


@pytest.mark.every_jax
@interpreted
@pytest.mark.parametrize("case", GRID.values(), ids=GRID)
def test_outputs_and_gradients(case):
    problem = arguments(case)
    got = outputs_and_gradients(OP, by_intervals_alone(case.variant), problem)
    assert_close(got, in_float64(case, problem), case.dtype)


@interpreted
def test_what_is_not_seen_never_leaks():
    """Queries that see nothing and keys that no query sees hold NaN: their gradients are zero, the others unchanged."""
    case = SMALL(documents=PACKED)
    clean = arguments(case)
    blind = np.asarray(clean.first >= clean.end)
    unseen = ~np.asarray(reference.visible(clean.first, clean.end, clean.k.shape[1])).any(axis=1)
    assert blind.any() and unseen.any()

    poison = poison_unseen(clean, blind, unseen)
    got = outputs_and_gradients(OP, by_intervals_alone(case.variant), poison)
    assert_close(got, in_float64(case, clean), case.dtype)
    for tensor, silent in {"out": blind, "d_q": blind, "d_k": unseen, "d_v": unseen}.items():
        assert not np.asarray(got[tensor])[silent].any()


@interpreted
def test_logits_of_hidden_keys_may_be_of_any_size():
    """Only the last query sees the last key, and it has no cotangent."""
    case = SMALL(queries=200)
    problem = arguments(case)
    problem = problem._replace(
        k=problem.k.at[:, -1].multiply(1e4),
        d_out=problem.d_out.at[:, -1].set(0),
        d_lse=problem.d_lse.at[:, :, -1].set(0),
    )
    got = outputs_and_gradients(OP, by_intervals_alone(case.variant), problem)
    assert_close(got, in_float64(case, problem), case.dtype)


def request(**changed) -> AttentionRequest:
    variant = Variant(scale=0.1, soft_cap=None, causal=True, window=None, query_offset=0)
    plain = dict(dtype=jnp.bfloat16, head_dim=128, queries=100, keys=100, packed=True, variant=variant)
    return AttentionRequest(**plain | dict(sinks=False, return_lse=True) | changed)


H100 = Device("gpu", GPUS["h100"].kind, GPUS["h100"].capability)


def test_refuses_what_it_cannot_run(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "12.9.86")
    assert mosaic_forward.refuses(H100, request()) is None
    assert mosaic_forward.refuses(H100, request(dtype=jnp.dtype("float16"), head_dim=64)) is None
    for gpu in ("a100", "rtx4090", "b200"):
        assert "Hopper" in on_hopper(mosaic_forward.refuses)(
            Device("gpu", GPUS[gpu].kind, GPUS[gpu].capability), request()
        )
    assert "Hopper" in on_hopper(mosaic_forward.refuses)(Device("cpu", "cpu", None), request())
    assert "float32" in mosaic_forward.refuses(H100, request(dtype=jnp.float32))
    assert "96" in mosaic_forward.refuses(H100, request(head_dim=96))


@pytest.mark.parametrize(
    ("version", "refused"),
    [("12.6.85", False), ("12.8.61", True), ("12.9.41", True), ("12.9.86", False), (None, False)],
)
def test_refuses_a_ptxas_that_miscompiles(monkeypatch, version, refused):
    def installed(package):
        if version is None:
            raise importlib.metadata.PackageNotFoundError(package)
        return version

    monkeypatch.setattr(importlib.metadata, "version", installed)
    reason = mosaic_forward.refuses(H100, request())
    assert (reason is not None) == refused and (not refused or version in reason)
