"""Guarantees for a run that saves, restores and removes its checkpoints."""

import logging
import time
from contextlib import ExitStack

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxtune.checkpoint import CheckpointManager, manifest
from jaxtune.checkpoint import folder as checkpoint_folder
from jaxtune.errors import UserError


def make_state(seed: int = 0):
    rng = np.random.default_rng(seed)
    params = {
        "layers": ({"weight": jnp.asarray(rng.normal(size=(4, 8)), jnp.float32)}, {"bias": jnp.ones(3, jnp.bfloat16)}),
        "packed": jnp.asarray(rng.integers(0, 256, (2, 5)), jnp.uint8),
    }
    trained = {"weight": jnp.asarray(rng.normal(size=(4, 8)), jnp.float32)}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    _, opt_state = optimizer.update(trained, optimizer.init(trained), trained)
    return {"params": params, "optimizer": opt_state, "step": jnp.int32(7)}


def abstract(state):
    sharding = SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state)


def assert_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected)):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_state_and_host_come_back_exactly(tmp_path):
    state = make_state()
    host = {
        "row": 2**53 + 1,
        "tokens": 10**18,
        "loss": 0.1 + 0.2,
        "tiny": 5e-324,
        "text": "zwölf \"'\n\0",
        "none": None,
    }
    writer = CheckpointManager(tmp_path)
    writer.save(3, state, host)
    writer.wait(final=True)
    reader = CheckpointManager(tmp_path)
    restored = reader.restore(abstract(state))
    assert restored.step == 3
    assert_same(restored.state, state)
    assert restored.host == host == reader.host() == reader.host(3)
    assert repr(restored.host) == repr(host)


@pytest.mark.parametrize("when", ["verified", "opened", "read"])
def test_a_checkpoint_that_a_run_removes_while_it_is_read_is_chosen_again(tmp_path, monkeypatch, when):
    """As in an export while the run saves newer ones; files may vanish before or after they are read."""
    state, writer = make_state(), CheckpointManager(tmp_path, keep_last=1)
    writer.save(1, state, {"at": 1})
    writer.wait(final=True)
    reader = CheckpointManager(tmp_path)
    home, name = {
        "verified": (checkpoint_folder.manifest, "verify"),
        "opened": (CheckpointManager, "_read_host"),
        "read": (CheckpointManager, "_read"),
    }[when]
    original = getattr(home, name)

    def interrupted(*arguments):
        monkeypatch.setattr(home, name, original)
        result = original(*arguments) if when == "read" else None
        writer.save(2, state, {"at": 2})  # which removes checkpoint 1
        writer.wait(final=True)
        return original(*arguments) if when != "read" else result

    monkeypatch.setattr(home, name, interrupted)
    restored = reader.restore(abstract(state))
    assert (restored.step, restored.host) == (2, {"at": 2})
    assert_same(restored.state, state)
    with pytest.raises(UserError, match=r"no checkpoint of step 1, only of \[2\]"):
        reader.restore(abstract(state), step=1)


def test_state_may_be_donated_while_the_save_is_under_way(tmp_path):
    state = {"weight": jnp.arange(1 << 20, dtype=jnp.float32)}
    manager = CheckpointManager(tmp_path)
    manager.save(1, state, {})
    change = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)
    for _ in range(10):
        state = change(state)
    restored = manager.restore(abstract(state))
    np.testing.assert_array_equal(restored.state["weight"], np.arange(1 << 20))


@pytest.mark.parametrize("error, is_saved", [(UserError("a reward failed"), True), (KeyboardInterrupt(), False)])
def test_a_save_under_way_is_completed_if_the_run_fails(tmp_path, monkeypatch, error, is_saved):
    measure = manifest.measure
    monkeypatch.setattr(manifest, "measure", lambda *of: time.sleep(0.5) or measure(*of))
    checkpoints = CheckpointManager(tmp_path)
    with pytest.raises(type(error)), ExitStack() as at_end:
        at_end.push(checkpoints.finish)
        checkpoints.save(1, make_state(), {})
        raise error
    assert checkpoints.steps() == [1] * is_saved
    checkpoints.wait()


def test_nothing_to_restore(tmp_path):
    manager = CheckpointManager(tmp_path / "not_there_yet")
    assert manager.steps() == []
    assert manager.restore(abstract(make_state())) is None
    assert manager.host() is None
    with pytest.raises(UserError, match="no checkpoint of step 5"):
        manager.restore(abstract(make_state()), step=5)


def test_a_chosen_step_is_restored(tmp_path):
    manager = CheckpointManager(tmp_path)
    for step in (1, 2):
        manager.save(step, {"x": jnp.full(3, step)}, {"row": step * 10})
    restored = manager.restore(abstract({"x": jnp.zeros(3, jnp.int32)}), step=1)
    assert (restored.step, restored.host, restored.state["x"].tolist()) == (1, {"row": 10}, [1, 1, 1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda params: params.pop("norm"), "params/norm is not in this run"),
        (lambda params: params.update(extra=jnp.zeros(2)), "params/extra is not in it"),
        (lambda params: params.update(norm=jnp.zeros(5)), r"params/norm is float32\[4\] in it and float32\[5\]"),
        (
            lambda params: params.update(norm=jnp.zeros(4, jnp.bfloat16)),
            r"norm is float32\[4\] in it and bfloat16",
        ),
    ],
)
def test_another_model_is_an_error_that_names_the_parameter(tmp_path, change, message):
    params = {"norm": jnp.zeros(4), "weight": jnp.zeros((2, 2))}
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"params": params}, {})
    change(params)
    with pytest.raises(UserError, match=message):
        manager.restore(abstract({"params": params}))


