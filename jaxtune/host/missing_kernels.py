"""Say in one message why a kernel cannot run on a GPU, in place of the traceback of the function that was traced."""

import contextlib
from collections.abc import Iterator

from jaxtune.errors import UserError
from pallas_kernels.kept_ir import NoKernel
from pallas_kernels.registry import CannotRun


@contextlib.contextmanager
def explain_missing_kernels() -> Iterator[None]:
    """Raise UserError if no backend can run an op on the GPU, or if this jax cannot compile one of its kernels."""
    try:
        yield
    except (CannotRun, NoKernel) as error:  # the messages name the op or kernel, the GPU, and what is lacking
        raise UserError(str(error)) from error
