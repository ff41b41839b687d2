"""Say in one message why a kernel cannot run on a GPU, in place of the traceback of the function that was traced."""

import contextlib
import traceback
from collections.abc import Iterator

from jaxtune.errors import UserError
from pallas_kernels.kept_ir import NoKernel
from pallas_kernels.registry import CannotRun


@contextlib.contextmanager
def explain_missing_kernels() -> Iterator[None]:
    """Raise UserError if no backend can run an op on the GPU, or if this jax cannot compile one of its kernels."""
    try:
        yield
    except CannotRun as error:  # names the op, the GPU, and what each backend lacks
        raise UserError(str(error)) from error
    except NoKernel as error:
        raise UserError(f"{_describe_call(error)}: {error}") from error


def _describe_call(error: NoKernel) -> str:
    """Return the arrays and the GPU of the call that failed, which the error's own message does not have."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)  # the frame of kept_ir.find_or_make
    call = frame.f_locals["call"]
    arrays = ", ".join(f"{array['dtype']}{array['shape']}" for array in call["arrays"])
    return f"{call['name']} of {arrays} on a GPU of compute capability {'.'.join(map(str, call['capability']))}"
