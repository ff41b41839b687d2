"""The GPU suite and the tuner run from end to end on a CPU, so that the day a card is there they do too."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

from gpu import (  # noqa: E402
    attention,
    dequantize,
    low_precision_correct,
    models,
    optimizers,
    precision_step,
    quant_matmul,
    qwen3,
    workers,
)


def run(*command: object) -> subprocess.CompletedProcess:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *map(str, command)], cwd=ROOT, env=environment, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    out = tmp_path_factory.mktemp("suite") / "found.json"
    process = run("benchmarks/gpu_suite.py", "--smoke", "--out", out)
    assert process.returncode == 0, process.stdout + process.stderr
    return json.loads(out.read_text()), process.stdout


FIGURES = {
    "correctness": ("triton", {"errors", "worst", "worst_of", "tolerance"}),
    "correct_step": ("jaxtune-nf4", {"first_loss", "last_loss", "worst", "worst_on_cpu", "errors", "kernels"}),
    "attention": ("triton", {"flops_forward", "how", "forward_seconds", "forward_tflops", "both_tflops"}),
    "loss": ("xla", {"milliseconds", "tflops", "temporary_gb"}),
    "dequantize": ("triton", {"largest_error", "bytes", "microseconds", "gb_per_second"}),
    "quant_matmul": ("fused", {"forward_error", "forward_microseconds", "dx_over_peer", "rows", "weight"}),
    "fp8_matmul": ("xla", {"largest_error", "product_microseconds", "product_tflops", "quantized_speedup"}),
    "low_precision_correct": ("products", {"y", "dx", "dW", "on_cpu", "worst_on_cpu", "native"}),
    "optimizers": ("adamw_8bit", {"milliseconds", "over_optax", "state_bytes_per_parameter", "gb_per_second"}),
    "precision_step": ("whole-fp8", {"seconds", "tokens_per_second", "tokens_per_step", "peak_gb", "remat", "losses"}),
    "train_step": ("jaxtune", {"seconds", "tokens_per_second", "flops_per_token", "peak_gb", "remat", "losses"}),
}


@pytest.mark.slow
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


@pytest.mark.slow
def test_what_cannot_run_says_why(smoke):
    rows = smoke[0]["attention"]["rows"]
    assert "cannot run this on cpu" in rows["cudnn/packed"]["refused"]
    assert "cannot run this on cpu" in smoke[0]["fp8_matmul"]["rows"]["mosaic/24"]["refused"]
    if not importlib.util.find_spec("tokamax"):
        assert rows["tokamax/packed"]["refused"] == "tokamax is not installed"


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="the peers need torch, transformers and peft")
def test_the_peers_run_beside(smoke):
    found = smoke[0]
    assert {"forward_peer_tflops", "both_ratio", "peer_kernels"} <= set(found["attention"]["rows"]["triton/packed"])
    peer, own = (found["train_step"]["rows"][f"{system}/tiny"] for system in ("hf+peft", "jaxtune"))
    assert peer["kernels"] and peer["flops_per_token"] == own["flops_per_token"]


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("bitsandbytes"), reason="the peer of dequantize")
def test_bitsandbytes_makes_the_same_weight_of_the_same_codes(smoke):
    peer = smoke[0]["dequantize"]["rows"]["bitsandbytes/nf4-128x256"]
    assert peer["largest_error"] <= dequantize.TOLERANCE and peer["gb_per_second"] > 0


def test_a_wrong_result_is_an_error_and_no_time(monkeypatch):
    def swapped(x, codes, scales, tensor_scale, *, elements, backend):
        return kernel(x, codes ^ (codes == codes[0, 0]).astype("uint8"), scales, tensor_scale, elements=elements)

    kernel = quant_matmul.quant_matmul
    monkeypatch.setattr(quant_matmul, "quant_matmul", swapped)
    row = quant_matmul.measure("dequantize", "nf4", 5, smoke=True)
    assert row["error"].startswith("wrong: the largest error of forward") and "forward_microseconds" not in row


def test_the_crossover_is_where_the_fused_kernel_stops_to_win():
    fused, other = {1: 0.4, 64: 0.9, 256: 1.2, 512: 1.0}, {1: 1.5, 64: 1.1, 256: 1.1, 512: 1.3, 2048: 1.0}
    rows = {f"fused/nf4-{count}": {"forward_over_peer": ratio} for count, ratio in fused.items()}
    rows |= {f"dequantize/nf4-{count}": {"forward_over_peer": ratio} for count, ratio in other.items()}
    assert quant_matmul.crossovers(rows) == {"nf4 forward: rows up to which fused wins": 64}
    assert quant_matmul.crossovers({}) == {}


def test_wrong_products_and_a_loss_that_drifts_are_errors(monkeypatch):
    def swapped(x, weight, axis, noise):
        return matmul(x[::-1], weight, axis, noise)

    matmul = low_precision_correct.matmul
    monkeypatch.setattr(low_precision_correct, "matmul", swapped)
    row = low_precision_correct.measure("products", "fp8", smoke=True)
    assert row["error"].startswith("wrong: y is off by")
    monkeypatch.setattr(low_precision_correct, "last_loss", lambda recipe, _: 2.0 if recipe == "bf16" else 2.03)
    assert low_precision_correct.measure("loss", "fp8_hybrid", smoke=True)["error"].startswith(
        "wrong: the loss is +1.5"
    )
    assert "error" not in low_precision_correct.measure("loss", "nvfp4", smoke=True)


def test_steps_are_compared_with_those_of_their_peer():
    seconds = {
        "lora-fp8/8B": 2.0,
        "lora-bf16/8B": 3.0,
        "normuon/0.6B-x1": 1.2,
        "adamw/0.6B-x1": 1.0,
        "whole-fp8/0.6B": 1,
    }
    rows = {name: {"seconds": second, "tokens_per_second": 6 / second} for name, second in seconds.items()}
    rows["whole-bf16/0.6B"] = {"error": "out of memory"}
    assert precision_step.compared(rows) == {
        "lora-fp8/8B: tokens/s over bfloat16's": 1.5,
        "normuon/0.6B-x1: time over AdamW's, at most 1.15 is wanted": 1.2,
    }


def test_what_others_published_stands_beside_what_is_measured(monkeypatch):
    jobs = {job.name: job for job in precision_step.piece(smoke=False).jobs}
    measured = []

    def measure_step(config, shape, steps, remats, **options):
        measured.append((shape, options))
        return {"seconds": 2.0, "tokens_per_second": 5.0}

    monkeypatch.setattr(precision_step, "measure_step", measure_step)
    for contender, figures in precision_step.PUBLISHED.items():
        for size, published in figures.items():
            row = precision_step.measure(**jobs[f"{contender}/{size}"].arguments)
            assert (row["published"], row["tokens_per_second"]) == (published, 5.0)
            shape, options = measured[-1]
            assert options["lora"] == contender.startswith("lora") and shape[-1] == (2048 if options["lora"] else 1024)
            assert options["precision"].recipe == ("fp8_hybrid" if contender.endswith("fp8") else "bf16")
    row = precision_step.measure(**jobs["normuon/0.6B-x8"].arguments)
    assert "published" not in row and row["tokens_per_step"] == 8 * 8 * 1024
    assert measured[-1][1]["optim"].name == "normuon"


def test_without_a_gpu_nothing_is_measured():
    for command in (["benchmarks/gpu_suite.py"], ["-m", "pallas_kernels.tune", "flash_attention"]):
        process = run(*command)
        assert process.returncode and "GPU" in process.stderr, process.stderr


def test_a_name_that_is_nothing_is_refused():
    process = run("benchmarks/gpu_suite.py", "--smoke", "--only", "atention")
    assert process.returncode == 2 and "nothing is named atention" in process.stderr


def test_the_tuner_prints_source():
    process = run("-m", "pallas_kernels.tune", "flash_attention", "--smoke")
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines()[-1].strip().startswith("Tiles(Tile(block_q=")


def test_a_job_that_crashes_hangs_or_fails_costs_only_itself(tmp_path, monkeypatch):
    (tmp_path / "sick.py").write_text(
        "import os, time\n"
        "def measure(what):\n"
        "    if what == 'raises': raise KeyError('the cause')\n"
        "    if what == 'crashes': os.abort()\n"
        "    if what == 'hangs': time.sleep(60)\n"
        "    return {'figure': what}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    asked = [("a", "raises"), ("a", "well"), ("b", "crashes"), ("b", "hangs"), ("b", "never"), ("c", "well")]
    jobs = [workers.Job(contender, what, "sick", {"what": what}) for contender, what in asked]
    piece = workers.Piece("sick", "", jobs, (), share=1.0, limit=2.0)
    rows = {job.name: row for job, row in workers.run(piece, jobs, deadline=float("inf"))}
    assert "KeyError: 'the cause'" in rows["a/raises"]["error"]
    assert "exit status -6" in rows["b/crashes"]["error"]
    assert rows["b/hangs"]["error"] == "no answer in 2 s"
    assert rows["b/never"] == {"not run": "b hung or failed 2 times before"}
    assert rows["a/well"] == rows["c/well"] == {"figure": "well"}


def test_the_work_of_attention_is_what_is_visible():
    case = {"rows": 2, "length": 8, "heads": 3, "head_dim": 5}
    pairs = attention.flops(case) / (4 * 2 * 3 * 5)
    assert pairs == 8**2 / 2
    assert attention.flops(case | {"documents": (6, 2)}) / (4 * 2 * 3 * 5) == 6**2 / 2 + 2**2 / 2
    assert attention.flops(case | {"window": 3}) / (4 * 2 * 3 * 5) == 8 * 3 - 3**2 / 2
    for name in ("packed-8k", "packed-16k"):
        packed = attention.CASES[name]
        assert sum(packed["documents"]) == packed["length"]
        dense = attention._peer(packed)
        assert abs(attention.flops(packed) / attention.flops(dense) - 1) < 0.01


def test_sizes_of_qwen3():
    assert round(qwen3.matrix_parameters(qwen3.CONFIGS["8B"]) / 1e9, 2) == 7.57  # 8.19 less the embedding's 0.62
    assert round(qwen3.adapter_parameters(qwen3.CONFIGS["8B"]) / 1e6, 1) == 43.6
    assert round(qwen3.adapter_parameters(qwen3.CONFIGS["0.6B"]) / 1e6, 1) == 10.1
    for size, billions in {"0.5B": 0.49, "1.5B": 1.54, "7B": 7.07}.items():  # 7.62 less the embedding's 0.54
        assert round(qwen3.matrix_parameters(qwen3.CONFIGS[f"Qwen2.5-{size}"]) / 1e9, 2) == billions


def test_an_update_moves_gradients_once_and_parameters_and_state_twice(monkeypatch):
    monkeypatch.setattr(optimizers, "in_place", lambda *_: None)
    monkeypatch.setattr(optimizers, "seconds_per_call", lambda *_: {"own": 1e-3, "optax": 2e-3})
    row = optimizers.measure("adamw", "tiny", "float32", smoke=True)
    assert row["bytes_per_parameter"] == pytest.approx(4 + 2 * (4 + 8), rel=1e-5)  # and a counter
    assert row["gb_per_second"] == pytest.approx(row["parameters"] * row["bytes_per_parameter"] / 1e6)
    assert row["over_optax"] == 0.5


@pytest.mark.parametrize("size", ["0.6B", "1.7B"])
def test_the_8_bit_optimizer_keeps_two_bytes_a_weight_of_a_real_model(size, one_device):
    optim = models.Optim(name="adamw_8bit")
    built = models.training(qwen3.CONFIGS[size], lora=False, optim=optim)
    state = jax.eval_shape(built.optimizer.init, built.trained)
    count = sum(leaf.size for leaf in jax.tree.leaves(built.trained))
    assert 2 < optimizers.size_of(state) / count <= 2.05
