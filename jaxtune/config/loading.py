"""Make the checked, frozen `Config` of a run: from a recipe and the user's settings, or from the JSON that it saved."""

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from ml_collections import ConfigDict

from jaxtune.config import checks, keys, option_rules, recommended
from jaxtune.config.schema import Config, Dataset, Provenance
from jaxtune.config.sources import in_memory
from jaxtune.config.sources.inheritance import RecipeConfig, inherited_keys
from jaxtune.config.typed_values import (
    INSTEAD_OF,
    NON_OPTION_FIELDS,
    build,
    from_text,
    set_value,
    to_entries,
    to_plain,
    unknown_option,
)
from jaxtune.errors import UserError, hide_secrets
from jaxtune.option_field import Problem

_SHOWN_ENTRIES = 3  # list entries for which an error repeats the same problem
# Options of an entry of data.datasets that describe the samples behind its path: which samples, the file format, the
# columns. Options for the processing of samples (prompt_format, system_prompt, function) also suit another path.
_OF_FILES = ("type", "subset", "revision", "split", "glob", "ds_type")
_OF_COLUMNS = (
    *("encoding", "select_columns", "target_column"),
    *(field.name for field in dataclasses.fields(Dataset) if field.name.endswith("_field")),
    "message_property_mappings",
)


def new_config() -> ConfigDict:
    """Return all options at their defaults, for a recipe to change; setting an unknown key raises."""
    return RecipeConfig(as_dict(Config())).lock()


def with_values(config: ConfigDict, given: Mapping[str, Any]) -> ConfigDict:
    """Return a copy of a config with these values set, by key."""
    values = _values(config)
    for key, value in _settings(given).items():
        set_value(values, key, value)
    return ConfigDict(values, type_safe=False)


def dataset(**fields: Any) -> ConfigDict:
    """Return one entry of data.datasets or data.eval_datasets: the given fields, and defaults for the others.

    Raises:
        UserError: A field does not exist.
    """
    defaults = dataclasses.asdict(Dataset())
    if unknown := [unknown_option(f"data.datasets[i].{name}", fields[name]) for name in fields if name not in defaults]:
        raise UserError("\n  ".join(problem.text for problem in unknown))
    return RecipeConfig(defaults | fields).lock()


def resolve(
    config: ConfigDict,
    recipe: str,
    overrides: Iterable[tuple[str, Any]] = (),
    source: Literal["recipe", "translation"] = "recipe",
    given: Mapping[str, Any] | None = None,
    notes: tuple[str, ...] = (),
    by: Literal["command line", "call"] = "command line",
    inherited: Container[str] | None = None,
    count: recommended.CountParameters | None = None,
) -> Config:
    """Return the typed and checked Config; its `said` records the source of each value.

    Values have three levels: inherited by the recipe, set by the recipe itself, and `overrides`. If a setting leaves a
    value of a lower level without effect, the default replaces that value, and `said` records it. If no setting of a
    higher level caused it, a value without effect is an error. A translated file states every option, so any of its
    values may be without effect.

    Args:
        config: The ConfigDict that the recipe returned.
        recipe: The recipe's name, for messages.
        overrides: Key and text of each command-line setting, such as ('train.max_steps', '10'); or key and value of
            each setting of a call in Python.
        source: Whether the values in `config` come from a recipe or from a translated file.
        given: Values that a YAML file sets on top of `config`, by key. For a translated file, the values that it
            states; `config` then has the defaults of the other system.
        notes: Lines for the user, printed at the start of the run.
        by: The source of `overrides`.
        inherited: Keys of values in `config` that come from a recipe that this one starts from; None: the keys that
            its get_config() got from another get_config().
        count: Counts the parameters of a model, on which some recommendations of train.recommend depend.

    Raises:
        UserError: There are unknown keys, wrong types or contradictions; the message lists each.
    """
    is_text = by == "command line"
    settings, values = _settings(dict(overrides), is_text), _values(config)
    given = None if given is None else _settings(given)
    inherited = inherited_keys(config) if inherited is None else inherited
    typed, stated = _leaves(settings), _leaves(given or {})
    # A setting of one entry (data.datasets[0].path) makes its whole list the user's own.
    typed_lists = {key.partition("[")[0] for key in typed if "[" in key}
    # Values without effect in the recipe itself, before settings are applied: these stay errors.
    of_recipe = checks.check(build(Config, values, "", []))
    moot_in_recipe = {problem.keys[0] for problem in of_recipe if problem.moot and problem.keys[0] not in inherited}
    wrong = [problem for item in (*(given or {}).items(), *settings.items()) if (problem := set_value(values, *item))]

    def nearness(key: str) -> int:
        """2: set by the user; 1: by the recipe or file; 0: inherited."""
        if key in typed or key in typed_lists:
            return 2
        return 0 if key in inherited and key not in stated else 1

    # In a translated file the user named the columns, so they are kept if only the path is replaced.
    names = _OF_FILES if source == "translation" else (*_OF_FILES, *_OF_COLUMNS)
    of_samples, moot = list(_of_other_samples(values, nearness, names)), list(_reset_displaced(values, nearness))
    # Recommendations come before the final check, so that they are checked like any other value.
    notes += _take_recommendations(values, typed | stated, source, count)
    kept = typed if source == "translation" else {*typed, *moot_in_recipe, *stated}
    resolved, without_effect, problems = _reset_moot(values, kept, wrong)
    raise_problems(recipe, problems)
    in_memory.refuse_ambiguous(entry.path for _, entry in resolved.entries())
    set_keys = {*typed, *stated, *option_rules.non_default_options(resolved)}
    every = (key for key, _, _ in option_rules.every_option(resolved) if key in set_keys)
    said = [Provenance(key, by if key in typed else source) for key in every]
    # In a translated file, report only values that the file states: defaults of its system do not concern the user.
    tells_all = given is None or source == "recipe"
    if reported := {key: value for key, value in of_samples if tells_all or key in stated}:
        listed = ", ".join(f"{key} = {value!r}" for key, value in reported.items())
        text = f"{source}: {listed}: describes the dataset that was replaced"
        said.append(Provenance(next(iter(reported)), source, text))
    for problem in moot + without_effect:
        if tells_all or problem.keys[0] in stated:
            said.append(Provenance(problem.keys[0], source, f"{source}: {problem.text}"))
    return dataclasses.replace(resolved, said=tuple(said), notes=notes)


