"""Settings of a process before it touches the first device."""

import dataclasses
import logging
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest

from jaxtune.config.schema import Config, DataOptions, Dataset, DeviceOptions, LogOptions, TrainOptions
from jaxtune.errors import UserError
from jaxtune.host import process
from jaxtune.monitor.progress import Progress


@pytest.mark.parametrize("own", ["", "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"])
def test_xla_takes_almost_all_of_a_gpu_unless_the_user_says_how_much(monkeypatch, own):
    """XLA's client refuses both names at the same time."""
    names = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
    for name in names:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    if own:
        monkeypatch.setenv(own, "0.5")
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "")
    monkeypatch.delenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/nowhere")
    monkeypatch.setattr(process.multihost, "initialize", lambda: None)
    monkeypatch.setattr(process, "_show_log", lambda options: None)
    process.configure(Config())
    assert int(os.environ["XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"]) > 1, "all of the host's memory"
    fractions = {name: os.environ[name] for name in names if name in os.environ}
    assert fractions == ({own: "0.5"} if own else {"XLA_CLIENT_MEM_FRACTION": "0.93"})


LOST = "UNKNOWN: Gloo all-reduce failed: Connection closed by peer"


@pytest.mark.parametrize("kind", [jax.errors.JaxRuntimeError, ValueError])
def test_a_lost_process_is_one_line_whatever_jax_raises(monkeypatch, capsys, kind):
    """jax raises ValueError if the other process ends while a program is being called, and JaxRuntimeError later."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(process.threading, "Timer", lambda *_: SimpleNamespace(start=lambda: None))
    with pytest.raises(SystemExit, match="1"), process.exit_after_failure():
        raise kind(LOST)
    assert LOST in capsys.readouterr().err
    with pytest.raises(kind, match="of this process"), process.exit_after_failure():
        raise kind("a fault of this process")


def test_processes_must_have_the_same_options_code_and_jax():
    same = process.facts(Config())
    assert same == process.facts(Config())
    assert same["jax"] == jax.__version__ and {"jaxlib", "code of jaxtune"} < {*same}
    changed = process.facts(Config(train=TrainOptions(seed=3), data=DataOptions(datasets=(Dataset(path="a.jsonl"),))))
    assert changed["train.seed"] == "3" != same["train.seed"] and changed["data.datasets.0.path"] == "'a.jsonl'"


def test_processes_that_differ_do_not_start(monkeypatch):
    monkeypatch.setattr(process.multihost, "initialize", lambda: None)
    monkeypatch.setattr(process, "_show_log", lambda options: None)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/nowhere")
    monkeypatch.setattr(jax, "process_count", lambda: 2)

    def differ(facts):
        raise UserError(f"train.seed: {facts['train.seed']}")

    monkeypatch.setattr(process.multihost, "agree", differ)
    with pytest.raises(UserError, match="train.seed: 3"):
        process.configure(Config(train=TrainOptions(seed=3)))


def test_the_code_is_its_names_and_its_content(tmp_path):
    def code():
        return process.digest([tmp_path])

    (tmp_path / "a.py").write_text("x = 1")
    before = code()
    (tmp_path / "data.json").write_text("{}")
    assert code() == before
    (tmp_path / "a.py").write_text("x = 2")
    changed = code()
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert len({before, changed, code()}) == 3


CONFIGURE = """
import jax, os, sys
from jaxtune.config.schema import Config, DeviceOptions
from jaxtune.errors import UserError
from jaxtune.host import process

if sys.argv[1] == "begun":
    jax.devices()
try:
    process.configure(Config(device=eval(sys.argv[2])))
except UserError as error:
    print("REFUSED", error)
else:
    print("RESULT", jax.default_backend(), jax.config.jax_platforms, len(process.devices(eval(sys.argv[2]))))
