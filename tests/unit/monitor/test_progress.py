"""What a user sees of a run: progress, goodput, throughput, curve, trace."""

import collections
import io
import math
import pathlib

import jax.numpy as jnp
import matplotlib.image
import numpy as np
import pytest
import rich.console
from hypothesis import given
from hypothesis import strategies as st

from jaxtune.config.schema import Log, Prof
from jaxtune.monitor import curve, metrics
from jaxtune.monitor.goodput import Goodput
from jaxtune.monitor.profiler import Profiler
from jaxtune.monitor.progress import Progress
from jaxtune.monitor.throughput import Work, flops_per_token, mfu, peak_flops

ROW = {"loss": 2.34567, "learning_rate": 1e-4, "grad_norm": 0.5, "tokens_per_second": 12345.6, "mfu": 0.412}


def show(total, start, every, rows, **kwargs):
    progress = Progress(total, start, every, **kwargs)
    for step, row in rows:
        progress.update(step, row)
    progress.message("[saved] step 3")
    progress.close()


def test_without_a_terminal_progress_is_plain_lines(capsys):
    show(7, 0, 3, [(step, ROW) for step in range(1, 8)])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[:-1]] == ["3/7", "6/7", "7/7"]
    assert "left  loss 2.3457  lr 1.0e-04  grad norm 0.500  tokens/s 12,346  MFU 41%" in lines[1]
    assert lines[-1] == "[saved] step 3"
    assert "\x1b" not in "".join(lines)


def test_a_step_that_is_not_finite_is_always_shown(capsys):
    show(100, 0, 50, [(1, ROW), (2, ROW | {"loss": math.nan, "grad_norm": math.inf}), (3, ROW)])
    [line, _] = capsys.readouterr().out.splitlines()
    assert line.startswith("step 2/100") and "loss NaN" in line and "grad norm inf" in line


def test_the_bar_shows_progress_and_nan_in_red(monkeypatch):
    screen = io.StringIO()
    console = rich.console.Console
    monkeypatch.setattr(
        rich.console, "Console", lambda **kwargs: console(file=screen, force_terminal=True, width=150, **kwargs)
    )
    show(7, 2, 1, [(3, {"loss": math.nan}), (4, ROW)])
    assert "4/7" in screen.getvalue() and "2.3457" in screen.getvalue() and "[saved] step 3" in screen.getvalue()
    assert "\x1b[1;31mNaN" in screen.getvalue()


def test_other_processes_show_nothing(capsys):
    show(7, 0, 1, [(1, ROW), (2, {"loss": math.nan})], is_main=False)
    assert capsys.readouterr().out == ""


@given(
    st.lists(st.tuples(st.sampled_from(["compile", "step", "save"]), st.integers(1, 9), st.integers(0, 9)), max_size=9)
)
def test_goodput_parts_sum_to_the_wall_time(spans):
    now = 0
    goodput = Goodput(clock=lambda: now)
    for outer, before, inside in spans:
        with goodput.measure(outer):
            now += before
            with goodput.measure("data wait"):
                now += inside
            now += before
        now += 1
    seconds = collections.defaultdict(float, goodput.seconds())  # what took no time may be left out
    assert sum(seconds.values()) == now
    assert seconds["data wait"] == sum(inside for _, _, inside in spans)
    assert seconds["save"] == sum(2 * before for outer, before, _ in spans if outer == "save")
    assert seconds["other"] == len(spans)


def test_goodput_report_is_one_line_with_the_largest_first():
    ticks = iter([0.0, 1.0, 8.0, 10.0, 10.0])
    goodput = Goodput(clock=lambda: next(ticks))
    with goodput.measure("step"):
        pass
    assert goodput.report() == "wall time 10.0 s: step 7.0 s (70%), other 3.0 s (30%)"


def test_goodput_survives_an_error_inside():
    now = 0
    goodput = Goodput(clock=lambda: now)
    with pytest.raises(ValueError), goodput.measure("step"):
        now += 2
        raise ValueError
    now += 3
    assert goodput.seconds() | {"step": 2, "other": 3} == goodput.seconds()


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
    # The formula counts a token as half seen by itself: half a key less than what is seen.
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


def test_curve_is_drawn_with_gaps_and_evaluation(tmp_path):
    log = metrics.MetricsLog(tmp_path, Log(), "run", {}, 0, is_main=True)
    for step in range(1, 40):
        log.write(step, {"loss": math.nan if step == 7 else 3 / step, "learning_rate": 0.0})
    log.write(39, {"eval_loss": 0.1})
    log.close()
    curve.draw(tmp_path / "metrics.jsonl", tmp_path / "curve.png", "a run")
    pixels = matplotlib.image.imread(tmp_path / "curve.png")
    assert pixels.shape[0] > 400 and pixels.shape[1] > 800
    blue, red = np.array([0x2A, 0x6F, 0xBB]) / 255, np.array([0xD1, 0x49, 0x5B]) / 255
    for colour in (blue, red):
        assert (np.abs(pixels[..., :3] - colour).max(-1) < 0.02).sum() > 20


@pytest.mark.parametrize("text", ["", '{"step": 1, "loss": NaN, "learning_rate": NaN}\n', '{"step": 1, "loss": 2.0}\n'])
def test_curve_of_next_to_nothing(tmp_path, text):
    (tmp_path / "metrics.jsonl").write_text(text)
    curve.draw(tmp_path / "metrics.jsonl", tmp_path / "curve.png", "a run")
    assert (tmp_path / "curve.png").stat().st_size > 0


def test_smoothing_keeps_a_constant_and_damps_noise():
    assert curve.smooth(np.full(500, 2.5)) == pytest.approx(2.5)
    noise = np.random.default_rng(0).normal(size=500)
    smoothed = curve.smooth(noise)
    assert smoothed.shape == noise.shape and smoothed.std() < 0.5 * noise.std()


def traced_steps(folder: pathlib.Path, prof: Prof, steps: int, monkeypatch) -> list[str]:
    calls: list[str] = []
    monkeypatch.setattr("jax.profiler.start_trace", lambda path: calls.append(f"start {pathlib.Path(path).name}"))
    monkeypatch.setattr("jax.profiler.stop_trace", lambda: calls.append("stop"))
    profiler = Profiler(folder, prof, is_main=True)
    for step in range(1, steps + 1):
        profiler.before_step()
        calls.append(str(step))
        profiler.after_step(jnp.zeros(()))
    profiler.close()
    return calls


@pytest.mark.parametrize(
    ("prof", "expected"),
    [
        (Prof(enabled=True, start_step=2, steps=2), ["1", "start profile", "2", "3", "stop", "4"]),
        (Prof(enabled=True, start_step=4, steps=9), ["1", "2", "3", "start profile", "4", "stop"]),
        (Prof(enabled=False), ["1", "2", "3", "4"]),
    ],
)
def test_the_trace_covers_the_steps_asked_for(tmp_path, monkeypatch, prof, expected):
    assert traced_steps(tmp_path, prof, 4, monkeypatch) == expected


def test_a_trace_is_written(tmp_path):
    profiler = Profiler(tmp_path, Prof(enabled=True, start_step=1, steps=1), is_main=True)
    profiler.before_step()
    profiler.after_step(jnp.ones(8).sum())
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))
