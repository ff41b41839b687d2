"""Options of text generation, as taken by the command `generate` and by `Run.generate`. Quick to import."""

import math
from dataclasses import dataclass

from jaxtune.errors import UserError

BOUNDS: dict[str, tuple[float, float]] = {
    "max_new_tokens": (1, math.inf),
    "temperature": (0.0, math.inf),
    "top_p": (0.0, 1.0),
    "top_k": (1, math.inf),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 99.0),
    "seed": (0, 2**31 - 1),
    "batch_size": (1, math.inf),
}
"""The lowest and highest value of each number in SamplingOptions; an int as the lowest value marks a whole number."""


@dataclass(frozen=True)
class SamplingOptions:
    """Options of text generation.

    Attributes:
        max_new_tokens: Maximum number of generated tokens.
        temperature: Sampling temperature; 0 takes the likeliest token.
        top_p: Sample only from the likeliest tokens with this total probability.
        top_k: Sample only from this number of likeliest tokens.
        min_p: Sample only from tokens with at least this fraction of the likeliest token's probability.
        repetition_penalty: Above 1, tokens that have occurred become less likely.
        stop: Texts that end the generation.
        seed: Seed of the sampling.
        batch_size: Number of prompts that are continued together.
        chat: Whether to put text prompts into the tokenizer's chat template.
    """

    max_new_tokens: int = 256
    temperature: float = 0.7
    top_p: float = 0.95
    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int = 0
    batch_size: int = 8
    chat: bool = False

    def __post_init__(self) -> None:
        for name, (low, high) in BOUNDS.items():
            value, whole = getattr(self, name), isinstance(low, int)
            if name == "top_k" and value is None:
                continue
            fits = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
            if not fits or not math.isfinite(value) or not low <= value <= high:
                most = "" if math.isinf(high) else f" and at most {high}"
                kind = "whole" if whole else "finite"
                raise UserError(f"--{name}={value}: must be a {kind} number, at least {low:g}{most}")
        if isinstance(self.stop, str) or not all(isinstance(text, str) for text in self.stop):
            raise UserError(f"--stop={self.stop!r}: must be a list of texts")
        if "" in self.stop:
            raise UserError("--stop= is empty, and would end every text at its first token")
