"""The output of the command `plan`."""

import dataclasses
import json
import os
import sys
from collections.abc import Mapping

import jax
from absl import flags

from jaxtune.config.schema import Config
from jaxtune.errors import UserError
from jaxtune.plan import calibration
from jaxtune.plan.fit import NotCompiled, faster_quantized, fastest_on_each, overrides
from jaxtune.plan.jax_versions import say_slower
from jaxtune.plan.prediction import Plan, TargetGpus, memory_limit, predict, state_bytes
from jaxtune.plan.summary import (
    Row,
    amount,
    as_json,
    comparison_end,
    comparison_head,
    comparison_row,
    line,
    machine,
    size_in_gb,
    table,
)
from jaxtune.plan.tables.prices import Price, read_prices
from pallas_kernels.gpus import GPUS


def plan_one(values: flags.FlagValues, config: Config) -> int:
    """Print a plan, with --fit the fastest one that fits, or a comparison of machines; return the exit code."""
    _use_cpu()
    config = _with_model(config, values.model)
    machines = _machines(values, config)
    if len(machines) > 1:
        return compare({values.config: (values, config)})
    where, price = machines[0], _prices(values, machines)[machines[0].gpu]
    search = _Planner({where.gpu: calibration.find(where.gpu, values.calibration)})
    if not values.fit:
        plan = search.plan(config, where)
        print(json.dumps(as_json(plan), indent=2) if values.json else table(plan, price))
        return 0 if plan.fits else 2
    (_, plan), *_ = fastest_on_each(config, [where], {where.gpu: price.per_hour}, search.plan_loudly, state_bytes)
    assert not isinstance(plan, UserError | NotCompiled)  # an error is raised, and one machine is always planned
    if plan is None:
        raise UserError(f"--fit: nothing fits into {size_in_gb(memory_limit(where.gpu))}; {search.least()}")
    if values.json:
        print(json.dumps(as_json(plan), indent=2))
        return 0
    print(table(plan, price))
    if quantized := faster_quantized(plan, lambda other: search.plan_loudly(other, where)):
        speed = f"{quantized.speeds['central'].tokens_per_second:,.0f} tokens/s"
        print(f"\nfaster, but with other losses: {' '.join(overrides(config, quantized.config))}: {speed}")
    print(f"\nfastest options that fit: {' '.join(overrides(config, plan.config)) or 'those of the recipe'}")
    return 0


def compare(parsed: Mapping[str, tuple[flags.FlagValues, Config]]) -> int:
    """Print plans of several recipes and machines as a table, each row when it is known; return the exit code."""
    _use_cpu()
    compared: list[tuple[str, Config, list[TargetGpus], dict[str, Price], _Planner]] = []
    for recipe, (values, recipes_own) in parsed.items():
        if values.json:
            raise UserError("--json prints one plan: leave it out, or give one recipe, --gpu and --gpus")
        config = _with_model(recipes_own, values.model)
        machines = _machines(values, config)
        search = _Planner({where.gpu: calibration.find(where.gpu, values.calibration) for where in machines})
        compared.append((recipe, config, machines, _prices(values, machines), search))
    fit = next(iter(parsed.values()))[0].fit  # flags are the same for all recipes
    rows, fits = [], []
    print(comparison_head(), flush=True)
    for recipe, config, machines, prices, search in compared:
        if fit:
            hourly = {gpu: price.per_hour for gpu, price in prices.items()}
            plans = fastest_on_each(config, machines, hourly, search.plan_loudly, state_bytes)
        else:
            only = len(machines) == 1
            plans = ((where, search.plan_or_error(config, where, only)) for where in machines)
        for where, plan in plans:
            row = _row(recipe, config if fit else None, where, plan, prices[where.gpu])
            print(comparison_row(row), flush=True)
            rows.append(row)
            if not isinstance(plan, NotCompiled):
                fits.append(row.plan is not None and row.plan.fits)
    print(comparison_end(rows))
    if slower := say_slower(jax.__version__):
        print(slower)
    # One machine that fits is enough; of several recipes, each must fit.
    return 0 if (any(fits) if len(parsed) == 1 else all(fits)) else 2


