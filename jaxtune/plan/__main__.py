"""Predict memory and speed of a run on GPUs that are not there; exit code 2 if it does not fit.

    python -m jaxtune.plan --config=qwen_lora:Qwen/Qwen3-8B --gpu=h100
    python -m jaxtune.plan --config=qwen_full --model=Qwen/Qwen3-8B --gpu=h100 --gpus=8 --hosts=2
    python -m jaxtune.plan --config=qwen_lora:Qwen/Qwen3-8B --gpu=rtx4090 --fit
    python -m jaxtune.plan qwen_lora:Qwen/Qwen3-8B qwen_qlora_nf4:Qwen/Qwen3-8B --gpu=l40s
    python -m jaxtune.plan --config=qwen_lora:Qwen/Qwen3-8B --gpu=h200 --calibration=benchmarks/results/nvidia_h200.json

The step of the run is compiled for these GPUs (pip install 'jaxtune[aot]'); its memory is the compiler's, its time a
model's, with a range: jaxtune/plan/rates.py has every assumption, and --calibration replaces those that were measured
on such a GPU (benchmarks/gpu_suite.py --only assumptions). No weight is read. --fit looks for the fastest
micro-batch, rematerialisation policy and, if need be, format of the base. Several recipes are compared.
"""

import dataclasses
import json
import os
import sys

import jax
from absl import flags

from jaxtune import command
from jaxtune.config.schema import Config
from jaxtune.errors import UserError
from jaxtune.plan import calibration
from jaxtune.plan.fit import fastest, overrides
from jaxtune.plan.prediction import Plan, Where, predict
from jaxtune.plan.report import as_json, comparison, line, table
from pallas_kernels.gpus import GPUS


def main(argv: list[str] | None = None) -> int:
    """Prints plans; returns the exit code."""
    # With the plugin for CUDA installed jax would look for a GPU and its libraries, and with one there, take its
    # compute capability for the others'.
    jax.config.update("jax_platforms", "cpu")
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    arguments = sys.argv[1:] if argv is None else argv
    recipes = [argument for argument in arguments if not argument.startswith("-")]
    if not recipes:
        return command.run(_define_flags, _main, arguments)
    plans: dict[str, Plan] = {}
    rest = [argument for argument in arguments if argument.startswith("-")]
    for recipe in recipes:

        def body(values: flags.FlagValues, config: Config, recipe: str = recipe) -> None:
            plans[recipe] = predict(_with_model(config, values.model), *_where(values, config))

        if code := command.run(_define_flags, body, [f"--config={recipe}", *rest]):
            return code
    print(comparison(plans))
    return 0 if all(plan.fits for plan in plans.values()) else 2


def _define_flags(values: flags.FlagValues):
    flags.DEFINE_enum("gpu", "h100", list(GPUS), "kind of GPU", flag_values=values)
    meaning = "GPUs of a host; default: device.gpus of the recipe, or 1"
    flags.DEFINE_integer("gpus", None, meaning, lower_bound=1, flag_values=values)
    flags.DEFINE_integer("hosts", 1, "hosts", lower_bound=1, flag_values=values)
    flags.DEFINE_string("model", None, "model in place of the recipe's: a hub id or a folder", flag_values=values)
    meaning = "what benchmarks/gpu_suite.py wrote on such a GPU: its measured rates replace the assumed ones"
    flags.DEFINE_string("calibration", None, meaning, flag_values=values)
    flags.DEFINE_bool("fit", False, "find the fastest options that fit, and print them", flag_values=values)
    flags.DEFINE_bool("json", False, "print the plan as JSON", flag_values=values)


def _main(values: flags.FlagValues, config: Config) -> int:
    config = _with_model(config, values.model)
    where = _where(values, config)
    plan = _fastest(config, *where) if values.fit else predict(config, *where)
    print(json.dumps(as_json(plan), indent=2) if values.json else table(plan))
    if values.fit and not values.json:
        print(f"\nthe fastest that fits: {' '.join(overrides(config, plan.config)) or 'the options as they are'}")
    return 0 if plan.fits else 2


def _fastest(config: Config, where: Where, measured: calibration.Calibration | None) -> Plan:
    made = []

    def planned(other: Config) -> Plan:
        made.append(predict(other, where, measured))
        print(line(made[-1]), file=sys.stderr, flush=True)
        return made[-1]

    if plan := fastest(config, planned):
        return plan
    least = min(made, key=lambda plan: plan.needed)
    raise UserError(
        f"--fit: nothing fits into {least.limit / 1e9:.2f} GB; the least, {least.needed / 1e9:.2f} GB: {line(least)}. "
        "More GPUs (--gpus with mesh.fsdp=-1), shorter rows (data.seq_len) or adapters (lora.enabled) need less"
    )


def _with_model(config: Config, model: str | None) -> Config:
    if model is None:
        return config
    return dataclasses.replace(config, model=dataclasses.replace(config.model, path=model, revision=None))


def _where(values: flags.FlagValues, config: Config) -> tuple[Where, calibration.Calibration | None]:
    """The GPUs, and what was measured on one."""
    gpus = [one for one in (values.gpus, config.device.gpus) if one is not None] or [1]
    if min(gpus) != max(gpus):
        raise UserError(f"--gpus={gpus[0]}: device.gpus is {gpus[1]}; leave one of them out")
    return Where(values.gpu, gpus[0], values.hosts), calibration.find(values.gpu, values.calibration)


if __name__ == "__main__":
    sys.exit(main())
