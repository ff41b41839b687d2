"""What is said at the end of a run: where everything is, and what to type next."""

import re
import shlex
import sys

from jaxtune.config.schema import Config
from jaxtune.run.folder import RunFolder


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
