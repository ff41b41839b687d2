"""Gated delta rules of every kind, their float64 results, and the tolerance for a backend."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.gated_delta_rule import reference


@dataclass(frozen=True)
class Case:
    """Shapes, and the lengths of the documents in each of two rows; the first document continues from a given state."""

    documents: tuple[tuple[int, ...], ...] = ((150,), (150,))
    heads: tuple[int, int] = (1, 2)
    sizes: tuple[int, int] = (32, 32)
    dtype: str = "float32"
    decay: float = 0.1
    beta: float | None = None
    alike: bool = False

    @property
    def tolerance(self) -> float:
        """Largest error relative to the tensor's amax. Decays are less exact, as differences of sums over a chunk."""
        return 2e-2 if self.dtype == "bfloat16" else 1e-5 + 64 * self.decay * 2**-24


class Arguments(NamedTuple):
    q: Any
    k: Any
    v: Any
    log_decay: Any
    beta: Any
    starts: Any
    state: Any
    d_out: Any
    d_state: Any

    def of_tokens(self, tokens: slice) -> "Arguments":
        """Only these tokens, starting from a state of zeros and without a cotangent of the last state."""
        parts = {name: x[:, tokens] for name, x in self._asdict().items() if name not in ("state", "d_state")}
        return Arguments(**parts, state=jnp.zeros_like(self.state), d_state=jnp.zeros_like(self.d_state))


def starts_of(documents: tuple[tuple[int, ...], ...]) -> np.ndarray:
    """True where a document begins, except for the first document of a row."""
    starts = np.zeros((len(documents), sum(documents[0])), bool)
    for row, lengths in zip(starts, documents):
        row[np.cumsum(lengths)[:-1]] = True
    return starts


def arguments(case: Case, seed: int = 0) -> Arguments:
    """Realistic inputs (keys of length 1, decays and betas of all sizes), and both cotangents."""
    rng = np.random.default_rng(seed)
    starts = starts_of(case.documents)
    (hk, hv), (dk, dv) = case.heads, case.sizes

    def draw(*shape: int) -> np.ndarray:
        return rng.normal(size=(*starts.shape, *shape))

    q, k = draw(hk, dk), draw(hk, dk) * (0 if case.alike else 1) + 1e-3
    k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    log_decay, beta = -case.decay * rng.exponential(size=(*starts.shape, hv)), rng.uniform(size=(*starts.shape, hv))
    beta = beta if case.beta is None else np.full_like(beta, case.beta)
    q, k, v, d_out = (jnp.asarray(x, case.dtype) for x in (q, k, draw(hv, dv), draw(hv, dv)))
    log_decay, beta = (jnp.asarray(x, jnp.float32) for x in (log_decay, beta))
    state, d_state = (jnp.asarray(rng.normal(size=(len(starts), hv, dk, dv)), jnp.float32) for _ in range(2))
    return Arguments(q, k, v, log_decay, beta, jnp.asarray(starts), state, d_out, d_state)


DIFFERENTIATED = ("q", "k", "v", "log_decay", "beta", "state")


def of_everything(op, given: Arguments) -> dict[str, jax.Array]:
    """Return out, the last state, and the gradients under the given cotangents."""

    def of(*inputs):
        named = given._replace(**dict(zip(DIFFERENTIATED, inputs)))
        return op(*named[:7], named.q.shape[-1] ** -0.5)

    (out, last), pull = jax.vjp(of, *(getattr(given, name) for name in DIFFERENTIATED))
    gradients = pull((given.d_out, given.d_state))
    return {"out": out, "last": last, **{f"d_{name}": x for name, x in zip(DIFFERENTIATED, gradients)}}


outputs_and_gradients = jax.jit(of_everything, static_argnums=0)


def in_float64(given: Arguments) -> dict[str, np.ndarray]:
    """Return the float64 results of of_everything for the same (rounded) inputs."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: np.asarray(x, x.dtype if x.dtype == bool else np.float64), given)
        return jax.device_get(outputs_and_gradients(reference.gated_delta_rule, wide))


def assert_close(got: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-5) -> None:
    assert got.keys() == expected.keys()
    for name, wanted in expected.items():
        error, largest = np.abs(np.asarray(got[name], np.float64) - wanted).max(), np.abs(wanted).max()
        assert error <= tolerance * largest, f"{name}: error {error:.2e} of {largest:.2e}"
