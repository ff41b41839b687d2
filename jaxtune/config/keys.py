"""All options as one flat list of dotted keys, and the search for the key nearest to a mistyped one."""

import ast
import dataclasses
import difflib
import functools
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union

from jaxtune.config.schema import Config
from jaxtune.data_options import READ_BY_TYPE, Dataset


@dataclass(frozen=True)
class Option:
    """One option. Options of list entries have `[i]` in their key: `data.datasets[i].path`."""

    key: str
    annotation: Any
    default: Any
    unit: str
    doc: str
    within: str  # interval of a number; "" if any number is valid
    when: tuple[str, ...]  # the option has an effect only if all these expressions are true
    basic: bool  # listed by `jaxtune options` without --all
    also: str  # its names in other systems, separated by spaces


# The option meant by a flag or key without a section, if it names a section or is the last part of several keys.
_WITHOUT_SECTION = {
    "model": "model.path",
    "path": "model.path",
    "dtype": "model.dtype",
    "data": "data.datasets",
    "data.path": "data.datasets",
    "file": "data.datasets",
    "context": "data.seq_len",
    "eval": "data.eval_datasets",
    "epochs": "train.epochs",
    "steps": "train.max_steps",
    "seed": "train.seed",
    "name": "train.run_name",
    "micro_batch_size": "train.micro_batch_size",
    "beta": "preference.beta",
    "optim": "optim.name",
    "lora": "lora.enabled",
    "quant": "quant.format",
    "precision": "precision.recipe",
}

# Values of other systems, and their equivalents here.
VALUES = {
    "optim.name": {
        **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "paged_adamw_32bit"), "adamw"),
        **dict.fromkeys(("adamw_bnb_8bit", "paged_adamw_8bit", "adamw8bit"), "adamw_8bit"),
        **dict.fromkeys(("lion_32bit", "paged_lion_32bit"), "lion"),
        "schedule_free_adamw": "schedule_free",
    },
    "data.datasets[i].type": {
        **dict.fromkeys(("sharegpt", "chat_template", "chat", "messages"), "conversation"),
        **dict.fromkeys(("alpaca", "instruct"), "instruction"),
        **dict.fromkeys(("completion", "pretrain"), "text"),
        **dict.fromkeys(("dpo", "pairwise"), "preference"),
        "kto": "unpaired_preference",
    },
    "preference.loss": {
        "dpo": "sigmoid",
        "reward": "bradley_terry",
        "grpo": "rollout.rewards and grpo.loss, which are options",
    },
    "precision.recipe": {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "fp8": "fp8_hybrid"},
    "quant.format": {"4bit": "nf4", "8bit": "int8"},
}
VALUES["data.eval_datasets[i].type"] = VALUES["data.datasets[i].type"]

# Former names of options, which saved configs may contain.
RENAMED = {"data.chat_template": "chat.template"}


@functools.cache
def options() -> dict[str, Option]:
    """Return every option by key, in the order of the schema."""
    return {option.key: option for option in _options_of(Config, "")}


@functools.cache
def _by_alias() -> dict[str, str]:
    # In reverse, so that an option of data.datasets has priority over its copy in data.eval_datasets.
    return {alias: option.key for option in reversed(options().values()) for alias in option.also.split()}


def lookup(key: str) -> Option | None:
    """Return the option for a key as a user writes it, with indices (`data.datasets[1].path`), or None."""
    return options().get(generalize_key(key))


def nearest_option(key: str) -> Option | None:
    """Return the option most similar to an unknown key, with the index of `key`; None if none is similar."""
    best, index = _nearest(generalize_key(key)), re.search(r"\[\d+\]", key)
    if best is None:
        return None
    return dataclasses.replace(options()[best], key=best.replace("[i]", index[0]) if index else best)


@functools.lru_cache  # each entry of a long list may have the same unknown key
def _nearest(key: str) -> str | None:
    def likeness(candidate: str) -> tuple[float, float]:
        # Comparing whole keys finds the right section; comparing last parts finds options under a wrong section.
        return _ratio(key, candidate), _ratio(key.rpartition(".")[2], candidate.rpartition(".")[2])

    if meant := _WITHOUT_SECTION.get(key.lower()) or _by_alias().get(key.rpartition(".")[2].lower()):
        return meant
    scores = {candidate: likeness(candidate) for candidate in options()}
    best = max(scores, key=lambda candidate: sum(scores[candidate]))
    return best if max(scores[best]) >= 0.6 else None  # 0.6: difflib's own cutoff


