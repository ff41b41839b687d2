"""Faults that would show late are refused at the start: packages, folders, files of an answer."""

import dataclasses
import io
import sys

import pytest

from jaxtune import evaluate, export, generate
from jaxtune.config.schema import (
    AimOptions,
    CkptOptions,
    Config,
    DataOptions,
    Dataset,
    LogOptions,
    ModelOptions,
    TrainOptions,
    WandbOptions,
)
from jaxtune.errors import UserError
from jaxtune.host.preflight import check_ready
from jaxtune.host.run_folder import run_folder
from jaxtune.models.options import AttentionOptions
from jaxtune.train import train


@pytest.fixture
def config(tmp_path):
    """Return the config of a run whose model does not exist."""
    train = TrainOptions(output_dir=str(tmp_path / "runs"), run_name="a")
    data = DataOptions(datasets=(Dataset(path="nowhere.jsonl"),))
    return Config(model=ModelOptions(path=str(tmp_path / "nowhere")), data=data, train=train)


def test_what_is_ready_stays_as_it_is(config, tmp_path):
    check_ready(config, run_folder(config))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("module", "log", "told"),
    [
        (
            "tensorboardX",
            LogOptions(tensorboard=True),
            r"log.tensorboard needs the package tensorboardX: pip install 'jaxtune\[",
        ),
        (
            "wandb",
            LogOptions(wandb=WandbOptions(enabled=True)),
            r"log.wandb.enabled needs the package wandb: pip install 'jaxtune\[wandb\]'",
        ),
        (
            "aim",
            LogOptions(aim=AimOptions(enabled=True)),
            r"log.aim.enabled needs the package aim: pip install 'jaxtune\[aim\]'",
        ),
    ],
)
def test_a_package_that_is_missing_is_said_before_the_model_is_looked_for(config, monkeypatch, module, log, told):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=told):
        train(dataclasses.replace(config, log=log))


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_a_login_that_wandb_lacks_is_said_before_the_model_is_looked_for(config, monkeypatch, tmp_path, mode):
    wandb = pytest.importorskip("wandb")
    wandb.teardown()  # drop its settings, which it reads once
    monkeypatch.setattr(sys, "stdin", io.StringIO())  # not a terminal, so wandb does not prompt
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    for name, value in {"WANDB_MODE": mode, "NETRC": tmp_path / "none", "WANDB_CONFIG_DIR": tmp_path / "none"}.items():
        monkeypatch.setenv(name, str(value))
    message = (
        "log.wandb.enabled: wandb has no login: run `wandb login`, set WANDB_API_KEY, or"
        if mode == "online"
        else "nowhere"
    )
    with pytest.raises(UserError, match=message):
        train(dataclasses.replace(config, log=LogOptions(wandb=WandbOptions(enabled=True))))
    wandb.teardown()


@pytest.mark.parametrize(
    ("backend", "package"),
    [
        ("fa3", r"flash-attn3-jax: pip install 'jaxtune\[hopper\]'"),
        ("flash", r"dew-flash-attn: on Python 3.12 or newer, pip install 'jaxtune\[flash-cuda12\]'"),
    ],
)
def test_the_package_of_a_kernel_is_looked_for(config, monkeypatch, backend, package):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = dataclasses.replace(config, attention=AttentionOptions(backend=backend))
    with pytest.raises(UserError, match=f"needs the package {package}"):
        check_ready(config, run_folder(config))


@pytest.mark.parametrize("option", ["train.output_dir", "data.cache_dir", "ckpt.dir", "export"])
def test_a_folder_that_cannot_be_written_to_is_named(config, tmp_path, option):
    taken = tmp_path / "taken"  # a file in place of a folder, because root may write to any folder
    if option == "export":
        taken = run_folder(config).export
        taken.parent.mkdir(parents=True)
    taken.write_text("")
    changed = {
        "train.output_dir": {"train": dataclasses.replace(config.train, output_dir=str(taken))},
        "data.cache_dir": {"data": DataOptions(cache_dir=str(taken / "cache"))},
        "ckpt.dir": {"ckpt": CkptOptions(dir=str(taken))},
        "export": {},
    }[option]
    config = dataclasses.replace(config, **changed)
    named = "train.output_dir" if option == "export" else option
    with pytest.raises(UserError, match=f"^{named}=.*: cannot write to {taken}: Not a directory$"):
        check_ready(config, run_folder(config))


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (generate, ["--model=nowhere", "--input=nowhere.jsonl"]),
        (evaluate, ["--model=nowhere", "--tasks=piqa"]),
        (export, ["--run=nowhere"]),
    ],
    ids=["generate", "evaluate", "export"],
)
def test_the_output_of_a_command_is_tried_before_its_model(command, arguments, tmp_path, capsys):
    (tmp_path / "taken").write_text("")
    output = f"--output={tmp_path}/taken/b/answers.jsonl"
    assert command.main([*arguments, output]) == 2
    assert f"{output}: cannot write to {tmp_path}/taken: Not a directory" in capsys.readouterr().err