def _take_recommendations(
    values: dict[str, Any], told: set[str], source: str, count: recommended.CountParameters | None
) -> tuple[str, ...]:
    """With train.recommend, set recommended values of options that nobody set; return a line about each."""
    config = build(Config, values, "", [])
    if not config.train.recommend:
        return ()
    of_recipe = () if source == "translation" else option_rules.non_default_options(config)
    better, lines = recommended.recommend(config, {*told, *of_recipe}, count)
    for key, value in better.items():
        set_value(values, key, value)
    return lines


def _reset_moot(
    values: dict[str, Any], kept: Container[str], wrong: list[Problem]
) -> tuple[Config, list[Problem], list[Problem]]:
    """Reset values without effect unless they are in `kept`; return the config, the problems solved, and the others."""
    moot = []
    # Each reset may leave further values without effect.
    while True:
        problems = list(wrong)
        resolved = build(Config, values, "", problems)
        # An option with a problem of its own has its default in `resolved`, so problems of combinations with it would
        # be misleading.
        wrong_keys = {key for problem in problems for key in problem.keys}
        conflicts = [problem for problem in checks.check(resolved) if wrong_keys.isdisjoint(problem.keys)]
        without_effect = [problem for problem in conflicts if problem.moot and problem.keys[0] not in kept]
        if not without_effect:
            return resolved, moot, problems + conflicts
        for problem in without_effect:
            option = keys.lookup(problem.keys[0])
            assert option is not None
            set_value(values, problem.keys[0], option.default)
        moot += without_effect


def _of_other_samples(
    values: dict[str, Any], nearness: Callable[[str], int], names: tuple[str, ...]
) -> Iterator[tuple[str, Any]]:
    """Reset options of an entry that describe the samples of an earlier path, if a higher level set the path.

    Yields the key and value of each option that is reset.
    """
    for list_key in ("data.datasets", "data.eval_datasets"):
        entries = _get(values, list_key)
        for i, fields in enumerate(entries if isinstance(entries, list) else ()):
            for name in names if isinstance(fields, dict) else ():
                default, key = getattr(Dataset(), name), f"{list_key}[{i}].{name}"
                value = fields.get(name, default)
                value = tuple(value) if isinstance(value, list) else value
                if value in (default, "classification") or nearness(key) >= nearness(f"{list_key}[{i}].path"):
                    continue  # keep classification, which 'auto' never chooses
                yield key, value
                fields[name] = default