def test_keep_last(tmp_path):
    manager = CheckpointManager(tmp_path, keep_last=2)
    for step in (1, 2, 3, 4):
        manager.save(step, {"x": jnp.ones(2)}, {})
        manager.wait(final=True)
        assert manager.steps() == [1, 2, 3, 4][max(0, step - 2) : step]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "4"]
    with pytest.raises(UserError, match="keep_last"):
        CheckpointManager(tmp_path, keep_last=0)


def test_the_best_is_kept_besides_the_newest(tmp_path):
    manager, steps = CheckpointManager(tmp_path, keep_last=1), []
    for step, best in ((1, 1), (2, 1), (3, 1), (4, 4), (5, 4)):
        manager.save(step, {"x": jnp.full(2, step)}, {}, best=best)
        manager.wait(final=True)
        steps.append(manager.steps())
    assert steps == [[1], [1, 2], [1, 3], [4], [4, 5]]
    # A resumed run keeps it too, although it has neither saved nor restored it.
    again = CheckpointManager(tmp_path, keep_last=1)
    assert again.restore(abstract({"x": jnp.zeros(2, jnp.int32)})).step == 5
    again.save(6, {"x": jnp.full(2, 6)}, {}, best=4)
    again.wait(final=True)
    assert again.steps() == [4, 6]
    assert again.restore(abstract({"x": jnp.zeros(2, jnp.int32)}), step=4).state["x"].tolist() == [4, 4]


def test_a_restarted_run_counts_only_what_it_verified(tmp_path):
    state = {"x": jnp.ones(2)}
    first = CheckpointManager(tmp_path, keep_last=3)
    for step in (1, 2, 3):
        first.save(step, state, {})
    first.wait(final=True)
    second = CheckpointManager(tmp_path, keep_last=3)
    second.restore(abstract(state))
    steps = []
    for step in (4, 5):
        second.save(step, state, {})
        second.wait(final=True)
        steps.append(second.steps())
    assert steps == [[1, 2, 3, 4], [3, 4, 5]]


def test_a_run_taken_back_drops_its_former_future(tmp_path):
    manager = CheckpointManager(tmp_path, keep_last=3)
    for step in (1, 2, 3):
        manager.save(step, {"x": jnp.full(2, step)}, {})
    like = abstract({"x": jnp.zeros(2, jnp.int32)})
    again = CheckpointManager(tmp_path, keep_last=3)
    manager.wait(final=True)
    again.restore(like, step=1)
    assert again.steps() == [1, 2, 3]
    again.save(2, {"x": jnp.full(2, 20)}, {})
    again.wait(final=True)
    assert again.steps() == [1, 2]
    assert CheckpointManager(tmp_path).restore(like).state["x"].tolist() == [20, 20]


def test_a_step_is_saved_once(tmp_path):
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"x": jnp.ones(2)}, {"at": "interval"})
    manager.save(1, {"x": jnp.ones(2)}, {"at": "end"})
    manager.wait(final=True)
    assert manager.host() == {"at": "interval"}


def test_reading_removes_nothing(tmp_path):
    (tmp_path / "9.orbax-checkpoint-tmp").mkdir()
    (tmp_path / "8").mkdir()
    reader = CheckpointManager(tmp_path)
    assert reader.restore(abstract(make_state())) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["8", "9.orbax-checkpoint-tmp"]


def test_saving_is_quiet(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    manager = CheckpointManager(tmp_path)
    manager.save(1, make_state(), {})
    manager.restore(abstract(make_state()))
    assert [record.getMessage() for record in caplog.records if record.name in ("absl", "jaxtune")] == []


def test_one_device_to_eight_and_back(tmp_path):
    values = np.arange(64, dtype=np.float32).reshape(8, 8)
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"weight": jnp.asarray(values)}, {})
    manager.wait(final=True)
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Explicit,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec("fsdp", None))
    manager = CheckpointManager(tmp_path)
    with jax.set_mesh(mesh):
        restored = manager.restore({"weight": jax.ShapeDtypeStruct((8, 8), np.float32, sharding=sharding)})
        weight = restored.state["weight"]
        assert weight.sharding == sharding and weight.addressable_shards[0].data.shape == (2, 8)
        np.testing.assert_array_equal(weight, values)
        manager.save(2, {"weight": weight + 1}, {})
        manager.wait(final=True)
    again = CheckpointManager(tmp_path).restore(abstract({"weight": jnp.asarray(values)}))
    assert again.step == 2
    np.testing.assert_array_equal(again.state["weight"], values + 1)
