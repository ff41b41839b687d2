"""Floating-point operations of a training step, and the fraction of the hardware's peak that they reach (MFU)."""

from dataclasses import dataclass

from pallas_kernels.gpus import peak_flops


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
    attention = 3 * 4 * visible_keys * work.attention_width * work.layers  # 3: forward, and twice in backward
    return 6 * work.trained + 4 * work.frozen + attention


def mfu(work: Work, tokens_per_second: float, device_kind: str, devices: int) -> float | None:
    """Model FLOPs utilisation, 0 .. 1, of all `devices` together; None if the device's peak is unknown."""
    peak = peak_flops(device_kind)
    return None if peak is None else flops_per_token(work) * tokens_per_second / (peak * devices)
