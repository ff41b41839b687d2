"""A linear layer in FP8 or NVFP4, computed on a mesh: its operands, product and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.parallel.layout import P, by_token, gathered_entry, spec
from jaxtune.parallel.mesh import make_mesh
from jaxtune.parallel.options import MeshOptions
from jaxtune.parallel.random import Noise
from jaxtune.precision.fp8 import Fp8Matmul
from jaxtune.precision.matmul import LowPrecision
from jaxtune.precision.nvfp4 import Nvfp4Matmul

ROWS, LENGTH, LAYERS = 8, 64, 2
NUMBERS = {
    "fp8": Fp8Matmul(hadamard=False, online=False),
    "fp8 hadamard": Fp8Matmul(hadamard=True, online=False),
    "nvfp4": Nvfp4Matmul(stochastic_rounding=True, hadamard=True, four_over_six=True),
}
MESHES = {
    "fsdp tensor": MeshOptions(data=2, fsdp=2, tensor=2),
    "sequence": MeshOptions(fsdp=2, sequence=2, tensor=2),
    "two axes": MeshOptions(fsdp=2, expert=2, tensor=2),
}
# A linear layer with products sharded over the mesh's tensor axis, and one with sums sharded over it.
SHAPES = {("mlp", "embed"): (96, 64), ("embed", "mlp"): (64, 96)}


def case(axes, dyadic: bool):
    """Stacked weights, x and dy: normal, or small integers, which both formats represent exactly."""
    out, inner = SHAPES[axes]
    rng = np.random.default_rng(0)
    shapes = (LAYERS, out, inner), (ROWS, LENGTH, inner), (ROWS, LENGTH, out)
    if not dyadic:
        return [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    # 7 over the largest value of e4m3 or e5m2 is a power of two, so scales round nothing.
    arrays = [rng.integers(-2, 3, shape).astype(np.float32) for shape in shapes]
    arrays[0][:, 0, 0] = arrays[1][0, 0, 0] = 7.0
    arrays[2][0, 0, 0] = 7.0
    return arrays


@functools.cache
def compute_products(numbers, axes, mesh: MeshOptions, devices: int, dyadic: bool = False):
    """Return (operands, y, dx, dW, amax), fetched; dW is for both layers, each computed by a scan."""
    make_mesh(mesh, jax.devices()[:devices])
    w, x, dy = case(axes, dyadic)
    axis, place = gathered_entry(axes[0]), spec(*axes)
    x, dy = jax.device_put(x, by_token(axes[1])), jax.device_put(dy, by_token(axes[0]))
    w, rows = jax.device_put(w, P(None, *place)), jax.device_put(np.arange(ROWS, dtype=np.int32), P(by_token()[0]))
    scales = jnp.asarray([[7 / 448, 7 / 57344]] * LAYERS, jnp.float32) if numbers.delayed else None

    @jax.jit
    def run(w, scales, x, dy, rows):
        operands = jax.lax.map(lambda w: numbers.make(w, axes), w)

        def layers(x, w, scales):
            noise = Noise(jax.random.key(0), rows)

            def layer(_, scanned):
                leaf, number = scanned
                return None, leaf.matmul(x, axis, noise.layer(number))

            leaf = LowPrecision(operands, w, scales, numbers)
            return jax.lax.scan(layer, None, (leaf, jnp.arange(LAYERS)))[1]

        y, backward = jax.vjp(layers, x, w, scales)
        return operands, y, *backward(jnp.stack([dy] * LAYERS))

    operands, y, dx, dw, amax = run(w, scales, x, dy, rows)
    declared = numbers.abstract(w.shape, w.dtype, (None, *axes))
    for found, expected in zip(jax.tree.leaves(operands), jax.tree.leaves(declared)):
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert found.sharding.is_equivalent_to(expected.sharding, found.ndim), (found.sharding, expected.sharding)
    assert jax.typeof(dw).sharding.spec == P(None, *place)
    return jax.tree.map(np.asarray, (operands, y, dx, dw, amax))


def assert_eight_devices_equal_one(mesh: str, numbers, axes) -> None:
    """Scales and random bits do not depend on the mesh; sums are in another order."""
    operands, *expected, amax = compute_products(numbers, axes, MeshOptions(fsdp=1), 1)
    found_operands, *found, found_amax = compute_products(numbers, axes, MESHES[mesh], 8)
    jax.tree.map(np.testing.assert_array_equal, found_operands, operands)
    if amax is not None:
        np.testing.assert_array_equal(found_amax, amax)
    for one, eight in zip(expected, found):
        assert np.abs(eight - one).max() <= 1e-5 * np.abs(one).max()
