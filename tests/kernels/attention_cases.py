"""Attention problems of every kind, their float64 results, and the tolerance for a backend."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.flash_attention import reference
from pallas_kernels.flash_attention.mask import MaskSpec, intervals
from pallas_kernels.flash_attention.variant import Variant

# Largest error relative to the tensor's amax.
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}


@dataclass(frozen=True)
class Case:
    """Shapes and features. `documents` are the lengths in each row; None: no packing.

    Positions outside documents are padding; a negative length is padding of that length between documents. `spans` are
    (start, stop) in each row: a position in one sees the keys before its stop, others those up to their own.
    """

    queries: int = 72
    keys: int | None = None  # None: as many as queries
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 16
    dtype: str = "float32"
    causal: bool = True
    window: int | None = None
    offset: int | tuple[int, ...] = 0  # a tuple: one for each query
    traced_offset: bool = False
    documents: tuple[tuple[int, ...], ...] | None = None
    spans: tuple[tuple[tuple[int, int], ...], ...] | None = None
    soft_cap: float | None = None
    sinks: bool = False

    @property
    def variant(self) -> Variant:
        offset = None if self.traced_offset or isinstance(self.offset, tuple) else self.offset
        return Variant(self.head_dim**-0.5, self.soft_cap, self.causal and self.spans is None, self.window, offset)

    @property
    def mask(self) -> MaskSpec:
        start = None if self.documents is None else jnp.asarray(key_start(self.documents, self.queries))
        most = None if self.documents is None else max(1, *map(len, self.documents))
        offset = self.offset
        if isinstance(offset, tuple):
            offset = jnp.broadcast_to(jnp.asarray(offset, jnp.int32), (2, self.queries))
        if self.spans is None:
            return MaskSpec(self.causal, self.window, start, offset, most)
        positions = np.broadcast_to(np.arange(self.queries) + self.offset, (2, self.queries))
        return MaskSpec(False, self.window, start, offset, most, jnp.asarray(key_end(self.spans, positions)))


class Arguments(NamedTuple):
    q: Any
    k: Any
    v: Any
    first: Any
    end: Any
    sinks: Any
    d_out: Any
    d_lse: Any


def key_start(documents: tuple[tuple[int, ...], ...], length: int) -> np.ndarray:
    """Start of each token's document; padding sees nothing."""
    rows = np.full((len(documents), length), length, np.int32)
    for row, lengths in zip(rows, documents):
        start = 0
        for document in lengths:
            row[start : start + max(document, 0)] = start
            start += abs(document)
    return rows


def key_end(spans: tuple[tuple[tuple[int, int], ...], ...], positions: np.ndarray) -> np.ndarray:
    """One past the last key that the token at each position sees."""
    ends = positions + 1
    for row, own, at in zip(spans, ends, positions):
        for start, stop in row:
            own[(start <= at) & (at < stop)] = stop
    return ends.astype(np.int32)


def arguments(case: Case, seed: int = 0) -> Arguments:
    """Return two rows of numbers in the case's dtype, and cotangents of both outputs."""
    rng = np.random.default_rng(seed)
    heads, kv_heads = case.heads
    keys = case.queries if case.keys is None else case.keys

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), case.dtype)

    queries = (2, case.queries, heads, case.head_dim)
    q, k, v = draw(*queries), draw(2, keys, kv_heads, case.head_dim), draw(2, keys, kv_heads, case.head_dim)
    first, end = intervals(case.mask, 2, case.queries, keys)
    sinks = draw(heads).astype(jnp.float32) if case.sinks else None
    return Arguments(q, k, v, first, end, sinks, draw(*queries), draw(2, heads, case.queries).astype(jnp.float32))


def poison_unseen(given: Arguments, blind: np.ndarray, unseen: np.ndarray) -> Arguments:
    """Put NaN into everything that belongs to queries that see nothing (b, s) and to keys that no query sees (b, t)."""

    def poison(x, rows):
        return jnp.where(rows[..., None, None], jnp.nan, x)

    return given._replace(
        q=poison(given.q, blind),
        k=poison(given.k, unseen),
        v=poison(given.v, unseen),
        d_out=poison(given.d_out, blind),
        d_lse=jnp.where(blind[:, None], jnp.nan, given.d_lse),
    )


# Compilation dominates the tests' time, and the results do not depend on the optimisation level.
_quickly = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None


@partial(jax.jit, static_argnums=(0, 1), compiler_options=_quickly)
def outputs_and_gradients(op, variant: Variant, given: Arguments) -> dict[str, jax.Array]:
    """Return out, lse, and the gradients of q, k, v (and sinks) under the given cotangents."""
    inputs = {"q": given.q, "k": given.k, "v": given.v}
    if given.sinks is not None:
        inputs["sinks"] = given.sinks

    def of(inputs):
        return op(inputs["q"], inputs["k"], inputs["v"], given.first, given.end, inputs.get("sinks"), variant)

    (out, lse), pull = jax.vjp(of, inputs)
    (gradients,) = pull((given.d_out, given.d_lse))
    return {"out": out, "lse": lse, **{f"d_{name}": gradient for name, gradient in gradients.items()}}


def by_intervals_alone(variant: Variant) -> Variant:
    """Attention by intervals, with nothing known about the mask while tracing: one compilation serves all masks."""
    return replace(variant, causal=True, window=None, query_offset=None)


_float64_reference = partial(reference.attention, accumulation=np.float64)


def in_float64(case: Case, given: Arguments) -> dict[str, np.ndarray]:
    """Return the float64 results of outputs_and_gradients for the same (rounded) inputs."""
    with jax.enable_x64(True):
        wide = jax.tree.map(_float64, given)
        return jax.device_get(outputs_and_gradients(_float64_reference, by_intervals_alone(case.variant), wide))


def _float64(x: jax.Array) -> np.ndarray:
    return np.asarray(x, np.float64 if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype)


def assert_close(got: dict[str, Any], expected: dict[str, Any], dtype: str) -> None:
    """Check each tensor with its tolerance; the log-sum-exp, always float32, with the tolerance for float32."""
    assert got.keys() == expected.keys()
    for name, wanted in expected.items():
        value = np.asarray(got[name], np.float64)
        if name == "lse":
            np.testing.assert_array_equal(np.isneginf(value), np.isneginf(wanted), err_msg=name)
            value, wanted = (np.where(np.isneginf(wanted), 0, x) for x in (value, wanted))
        error, largest = np.abs(value - wanted).max(), np.abs(wanted).max()
        tolerance = TOLERANCE["float32" if name == "lse" else dtype]
        assert error <= tolerance * largest, f"{name}: error {error:.2e} of {largest:.2e}"
