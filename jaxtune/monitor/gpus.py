"""How the GPUs of this process are used, as NVIDIA's driver counts it (NVML, of the package nvidia-ml-py)."""

import importlib
from typing import Any

import jax

from jaxtune.errors import UserError


class Gpus:
    """Readings of this process's GPUs; where it has none, there are none."""

    def __init__(self) -> None:
        """Raises UserError where there are GPUs, and the package is missing or NVML does not know them."""
        devices = [device for device in jax.local_devices() if device.platform == "gpu"]
        self._handles: list[Any] = []
        if not devices:
            return
        try:
            self._nvml = importlib.import_module("pynvml")
        except ImportError as error:
            raise UserError("log.gpu_every needs the package nvidia-ml-py: pip install nvidia-ml-py") from error
        try:
            self._nvml.nvmlInit()
            self._handles = [self._nvml.nvmlDeviceGetHandleByIndex(device.local_hardware_id) for device in devices]
        except self._nvml.NVMLError as error:
            raise UserError(f"log.gpu_every: NVML does not answer: {error}; leave it out") from error

    def read(self) -> dict[str, float]:
        """Of this process's GPUs: the mean utilization, a fraction; of the fullest one the bytes in use; the power."""
        if not self._handles:
            return {}
        nvml = self._nvml
        rates = [nvml.nvmlDeviceGetUtilizationRates(handle).gpu for handle in self._handles]
        return {
            "gpu_utilization": sum(rates) / len(rates) / 100,
            "gpu_memory_bytes": max(nvml.nvmlDeviceGetMemoryInfo(handle).used for handle in self._handles),
            "gpu_power_watts": sum(nvml.nvmlDeviceGetPowerUsage(handle) for handle in self._handles) / 1000,
        }
