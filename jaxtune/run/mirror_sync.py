"""The mirror of a run (ckpt.mirror): opened before the model is read, resumed from, and up to date at the end."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from jaxtune.checkpoint import CheckpointManager
from jaxtune.checkpoint.manager import HOST_FILE
from jaxtune.checkpoint.mirror import Mirror
from jaxtune.checkpoint.storage import error_text, open_folder
from jaxtune.config import from_json, to_json
from jaxtune.config.differences import differences
from jaxtune.config.loading import as_dict
from jaxtune.config.schema import Config
from jaxtune.errors import UserError, hide_secrets
from jaxtune.host import process
from jaxtune.host.run_folder import RunFolder
from jaxtune.monitor.metrics import IDS
from jaxtune.parallel import multihost

log = logging.getLogger("jaxtune")


@contextmanager
def mirror_run(config: Config, folder: RunFolder) -> Iterator[Mirror | None]:
    """Open the run's mirror in the main process; other processes get None.

    At the end of the run the mirror is brought up to date, and its state is logged. If the run ends by an error, the
    copy in progress is completed. Raises UserError if ckpt.mirror cannot be written to.
    """
    if config.ckpt.mirror is None:
        yield None
        return
    url = f"{config.ckpt.mirror.rstrip('/')}/{folder.path.name}"
    opened: list[Mirror] = []  # a list, because `on_main` returns nothing; it stays empty in other processes

    def open_mirror() -> None:
        records = (*(path.name for path in (folder.config, folder.counts, folder.metrics, folder.completions)), *IDS)
        opened.append(Mirror(open_folder(url, "ckpt.mirror"), folder.path, records))

    def finish() -> None:
        opened[0].update()
        if failure := opened[0].wait():
            log.warning("mirror:   %s; the same command again copies what is missing", failure)
        else:
            log.info("mirror:   %s", url)

    process.on_main(open_mirror)
    try:
        yield opened[0] if opened else None
    except BaseException as error:
        # No further update: the error may be that the mirror holds another run.
        if opened and multihost.can_wait(error) and (failure := opened[0].wait()):
            log.warning("mirror:   %s", failure)
        raise
    process.on_main(finish)


def fetch(config: Config, folder: RunFolder, mirror: Mirror | None, checkpoints: CheckpointManager) -> None:
    """Fetch the checkpoint to resume from (ckpt.resume) and the best one, if the run has no local checkpoint.

    Raises UserError if the mirror holds another run, or if it holds any run and ckpt.resume is 'never'.
    """

    def check_and_fetch() -> None:
        assert mirror is not None
        remote, local = steps(mirror), checkpoints.steps()
        if remote and config.ckpt.resume == "never":
            raise UserError(
                f"{mirror.remote.url} holds a run and ckpt.resume is 'never'; choose another --config.train.run_name"
            )
        if not remote:
            return
        _check_same(config, mirror)
        if local:
            if remote[-1] > local[-1]:
                log.warning(
                    "%s has a checkpoint of step %d, but the run continues from the local ones, the newest of step %d; "
                    "to continue from the mirror's, move %s away",
                    *(mirror.remote.url, remote[-1], local[-1], folder.checkpoints),
                )
            return
        step = mirror.fetch(None if config.ckpt.resume == "auto" else int(config.ckpt.resume))
        saved = json.loads((folder.checkpoints / str(step) / HOST_FILE).read_text(encoding="utf-8"))
        # Format 1 of the file has the content of "host" at its top level.
        best = saved.get("host", saved).get("standing", {}).get("step")
        if best in remote and best != step:
            mirror.fetch(best)

    if config.ckpt.mirror is not None and config.ckpt.resume != "overwrite":
        process.on_main(check_and_fetch)


def remove_overwritten(config: Config, mirror: Mirror | None) -> None:
    """Remove the mirror's checkpoints if ckpt.resume is 'overwrite'; `resume.begin` removes the local ones."""

    def clear() -> None:
        assert mirror is not None
        mirror.clear()

    if config.ckpt.mirror is not None and config.ckpt.resume == "overwrite":
        process.on_main(clear)


def steps(mirror: Mirror) -> list[int]:
    """The steps of the mirror's complete checkpoints, ascending. Raises UserError if it cannot be read."""
    try:
        return mirror.steps()
    except Exception as error:  # each file system raises its own types
        raise UserError(f"ckpt.mirror: {mirror.remote.url} cannot be read: {error_text(error)}") from error


def _check_same(config: Config, mirror: Mirror) -> None:
    """Raise UserError if the mirror's run has other options, so that its checkpoints are not overwritten."""
    try:
        text = mirror.remote.read("config.json").decode()
    except Exception as error:
        raise UserError(f"ckpt.mirror: {mirror.remote.url}/config.json cannot be read: {error_text(error)}") from error
    then = as_dict(from_json(hide_secrets(text), f"{mirror.remote.url}/config.json"))
    if changed := [key for key, _, _ in differences(then, as_dict(from_json(to_json(config))), "")]:
        raise UserError(
            f"ckpt.mirror: {mirror.remote.url} holds another run, with other values of {', '.join(changed[:3])}; "
            "choose another --config.train.run_name, or remove it with --config.ckpt.resume=overwrite"
        )
