"""The folder of a run: where its files are, and what is said at its end."""

import dataclasses
import json
import reprlib
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtune.config import from_json, to_json
from jaxtune.config.recipe import code_to_evaluate
from jaxtune.config.schema import Config
from jaxtune.data import Counts
from jaxtune.errors import UserError
from jaxtune.json_file import read_fields
from jaxtune.monitor import metrics


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
    def counts(self) -> Path:
        """What became of the documents."""
        return self.path / "data.json"

    @property
    def samples(self) -> Path:
        """What the model wrote once it was trained: one JSON object a sample."""
        return self.path / "samples.jsonl"

    @property
    def completions(self) -> Path:
        """What the model of each step wrote to learn from its rewards: one JSON object a completion."""
        return self.path / "completions.jsonl"

    def task_results(self, step: int | None) -> Path:
        """A new file for what benchmark tasks made of the model of a step (`evaluation.lm_evaluation_harness`)."""
        return self.path / "lm_eval" / f"{step}-{time.strftime('%Y%m%d-%H%M%S')}.json"

    @property
    def loss_curve(self) -> Path:
        """A picture of the metrics."""
        return self.path / "loss.png"

    def stacks(self, process: int) -> Path:
        """What every thread of a process was doing when it hung."""
        return self.path / f"stacks-{process}.txt"

    @property
    def export(self) -> Path:
        """What the run made: a Hugging Face folder, or a PEFT adapter."""
        return self.path / "export"

    @property
    def merged(self) -> Path:
        """With export.merge, a Hugging Face folder of the model with its adapter merged."""
        return self.path / "merged"

    @property
    def exported(self) -> bool:
        """Whether `export` is whole and of the last step: its README is written last, and removed by a resumed run."""
        return (self.export / "README.md").exists()

    def write_records(self, config: Config, counts: Counts | None) -> None:
        """Record the config, as the recipe to resume by, and the counts of documents; export and samples are outdated.

        A stream has no counts.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        goes_on = dataclasses.replace(config, ckpt=dataclasses.replace(config.ckpt, resume="auto"))
        part = self.config.with_name("config.json.partial")
        part.write_text(to_json(goes_on))
        part.replace(self.config)  # whole or not at all, whenever this process is killed
        self.counts.unlink(missing_ok=True)
        self.samples.unlink(missing_ok=True)
        if counts is not None:
            self.counts.write_text(json.dumps(dataclasses.asdict(counts), indent=1) + "\n")
        (self.export / "README.md").unlink(missing_ok=True)

    def read_config(self) -> Config:
        """The recorded config. Raises UserError if this is not a run folder."""
        if not self.config.is_file():
            raise UserError(f"{self.path} is not a run folder: it has no config.json")
        return from_json(self.config.read_bytes(), str(self.config))

    def read_counts(self) -> Counts | None:
        """The recorded counts; None: of a stream there are none. Raises UserError for a damaged file."""
        return read_fields(self.counts, Counts) if self.counts.is_file() else None

    def add_sample(self, step: int, prompt: str, text: str) -> None:
        """Record what the model of a step wrote, with the prompt that it begins with."""
        with self.samples.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "prompt": prompt, "text": text}) + "\n")

    def read_samples(self) -> list[dict[str, Any]]:
        """The recorded samples: step, prompt, text. Raises UserError for a damaged line."""
        return _read(self.samples, {"prompt": str, "text": str})

    def read_completions(self) -> list[dict[str, Any]]:
        """Those of a run that learns from rewards: step, prompt, completion, reward. Raises UserError as above."""
        return _read(self.completions, {"prompt": object, "completion": str, "reward": float})


def _read(path: Path, wanted: dict[str, type]) -> list[dict[str, Any]]:
    """The lines of a file, none where there is none; each has `step` and these keys, of these types."""
    found = metrics.read_rows(path) if path.is_file() else []
    for line, row in enumerate(found, start=1):
        if wrong := [key for key, kind in wanted.items() if not isinstance(row.get(key), kind)]:
            raise UserError(
                f"{path}, line {line}: {wrong[0]} is {reprlib.repr(row.get(wrong[0]))}; repair or remove the file"
            )
    return found


def run_folder(config: Config) -> RunFolder:
    """The folder of this config's run."""
    return RunFolder(Path(config.train.output_dir) / (config.train.run_name or "run"))


def resume_command(folder: RunFolder) -> str:
    """What to type to go on with a run, from wherever it was started."""
    return f"python -m jaxtune.train --config={shlex.quote(str(folder.config))}"


def closing(config: Config, folder: RunFolder, chat: bool) -> str:
    """Where everything is, and what to type next; `chat` where conversations were trained."""
    exported, saved = config.export.at_end, any(folder.checkpoints.glob("[0-9]*"))
    an_adapter = config.lora.enabled and not config.lora.merge_interval
    run, output = shlex.quote(str(folder.path)), shlex.quote(f"{folder.path}-model")
    # Code that only the run's folder names is not run (`weights.trusted_code`), so the commands name it.
    plugins = "".join(f" --plugin={shlex.quote(name)}" for name in config.train.plugins)
    code = f" --config={shlex.quote(str(folder.config))}" if code_to_evaluate(config) else plugins
    lines = [f"run: {folder.path}"]
    if config.log.jsonl:
        lines.append(f"loss curve: {folder.loss_curve}")
    if exported:
        lines.append(f"{'adapter' if an_adapter else 'model'}: {folder.export}")
    if config.export.merge:
        lines.append(f"model: {folder.merged}")
    if saved:
        merge = " --merge" if config.lora.enabled else ""
        lines.append(f"resume:   {resume_command(folder)}")
        lines.append(f"export:   python -m jaxtune.export --run={run} --output={output}{merge}{plugins}")
    model = shlex.quote(str(folder.path if saved and (an_adapter or not exported) else folder.export))
    prompt = shlex.quote(config.eval.sample_prompt or "Once") + (" --chat" if chat else "")
    if config.eval.sample_prompt:
        prompt += " --temperature=1"  # as the sample was made (`inference.generation.SAMPLE`)
    if not (saved or exported):
        lines.append("nothing of the model is kept: neither a checkpoint (ckpt.at_end) nor an export (export.at_end)")
    elif config.model.head == "lm":
        lines.append(f"generate: python -m jaxtune.generate --model={model} --prompt={prompt}{plugins}")
    elif saved:
        lines.append(f"evaluate: python -m jaxtune.evaluate --run={run}{code}")
    if config.log.jsonl:
        lines.append(f"report:   python -m jaxtune.report {run}")
    if config.log.next_command:
        lines.append(f"next:     {config.log.next_command}")
    return "\n".join(lines)
