"""Resuming a run: selects the checkpoint, and refuses options and data that have changed since."""

import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxtune.checkpoint import CheckpointManager, fingerprint, verify_fingerprint
from jaxtune.checkpoint.folder import AllDamaged, steps, unfinished_steps
from jaxtune.checkpoint.manager import HOST_FILE
from jaxtune.checkpoint.manifest import MANIFEST
from jaxtune.checkpoint.mirror import Mirror
from jaxtune.config import from_json, to_json
from jaxtune.config.differences import differences
from jaxtune.config.loading import as_dict
from jaxtune.config.schema import Config, TrainOptions
from jaxtune.data import Counts, Feed, PromptFeed
from jaxtune.errors import UserError, hide_secrets
from jaxtune.hf import read_config
from jaxtune.host import process
from jaxtune.host.run_folder import RunFolder
from jaxtune.models.decoder import Parameters
from jaxtune.models.parameters import abstract
from jaxtune.monitor import metrics
from jaxtune.parallel import multihost
from jaxtune.run import mirror_sync
from jaxtune.run.best import BestTracker
from jaxtune.run.loop import Position
from jaxtune.training.assembly import Program
from jaxtune.training.state import State
from jaxtune.weights.base import check_same_config
from jaxtune.weights.model import Model

log = logging.getLogger("jaxtune")

# Sections whose options change neither the content of a checkpoint nor the meaning of a place in the data.
_FREE_AT_START = ("optim", "guard", "grpo", "rollout")


@dataclass(frozen=True)
class Saved:
    """The checkpoint from which a run continues.

    Attributes:
        checkpoints: The manager of its folder.
        step: The checkpoint's step; None: the newest good one.
        record: The checkpoint's description of its run.
        own: Whether the checkpoint belongs to this run; False: to the run that ckpt.start names.
    """

    checkpoints: CheckpointManager
    step: int | None
    record: dict[str, Any]
    own: bool = True

    @property
    def has_optimizer(self) -> bool:
        """Whether the checkpoint holds the optimizer's state."""
        return self.record["config"]["ckpt"].get("save_optimizer", True)

    def is_finished(self, total_steps: int) -> bool:
        """Whether the run of the checkpoint is complete."""
        return self.record["step"] >= total_steps or (self.step is None and bool(self.record.get("ended")))

    def progress(self, train: TrainOptions, total_steps: int) -> str:
        """The run's progress, for messages: steps taken, of the steps that the config now asks for."""
        step = self.record["step"]
        if step <= total_steps:
            return f"{step} of {total_steps} steps"
        of_epochs = f"train.epochs is {train.epochs:g}, {total_steps} steps"
        goal = of_epochs if train.max_steps is None else f"train.max_steps is {train.max_steps}"
        return f"it has {step} steps, and {goal}"


def check_not_lost(config: Config, folder: RunFolder, mirror: Mirror | None) -> None:
    """Raise UserError if the run has saved a checkpoint, and neither its folder nor the mirror has one any more.

    Otherwise the run would start afresh and replace its metrics and export. If no save has ended, it may do so; a
    warning says how many steps are lost. Only process 0 may call it, as only process 0 has the mirror.
    """
    place = link = folder.checkpoints
    is_dangling = link.is_symlink() and not link.exists()
    if config.ckpt.dir is not None and not link.exists():  # the link to it is made later, or is lost
        place = Path(config.ckpt.dir).absolute() / folder.path.name
    if config.ckpt.resume == "overwrite" or steps(place) or (mirror is not None and mirror_sync.steps(mirror)):
        return
    unfinished = ", ".join(map(str, unfinished_steps(place)))
    if not place.exists():
        found = f"{place} is not there"
    else:
        found = f"{place} has only {unfinished} without {MANIFEST}" if unfinished else f"{place} is empty"
    if is_dangling:
        more = "" if place in (link, link.readlink()) else f", and {found}"
        found = f"{link} is a link to {link.readlink()}, which is not there{more}"
    saved = folder.read_last_checkpoint()
    if saved is not None or is_dangling:
        what = "" if saved is None else f"{folder.path} saved a checkpoint of step {saved.step} in {saved.folder}, but "
        raise UserError(
            f"{what}{found}, so the run cannot continue. Restore the checkpoints, mount their disk, or name their new "
            "place (--config.ckpt.dir); to start again from step 0, choose another --config.train.run_name, or set "
            "--config.ckpt.resume=overwrite, which removes what this run has left"
        )
    rows = metrics.read_rows(folder.metrics) if folder.metrics.is_file() else []
    taken = rows[-1]["step"] if rows else 0
    if taken and config.ckpt.start is None and not isinstance(config.ckpt.resume, int):
        log.warning("starting again from step 0: %s took %d steps and has no complete checkpoint", folder.path, taken)


