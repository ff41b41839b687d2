"""Merge models, or adapters, that were trained from the same base.

    jaxtune merge --method=linear --models=FOLDER,FOLDER --output=FOLDER
    jaxtune merge --method=ties --base=FOLDER --models=FOLDER,FOLDER --density=0.2 --output=FOLDER

linear is the weighted mean, slerp an interpolation between two models. The other methods add differences from the base:
task_arithmetic all of them, ties the largest ones that agree in sign, dare_linear and dare_ties random ones.
Folders of PEFT adapters are merged to an adapter; they need no --base.
"""

import sys

from jaxtune import command

if __name__ == "__main__":  # parse flags before the slow imports below
    sys.exit(command.main("merge"))

from functools import partial
from pathlib import Path

import jax
from absl import flags

from jaxtune import hf
from jaxtune.errors import UserError
from jaxtune.host.lock import hold_lock
from jaxtune.host.preflight import check_writable
from jaxtune.merging.adapters import merge_adapters
from jaxtune.merging.options import METHODS, MergeOptions, merge_options
from jaxtune.merging.whole_models import merge_models

_OPTIONS = ("weights", "normalize", "lambda", "density", "seed", "t")


def run_command(values: flags.FlagValues, _: None) -> None:
    """Write the merged model or adapter, and print its folder."""
    jax.config.update("jax_platforms", "cpu")  # merging is done by numpy; jax would take a GPU's memory
    given = {name: values[name].value for name in _OPTIONS if values[name].value not in (None, [])}
    if values.weights:
        given["weights"] = [_number(text) for text in values.weights]
    options = merge_options(values.method, len(values.models), given)
    output = Path(values.output)
    _check_output(output)
    folders = [hf.resolve(model, holds=None) for model in values.models]
    are_adapters = [(folder / "adapter_config.json").is_file() for folder in folders]
    if any(are_adapters) and not all(are_adapters):
        adapter, model = folders[are_adapters.index(True)], folders[are_adapters.index(False)]
        raise UserError(f"--models: {adapter} is an adapter and {model} is not; merge either adapters or whole models")
    with hold_lock(output, ".jaxtune-lock", "merge to another folder"):
        if all(are_adapters):
            _merge_adapters(values, folders, output, options)
        else:
            _merge_models(values, folders, output, options)
    print(f"{options.method} of {len(folders)} {'adapters' if all(are_adapters) else 'models'}: {output}")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"--weights: {text!r} is not a number; write one for each model, such as 0.5,0.5") from None


def _check_output(output: Path) -> None:
    """Raise UserError unless the folder can be written, and is new or empty."""
    names = [entry.name for entry in output.iterdir()] if output.exists() else []
    visible = sorted(name for name in names if not name.startswith("."))
    if visible:
        more = ", ..." if len(visible) > 3 else ""
        raise UserError(f"--output={output} holds other things ({', '.join(visible[:3])}{more}); name a new folder")
    check_writable(output, f"--output={output}")


def _merge_models(values: flags.FlagValues, folders: list[Path], output: Path, options: MergeOptions) -> None:
    needs_base = METHODS[options.method].differences
    if values.rank is not None:
        raise UserError("--rank: has no effect, because these are whole models and not adapters")
    if needs_base and values.base is None:
        raise UserError(
            f"--base=... is missing: the model that the others come from; --method={options.method} needs it"
        )
    if values.base is not None and not needs_base:
        raise UserError(
            f"--base: has no effect with --method={options.method}; to merge the base, too, add it to --models"
        )
    base = None if values.base is None else hf.resolve(values.base)
    merge_models(folders, base, output, options)


def _merge_adapters(values: flags.FlagValues, folders: list[Path], output: Path, options: MergeOptions) -> None:
    if values.base is not None:
        raise UserError("--base: has no effect, because adapters are differences from their base already")
    share = merge_adapters(folders, output, options, values.rank)
    if share < 1:
        print(f"the merged adapter keeps {share:.1%} of the updates (sums of squares); a larger --rank keeps more")


main = partial(command.main, "merge")