def _reset_displaced(values: dict[str, Any], nearness: Callable[[str], int]) -> Iterator[Problem]:
    """Reset one of two options for the same thing if the other one was set on a higher level."""
    for key, other in INSTEAD_OF.items():
        taken, given, default = _get(values, key), _get(values, other), keys.options()[other].default
        if taken and given != default and nearness(key) > nearness(other):
            shown = f"{len(given)} entries" if isinstance(given, list) else repr(given)
            reason = f"{key} = {taken!r} takes its place"
            yield Problem((other,), f"{other} = {shown}: has no effect: {reason}", moot=True)
            set_value(values, other, default)


def _get(values: dict[str, Any], key: str) -> Any:
    """Return the value of an option outside lists, or its default if it is not set."""
    section, _, name = key.partition(".")
    fields = values.get(section)
    return fields.get(name, keys.options()[key].default) if isinstance(fields, dict) else keys.options()[key].default


def as_dict(config: Config) -> dict[str, Any]:
    """Return the options as nested dicts."""
    return {name: value for name, value in dataclasses.asdict(config).items() if name not in NON_OPTION_FIELDS}


def to_json(config: Config) -> str:
    """Return the config as JSON text for `from_json`, without secrets in URLs."""
    return hide_secrets(json.dumps(as_dict(config), indent=2)) + "\n"


def from_json(text: str | bytes, source: str = "saved config") -> Config:
    """Read a config that `to_json` wrote.

    Options that were added since then have their defaults, and options that were renamed are read by their old name.

    Args:
        text: The JSON text.
        source: Its name, for error messages.

    Raises:
        UserError: The text is not JSON, or has an unknown key or a value of a wrong type.
    """
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: bad JSON, bad UTF-8, a number of thousands of digits
        raise UserError(f"{source}: not JSON: {error}") from error
    if isinstance(values, dict) and "model_type" in values:
        raise UserError(f"{source}: it describes a model, not a run")
    for old, new in keys.RENAMED.items() if isinstance(values, dict) else ():
        section, _, name = old.partition(".")
        if isinstance(values.get(section), dict) and name in values[section]:
            set_value(values, new, values[section].pop(name))
    problems: list[Problem] = []
    config = build(Config, values, "", problems)
    raise_problems(source, problems)
    return config


def raise_problems(source: str, problems: Sequence[Problem]) -> None:
    """Raise UserError with all problems of a file, if there are any."""
    if len(problems) == 1:
        raise UserError(f"{source}: {problems[0].text}")
    if problems:
        raise UserError("\n  ".join([f"{source}: {len(problems)} problems", *_lines(problems)]))


def _lines(problems: Sequence[Problem]) -> Iterator[str]:
    """Yield the texts of problems; if many list entries have a problem with the same key, only the first ones."""
    counts: Counter[str] = Counter()
    for problem in problems:
        counts[general := keys.generalize_key(problem.keys[0])] += 1
        if counts[general] <= _SHOWN_ENTRIES:
            yield problem.text
    for general, count in counts.items():
        if count > _SHOWN_ENTRIES:
            yield f"and {count - _SHOWN_ENTRIES:,} more of {general}"


def _leaves(given: Mapping[str, Any]) -> set[str]:
    """Return the keys of values, including keys of list entries."""
    lists = {key: value for key, value in given.items() if keys.has_entries(key) and isinstance(value, list | tuple)}
    entries = [(f"{key}[{i}]", entry) for key, value in lists.items() for i, entry in enumerate(value)]
    return {*given, *(f"{at}.{name}" for at, entry in entries if isinstance(entry, Mapping) for name in entry)}


def _values(config: ConfigDict) -> dict[str, Any]:
    """Return all options as nested plain values."""
    values = to_plain(config)
    data = values.get("data")
    for name in ("datasets", "eval_datasets") if isinstance(data, dict) else ():
        data[name] = to_entries(f"data.{name}", data.get(name, ()))
    return values


def _settings(given: Mapping[str, Any], is_text: bool = False) -> dict[str, Any]:
    """Return plain values by key, list entries in order; `is_text`: values are command-line texts to parse."""
    by_key = {}
    # In order of indices, because `set_value` can only append the next entry of a list.
    for key in sorted(given, key=lambda key: [int(i) for i in re.findall(r"\[(\d+)\]", key)]):
        option, value = keys.lookup(key), to_plain(given[key])
        if option is not None and is_text:
            value = from_text(value, option.annotation)
        by_key[key] = to_entries(key, value) if keys.has_entries(key) else value
    return by_key
