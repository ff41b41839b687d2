"""A plan as text for people, and as JSON for programs."""

import dataclasses
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxtune.errors import format_bytes
from jaxtune.plan.fit import OPTIONS
from jaxtune.plan.prediction import Plan, TargetGpus
from jaxtune.plan.tables.prices import Price
from pallas_kernels.gpus import GPUS


@dataclass(frozen=True)
class Row:
    """A row of a comparison.

    Attributes:
        recipe: as given.
        where: the machine.
        plan: None if there is none.
        price: of a GPU of the machine.
        options: flags that --fit has found.
        verdict: why there is no plan, in two words.
        reason: the same in a sentence, or "".
    """

    recipe: str
    where: TargetGpus
    plan: Plan | None
    price: Price
    options: tuple[str, ...] = ()
    verdict: str = "nothing fits"
    reason: str = ""


def table(plan: Plan, price: Price, groups: int = 10) -> str:
    """The plan as text, with the `groups` most expensive groups of launches."""
    parts = (_head(plan), _memory(plan), _speed(plan), _cost(plan, price))
    parts = (*parts, _assumptions(plan), _most_expensive(plan, groups), _rest(plan))
    return "\n\n".join("\n".join(part) for part in parts if part)


def line(plan: Plan) -> str:
    """The plan's options, memory and speed in one line."""
    options = " ".join(f"{section}.{name}={getattr(getattr(plan.config, section), name)}" for section, name in OPTIONS)
    return (
        f"{options}: {size_in_gb(plan.needed)}, {_verdict(plan)}; "
        f"{plan.speeds['central'].tokens_per_second:,.0f} tokens/s"
    )


def machine(where: TargetGpus) -> str:
    """A machine in a few characters, such as 2 x 8 x h100 for two hosts of 8 GPUs."""
    hosts = f"{where.hosts} x " if where.hosts > 1 else ""
    return f"{hosts}{where.gpus} x {where.gpu}"


_HEAD = f"{'step, ms':>9} {'tokens/s':>9} {'range':>18} {'MFU':>6} {'1M tokens':>10}"


def comparison_head() -> str:
    """The head of a table of plans."""
    return f"{'GB/GPU':>9} {'':12} {_HEAD}  {'machine':<12} recipe"


def comparison_row(row: Row) -> str:
    """A row of a table of plans."""
    where = f"  {machine(row.where):<12} {' '.join((row.recipe, *row.options))}"
    if row.plan is None:
        return f"{'':9} {row.verdict:12} {'':{len(_HEAD)}}{where}{f': {row.reason}' if row.reason else ''}"
    central, fast, slow = (row.plan.speeds[scenario] for scenario in ("central", "optimistic", "pessimistic"))
    spread = f"{slow.tokens_per_second:,.0f} - {fast.tokens_per_second:,.0f}"
    return (
        f"{row.plan.needed / 1e9:9.2f} {'fits' if row.plan.fits else 'does not fit':12} "
        f"{1e3 * central.seconds:9,.1f} {central.tokens_per_second:9,.0f} {spread:>18} {central.mfu:6.1%} "
        f"{amount(_million_tokens(row.plan, row.price, 'central')):>10}{where}"
    )


def comparison_end(rows: Sequence[Row]) -> str:
    """The end of a table of plans: prices, and the time model's assumptions if they are of one kind of GPU.

    If there are several machines, the cheapest and the fastest ones are named.
    """
    lines = ["", *_best(rows), *_prices(rows)]
    planned = [row.plan for row in rows if row.plan]
    if planned and len({row.where.gpu for row in rows}) == 1:
        lines += ["", *_assumptions(planned[0])]
    return "\n".join(lines)


def _best(rows: Sequence[Row]) -> list[str]:
    """The cheapest and the fastest row that fits, if there are several machines."""
    fitting = [(row, row.plan) for row in rows if row.plan and row.plan.fits]
    if not fitting or len({row.where for row in rows}) == 1:
        return []
    cheapest = min(fitting, key=lambda pair: _million_tokens(pair[1], pair[0].price, "central"))
    quickest = max(fitting, key=lambda pair: pair[1].speeds["central"].tokens_per_second)
    return [
        f"{what:<9} {machine(row.where)}, {' '.join((row.recipe, *row.options))}: "
        f"{amount(_million_tokens(plan, row.price, 'central'))} for 1M tokens, "
        f"{plan.speeds['central'].tokens_per_second:,.0f} tokens/s"
        for what, (row, plan) in (("cheapest:", cheapest), ("fastest:", quickest))
    ]


