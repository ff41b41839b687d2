"""Write a run's model as Hugging Face safetensors, optionally quantized, or as GGUF, or its adapter as PEFT."""

import sys

from jaxtune import command

if __name__ == "__main__":  # parse flags and recipe before the slow imports below
    sys.exit(command.main("export"))

import math
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import jax
from absl import flags

from jaxtune import hf
from jaxtune.checkpoint import storage
from jaxtune.checkpoint.storage import RemoteFolder, open_folder
from jaxtune.config.schema import Config
from jaxtune.data.reading.files import is_url
from jaxtune.errors import UserError
from jaxtune.evaluation.export_difference import loss_difference, merge_difference
from jaxtune.exports.gguf import convert, find_converter, remove_earlier
from jaxtune.exports.write import CARD, UNFINISHED, check_apart, check_kind, export, not_as_served
from jaxtune.host.preflight import check_writable
from jaxtune.host.run_folder import RunFolder
from jaxtune.parallel.mesh import make_mesh
from jaxtune.parallel.options import MeshOptions
from jaxtune.quant.format_names import format_of
from jaxtune.quant.options import served_as
from jaxtune.weights.base import Base
from jaxtune.weights.trusted_code import base_of_run
from jaxtune.weights.values import open_run

FORMATS = ("hf", "peft", "gguf")


def choose_device_count(base: Base, config: Config, quantize: str | None) -> int:
    """Return the largest number of devices that divides the model's width and its number of quantized blocks.

    Blocks count in the run's format and in the export's, because the finished export is read again to compare losses.
    """
    hidden, formats = base.spec.hidden, [config.quant if base.scheme is None else base.scheme.options]
    formats += [served_as(config.serve, kind) for kind in (quantize, config.serve.format) if kind is not None]
    blocks = [format_of(options, "").block for options in formats if options.format is not None]
    block_counts = (hidden // math.lcm(rows or 1, columns or 1) for rows, columns in blocks)
    return math.gcd(jax.device_count(), hidden, *block_counts)


def check_output(output: Path | RemoteFolder, kind: str) -> None:
    """Raise UserError if a folder holds anything but an export in the same format, or a part of one."""
    entries, card = set(), b""
    if isinstance(output, RemoteFolder):
        try:
            entries = {name.partition("/")[0] for name in output.names()}
            card = output.read(CARD) if CARD in entries else card
            storage.check_unused(output, UNFINISHED)
        except UserError:
            raise
        except Exception as error:  # each file system raises its own types
            raise UserError(f"--output={output.url} cannot be read: {storage.error_text(error)}") from error
    elif output.exists():
        entries = {entry.name for entry in output.iterdir()}
        card = (output / CARD).read_bytes() if (output / CARD).is_file() else card
    is_export = UNFINISHED in entries or b"with jaxtune" in card
    visible = sorted(name for name in entries if not name.startswith("."))
    holds_adapter = any(name.startswith("adapter_") for name in visible)
    if visible and not (is_export and holds_adapter == (kind == "peft")):
        place = output.url if isinstance(output, RemoteFolder) else output
        if is_export:
            found, wanted = ("an adapter", "a whole model") if holds_adapter else ("a whole model", "an adapter")
            raise UserError(f"--output={place} holds the export of {found}; name a new folder for {wanted}")
        more = ", ..." if len(visible) > 3 else ""
        raise UserError(f"--output={place} holds other things ({', '.join(visible[:3])}{more}); name a new folder")


def run_command(values: flags.FlagValues, _: None) -> None:
    """Write the export to a folder or a URL."""
    folder = RunFolder(Path(values.run))
    if unknown := set(values.format or ()) - set(FORMATS):
        raise UserError(f"--format={','.join(sorted(unknown))}: not one of {', '.join(FORMATS)}")
    if values.push_to_hub is not None:
        if len(values.format or ()) > 1:
            raise UserError("--push_to_hub: one --format at a time; a repository holds one model")
        hf.check_upload(values.push_to_hub, values.private, "--push_to_hub")
    elif values.private:
        raise UserError("--private: nothing is uploaded without --push_to_hub")
    with ExitStack() as opened:
        output, remote = Path(values.output), None
        if is_url(values.output):
            if values.push_to_hub is not None:
                raise UserError("--push_to_hub: --output must be a local folder, which stays if the upload fails")
            remote = open_folder(values.output, "--output")
            output = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="jaxtune-export-"))) / "model"
        check_writable(output, f"--output={values.output}")
        _export(values, folder, output, remote)


def _export(values: flags.FlagValues, folder: RunFolder, output: Path, remote: RemoteFolder | None) -> None:
    """Write the export to a local folder, then copy it to the remote one if there is one."""
    config, base = base_of_run(folder, values.plugin)
    mesh = make_mesh(MeshOptions(), jax.devices()[: choose_device_count(base, config, values.quantize)])
    run = open_run(folder, mesh, values.step, values.plugin)
    adapter = run.config.lora.enabled
    kinds = values.format or (["hf"] if values.merge or not adapter else ["peft"])
    if values.merge and not adapter:
        raise UserError("--merge: this run trained no adapter")
    if values.merge and kinds == ["peft"]:
        raise UserError(
            "--merge: has no effect with --format=peft, which writes only the adapter; leave one of the two out, or "
            "write both forms with --format=hf,peft"
        )
    outputs = {kind: output / (kind if len(kinds) > 1 else "") for kind in kinds}
    copies = {kind: remote and (remote.inside(kind) if len(kinds) > 1 else remote) for kind in kinds}
    for kind, target in outputs.items():
        check_apart(target, run.model)
        check_kind(run.config, kind, values.merge, values.quantize)
        check_output(copies[kind] or target, kind)
    converter = find_converter(values.gguf_converter) if "gguf" in outputs else []
    for kind, target in outputs.items():
        parameters, copy = {**run.frozen, **run.trained}, copies[kind]
        form = "peft" if kind == "peft" else "hf"
        write = partial(export, run.model, parameters, run.config, folder, target, form, hub_id=values.push_to_hub)
        write(merge=values.merge, quantize=values.quantize, steps=run.step, tokens=run.tokens)
        remove_earlier(target)
        written = convert(converter, target, values.gguf_type) if kind == "gguf" else target
        if copy is not None:
            storage.upload(target, copy, last=CARD, mark=UNFINISHED)
        print(f"{kind} of step {run.step}: {written if copy is None else copy.url}")
        if kind != "gguf" and (how := not_as_served(run.config, values.quantize)) is not None:
            print(how)
        if values.quantize:
            print(loss_difference(run.model, parameters, run.config, target, values.quantize))
        elif form == "hf" and run.model.quantized and not (run.config.decision.loss and run.model.spec.labels):
            print(merge_difference(run.model, parameters, run.config, target))
        if values.push_to_hub is not None:
            print(f"uploaded: {hf.upload(target, values.push_to_hub, values.private)}")


main = partial(command.main, "export")
