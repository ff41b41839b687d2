"""What is wrong with a plugin is said before anything is trained."""

from pathlib import Path

import pytest

from jaxtune.config.schema import Config, Train
from jaxtune.errors import UserError
from jaxtune.run import plugins

NOTHING = "x = 1\n"


@pytest.mark.parametrize(
    "text, message",
    [
        (NOTHING, "has nothing that is used: on_step"),
        ("def on_steps(run, step, metrics): ...\n", "on_steps is no callback; these are: on_step"),
        ("def on_step(step): ...\n", r"on_step must be a function of \(run, step, metrics\)"),
        ("import nowhere\n", r"mine\.py:1 fails: ModuleNotFoundError"),
        ("MODEL_TYPE = 'x'\nNAMES = {}\n", "a family .* has read_spec too"),
    ],
)
def test_a_plugin_that_cannot_be_used(tmp_path, text, message):
    file = tmp_path / "mine.py"
    file.write_text(text)
    with pytest.raises(UserError, match=message):
        plugins.load(Config(train=Train(plugins=(str(file),))))


def test_a_file_that_is_not_there_or_no_python():
    for name in ("nowhere.py", "mine.txt"):
        with pytest.raises(UserError, match=f"train.plugins.*{name}"):
            plugins.load(Config(train=Train(plugins=(name,))))


def test_a_run_has_one_objective(tmp_path):
    names = []
    for name in ("one.py", "two.py"):
        (tmp_path / name).write_text("def objective(config): ...\n")
        names.append(str(tmp_path / name))
    with pytest.raises(UserError, match="have objective, of which a run has one"):
        plugins.load(Config(train=Train(plugins=tuple(names))))
    with pytest.raises(UserError, match="objective must return a Objective, not None"):
        plugins.own_objective(Config(train=Train(plugins=(names[0],))))


def test_callbacks_share_a_state_that_must_be_json(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def on_step(run, step, metrics):\n    run.state['steps'] = run.state.get('steps', 0) + 1\n"
        "def on_save(run, step, folder):\n    run.state['folder'] = folder\n"
        "def on_end(run, step):\n    raise ValueError('no')\n"
    )
    config = Config(train=Train(plugins=(str(file),)))
    called = plugins.callbacks(config, tmp_path, {str(file): {"steps": 4}})
    called("on_step", 5, {})
    called("on_epoch", 5, 1)  # it has none
    assert called.states() == {str(file): {"steps": 5}}
    with pytest.raises(UserError, match=r"mine\.py:6: on_end fails: ValueError: no"):
        called("on_end", 5)
    called("on_save", 5, Path("here"))
    with pytest.raises(UserError, match="run.state must be JSON"):
        called.states()


def test_a_file_that_has_changed_is_run_again(tmp_path):
    file = tmp_path / "mine.py"
    config = Config(train=Train(plugins=(str(file),)))
    for answer in ("one", "two"):
        file.write_text(f"def on_end(run, step):\n    run.state['answer'] = {answer!r}\n")
        called = plugins.callbacks(config, tmp_path, {})
        called("on_end", 1)
        assert called.runs[0].state == {"answer": answer}