def is_like_one_of_an_entry(name: str) -> bool:
    """Whether a name resembles an option of a data.datasets entry, or is one in another system."""
    option_names = [field.name for field in dataclasses.fields(Dataset)]
    return _by_alias().get(name, "").startswith("data.datasets") or bool(
        difflib.get_close_matches(name, option_names, 1, 0.8)
    )


def no_such_option(key: str) -> str:
    """Return an error text about an unknown key, with the nearest option."""
    if members := [member for member in options() if member.startswith(f"{generalize_key(key)}.")]:
        return f"a section, not an option; its options: {', '.join(members)}"
    option = nearest_option(key)
    if option is None:
        return "no such option; python -m jaxtune.options --all lists them"
    return f"no such option; nearest: {option.key}: {describe(option.annotation)} ({option.doc})"


def nearest_value(key: str, value: Any, annotation: Any) -> str | None:
    """Return the allowed value most similar to a wrong one, in meaning or spelling; None if none is similar."""
    if not isinstance(value, str):
        return None
    if meant := VALUES.get(generalize_key(key), {}).get(value.lower()):
        return meant
    members = (annotation, *typing.get_args(annotation))
    allowed = [word for member in members if typing.get_origin(member) is Literal for word in typing.get_args(member)]
    return next(
        iter(difflib.get_close_matches(value.lower(), [word for word in allowed if isinstance(word, str)])), None
    )


def entry_type(annotation: Any) -> Any | None:
    """Return the dataclass of the entries if an option is a list of sections, else None."""
    arguments = typing.get_args(annotation)
    return arguments[0] if arguments and dataclasses.is_dataclass(arguments[0]) else None


def flatten_options(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of nested options; a key may also be written with dots."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and lookup(key) is None:
            yield from flatten_options(value, f"{key}.")
        elif value is not None or not is_section(key):  # an empty section sets nothing
            yield key, value


def is_section(key: str) -> bool:
    """Whether a key is a section, which contains options."""
    return any(known.startswith(f"{key}.") for known in options())


def has_entries(key: str) -> bool:
    """Whether a key is an option that holds a list of sections."""
    option = lookup(key)
    return option is not None and entry_type(option.annotation) is not None


def describe(annotation: Any) -> str:
    """Return a type as shown to users: `int | None`, `'bf16' | 'fp32'`, `tuple[str, ...]`."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (Union, types.UnionType):
        return " | ".join(describe(member) for member in arguments)
    if origin is Literal:
        return " | ".join(repr(value) for value in arguments)
    if origin is tuple:
        return f"tuple[{describe(arguments[0])}, ...]"
    return "None" if annotation is types.NoneType else annotation.__name__


def names_in_expression(expression: str) -> list[str]:
    """Return the options that an expression reads, as dotted names."""
    nodes = ast.walk(ast.parse(expression, mode="eval"))
    read = [ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute | ast.Name)]
    # Without the parts of longer names: ast.walk yields `optim` too for `optim.name`.
    return [name for name in read if not any(other.startswith(f"{name}.") for other in read)]


def _options_of(section: Any, prefix: str, outer: tuple[str, ...] = ()) -> list[Option]:
    result = []
    annotations = typing.get_type_hints(section)
    for field in dataclasses.fields(section):
        key, annotation = prefix + field.name, annotations[field.name]
        conditions = (*outer, field.metadata["when"]) if field.metadata.get("when") else outer
        if dataclasses.is_dataclass(annotation):
            result += _options_of(annotation, f"{key}.", conditions)
            continue
        if not field.metadata:
            continue  # fields of Config that are not options: said, notes
        # The columns of a dataset entry get their condition from READ_BY_TYPE; 'auto' may become any of the types.
        types = [repr(type_) for type_, read in READ_BY_TYPE.items() if field.name in (*read[0], *read[1])]
        if section is Dataset and types:
            conditions = (f"type in ({', '.join([repr('auto'), *types])})", *conditions)
        # A section's condition may read one of its own options, such as lora.enabled, which it must not disable.
        when = tuple(condition for condition in conditions if key not in names_in_expression(condition))
        unit, doc, within, basic, also = (field.metadata[name] for name in ("unit", "doc", "within", "basic", "also"))
        result.append(Option(key, annotation, field.default, unit, doc, within, when, basic, also))
        if entry := entry_type(annotation):
            result += _options_of(entry, f"{key}[i].")
    return result


def generalize_key(key: str) -> str:
    """Replace each index in a key with [i]."""
    return re.sub(r"\[\d+\]", "[i]", key)


def _ratio(a: str, b: str) -> float:
    return difflib.SequenceMatcher(a=a, b=b, autojunk=False).ratio()
