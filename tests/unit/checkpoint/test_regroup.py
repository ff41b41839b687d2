"""A saved state is restored into any grouping of layers into stacks, whatever grouping it was saved with."""

import json
import shutil
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import call, metrics, recipe

from jaxtune.checkpoint import CheckpointManager, manifest
from jaxtune.checkpoint.manager import FORMAT
from jaxtune.checkpoint.regroup import pieces
from jaxtune.errors import UserError
from jaxtune.host.run_folder import RunFolder
from jaxtune.models.structure.stack_spec import StackSpec
from jaxtune.optim.build import Trained, build
from jaxtune.optim.options import OptimOptions
from jaxtune.parallel.mesh import make_mesh
from jaxtune.parallel.options import MeshOptions
from jaxtune.precision import loss_scale
from jaxtune.training.state import Scaling
from jaxtune.weights.values import open_run

LAYERS = 5
OPTIMIZERS = ("adamw", "adamw_8bit", "sgd", "adafactor", "lion", "schedule_free", "muon", "normuon")
# Local names: shape of a layer, and its sharding.
IN_LAYERS = {"mlp.up.weight": ((128, 256), (None, "fsdp")), "attention.q.bias": ((64,), (None,))}
OUTSIDE = {"embed.weight": ((64, 128), (None, "fsdp"))}


def group(*stacks):
    """Return the grouping of layers into these stacks."""
    names = {f"stacks.{i}.blocks.0.{local}": (local, layers) for i, layers in enumerate(stacks) for local in IN_LAYERS}
    return {**names, **{name: (name, ()) for name in OUTSIDE}}


def at_random(seed):
    """Draw a random grouping of five layers into stacks, in any order."""
    rng = np.random.default_rng(seed)
    stacks = {}
    for layer in rng.permutation(LAYERS).tolist():
        stacks.setdefault(int(rng.integers(3)), []).append(layer)
    return group(*(tuple(layers) for layers in stacks.values()))


def abstract(grouping, mesh, optimizers=OPTIMIZERS):
    """Return shapes of the trained parameters, each optimizer's state, and the scales that recipes carry along."""

    def one(local, layers):
        shape, axes = (IN_LAYERS | OUTSIDE)[local]
        if layers:
            shape, axes = (len(layers), *shape), (None, *axes)
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=jax.NamedSharding(mesh, jax.P(*axes)))

    trained = {name: one(*where) for name, where in grouping.items()}
    about = {
        name: Trained(tuple(map(str, layers)) or (name,), (len(layers),) if layers else (), local == "mlp.up.weight")
        for name, (local, layers) in grouping.items()
    }
    rules = {name: jax.eval_shape(build(OptimOptions(name=name), about, LAYERS).init, trained) for name in optimizers}
    amax = {
        name: jax.ShapeDtypeStruct((len(layers), 2, 4), jnp.float32) for name, (_, layers) in grouping.items() if layers
    }
    scaling = jax.eval_shape(lambda: Scaling(loss_scale.initial(2.0), jax.tree.map(jnp.zeros_like, amax)))

    def on_mesh(leaf):
        spec = jax.P() if leaf.sharding is None else leaf.sharding.spec
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=jax.NamedSharding(mesh, spec))

    return jax.tree.map(on_mesh, {"trained": trained, "optimizer": rules, "scaling": scaling})


def fill(shapes, grouping):
    """Return values that depend on the leaf and the layer, not on the stack."""

    def draw(path_of_leaf, shape, dtype):
        return (np.random.default_rng(zlib.crc32(path_of_leaf.encode())).random(shape) * 200).astype(dtype)

    def one(path, leaf):
        path_of_leaf = jax.tree_util.keystr(path)
        name = next((name for name in grouping if repr(name) in path_of_leaf), None)
        local, layers = grouping.get(name, ("", ()))
        path_of_leaf = path_of_leaf.replace(str(name), local)
        if not (layers and leaf.shape):
            return jax.device_put(draw(path_of_leaf, leaf.shape, leaf.dtype), leaf.sharding)
        values = [draw(f"{path_of_leaf} {layer}", leaf.shape[1:], leaf.dtype) for layer in layers]
        return jax.device_put(np.stack(values), leaf.sharding)

    return jax.tree_util.tree_map_with_path(one, shapes)


def assert_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected)):
        assert (one.dtype, one.sharding) == (other.dtype, other.sharding)
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize("seed", range(2))
def test_any_grouping_restores_as_any_other(tmp_path, seed):
    mesh = make_mesh(MeshOptions(fsdp=2), jax.devices()[:2])
    before, after = at_random(seed), at_random(seed + 100)
    manager = CheckpointManager(tmp_path)
    manager.save(1, fill(abstract(before, mesh), before), {"row": 7}, before)
    manager.wait(final=True)
    wanted = abstract(after, mesh)
    restored = manager.restore(wanted, grouping=after)
    assert restored.host == {"row": 7}
    assert_same(restored.state, fill(wanted, after))
    part = {"trained": wanted["trained"]}
    assert_same(manager.restore(part, part=True, grouping=after).state, fill(part, after))


def test_layers_may_be_spread_over_devices(tmp_path):
    """As for pipeline stages; also in host memory."""
    mesh = make_mesh(MeshOptions(data=2, fsdp=2), jax.devices()[:4])
    values = np.arange(4 * 8 * 8, dtype=np.float32).reshape(4, 8, 8)
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"one": jnp.asarray(values)}, {}, {"one": ("local", (0, 1, 2, 3))})
    places = jax.P("data", None, "fsdp"), jax.P(None, "fsdp")
    shardings = [jax.NamedSharding(mesh, place, memory_kind="pinned_host") for place in places]
    wanted = [jax.ShapeDtypeStruct((2, 8, 8), jnp.float32, sharding=sharding) for sharding in shardings]
    grouping = {"0": ("local", (1, 3)), "1": ("local", (2, 0))}
    one, other = manager.restore(wanted, grouping=grouping).state
    assert [one.sharding, other.sharding] == shardings
    np.testing.assert_array_equal(one, values[[1, 3]])
    np.testing.assert_array_equal(other, values[[2, 0]])


