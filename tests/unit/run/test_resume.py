"""Messages of a run about options that changed since its checkpoint."""

import dataclasses
import json
from types import SimpleNamespace

import pytest

from jaxtune.checkpoint import CheckpointManager
from jaxtune.config import to_json
from jaxtune.config.schema import Config, DataOptions, Dataset, TrainOptions
from jaxtune.errors import UserError
from jaxtune.host.run_folder import RunFolder
from jaxtune.run.resume import Saved, check_same, check_unchanged


def test_the_fields_of_datasets_that_differ_are_named_alone(tmp_path):
    data = DataOptions(datasets=(Dataset(path="a", type="text"), Dataset(path="b")))
    then = Config(data=data, train=TrainOptions(max_steps=3))
    changed = DataOptions(datasets=(Dataset(path="c", type="text"),), eval_datasets=data.eval_datasets)
    with pytest.raises(UserError) as error:
        check_unchanged(_as_saved(then), dataclasses.replace(then, data=changed), RunFolder(tmp_path))
    assert str(error.value).splitlines()[1:3] == [
        "  data.datasets[0].path: 'a' then, 'c' now",
        "  data.datasets[1].path: 'b' then, None now",
    ]
    assert len(str(error.value).splitlines()) == 4
    check_unchanged(_as_saved(then), dataclasses.replace(then, train=TrainOptions(max_steps=9)), RunFolder(tmp_path))


@pytest.mark.parametrize(
    ("then", "now", "said"),
    [({"": "a"}, {"": "b"}, ["the validation data changed"]), ({"x": "a"}, {"x": "a"}, []), (None, {"x": "a"}, [])]
    + [({"x": "a", "y": "b"}, {"x": "a", "y": "c"}, ["the validation data y changed"])],
)
def test_validation_data_that_changed_is_said(caplog, then, now, said):
    feed = SimpleNamespace(documents=SimpleNamespace(has_key=lambda key: True))
    record = {"rows_per_step": 4, "total_steps": 8, "data": "", "base": {}}
    saved = record if then is None else record | {"eval_data": then}
    check_same(saved, record | {"eval_data": now}, None, feed)
    assert [message.split(" since")[0] for message in caplog.messages] == said


@pytest.mark.parametrize(
    ("step", "train", "said"),
    [
        (6, TrainOptions(max_steps=6), "6 of 6 steps"),
        (4, TrainOptions(max_steps=9), "4 of 9 steps"),
        (6, TrainOptions(max_steps=2), "it has 6 steps, and train.max_steps is 2"),
        (6, TrainOptions(epochs=0.5), "it has 6 steps, and train.epochs is 0.5, 2 steps"),
    ],
)
def test_how_far_a_finished_run_is(tmp_path, step, train, said):
    assert Saved(CheckpointManager(tmp_path), None, {"step": step}).progress(train, train.max_steps or 2) == said


def _as_saved(config: Config) -> dict:
    return json.loads(to_json(config))
