"""Sharding rules other than the default equal one device: ZeRO 1 and 2, unsharded weights, two axes together."""

import dataclasses
import math

import jax
import pytest
from mesh.harness import LOW_PRECISION, OPTIMIZERS, Case, assert_equal, config_of, micro_batches, one_device, train
from mesh.products import NUMBERS, SHAPES, assert_eight_devices_equal_one

from jaxtune.config.schema import TrainOptions
from jaxtune.errors import UserError
from jaxtune.parallel.layout import RULES, Layout, Rules
from jaxtune.parallel.manual_axes import GATHERS_OTHER_AXES
from jaxtune.parallel.mesh import make_mesh, rules_of
from jaxtune.parallel.options import MeshOptions, ParallelOptions
from jaxtune.plan.launches import read_program
from jaxtune.precision.recipes import recipe_of
from jaxtune.training.assembly import assemble, compile_step, deferred_sum_axes
from jaxtune.weights.base import read_base
from jaxtune.weights.model import declare_model

TWO = Layout(embed=("fsdp", "expert"))
OVER_TWO = Rules(TWO, TWO, TWO, gathered=("fsdp", "expert"), batch=("data", "fsdp", "expert"))


ZERO_1, ZERO_2 = ParallelOptions(zero=1), ParallelOptions(zero=2)


@pytest.mark.parametrize(
    ("parallel", "mesh", "case"),
    [
        (ZERO_1, MeshOptions(data=2, fsdp=2, tensor=2), Case("")),
        (ZERO_1, MeshOptions(fsdp=2), Case("")),
        (ZERO_1, MeshOptions(fsdp=2), Case("", "nf4", "lora")),
        (ZERO_1, MeshOptions(fsdp=2), Case("", model="moe")),
        (ZERO_2, MeshOptions(data=2, fsdp=2, sequence=2), Case("", optimizer="schedule_free")),
        (ZERO_2, MeshOptions(fsdp=4), Case("", "fp8 operands")),
        (ZERO_2, MeshOptions(fsdp=2, stage=2), Case("", "fp8 operands")),
        (ZERO_2, MeshOptions(fsdp=2, expert=2), Case("", model="moe")),
        (ZERO_2, MeshOptions(fsdp=4), Case("", adapter="lora")),
        (ParallelOptions(reshard_after_forward=False), MeshOptions(data=2, fsdp=2, tensor=2), Case("")),
        (ParallelOptions(shard_residual=False), MeshOptions(fsdp=2, sequence=2, tensor=2), Case("", optimizer="sgd")),
    ],
    ids=[
        "ZeRO 1",
        "ZeRO 1 over all devices",
        "ZeRO 1, quantized base",
        "ZeRO 1, mixture",
        "ZeRO 2",
        "ZeRO 2, FP8 products",
        "ZeRO 2, FP8 products in stages",
        "ZeRO 2, experts",
        "ZeRO 2, adapters",
        "weights stay whole",
        "residual stream whole over the tensor axis",
    ],
)
def test_an_option_equals_one_device(parallel, mesh, case):
    devices = math.prod(dataclasses.astuple(mesh))
    found = train(case, mesh, devices, accumulate=micro_batches(mesh), parallel=parallel)
    bound = LOW_PRECISION if case.storage == "fp8 operands" else OPTIMIZERS[case.optimizer]
    assert_equal(found, one_device(case), bound)


@pytest.mark.parametrize(
    ("zero", "shards", "group"),
    [
        (1, 1, {0, 1, 2, 3}),
        pytest.param(3, 2, {0, 2}, marks=pytest.mark.skipif(GATHERS_OTHER_AXES, reason="not with this jax")),
    ],
)
def test_gradients_are_summed_once_a_step_over_devices_that_divide_rows_alone(zero, shards, group):
    """All gradients are summed in float32 over these devices after four micro-batches, and not during any of them."""
    parallel, mesh = ParallelOptions(zero=zero), MeshOptions(data=2, fsdp=2)
    made = make_mesh(mesh, jax.devices()[:4], parallel)
    config = config_of(Case(""), mesh, TrainOptions(micro_batch_size=1, grad_accum_steps=4), False)
    program = assemble(read_base(config), dataclasses.replace(config, parallel=parallel), made)
    launches = read_program(compile_step(program, config).as_text()).launches
    sums = [launch for launch in launches if launch.kind in ("all-reduce", "reduce-scatter")]
    # XLA also writes a sum over one device; a group that cannot be read counts as unknown.
    over_them = [launch for launch in sums if not launch.group or group & {*launch.group} > {0}]
    assert all(launch.count == 1 for launch in over_them)
    once = sum(launch.written for launch in over_them if {*launch.group} == group)
    of_parameters = 4 * sum(leaf.size for leaf in program.state.trained.values())
    assert once == pytest.approx(of_parameters / shards, rel=0.05)


