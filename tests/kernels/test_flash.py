"""The calls of FlashAttention 2 and 3 in the package dew-flash-attn, which plain jax emulates here.

The kernels take packed rows: (tokens, heads, head_dim) and offsets. FlashAttention 2 has a log-sum-exp of (documents,
heads, longest document), and a gradient of keys and values for each query head.
"""

import sys
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.attention_cases import Case, arguments, assert_close, in_float64, outputs_and_gradients
from kernels.emulated_flash import CASES, Mask, backward, forward

from pallas_kernels.flash_attention import RESIDUALS, MaskSpec, flash_attention, reference
from pallas_kernels.flash_attention.packages import flash
from pallas_kernels.flash_attention.variant import AttentionRequest, Variant
from pallas_kernels.gpus import Device

COVERS = ("pallas_kernels", "tests/kernels", "tests/conftest.py")

A100 = Device("gpu", "NVIDIA A100-SXM4-80GB", (8, 0))
H100 = Device("gpu", "NVIDIA H100 80GB HBM3", (9, 0))
# The types of the attributes as the C++ declares them; XLA refuses a call with others when it runs.
COMMON = {"is_causal": bool, "window_size_left": np.int64, "window_size_right": np.int64}
HOPPER = COMMON | {"softmax_scale": np.float64, "max_seqlen": np.int64, "max_seqlen_k": np.int64}
FORWARD = {"softmax_scale": np.float64, "max_seqlen_q": np.int32, "max_seqlen_k": np.int32, "zero_tensors": bool}
BACKWARD = {"softmax_scale": np.float32, "max_seqlen_q": np.int64, "max_seqlen_k": np.int64, "zero_tensors": bool}
ATTRIBUTES = {
    "dew_flash3_mha_varlen_fwd": HOPPER,
    "dew_flash3_mha_varlen_bwd": HOPPER,
    "dew_flash_mha_varlen_fwd": COMMON | FORWARD,
    "dew_flash_mha_varlen_bwd": COMMON | BACKWARD | {"deterministic": bool},
}


@pytest.fixture
def package(monkeypatch):
    """Pretend that the package is installed."""
    monkeypatch.setitem(sys.modules, flash.PACKAGE, SimpleNamespace(_registered=lambda: None))
    monkeypatch.setattr(flash.importlib.util, "find_spec", lambda name: name)


@pytest.fixture(params=[A100, H100], ids=["FlashAttention 2", "FlashAttention 3"])
def kernels(request, package, monkeypatch):
    """Put the emulated kernels of a GPU in place of XLA's custom calls."""
    monkeypatch.setattr(flash, "current_device", lambda: request.param)
    monkeypatch.setattr(jax.ffi, "ffi_call", emulated)
    outputs_and_gradients.clear_cache()  # it does not depend on the device
    yield
    outputs_and_gradients.clear_cache()


def emulated(name, results):
    def run(*buffers, **attributes):
        assert {key: type(value) for key, value in attributes.items()} == ATTRIBUTES[name]
        kernel = {"fwd": emulated_forward, "bwd": emulated_backward}[name[-3:]]
        made = kernel(buffers, attributes, hopper="flash3" in name)
        assert [(x.shape, x.dtype) for x in made] == [(x.shape, x.dtype) for x in results]
        return made

    return run


def mask_of(attributes) -> Mask:
    window = int(attributes["window_size_left"]), int(attributes["window_size_right"])
    return Mask(float(attributes["softmax_scale"]), attributes["is_causal"], *window, int(attributes["max_seqlen_k"]))


def emulated_forward(buffers, attributes, hopper):
    q, k, v, offsets, offsets_k = buffers
    assert offsets is offsets_k and offsets.dtype == jnp.int32
    out, lse = forward(q, k, v, offsets, mask_of(attributes))
    if hopper:
        return out, lse, jnp.zeros((1,) * 4), jnp.zeros((1,) * 3)
    padded = jnp.pad(lse, ((0, 0), (0, mask_of(attributes).length)), constant_values=jnp.nan)
    place = jnp.arange(mask_of(attributes).length)
    by_document = padded[:, offsets[:-1, None] + place].swapaxes(0, 1)
    written = place < jnp.diff(offsets)[:, None]
    return out, jnp.where(written[:, None], by_document, jnp.nan), jnp.zeros((1,) * 5), jnp.zeros((1,) * 4)


