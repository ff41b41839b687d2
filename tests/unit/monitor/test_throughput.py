"""Model FLOPs per token, and the share of the peak that they reach."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtune.monitor.throughput import Work, flops_per_token, mfu
from pallas_kernels.gpus import peak_flops


def test_flops_by_hand():
    # Qwen3-0.6B, LoRA of rank 16, rows of 2048: 3.15 GFLOP a token, counted independently.
    lora = Work(trained=10_100_000, frozen=595_800_000, layers=28, attention_width=2048, seq_len=2048)
    assert flops_per_token(lora) == pytest.approx(3.15e9, rel=0.01)
    full = Work(trained=100, frozen=0, layers=2, attention_width=8, seq_len=4)
    assert flops_per_token(full) == 6 * 100 + 3 * (2 * 4 * 8 * 2)


@given(seq_len=st.integers(1, 60), window=st.integers(1, 80))
def test_a_window_costs_the_keys_it_sees(seq_len, window):
    seen = np.minimum(np.arange(1, seq_len + 1), window)
    work = Work(trained=0, frozen=0, layers=1, attention_width=1, seq_len=seq_len, window=window)
    # The formula counts a token's own position as half a key, so it has half a key less than the token sees.
    assert flops_per_token(work) / 12 == pytest.approx(seen.mean() - min(window, seq_len) / (2 * seq_len), rel=1e-9)


@pytest.mark.parametrize(
    ("kind", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("cpu", None),
    ],
)
def test_peak_of_known_devices_only(kind, tflops):
    assert peak_flops(kind) == (None if tflops is None else pytest.approx(tflops * 1e12))
    work = Work(trained=10**9, frozen=0, layers=1, attention_width=1, seq_len=1)
    expected = None if tflops is None else pytest.approx(flops_per_token(work) * 1e4 / (4 * tflops * 1e12))
    assert mfu(work, 1e4, kind, devices=4) == expected
