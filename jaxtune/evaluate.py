"""Loss and perplexity of a model on validation data; of a classifier loss and accuracy; of rewarded answers rewards.

    python -m jaxtune.evaluate --run=runs/quickstart_lora
    python -m jaxtune.evaluate --config=quickstart_lora --model=runs/quickstart/export

The model is that of a run (with the run's own options unless --config is given), --model (a Hugging Face folder, hub id
or adapter), or the model that a recipe starts from. --config.SECTION.OPTION=VALUE changes an option.
"""

import sys
from functools import partial
from pathlib import Path

from absl import flags

from jaxtune import command
from jaxtune.config.schema import Config
from jaxtune.parallel.mesh import make_mesh
from jaxtune.run import process
from jaxtune.run.folder import RunFolder
from jaxtune.run.validation import evaluate


def _define_flags(values: flags.FlagValues) -> None:
    flags.DEFINE_string("run", None, "folder of the run", flag_values=values)
    flags.DEFINE_integer("step", None, "checkpoint of the run; default: the newest good one", flag_values=values)
    flags.DEFINE_string("model", None, "Hugging Face folder, hub id or adapter, instead of a run", flag_values=values)


def _recipe(values: flags.FlagValues) -> str | None:
    return None if values.run is None else str(RunFolder(Path(values.run)).config)


def _main(values: flags.FlagValues, config: Config) -> None:
    process.configure(config)
    mesh = make_mesh(config.mesh, process.devices(config.device), parallel=config.parallel)
    for name, value in evaluate(config, mesh, values.run, values.step, values.model).items():
        print(f"{name} {value:.6f}")


main = partial(command.run, _define_flags, _main, recipe=_recipe)

if __name__ == "__main__":
    sys.exit(main())
