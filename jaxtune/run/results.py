"""The results of a run: which parameters are exported, the export and its upload, the loss curve, the summary."""

import logging
from collections.abc import Callable
from functools import partial

import jax
from jax.experimental import multihost_utils

from jaxtune import hf
from jaxtune.checkpoint import CheckpointManager
from jaxtune.config.schema import Config
from jaxtune.errors import UserError
from jaxtune.exports.write import export, not_as_served
from jaxtune.host import process
from jaxtune.host.run_folder import RunFolder, final_summary, resume_command
from jaxtune.models.decoder import Parameters
from jaxtune.monitor import curve
from jaxtune.monitor.goodput import Goodput
from jaxtune.parallel import multihost
from jaxtune.run.loop import Position
from jaxtune.weights.model import Model
from jaxtune.weights.values import result_of

log = logging.getLogger("jaxtune")


def check_upload(config: Config) -> None:
    """Raise UserError if the export could not be uploaded (export.push_to_hub), hours before it exists."""
    hub, private = config.export.push_to_hub, config.export.private
    if hub is not None:
        process.on_main(lambda: hf.check_upload(hub, private, "export.push_to_hub"))


def is_stopped(position: Position, total_steps: int, folder: RunFolder) -> bool:
    """Whether the run was asked to stop before its end, which is logged with the command that resumes it.

    Raises UserError if the run ended with steps that changed nothing.
    """
    if position.step < total_steps and not position.ended:
        log.info("stopped at step %d of %d; resume with: %s", position.step, total_steps, resume_command(folder))
        multihost_utils.sync_global_devices("saved")  # a launcher ends all once one process ends with a code of its own
        return True
    if position.bad_steps:
        raise UserError(
            f"the last {position.bad_steps} steps were not finite and changed no parameter, so nothing is exported; "
            "lower optim.learning_rate, or look for NaN in the weights and the data"
        )
    if position.ended:
        log.info("ended at step %d of %d: %s", position.step, total_steps, position.ended)
    return False


def choose_parameters(
    config: Config, model: Model, checkpoints: CheckpointManager, last: Parameters, position: Position
) -> tuple[Parameters, int]:
    """Return the parameters to export and their step: of the last step or, with export.best, of the best one."""
    step = position.standing.step
    if not config.export.best or step is None:
        return last, position.step
    parameters = last | result_of(checkpoints, model, config, step)
    log.info("%s is best at step %d, which is exported", config.eval.best_metric, step)
    return parameters, step


def write(
    config: Config, model: Model, parameters: Parameters, folder: RunFolder, step: int, tokens: int, goodput: Goodput
) -> None:
    """Draw the loss curve, and export the parameters: an adapter, a whole model or both."""
    with multihost.write_together(folder.path):
        if config.log.jsonl and multihost.is_main():
            with goodput.measure("loss curve"):
                curve.draw(folder.metrics, folder.loss_curve, folder.path.name)
    if not config.export.at_end:
        return
    write_model = partial(export, model, parameters, config, folder, steps=step, tokens=tokens)
    is_merged = bool(config.lora.merge_interval)
    kind = "peft" if config.lora.enabled and not is_merged else "hf"
    served_as = config.serve.format  # a whole model is written as it was trained to be served
    with goodput.measure("export"):
        quantize = served_as if kind == "hf" else None
        write_model(folder.export, kind, merge=is_merged, quantize=quantize, hub_id=config.export.push_to_hub)
        if not config.export.merge and (how := not_as_served(config, quantize)) is not None:
            log.info("%s: %s of jaxtune export", folder.export, how)
        if config.export.merge:
            write_model(folder.merged, "hf", merge=True, quantize=served_as)


def finish(config: Config, folder: RunFolder, sample: Callable[[], None], chat: bool, goodput: Goodput) -> None:
    """Sample from the model (eval.sample_prompt), log the summary of the run, and upload the export."""
    if config.eval.sample_prompt and jax.sharding.get_mesh().shape["stage"] == 1:
        with goodput.measure("sample"):
            sample()
    elif config.eval.sample_prompt:
        log.info("no sample: a pipeline (mesh.stage) cannot decode; generate it with the command below")
    log.info(goodput.report())
    log.info(final_summary(config, folder, chat))
    hub, private = config.export.push_to_hub, config.export.private
    if hub is not None:
        process.on_main(lambda: log.info("uploaded: %s", hf.upload(folder.export, hub, private)))