def emulated_backward(buffers, attributes, hopper):
    d_out, q, k, v, out, lse, offsets, _ = buffers
    (tokens, heads, width), documents, length = q.shape, offsets.size - 1, mask_of(attributes).length
    if hopper:
        statistics = jnp.zeros(heads * (tokens + 128 * (documents + 1)))
        return *backward(d_out, q, k, v, out, lse, offsets, mask_of(attributes)), statistics, statistics
    token = jnp.arange(tokens)
    document = jnp.searchsorted(offsets, token, side="right") - 1
    lse = lse[document, :, token - offsets[document]].T
    k, v = (jnp.repeat(x, heads // x.shape[1], axis=1) for x in (k, v))
    statistics = jnp.zeros((documents, heads, -(-length // 128) * 128))
    sums = jnp.zeros((tokens + 128 * documents, heads, -(-width // 32) * 32))
    return *backward(d_out, q, k, v, out, lse, offsets, mask_of(attributes)), statistics, sums


def op(q, k, v, first, end, sinks, variant):
    """The op, with the log-sum-exp of the reference."""
    out, _ = flash.attend(q, k, v, first, end, sinks, variant)
    return out, reference.attention(*map(jax.lax.stop_gradient, (q, k, v)), first, end, None, variant)[1]


def problem_of(case: Case):
    """Arguments of a case; the op does not take the cotangent of the log-sum-exp."""
    problem = arguments(case)
    return problem._replace(d_lse=jnp.zeros_like(problem.d_lse))


def run(case: Case, documents: int = 7):
    documents = None if case.documents is None else documents
    return outputs_and_gradients(op, replace(case.variant, documents=documents), problem_of(case))


# The gradients of a single key are 0, so no error of the emulation is small relative to them.
@pytest.mark.parametrize("name", [name for name in CASES if name != "one token"])
def test_equals_float64(kernels, name):
    case = CASES[name]
    assert_close(run(case), in_float64(case, problem_of(case)), case.dtype)


def test_more_documents_than_said_give_nan(kernels):
    """Two rows with room for four documents each hold one and nine: too many for eight places."""
    got = run(Case(documents=((8,) * 9, (72,))), documents=3)
    assert all(np.isnan(np.asarray(got[tensor])).all() for tensor in ("out", "d_q", "d_k", "d_v"))


@pytest.mark.parametrize("device", [A100, H100], ids=str)
def test_what_a_layer_saves_does_not_grow_with_the_documents(package, monkeypatch, device):
    """The output and a log-sum-exp for each head and token, in a loop over layers as a model has it, on a mesh."""
    monkeypatch.setattr(flash, "current_device", lambda: device)
    monkeypatch.setattr("pallas_kernels.flash_attention.current_device", lambda: device)
    mesh = jax.sharding.AbstractMesh((2, 2), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    heads, rows = jax.P("fsdp", None, "tensor"), jax.P("fsdp")

    def sharded(q, k, key_start):
        def attend(q, k, key_start):
            mask = MaskSpec(key_start=key_start, documents=64)
            return flash_attention(q, k, k, mask, backend="flash")

        out = jax.shard_map(attend, in_specs=(heads, heads, rows), out_specs=heads)(q, k, key_start)
        return jnp.sum(out.astype(jnp.float32))

    def shape(*sizes, dtype, spec):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=jax.NamedSharding(mesh, spec))

    with jax.sharding.use_abstract_mesh(mesh):
        q, k = (shape(2, 256, count, 96, dtype=jnp.bfloat16, spec=heads) for count in (4, 2))
        key_start = shape(2, 256, dtype=jnp.int32, spec=rows)
        policy = jax.checkpoint_policies.save_only_these_names(RESIDUALS)
        gradient = jax.grad(jax.checkpoint(sharded, policy=policy), (0, 1))
        assert [x.shape for x in jax.eval_shape(gradient, q, k, key_start)] == [q.shape, k.shape]
        _, pull = jax.eval_shape(lambda *x: jax.vjp(jax.checkpoint(sharded, policy=policy), *x), q, k, key_start)
        saved = [x.shape for x in jax.tree.leaves(pull) if x.dtype == jnp.float32]
        program = str(jax.make_jaxpr(gradient)(q, k, key_start))
    assert program.count("varlen_fwd") == program.count("varlen_bwd") == 1
    assert all(np.prod(one) <= 4 * 512 for one in saved), saved


def test_refuses_what_it_would_ignore(package):
    variant = Variant(0.1, None, causal=True, window=20, query_offset=0, documents=4)
    packed = AttentionRequest(jnp.bfloat16, 256, 64, 64, packed=True, variant=variant, sinks=False, return_lse=False)
    dense = replace(packed, packed=False, variant=replace(variant, causal=False, window=None, documents=None))
    for device in (A100, H100, Device("gpu", "NVIDIA GeForce RTX 5090", (12, 0))):
        assert flash.refuses(device, packed) is None and flash.refuses(device, dense) is None

    def refused(reason, device=H100, request=packed, **of_variant):
        request = replace(request, variant=replace(request.variant, **of_variant))
        assert reason in (flash.refuses(device, request) or "")

    refused("compute capability", Device("gpu", "NVIDIA B200", (10, 0)))
    refused("compute capability", Device("gpu", "Tesla T4", (7, 5)))
    refused("compute capability", Device("cpu", "cpu", None))
    refused("not float32", request=replace(packed, dtype=jnp.float32))
    refused("at most 256, not 512", request=replace(packed, head_dim=512))
    refused("multiple of 8", request=replace(packed, head_dim=100))
    refused("soft-cap", soft_cap=30.0)
    refused("sinks", request=replace(packed, sinks=True))
    refused("cotangent of the log-sum-exp", request=replace(packed, return_lse=True))
    refused("query offset", query_offset=None)
    refused("as many keys", request=replace(packed, keys=65))
    refused("key_end", request=replace(packed, key_end=True), causal=False)
    refused("only causal attention", causal=False, window=None)
    refused("MaskSpec.documents", documents=None)
    refused("a window of 1", window=1)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(flash.importlib.util, "find_spec", lambda name: None)
    variant = Variant(0.1, None, causal=True, window=None, query_offset=0)
    dense = AttentionRequest(jnp.bfloat16, 128, 64, 64, packed=False, variant=variant, sinks=False, return_lse=False)
    assert "pip install 'jaxtune[flash-cuda12]'" in (flash.refuses(A100, dense) or "")
