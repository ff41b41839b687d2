"""Choose the backend of an op: a table of which requests each can run and where it was checked; choices are logged."""

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from pallas_kernels.gpus import Capability, Device

logger = logging.getLogger("pallas_kernels")

ANY_GPU = None


@dataclass(frozen=True)
class Backend:
    """One implementation of an op.

    Attributes:
        name: the value of the op's `backend` argument. If two backends have one name, the first runs that does not
            refuse the request.
        run: the implementing function, or a module with several.
        refuses: given a device and a request, why the backend cannot run the request on the device, or None if it can.
        proofs: where the backend's numbers were checked, by compute capability (`ANY_GPU`: interpreted, or plain XLA).
            'auto' never chooses a backend on a GPU for which it has no proof.
    """

    name: str
    run: Any
    refuses: Callable[[Device, Any], str | None]
    proofs: Mapping[Capability | None, str]

    def proof(self, device: Device) -> str | None:
        """Return where the numbers of this backend were checked for a device."""
        return self.proofs.get(device.capability, self.proofs.get(ANY_GPU))


class CannotRun(ValueError):
    """The requested backend is unknown or cannot run the request; the message gives the reasons."""


def never_refuses(device: Device, request: Any) -> None:
    """The `refuses` of a backend that runs every request on every device."""


def imported_at_call(module: str, function: str) -> Callable:
    """Return a function of a module that is imported when the function is called: Mosaic GPU takes long to import."""

    def call(*arguments: Any, **options: Any) -> Any:
        return getattr(importlib.import_module(module), function)(*arguments, **options)

    return call


def on_hopper(refuses: Callable[[Device, Any], str | None]) -> Callable[[Device, Any], str | None]:
    """Return the `refuses` of a backend for Hopper GPUs only, which calls `refuses` if the device is one."""

    def on_device(device: Device, request: Any) -> str | None:
        if device.capability != (9, 0):
            return "it needs a Hopper GPU (compute capability 9.0)"
        return refuses(device, request)

    return on_device


def choose(
    op: str, backends: Sequence[Backend], device: Device, request: Any, wanted: str = "auto", fallback: str = "error"
) -> Backend:
    """Return the requested backend, or with 'auto' the first that can run the request and was checked on such a GPU.

    If the requested backend cannot run the request, `fallback='warn'` warns once and chooses by 'auto'; otherwise
    CannotRun is raised with the reasons. CannotRun is also raised for an unknown backend, and, with every backend's
    reason, if 'auto' finds none.
    """
    if wanted == "auto":
        able_backends = [backend for backend in backends if backend.refuses(device, request) is None]
        chosen = next((backend for backend in able_backends if backend.proof(device)), None)
        if chosen is None:
            reasons = "; ".join(f"{b.name}: {b.refuses(device, request) or 'not checked there'}" for b in backends)
            raise CannotRun(f"{op}: no backend can run this on {device}: {reasons}")
        _log_choice(op, chosen.name, str(device), f"checked by {chosen.proof(device)}")
        return chosen
    named = [backend for backend in backends if backend.name == wanted]
    if not named:
        names = ", ".join(dict.fromkeys(repr(backend.name) for backend in backends))
        raise CannotRun(f"{op}: unknown backend {wanted!r}; choose from 'auto', {names}")
    reasons = [backend.refuses(device, request) for backend in named]
    if None not in reasons:
        reason = "; ".join(dict.fromkeys(filter(None, reasons)))
        if fallback == "warn":
            _warn(op, wanted, str(device), reason)
            return choose(op, backends, device, request)
        raise CannotRun(f"{op}: backend {wanted!r} cannot run this on {device}: {reason}")
    chosen = named[reasons.index(None)]
    _log_choice(op, chosen.name, str(device), "as requested")
    return chosen


@cache
def _log_choice(op: str, backend: str, device: str, why: str) -> None:
    logger.info("%s runs on %s by backend %s (%s)", op, device, backend, why)


@cache
def _warn(op: str, backend: str, device: str, reason: str) -> None:
    logger.warning("%s: backend %r cannot run this on %s: %s; using another backend", op, backend, device, reason)
