"""Load an adapter, or all weights, on an inference server."""

import hashlib
import json
import re
import time
from pathlib import Path

from jaxtune.errors import UserError
from jaxtune.hf.peft import CONFIG, WEIGHTS
from jaxtune.rollout.server_request import FORGET, PAUSES, RELOAD, Wait, call, entries_of, not_openai


def send_adapter(url: str, name: str, folder: Path, *, timeout: float = 300.0, wait: Wait = time.sleep) -> str:
    """Load the PEFT adapter in `folder` on the server, in place of earlier adapters of `name`.

    The server reads the folder itself, and may read it again later. The adapter's name on the server ends in a digest
    of its files, because vLLM caches prefixes by an adapter's name, even if its weights have changed.

    Args:
        url: Address of the server.
        name: Name of the run; two runs with the same name would unload each other's adapters.
        folder: Folder with adapter_config.json and adapter_model.safetensors; the server must see it at the same path.
        timeout: Seconds within which the adapter must be loaded.
        wait: Function that sleeps between attempts.

    Returns:
        The model name to request completions with.

    Raises:
        UserError: The folder is not an adapter's, or the server cannot be reached or does not load the adapter.
    """
    served = f"{name}-{_digest(folder)}"
    # Unload first: with --max-loras=1 loading evicts the earlier adapter, which vLLM then fails to unload. Unload even
    # an adapter with the same digest, because an earlier run may have loaded it from a folder that is gone.
    for entry in entries_of(url, call(url, "v1/models", None, timeout, wait), "data"):
        if re.fullmatch(rf"{re.escape(name)}-[0-9a-f]{{12}}", str(entry.get("id"))):
            call(url, "v1/unload_lora_adapter", {"lora_name": entry["id"]}, timeout, wait, fine=(404,))
    call(url, "v1/load_lora_adapter", {"lora_name": served, "lora_path": str(folder.resolve())}, timeout, wait)
    return served


def send_weights(url: str, folder: Path, *, timeout: float, wait: Wait = time.sleep) -> None:
    """Load the safetensors in `folder` on a vLLM, in place of all weights that it has.

    The server reads the folder itself. It also forgets the prefixes that it computed with the weights before.

    Args:
        url: Address of the server, which must not be completing anything.
        folder: Folder with the safetensors of a whole model; the server must see it at the same path.
        timeout: Seconds within which the weights must be loaded.
        wait: Function that sleeps between attempts.

    Raises:
        UserError: The server cannot be reached, does not load the weights, or is busy with other requests.
    """
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder.resolve())}}
    call(url, RELOAD, body, timeout, wait)
    for pause in (*PAUSES, None):
        answer = call(url, FORGET, {}, timeout, wait)
        if _has_succeeded(url, answer):
            return
        if pause is not None:
            wait(pause)
    raise UserError(
        f"{url} does not forget the prefixes that it computed with earlier weights, because it is busy with other "
        "requests; a server of rollout.server must serve only this run"
    )


def _has_succeeded(url: str, body: bytes) -> bool:
    """Return whether an answer says "success"; a vLLM that does not say it has succeeded."""
    try:
        return json.loads(body or b"{}").get("success", True) is True
    except (ValueError, AttributeError, RecursionError) as error:
        raise not_openai(url, body) from error


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in (CONFIG, WEIGHTS):
        try:
            digest.update((folder / file).read_bytes())
        except OSError as error:
            raise UserError(f"{folder} is not an adapter's folder: {file}: {error.strerror or error}") from error
    return digest.hexdigest()[:12]
