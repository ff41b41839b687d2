"""Every attention backend against a float64 reference, forward and backward, over all features."""

import math
import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads
from kernels.attention_cases import (
    Arguments,
    Case,
    arguments,
    assert_close,
    by_intervals_alone,
    in_float64,
    outputs_and_gradients,
    poison_unseen,
)
from nightly_rows import nightly_except

from pallas_kernels.flash_attention import MaskSpec, cudnn, differentiate, flash_attention, reference, triton, xla
from pallas_kernels.flash_attention.tiles import Tile, Tiles
from pallas_kernels.flash_attention.variant import AttentionRequest, Variant
from pallas_kernels.gpus import Device

COVERS = ("pallas_kernels", "tests/kernels", "tests/conftest.py")

# Small blocks, different in the two directions, so that small problems have many; Triton's are interpreted.
TILES = Tiles(forward=Tile(32, 16, 4, 2), dq=Tile(16, 32, 4, 2), dkdv=Tile(16, 32, 4, 2))
on_triton = {"tiles": TILES, "interpret": True}
BACKENDS = {
    "xla": differentiate.attention(partial(xla.forward, block=16), partial(xla.backward, block=16)),
    "triton": differentiate.attention(partial(triton.forward, **on_triton), partial(triton.backward, **on_triton)),
    "reference": reference.attention,
}
every_backend = pytest.mark.parametrize("backend", ["xla", "triton"])


def run(backend: str, case: Case, problem: Arguments):
    """Return outputs and gradients; only XLA uses knowledge of the mask while tracing."""
    variant = case.variant if backend == "xla" else by_intervals_alone(case.variant)
    return outputs_and_gradients(BACKENDS[backend], variant, problem)


# Two rows: documents of length 1 and longer than a block, padding between and after; and a row that is all padding.
PACKED = ((17, 1, 1, -3, 30, 1, 9), ())
HEAD_DIMS = (64, 72, 80, 96, 128, 192, 256)
# The documents of the first row are also images or sequences of an encoder: their tokens see each other.
WHOLE = (((0, 17), (17, 18), (18, 19), (22, 52), (52, 53), (53, 62)), ())
GRID = {
    "causal": Case(),
    "not causal": Case(causal=False),
    "window of 1": Case(window=1),
    "window": Case(window=20),
    "packed": Case(documents=PACKED),
    "packed, full rows": Case(documents=((72,), (40, 32)), heads=(4, 1)),
    "packed, not causal": Case(documents=PACKED, causal=False),
    "packed, window": Case(documents=PACKED, window=7, heads=(2, 2)),
    "packed, window, long": Case(300, documents=((140, 1, 100), (300,)), window=60),
    "all padding": Case(documents=((), ())),
    "soft-cap": Case(soft_cap=1.5),
    "sinks": Case(sinks=True),
    "everything": Case(documents=PACKED, window=20, soft_cap=1.5, sinks=True, heads=(6, 2)),
    "everything, bfloat16": Case(documents=PACKED, window=20, soft_cap=1.5, sinks=True, heads=(6, 2), dtype="bfloat16"),
    "packed, bfloat16": Case(documents=PACKED, dtype="bfloat16"),
    "packed, float16": Case(documents=PACKED, dtype="float16"),
    "decoding": Case(queries=1, keys=72, offset=50),
    "decoding, traced": Case(queries=1, keys=72, offset=50, window=20, traced_offset=True),
    "chunk of a prompt": Case(queries=40, keys=72, offset=20, sinks=True),
    "chunk of a prompt, traced": Case(queries=40, keys=72, offset=20, window=30, sinks=True, traced_offset=True),
    "ring: the last see": Case(offset=-41, sinks=True),
    "ring: none sees": Case(offset=-72),
    "ring: all see all": Case(offset=72),
    "ring: the first see": Case(offset=72, window=50),
    "chunks of a row": Case(40, 96, offset=(*[8] * 16, *[40] * 24), window=30, sinks=True),
    "ring, traced": Case(offset=-41, traced_offset=True),
    "more queries than keys": Case(queries=72, keys=40),
    "bidirectional documents": Case(documents=PACKED, spans=WHOLE, heads=(2, 2)),
    "prefixes": Case(spans=(((0, 30),), ((0, 72),)), sinks=True),
    "images in text": Case(documents=((50, 20), (72,)), spans=(((3, 24), (24, 45)), ((40, 72),)), sinks=True),
    "images in text, window": Case(
        documents=PACKED, spans=(((3, 10), (25, 45)), ()), window=20, soft_cap=1.5, sinks=True, heads=(6, 2)
    ),
    "images in text, window, bfloat16": Case(spans=(((3, 40),), ((41, 72),)), window=20, dtype="bfloat16"),
    "images in a chunk of a prompt": Case(40, 72, offset=20, spans=(((10, 33),), ((35, 64),)), window=30),
    "images in a chunk, traced": Case(40, 72, offset=20, spans=(((10, 33),), ((35, 64),)), traced_offset=True),
    **{f"head dim {dim}": Case(40, head_dim=dim, documents=((25, 6), (40,))) for dim in HEAD_DIMS},
    "head dim 72, image": Case(40, head_dim=72, spans=(((0, 25),), ((0, 40),)), heads=(2, 2), dtype="bfloat16"),
}
# Cases whose parts are in other cases.
COVERED = (
    *("window", "packed, full rows", "packed, not causal", "packed, window", "soft-cap", "everything", "decoding"),
    *("chunk of a prompt", "ring: all see all", "head dim 64", "head dim 80", "head dim 128", "head dim 192"),
    *("images in text", "images in text, window, bfloat16", "images in a chunk, traced", "head dim 72"),
)