def link_checkpoints(config: Config, folder: RunFolder) -> None:
    """With ckpt.dir, make <run>/checkpoints a link to the run's folder there; that folder is created if missing.

    Raises UserError if the run's checkpoints are somewhere else.
    """
    if config.ckpt.dir is None:
        return
    elsewhere = Path(config.ckpt.dir).absolute() / folder.path.name
    with multihost.write_together(elsewhere):  # the others look only after the link is made
        if multihost.is_main() and not folder.checkpoints.exists():
            elsewhere.mkdir(parents=True, exist_ok=True)
            folder.checkpoints.unlink(missing_ok=True)  # a link whose target is gone
            folder.checkpoints.symlink_to(elsewhere, target_is_directory=True)
    if folder.checkpoints.resolve() != elsewhere.resolve():
        raise UserError(
            f"ckpt.dir={config.ckpt.dir}: the checkpoints of this run are in {folder.checkpoints.resolve()}; leave it "
            "as it was, or move them"
        )


def open_checkpoints(config: Config, folder: RunFolder, mirror: Mirror | None) -> CheckpointManager:
    """Open the run's checkpoints, where ckpt.dir puts them; if there are none, the mirror's are fetched.

    Raises UserError as `check_not_lost`, `link_checkpoints` and `mirror_sync.fetch`.
    """
    # Before a folder is made for the link: its disk may not be mounted.
    process.on_main(lambda: check_not_lost(config, folder, mirror))
    link_checkpoints(config, folder)
    checkpoints = CheckpointManager(folder.checkpoints, config.ckpt.keep_last, mirror, folder.note_checkpoint)
    mirror_sync.fetch(config, folder, mirror, checkpoints)
    return checkpoints


def saved_run(config: Config, folder: RunFolder, checkpoints: CheckpointManager) -> Saved | None:
    """The checkpoint from which to continue, by ckpt.resume and ckpt.start; None for a fresh start.

    Raises UserError if there is no checkpoint to continue from, if ckpt.resume forbids it, or if options differ.
    ckpt.resume='overwrite' removes nothing yet: see `begin`.
    """
    if config.ckpt.resume == "never":
        if checkpoints.steps():
            raise UserError(
                f"{folder.path} holds a run and ckpt.resume is 'never'; choose another --config.train.run_name, "
                "or remove what is there with --config.ckpt.resume=overwrite"
            )
        return None
    if config.ckpt.resume == "overwrite":
        for option, path in (("model.path", config.model.path), ("lora.path", config.lora.path)):
            if path is not None and Path(path).resolve().is_relative_to(folder.path.resolve()):
                raise UserError(
                    f"{option}={path} is in {folder.path}, which ckpt.resume='overwrite' removes; give the new run "
                    "another --config.train.run_name"
                )
        return _saved_start(config, folder) if config.ckpt.start is not None else None
    step = None if config.ckpt.resume == "auto" else int(config.ckpt.resume)
    with _advice_if_damaged():
        record = checkpoints.host(step)
    if record is None:
        return _saved_start(config, folder) if config.ckpt.start is not None else None
    check_unchanged(record["config"], config, folder)
    return Saved(checkpoints, step, record)


@contextmanager
def _advice_if_damaged() -> Iterator[None]:
    """Add to the error that all checkpoints are damaged how to start afresh. Only for checkpoints of the run itself."""
    try:
        yield
    except AllDamaged as error:
        raise UserError(f"{error}; to start afresh, set --config.ckpt.resume=overwrite") from None


def _saved_start(config: Config, folder: RunFolder) -> Saved:
    """The checkpoint that ckpt.start names: the newest of a run, or one by its folder."""
    path = Path(config.ckpt.start or "").expanduser()
    step = int(path.name) if path.name.isdecimal() and (path / HOST_FILE).is_file() else None  # checkpoints/100
    home = path.parent if step is not None else RunFolder(path).checkpoints
    checkpoints = CheckpointManager(home)
    record = checkpoints.host(step)
    if record is None:
        raise UserError(
            f"ckpt.start={config.ckpt.start}: no checkpoint is there; set it to the folder of a run, or to one of its "
            "checkpoints, such as runs/NAME/checkpoints/100"
        )
    if path.resolve().is_relative_to(folder.path.resolve()):
        raise UserError(f"ckpt.start={config.ckpt.start} is this run itself; continue it with ckpt.resume")
    _check_start(record["config"], config)
    log.info("ckpt.start: continuing from step %d of %s", record["step"], path)
    return Saved(checkpoints, step, record, own=False)


