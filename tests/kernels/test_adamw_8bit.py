"""The update of 8-bit AdamW: the kernel, interpreted on a CPU, against the reference; shards; refusals.

tests/unit/optim checks that the reference is AdamW with bitsandbytes' rounding.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from kernels.adamw_8bit_cases import ADAM, STACKS, Stack, assert_updated

from pallas_kernels.adamw_8bit import BACKENDS, adamw_8bit, reference, triton, xla
from pallas_kernels.gpus import GPUS, Device
from pallas_kernels.registry import CannotRun, choose

COVERS = ("pallas_kernels", "tests/kernels", "tests/conftest.py")

H100 = Device("gpu", GPUS["h100"].kind, GPUS["h100"].capability)
KERNEL = jax.jit(partial(triton.update, adam=ADAM, interpret=True))
XLA = jax.jit(partial(xla.update, adam=ADAM))
REFERENCE = jax.jit(partial(reference.update, adam=ADAM))


@pytest.mark.every_jax
@pytest.mark.parametrize("stack", STACKS.values(), ids=STACKS)
def test_the_kernel_equals_the_reference(stack):
    arguments = stack.arguments()
    assert_updated(KERNEL(*arguments), REFERENCE(*arguments))


@given(
    layers=st.integers(1, 3),
    blocks=st.tuples(st.integers(1, 9), st.integers(1, 5)),
    block=st.one_of(
        st.tuples(st.just(1), st.integers(16, 256)), st.integers(1, 15).map(lambda width: (256 // width, width))
    ),
    dtypes=st.tuples(*[st.sampled_from(["bfloat16", "float32"])] * 2),
)
@settings(max_examples=6, deadline=None, derandomize=True)
def test_blocks_of_any_size(layers, blocks, block, dtypes):
    across = blocks[1] if block[0] == 1 else 1
    arguments = Stack((layers, blocks[0] * block[0], across * block[1]), block, *dtypes).arguments()
    assert_updated(KERNEL(*arguments), REFERENCE(*arguments))


def test_xla_updates_layer_after_layer_as_the_reference_does_all():
    arguments = STACKS["blocks of 256"].arguments()
    assert_updated(XLA(*arguments), REFERENCE(*arguments))


@pytest.mark.parametrize("update", [KERNEL, XLA], ids=["kernel", "xla"])
def test_a_step_that_is_not_finite_changes_no_bit(update):
    gradient, before, step = STACKS["blocks of 256"].arguments(finite=False)
    after = update(gradient * jnp.nan, before, step)
    jax.tree.map(np.testing.assert_array_equal, after, before)


@pytest.mark.parametrize("update", [KERNEL, XLA], ids=["kernel", "xla"])
def test_shards_are_rounded_as_the_whole_is(update):
    """Layers, rows and columns are split in two; each part gets its offset in the whole."""
    stack = Stack((2, 4, 1024), (1, 256))
    gradient, before, step = stack.arguments()
    expected = REFERENCE(gradient, before, step)
    for layer, row, column in np.ndindex(2, 2, 2):

        def part(array, place=(layer, row, column)):
            halves = [size // 2 for size in array.shape]
            return array[tuple(slice(at * half, (at + 1) * half) for at, half in zip(place, halves))]

        origin = step.origin + jnp.asarray([layer * 1, row * 2, column * 512], jnp.uint32)
        of_layer = {"rate": step.rate[layer : layer + 1], "decay": step.decay[layer : layer + 1]}
        found = update(part(gradient), jax.tree.map(part, before), step._replace(origin=origin, **of_layer))
        assert_updated(found, jax.tree.map(part, expected))


def test_inside_a_shard_map():
    """Replicated and sharded arguments in one call. The interpreter cannot run in a shard_map."""
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    gradient, before, step = Stack((2, 8, 512), (1, 256)).arguments()
    expected = REFERENCE(gradient, before, step)

    def of_shard(gradient, before, step):
        place = [0, *(jax.lax.axis_index(axis) * size for axis, size in zip(mesh.axis_names, gradient.shape[1:]))]
        origin = step.origin + jnp.stack([jnp.asarray(index, jnp.uint32) for index in place])
        return adamw_8bit(gradient, before, step._replace(origin=origin), ADAM)

    spec = P(None, "fsdp", "tensor")
    with jax.set_mesh(mesh):
        gradient, before = jax.tree.map(lambda array: jax.device_put(array, spec), (gradient, before))
        found = jax.jit(jax.shard_map(of_shard, in_specs=(spec, spec, P()), out_specs=spec))(gradient, before, step)
    assert_updated(found, expected)


@pytest.mark.parametrize(
    ("shape", "block", "backend"),
    [
        ((36, 4096, 12288), (1, 256), "triton"),
        ((36, 4096, 8), (32, 8), "triton"),
        ((2, 64, 512), (2, 256), "xla"),
        ((80, 8192, 3584), (1, 256), "xla"),  # 2.3e9 codes
        ((80, 8192, 7168), (1, 256), "triton"),  # 4.7e9 codes, with 64-bit offsets
    ],
    ids=str,
)
def test_a_gpu_takes_the_kernel_where_it_can(shape, block, backend):
    request = triton.AdamRequest(*shape, *block)
    assert choose("adamw_8bit", BACKENDS, H100, request).name == backend
    assert choose("adamw_8bit", BACKENDS, Device("cpu", "cpu", None), request).name == "xla"
    if backend == "xla":
        with pytest.raises(CannotRun, match="cannot run this on NVIDIA H100.*: (blocks of 2 x 256|Pallas-Triton has)"):
            choose("adamw_8bit", BACKENDS, H100, request, "triton")


F32 = jnp.float32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parameter": ((8, 512), F32)}, r"the parameter is \(layers, rows, columns\), not \(8, 512\)"),
        ({"gradient": ((2, 8, 256), F32)}, r"gradient \(2, 8, 256\) and parameter \(2, 8, 512\) differ"),
        ({"gradient": ((2, 8, 512), jnp.int8)}, "gradient has dtype int8; bfloat16, float16 and float32 are supported"),
        ({"codes": ((2, 8, 512), jnp.int8)}, "codes are uint8, and absmax float32"),
        ({"codes": ((2, 8, 256), jnp.uint8)}, r"codes \(2, 8, 256\) and parameter \(2, 8, 512\) differ"),
        ({"absmax": ((2, 8, 3), F32)}, r"absmax \(2, 8, 3\) does not cut codes \(2, 8, 512\) into equal blocks"),
        ({"absmax": ((2, 8, 1), F32)}, "the blocks of both moments must have the same size"),
        ({"rate": ((1,), F32)}, r"rate \(1,\) must have a value per layer \(2\)"),
        ({"backend": "triton"}, "compute capability 8.0"),
        ({"backend": "cuda"}, "unknown backend 'cuda'"),
    ],
)
def test_what_does_not_fit_is_said(changes, message):
    gradient, (parameter, mu, nu), step = jax.eval_shape(Stack((2, 8, 512), (1, 256), "float32").arguments)
    backend = changes.pop("backend", "auto")
    changes = {name: jax.ShapeDtypeStruct(*array) for name, array in changes.items()}
    mu = mu._replace(**{name: array for name, array in changes.items() if name in mu._fields})
    step = step._replace(**{name: array for name, array in changes.items() if name in step._fields})
    before = changes.get("parameter", parameter), mu, nu
    with pytest.raises(ValueError, match=f"adamw_8bit: .*{message}"):
        jax.eval_shape(partial(adamw_8bit, adam=ADAM, backend=backend), changes.get("gradient", gradient), before, step)