@pytest.mark.parametrize("case", nightly_except([case for case in GRID if case not in COVERED], GRID))
@every_backend
def test_equals_float64(backend, case):
    case = GRID[case]
    problem = arguments(case)
    assert_close(run(backend, case, problem), in_float64(case, problem), case.dtype)


@every_backend
@given(
    length=st.sampled_from([1, 37, 300]),  # few lengths, because each is compiled; no block divides them
    documents=st.tuples(*[st.lists(st.just(1) | st.integers(1, 90), max_size=8)] * 2),
    window=st.none() | st.integers(1, 310),
    seed=st.integers(0, 99),
)
@settings(max_examples=15, deadline=None, derandomize=True)
def test_any_layout_equals_float64(backend, length, documents, window, seed):
    fitting = tuple(tuple(np.diff(np.minimum(np.cumsum([0, *row]), length))) for row in documents)
    case = Case(length, documents=fitting, window=window, sinks=True)
    problem = arguments(case, seed)
    variant = by_intervals_alone(case.variant)  # one compilation per length
    assert_close(outputs_and_gradients(BACKENDS[backend], variant, problem), in_float64(case, problem), case.dtype)


@pytest.mark.every_jax
@every_backend
def test_packed_documents_equal_the_documents_alone(backend):
    """Lengths repeat, because each is compiled."""
    lengths = (20, 1, 20, 1, 20)
    case = Case(documents=(lengths, lengths))
    packed = arguments(case)
    together = run(backend, case, packed)
    start = 0
    for length in lengths:
        token = slice(start, start + length)
        alone = arguments(Case(length))
        alone = alone._replace(
            **{name: getattr(packed, name)[:, token] for name in ("q", "k", "v", "d_out")},
            d_lse=packed.d_lse[:, :, token],
        )
        expected = run(backend, case, alone)
        part = {name: x[:, :, token] if name == "lse" else x[:, token] for name, x in together.items()}
        assert_close(part, expected, case.dtype)
        start += length


