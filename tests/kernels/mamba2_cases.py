"""Recurrences of Mamba-2 of every kind, their float64 results, and the tolerance for a backend."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from kernels.delta_cases import starts_of

from pallas_kernels.mamba2_scan import reference


@dataclass(frozen=True)
class Case:
    """Shapes, and the lengths of the documents in each of two rows; the first document continues from a given state.

    step: mean of the random steps, which multiply decay rates from 1 to the number of heads.
    """

    documents: tuple[tuple[int, ...], ...] = ((150,), (150,))
    heads: int = 4
    groups: int = 2
    sizes: tuple[int, int] = (32, 64)  # of a head and of the state
    dtype: str = "float32"
    step: float = 0.1

    @property
    def tolerance(self) -> float:
        """Largest error relative to the tensor's amax. Decays are less exact, as differences of sums over a chunk."""
        return 2e-2 if self.dtype == "bfloat16" else 1e-5 + 128 * self.heads * self.step * 2**-24


class Arguments(NamedTuple):
    x: Any
    step: Any
    rate: Any
    write: Any
    read: Any
    skip: Any
    starts: Any
    state: Any
    d_out: Any
    d_state: Any

    def of_tokens(self, tokens: slice) -> "Arguments":
        """Only these tokens, starting from a state of zeros and without a cotangent of the last state."""
        parts = {name: getattr(self, name)[:, tokens] for name in ("x", "step", "write", "read", "starts", "d_out")}
        return self._replace(**parts, state=jnp.zeros_like(self.state), d_state=jnp.zeros_like(self.d_state))


def arguments(case: Case, seed: int = 0) -> Arguments:
    """Draw inputs, and both cotangents."""
    rng = np.random.default_rng(seed)
    starts = starts_of(case.documents)
    size, state = case.sizes

    def draw(*shape: int, dtype: str = case.dtype) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), dtype)

    x, d_out = (draw(*starts.shape, case.heads, size) for _ in range(2))
    write, read = (draw(*starts.shape, case.groups, state) for _ in range(2))
    step = jnp.asarray(rng.exponential(case.step, x.shape[:3]), jnp.float32)
    rate, skip = -jnp.arange(1.0, case.heads + 1), draw(case.heads, dtype="float32")
    first, d_last = (draw(len(starts), case.heads, size, state, dtype="float32") for _ in range(2))
    return Arguments(x, step, rate, write, read, skip, jnp.asarray(starts), first, d_out, d_last)


DIFFERENTIATED = ("x", "step", "rate", "write", "read", "skip", "state")


def of_everything(op, given: Arguments) -> dict[str, jax.Array]:
    """Return out, the last state, and the gradients under the given cotangents."""

    def of(*inputs):
        return op(*given._replace(**dict(zip(DIFFERENTIATED, inputs)))[:8])

    (out, last), pull = jax.vjp(of, *(getattr(given, name) for name in DIFFERENTIATED))
    gradients = pull((given.d_out, given.d_state))
    return {"out": out, "last": last, **{f"d_{name}": x for name, x in zip(DIFFERENTIATED, gradients)}}


outputs_and_gradients = jax.jit(of_everything, static_argnums=0)


def in_float64(given: Arguments) -> dict[str, np.ndarray]:
    """Return the float64 results of of_everything for the same (rounded) inputs."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: np.asarray(x, x.dtype if x.dtype == bool else np.float64), given)
        return jax.device_get(outputs_and_gradients(reference.mamba2_scan, wide))
