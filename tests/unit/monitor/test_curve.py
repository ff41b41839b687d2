"""The loss curve is drawn from metrics.jsonl."""

import math

import matplotlib.image
import numpy as np
import pytest

from jaxtune.config.schema import LogOptions
from jaxtune.monitor import curve, metrics


def test_curve_is_drawn_with_gaps_and_evaluation(tmp_path):
    log = metrics.MetricsLog(tmp_path, LogOptions(), "run", {}, 0, is_main=True)
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
