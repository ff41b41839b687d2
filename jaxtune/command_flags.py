"""The flags of the commands that take seconds to import.

This module imports only quick modules, so that a mistyped flag is reported without a delay (`command.main`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import get_args, get_type_hints

from absl import flags

from jaxtune.exports.gguf import KINDS
from jaxtune.inference.sampling import BOUNDS, SamplingOptions
from jaxtune.merging.options import METHODS
from jaxtune.quant.options import SCHEMES, QuantOptions

_NUMBERS = {
    "max_new_tokens": "maximum number of tokens to generate",
    "temperature": "sampling temperature; 0 takes the most likely token",
    "top_p": "sample only from the most likely tokens with this total probability",
    "top_k": "sample only from this many most likely tokens",
    "min_p": "sample only tokens with at least this share of the top token's probability",
    "repetition_penalty": "above 1, tokens that already occurred become less likely",
    "seed": "seed of the sampling",
    "batch_size": "prompts of --input in a batch",
}


@dataclass(frozen=True)
class Flags:
    """The flags of a command; the fields are the arguments of `command.run` with the same names."""

    define_flags: Callable[[flags.FlagValues], None]
    with_config: bool = True
    recipe: Callable[[flags.FlagValues], str | None] | None = None


def _evaluate(values: flags.FlagValues) -> None:
    flags.DEFINE_string("run", None, "folder of the run", flag_values=values)
    flags.DEFINE_integer("step", None, "checkpoint of the run; default: the newest valid one", flag_values=values)
    flags.DEFINE_string("model", None, "Hugging Face folder, hub id or adapter, instead of a run", flag_values=values)
    meaning = "tasks, groups, tags or patterns of lm-eval, to evaluate instead of validation data"
    flags.DEFINE_list("tasks", [], meaning, flag_values=values)
    meaning = "examples before each question of --tasks; default: the task's own number"
    flags.DEFINE_integer("num_fewshot", None, meaning, flag_values=values)
    meaning = "most questions per task, or their share if below 1, for a quick test"
    flags.DEFINE_float("limit", None, meaning, flag_values=values)
    flags.DEFINE_string("include_path", None, "folder with YAML files of your own tasks", flag_values=values)
    meaning = "format the requests of --tasks with the tokenizer's chat template, few-shot examples as turns"
    flags.DEFINE_bool("apply_chat_template", False, meaning, flag_values=values)
    meaning = "JSON file for the results of --tasks; default: RUN/lm_eval/STEP-TIME.json, none without a run"
    flags.DEFINE_string("output", None, meaning, flag_values=values)


def _recipe_to_evaluate(values: flags.FlagValues) -> str | None:
    from jaxtune.host.run_folder import RunFolder  # needs numpy

    if values.run is not None:
        folder = RunFolder(Path(values.run))
        folder.check()
        return str(folder.config)
    return "" if values.tasks and values.model is not None else None


def _export(values: flags.FlagValues) -> None:
    flags.DEFINE_string("run", None, "folder of the run", flag_values=values, required=True)
    flags.DEFINE_string(
        "output", None, "folder to write, or its URL (s3://, gs://, ...)", flag_values=values, required=True
    )
    flags.DEFINE_integer("step", None, "checkpoint; default: the newest valid one", flag_values=values)
    meaning = "hf, peft or gguf, or several; default: hf or peft, as the run trained"
    flags.DEFINE_list("format", None, meaning, flag_values=values)
    flags.DEFINE_bool("merge", False, "merge the adapter into the model's weights", flag_values=values)
    flags.DEFINE_enum("quantize", None, list(SCHEMES), "format of a whole model's linear layers", flag_values=values)
    flags.DEFINE_enum("gguf_type", "bf16", list(KINDS), "number format of --format=gguf", flag_values=values)
    meaning = "llama.cpp's convert_hf_to_gguf.py, also after its Python: 'PYTHON SCRIPT'; default: found on PATH"
    flags.DEFINE_string("gguf_converter", None, meaning, flag_values=values)
    meaning = "your own Python file with the model's family (docs/guides/plugins.md); may be given several times"
    flags.DEFINE_multi_string("plugin", [], meaning, flag_values=values)
    flags.DEFINE_string("push_to_hub", None, "hub repository to upload to as well: OWNER/NAME", flag_values=values)
    flags.DEFINE_bool("private", False, "make the uploaded repository private", flag_values=values)


def _generate(values: flags.FlagValues) -> None:
    text = partial(flags.DEFINE_string, flag_values=values)
    text("model", None, "Hugging Face folder, hub id, adapter, or run folder", required=True)
    text("adapter", None, "folder of a PEFT adapter whose base is --model")
    text("prompt", None, "text to continue, or to answer with --chat")
    meaning = "picture that --prompt asks about, a file or URL; may be given several times"
    flags.DEFINE_multi_string("image", [], meaning, flag_values=values)
    text("input", None, "file of prompts: jsonl, json, csv, parquet, or a dataset on the hub")
    text("output", None, "JSON lines file for the answers to --input; default: the terminal")
    flags.DEFINE_bool("chat", False, "format text prompts with the chat template", flag_values=values)
    meaning = "answer the questions of --input about a state, with the probability of each option"
    flags.DEFINE_bool("decide", False, meaning, flag_values=values)
    for name, meaning in _NUMBERS.items():
        low, high = BOUNDS[name]
        define = flags.DEFINE_integer if isinstance(low, int) else flags.DEFINE_float
        bounds = {"lower_bound": low, "upper_bound": None if math.isinf(high) else high}
        define(name, getattr(SamplingOptions(), name), meaning, flag_values=values, **bounds)  # type: ignore[arg-type]
    flags.DEFINE_multi_string("stop", [], "text that ends an answer; may be given several times", flag_values=values)
    flags.DEFINE_integer("step", None, "checkpoint of a run; default: the newest valid one", flag_values=values)
    formats = get_args(get_args(get_type_hints(QuantOptions)["format"])[0])
    flags.DEFINE_enum("quant", None, formats, "format to quantize the base's weights to", flag_values=values)
    meaning = "your own Python file with the model's family (docs/guides/plugins.md); may be given several times"
    flags.DEFINE_multi_string("plugin", [], meaning, flag_values=values)
    flags.DEFINE_list("mesh", [], "devices per axis, such as fsdp=4,tensor=2; default: one device", flag_values=values)


def _prepare(values: flags.FlagValues) -> None:
    flags.DEFINE_integer("show", 3, "samples to show", flag_values=values, lower_bound=0)
    flags.DEFINE_string("shard", None, "I/N: only tokenise shard I of N, counted from 0", flag_values=values)
    flags.DEFINE_bool("ids", False, "show each token with its id, label and weight", flag_values=values)


def _convert(values: flags.FlagValues) -> None:
    flags.DEFINE_string("output", None, "recipe to write: FILE.py", flag_values=values)


def _merge(values: flags.FlagValues) -> None:
    text = partial(flags.DEFINE_string, flag_values=values)
    flags.DEFINE_enum("method", None, list(METHODS), "how to merge", flag_values=values, required=True)
    meaning = "folders or hub ids of the models, or of adapters, with commas between them"
    flags.DEFINE_list("models", None, meaning, flag_values=values, required=True)
    text("base", None, "model that the others were trained from, for all methods but linear and slerp")
    text("output", None, "folder to write; it must be new or empty", required=True)
    flags.DEFINE_list("weights", [], "a number for each model; default: 1 for each", flag_values=values)
    meaning = "divide by the sum of the weights; default: with linear and ties"
    flags.DEFINE_bool("normalize", None, meaning, flag_values=values)
    number, whole = (partial(define, flag_values=values) for define in (flags.DEFINE_float, flags.DEFINE_integer))
    number("lambda", None, "factor of the merged difference; default: 1")
    number("density", None, "share of each difference that ties and dare keep; default: 0.5")
    whole("seed", None, "seed of what dare drops; default: 0", lower_bound=0)
    number("t", None, "slerp: 0 is the first model, 1 the second; default: 0.5", lower_bound=0, upper_bound=1)
    meaning = "largest rank of a merged adapter; default: the sum of the ranks, or the largest one with ties and dare"
    whole("rank", None, meaning, lower_bound=1)


def _doctor(values: flags.FlagValues) -> None:
    flags.DEFINE_string("output_dir", "runs", "folder of all runs: train.output_dir", flag_values=values)


COMMANDS = {
    "train": Flags(lambda values: None),
    "evaluate": Flags(_evaluate, recipe=_recipe_to_evaluate),
    "export": Flags(_export, with_config=False),
    "generate": Flags(_generate, with_config=False),
    "prepare": Flags(_prepare),
    "convert": Flags(_convert),
    "merge": Flags(_merge, with_config=False),
    "doctor": Flags(_doctor, with_config=False),
}
