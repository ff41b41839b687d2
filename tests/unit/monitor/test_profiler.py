"""A trace covers the requested steps."""

import os
import pathlib
import signal

import jax.numpy as jnp
import pytest

from jaxtune.config.schema import ProfOptions
from jaxtune.monitor.profiler import Profiler, trace_on_signal


def traced_steps(folder: pathlib.Path, prof: ProfOptions, steps: int, monkeypatch) -> list[str]:
    calls: list[str] = []
    monkeypatch.setattr("jax.profiler.start_trace", lambda path: calls.append(f"start {pathlib.Path(path).name}"))
    monkeypatch.setattr("jax.profiler.stop_trace", lambda: calls.append("stop"))
    profiler = Profiler(folder, prof, is_main=True, step_text=str)
    for step in range(1, steps + 1):
        profiler.before_step()
        calls.append(str(step))
        profiler.after_step(jnp.zeros(()))
    profiler.close()
    return calls


@pytest.mark.parametrize(
    ("prof", "expected"),
    [
        (ProfOptions(enabled=True, start_step=2, steps=2), ["1", "start profile", "2", "3", "stop", "4"]),
        (ProfOptions(enabled=True, start_step=4, steps=9), ["1", "2", "3", "start profile", "4", "stop"]),
        (ProfOptions(enabled=False), ["1", "2", "3", "4"]),
    ],
)
def test_the_trace_covers_the_steps_asked_for(tmp_path, monkeypatch, prof, expected):
    assert traced_steps(tmp_path, prof, 4, monkeypatch) == expected


def test_a_trace_is_written(tmp_path):
    profiler = Profiler(tmp_path, ProfOptions(enabled=True, start_step=1, steps=1), is_main=True, step_text=str)
    profiler.before_step()
    profiler.after_step(jnp.ones(8).sum())
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))


def test_a_trace_is_written_where_it_is_to_be_with_the_memory(tmp_path):
    run = tmp_path / "run"
    prof = ProfOptions(enabled=True, start_step=1, steps=1, dir=str(tmp_path / "traces"), memory=True)
    profiler = Profiler(run, prof, is_main=True, step_text=str)
    profiler.before_step()
    profiler.after_step(jnp.ones(8).sum())
    profiler.close()
    assert list((tmp_path / "traces" / "run").rglob("*.xplane.pb"))
    assert (tmp_path / "traces" / "run" / "memory-1.prof").stat().st_size > 0 and not run.exists()


def test_other_processes_trace_if_they_are_to(tmp_path):
    for every_process in (False, True):
        folder = tmp_path / str(every_process)
        profiler = Profiler(folder, ProfOptions(True, 1, 1, every_process=every_process), is_main=False, step_text=str)
        profiler.before_step()
        profiler.after_step(jnp.ones(8).sum())
        profiler.close()
        assert folder.exists() == every_process
        assert len(list((folder / "profile").rglob("process-0/**/*.xplane.pb"))) == every_process


def test_a_signal_traces_the_next_steps(tmp_path, monkeypatch):
    before = signal.getsignal(signal.SIGUSR1)
    calls: list[str] = []
    monkeypatch.setattr("jax.profiler.start_trace", lambda path: calls.append("start"))
    monkeypatch.setattr("jax.profiler.stop_trace", lambda: calls.append("stop"))
    with trace_on_signal():
        os.kill(os.getpid(), signal.SIGUSR1)  # before the loop: the first steps
        profiler = Profiler(tmp_path, ProfOptions(steps=2), is_main=True, step_text=str)
        for step in range(1, 8):
            if step == 4:
                os.kill(os.getpid(), signal.SIGUSR1)
            profiler.before_step()
            calls.append(str(step))
            profiler.after_step(jnp.zeros(()))
        profiler.close()
        os.kill(os.getpid(), signal.SIGUSR1)  # after the loop: no effect
    assert calls == ["start", "1", "2", "stop", "3", "start", "4", "5", "stop", "6", "7"]
    assert signal.getsignal(signal.SIGUSR1) == before
