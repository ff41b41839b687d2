"""The lines at the end of a run."""

import dataclasses
import shlex

import pytest

from jaxtune import evaluate, export, generate
from jaxtune.config import to_json
from jaxtune.config.schema import Config, DataOptions, Dataset, EvalOptions, ExportOptions, ModelOptions, TrainOptions
from jaxtune.host.run_folder import RunFolder, final_summary
from jaxtune.inference.generation import SAMPLE
from jaxtune.inference.sampling import SamplingOptions


def generate_command(folder, chat: bool, **options) -> str:
    config = dataclasses.replace(Config(), eval=EvalOptions(**options))
    (line,) = [
        line for line in final_summary(config, RunFolder(folder), chat).splitlines() if line.startswith("generate:")
    ]
    return line


def test_the_command_writes_as_the_sample_was_written(tmp_path):
    """At temperature 1, the model's own: below it a small model repeats the likeliest tokens, such as spaces."""
    line = generate_command(tmp_path, chat=False, sample_prompt="def ")
    assert line.endswith("--prompt='def ' --temperature=1")
    assert (SAMPLE.temperature, SAMPLE.top_p) == (1.0, SamplingOptions().top_p)
    assert (generate.__doc__ or "").splitlines()[2].endswith('--prompt="def " --temperature=1')


def test_conversations_are_asked_for_as_conversations(tmp_path):
    assert generate_command(tmp_path, chat=True).endswith("--prompt=Once --chat")
    assert generate_command(tmp_path, chat=False).endswith("--prompt=Once")


@pytest.mark.parametrize("function", [False, True], ids=["plugin", "plugin and function"])
@pytest.mark.parametrize("head", ["lm", "classification"])
def test_the_commands_run_the_code_that_the_run_has_run(tmp_path, capsys, head, function):
    """If only config.json names this code, the commands are refused or miss the model's family."""
    file, folder = tmp_path / "my code.py", RunFolder(tmp_path / "my run")
    file.write_text("f = on_end = print\n")
    (folder.checkpoints / "1").mkdir(parents=True)
    kind = "classification" if head == "classification" else "auto"
    data = Dataset(path="d.jsonl", type=kind, function=f"{file}:f" if function else None)
    config = Config(
        model=ModelOptions(path=str(tmp_path / "nowhere"), head=head),
        data=DataOptions(datasets=(data,), validation_split=0.5),
        train=TrainOptions(plugins=(str(file),)),
        export=ExportOptions(at_end=False),
    )
    folder.config.write_text(to_json(config))
    lines = [line.partition(": ")[::2] for line in final_summary(config, folder, chat=False).splitlines()]
    flags = {name: shlex.split(command)[3:] for name, command in lines if "jaxtune." in command}
    mains = {"export": export.main, "generate": generate.main, "evaluate": evaluate.main}
    for name in ("export", "generate" if head == "lm" else "evaluate"):
        assert mains[name](flags[name]) == 2
        printed = capsys.readouterr().err
        assert "nowhere" in printed and "not run" not in printed, printed