def restore_run(saved: Saved, program: Program, load_optimizer: bool) -> tuple[State, Parameters, Position]:
    """Restore a checkpoint: its state, frozen parts of adapters, and position.

    The optimizer's state is new if the checkpoint has none, or if not `load_optimizer`.
    """
    whole = load_optimizer and saved.has_optimizer
    wanted = with_starts(program) if whole else with_starts(program)._replace(optimizer=())
    step = saved.record["step"] if saved.step is None and not saved.own else saved.step
    with _advice_if_damaged() if saved.own else nullcontext():
        checkpoint = saved.checkpoints.restore(wanted, step, part=not whole, grouping=program.model.grouping)
    assert checkpoint is not None
    state, starts = _split_starts(program, checkpoint.state)
    if not whole:
        log.warning("starting with new optimizer state%s", "" if saved.has_optimizer else ": the checkpoint has none")
        state = state._replace(optimizer=jax.jit(program.optimizer.init)(state.trained))
    position = Position.from_json(checkpoint.host)
    if not saved.own:
        position.standing = BestTracker()  # the best step of the other run has no checkpoint here
    log.info("resumed from step %d", position.step)
    return state, starts, position


def roll_back(checkpoints: CheckpointManager, program: Program, state: State) -> State:
    """Return `state` with weights and optimizer of the newest checkpoint; its own ones are deleted.

    Step, guard and scaling stay. Without a checkpoint, `state` is returned unchanged.
    """
    checkpoints.wait()
    if checkpoints.host() is None:
        log.warning("cannot roll back before the first checkpoint (ckpt.save_steps)")
        return state
    kept = {"step": state.step, "guard": state.guard, "scaling": state.scaling}
    for leaf in jax.tree.leaves((state.trained, state.optimizer, state.reference, state.average, state.base)):
        leaf.delete()  # before restoring: the device may not have room for both
    checkpoint = checkpoints.restore(with_starts(program), grouping=program.model.grouping)
    assert checkpoint is not None
    log.info("rolled back to the weights of step %d, and continuing with the next data", checkpoint.step)
    return _split_starts(program, checkpoint.state)[0]._replace(**kept)


def with_starts(program: Program) -> State:
    """The abstract state as it is in checkpoints, with the initial values of frozen adapter parts: see `State.base`."""
    return program.state._replace(base=program.state.base | abstract(program.model.starts))


def _split_starts(program: Program, state: State) -> tuple[State, Parameters]:
    starts = program.model.starts
    base = {name: value for name, value in state.base.items() if name not in starts}
    return state._replace(base=base), {name: state.base[name] for name in starts}


def begin(config: Config, folder: RunFolder, counts: Counts | None) -> None:
    """Write the records of this run to its folder. Call it after all checks of options, model and data have passed.

    With ckpt.resume='overwrite', existing checkpoints and exports are removed.
    """
    with multihost.write_together(folder.path):
        if multihost.is_main():
            if config.ckpt.resume == "overwrite":
                _remove_results(folder)
            folder.write_records(config, counts)


def _remove_results(folder: RunFolder) -> None:
    folder.last_checkpoint.unlink(missing_ok=True)  # first: without it a killed process only has less to remove
    for path in (folder.checkpoints, folder.export):
        if path.exists():
            log.info("removing %s (ckpt.resume='overwrite')", path)
            shutil.rmtree(path.resolve())  # rmtree refuses a link
            if path.is_symlink():
                path.resolve().mkdir()  # the target of a link must exist
        elif path.is_symlink():
            path.unlink()  # its target is gone


def record(config: Config, model: Model, feed: Feed | PromptFeed) -> dict[str, Any]:
    """The description of a run in every checkpoint, for `check_same` to compare."""
    return {
        "config": json.loads(to_json(config)),
        "base": {} if config.model.from_scratch else fingerprint(model.folder),
        "config_json": read_config(model.folders.config),
        "data": feed.documents.key,
        "data_content": feed.content_key,
        "eval_data": feed.eval_keys,
        "rows_per_step": feed.rows_per_step,
        "total_steps": feed.total_steps,
    }


