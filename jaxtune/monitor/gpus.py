"""How the GPUs of this process are used, as NVIDIA's driver counts it (NVML, of the package nvidia-ml-py)."""

import importlib
import logging
import os
from collections.abc import Callable
from typing import Any

import jax

from jaxtune.errors import UserError

log = logging.getLogger("jaxtune")


class Gpus:
    """Readings of this process's GPUs; where it has none, there are none."""

    def __init__(self) -> None:
        """Raises UserError where there are GPUs, and the package is missing or NVML does not know them.

        A reading that the driver does not have, as on a part of a GPU, is said once and left out.
        """
        devices = [device for device in jax.local_devices() if device.platform == "gpu"]
        self._readings: dict[str, Callable[[], float]] = {}
        if not devices:
            return
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError as error:
            raise UserError("log.gpu_every needs the package nvidia-ml-py: pip install 'jaxtune[nvml]'") from error
        self._error = nvml.NVMLError
        try:
            nvml.nvmlInit()
            gpus = [_handle(nvml, device.local_hardware_id) for device in devices]
        except nvml.NVMLError as error:
            raise UserError(f"log.gpu_every: NVML does not answer: {error}; leave it out") from error
        self._readings = {
            "gpu_utilization": lambda: sum(nvml.nvmlDeviceGetUtilizationRates(g).gpu for g in gpus) / len(gpus) / 100,
            "gpu_memory_bytes": lambda: max(nvml.nvmlDeviceGetMemoryInfo(gpu).used for gpu in gpus),
            "gpu_power_watts": lambda: sum(nvml.nvmlDeviceGetPowerUsage(gpu) for gpu in gpus) / 1000,
        }
        self.read()

    def read(self) -> dict[str, float]:
        """Of this process's GPUs: the mean utilization, a fraction; of the fullest one the bytes in use; the power."""
        found = {}
        for name, reading in list(self._readings.items()):
            try:
                found[name] = reading()
            except self._error as error:
                log.warning("log.gpu_every: %s cannot be read: %s", name, error)
                del self._readings[name]
        return found


def _handle(nvml: Any, ordinal: int) -> Any:
    """That of the GPU which CUDA numbers so; NVML numbers all GPUs, also those that CUDA_VISIBLE_DEVICES hides."""
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    name = visible[ordinal] if ordinal < len(visible) else str(ordinal)
    return nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdecimal() else nvml.nvmlDeviceGetHandleByUUID(name)
