"""Utilization, memory and power of this process's GPUs, by NVIDIA's driver (NVML, package nvidia-ml-py)."""

import importlib
import logging
import os
from collections.abc import Callable
from typing import Any

import jax

from jaxtune.errors import UserError

log = logging.getLogger("jaxtune")


class Gpus:
    """Readings of this process's GPUs; a process without GPUs has no readings."""

    def __init__(self) -> None:
        """Open NVML. Raises UserError if there are GPUs, and the package is missing or NVML does not know them.

        A reading that the driver lacks, as on a MIG slice, is reported once and left out.
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
            "gpu_power_watts": lambda: sum(nvml.nvmlDeviceGetPowerUsage(gpu) for gpu in gpus) / 1000,  # from mW
        }
        self.read()

    def read(self) -> dict[str, float]:
        """Mean utilization (a fraction), bytes in use on the fullest GPU, and total power of this process's GPUs."""
        values = {}
        for name, reading in list(self._readings.items()):
            try:
                values[name] = reading()
            except self._error as error:
                log.warning("log.gpu_every: %s cannot be read: %s", name, error)
                del self._readings[name]
        return values


def _handle(nvml: Any, ordinal: int) -> Any:
    """NVML's handle of a GPU by CUDA's number; NVML also counts the GPUs that CUDA_VISIBLE_DEVICES hides."""
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    # CUDA_VISIBLE_DEVICES lists numbers or UUIDs (GPU-..., MIG-...).
    name = visible[ordinal] if ordinal < len(visible) else str(ordinal)
    return nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdecimal() else nvml.nvmlDeviceGetHandleByUUID(name)
