"""Search for the fastest options that fit, by planning; model, data and tokens per step stay the same."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from jaxtune.config import checks
from jaxtune.config.schema import Config
from jaxtune.plan.prediction import Plan
from jaxtune.training.memory import POLICIES

GAIN = 1.01  # a larger micro-batch must be faster by this factor
OPTIONS = (
    ("memory", "remat"),
    ("memory", "unroll"),
    ("train", "micro_batch_size"),
    ("train", "grad_accum_steps"),
    ("quant", "format"),
)


def fastest(config: Config, planned: Callable[[Config], Plan]) -> Plan | None:
    """The plan of the fastest config that fits; None if no config fits. planned: makes a plan of a config.

    The first rematerialisation policy that fits is taken. The micro-batch grows as long as that is faster, and shrinks
    only until it fits. The base of adapters is quantized only if nothing else fits. In the end layers are unrolled, if
    that fits and is faster.
    """
    best = _fastest_in_a_loop(_replace_options(config, memory={"unroll": False}) or config, planned)
    unrolled = best and _replace_options(best.config, memory={"unroll": True})
    if best is None or unrolled is None:
        return best
    plan = planned(unrolled)
    return plan if plan.fits and _rate(plan) >= GAIN * _rate(best) else best


def _fastest_in_a_loop(config: Config, planned: Callable[[Config], Plan]) -> Plan | None:
    # Lazy, because each plan compiles a step: the search ends at the first that fits. Quantization comes last, since it
    # changes the arithmetic.
    smaller = (other for base in (config, *_quantized(config)) for other in (base, *_micro_batches(base, smaller=True)))
    plans = (_first_fit(other, planned) for other in smaller)
    best = next((plan for plan in plans if plan is not None), None)
    # If the rows had to shrink or the base to be quantized, a larger micro-batch cannot fit.
    if best is None or best.config.train != config.train or best.config.quant != config.quant:
        return best
    for larger in _micro_batches(config, smaller=False):
        plan = _first_fit(larger, planned)
        if plan is None or _rate(plan) < GAIN * _rate(best):
            break
        best = plan
    return best


def overrides(config: Config, chosen: Config) -> list[str]:
    """The flags that turn `config` into `chosen`."""
    values = (
        (f"{section}.{name}", [getattr(getattr(c, section), name) for c in (config, chosen)])
        for section, name in OPTIONS
    )
    return [f"--config.{key}={new}" for key, (old, new) in values if old != new]


def _first_fit(config: Config, planned: Callable[[Config], Plan]) -> Plan | None:
    changed = (_replace_options(config, memory={"remat": remat}) for remat in POLICIES)
    # POLICIES are in the order in which a run tries them, the fastest first.
    plans = (planned(other) for other in changed if other is not None)
    return next((plan for plan in plans if plan.fits), None)


def _micro_batches(config: Config, smaller: bool) -> Iterator[Config]:
    """Configs with 2, 4, ... times the rows per micro-batch, or 1/2, 1/4, ... of them; rows per step stay the same."""
    rows, sums = config.train.micro_batch_size, config.train.grad_accum_steps
    factor = 2
    while (rows if smaller else sums) % factor == 0:
        size, steps = (rows // factor, sums * factor) if smaller else (rows * factor, sums // factor)
        if other := _replace_options(config, train={"micro_batch_size": size, "grad_accum_steps": steps}):
            yield other
        factor *= 2


def _quantized(config: Config) -> Iterator[Config]:
    unquantized = config.lora.enabled and config.quant.format is None
    if unquantized and (nf4 := _replace_options(config, quant={"format": "nf4"})):
        yield nf4


def _replace_options(config: Config, **sections: dict[str, Any]) -> Config | None:
    """The config with other options; None if the options contradict each other."""
    replaced = {name: dataclasses.replace(getattr(config, name), **values) for name, values in sections.items()}
    other = dataclasses.replace(config, **replaced)
    return None if checks.check(other) else other


def _rate(plan: Plan) -> float:
    return plan.speeds["central"].tokens_per_second