def check_same(saved: dict, now: dict, model: Model, feed: Feed | PromptFeed) -> None:
    """Raise UserError if data, base model or rows per step differ from the checkpoint's.

    saved, now: `record` of the checkpoint, and of this run.
    """
    if saved["rows_per_step"] != now["rows_per_step"]:
        raise UserError(
            f"a step was {saved['rows_per_step']} rows and is {now['rows_per_step']} now; choose "
            "train.micro_batch_size * train.grad_accum_steps * (mesh.data * mesh.fsdp) so that it stays the same"
        )
    # A stream's key has the paths and times of its files; a copied file has others.
    if not feed.documents.has_key(saved["data"]) and saved.get("data_content") != now["data_content"]:
        raise UserError(
            "the training data or the tokenizer changed since the checkpoint; put them back, or start a new run "
            "with --config.train.run_name=NAME"
        )
    before = saved.get("eval_data", now["eval_data"])  # older checkpoints lack it
    for name in sorted(
        name for name in before.keys() & now["eval_data"].keys() if before[name] != now["eval_data"][name]
    ):
        log.warning(
            "the validation data%s changed since the checkpoint: its metrics cannot be compared with earlier ones",
            f" {name}" if name else "",
        )
    if now["base"] or saved["base"]:
        verify_fingerprint(model.folder, saved["base"])
    if saved["total_steps"] != now["total_steps"]:
        log.warning(
            "the learning-rate schedule was for %d steps and is for %d now",
            *(saved["total_steps"], now["total_steps"]),
        )


def is_complete(
    saved: Saved, record: dict[str, Any], config: Config, folder: RunFolder, model: Model, feed: Feed | PromptFeed
) -> bool:
    """Whether nothing is left to do for the run of the checkpoint, which is logged.

    record: of this run. Raises UserError as `check_same`, `check_same_config` and `check_length`.
    """
    check_same(saved.record, record, model, feed)
    check_same_config(saved.record.get("config_json"), config, model.folders)
    check_length(saved, feed.total_steps)
    if not saved.is_finished(feed.total_steps) or (config.export.at_end and not folder.is_exported):
        return False
    why = f"; {saved.record['ended']}" if saved.record.get("ended") else ""
    log.info("this run is finished: %s, in %s%s", saved.progress(config.train, feed.total_steps), folder.path, why)
    return True


def check_length(saved: Saved, total_steps: int) -> None:
    """Raise UserError if the run that ckpt.start names already has as many steps as this one asks for, or more."""
    if not saved.own and saved.record["step"] >= total_steps:
        raise UserError(
            f"ckpt.start: that run has taken {saved.record['step']} steps, and this one has {total_steps} in all; "
            "raise train.max_steps or train.epochs"
        )


def _changed_options(saved: dict[str, Any], config: Config, free: tuple[str, ...] = ()) -> list[str]:
    """Return a line for each changed option that must stay the same; options of the sections `free` may change."""
    # Options that are newer than the saved config get their defaults. Secrets are hidden in both: a new token is not a
    # changed option.
    then, now = (as_dict(from_json(hide_secrets(text))) for text in (json.dumps(saved), to_json(config)))
    changed = differences(then, now, "")
    return [f"  {key}: {old!r} then, {new!r} now" for key, old, new in changed if key.partition(".")[0] not in free]


def _check_start(saved: dict[str, Any], config: Config) -> None:
    """Raise UserError naming each option that must be as in the run that ckpt.start names, and is not."""
    if changed := _changed_options(saved, config, _FREE_AT_START):
        raise UserError(
            f"ckpt.start={config.ckpt.start}: that run was started with other options:\n"
            + "\n".join(changed)
            + f"\nset them back (only options of {', '.join(_FREE_AT_START)} may change), or take only its weights "
            "(model.path, lora.path)"
        )


def check_unchanged(saved: dict[str, Any], config: Config, folder: RunFolder) -> None:
    """Raise UserError naming each changed option that must stay the same when a run continues."""
    if changed := _changed_options(saved, config):
        quantized = config.serve.format is not None and not config.lora.enabled
        section = "lora" if config.lora.enabled else "model"
        weights = "" if quantized else f" (from these weights with --config.{section}.path={folder.export})"
        raise UserError(
            "this run was started with other options and cannot continue:\n"
            + "\n".join(changed)
            + f"\nset them back, start a new run with --config.train.run_name=NAME{weights}, or restart this one with "
            "--config.ckpt.resume=overwrite"
        )
