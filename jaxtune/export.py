"""Write a run's model as Hugging Face safetensors, quantized if asked for, or its adapter as PEFT."""

import math
import sys
from functools import partial
from pathlib import Path

import jax
from absl import flags

from jaxtune import command, hf
from jaxtune.config.schema import Config, Mesh
from jaxtune.errors import UserError
from jaxtune.parallel.mesh import make_mesh
from jaxtune.quant import format_of
from jaxtune.run.export import check_apart, check_kind, export
from jaxtune.run.exported import loss_difference, merge_difference
from jaxtune.run.folder import RunFolder
from jaxtune.run.model import read_base
from jaxtune.run.values import open_run

FORMATS = ("hf", "peft")


def shards(config: Config, quantize: str | None) -> int:
    """The most devices to shard the model over: they must divide its width, and its quantized blocks if it has any.

    Those of the run, and those that are written, which are read again.
    """
    base = read_base(config)
    hidden, found = base.spec.hidden, [config.quant if base.scheme is None else base.scheme.options]
    if quantize is not None:
        found.append(hf.SCHEMES[quantize])
    blocks = [format_of(options, "").block for options in found if options.format is not None]
    whole = (hidden // math.lcm(rows or 1, columns or 1) for rows, columns in blocks)
    return math.gcd(jax.device_count(), hidden, *whole)


def check_output(output: Path, kind: str) -> None:
    """Raises UserError if a folder holds anything but an earlier export in the same format."""
    found = (
        sorted(entry.name for entry in output.iterdir() if not entry.name.startswith(".")) if output.exists() else []
    )
    card = output / "README.md"
    exported = card.is_file() and "with jaxtune" in card.read_text(encoding="utf-8", errors="replace")
    if found and not (exported and (output / "adapter_config.json").exists() == (kind == "peft")):
        more = ", ..." if len(found) > 3 else ""
        raise UserError(f"--output={output} holds other things ({', '.join(found[:3])}{more}); name a new folder")


def _define_flags(values: flags.FlagValues) -> None:
    flags.DEFINE_string("run", None, "folder of the run", flag_values=values, required=True)
    flags.DEFINE_string("output", None, "folder to write", flag_values=values, required=True)
    flags.DEFINE_integer("step", None, "checkpoint; default: the newest good one", flag_values=values)
    flags.DEFINE_list("format", None, "hf, peft, or both; default: what the run trained", flag_values=values)
    flags.DEFINE_bool("merge", False, "fold the adapter into the model", flag_values=values)
    flags.DEFINE_enum("quantize", None, list(hf.SCHEMES), "quantize a whole model's layers", flag_values=values)


def _main(values: flags.FlagValues, _: None) -> None:
    folder = RunFolder(Path(values.run))
    mesh = make_mesh(Mesh(), jax.devices()[: shards(folder.read_config(), values.quantize)])
    run = open_run(folder, mesh, values.step)
    adapter = run.config.lora.enabled
    kinds = values.format or (["hf"] if values.merge or not adapter else ["peft"])
    unknown = set(kinds) - set(FORMATS)
    if unknown:
        raise UserError(f"--format={','.join(sorted(unknown))}: not one of {', '.join(FORMATS)}")
    if values.merge and not adapter:
        raise UserError("--merge: this run trained no adapter")
    outputs = {kind: Path(values.output) / (kind if len(kinds) > 1 else "") for kind in kinds}
    for kind, output in outputs.items():
        check_apart(output, run.model)
        check_kind(run.config, kind, values.merge, values.quantize)
        check_output(output, kind)
    for kind, output in outputs.items():
        parameters = {**run.frozen, **run.trained}
        write = partial(export, run.model, parameters, run.config, folder, output, kind)
        write(merge=values.merge, quantize=values.quantize, steps=run.step, tokens=run.tokens)
        print(f"{kind} of step {run.step}: {output}")
        if values.quantize:
            print(loss_difference(run.model, parameters, run.config, output, values.quantize))
        elif kind == "hf" and run.model.quantized:
            print(merge_difference(run.model, parameters, run.config, output))


main = partial(command.run, _define_flags, _main, with_config=False)

if __name__ == "__main__":
    sys.exit(main())
