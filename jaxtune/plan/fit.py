"""Search for the fastest options that fit, by planning; model, data and tokens per step stay the same."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from jaxtune.config import checks
from jaxtune.config.schema import Config
from jaxtune.errors import UserError
from jaxtune.plan.prediction import Plan, TargetGpus, memory_limit
from jaxtune.plan.rates import KERNELS
from jaxtune.training.memory import POLICIES
from pallas_kernels.aot import COLLECTIVES
from pallas_kernels.gpus import GPUS, peak_flops

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
    best = _fastest_in_a_loop(config, planned)
    return best and (_faster_unrolled(best, planned) or best)


def faster_quantized(best: Plan, planned: Planner) -> Plan | None:
    """The plan with the base in NF4 if it is faster than the best one, which recomputes something for want of memory.

    It is not the best plan, because quantization changes the losses.
    """
    if best.config.memory.remat == "none":
        return None  # decoding weights only costs time
    plans = (_first_fit(other, planned) for other in _quantized(best.config))
    return next((plan for plan in plans if plan and _rate(plan) >= GAIN * _rate(best)), None)


@dataclasses.dataclass(frozen=True)
class NotCompiled:
    """A machine that would be neither the fastest nor the cheapest one, even at the peaks of its data sheet.

    Attributes:
        tokens_per_second: at these peaks, of all GPUs together.
        per_token: the price of a token at these peaks.
    """

    tokens_per_second: float
    per_token: float


def fastest_on_each(
    config: Config,
    machines: Sequence[TargetGpus],
    prices: Mapping[str, float],
    plan_on: Callable[[Config, TargetGpus], Plan],
    state_on: Callable[[Config, TargetGpus], int],
) -> Iterator[tuple[TargetGpus, Plan | UserError | NotCompiled | None]]:
    """Yield each machine, in the order of the search, with the plan of the fastest config that fits there, or None.

    If there are several machines, one that cannot run the config has the error that says why. Layers are then unrolled
    last, and only on the cheapest and the fastest machine, because that takes minutes to compile. If it is faster, the
    machine follows again with that plan.

    Few plans are made, because each takes a minute or more. The first machine is one with much memory and many GPUs,
    and the next is always the one whose tokens could be the cheapest. A machine that can neither be the fastest nor the
    cheapest is not planned. If a step needs more memory elsewhere than a machine has, it is not planned there. Neither
    is a step whose state does not fit (state_on returns its bytes on a GPU within seconds). The options that are the
    fastest on a machine with as much memory and as many GPUs are taken if they fit.

    prices: of a GPU for an hour, by its name.
    """
    search, remaining = _Search(config, prices, plan_on, state_on), list(machines)
    while remaining:
        where = min(remaining, key=search.order)
        remaining.remove(where)
        if len(machines) == 1:
            yield where, fastest(config, partial(search.plan_if_it_can_fit, where=where))
            return
        try:
            yield where, search.result(where)
        except UserError as error:
            yield where, error
    for best in search.winners():
        if plan := _faster_unrolled(best, partial(search.plan_if_it_can_fit, where=best.where)):
            yield best.where, plan


class _Search:
    """The plans that were made, and what they tell of machines without a plan."""

    def __init__(
        self,
        config: Config,
        prices: Mapping[str, float],
        plan_on: Callable[[Config, TargetGpus], Plan],
        state_on: Callable[[Config, TargetGpus], int],
    ):
        self.config, self.prices, self.plan_on, self.state_on = config, prices, plan_on, state_on
        self.made: list[Plan] = []
        self.best: list[Plan] = []  # the fastest that fits, of each machine that has one
        self.states: dict[tuple, int] = {}  # bytes of a GPU by quantization and numbers of GPUs

    def order(self, where: TargetGpus) -> tuple:
        """Return what is smaller for a machine to search earlier."""
        first = self._least_gpu_seconds(where.gpu) * self.prices[where.gpu] if self.made else -memory_limit(where.gpu)
        return first, where.gpu, -_count(where)

    def result(self, where: TargetGpus) -> Plan | NotCompiled | None:
        """Return the plan of the fastest config that fits on a machine, or why there is none."""
        if self.best:
            seconds = self._least_gpu_seconds(where.gpu)
            at_peak = NotCompiled(_count(where) / seconds, seconds * self.prices[where.gpu] / 3600)
            slower = at_peak.tokens_per_second <= max(map(_rate, self.best))
            if slower and at_peak.per_token >= min(map(self._price_of_a_token, self.best)):
                return at_peak
        alike = [plan for plan in self.best if _count(plan.where) >= _count(where)]
        alike = [plan for plan in alike if memory_limit(plan.where.gpu) >= memory_limit(where.gpu)]
        plan = self.plan_if_it_can_fit(alike[-1].config, where) if alike else None
        if plan is None or not plan.fits:
            plan = _fastest_in_a_loop(self.config, partial(self.plan_if_it_can_fit, where=where))
        if plan is not None:
            self.best.append(plan)
        return plan

    def winners(self) -> list[Plan]:
        """Return the plans of the cheapest and of the fastest machine, which may be one."""
        if not self.best:
            return []
        cheapest, quickest = min(self.best, key=self._price_of_a_token), max(self.best, key=_rate)
        return [cheapest] if cheapest is quickest else [cheapest, quickest]

    def plan_if_it_can_fit(self, config: Config, where: TargetGpus) -> Plan | None:
        """Plan a config on a machine, unless it is known that it cannot fit there."""
        limit = memory_limit(where.gpu)
        state = self._state(config, where)
        if state > limit or any(self._least_bytes(plan, config, where, state) > limit for plan in self.made):
            return None
        plan = self.plan_on(config, where)
        self.made.append(plan)
        return plan

    def _least_bytes(self, plan: Plan, config: Config, where: TargetGpus, state: int) -> float:
        """Return the bytes that a config needs at least, by a plan of the same step or of one with other rows."""
        of_memory = [(one.memory.remat, one.memory.unroll, one.quant.format) for one in (plan.config, config)]
        if of_memory[0] != of_memory[1] or _count(plan.where) < _count(where):
            return 0.0
        rows = config.train.micro_batch_size / plan.config.train.micro_batch_size
        # Some of the memory that is not state grows with the rows, and the rest does not shrink.
        needed = state + (plan.needed - self._state(plan.config, plan.where)) * min(1.0, rows)
        return needed if plan.where.gpu == where.gpu else needed / SURELY

    def _state(self, config: Config, where: TargetGpus) -> int:
        kind = (config.quant.format, where.gpus, where.hosts)
        if kind not in self.states:
            self.states[kind] = self.state_on(config, where)
        return self.states[kind]

    def _least_gpu_seconds(self, gpu: str) -> float:
        """Return the seconds of a GPU for a token at the peaks of its data sheet, the least of all plans made."""
        return min(_seconds_at_peaks(plan, gpu) * _count(plan.where) / plan.tokens for plan in self.made)

    def _price_of_a_token(self, plan: Plan) -> float:
        return self.prices[plan.where.gpu] / 3600 * _count(plan.where) / _rate(plan)


def _seconds_at_peaks(plan: Plan, gpu: str) -> float:
    """Return the seconds that the products and the memory traffic of a plan's step would take at a GPU's peaks.

    Copies are left out: the same step may do without them if its layers are unrolled.
    """
    spec = GPUS[gpu]
    peak = peak_flops(spec.kind)
    assert peak is not None
    seconds = 0.0
    for group in plan.groups:
        if group.kind not in (*COLLECTIVES, "host copy", "copy"):
            multiplies = group.kind in KERNELS or "product" in group.kind
            flops = group.flops / (2 if group.kind == "FP8 product" else 1) if multiplies else 0.0
            seconds += max(flops / peak, group.bytes / spec.memory_bandwidth)
    return seconds


def _count(where: TargetGpus) -> int:
    return where.gpus * where.hosts


def _faster_unrolled(best: Plan, planned: Planner) -> Plan | None:
    """The plan with unrolled layers, if it fits and is faster."""
    unrolled = _replace_options(best.config, memory={"unroll": True})
    plan = planned(unrolled) if unrolled else None
    return plan if plan and plan.fits and _rate(plan) >= GAIN * _rate(best) else None


def _fastest_in_a_loop(config: Config, planned: Planner) -> Plan | None:
    config = _replace_options(config, memory={"unroll": False}) or config
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
    if chosen.memory.remat != "none" and config.memory.unroll is None and not chosen.memory.unroll:
        chosen = dataclasses.replace(chosen, memory=dataclasses.replace(chosen.memory, unroll=None))  # the same step
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
