"""The folder of a run: where its files are, and what is said at its end."""

import dataclasses
import json
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from jaxtune.config import from_json, to_json
from jaxtune.config.schema import Config
from jaxtune.data import Counts
from jaxtune.errors import UserError
from jaxtune.parallel import multihost


@dataclass(frozen=True)
class RunFolder:
    """<train.output_dir>/<train.run_name>."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved config, as JSON."""
        return self.path / "config.json"

    @property
    def checkpoints(self) -> Path:
        """One folder a step."""
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        """One JSON object a step."""
        return self.path / "metrics.jsonl"

    @property
    def loss_curve(self) -> Path:
        """A picture of the metrics."""
        return self.path / "loss.png"

    @property
    def export(self) -> Path:
        """What the run made: a Hugging Face folder, or a PEFT adapter."""
        return self.path / "export"

    def write_records(self, config: Config, counts: Counts) -> None:
        """Record the config and what became of the documents (data.json), by the main process."""
        if multihost.is_main():
            self.path.mkdir(parents=True, exist_ok=True)
            self.config.write_text(to_json(config))
            (self.path / "data.json").write_text(json.dumps(dataclasses.asdict(counts), indent=1) + "\n")

    def read_config(self) -> Config:
        """The recorded config. Raises UserError if this is not a run folder."""
        if not self.config.is_file():
            raise UserError(f"{self.path} is not a run folder: it has no config.json")
        return from_json(self.config.read_text())


def run_folder(config: Config) -> RunFolder:
    """The folder of this config's run."""
    return RunFolder(Path(config.train.output_dir) / (config.train.run_name or "run"))


def this_command() -> str:
    """The command line of this process, as a user would type it to go on: without ckpt.resume, which is auto."""
    given = sys.argv[2:] if sys.argv[1:2] == ["train"] else sys.argv[1:]
    kept = [argument for argument in given if not re.match("--?config.ckpt.resume=", argument)]
    return shlex.join(["python", "-m", "jaxtune.train", *kept])


def closing(config: Config, folder: RunFolder) -> str:
    """Where everything is, and what to type next."""
    lines = [f"run: {folder.path}"]
    if config.log.jsonl:
        lines.append(f"loss curve: {folder.loss_curve}")
    if config.export.at_end:
        lines.append(f"{'adapter' if config.lora.enabled else 'model'}: {folder.export}")
    model = folder.path if config.lora.enabled or not config.export.at_end else folder.export
    merge = " --merge" if config.lora.enabled else ""
    prompt = shlex.quote(config.eval.sample_prompt or "Once")
    lines += [
        f"resume:   {this_command()}",
        f"export:   python -m jaxtune.export --run={folder.path} --output={folder.path}-model{merge}",
        f"generate: python -m jaxtune.generate --model={model} --prompt={prompt}",
    ]
    if config.log.next_command:
        lines.append(f"next:     {config.log.next_command}")
    return "\n".join(lines)
