"""The record of `<op>/cases.py`: a function and inputs with which a kernel is compiled on a machine without a GPU."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from pallas_kernels.gpus import Device


@dataclass(frozen=True)
class Case:
    """One function to compile, with the shapes and dtypes of its arguments.

    Attributes:
        op: name of the op.
        backend: name of the backend.
        direction: 'forward' or 'backward'. Of the cases with the same backend and direction, the first is used if only
            one is compiled.
        inputs: description of the inputs.
        function: the function to compile.
        arguments: shapes and dtypes of its arguments.
        refuses: given a device, why the backend cannot run the case on it, or None.
    """

    op: str
    backend: str
    direction: str
    inputs: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    refuses: Callable[[Device], str | None]

    def __str__(self) -> str:
        return f"{self.op} {self.label}"

    @property
    def label(self) -> str:
        """The name of the case, unique within its op."""
        return f"{self.backend} {self.direction} {self.inputs}"


def bind_request(refuses: Callable[[Device, Any], str | None], request: Any) -> Callable[[Device], str | None]:
    """Return a `Case.refuses` that calls a backend's `refuses` with this request."""
    return partial(_refuses_request, refuses, request)


def _refuses_request(refuses: Callable[[Device, Any], str | None], request: Any, device: Device) -> str | None:
    return refuses(device, request)
