"""The GPUs that are known, with their limits and peaks, and the device that a computation is being traced for."""

import re
from dataclasses import dataclass
from typing import Any

Capability = tuple[int, int]


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU: XLA's name for it, and its limits (sizes in bytes, rates in bytes per second, clock in Hz).

    Attributes:
        kind: XLA's name, the `device_kind` of its devices.
        links: what it sends, in one direction: to GPUs of its host by NVLink or PCIe; to GPUs of other hosts by one
            adapter per GPU of 400 Gb/s (assumed; A100: 200, L40S: 100, GeForce: 10 Gb/s per host).
        pcie: from or to its host, in one direction; PCIe 4.0 or 5.0 x16.
        stand_in: another kind of the same architecture, given if Pallas does not know this kind's name. Pallas compiles
            for an absent GPU by name only.
    """

    kind: str
    capability: Capability
    multiprocessors: int
    shared_memory_per_block: int
    shared_memory_per_multiprocessor: int
    threads_per_multiprocessor: int
    blocks_per_multiprocessor: int
    memory: int
    memory_bandwidth: int
    l2_cache: int
    clock: float
    links: tuple[float, float]
    pcie: float
    stand_in: str | None = None

    @property
    def target(self) -> str:
        """The kind of compile-only devices for this GPU."""
        return self.stand_in or self.kind

    @property
    def registers_per_multiprocessor(self) -> int:
        """Number of 32-bit registers; the same on every GPU since Kepler."""
        return 65536


# Figures from NVIDIA's data sheets and XLA's own target descriptions (openxla/xla, backends/gpu/target_config/specs).
GPUS = {
    "a100": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 166912, 167936, 2048, 32, 85100068864, 2039040000000, 41943040,
                1.41e9, (300e9, 25e9), 32e9),
    "l40s": Gpu("NVIDIA L40S", (8, 9), 142, 101376, 102400, 1536, 24, 48305799168, 864000000000, 100663296,
                2.52e9, (32e9, 12.5e9), 32e9, "NVIDIA L40"),
    "rtx4090": Gpu("NVIDIA GeForce RTX 4090", (8, 9), 128, 101376, 102400, 1536, 24, 25757220864, 1008096000000,
                   75497472, 2.52e9, (32e9, 1.5e9), 32e9),
    "h100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 232448, 233472, 2048, 32, 84942979072, 3352320000000, 52428800,
                1.98e9, (450e9, 50e9), 64e9),
    "h200": Gpu("NVIDIA H200", (9, 0), 132, 232448, 233472, 2048, 32, 151397597184, 4800000000000, 52428800,
                1.98e9, (450e9, 50e9), 64e9),
    "b200": Gpu("NVIDIA B200", (10, 0), 148, 232448, 233472, 2048, 32, 191514411008, 7672320000000, 132644864,
                1.965e9, (900e9, 50e9), 64e9),
    "rtx5090": Gpu("NVIDIA GeForce RTX 5090", (12, 0), 170, 101376, 102400, 1536, 24, 34190917632, 1792000000000,
                   100663296, 2.407e9, (64e9, 1.5e9), 64e9, "NVIDIA RTX PRO 6000"),
}  # fmt: skip

# Dense bf16 tensor-core peak in TFLOP/s with fp32 accumulation, from NVIDIA's data sheets (half of the figures "with
# sparsity") and, for GeForce, its architecture papers. The first pattern that matches the device's name counts.
_PEAK_TFLOPS = (
    (r"\bMIG\b|\bLaptop\b|\b4090 D\b|\b5090 D\b", None),  # part of a GPU, or a slower GPU of similar name
    (r"\bGB[23]00\b", 2500.0),
    (r"\bB[23]00\b", 2250.0),
    (r"\bH[12]00 NVL\b", 835.5),
    (r"\bH[18]00 PCIe\b", 756.5),
    (r"\bH[128]00\b|\bGH200\b", 989.4),
    (r"\bH20\b", 148.0),
    (r"\bA[18]00\b", 312.0),
    (r"\bA40\b", 149.7),
    (r"\bA30\b", 165.0),
    (r"\bA10G\b", 70.0),
    (r"\bA10\b", 125.0),
    (r"\bL40S\b", 362.0),
    (r"\bL40\b", 181.0),
    (r"\bL4\b", 121.0),
    (r"\bRTX A6000\b", 154.8),
    (r"\bRTX 6000 Ada\b", 364.2),
    (r"\bRTX 5090\b", 209.5),
    (r"\bRTX 4090\b", 165.2),
    (r"\bRTX 3090\b(?! Ti)", 71.0),
)


def peak_flops(device_kind: str) -> float | None:
    """Dense bf16 peak of a device in FLOP/s, by jax's `device_kind`; None for one that is not in the table."""
    tflops = next((peak for pattern, peak in _PEAK_TFLOPS if re.search(pattern, device_kind)), None)
    return None if tflops is None else tflops * 1e12


@dataclass(frozen=True)
class Device:
    """The device that a computation is traced for; `capability` is None unless it is an NVIDIA GPU."""

    platform: str
    kind: str
    capability: Capability | None

    def __str__(self) -> str:
        if self.capability is None:
            return f"{self.platform} ({self.kind})"
        return f"{self.kind} (compute capability {self.capability[0]}.{self.capability[1]})"


def current_device() -> Device:
    """Return the device of the mesh in use (a compile-only one too), or else the default device."""
    import jax  # in the function, so that a command can list the names of GPUs without the seconds of this import

    mesh_device = jax.sharding.get_abstract_mesh().abstract_device
    if mesh_device is None or mesh_device.platform is None:
        default = jax.config.values["jax_default_device"] or jax.devices()[0]
        device = jax.devices(default)[0] if isinstance(default, str) else default
        return Device(device.platform, device.device_kind, _capability(device))
    if mesh_device.platform != "gpu":
        return Device(mesh_device.platform, mesh_device.device_kind, None)
    for gpu in GPUS.values():
        if mesh_device.device_kind in (gpu.kind, gpu.stand_in):
            return Device("gpu", gpu.kind, gpu.capability)
    for device in jax.devices():
        if device.device_kind == mesh_device.device_kind:
            return Device("gpu", device.device_kind, _capability(device))
    return Device("gpu", mesh_device.device_kind, None)


def _capability(device: Any) -> Capability | None:
    version = getattr(device, "compute_capability", "")
    major, dot, minor = version.partition(".")
    return (int(major), int(minor)) if dot and major.isdigit() and minor.isdigit() else None