@pytest.fixture
def saved(tmp_path, one_device):
    """Return a manager that saved layers 0 to 2 in one stack, and 3 and 4 in another."""
    manager, grouping = CheckpointManager(tmp_path), group((0, 1, 2), (3, 4))
    manager.save(1, fill(abstract(grouping, one_device, ("schedule_free",)), grouping), {}, grouping)
    manager.wait(final=True)
    return manager


def restore(manager, grouping, change=lambda state: None, **options):
    state = abstract(grouping, jax.sharding.get_mesh(), ("schedule_free",))
    change(state)
    return manager.restore(state, grouping=grouping, **options)


def test_the_same_grouping_is_read_at_once(saved, monkeypatch):
    monkeypatch.setattr("jaxtune.checkpoint.regroup._join", None)
    grouping = group((0, 1, 2), (3, 4))
    assert_same(restore(saved, grouping).state["trained"], fill(restore(saved, grouping).state, grouping)["trained"])


def test_what_differs_is_named_by_its_layer(saved):
    with pytest.raises(UserError, match=r"trained/attention\.q\.bias of layer 5 is not in it"):
        restore(
            saved, group((0, 1, 2, 3, 4, 5)), lambda state: [state.pop("optimizer"), state.pop("scaling")], part=True
        )
    with pytest.raises(UserError, match=r"q\.bias/max_lr of layer 4 is not in this run \(and 11 more differences\)"):
        restore(saved, group((0, 1, 2, 3)))

    def longer(state):
        bias = state["trained"]["stacks.0.blocks.0.attention.q.bias"]
        state["trained"]["stacks.0.blocks.0.attention.q.bias"] = bias.update(shape=(5, 65))

    with pytest.raises(UserError, match=r"bias of layer 0 is float32\[1, 64\] in it and float32\[1, 65\] in this run"):
        restore(saved, group((0, 1, 2, 3, 4)), longer)


def test_a_number_that_stacks_do_not_share_cannot_be_joined(tmp_path, one_device):
    before, after = group((0, 1), (2, 3, 4)), group((0, 1, 2, 3, 4))
    state = fill(abstract(before, one_device, ("schedule_free",)), before)
    rule = state["optimizer"]["schedule_free"].rules["stacks.1.blocks.0.mlp.up.weight"]
    rule["max_lr"] = rule["max_lr"] + 1
    manager = CheckpointManager(tmp_path)
    manager.save(1, state, {}, before)
    with pytest.raises(UserError, match=r"mlp\.up\.weight/max_lr is not the same in .*stacks\.0.* and .*stacks\.1"):
        restore(manager, after)


def test_a_leaf_without_its_layers_is_a_mistake_of_the_program():
    leaves = {"mu/a": jax.ShapeDtypeStruct((3, 2), jnp.float32)}
    with pytest.raises(ValueError, match="mu/a .* does not have the 2 layers"):
        pieces(leaves, {"a": ("local", (0, 1))})
    with pytest.raises(ValueError, match="mu/a and mu/b both have mu/local of layer 1"):
        pieces({"mu/b": leaves["mu/a"], **leaves}, {"a": ("local", (0, 1, 2)), "b": ("local", (1, 3, 4))})


def test_a_newer_format_is_refused_in_one_line(saved, tmp_path):
    host = tmp_path / "1" / "host.json"
    host.write_text(json.dumps(json.loads(host.read_text()) | {"format": FORMAT + 1}))
    manifest.write(tmp_path / "1")
    for read in (saved.host, lambda: restore(saved, group((0, 1, 2, 3, 4)))):
        with pytest.raises(UserError, match="of a newer jaxtune") as refusal:
            read()
        assert "\n" not in str(refusal.value)


def test_a_run_goes_on_and_is_opened_in_other_stacks(tmp_path, monkeypatch):
    options = {"train.max_steps": 4, "ckpt.save_steps": 2, "data.validation_split": 0.0, "export.at_end": False}
    command = f"--config={recipe(tmp_path)}", *(f"--config.{key}={value}" for key, value in options.items())
    call("jaxtune.train", *command)
    folder = RunFolder(tmp_path / "runs" / "tiny")
    expected = metrics(folder.path)
    shutil.rmtree(folder.checkpoints / "4")

    def opened():
        run = open_run(folder, make_mesh(MeshOptions(), jax.devices()[:1]), None)
        values = {name: np.asarray(run.trained[name]) for name in run.model.trained}
        return {
            (local, layer): values[name][index] if layers else values[name]
            for name, (local, layers) in run.model.grouping.items()
            for index, layer in enumerate(layers or [None])
        }, set(values)

    def one_each(spec):
        return tuple(StackSpec(number, (layer,), 1) for number, layer in enumerate(spec.layers))

    before, names = opened()
    monkeypatch.setattr("jaxtune.models.structure.model_spec.ModelSpec.stacks", property(one_each))
    after, other_names = opened()
    assert names < other_names and before.keys() == after.keys()
    jax.tree.map(np.testing.assert_array_equal, before, after)

    assert "resumed from step 2" in call("jaxtune.train", *command)
    rows = metrics(folder.path)
    assert [row["step"] for row in rows] == [row["step"] for row in expected]
    np.testing.assert_allclose([row["loss"] for row in rows], [row["loss"] for row in expected], rtol=1e-6)
