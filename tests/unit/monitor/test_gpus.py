"""Readings of NVML, replaced here by a module of the same form: test machines have no GPU."""

import sys
from types import SimpleNamespace

import jax
import pytest

from jaxtune.errors import UserError
from jaxtune.monitor.gpus import Gpus


class NVMLError(Exception):
    """NVML's error."""


NVML = SimpleNamespace(
    NVMLError=NVMLError,
    nvmlInit=lambda: None,
    nvmlDeviceGetHandleByIndex=lambda index: index,
    nvmlDeviceGetHandleByUUID=lambda uuid: {"GPU-b": 7}[uuid],
    nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=90 + handle, memory=50),
    nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=7_000_000_000 + handle, total=80_000_000_000),
    nvmlDeviceGetPowerUsage=lambda handle: 350_000 + 1000 * handle,
)


@pytest.fixture
def two_gpus(monkeypatch):
    devices = [SimpleNamespace(platform="gpu", local_hardware_id=index) for index in (0, 4)]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_the_gpus_of_this_process_are_read(two_gpus, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", NVML)
    assert Gpus().read() == {"gpu_utilization": 0.92, "gpu_memory_bytes": 7_000_000_004, "gpu_power_watts": 704.0}


def test_without_gpus_there_is_nothing_to_read(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Gpus().read() == {}


def test_what_is_missing_is_said(two_gpus, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(UserError, match="log.gpu_every needs .* pip install .jaxtune.nvml.."):
        Gpus()

    def fail():
        raise NVMLError("Driver Not Loaded")

    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(**{**vars(NVML), "nvmlInit": fail}))
    with pytest.raises(UserError, match="NVML does not answer: Driver Not Loaded"):
        Gpus()


def test_those_that_cuda_hides_are_not_read(two_gpus, monkeypatch):
    """CUDA numbers or names only visible GPUs; NVML counts all."""
    monkeypatch.setitem(sys.modules, "pynvml", NVML)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,1,2,3,GPU-b")
    assert Gpus().read()["gpu_memory_bytes"] == 7_000_000_007
    assert Gpus().read()["gpu_power_watts"] == 350 + 6 + 350 + 7


def test_what_a_driver_does_not_have_is_said_once(two_gpus, monkeypatch, caplog):
    def fail(handle):
        raise NVMLError("Not Supported")

    without = SimpleNamespace(**{**vars(NVML), "nvmlDeviceGetUtilizationRates": fail})
    monkeypatch.setitem(sys.modules, "pynvml", without)
    gpus = Gpus()
    assert gpus.read().keys() == gpus.read().keys() == {"gpu_memory_bytes", "gpu_power_watts"}
    assert caplog.text.count("gpu_utilization cannot be read: Not Supported") == 1
