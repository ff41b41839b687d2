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
from jaxtune.plan.fit import fastest, overrides
from jaxtune.plan.prediction import Plan, TargetGpus, predict
from jaxtune.plan.summary import as_json, comparison, line, size_in_gb, table


def plan_one(values: flags.FlagValues, config: Config) -> int:
    """Print a plan, with --fit the fastest one that fits; return the exit code."""
    _use_cpu()
    config = _with_model(config, values.model)
    where = _where(values, config)
    plan = _fastest(config, *where) if values.fit else predict(config, *where)
    print(json.dumps(as_json(plan), indent=2) if values.json else table(plan, values.price))
    if values.fit and not values.json:
        print(f"\nfastest options that fit: {' '.join(overrides(config, plan.config)) or 'those of the recipe'}")
    return 0 if plan.fits else 2


def compare(parsed: Mapping[str, tuple[flags.FlagValues, Config]]) -> int:
    """Print plans of several recipes as a table; return the exit code."""
    _use_cpu()
    plans = {
        recipe: predict(_with_model(config, values.model), *_where(values, config))
        for recipe, (values, config) in parsed.items()
    }
    print(comparison(plans, next(iter(parsed.values()))[0].price))
    return 0 if all(plan.fits for plan in plans.values()) else 2


def _use_cpu() -> None:
    # With the CUDA plugin installed, jax would look for a GPU and its libraries. With a GPU present, it would use that
    # GPU's compute capability in place of the target's.
    jax.config.update("jax_platforms", "cpu")
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    # jax sets 1 if the user sets nothing: information is not shown. The plugin's warnings of what an absent GPU, or its
    # libraries, would have told are not for the user either; errors are shown.
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1") == "1":
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"


def _fastest(config: Config, where: TargetGpus, measured: calibration.Calibration | None) -> Plan:
    plans = []

    def make_plan(other: Config) -> Plan:
        plans.append(predict(other, where, measured))
        # Progress goes to stderr, because stdout may be JSON.
        print(line(plans[-1]), file=sys.stderr, flush=True)
        return plans[-1]

    if plan := fastest(config, make_plan):
        return plan
    least = min(plans, key=lambda plan: plan.needed)
    raise UserError(
        f"--fit: nothing fits into {size_in_gb(least.limit)}; the least that was tried: {line(least)}. "
        "More GPUs (--gpus with mesh.fsdp=-1), shorter rows (data.seq_len) or adapters (lora.enabled) need less"
    )


def _with_model(config: Config, model: str | None) -> Config:
    if model is None:
        return config
    return dataclasses.replace(config, model=dataclasses.replace(config.model, path=model, revision=None))


def _where(values: flags.FlagValues, config: Config) -> tuple[TargetGpus, calibration.Calibration | None]:
    """The GPUs, and the calibration measured on one."""
    gpus = [one for one in (values.gpus, config.device.gpus) if one is not None] or [1]
    if min(gpus) != max(gpus):
        raise UserError(f"--gpus={gpus[0]}: device.gpus is {gpus[1]}; leave one of them out")
    return TargetGpus(values.gpu, gpus[0], values.hosts), calibration.find(values.gpu, values.calibration)
