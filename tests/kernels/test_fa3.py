"""The calls of FlashAttention-3's kernels, which plain jax with the same arguments and layouts emulates here.

The emulation follows the package's C++ (mha_fwd_impl, mha_bwd_impl): buffers are positional, and empty ones omitted.
"""

import sys
from dataclasses import replace
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.attention_cases import Case, arguments, assert_close, in_float64, outputs_and_gradients, poison_unseen
from kernels.emulated_flash import CASES, Mask, backward, forward

from pallas_kernels.flash_attention import RESIDUALS, MaskSpec, flash_attention, reference
from pallas_kernels.flash_attention.mask import intervals
from pallas_kernels.flash_attention.packages import fa3
from pallas_kernels.flash_attention.variant import AttentionRequest, Variant
from pallas_kernels.gpus import Device

H100 = Device("gpu", "NVIDIA H100 80GB HBM3", (9, 0))
FORWARD_ONLY = {
    *("max_seqlen_q", "max_seqlen_k", "pack_gqa_val", "pack_gqa_has_value", "attention_chunk"),
    *("is_rotary_interleaved", "num_splits"),
}
BACKWARD_ONLY = {"max_seqlen_q_val", "max_seqlen_k_val", "deterministic"}
BOTH = {
    *("max_seqlen_q_has_value", "max_seqlen_k_has_value", "softmax_scale_val", "softmax_scale_has_value"),
    *("is_causal", "window_size_left", "window_size_right", "softcap", "sm_margin"),
}


@pytest.fixture
def package(monkeypatch):
    """Pretend that the package is installed."""
    monkeypatch.setitem(sys.modules, fa3.PACKAGE, ModuleType(fa3.PACKAGE))
    monkeypatch.setattr(fa3.importlib.util, "find_spec", lambda name: name)


@pytest.fixture
def kernels(package, monkeypatch):
    """Put the emulated kernels in place of XLA's custom calls."""
    monkeypatch.setattr(jax.ffi, "ffi_call", emulated)


def emulated(name, results):
    def run(*buffers, **attributes):
        kernel = {"flash_mha_fwd": emulated_forward, "flash_mha_bwd": emulated_backward}[name]
        made = kernel(buffers, attributes)
        assert [(x.shape, x.dtype) for x in made] == [(x.shape, x.dtype) for x in results]
        return made

    return run


def mask_of(attributes, length) -> Mask:
    assert attributes["max_seqlen_q_has_value"] and attributes["max_seqlen_k_has_value"]
    assert attributes["softmax_scale_has_value"] and attributes["softcap"] == 0.0
    window = attributes["window_size_left"], attributes["window_size_right"]
    return Mask(attributes["softmax_scale_val"], attributes["is_causal"], *window, length)


def emulated_forward(buffers, attributes):
    assert attributes.keys() == BOTH | FORWARD_ONLY and len(buffers) == 21
    assert attributes["num_splits"] == 1 and attributes["attention_chunk"] == 0
    q, k, v, *_, offsets, offsets_k = buffers[:8]
    assert all(x.size == 0 for place, x in enumerate(buffers) if place not in (0, 1, 2, 6, 7))
    int32, float32 = jnp.dtype("int32"), jnp.dtype("float32")
    kinds = [q.dtype] * 6 + [int32] * 8 + [q.dtype] * 2 + [int32] + [float32] * 3 + [int32]
    assert [x.dtype for x in buffers] == kinds
    assert offsets is offsets_k or offsets.size == offsets_k.size == 0
    out, lse = forward(q, k, v, offsets, mask_of(attributes, attributes["max_seqlen_q"]))
    return out, lse, jnp.zeros((1,) * 4), jnp.zeros((1,) * 3)


