"""What a kernel is compiled with where there is no GPU: the cases of `<op>/cases.py`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from pallas_kernels.gpus import Device


@dataclass(frozen=True)
class Case:
    """One function to compile, with the shapes and dtypes of its arguments.

    direction: 'forward' or 'backward'. The first case of a backend and direction represents them where one must do.
    refuses(device): why the backend cannot run the case there, or None.
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
        """The case among those of its op."""
        return f"{self.backend} {self.direction} {self.inputs}"


def asked(refuses: Callable[[Device, Any], str | None], request: Any) -> Callable[[Device], str | None]:
    """`Case.refuses`: a backend's `refuses`, asked for a request."""
    return partial(_ask, refuses, request)


def _ask(refuses: Callable[[Device, Any], str | None], request: Any, device: Device) -> str | None:
    return refuses(device, request)
