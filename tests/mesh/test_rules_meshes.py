"""Rules that are not options yet train as one device does: a dimension over two axes, ZeRO 1 and ZeRO 2."""

import math

import jax
import pytest
from mesh.harness import OPTIMIZERS, Case, assert_equal, config_of, one_device, train
from mesh.products import NUMBERS, SHAPES, assert_eight_devices_equal_one

from jaxtune.config.schema import Mesh, Train
from jaxtune.errors import UserError
from jaxtune.parallel.layout import RULES, Layout, Rules
from jaxtune.parallel.mesh import make_mesh
from jaxtune.run.assembly import assemble
from jaxtune.run.model import declare_model, read_base

TWO, WHOLE = Layout(embed=("fsdp", "expert")), Layout(embed=())
OVER_TWO = Rules(TWO, TWO, TWO, gathered=("fsdp", "expert"), batch=("data", "fsdp", "expert"))
ZERO_2 = Rules(parameters=WHOLE)
ZERO_1 = Rules(parameters=WHOLE, gradients=WHOLE)


@pytest.mark.parametrize(
    ("rules", "mesh", "optimizer"),
    [
        (OVER_TWO, Mesh(fsdp=2, expert=2, tensor=2), "adamw"),
        (ZERO_1, Mesh(fsdp=4, tensor=2), "adamw"),
        (ZERO_2, Mesh(data=2, fsdp=4), "schedule_free"),
    ],
    ids=["embed over two axes", "ZeRO 1", "ZeRO 2"],
)
def test_equals_one_device(rules, mesh, optimizer):
    case = Case("", optimizer=optimizer)
    with RULES(rules):
        found = train(case, mesh, 8)
    assert_equal(found, one_device(*case[1:5]), OPTIMIZERS[optimizer])


@pytest.mark.parametrize("axes", SHAPES, ids=["out", "in"])
def test_products_in_low_precision_equal_those_of_one_device(axes):
    """Codes are gathered over both axes, and the gradient of the weight is scattered over them in their order."""
    with RULES(OVER_TWO):
        assert_eight_devices_equal_one("two axes", NUMBERS["fp8"], axes)


def test_each_layout_says_where_its_arrays_are():
    mesh = Mesh(fsdp=4, expert=2)
    config, made = config_of(Case(""), mesh, Train(), False), make_mesh(mesh)

    def parts(rules: Rules) -> tuple[int, int]:
        """Into which the largest of the parameters and of the optimizer's moments is divided."""
        with RULES(rules):
            state = assemble(read_base(config), config, made).state
        name = max(state.trained, key=lambda name: state.trained[name].size)
        found = [state.trained[name], state.optimizer.rules[name]["mu"]]
        return tuple(leaf.size // math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in found)

    assert parts(Rules()) == (4, 4)
    assert parts(OVER_TWO) == (8, 8)
    assert parts(ZERO_2) == (1, 4)


def test_a_dimension_that_the_optimizers_layout_does_not_divide_is_told():
    """The layout in which parameters are stored does."""
    mesh = Mesh(data=1, fsdp=1, tensor=8)
    whole = Layout(kv_heads=(), heads=())
    config, made = config_of(Case(""), mesh, Train(), False), make_mesh(mesh, jax.devices())
    with RULES(Rules(whole, whole, whole)):
        declare_model(read_base(config), config, made)
    with RULES(Rules(whole)), pytest.raises(UserError, match="mesh.tensor=8 does not divide kv_heads=4"):
        declare_model(read_base(config), config, made)