def emulated_backward(buffers, attributes):
    assert attributes.keys() == BOTH | BACKWARD_ONLY and len(buffers) == 10
    assert not attributes["deterministic"]
    d_out, q, k, v, out, lse, offsets, _, *unused = buffers
    assert all(x.size == 0 for x in unused)
    length = attributes["max_seqlen_q_val"]
    rows, heads = q.shape[0], q.shape[-2]
    statistics = (rows, heads, -(-length // 128) * 128)
    if offsets.size:
        statistics = (heads, -(-(rows + (offsets.size - 1) * 128) // 128) * 128)
    made = backward(d_out, q, k, v, out, lse, offsets, mask_of(attributes, length))
    return *made, jnp.zeros(statistics), jnp.zeros(statistics)


def op(q, k, v, first, end, sinks, variant):
    """The op, with the log-sum-exp of the reference."""
    out, _ = fa3.attend(q, k, v, first, end, sinks, variant)
    return out, reference.attention(*map(jax.lax.stop_gradient, (q, k, v)), first, end, None, variant)[1]


def run(case: Case, problem, documents: int = 7):
    """One compilation serves all packings of a shape."""
    documents = None if case.documents is None else documents
    return outputs_and_gradients(op, replace(case.variant, documents=documents), problem)


def without_lse(problem):
    """The op does not take the cotangent of the log-sum-exp."""
    return problem._replace(d_lse=jnp.zeros_like(problem.d_lse))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_float64(kernels, case):
    problem = without_lse(arguments(case))
    assert_close(run(case, problem), in_float64(case, problem), case.dtype)


@pytest.mark.parametrize("name", ["packed", "packed, window"])
def test_padding_never_leaks(kernels, name):
    case = CASES[name]
    clean = without_lse(arguments(case))
    blind = np.asarray(clean.first >= clean.end)
    assert blind.any()
    poison = poison_unseen(clean, blind, blind)
    got = run(case, poison._replace(d_lse=clean.d_lse))
    for tensor, expected in run(case, clean).items():
        if tensor != "lse":
            np.testing.assert_array_equal(got[tensor], expected, err_msg=tensor)
            assert not np.asarray(got[tensor])[blind].any()


@pytest.mark.parametrize("documents", [3, 4])
def test_more_documents_than_said_give_nan(kernels, documents):
    """Two rows with room for four documents each hold one and nine: too many for eight places, not for ten."""
    case = Case(documents=((8,) * 9, (72,)))
    problem = without_lse(arguments(case))
    got = run(case, problem, documents)
    for tensor in ("out", "d_q", "d_k", "d_v"):
        value = np.asarray(got[tensor])
        assert np.isnan(value).all() if documents == 3 else np.isfinite(value).all(), tensor


@pytest.mark.parametrize(
    "starts",
    [
        {10: 5},  # a token in the middle of a document sees less of the document
        {40: 30, 41: 30},  # the tokens of a document do not see its beginning
        {0: 72},  # other tokens see a key of padding
    ],
    ids=str,
)
@pytest.mark.parametrize("window", [None, 20])
def test_what_is_no_packing_gives_nan(kernels, starts, window):
    case = Case(documents=((36, 36), (72,)), window=window)
    key_start = case.mask.key_start
    for token, start in starts.items():
        key_start = key_start.at[0, token].set(start)
    problem = without_lse(arguments(case))
    first, end = bounds(key_start, window)
    got = run(case, problem._replace(first=first, end=end))
    assert np.isnan(got["out"]).any() and np.isnan(got["d_q"]).any()


def bounds(key_start, window=None):
    return intervals(MaskSpec(window=window, key_start=key_start), *key_start.shape, key_start.shape[1])


def shapes(heads=(4, 2), head_dim=128, length=256):
    q, k = (jax.ShapeDtypeStruct((2, length, n, head_dim), jnp.bfloat16) for n in heads)
    return q, k, k, jax.ShapeDtypeStruct((2, length), jnp.int32)


def loss(q, k, v, key_start):
    first, end = bounds(key_start)
    out, _ = fa3.attend(q, k, v, first, end, None, Variant(0.1, None, True, None, 0, documents=4))
    return jnp.sum(jnp.sin(out.astype(jnp.float32)))


def test_saved_residuals_spare_the_second_forward_pass(package):
    def forwards(policy):
        checkpointed = jax.checkpoint(loss, policy=policy)
        program = str(jax.make_jaxpr(jax.grad(checkpointed, (0, 1, 2)))(*shapes()))
        assert program.count("target_name=flash_mha_bwd") == 1
        return program.count("target_name=flash_mha_fwd")

    assert forwards(jax.checkpoint_policies.save_only_these_names(RESIDUALS)) == 1
    assert forwards(jax.checkpoint_policies.nothing_saveable) == 2


def test_results_vary_over_the_axes_of_a_mesh(package, monkeypatch):
    """Rows are sharded over one axis, heads over another, and key_start only over rows."""
    monkeypatch.setattr("pallas_kernels.flash_attention.current_device", lambda: H100)
    mesh = jax.sharding.AbstractMesh((2, 2), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    heads, rows = jax.P("fsdp", None, "tensor"), jax.P("fsdp")

    def sharded(q, k, v, key_start):
        def attend(q, k, v, key_start):
            mask = MaskSpec(key_start=key_start, documents=4)
            return flash_attention(q, k, v, mask, backend="fa3")

        out = jax.shard_map(attend, in_specs=(heads, heads, heads, rows), out_specs=heads)(q, k, v, key_start)
        return jnp.sum(out.astype(jnp.float32))

    with jax.sharding.use_abstract_mesh(mesh):
        placed = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.NamedSharding(mesh, spec))
            for x, spec in zip(shapes(), (heads, heads, heads, rows))
        ]
        gradients = jax.eval_shape(jax.grad(sharded, (0, 1, 2)), *placed)
    assert [x.sharding.spec for x in gradients] == [jax.P("fsdp", None, "tensor", None)] * 3


def test_refuses_what_it_would_ignore(package):
    variant = Variant(0.1, None, causal=True, window=20, query_offset=0, documents=4)
    packed = AttentionRequest(jnp.bfloat16, 128, 64, 64, packed=True, variant=variant, sinks=False, return_lse=False)
    dense = replace(packed, packed=False, variant=replace(variant, documents=None))
    assert fa3.refuses(H100, packed) is None and fa3.refuses(H100, dense) is None
    assert (
        fa3.refuses(H100, replace(dense, variant=replace(variant, causal=False, window=None, documents=None))) is None
    )

    def refused(reason, device=H100, request=packed, **of_variant):
        request = replace(request, variant=replace(request.variant, **of_variant))
        assert reason in (fa3.refuses(device, request) or "")

    refused("Hopper", Device("gpu", "NVIDIA A100-SXM4-80GB", (8, 0)))
    refused("Hopper", Device("gpu", "NVIDIA B200", (10, 0)))
    refused("Hopper", Device("cpu", "cpu", None))
    refused("not float32", request=replace(packed, dtype=jnp.float32))
    refused("only for head_dim 128, not 64", request=replace(packed, head_dim=64))
    refused("soft-cap", soft_cap=30.0)
    refused("sinks", request=replace(packed, sinks=True))
    refused("cotangent of the log-sum-exp", request=replace(packed, return_lse=True))
    refused("query offset", query_offset=8)
    refused("query offset", query_offset=None)
    refused("as many keys", request=replace(packed, keys=65))
    refused("key_end", request=replace(packed, key_end=True), causal=False)
    refused("computes only causal attention", causal=False, window=None)
    refused("MaskSpec.documents", documents=None)
    refused("a window of 1", window=1)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(fa3.importlib.util, "find_spec", lambda name: None)
    variant = Variant(0.1, None, causal=True, window=None, query_offset=0)
    dense = AttentionRequest(jnp.bfloat16, 128, 64, 64, packed=False, variant=variant, sinks=False, return_lse=False)
    assert "pip install 'jaxtune[hopper]'" in (fa3.refuses(H100, dense) or "")


@pytest.mark.parametrize(("documents", "packed"), [(0, True), (4, False)])
def test_a_bound_of_documents_that_means_nothing_is_refused(documents, packed):
    with pytest.raises(ValueError, match=f"documents={documents}"):
        MaskSpec(key_start=jnp.zeros((1, 8), jnp.int32) if packed else None, documents=documents)
