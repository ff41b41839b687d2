"""The GPU suite runs from end to end on a CPU, so that it will run when a GPU is available."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Folders whose changes this test covers.
TAKES_LONG = True
COVERS = ("benchmarks", "jaxtune/plan", "jaxtune/training/assembly.py", "pallas_kernels")
ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.xdist_group("suite")  # so that one worker runs the suite, once for all tests


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    out = tmp_path_factory.mktemp("suite") / "found.json"
    process = subprocess.run(
        [sys.executable, "benchmarks/gpu_suite.py", "--smoke", "--out", str(out)],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return json.loads(out.read_text()), process.stdout


FIGURES = {
    "assumptions": ("step", {"microseconds", "predicted_microseconds", "range_microseconds", "error_percent", "remat"}),
    "correctness": ("triton", {"errors", "worst", "worst_of", "tolerance"}),
    "correct_step": ("jaxtune-nf4", {"first_loss", "last_loss", "worst", "worst_on_cpu", "errors", "kernels"}),
    "attention": ("triton", {"flops_forward", "how", "forward_seconds", "forward_tflops", "both_tflops"}),
    "loss": ("xla", {"milliseconds", "tflops", "temporary_gb"}),
    "dequantize": ("triton", {"largest_error", "bytes", "microseconds", "gb_per_second"}),
    "quant_matmul": ("fused", {"forward_error", "forward_microseconds", "dx_over_peer", "rows", "weight"}),
    "fp8_matmul": ("xla", {"largest_error", "product_microseconds", "product_tflops", "quantized_speedup"}),
    "grouped_matmul": ("triton", {"items", "weight", "forward_tflops", "dx_error", "dw_microseconds"}),
    "gated_delta_rule": ("triton", {"largest_error", "forward_milliseconds", "both_tflops"}),
    "mamba2_scan": ("triton", {"largest_error", "forward_milliseconds", "both_tflops"}),
    "low_precision_correct": ("products", {"y", "dx", "dW", "on_cpu", "worst_on_cpu", "native"}),
    "optimizers": ("adamw_8bit", {"milliseconds", "over_optax", "state_bytes_per_parameter", "gb_per_second"}),
    "precision_step": ("whole-fp8", {"seconds", "tokens_per_second", "tokens_per_step", "peak_gb", "remat", "losses"}),
    "train_step": ("jaxtune", {"seconds", "tokens_per_second", "flops_per_token", "peak_gb", "remat", "losses"}),
}


def test_every_piece_gives_its_figures_and_its_table(smoke):
    found, printed = smoke
    assert set(found) == set(FIGURES)
    for name, (contender, figures) in FIGURES.items():
        rows = [row for job, row in found[name]["rows"].items() if job.startswith(f"{contender}/")]
        assert rows and all(figures <= set(row) for row in rows), name
        assert {"device", "driver", "versions", "commit", "date", "smoke"} <= set(found[name]["run"])
        assert f"\n{name}: {found[name]['title']}" in printed
    for name, conclusion in (("quant_matmul", "nf4 dx: rows"), ("train_step", "jaxtune-nf4/tiny over bfloat16")):
        assert any(conclusion in said for said in found[name]["conclusions"]) and conclusion in printed


def test_every_assumption_stands_beside_its_measurement(smoke):
    rows = smoke[0]["assumptions"]["rows"]
    assert rows.pop("zero-init/small")["same_bits"] == "yes"
    assert all({"microseconds", "predicted_microseconds", "error_percent"} <= set(row) for row in rows.values())
    assert {"launch/256", "fp8/4096x4096x4096", "flash_attention_dkdv/2x2048x32x8", "step/tiny"} <= set(rows)


def test_what_cannot_run_says_why(smoke):
    rows = smoke[0]["attention"]["rows"]
    assert "cannot run this on cpu" in rows["cudnn/packed"]["refused"]
    assert "cannot run this on cpu" in smoke[0]["fp8_matmul"]["rows"]["mosaic/24"]["refused"]
    if not importlib.util.find_spec("tokamax"):
        assert rows["tokamax/packed"]["refused"] == "tokamax is not installed"


@pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="the peers need torch, transformers and peft")
def test_the_peers_run_beside(smoke):
    found = smoke[0]
    assert {"forward_peer_tflops", "both_ratio", "peer_kernels"} <= set(found["attention"]["rows"]["triton/packed"])
    peer, own = (found["train_step"]["rows"][f"{system}/tiny"] for system in ("hf+peft", "jaxtune"))
    assert peer["kernels"] and peer["flops_per_token"] == own["flops_per_token"]


@pytest.mark.skipif(not importlib.util.find_spec("bitsandbytes"), reason="the peer of dequantize")
def test_bitsandbytes_makes_the_same_weight_of_the_same_codes(smoke):
    peer = smoke[0]["dequantize"]["rows"]["bitsandbytes/nf4-128x256"]
    assert peer["largest_error"] <= 2.0**-8 and peer["gb_per_second"] > 0
