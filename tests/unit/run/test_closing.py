"""The lines at the end of a run."""

import dataclasses

from jaxtune import generate
from jaxtune.config.schema import Config, Eval
from jaxtune.run.folder import RunFolder, closing
from jaxtune.run.generation import SAMPLE
from jaxtune.run.manner import Manner


def generate_command(folder, chat: bool, **options) -> str:
    config = dataclasses.replace(Config(), eval=Eval(**options))
    (line,) = [line for line in closing(config, RunFolder(folder), chat).splitlines() if line.startswith("generate:")]
    return line


def test_the_command_writes_as_the_sample_was_written(tmp_path):
    """At the model's own temperature: below it a small model repeats what is likeliest, such as spaces."""
    line = generate_command(tmp_path, chat=False, sample_prompt="def ")
    assert line.endswith("--prompt='def ' --temperature=1")
    assert (SAMPLE.temperature, SAMPLE.top_p) == (1.0, Manner().top_p)
    assert (generate.__doc__ or "").splitlines()[2].endswith('--prompt="def " --temperature=1')


def test_conversations_are_asked_for_as_conversations(tmp_path):
    assert generate_command(tmp_path, chat=True).endswith("--prompt=Once --chat")
    assert generate_command(tmp_path, chat=False).endswith("--prompt=Once")
