"""The GPU suite's and the tuner's conclusions and refusals. tests/nightly runs them whole."""

import sys
from pathlib import Path

import jax
import pytest

from pallas_kernels import tune

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu_suite  # noqa: E402
from gpu import (  # noqa: E402
    attention,
    low_precision_correct,
    models,
    optimizers,
    precision_step,
    quant_matmul,
    qwen3,
    workers,
)


@pytest.fixture
def refusal_of(monkeypatch, capsys):
    """Return a function that gives a program's message and exit status when it refuses its arguments."""

    def say(main, *arguments: str) -> tuple[str, int]:
        monkeypatch.setattr(sys, "argv", ["program", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        code = ended.value.code  # the interpreter prints a text code and exits with status 1
        return (code, 1) if isinstance(code, str) else (capsys.readouterr().err, code)

    return say


def test_a_wrong_result_is_an_error_and_no_time(monkeypatch):
    def swapped(x, codes, scales, tensor_scale, *, elements, backend):
        return kernel(x, codes ^ (codes == codes[0, 0]).astype("uint8"), scales, tensor_scale, elements=elements)

    kernel = quant_matmul.quant_matmul
    monkeypatch.setattr(quant_matmul, "quant_matmul", swapped)
    row = quant_matmul.measure("dequantize", "nf4", 5, smoke=True)
    assert row["error"].startswith("wrong: the largest error of forward") and "forward_microseconds" not in row


def test_the_crossover_is_where_the_fused_kernel_stops_to_win():
    fused, unfused = {1: 0.4, 64: 0.9, 256: 1.2, 512: 1.0}, {1: 1.5, 64: 1.1, 256: 1.1, 512: 1.3, 2048: 1.0}
    rows = {f"fused/nf4-{count}": {"forward_over_peer": ratio} for count, ratio in fused.items()}
    rows |= {f"dequantize/nf4-{count}": {"forward_over_peer": ratio} for count, ratio in unfused.items()}
    assert quant_matmul.crossovers(rows) == {"nf4 forward: rows up to which fused wins": 64}
    assert quant_matmul.crossovers({}) == {}


def test_wrong_products_and_a_loss_that_drifts_are_errors(monkeypatch):
    def swapped(weight, x, axis, noise):
        return matmul(weight, x[::-1], axis, noise)

    matmul = low_precision_correct.LowPrecision.matmul
    monkeypatch.setattr(low_precision_correct.LowPrecision, "matmul", swapped)
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
    assert precision_step.compare_recipes(rows) == {
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


@pytest.mark.parametrize(("main", "arguments"), [(gpu_suite.main, []), (tune.main, ["flash_attention"])])
def test_without_a_gpu_nothing_is_measured(refusal_of, main, arguments):
    message, status = refusal_of(main, *arguments)
    assert status == 1 and "GPU" in message


def test_a_name_that_is_nothing_is_refused(refusal_of):
    message, status = refusal_of(gpu_suite.main, "--smoke", "--only", "atention")
    assert status == 2 and "nothing is named atention" in message


def test_the_tuner_prints_source(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tune", "flash_attention", "--smoke"])
    monkeypatch.setattr(tune, "REPEATS", 1)
    tune.main()
    assert capsys.readouterr().out.splitlines()[-1].strip().startswith("Tiles(Tile(block_q=")


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
    cases = [("a", "raises"), ("a", "well"), ("b", "crashes"), ("b", "hangs"), ("b", "never"), ("c", "well")]
    jobs = [workers.Job(contender, behaviour, "sick", {"what": behaviour}) for contender, behaviour in cases]
    piece = workers.Piece("sick", "", jobs, (), share=1.0, limit=2.0)
    rows = {job.name: row for job, row in workers.run(piece, jobs, deadline=float("inf"))}
    assert "KeyError: 'the cause'" in rows["a/raises"]["error"]
    assert "exit status -6" in rows["b/crashes"]["error"]
    assert rows["b/hangs"]["error"] == "no answer in 2 s"
    assert rows["b/never"] == {"not run": "b hung or failed 2 times before"}
    assert rows["a/well"] == rows["c/well"] == {"figure": "well"}


def test_a_job_may_be_given_the_rows_before_it(tmp_path, monkeypatch):
    (tmp_path / "summing.py").write_text("def measure(what, rows=None): return {'figure': what, 'before': rows}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    jobs = [workers.Job("a", str(number), "summing", {"what": number}, given_rows=number == 2) for number in range(3)]
    jobs.insert(1, workers.Job("b", "none", "summing", refused="a reason"))
    piece = workers.Piece("summing", "", jobs, (), share=1.0, limit=20.0)
    rows = {job.name: row for job, row in workers.run(piece, jobs, deadline=float("inf"))}
    assert rows["a/1"]["before"] is None
    assert rows["a/2"]["before"] == {name: rows[name] for name in ("a/0", "a/1")}


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
    assert round(qwen3.matrix_parameters(qwen3.CONFIGS["8B"]) / 1e9, 2) == 7.57  # 8.19 without the embedding's 0.62
    assert round(qwen3.adapter_parameters(qwen3.CONFIGS["8B"]) / 1e6, 1) == 43.6
    assert round(qwen3.adapter_parameters(qwen3.CONFIGS["0.6B"]) / 1e6, 1) == 10.1
    for size, billions in {"0.5B": 0.49, "1.5B": 1.54, "7B": 7.07}.items():  # 7.62 without the embedding's 0.54
        assert round(qwen3.matrix_parameters(qwen3.CONFIGS[f"Qwen2.5-{size}"]) / 1e9, 2) == billions


def test_an_update_moves_gradients_once_and_parameters_and_state_twice(monkeypatch):
    monkeypatch.setattr(optimizers, "in_place", lambda *_: None)
    monkeypatch.setattr(optimizers, "seconds_per_call", lambda *_: {"own": 1e-3, "optax": 2e-3})
    row = optimizers.measure("adamw", "tiny", "float32", smoke=True)
    assert row["bytes_per_parameter"] == pytest.approx(4 + 2 * (4 + 8), rel=1e-5)  # and a counter
    assert row["gb_per_second"] == pytest.approx(row["parameters"] * row["bytes_per_parameter"] / 1e6)
    assert row["over_optax"] == 0.5


@pytest.mark.parametrize(("size", "bytes_per_weight"), [("0.6B", 2.06), ("1.7B", 2.04)])
def test_the_8_bit_optimizer_keeps_two_bytes_a_weight_of_a_real_model(size, bytes_per_weight, one_device):
    """Each block of 256 has a scale as well; of 128 in a model 1024 wide, so that 8 devices can share its rows."""
    optim = models.OptimOptions(name="adamw_8bit")
    state = models.training(qwen3.CONFIGS[size], lora=False, optim=optim).state
    count = sum(leaf.size for leaf in jax.tree.leaves(state.trained))
    assert 2 < optimizers.size_of(state.optimizer) / count <= bytes_per_weight
