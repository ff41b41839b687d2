"""Floating-point operations of a training step, and the fraction of the hardware's peak that they reach (MFU)."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """Sizes that determine the FLOPs of a token. Only parameters of matrix products count: the head, no lookup table.

    Attributes:
        trained: parameters with a gradient, adapters included.
        frozen: parameters that only pass gradients on.
        layers: number of layers.
        attention_width: heads x head dimension of a layer's queries.
        seq_len: tokens in a row.
        window: the most keys that a token attends to.
    """

    trained: int
    frozen: int
    layers: int
    attention_width: int
    seq_len: int
    window: int | None = None


def flops_per_token(work: Work) -> float:
    """Floating-point operations that training needs per token, forward and backward; recomputation is not counted.

    A parameter costs 2 forward, 2 for the gradient of its input and, if trained, 2 for its own: 6N in all, or 4N
    (Kaplan et al. 2020, section 2.1; the PaLM paper, appendix B, defines MFU so). The forward pass of causal attention
    costs 4 per visible key and unit of width (scores and weighted values): per token, averaged over a row of length s
    with window w,

        4 * width * w * (1 - w / (2 s)),    2 * s * width without a window,

    and twice that in the backward pass. A row is counted as one document; in packed rows fewer keys are visible, so
    that the MFU shown is slightly too high.
    """
    window = min(work.window or work.seq_len, work.seq_len)
    visible_keys = window * (1 - window / (2 * work.seq_len))
    attention = 3 * 4 * visible_keys * work.attention_width * work.layers
    return 6 * work.trained + 4 * work.frozen + attention


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


def mfu(work: Work, tokens_per_second: float, device_kind: str, devices: int) -> float | None:
    """Model FLOPs utilisation, 0 .. 1, of all `devices` together; None if the device's peak is unknown."""
    peak = peak_flops(device_kind)
    return None if peak is None else flops_per_token(work) * tokens_per_second / (peak * devices)
