"""A dimension may be sharded by several axes, and a layout is a value."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtune.errors import UserError
from jaxtune.parallel.layout import (
    RULES,
    Layout,
    P,
    Rules,
    axes_of,
    by_head,
    by_token,
    gather,
    gathered_entry,
    reduce_early,
    shards,
    spec,
)
from jaxtune.parallel.mesh import data_shards, make_mesh, misfit
from jaxtune.parallel.options import MeshOptions

BOTH = Layout(embed=("tensor", "fsdp", "expert"))
RULES_OF_BOTH = Rules(BOTH, BOTH, BOTH, gathered=("fsdp", "expert"), batch=("data", "fsdp", "expert"))


def test_a_dimension_that_one_axis_shards_has_no_tuple():
    assert axes_of("embed") == ("fsdp", "context", "sequence") and axes_of("rank") == axes_of(None) == ()
    assert spec("layers", "mlp", "embed", None) == P(None, "tensor", ("fsdp", "context", "sequence"), None)
    assert by_token() == P(("data", "fsdp"), ("context", "sequence"))
    assert by_token("heads", "embed", None) == P(("data", "fsdp"), ("context", "sequence"), "tensor", None, None)
    assert by_head() == P(("data", "fsdp"), None, ("tensor", "context", "sequence"), None)
    assert by_head(kept=("context",)) == P(("data", "fsdp"), "context", ("tensor", "sequence"), None)


def test_other_rules_hold_inside_their_context_alone():
    traced = []

    @jax.jit
    def laid_out(x):
        traced.append(spec("embed"))
        return x

    laid_out(0.0)
    with pytest.raises(ZeroDivisionError), RULES(RULES_OF_BOTH):
        assert axes_of("embed") == ("tensor", "fsdp", "expert")
        assert spec("embed", layout=Layout()) == P(("fsdp", "context", "sequence"))
        assert gathered_entry("embed") == "tensor" and gathered_entry("mlp") == "tensor"
        assert by_token(None) == P(("data", "fsdp", "expert"), ("context", "sequence"), None)
        laid_out(1.0)
        raise ZeroDivisionError
    laid_out(2.0)
    assert traced == [P(("fsdp", "context", "sequence")), P(("tensor", "fsdp", "expert"))]
    assert RULES.value == Rules()


def test_a_complaint_names_all_axes_of_a_dimension():
    mesh = make_mesh(MeshOptions(fsdp=2, expert=2, tensor=2))
    assert data_shards(mesh) == 4 and shards((), mesh) == 1
    with RULES(Rules()):
        assert data_shards(mesh) == 2
        assert misfit(mesh, axes_of("embed"), 6, "embed=6") is None
    with RULES(RULES_OF_BOTH):
        assert data_shards(mesh) == 4
        assert misfit(mesh, axes_of("embed"), 16, "embed=16") is None
        assert misfit(mesh, axes_of("rank"), 3, "rank=3") is None
        assert misfit(mesh, axes_of("embed", Layout()), 6, "embed=6") is None
        assert misfit(mesh, axes_of("embed"), 6, "embed=6") == (
            "mesh.tensor=2 * mesh.fsdp=2 * mesh.expert=2 does not divide embed=6; these would: [1, 2, 3, 6]"
        )


def test_a_weight_is_gathered_over_several_axes_and_its_gradient_comes_back_sharded():
    mesh = make_mesh(MeshOptions(fsdp=2, expert=2, tensor=2))
    with RULES(RULES_OF_BOTH):
        values = np.arange(3 * 16, dtype=np.float32).reshape(3, 16)
        weight = jax.device_put(values, jax.NamedSharding(mesh, spec("rank", "embed")))
        gathered, back = jax.vjp(jax.jit(gather), weight)
        assert jax.typeof(gathered).sharding.spec == P(None, "tensor")
        np.testing.assert_array_equal(gathered, values)
        (gradient,) = back(2 * gathered)
        assert jax.typeof(gradient).sharding.spec == P(None, ("tensor", "fsdp", "expert"))
        np.testing.assert_array_equal(gradient, 2 * values)


def test_a_gradient_that_is_reduced_early_is_not_computed_for_a_frozen_weight():
    mesh = make_mesh(MeshOptions(fsdp=8))
    weight = jax.device_put(np.ones((8, 16), np.float32), jax.NamedSharding(mesh, spec("rank", "embed")))
    x = jax.device_put(np.ones((8, 1, 8), np.float32), jax.NamedSharding(mesh, by_token(None)))

    def loss(x, trained, frozen):
        x, weights = reduce_early(x, {"trained": trained, "frozen": frozen})
        return sum(jnp.sum(x @ gather(weight)) for weight in weights.values())

    traced = str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(x, weight, weight))
    # The forward pass has two products, the gradient of x two, and the gradient of the trained weight one.
    assert (traced.count("optimization_barrier"), traced.count("dot_general")) == (1, 5)


def test_rules_that_would_compute_the_same_tokens_twice_or_permute_a_weight_are_refused():
    with pytest.raises(ValueError, match=r"gathered over \['expert'\]"):
        Rules(gathered=("fsdp", "expert"))
    with pytest.raises(ValueError, match="must come last"):
        Rules(Layout(embed=("fsdp", "tensor")))


def test_a_mesh_of_other_devices_says_what_to_type():
    """As when one device continues a run from the config.json of a run on several devices."""
    with pytest.raises(UserError, match="or shard over all with --config.mesh.fsdp=-1 --config.mesh.tensor=1$"):
        make_mesh(MeshOptions(fsdp=2, tensor=4), jax.devices()[:1])
    with pytest.raises(UserError, match=r"^mesh.tensor=3 does not divide the 8 devices, .* would: \[1, 2, 4, 8\]$"):
        make_mesh(MeshOptions(tensor=3), jax.devices())
    with pytest.raises(UserError, match=r"^mesh.fsdp=-1, mesh.tensor=-1: only one .* such as --config.mesh.fsdp=1$"):
        make_mesh(MeshOptions(tensor=-1), jax.devices())  # fsdp is -1, too, by default
