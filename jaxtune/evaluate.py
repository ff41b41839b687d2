"""Loss and perplexity of a run's model on the validation data.

    python -m jaxtune.evaluate --run=runs/quickstart_lora

The run's own options count where no --config is given; --config.SECTION.OPTION=VALUE changes them.
"""

import logging
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

from absl import flags

from jaxtune import command, data, hf
from jaxtune.config.schema import Config
from jaxtune.errors import UserError
from jaxtune.parallel.mesh import make_mesh
from jaxtune.run import process
from jaxtune.run.evaluation import make_evaluate
from jaxtune.run.folder import RunFolder
from jaxtune.run.resume import differences
from jaxtune.run.values import open_run

log = logging.getLogger("jaxtune")


def _define_flags(values: flags.FlagValues) -> None:
    flags.DEFINE_string("run", None, "folder of the run", flag_values=values, required=True)
    flags.DEFINE_integer("step", None, "checkpoint; default: the newest good one", flag_values=values)


def _main(values: flags.FlagValues, config: Config) -> None:
    process.configure(config)
    mesh = make_mesh(config.mesh)
    run = open_run(RunFolder(Path(values.run)), mesh, values.step, low_precision=True)
    if config.model.path != run.config.model.path:
        raise UserError(
            f"the run is of model.path={run.config.model.path}, not {config.model.path}; give its own recipe"
        )
    then, now = asdict(run.config), asdict(config)
    changed = [
        f"  {key}: {before!r} then, {after!r} now"
        for section in ("quant", "precision")
        for key, before, after in differences(then[section], now[section], section)
        if key not in ("precision.master_dtype", "precision.gradient_dtype")  # of training alone
    ]
    if changed:
        raise UserError("\n".join(["the run was trained with other options:", *changed, "set them back"]))
    if config.data.seq_len > (most := run.model.spec.max_positions):
        raise UserError(f"data.seq_len={config.data.seq_len} is more than the model's {most} positions")
    _, documents = data.open_documents(config, hf.load_tokenizer(run.model.folder))
    if documents is None:
        raise UserError("no validation data: set data.eval_datasets or data.validation_split")
    rows = data.Rows(documents, config.data, epochs=1)
    log.info("validation: %s", rows.counts)
    for name, value in make_evaluate(config, run.model, rows, mesh)(run.trained, run.frozen).items():
        print(f"{name} {value:.6f}")


main = partial(command.run, _define_flags, _main, recipe=lambda values: str(RunFolder(Path(values.run)).config))

if __name__ == "__main__":
    sys.exit(main())
