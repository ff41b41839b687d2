"""What torch runs on, and which attention kernels it really ran."""

import re
from collections.abc import Callable
from typing import Any

import torch


def device() -> str:
    """The device that torch runs on here: a GPU, or else the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def synchronize(_: Any = None) -> None:
    """Waits for the GPU; arguments are ignored, so that it can be given a result."""
    if device() == "cuda":
        torch.cuda.synchronize()


def attention_kernels(run: Callable[[], Any]) -> list[str]:
    """Names of the attention kernels of a call (of the operators, on a CPU), by the profiler."""
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA if device() == "cuda" else activity.CPU]) as profile:
        run()
        synchronize()
    names = {event.key[:120] for event in profile.key_averages()}
    return sorted(name for name in names if re.search("attention|sdpa|fmha|flash", name))
