"""A trace covers the steps asked for."""

import pathlib

import jax.numpy as jnp
import pytest

from jaxtune.config.schema import Prof
from jaxtune.monitor.profiler import Profiler


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
