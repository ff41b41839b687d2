"""metrics.jsonl has every bit, and a resumed run writes the same file as an uninterrupted one."""

import dataclasses
import json
import math
import struct
import sys
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtune.config.schema import AimOptions, LogOptions, WandbOptions
from jaxtune.errors import UserError
from jaxtune.monitor import metrics


def train(folder, first, last, resume_step, log=None):
    writer = metrics.MetricsLog(folder, log or LogOptions(), "run", {"seed": 1}, resume_step, is_main=True)
    for step in range(first, last + 1):
        writer.write(step, {"loss": 1 / (3 * step), "tokens": step * 2**40})
        if step % 2 == 0:
            writer.write(step, {"eval_loss": 1 / (7 * step)})
    writer.close()


@given(value=st.floats(width=64))
def test_a_float_comes_back_bit_for_bit(tmp_path_factory, value):
    folder = tmp_path_factory.mktemp("run")
    writer = metrics.MetricsLog(folder, LogOptions(), "run", {}, 0, is_main=True)
    writer.write(1, {"loss": np.float64(value)})
    writer.close()
    [row] = metrics.read(folder / "metrics.jsonl")
    if math.isnan(value):
        assert math.isnan(row["loss"])
    else:
        assert struct.pack("d", row["loss"]) == struct.pack("d", value)


def test_array_scalars_are_written_as_numbers(tmp_path):
    writer = metrics.MetricsLog(tmp_path, LogOptions(), "run", {}, 0, is_main=True)
    writer.write(1, {"loss": np.float32(0.1), "tokens": np.int64(7), "grad_norm": float("inf"), "note": "slow"})
    line = (tmp_path / "metrics.jsonl").read_text()  # before close: each line is flushed
    writer.close()
    assert line == '{"step": 1, "loss": 0.10000000149011612, "tokens": 7, "grad_norm": Infinity, "note": "slow"}\n'


@pytest.mark.parametrize("killed_at", [4, 5, 9])
def test_resumed_file_equals_the_uninterrupted_one(tmp_path, killed_at):
    train(tmp_path / "whole", 1, 10, resume_step=0)
    train(tmp_path / "cut", 1, killed_at, resume_step=0)
    with (tmp_path / "cut/metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "lo')  # killed while writing
    train(tmp_path / "cut", 5, 10, resume_step=4)
    assert (tmp_path / "cut/metrics.jsonl").read_bytes() == (tmp_path / "whole/metrics.jsonl").read_bytes()


def test_a_run_from_the_start_begins_with_an_empty_file(tmp_path):
    writer = metrics.MetricsLog(tmp_path, LogOptions(), "run", {}, 0, is_main=True)
    writer.write(0, {"eval_loss": 5.5})
    writer.close()
    train(tmp_path, 1, 2, resume_step=0)
    assert [row["step"] for row in metrics.read(tmp_path / "metrics.jsonl")] == [1, 2, 2]


@pytest.mark.parametrize("damage", ["\0\0\0", "3", '{"loss": 1.0}'])
def test_a_damaged_line_is_named(tmp_path, damage):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{damage}\n{{"step": 2}}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2"):
        metrics.cut(path, 2)


def test_only_the_main_process_writes(tmp_path):
    writer = metrics.MetricsLog(tmp_path / "run", LogOptions(tensorboard=True), "run", {}, 0, is_main=False)
    writer.write(1, {"loss": 1.0})
    writer.close()
    assert not (tmp_path / "run").exists()


def test_a_missing_package_is_an_error_that_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(UserError, match=r"log\.tensorboard .* pip install 'jaxtune\[tensorboard\]'"):
        train(tmp_path, 1, 1, 0, LogOptions(tensorboard=True))


def test_tensorboard_has_the_numbers_and_hides_what_a_resumed_run_repeats(tmp_path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto import event_pb2

    log = LogOptions(jsonl=False, tensorboard=True)
    train(tmp_path, 1, 6, 0, log)
    train(tmp_path, 5, 6, 4, log)
    events = []
    for file in sorted((tmp_path / "tensorboard").iterdir(), key=lambda file: file.suffix):
        data = file.read_bytes()
        while data:  # a TFRecord: length, its checksum, an event, its checksum
            (length,) = struct.unpack("<Q", data[:8])
            events.append(event_pb2.Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
    losses = [(event.step, value.tag) for event in events for value in event.summary.value if value.tag == "loss"]
    assert losses == [(step, "loss") for step in (1, 2, 3, 4, 5, 6, 5, 6)]
    starts = [event.step for event in events if event.session_log.status == 1]
    assert starts == [0, 5]
    assert not (tmp_path / "metrics.jsonl").exists()


def test_wandb_offline_goes_on_under_the_same_id(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    seen = []
    start = wandb.init
    monkeypatch.setattr(wandb, "init", lambda **kwargs: seen.append(start(**kwargs)) or seen[-1])
    log = dataclasses.replace(LogOptions(), wandb=WandbOptions(enabled=True, project="tests", tags=("a",)))
    train(tmp_path, 1, 4, 0, log)
    train(tmp_path, 3, 4, 2, log)
    assert seen[0].id == seen[1].id == (tmp_path / "wandb_id.txt").read_text()
    assert seen[0].name == "run" and seen[0].config["seed"] == 1
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) >= 1
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 4


def test_wandb_gets_a_row_now_and_then(tmp_path, monkeypatch):
    rows = []
    run = types.SimpleNamespace(define_metric=lambda *_, **__: None, log=rows.append, finish=lambda: None)
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **_: run))
    train(tmp_path, 1, 7, 0, LogOptions(wandb=WandbOptions(enabled=True, every=3)))
    assert [row["step"] for row in rows if "loss" in row] == [3, 6]
    assert [row["step"] for row in rows if "eval_loss" in row] == [2, 4, 6]


class FakeAim(dict):
    """aim.Run, by its documentation; Aim itself is large."""

    def __init__(self, run_hash, repo, experiment):
        super().__init__()
        self.hash, self.repo, self.experiment = run_hash or "abc", repo, experiment
        self.resumed, self.tracked, self.closed, self.name = run_hash is not None, [], False, None

    def track(self, value, name, step):
        self.tracked.append((name, step, value))

    def close(self):
        self.closed = True


def test_aim_gets_each_number_and_a_resumed_run_goes_on(tmp_path, monkeypatch):
    runs = []
    made = lambda **options: runs.append(FakeAim(**options)) or runs[-1]  # noqa: E731
    monkeypatch.setitem(sys.modules, "aim", types.SimpleNamespace(Run=made))
    log = LogOptions(aim=AimOptions(enabled=True, repo="there", experiment="tests"))
    train(tmp_path, 1, 2, 0, log)
    train(tmp_path, 3, 3, 2, log)
    first, second = runs
    assert (first.repo, first.experiment, first.name, first["config"]) == ("there", "tests", "run", {"seed": 1})
    assert first.tracked[:2] == [("loss", 1, 1 / 3), ("tokens", 1, 2**40)] and ("eval_loss", 2, 1 / 14) in first.tracked
    assert first.closed and not first.resumed and second.resumed and second.hash == first.hash
    monkeypatch.setitem(sys.modules, "aim", None)
    with pytest.raises(UserError, match="log.aim.enabled needs the package aim: pip install .jaxtune.aim.."):
        train(tmp_path, 1, 1, 0, log)
