"""The weights of a run on the servers that complete for it: an adapter, or all weights."""

import hashlib
import itertools
import shutil
import threading
import weakref
from concurrent.futures import CancelledError
from dataclasses import dataclass
from pathlib import Path

from jaxtune.config.schema import Config
from jaxtune.exports.write import export_adapter, export_weights
from jaxtune.models.decoder import Parameters
from jaxtune.parallel import multihost
from jaxtune.rollout import server_weights
from jaxtune.rollout.server_pool import ServerPool
from jaxtune.weights.model import Model


@dataclass(frozen=True, eq=False)
class WrittenWeights:
    """Weights that servers can read from a folder, which is removed together with this object.

    So it is there until no step waits for completions by these weights, and servers have others.
    """

    folder: Path


class SentWeights:
    """Writes weights and sends them to the servers."""

    def __init__(self, config: Config, model: Model, folder: Path, servers: ServerPool):
        """Prepare `folder`, in which each version of the weights gets a folder, for the servers to read."""
        self._config, self._model, self._folder, self._servers = config, model, folder, servers
        # The hash of the folder is part of the adapter's name on the server. So two runs of the same name, or a run
        # and its evaluation, unload only their own adapters.
        folder_hash = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:6]
        self._name = f"{config.train.run_name or 'run'}-{folder_hash}"
        self._numbers = itertools.count()
        self._last: WrittenWeights | None = None  # what the servers have
        self._served: str | None = None
        self._finalizers: list[weakref.finalize] = []
        self._sending, self._closed = threading.Lock(), False
        if multihost.is_main():  # a run that was killed may have left weights
            shutil.rmtree(folder, ignore_errors=True)

    def write(self, trained: Parameters, frozen: Parameters) -> WrittenWeights:
        """Write weights for `send`: the adapter, or all if the run has none. All processes call this."""
        written = WrittenWeights(self._folder / str(next(self._numbers)))
        export = export_adapter if self._config.lora.enabled else export_weights
        export(self._model, {**frozen, **trained}, self._config, written.folder)
        if multihost.is_main():
            removal = weakref.finalize(written, shutil.rmtree, written.folder, ignore_errors=True)
            self._finalizers = [one for one in (*self._finalizers, removal) if one.alive]
        return written

    def send(self, written: WrittenWeights) -> str | None:
        """Send weights to the servers, unless they have them; return the model's name to request completions with.

        The turns of a step's episodes are sampled by one version. Raises UserError as `server_weights`'s functions,
        and CancelledError after `close`.
        """
        with self._sending:
            if self._closed:
                raise CancelledError
            if self._last is not written:
                names = self._servers.ask_each(lambda url: self._send(url, written.folder))
                self._last, self._served = written, names[0]
            return self._served

    def close(self) -> None:
        """Send no more weights, and remove what is written, unless a server is reading it now."""
        self._closed = True
        # A later run may write folders of the same names while weights of this one are still referred to.
        for removal in self._finalizers:
            removal.detach()
        # vLLM ends if files disappear while it reads them. The next run of this name removes them.
        if multihost.is_main() and self._sending.acquire(blocking=False):
            shutil.rmtree(self._folder, ignore_errors=True)
            self._sending.release()

    def _send(self, url: str, folder: Path) -> str | None:
        if self._config.lora.enabled:
            return server_weights.send_adapter(url, self._name, folder)
        server_weights.send_weights(url, folder, timeout=self._config.rollout.server_seconds)
        return None