"""


def configure(device: DeviceOptions, when: str = "", **environment: str) -> str:
    """Return the last line of a new process with two CPU devices, without JAX_PLATFORMS by default."""
    left_out = {"JAX_PLATFORMS", "XLA_FLAGS"}
    env = {name: value for name, value in os.environ.items() if name not in left_out} | {"JAX_NUM_CPU_DEVICES": "2"}
    env |= {"JAX_COMPILATION_CACHE_DIR": "/nowhere", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", **environment}
    command = [sys.executable, "-c", CONFIGURE, when, repr(device)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_the_platform_is_chosen_before_jax_looks_for_devices():
    assert configure(DeviceOptions(platform="cpu", gpus=1)) == "RESULT cpu cpu 1"
    refused = configure(DeviceOptions(platform="cuda"), "begun", CUDA_VISIBLE_DEVICES="")
    assert refused.startswith("REFUSED device.platform = 'cuda': jax runs on 'cpu' here")


def test_a_platform_that_is_not_there_is_an_error():
    refused = configure(DeviceOptions(platform="cuda"), CUDA_VISIBLE_DEVICES="")
    assert refused.startswith("REFUSED device.platform = 'cuda': ") and "cuda" in refused.partition(":")[2]


@pytest.mark.parametrize(
    ("device", "part"),
    [
        (DeviceOptions(platform="cuda"), "device.platform = 'cuda': JAX_PLATFORMS is 'cpu'; remove one of the two"),
        (DeviceOptions(gpus=1000), "device.gpus = 1000: process 0 has 8 devices (cpu)"),
        (
            DeviceOptions(collective_timeout_seconds=60),
            "device.collective_timeout_seconds = 60: XLA has these limits only for GPUs",
        ),
        (DeviceOptions(command_buffers="off"), "device.command_buffers = 'off': only GPUs have CUDA graphs"),
    ],
    ids=lambda value: "" if isinstance(value, str) else value,
)
def test_an_option_of_the_device_that_cannot_take_effect_is_an_error(monkeypatch, device, part):
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    with pytest.raises(UserError) as refused:
        process.choose_platform(device)
        process.open_devices(device)
        process.devices(device)
        process.compiler_options(Config(device=device))
    assert part in str(refused.value)


def test_cpu_devices_of_the_same_platform_are_no_contradiction():
    process.choose_platform(DeviceOptions(platform="cpu"))
    process.open_devices(DeviceOptions(platform="cpu"))


def test_a_run_takes_the_first_devices_of_each_process(monkeypatch):
    devices = [SimpleNamespace(process_index=i // 4, id=i, platform="gpu") for i in range(8)]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    assert process.devices(DeviceOptions()) == devices
    assert [one.id for one in process.devices(DeviceOptions(gpus=3))] == [0, 1, 2, 4, 5, 6]
    monkeypatch.setattr(jax, "devices", lambda: devices[:6])
    with pytest.raises(UserError, match=r"device.gpus = 3: process 1 has 2 devices \(gpu\)"):
        process.devices(DeviceOptions(gpus=3))


@pytest.mark.parametrize(
    ("visible", "gpus", "opened"), [("all", 2, "0,1"), ("all", 9, "all"), ("4,5,6,7", 2, "4,5"), ("4,5", 3, "4,5")]
)
def test_gpus_that_a_run_does_not_take_are_not_opened(monkeypatch, visible, gpus, opened):
    """Nor are GPUs beyond a launcher's share; if there are too few, all stay visible, so that the error counts them."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    jax.config.update("jax_cuda_visible_devices", visible)
    try:
        process.open_devices(DeviceOptions(gpus=gpus))
        assert jax.config.values["jax_cuda_visible_devices"] == opened
    finally:
        jax.config.update("jax_cuda_visible_devices", "all")


