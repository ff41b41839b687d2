"""Errors from outside, and wrong command lines, in every command."""

import errno
import logging
import os
import subprocess
import sys
from typing import cast

import pytest
from runs import call

from jaxtune import command
from jaxtune.command import NAMES, run_guarded
from jaxtune.config import new_config
from jaxtune.config.schema import Config
from jaxtune.errors import UserError
from jaxtune.train import train


def raising(error: BaseException):
    def body() -> None:
        raise error

    return body


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_or_quota_is_a_line_that_says_what_is_safe(capsys, number):
    full = OSError(number, os.strerror(number))
    assert run_guarded(raising(full)) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"jaxtune: error: writing: {os.strerror(number)}. Finished checkpoints are intact")
    assert printed.count("\n") == 1


def test_a_file_that_cannot_be_used_is_named(capsys):
    assert run_guarded(raising(PermissionError(errno.EACCES, "Permission denied", "runs/a"))) == 2
    assert capsys.readouterr().err == "jaxtune: error: runs/a: Permission denied\n"


def test_what_an_error_quotes_does_not_steer_the_terminal(capsys):
    assert run_guarded(raising(UserError("a\x1b[2J\x9bé\n  b"))) == 2
    assert capsys.readouterr().err == "jaxtune: error: a\\x1b[2J\\x9bé\n  b\n"


def test_an_error_of_the_program_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        run_guarded(raising(ZeroDivisionError()))


def test_warnings_of_every_command_look_like_those_of_a_run(monkeypatch, capsys):
    logger = logging.getLogger("jaxtune")
    for one, attribute, value in (
        (logging.root, "handlers", []),
        (logger, "handlers", []),
        (logger, "propagate", True),
    ):
        monkeypatch.setattr(one, attribute, value)
    assert run_guarded(lambda: logger.warning("%s is slow", "https://me:secret@host/a")) == 0
    assert capsys.readouterr() == ("", "warning: https://me:HIDDEN@host/a is slow\n")


def test_who_stops_reading_ends_the_command_quietly():
    """As in `jaxtune options | head -1`, with more output than a pipe holds."""
    code = "from jaxtune import options; import sys; sys.exit(max(options.main([]) for _ in range(40)))"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline()
    process.stdout.close()
    assert process.wait(60) == 141
    assert process.stderr.read() == ""


def test_who_stops_reading_the_help_ends_any_command_quietly():
    commands = ["jaxtune", *(f"jaxtune.{name}" for name in NAMES)]
    code = f"""
import os, runpy, sys
reader, writer = os.pipe()
os.close(reader)
for command in {commands}:
    sys.stdout = os.fdopen(os.dup(writer), "w")
    sys.argv = ["", "--help"]
    try:
        runpy.run_module(command, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        print(command, end.code, file=sys.stderr)
"""
    ran = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, check=False)
    assert ran.stderr.splitlines() == [f"{command} 141" for command in commands]


def test_the_garbage_collector_never_searches_what_a_command_imports(tmp_path):
    (tmp_path / "heavy.py").write_text("import gc\nsearched, cycle = gc.isenabled(), []\ncycle.append(cycle)\n")
    code = """
import gc
from jaxtune import command
from jaxtune.command import import_unsearched
heavy = import_unsearched("heavy")
print(heavy.searched, gc.isenabled(), any(held is heavy.cycle for held in gc.get_objects()))
"""
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert ran.stdout == "False True False\n"


def test_two_recipes_are_refused():
    output = call("jaxtune.train", "--config=quickstart", "--config=qwen_lora", code=2)
    assert "--config=quickstart and --config=qwen_lora: one recipe at a time" in output


def test_flags_that_are_missing_are_explained():
    output = call("jaxtune.merge", "--models=a,b", code=2)
    assert "--method=... is missing: <linear|slerp|" in output and "--output=... is missing: folder to write" in output


def test_a_program_that_calls_train_is_told_what_it_takes():
    with pytest.raises(UserError, match=r"train\(\) takes a Config, not RecipeConfig: jaxtune.config.resolve\("):
        train(cast(Config, new_config()))


def test_a_yaml_file_may_stand_alone_and_other_words_may_not(tmp_path):
    (tmp_path / "my.yaml").write_text("base: qwen_lora\nlora: {rank: 0}\n")
    output = call("jaxtune.train", tmp_path / "my.yaml", "--config.optim.beta1=0.8", code=2)
    assert "my.yaml: lora.rank = 0: must be at least 1" in output
    assert "'my.yam' does not belong to a flag" in call("jaxtune.train", "my.yam", code=2)
    output = call("jaxtune.train", "a.yaml", "--config=b.yaml", code=2)
    assert "--config=b.yaml and a.yaml: one recipe at a time" in output
    assert "--dialect=xorl: has no effect: quickstart is not" in call(
        "jaxtune.train", "--config=quickstart", "--dialect=xorl", code=2
    )
    assert "--dialect=unsloth: value should be one of" in call("jaxtune.train", "a.yaml", "--dialect=unsloth", code=2)


def test_a_run_that_is_not_there_is_named_as_a_run(tmp_path, capsys):
    (tmp_path / "lora2").mkdir()
    assert command.main("evaluate", [f"--run={tmp_path / 'lora1'}"]) == 2
    said = capsys.readouterr().err
    assert f"{tmp_path / 'lora1'} is not a run folder: there is no such folder (near it: {tmp_path / 'lora2'})" in said
