"""The device that torch uses, and the attention kernels that it actually ran."""

import re
from collections.abc import Callable
from typing import Any

import torch


def device() -> str:
    """Return the device that torch uses here: a GPU if available, otherwise the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def synchronize(_: Any = None) -> None:
    """Wait for the GPU. The argument is ignored, so that the function can serve as `Call.wait`."""
    if device() == "cuda":
        torch.cuda.synchronize()


def attention_kernels(run: Callable[[], Any]) -> list[str]:
    """Return the names of the attention kernels (on a CPU, operators) that the profiler records in a call."""
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA if device() == "cuda" else activity.CPU]) as profile:
        run()
        synchronize()
    names = {event.key[:120] for event in profile.key_averages()}
    return sorted(name for name in names if re.search("attention|sdpa|fmha|flash", name))
