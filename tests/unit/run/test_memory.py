"""A run's need of memory is compared with the limit before anything is read; errors suggest options with figures."""

import errno
import os
import re
import resource
from types import SimpleNamespace

import jax
import pytest
from nightly_rows import nightly
from runs import call, recipe

from jaxtune.config.schema import Config, DataOptions, Dataset, ModelOptions
from jaxtune.errors import UserError
from jaxtune.parallel.options import MemoryOptions
from jaxtune.training import memory
from jaxtune.training.memory import Limit, explain_out_of_memory, host_memory


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home")
    recipe(folder)
    return folder


@pytest.fixture
def train(home, monkeypatch):
    """Run `jaxtune train` on a host with `size` bytes and return its output. The process itself counts as 0 bytes."""
    monkeypatch.setattr(memory, "PROCESS", 0)

    def run(size: float, name: str, *options, code: int):
        monkeypatch.setattr(memory, "host_memory", lambda: Limit(int(size), "free on this host"))
        settings = [f"--config.{option}" for option in (f"train.run_name={name}", "train.max_steps=2", *options)]
        return call("jaxtune.train", f"--config={home / 'tiny.py'}", *settings, code=code)

    return run


def on_a_gpu(monkeypatch):
    """Let a run try the variants of its step as on one GPU."""
    variants = memory.variants
    monkeypatch.setattr(memory, "variants", lambda config, program, *_: variants(config, program, "gpu", 1))


def figures(output: str) -> list[float]:
    """Return the figures in MB of an error: the need, and the need with each suggestion."""
    error = output.partition("error: ")[2]
    return [float(figure) for figure in re.findall(r"(?:needs|:) ([\d.]+) MB(?: of|$)", error, re.MULTILINE)]


def test_a_state_that_does_not_fit_is_refused_before_data_is_read(train, home):
    output = train(1, "state", code=2)
    assert " MB of 0.0 kB (free on this host): for a device " in output
    assert (
        "lora.enabled=True" in output and "optim.name='adamw_8bit'" in output and "memory.check='warn' tries" in output
    )
    assert "remat" not in output  # the state does not depend on it
    assert not (home / "runs" / "state" / "config.json").exists() and not (home / "runs" / "cache").exists()


def test_too_little_for_a_process_that_compiles_is_refused_not_killed(train, monkeypatch):
    monkeypatch.setattr(memory, "PROCESS", 240_000_000)
    assert "240.0 MB for the process itself" in train(230e6, "process", code=2)


def test_a_step_that_does_not_fit_is_refused_with_what_would_help_in_order(train):
    rows = "train.micro_batch_size=64"
    size, *_ = figures(train(1, "step", rows, code=2))
    output = train((size + 1) * 1e6, "step", rows, code=2)
    assert "memory per device" in output and "data.seq_len=32" in output and "memory.remat='block'" in output
    assert "train.micro_batch_size=32 and train.grad_accum_steps=2, the same steps" in output
    need, *with_options = figures(output)
    assert with_options == sorted(with_options) and len(with_options) >= 3 and with_options[-1] < need


@pytest.mark.parametrize(
    ("options", "weights", "platform", "devices", "first"),
    [
        ({}, memory.UNROLLED_WEIGHTS, "gpu", 1, ("none", True)),
        ({}, memory.UNROLLED_WEIGHTS + 1, "gpu", 1, ("none", None)),
        ({}, 1, "gpu", 2, ("none", None)),
        ({}, 1, "cpu", 1, ("block", None)),
        ({"unroll": False}, 1, "gpu", 1, ("none", False)),
        ({"remat": "none"}, 1, "gpu", 1, ("none", True)),
        ({"remat": "block"}, 1, "gpu", 1, ("block", None)),
    ],
)
def test_layers_of_a_small_model_are_unrolled_on_one_gpu_if_nothing_is_recomputed(
    options, weights, platform, devices, first
):
    config = Config(memory=MemoryOptions(**options))
    program = SimpleNamespace(model=SimpleNamespace(parameters={"weight": SimpleNamespace(shape=(1, weights))}))
    made = [(one.memory.remat, one.memory.unroll) for one in memory.variants(config, program, platform, devices)]
    assert made[0] == first and not any(unroll for _, unroll in made[1:])
    assert len({remat for remat, _ in made}) == (4 if platform == "gpu" and "remat" not in options else 1)


@pytest.mark.parametrize(
    ("options", "before", "first"),
    [
        ({}, {}, ("none", True)),
        ({}, {"remat": "none", "unroll": True}, ("none", True)),
        ({}, {"remat": "none"}, ("none", None)),  # a checkpoint of an older version
        ({}, {"remat": "none", "unroll": False}, ("none", None)),
        ({}, {"remat": "block", "unroll": False}, ("block", None)),
        ({"unroll": True}, {"remat": "block", "unroll": False}, ("block", True)),
        ({"unroll": False}, {"remat": "none", "unroll": True}, ("none", False)),
        ({"remat": "dots"}, {"remat": "block", "unroll": False}, ("dots", None)),
    ],
)
def test_a_resumed_run_takes_the_variant_of_its_checkpoint_or_one_that_needs_less(options, before, first):
    program = SimpleNamespace(model=SimpleNamespace(parameters={"weight": SimpleNamespace(shape=(1, 1))}))
    variants = memory.variants(Config(memory=MemoryOptions(**options)), program, "gpu", 1)
    chosen, *_ = memory.continuing(variants, before)
    assert (chosen.memory.remat, chosen.memory.unroll) == first