def _prices(rows: Sequence[Row]) -> list[str]:
    prices = {row.where.gpu: row.price for row in rows}
    return [f"price of a GPU and hour: {gpu} {price}" for gpu, price in prices.items()]


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan as a dict for json.dumps; the config as its resolved options."""
    return {**dataclasses.asdict(plan), "fits": plan.fits}


def _head(plan: Plan) -> list[str]:
    where, train, memory = plan.where, plan.config.train, plan.config.memory
    count = f"{where.hosts} hosts x {where.gpus}" if where.hosts > 1 else f"{where.gpus}"
    return [
        f"{plan.config.model.path} on {count} x {GPUS[where.gpu].kind}, "
        f"{train.micro_batch_size} x {plan.config.data.seq_len} tokens per micro-batch, {train.grad_accum_steps} "
        f"micro-batches, {plan.tokens:,} tokens per step; memory.remat={memory.remat} "
        f"memory.unroll={bool(memory.unroll)}"
    ]


def _memory(plan: Plan) -> list[str]:
    on_gpu = {name: size for name, size in plan.memory.items() if not name.startswith("host")}
    lines = [f"  {name:<23}{size_in_gb(size):>9}" for name, size in on_gpu.items()]
    verdict = _verdict(plan).replace("does not fit", "DOES NOT FIT")
    lines += [f"  {'total':<23}{size_in_gb(plan.needed):>9} of {size_in_gb(plan.limit)}: {verdict}"]
    lines += [f"  {name:<23}{size_in_gb(size):>9}" for name, size in plan.memory.items() if name not in on_gpu]
    return ["memory per GPU, according to the compiler", *lines]


def _speed(plan: Plan) -> list[str]:
    central, fast, slow = (plan.speeds[name] for name in ("central", "optimistic", "pessimistic"))
    launches = plan.launches
    return [
        "speed, predicted (not measured)",
        f"  step     {1e3 * central.seconds:,.1f} ms ({1e3 * fast.seconds:,.1f} - {1e3 * slow.seconds:,.1f})",
        f"  tokens/s {central.tokens_per_second:,.0f} ({slow.tokens_per_second:,.0f} - {fast.tokens_per_second:,.0f})",
        f"  MFU      {central.mfu:.1%} ({slow.mfu:.1%} - {fast.mfu:.1%})",
        f"  launches {launches['graphs']:,} CUDA graphs with {launches['in graphs']:,} kernels and copies, "
        f"{launches['outside']:,} other launches; {launches['host syncs']} host synchronisations",
    ]


def _cost(plan: Plan, price: Price) -> list[str]:
    hour = price.per_hour * plan.where.gpus * plan.where.hosts
    million, low, high = (_million_tokens(plan, price, name) for name in ("central", "optimistic", "pessimistic"))
    lines = [f"  hour       {hour:,.2f}", f"  1M tokens  {amount(million)} ({amount(low)} - {amount(high)})"]
    if steps := plan.config.train.max_steps:
        run, low, high = (steps * plan.tokens / 1e6 * cost for cost in (million, low, high))
        lines += [
            f"  {steps:,} steps  {run:,.2f} ({low:,.2f} - {high:,.2f}), without start, evaluations and checkpoints"
        ]
    return [f"cost by the predicted speed; a GPU and hour: {price}", *lines]


def _million_tokens(plan: Plan, price: Price, scenario: str) -> float:
    """Return the price of a million tokens of full rows, on all GPUs of the plan."""
    per_second = price.per_hour * plan.where.gpus * plan.where.hosts / 3600
    return 1e6 * per_second / plan.speeds[scenario].tokens_per_second


def _assumptions(plan: Plan) -> list[str]:
    """The rates of the time model by source, measured ones first."""
    by_source: dict[str, list[str]] = {}
    for name, assumption in sorted(plan.assumptions.items(), key=lambda item: item[1].source == "assumed"):
        by_source.setdefault(assumption.source, []).append(f"{name} {assumption.value:.3g}")
    lines = ["rates of the time model (jaxtune/plan/rates.py): fractions of the data sheet, ratios, microseconds"]
    for source, values in by_source.items():
        text = f"{source}: {', '.join(values)}"
        lines += textwrap.wrap(text, 120, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
    return lines


def _most_expensive(plan: Plan, count: int) -> list[str]:
    total = sum(group.ms for group in plan.groups)
    rows = [f"{'ms':>9} {'%':>5} {'launches':>9} {'GB':>8} {'TFLOP':>7}  launches and their source"]
    for group in plan.groups[:count]:
        rows.append(
            f"{group.ms:9.2f} {100 * group.ms / total:5.1f} {group.launches:9,} {group.bytes / 1e9:8.1f} "
            f"{group.flops / 1e12:7.1f}  {group.phase} {group.kind}, {group.source or 'made by the compiler'}"
        )
    rest = plan.groups[count:]
    if rest:
        ms = sum(group.ms for group in rest)
        launches = sum(group.launches for group in rest)
        rows.append(f"{ms:9.2f} {100 * ms / total:5.1f} {launches:9,} {'':8} {'':7}  {len(rest)} more")
    return rows


def _rest(plan: Plan) -> list[str]:
    lines = []
    if plan.collectives:
        lines += [f"{'hidden ms':>10} {'exposed ms':>11} {'launches':>9} {'GB':>8}  collectives"]
        lines += [
            f"{one.hidden_ms:10.2f} {one.exposed_ms:11.2f} {one.launches:9,} {one.bytes / 1e9:8.1f}  {one.kind}, "
            f"{one.source}"
            for one in plan.collectives
        ]
        exposed = sum(one.exposed_ms for one in plan.collectives)
        share = exposed / (1e3 * plan.speeds["central"].seconds)
        lines += [f"exposed communication: {exposed:.2f} ms, {share:.1%} of the step", ""]
    if plan.said:
        lines += [*plan.said, ""]
    return [*lines, f"compiled and read in {plan.seconds:.0f} s"]


def _verdict(plan: Plan) -> str:
    return "fits" if plan.fits else f"does not fit, {size_in_gb(plan.missing)} missing"


def amount(price: float) -> str:
    """Return a price with three decimals, or with five if it is below a cent."""
    return f"{price:,.3f}" if price >= 0.01 else f"{price:.5f}"


def size_in_gb(size: float) -> str:
    """Return a number of bytes in GB, the unit of a plan, or in MB if that would be 0.00 GB."""
    return f"{size / 1e9:.2f} GB" if size >= 1e7 or not size else format_bytes(size)
