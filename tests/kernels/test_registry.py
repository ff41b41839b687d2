"""The choice of a backend: which ones can run, which were checked, and the message when none can."""

import re

import jax
import jax.numpy as jnp
import pytest

from jaxtune.config.schema import Config, TrainOptions
from jaxtune.host.process import GPU_OPTIONS, compiler_options
from pallas_kernels import registry
from pallas_kernels.flash_attention import BACKENDS
from pallas_kernels.flash_attention.variant import AttentionRequest, Variant
from pallas_kernels.gpus import GPUS, Device, current_device
from pallas_kernels.registry import ANY_GPU, Backend, CannotRun, choose

CPU = Device("cpu", "cpu", None)
CARDS = {name: Device("gpu", gpu.kind, gpu.capability) for name, gpu in GPUS.items()}
CARDS |= {"rtx3090": Device("gpu", "NVIDIA GeForce RTX 3090", (8, 6)), "rtx5090": Device("gpu", "RTX 5090", (12, 0))}


def request_for(**fields) -> AttentionRequest:
    variant = Variant(0.1, fields.pop("soft_cap", None), True, fields.pop("window", None), 0)
    common = {"dtype": jnp.dtype("bfloat16"), "head_dim": 128, "queries": 2048, "keys": 2048}
    flags = {"packed": False, "sinks": False, "return_lse": False}
    return AttentionRequest(**{**common, **flags, "variant": variant, **fields})


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize(
    "features",
    [
        *({}, {"packed": True}, {"window": 64}, {"soft_cap": 30.0}, {"sinks": True}, {"head_dim": 256}),
        *({"packed": True, "key_end": True, "head_dim": size} for size in (64, 72, 80)),  # towers of images
    ],
    ids=str,
)
def test_cards_take_the_checked_kernel_by_themselves(card, features):
    """Mosaic on Hopper GPUs, where it was measured, if it can run the request; Triton on other GPUs."""
    mosaic = CARDS[card].capability == (9, 0) and not features.keys() & {"soft_cap"}
    mosaic &= features.get("head_dim", 128) in (64, 128)
    expected = "mosaic" if mosaic else "triton"
    assert choose("flash_attention", BACKENDS, CARDS[card], request_for(**features)).name == expected


def test_wide_heads_have_a_kernel_that_must_be_asked_for():
    """No GPU has run it, and on paper XLA is faster for long documents."""
    request = request_for(head_dim=512)
    assert choose("flash_attention", BACKENDS, CARDS["h100"], request).name == "xla"
    chosen = choose("flash_attention", BACKENDS, CARDS["h100"], request, "triton")
    assert chosen.name == "triton" and chosen is not choose(
        "flash_attention", BACKENDS, CARDS["h100"], request_for(), "triton"
    )
    reasons = "at most 256, not 576; head_dim must be a multiple of 64 from 320 to 512"
    with pytest.raises(CannotRun, match=reasons):
        choose("flash_attention", BACKENDS, CARDS["h100"], request_for(head_dim=576), "triton")


def test_what_kernels_cannot_do_goes_to_xla():
    wide = request_for(dtype=jnp.dtype("float32"), head_dim=256)
    odd = (request_for(head_dim=size) for size in (60, 336, 512, 576))
    for device, request in [(CPU, request_for()), *((CARDS["h100"], request) for request in (wide, *odd))]:
        assert choose("flash_attention", BACKENDS, device, request).name == "xla"
    assert choose("flash_attention", BACKENDS, Device("gpu", "Tesla T4", (7, 5)), request_for()).name == "xla"


@pytest.mark.parametrize(
    ("backend", "card", "features", "reason"),
    [
        ("triton", "cpu", {}, "NVIDIA GPU of compute capability 8.0"),
        ("mosaic", "a100", {}, "Hopper"),
        ("mosaic", "h100", {"head_dim": 96}, "head_dim must be 64 or 128, not 96"),
        ("cudnn", "h100", {"packed": True}, "does not support packing"),
        ("cudnn", "h100", {"soft_cap": 30.0}, "does not support a soft-cap"),
        ("pallas", "h100", {}, "unknown backend 'pallas'"),
    ],
)
def test_a_backend_that_cannot_says_why(backend, card, features, reason):
    device = CARDS.get(card, CPU)
    with pytest.raises(ValueError, match=f"flash_attention: .*{reason}"):
        choose("flash_attention", BACKENDS, device, request_for(**features), backend)


def test_with_fallback_another_backend_runs_and_it_is_said_once(caplog):
    with caplog.at_level("WARNING", "pallas_kernels"):
        for _ in range(2):
            packed = request_for(packed=True)
            assert choose("flash_attention", BACKENDS, CARDS["h100"], packed, "cudnn", "warn").name == "mosaic"
    (record,) = caplog.records
    assert re.search(
        r"backend 'cudnn' cannot run this on .*H100.*does not support packing.*another", record.getMessage()
    )
    with pytest.raises(CannotRun, match="unknown backend 'pallas'"):
        choose("flash_attention", BACKENDS, CPU, request_for(), "pallas", "warn")


def test_what_was_checked_elsewhere_is_not_taken():
    def backend(name, proofs):
        return Backend(name, lambda: None, registry.never_refuses, proofs)

    ada = backend("ada", {(8, 9): "benchmarks/results/ada.json"})
    anywhere = backend("anywhere", {ANY_GPU: "tests"})
    backends = (backend("unproven", {}), ada, anywhere)
    assert choose("op", backends, CARDS["rtx4090"], None) is ada
    assert choose("op", backends, CARDS["h100"], None) is anywhere
    assert choose("op", backends, CARDS["h100"], None, "unproven").name == "unproven"
    with pytest.raises(ValueError, match="unproven: not checked there"):
        choose("op", backends[:1], CARDS["h100"], None)


def test_each_choice_is_said_once(caplog):
    backends = (Backend("once", lambda: None, registry.never_refuses, {ANY_GPU: "tests"}),)
    with caplog.at_level("INFO", "pallas_kernels"):
        for _ in range(3):
            choose("op said once", backends, CPU, None)
    assert [record.getMessage() for record in caplog.records] == [
        "op said once runs on cpu (cpu) by backend once (checked by tests)"
    ]


def test_the_device_is_the_mesh_in_use():
    deterministic = Config(train=TrainOptions(deterministic=True))
    assert current_device() == CPU
    h100 = jax.sharding.AbstractDevice(device_kind=GPUS["h100"].kind, num_cores=132, platform="gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=h100)):
        assert current_device() == CARDS["h100"]
        assert compiler_options() == GPU_OPTIONS
        assert compiler_options(deterministic)["xla_gpu_deterministic_ops"] is True
    assert compiler_options(deterministic) == {}


def test_xla_flags_of_the_user_are_left_alone(monkeypatch):
    h100 = jax.sharding.AbstractDevice(device_kind=GPUS["h100"].kind, num_cores=132, platform="gpu")
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=true")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=h100)):
        assert "xla_gpu_enable_triton_gemm" not in compiler_options()