def test_limits_of_collectives_reach_xla_and_do_not_replace_the_users(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/nowhere")
    for _ in range(2):  # another run in the same process logs the same
        process.choose_platform(DeviceOptions(collective_timeout_seconds=60))
    flags = os.environ["XLA_FLAGS"].split()
    assert flags == ["--xla_dump_to=/nowhere", *(f"--{name}=60" for name in process.COLLECTIVE_TIMEOUTS)]
    with pytest.raises(UserError, match="XLA_FLAGS sets xla_gpu_nccl_termination_timeout_seconds and .* remove one"):
        process.choose_platform(DeviceOptions(collective_timeout_seconds=90))


@pytest.mark.every_jax
def test_xla_knows_the_limits_of_collectives():
    """XLA ends a process with unknown flags; on a CPU the option is refused instead."""
    device = DeviceOptions(collective_timeout_seconds=60)
    assert configure(device).startswith(
        "REFUSED device.collective_timeout_seconds = 60: XLA has these limits only for GPUs"
    )
    flags = " ".join(f"--{name}=60" for name in process.COLLECTIVE_TIMEOUTS)
    assert configure(DeviceOptions(), XLA_FLAGS=flags, JAX_PLATFORMS="cpu") == "RESULT cpu cpu 2"


@pytest.fixture
def loggers():
    """Restore the loggers after the test."""
    known = [logging.getLogger(name) for name in ("jaxtune", "pallas_kernels", "jaxtune-progress")]
    before = [(logger.handlers, logger.propagate, logger.level) for logger in known]
    yield
    for logger, (handlers, propagate, level) in zip(known, before):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def test_messages_have_a_level_and_other_processes_a_number(monkeypatch, capsys, loggers):
    log = logging.getLogger("jaxtune")

    def shown(options: LogOptions, process_index: int) -> list[str]:
        monkeypatch.setattr(jax, "process_index", lambda: process_index)
        monkeypatch.setattr(process.multihost, "is_main", lambda: process_index == 0)
        process._show_log(options)
        log.debug("detail")
        log.info("news")
        log.warning("trouble")
        return capsys.readouterr().out.splitlines()

    assert shown(LogOptions(), 0) == ["news", "warning: trouble"]
    assert shown(LogOptions(level="debug"), 0) == ["detail", "news", "warning: trouble"]
    assert shown(LogOptions(level="error"), 0) == []
    assert shown(LogOptions(), 3) == ["process 3: warning: trouble"]
    assert shown(LogOptions(every_process=True), 3) == ["process 3: news", "process 3: warning: trouble"]


def test_what_is_shown_is_in_the_file_too(tmp_path, capsys, loggers):
    process._show_log(LogOptions())
    config = Config()
    for run in range(2):  # the second appends to the first one's file
        with process.log_to_file(config, tmp_path):
            logging.getLogger("jaxtune").info("run %d", run)
            progress = Progress(4, 0, 2)
            for step in range(1, 5):
                progress.update(step, {"loss": 1.5})
            progress.message("step 4: saved")
            progress.close()
    logging.getLogger("jaxtune").info("outside")
    lines = [line.split("  ", 1) for line in (tmp_path / "run.log").read_text().splitlines()]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", time) for time, _ in lines)
    texts = [text for _, text in lines]
    assert texts[0] == "run 0" and texts[4] == "run 1" and texts[3] == texts[7] == "step 4: saved" and len(texts) == 8
    assert texts[1].startswith("step 2/4  ") and "loss 1.5000" in texts[2]
    assert capsys.readouterr().out.splitlines()[-1] == "outside"
    with (
        pytest.raises(UserError),
        process.log_to_file(dataclasses.replace(config, notes=("a note",)), tmp_path / "bad"),
    ):
        raise UserError("no such file")
    assert [line.split("  ")[1] for line in (tmp_path / "bad" / "run.log").read_text().splitlines()] == [
        "a note",
        "error: no such file",
    ]
    elsewhere = dataclasses.replace(config, log=LogOptions(file=str(tmp_path / "there" / "own.log")))
    with process.log_to_file(elsewhere, tmp_path / "run"):
        logging.getLogger("jaxtune").warning("there")
    assert "  warning: there\n" in (tmp_path / "there" / "own.log").read_text()
    with process.log_to_file(dataclasses.replace(config, log=LogOptions(file=None)), tmp_path / "none"):
        logging.getLogger("jaxtune").info("nowhere")
    assert not (tmp_path / "none").exists()