@pytest.mark.parametrize(
    ("before", "said"),
    [
        ({}, []),  # not resumed
        ({"remat": "none"}, []),  # a checkpoint of an older version
        ({"remat": "none", "unroll": False}, []),
        ({"remat": "none", "unroll": True}, ["memory.unroll was True and is False now"]),
        (
            {"remat": "block", "unroll": True},
            ["memory.remat was 'block' and is 'none' now", "memory.unroll was True and is False now"],
        ),
    ],
)
def test_a_resumed_run_says_that_it_rounds_differently(caplog, before, said):
    memory.warn_changed(before, {"remat": "none", "unroll": False})
    assert [message.split(": ")[0] for message in caplog.messages] == said


@pytest.mark.nightly
def test_the_first_rematerialisation_policy_that_fits_is_taken_and_kept_on_resume(train, monkeypatch):
    on_a_gpu(monkeypatch)
    monkeypatch.setattr(memory, "_smaller", lambda config: iter(()))  # other suggestions need not be compiled here
    auto = ("memory.remat=auto", "train.micro_batch_size=64", "ckpt.save_steps=1", "export.at_end=False")
    for steps in (1, 2):  # the second continues the first
        output = train(1e12, "roomy", *auto, f"train.max_steps={steps}", code=0)
        assert "memory.remat='auto' takes 'none'" in output and "layers are compiled one by one" in output
    state = figures(train(1, "state", *auto, code=2))[0]
    needed = {
        policy: figures(train(1e6 * (state + 1), policy, f"memory.remat={policy}", *auto[1:], code=2))[0]
        for policy in ("none", "block")
    }
    assert needed["block"] < 0.9 * needed["none"]
    enough = 1e6 * (needed["block"] + 1) / memory.CLOSE
    output = train(enough, "auto", *auto, "train.max_steps=1", code=0)
    assert "memory.remat='none' with memory.unroll would need" in output and "memory.remat='none' would need" in output
    for said in (output, train(1e12, "auto", *auto, code=0)):
        assert "memory.remat='auto' takes 'block'" in said and "layers are compiled" not in said


def test_where_every_policy_is_close_to_the_limit_the_one_with_most_room_is_taken(train, monkeypatch):
    on_a_gpu(monkeypatch)
    monkeypatch.setattr(memory, "CLOSE", 0.0)
    output = train(1e12, "tight", "memory.remat=auto", "train.micro_batch_size=64", code=0)
    needs = {policy: float(size) for policy, size in re.findall(r"remat='(\w+)' would need ([\d.]+) MB", output)}
    assert list(needs) == ["none", "dots", "block"] and needs["block"] == min(needs.values())
    assert "memory.remat='auto' takes 'block'" in output  # offloading saves nothing on a CPU


@pytest.mark.parametrize(("check", "said"), [("warn", True), nightly("off", False)])
def test_a_user_may_try_all_the_same(train, check, said):
    output = train(1, check, f"memory.check={check}", code=0)
    assert ("it may not fit" in output) == said


def test_what_is_close_is_a_warning(train, monkeypatch):
    monkeypatch.setattr(memory, "CLOSE", 0.0)
    assert "it may not fit" in train(1e12, "close", code=0)


@pytest.mark.parametrize(
    "error",
    [
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes."),
        MemoryError(),
        RuntimeError("can't start new thread"),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
        ImportError("libgomp.so.1: failed to map segment from shared object"),
    ],
)
def test_running_out_all_the_same_is_one_answer(error):
    config = Config(model=ModelOptions(path="model"), data=DataOptions(datasets=(Dataset(path="data"),)))
    refused = pytest.raises(UserError, match="out of memory.*optim.name='adamw_8bit'.*RUN/config.json resumes")
    with refused, explain_out_of_memory(config):
        raise error


@pytest.mark.parametrize(
    "error",
    [jax.errors.JaxRuntimeError("INTERNAL: something else"), OSError(errno.ENOSPC, "No space left"), ValueError("no")],
)
def test_other_errors_stay_what_they_are(error):
    with pytest.raises(type(error)), explain_out_of_memory(Config()):
        raise error


def test_a_limit_of_the_process_counts(monkeypatch):
    free = host_memory().size
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    assert 0 < free < 2**50 and soft == resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda which: (2**62, hard))
    assert host_memory().size <= free * 1.1
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1, hard))
    assert host_memory() == Limit(0, "limit of this process's address space")


@pytest.mark.parametrize("version", [1, 2])
def test_a_limit_of_a_cgroup_counts_and_its_page_cache_does_not(tmp_path, version):
    limit, usage, cached = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "cache"),
        2: ("memory.max", "memory.current", "file"),
    }[version]
    folder = tmp_path / "cgroup" / ("memory" if version == 1 else "") / "jobs"
    (folder / "mine").mkdir(parents=True)
    (tmp_path / "own").write_text("4:cpu,memory:/jobs/mine\n" if version == 1 else "0::/jobs/mine\n")
    for group, size in ((folder, "5000"), (folder / "mine", "max" if version == 2 else str(2**60))):
        (group / limit).write_text(size)
        (group / usage).write_text("3000")
        (group / "memory.stat").write_text(f"anon 2000\n{cached} 1000\n")
    limits = list(memory._cgroup_limits(tmp_path / "cgroup", tmp_path / "own"))
    assert min(limits) == Limit(3000, f"memory limit of the cgroup {folder}")
