"""Which backend of an op runs: a table of what each can do, what was checked, and one choice that is logged."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from pallas_kernels.gpus import Capability, Device

logger = logging.getLogger("pallas_kernels")

ANY_CARD = None


@dataclass(frozen=True)
class Backend:
    """One implementation of an op: `run` is its function, or a module of several.

    `refuses(device, request)` says why it cannot run this request there, or None if it can. `proofs` says where its
    numbers were checked, by compute capability (`ANY_CARD`: interpreted, or plain XLA); a backend without a proof for
    a GPU is never chosen there by 'auto'.
    """

    name: str
    run: Any
    refuses: Callable[[Device, Any], str | None]
    proofs: Mapping[Capability | None, str]

    def proof(self, device: Device) -> str | None:
        """Where the numbers of this backend were checked for a device."""
        return self.proofs.get(device.capability, self.proofs.get(ANY_CARD))


class CannotRun(ValueError):
    """The backend that was asked for is unknown or cannot run the request; the message says why."""


def never_refuses(device: Device, request: Any) -> None:
    """`refuses` of a backend that runs everything everywhere."""


def choose(
    op: str, backends: Sequence[Backend], device: Device, request: Any, wanted: str = "auto", fallback: str = "error"
) -> Backend:
    """The backend asked for, or with 'auto' the first that can run the request and was checked on such a GPU.

    Where the one asked for cannot run the request, `fallback` 'warn' says so once and takes 'auto'. Otherwise raises
    CannotRun, with each backend's reason, as it does for one that is unknown.
    """
    if wanted == "auto":
        able = [backend for backend in backends if backend.refuses(device, request) is None]
        chosen = next((backend for backend in able if backend.proof(device)), None)
        if chosen is None:
            reasons = "; ".join(f"{b.name}: {b.refuses(device, request) or 'not checked there'}" for b in backends)
            raise CannotRun(f"{op}: no backend can run this on {device}: {reasons}")
        _say(op, chosen.name, str(device), f"checked by {chosen.proof(device)}")
        return chosen
    chosen = next((backend for backend in backends if backend.name == wanted), None)
    if chosen is None:
        names = ", ".join(repr(backend.name) for backend in backends)
        raise CannotRun(f"{op}: unknown backend {wanted!r}; there are 'auto', {names}")
    reason = chosen.refuses(device, request)
    if reason is not None and fallback == "warn":
        _warn(op, wanted, str(device), reason)
        return choose(op, backends, device, request)
    if reason is not None:
        raise CannotRun(f"{op}: backend {wanted!r} cannot run this on {device}: {reason}")
    _say(op, chosen.name, str(device), "as asked")
    return chosen


@cache
def _say(op: str, backend: str, device: str, why: str) -> None:
    logger.info("%s runs on %s by backend %s (%s)", op, device, backend, why)


@cache
def _warn(op: str, backend: str, device: str, reason: str) -> None:
    logger.warning("%s: backend %r cannot run this on %s: %s; another one does", op, backend, device, reason)
