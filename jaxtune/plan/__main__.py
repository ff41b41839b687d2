"""Predict memory and speed of a run on GPUs that are not present; exit code 2 if it does not fit.

    python -m jaxtune.plan --config=qwen_lora:Qwen/Qwen3-8B --gpu=h100
    python -m jaxtune.plan --config=qwen_full --model=Qwen/Qwen3-8B --gpu=h100 --gpus=8 --hosts=2
    python -m jaxtune.plan --config=qwen_full --model=Qwen/Qwen3-8B --gpus=8 --price=2.50
    python -m jaxtune.plan --config=qwen_lora:Qwen/Qwen3-8B --gpu=rtx4090 --fit
    python -m jaxtune.plan --config=qwen_lora:Qwen/Qwen3-8B --gpu=rtx4090,l40s,h100 --gpus=1,2 --fit
    python -m jaxtune.plan qwen_lora:Qwen/Qwen3-8B qwen_qlora_nf4:Qwen/Qwen3-8B --gpu=l40s
    python -m jaxtune.plan --config=qwen_lora:Qwen/Qwen3-8B --gpu=h200 --calibration=benchmarks/results/nvidia_h200.json

The step of the run is compiled for these GPUs (pip install 'jaxtune[aot]'). The compiler reports its memory; a time
model predicts its time, with a range. jaxtune/plan/rates.py has all assumptions of this model; --calibration replaces
them by rates that were measured on such a GPU (benchmarks/gpu_suite.py --only assumptions). No weight is read. --fit
looks for the fastest micro-batch, rematerialisation policy and, if necessary, quantization of the base. Several
recipes, kinds of GPU (--gpu=any: all) and numbers of GPUs are compared, by speed and price.
"""

import sys

from absl import flags

from jaxtune import command
from jaxtune.config.schema import Config
from pallas_kernels.gpus import GPUS


def main(argv: list[str] | None = None) -> int:
    """Print plans; return the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    recipes = [argument for argument in arguments if not argument.startswith("-")]
    if not recipes:
        return command.run(_define_flags, _plan_one, arguments)
    parsed: dict[str, tuple[flags.FlagValues, Config]] = {}
    rest = [argument for argument in arguments if argument.startswith("-")]
    for recipe in recipes:

        def body(values: flags.FlagValues, config: Config, recipe: str = recipe) -> None:
            # `recipe` is a default argument, because a closure would see the loop's last one.
            parsed[recipe] = values, config

        if (code := command.run(_define_flags, body, [f"--config={recipe}", *rest])) or not parsed:
            return code
    return command.run_guarded(lambda: _compare(parsed))


def _plan_one(values: flags.FlagValues, config: Config) -> int:
    from jaxtune.plan.hints import plan_one  # seconds to import: flags and recipe are read before

    return plan_one(values, config)


def _compare(parsed: dict[str, tuple[flags.FlagValues, Config]]) -> int:
    from jaxtune.plan.hints import compare

    return compare(parsed)


def _define_flags(values: flags.FlagValues) -> None:
    meaning = f"kinds of GPU to compare, with commas between them: {', '.join(GPUS)}; any: all"
    flags.DEFINE_list("gpu", ["h100"], meaning, flag_values=values)
    meaning = "GPUs per host, or several numbers with commas between them; default: device.gpus of the recipe, or 1"
    flags.DEFINE_list("gpus", None, meaning, flag_values=values)
    flags.DEFINE_integer("hosts", 1, "number of hosts", lower_bound=1, flag_values=values)
    flags.DEFINE_string("model", None, "model instead of the recipe's: hub id or folder", flag_values=values)
    meaning = "result file of benchmarks/gpu_suite.py on such a GPU: its measured rates replace the assumed ones"
    flags.DEFINE_string("calibration", None, meaning, flag_values=values)
    meaning = "price of a GPU for an hour, in any currency; of several kinds: h100=2.50,l40s=0.80; default: a rough one"
    flags.DEFINE_string("price", None, meaning, flag_values=values)
    flags.DEFINE_bool("fit", False, "find the fastest options that fit, and print them", flag_values=values)
    flags.DEFINE_bool("json", False, "print the plan as JSON", flag_values=values)


if __name__ == "__main__":
    sys.exit(main())
