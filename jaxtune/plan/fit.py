"""Search for the fastest options that fit, by planning; model, data and tokens per step stay the same."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxtune.config import checks
from jaxtune.config.schema import Config
from jaxtune.errors import UserError
from jaxtune.plan.prediction import Plan, TargetGpus, memory_limit
from jaxtune.training.memory import POLICIES

# Makes the plan of a config; None: the config cannot fit, so its step was not compiled.
Planner = Callable[[Config], Plan | None]

GAIN = 1.01  # a larger micro-batch must be faster by this factor
# The same step needs about the same memory on another kind of GPU. By this factor more than the limit, it cannot fit.
SURELY = 1.1
OPTIONS = (
    ("memory", "remat"),
    ("memory", "unroll"),
    ("train", "micro_batch_size"),
    ("train", "grad_accum_steps"),
    ("quant", "format"),
)


def fastest(config: Config, planned: Planner) -> Plan | None:
    """The plan of the fastest config that fits; None if no config fits.

    The first rematerialisation policy that fits is taken. The micro-batch grows as long as that is faster, and shrinks
    only until it fits. The base of adapters is quantized only if nothing else fits. In the end layers are unrolled, if
    that fits and is faster.
    """
    best = _fastest_in_a_loop(_replace_options(config, memory={"unroll": False}) or config, planned)
    unrolled = best and _replace_options(best.config, memory={"unroll": True})
    plan = planned(unrolled) if unrolled else None
    return plan if best and plan and plan.fits and _rate(plan) >= GAIN * _rate(best) else best


def faster_quantized(best: Plan, planned: Planner) -> Plan | None:
    """The plan with the base in NF4 if it is faster than the best one, which recomputes something for want of memory.

    It is not the best plan, because quantization changes the losses.
    """
    if best.config.memory.remat == "none":
        return None  # decoding weights only costs time
    plans = (_first_fit(other, planned) for other in _quantized(best.config))
    return next((plan for plan in plans if plan and _rate(plan) >= GAIN * _rate(best)), None)


def fastest_on_each(
    config: Config,
    machines: Sequence[TargetGpus],
    plan_on: Callable[[Config, TargetGpus], Plan],
    state_on: Callable[[Config, TargetGpus], int],
) -> dict[TargetGpus, Plan | UserError | None]:
    """The plan of the fastest config that fits on each machine; None if no config fits there.

    If there are several machines, one that cannot run the config gets the error that says why.

    A plan takes a minute, so this function makes few. It begins with machines with much memory and many GPUs. If a step
    needs more memory there than a smaller machine has, it is not planned on the smaller one. Neither is a step whose
    state does not fit (state_on returns its bytes on a GPU within seconds). A smaller number of GPUs of the same kind
    takes the options that are the fastest on the larger number, if they fit.
    """
    needs: list[tuple[tuple, int, int]] = []  # options, number of GPUs, bytes of a GPU
    states: dict[tuple, int] = {}  # by quantization and machine
    best: dict[TargetGpus, Plan | UserError | None] = {}

    def plan_if_it_can_fit(other: Config, where: TargetGpus) -> Plan | None:
        options, count, limit = _options(other), where.gpus * where.hosts, memory_limit(where.gpu)
        if any(known == options and many >= count and size > SURELY * limit for known, many, size in needs):
            return None
        kind = (other.quant.format, where.gpus, where.hosts)
        if kind not in states:
            states[kind] = state_on(other, where)
        if states[kind] > limit:
            return None
        plan = plan_on(other, where)
        needs.append((options, count, plan.needed))
        return plan

    for where in sorted(machines, key=lambda where: (-memory_limit(where.gpu), where.gpu, -where.hosts * where.gpus)):
        more = [
            plan for other, plan in best.items() if other.gpu == where.gpu and plan and not isinstance(plan, UserError)
        ]
        try:
            same = plan_if_it_can_fit(more[-1].config, where) if more else None
            if same and same.fits:
                best[where] = same
            else:
                best[where] = fastest(config, lambda other, where=where: plan_if_it_can_fit(other, where))
        except UserError as error:
            if len(machines) == 1:
                raise
            best[where] = error
    return {where: best[where] for where in machines}


def _fastest_in_a_loop(config: Config, planned: Planner) -> Plan | None:
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
    changed = zip(OPTIONS, _options(config), _options(chosen))
    return [f"--config.{section}.{name}={new}" for (section, name), old, new in changed if old != new]


def _options(config: Config) -> tuple:
    return tuple(getattr(getattr(config, section), name) for section, name in OPTIONS)


def _first_fit(config: Config, planned: Planner) -> Plan | None:
    changed = (_replace_options(config, memory={"remat": remat}) for remat in POLICIES)
    # POLICIES are in the order in which a run tries them, the fastest first.
    plans = (planned(other) for other in changed if other is not None)
    return next((plan for plan in plans if plan is not None and plan.fits), None)


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
