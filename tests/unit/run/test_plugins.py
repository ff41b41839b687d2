"""Errors of a plugin are reported before training starts."""

import dataclasses
from pathlib import Path

import pytest

from jaxtune import evaluate, export, generate
from jaxtune.config import to_json
from jaxtune.config.recipe import read_recipe
from jaxtune.config.schema import Config, DataOptions, Dataset, ModelOptions, RolloutOptions, TrainOptions
from jaxtune.errors import UserError
from jaxtune.host import plugins

NOTHING = "x = 1\n"


@pytest.mark.parametrize(
    "text, message",
    [
        (NOTHING, "has nothing that is used: on_step"),
        ("def on_steps(run, step, metrics): ...\n", "on_steps is not a callback; the callbacks are: on_step"),
        ("def on_step(step): ...\n", r"on_step must be a function of \(run, step, metrics\)"),
        ("import nowhere\n", r"mine\.py:1 fails: ModuleNotFoundError"),
        ("MODEL_TYPE = 'x'\nNAMES = {}\n", "a family .* must define read_spec too"),
    ],
)
def test_a_plugin_that_cannot_be_used(tmp_path, text, message):
    file = tmp_path / "mine.py"
    file.write_text(text)
    with pytest.raises(UserError, match=message):
        plugins.load(Config(train=TrainOptions(plugins=(str(file),))))


def test_a_file_that_is_not_there_or_no_python():
    for name in ("nowhere.py", "mine.txt"):
        with pytest.raises(UserError, match=f"train.plugins.*{name}"):
            plugins.load(Config(train=TrainOptions(plugins=(name,))))


def test_a_run_has_one_objective(tmp_path):
    names = []
    for name in ("one.py", "two.py"):
        (tmp_path / name).write_text("def objective(config): ...\n")
        names.append(str(tmp_path / name))
    with pytest.raises(UserError, match="define objective; only one of them may"):
        plugins.load(Config(train=TrainOptions(plugins=tuple(names))))
    with pytest.raises(UserError, match="objective must return a Objective, not None"):
        plugins.plugin_objective(Config(train=TrainOptions(plugins=(names[0],))))


def test_callbacks_share_a_state_that_must_be_json(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def on_step(run, step, metrics):\n    run.state['steps'] = run.state.get('steps', 0) + 1\n"
        "def on_save(run, step, folder):\n    run.state['folder'] = folder\n"
        "def on_end(run, step):\n    raise ValueError('no')\n"
    )
    config = Config(train=TrainOptions(plugins=(str(file),)))
    called = plugins.callbacks(config, tmp_path, {str(file): {"steps": 4}})
    called("on_step", 5, {})
    called("on_epoch", 5, 1)  # it has no on_epoch
    assert called.states() == {str(file): {"steps": 5}}
    with pytest.raises(UserError, match=r"mine\.py:6: on_end fails: ValueError: no"):
        called("on_end", 5)
    called("on_save", 5, Path("here"))
    with pytest.raises(UserError, match="run.state must be JSON"):
        called.states()


def test_a_file_that_has_changed_is_run_again(tmp_path):
    file = tmp_path / "mine.py"
    config = Config(train=TrainOptions(plugins=(str(file),)))
    for answer in ("one", "two"):
        file.write_text(f"def on_end(run, step):\n    run.state['answer'] = {answer!r}\n")
        called = plugins.callbacks(config, tmp_path, {})
        called("on_end", 1)
        assert called.runs[0].state == {"answer": answer}


@pytest.fixture
def run_of_another(tmp_path):
    """Write a run folder with a plugin, a function and rewards in a file that leaves a mark if it is run."""
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    file = tmp_path / "mine.py"
    file.write_text(
        "from pathlib import Path\nPath(__file__).with_suffix('.ran').touch()\nf = g = on_end = lambda *_: None\n"
    )
    config = Config(
        model=ModelOptions(path=str(tmp_path / "nowhere")),
        data=DataOptions(datasets=(Dataset(path="d.jsonl", function=f"{file}:f"),), validation_split=0.5),
        train=TrainOptions(plugins=(str(file),)),
    )
    (tmp_path / "run" / "config.json").write_text(to_json(config))
    rewarded = dataclasses.replace(
        config, rollout=RolloutOptions(rewards=("jaxtune.recipes.qwen_grpo:right", f"{file}:g"))
    )
    (tmp_path / "run" / "rewarded.json").write_text(to_json(rewarded))
    return tmp_path / "run"


@pytest.mark.parametrize(
    "command",
    [
        (generate.main, "--model={run}", "--prompt=a"),
        (export.main, "--run={run}", "--output={run}/out"),
        (evaluate.main, "--run={run}", "--config.data.datasets[0].function=None"),
    ],
    ids=["generate", "export", "evaluate"],
)
def test_a_plugin_that_only_a_run_s_folder_names_is_not_run(run_of_another, command, capsys):
    main, *arguments = command
    arguments = [argument.format(run=run_of_another) for argument in arguments]
    file, ran = run_of_another.parent / "mine.py", run_of_another.parent / "mine.ran"
    assert main(arguments) == 2 and not ran.exists()
    text = capsys.readouterr().err
    assert "nowhere" in text and f"names plugins ({file}), and plugins of a run are not run unless you name" in text
    assert main([*arguments, f"--plugin={file}"]) == 2 and ran.exists()


def test_functions_that_only_a_run_s_folder_names_are_not_run(run_of_another, capsys):
    run, config = run_of_another, run_of_another / "config.json"
    ran, message = run.parent / "mine.ran", "is code, and code that only a run's folder names is not run; if you trust"
    assert evaluate.main([f"--run={run}"]) == 2 and not ran.exists()
    assert f"data.datasets[0].function = '{run.parent}/mine.py:f' {message}" in capsys.readouterr().err
    (run / "rewarded.json").replace(config)
    assert evaluate.main([f"--run={run}", "--config.data.datasets[0].function=None"]) == 2 and not ran.exists()
    assert f"rollout.rewards = '{run.parent}/mine.py:g' {message}" in capsys.readouterr().err
    assert evaluate.main([f"--run={run}", f"--config={config}"]) == 2 and ran.exists()
    (line,) = read_recipe(str(config)).resolve().startup_notes
    assert line.startswith(f"{config} names Python code, which is run: {run.parent}/mine.py, {run.parent}/mine.py:g, ")