@pytest.mark.parametrize(
    "name", ["everything", "ring: the last see", "chunk of a prompt, traced", "decoding", "bidirectional documents"]
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_not_seen_never_leaks(backend, name):
    """Queries that see nothing and keys that no query sees hold NaN, also in cotangents; others must not change."""
    case = GRID[name]
    clean = arguments(case)
    blind = np.asarray(clean.first >= clean.end)
    unseen = ~np.asarray(reference.visible(clean.first, clean.end, clean.k.shape[1])).any(axis=1)
    assert blind.any() or unseen.any()

    poison = poison_unseen(clean, blind, unseen)
    got = run(backend, case, poison)
    for tensor, expected in run(backend, case, clean).items():
        np.testing.assert_array_equal(got[tensor], expected, err_msg=tensor)
    for tensor, silent in {"out": blind, "d_q": blind, "d_k": unseen, "d_v": unseen}.items():
        assert not np.asarray(got[tensor])[silent].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_of_hidden_keys_may_be_of_any_size(backend):
    """Only the last query sees the last key, and it has no cotangent."""
    case = GRID["causal"]
    problem = arguments(case)
    problem = problem._replace(
        k=problem.k.at[:, -1].multiply(1e4),
        d_out=problem.d_out.at[:, -1].set(0),
        d_lse=problem.d_lse.at[:, :, -1].set(0),
    )
    assert_close(run(backend, case, problem), in_float64(case, problem), case.dtype)


def test_the_reference_is_softmax_over_what_is_visible():
    """The definition, query by query in numpy."""
    case = Case(24, documents=((9, 1, 8), ()), window=5, soft_cap=1.5, sinks=True, heads=(6, 2))
    problem = arguments(case)
    got = run("reference", case, problem)
    q, k, v, sinks = (np.asarray(x, np.float64) for x in (problem.q, problem.k, problem.v, problem.sinks))
    documents = np.repeat([0, 1, 2, 3], [9, 1, 8, 6])
    for row, query, head in np.ndindex(2, 24, 6):
        keys = [j for j in range(24) if query - 5 < j <= query and documents[j] == documents[query]]
        keys = [] if row == 1 or documents[query] == 3 else keys
        logits = 1.5 * np.tanh(k[row, keys, head // 3] @ q[row, query, head] * 16**-0.5 / 1.5)
        total = np.exp(logits).sum() + np.exp(sinks[head])
        expected = np.exp(logits) / total @ v[row, keys, head // 3]
        np.testing.assert_allclose(got["out"][row, query, head], expected, atol=1e-6)
        np.testing.assert_allclose(got["lse"][row, head, query], np.log(total), atol=1e-6)


def test_the_reference_has_the_gradients_of_its_outputs():
    case = Case(12, documents=((7, 1, 2), ()), soft_cap=1.5, sinks=True)
    problem = arguments(case)
    with jax.enable_x64(True):
        q, k, v, sinks = (
            jnp.asarray(np.asarray(x), jnp.float64) for x in (problem.q, problem.k, problem.v, problem.sinks)
        )
        sees = np.asarray(problem.first < problem.end)

        @jax.jit
        def outputs(q, k, v, sinks):
            out, lse = reference.attention(
                q, k, v, problem.first, problem.end, sinks, case.variant, accumulation=jnp.float64
            )
            return out, jnp.where(sees[:, None], lse, 0)

        check_grads(outputs, (q, k, v, sinks), order=1, modes=["rev"], rtol=1e-6)


@pytest.mark.parametrize("offset", [20, jnp.int32(20)], ids=["static offset", "traced offset"])
@pytest.mark.parametrize("spans", [None, (((10, 33),), ((35, 64),))], ids=["causal", "images"])
def test_the_public_op(offset, spans):
    """The op's mask, default scale and choice of backend on a CPU."""
    case = replace(GRID["chunk of a prompt, traced"], soft_cap=1.5, spans=spans)
    problem = arguments(case)
    mask = replace(case.mask, query_offset=offset)
    call = partial(flash_attention, soft_cap=case.soft_cap, return_lse=True)
    got = jax.jit(lambda q, k, v, sinks: call(q, k, v, mask, sinks=sinks))(*problem[:3], problem.sinks)
    expected = in_float64(case, problem)
    assert_close(dict(zip(("out", "lse"), got)), {name: expected[name] for name in ("out", "lse")}, case.dtype)


def test_arguments_that_do_not_fit_are_refused():
    q, k, v, *_ = arguments(Case(8, heads=(3, 2)))
    with pytest.raises(ValueError, match="3 query heads"):
        flash_attention(q, k, v)
    q, k, v, *_ = arguments(Case(8))
    with pytest.raises(ValueError, match="key_start"):
        flash_attention(q, k, v, MaskSpec(key_start=jnp.zeros((1, 8), jnp.int32)))
    with pytest.raises(ValueError, match=re.escape("key_end (8,) is not (2, 8)")):
        flash_attention(q, k, v, MaskSpec(causal=False, key_end=jnp.ones(8, jnp.int32)))
    with pytest.raises(ValueError, match="query_offset"):
        flash_attention(q, k, v, MaskSpec(query_offset=jnp.zeros((1, 8), jnp.int32)))
    with pytest.raises(ValueError, match="sinks"):
        flash_attention(q, k, v, sinks=jnp.zeros(2))
    with pytest.raises(ValueError, match="dtypes"):
        flash_attention(q, k.astype(jnp.bfloat16), v)
    with pytest.raises(ValueError, match="unknown backend 'tritton'"):
        flash_attention(q, k, v, backend="tritton")


def test_both_shapes_of_the_loop_agree(monkeypatch):
    """A CPU loops over heads and other platforms batch them; the results must be the same."""
    case = GRID["everything"]
    problem = arguments(case)
    looped = run("xla", case, problem)
    choose = jax.lax.platform_dependent
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *arrays, cpu, default: choose(*arrays, default=default))
    batched = differentiate.attention(partial(xla.forward, block=32), partial(xla.backward, block=32))
    assert_close(outputs_and_gradients(batched, case.variant, problem), jax.tree.map(np.asarray, looped), case.dtype)


def test_xla_holds_a_block_of_queries_by_the_keys_it_sees():
    """Never queries by keys, whether or not the offset is known, and no blocks that a window hides."""
    op = differentiate.attention(xla.forward, xla.backward)

    def largest(case: Case) -> int:
        problem = jax.eval_shape(partial(arguments, case))
        program = outputs_and_gradients.lower(op, case.variant, problem).compile().as_text()
        shapes = re.findall(r"\b[a-z]+[0-9]+\[([0-9,]+)\]", program)
        return max(math.prod(map(int, shape.split(","))) for shape in shapes)

    rows = 2 * xla.BLOCK  # the two query heads that share a key head
    assert largest(Case(2048)) == largest(Case(2048, traced_offset=True)) == rows * 2048
    assert largest(Case(2048, window=300)) == rows * (xla.BLOCK + 299)
    assert largest(Case(2048, window=300, spans=(((0, 2048),), ((500, 900),)))) == rows * 2048


@pytest.mark.parametrize(
    "case", [Case(), Case(causal=False), Case(window=1), Case(window=20), Case(window=99)], ids=str
)
def test_cudnn_is_asked_for_our_mask(case):
    """Checked through jax's own reading of the arguments, because a CPU has no cuDNN."""
    problem = arguments(case)

    def op(q, k, v, first, end, sinks, variant):
        return cudnn.attend(q, k, v, variant, implementation="xla"), reference.attention(*problem[:5], None, variant)[1]

    unseen = problem._replace(d_lse=jnp.zeros_like(problem.d_lse))  # cuDNN's log-sum-exp is not requested
    assert_close(outputs_and_gradients(op, case.variant, unseen), in_float64(case, unseen), case.dtype)


def test_cudnn_refuses_what_it_would_ignore():
    h100, a100 = Device("gpu", "NVIDIA H100 80GB HBM3", (9, 0)), Device("gpu", "NVIDIA A100-SXM4-80GB", (8, 0))
    variant = Variant(scale=0.1, soft_cap=None, causal=True, window=20, query_offset=0)
    dense = AttentionRequest(jnp.bfloat16, 256, 64, 64, packed=False, variant=variant, sinks=False, return_lse=False)
    assert cudnn.refuses(h100, dense) is None
    assert cudnn.refuses(a100, replace(dense, head_dim=128)) is None
    for device, request, reason in (
        (a100, dense, "at most 128"),
        (h100, replace(dense, head_dim=60), "multiple of 8"),
        (Device("gpu", "Tesla T4", (7, 5)), dense, "compute capability 8.0"),
        (Device("cpu", "cpu", None), dense, "NVIDIA GPU"),
        (h100, replace(dense, dtype=jnp.float32), "float32"),
        (h100, replace(dense, keys=128), "128 keys and 64 queries"),
        (h100, replace(dense, packed=True), "packing"),
        (h100, replace(dense, key_end=True), "key_end"),
        (h100, replace(dense, sinks=True), "sinks"),
        (h100, replace(dense, return_lse=True), "log-sum-exp"),
        (h100, replace(dense, variant=replace(variant, soft_cap=30.0)), "soft-cap"),
        (h100, replace(dense, variant=replace(variant, query_offset=8)), "offset"),
        (h100, replace(dense, variant=replace(variant, query_offset=None)), "offset"),
    ):
        assert reason in (cudnn.refuses(device, request) or "")