def _row(
    recipe: str, fitted: Config | None, where: TargetGpus, plan: Plan | UserError | NotCompiled | None, price: Price
) -> Row:
    """Return a row of a comparison; fitted: the recipe's config, if the plan has options that --fit has found."""
    if isinstance(plan, UserError):
        return Row(recipe, where, None, price, verdict="cannot run", reason=str(plan))
    if isinstance(plan, NotCompiled):
        reason = f"{plan.tokens_per_second:,.0f} tokens/s and {amount(1e6 * plan.per_token)} for 1M tokens at best"
        return Row(recipe, where, None, price, verdict="not compiled", reason=reason)
    options = overrides(fitted, plan.config) if fitted and plan else []
    return Row(recipe, where, plan, price, tuple(options))


def _use_cpu() -> None:
    # With the CUDA plugin installed, jax would look for a GPU and its libraries. With a GPU present, it would use that
    # GPU's compute capability in place of the target's.
    jax.config.update("jax_platforms", "cpu")
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    # jax sets 1 if the user sets nothing: information is not shown. The plugin's warnings of what an absent GPU, or its
    # libraries, would have told are not for the user either, nor XLA's errors about a step that does not fit, which a
    # plan says itself. An error that ends a compilation is raised, and shown.
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1") == "1":
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"


class _Planner:
    """Makes plans, by measured rates if there are some, and keeps a list of them."""

    def __init__(self, measured: Mapping[str, calibration.Calibration | None]):
        self.measured = measured
        self.plans: list[Plan] = []

    def plan(self, config: Config, where: TargetGpus) -> Plan:
        self.plans.append(predict(config, where, self.measured[where.gpu]))
        return self.plans[-1]

    def plan_or_error(self, config: Config, where: TargetGpus, only: bool) -> Plan | UserError:
        """Plan; return the error of a machine that cannot run the config, unless it is the only one."""
        try:
            return self.plan(config, where)
        except UserError as error:
            if only:
                raise
            return error

    def plan_loudly(self, config: Config, where: TargetGpus) -> Plan:
        plan = self.plan(config, where)
        # Progress goes to stderr, because stdout may be JSON.
        print(f"{machine(where)}: {line(plan)}", file=sys.stderr, flush=True)
        return plan

    def least(self) -> str:
        """Say what needs least of what was planned, and what would need less."""
        least = min(self.plans, key=lambda plan: plan.needed, default=None)
        tried = f"the least that was tried: {line(least)}" if least else "the state alone needs more"
        return (
            f"{tried}. More GPUs (--gpus with mesh.fsdp=-1), shorter rows (data.seq_len) or adapters (lora.enabled) "
            "need less"
        )


def _with_model(config: Config, model: str | None) -> Config:
    if model is None:
        return config
    return dataclasses.replace(config, model=dataclasses.replace(config.model, path=model, revision=None))


def _machines(values: flags.FlagValues, config: Config) -> list[TargetGpus]:
    """The machines to plan for: each kind of GPU in each number."""
    gpus = list(GPUS) if "any" in values.gpu else values.gpu
    if not gpus:
        raise UserError(f"--gpu= names no GPU: {', '.join(GPUS)}, or any")
    for gpu in gpus:
        if gpu not in GPUS:
            raise UserError(f"--gpu={','.join(values.gpu)}: {gpu!r} is not a GPU that is known: {', '.join(GPUS)}, any")
    counts = values.gpus or [config.device.gpus or 1]
    for count in counts:
        if not (isinstance(count, int) or (count.isdigit() and int(count) > 0)):
            raise UserError(f"--gpus={','.join(values.gpus)}: {count!r} is not a number of GPUs; write --gpus=1,2,4")
        if config.device.gpus not in (None, int(count)):
            raise UserError(f"--gpus={count}: device.gpus is {config.device.gpus}; leave out one of the two")
    if values.calibration and len(gpus) > 1:
        raise UserError("--calibration was measured on one kind of GPU: give one --gpu")
    machines = [TargetGpus(gpu, int(count), values.hosts) for gpu in gpus for count in counts]
    return list(dict.fromkeys(machines))


def _prices(values: flags.FlagValues, machines: list[TargetGpus]) -> dict[str, Price]:
    return read_prices(values.price, list(dict.fromkeys(where.gpu for where in machines)))