@pytest.mark.parametrize(
    ("storage", "count", "axes"), [("bf16", 2, ("data",)), ("bf16", 1, ()), ("fp8 operands", 2, ())]
)
def test_an_amax_over_all_tokens_and_a_single_micro_batch_leave_no_sums_for_later(storage, count, axes):
    mesh = MeshOptions(data=2, fsdp=1)
    made = make_mesh(mesh, jax.devices()[:2])
    config = config_of(Case("", storage), mesh, TrainOptions(grad_accum_steps=count), False)
    model = declare_model(read_base(config), config, made)
    assert deferred_sum_axes(config, recipe_of(config.precision, model.linears), made) == axes


def test_shards_that_wait_on_the_host_equal_one_device():
    case, offloaded = Case(""), ("optimizer", "master", "gradients")
    found = train(case, MeshOptions(fsdp=2), 2, accumulate=2, offloaded=offloaded)
    assert_equal(found, one_device(case), OPTIMIZERS["adamw"])


def test_quantized_shards_that_wait_on_the_host_equal_one_device():
    case = Case("", storage="nf4", adapter="lora", optimizer="adamw_8bit")
    found = train(case, MeshOptions(fsdp=2), 2, offloaded=("optimizer", "quants"))
    assert_equal(found, one_device(case), OPTIMIZERS["adamw_8bit"])


def test_a_dimension_over_two_axes_equals_one_device():
    case = Case("")
    with RULES(OVER_TWO):
        found = train(case, MeshOptions(fsdp=2, expert=2, tensor=2), 8)
    assert_equal(found, one_device(case), OPTIMIZERS["adamw"])


def test_weights_that_stay_whole_are_gathered_once():
    """In a loop of two layers: one layer's seven weights in the forward pass, and again in the backward pass or not."""
    config = config_of(Case("", remat="block"), MeshOptions(), TrainOptions(micro_batch_size=1), False)

    def gathers(parallel: ParallelOptions) -> int:
        made = make_mesh(MeshOptions(), jax.devices(), parallel)
        own = dataclasses.replace(config, parallel=parallel)
        return compile_step(assemble(read_base(own), own, made), own).as_text().count(" all-gather(")

    assert gathers(ParallelOptions()) - gathers(ParallelOptions(reshard_after_forward=False)) == 7


@pytest.mark.parametrize("axes", SHAPES, ids=["out", "in"])
def test_products_in_low_precision_equal_those_of_one_device(axes):
    """Codes are gathered over both axes, and the gradient of the weight is scattered over them in their order."""
    with RULES(OVER_TWO):
        assert_eight_devices_equal_one("two axes", NUMBERS["fp8"], axes)


def test_each_layout_says_where_its_arrays_are():
    mesh = MeshOptions(fsdp=4, expert=2)
    config, made = config_of(Case(""), mesh, TrainOptions(), False), make_mesh(mesh)

    def parts(rules: Rules) -> tuple[int, int]:
        """Number of parts of the largest parameter, and of its optimizer moment."""
        with RULES(rules):
            state = assemble(read_base(config), config, made).state
        name = max(state.trained, key=lambda name: state.trained[name].size)
        found = [state.trained[name], state.optimizer.rules[name]["mu"]]
        return tuple(leaf.size // math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in found)

    assert parts(Rules()) == (4, 4)
    assert parts(OVER_TWO) == (8, 8)
    assert parts(rules_of(ParallelOptions(zero=2))) == (1, 4)


def test_a_dimension_that_the_optimizers_layout_does_not_divide_is_told():
    """The layout in which parameters are stored divides it."""
    mesh = MeshOptions(data=1, fsdp=1, tensor=8)
    whole = Layout(kv_heads=(), heads=())
    config, made = config_of(Case(""), mesh, TrainOptions(), False), make_mesh(mesh, jax.devices())
    with RULES(Rules(whole, whole, whole)):
        declare_model(read_base(config), config, made)
    with RULES(Rules(whole)), pytest.raises(UserError, match="mesh.tensor=8 does not divide kv_heads=4"):
        declare_model(read_base(config), config, made)
