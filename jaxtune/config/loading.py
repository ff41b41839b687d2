"""From a recipe and command-line settings to a `Config`: typed, checked, frozen."""

import ast
import contextlib
import dataclasses
import json
import math
import re
import types
import typing
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any, Literal, Union

from ml_collections import ConfigDict

from jaxtune.config import checks, keys, recommended, rules
from jaxtune.config.rules import Problem
from jaxtune.config.schema import Config, Dataset, Said
from jaxtune.errors import UserError

NOT_OPTIONS = ("said", "notes")  # fields of Config
_TRUTH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def new_config() -> ConfigDict:
    """Every option at its default, for a recipe to change; setting an unknown key raises."""
    # Types are checked by `resolve`, all at once: ml_collections knows neither unions nor allowed values.
    return ConfigDict(as_dict(Config()), type_safe=False).lock()


def with_values(config: ConfigDict, given: Mapping[str, Any]) -> ConfigDict:
    """A copy of a config in which options have these values, by key."""
    values = plain(config)
    for key, value in given.items():
        set_value(values, key, plain(value))
    return ConfigDict(values, type_safe=False)


def dataset(**fields: Any) -> ConfigDict:
    """One entry of data.datasets or data.eval_datasets: the given fields, the rest at their defaults.

    Raises:
        UserError: A field that does not exist.
    """
    defaults = dataclasses.asdict(Dataset())
    if unknown := [_unknown(f"data.datasets[i].{name}", fields[name]) for name in fields if name not in defaults]:
        raise UserError("\n  ".join(problem.text for problem in unknown))
    return ConfigDict(defaults | fields, type_safe=False).lock()


def resolve(
    config: ConfigDict,
    recipe: str,
    overrides: Iterable[tuple[str, Any]] = (),
    source: Literal["recipe", "translation"] = "recipe",
    given: Mapping[str, Any] | None = None,
    notes: tuple[str, ...] = (),
    by: Literal["command line", "call"] = "command line",
) -> Config:
    """The typed and checked Config; its `said` records who gave each value.

    A value without effect is an error if the user wrote it. If a recipe's value loses its effect through an override,
    it is not an error: the default takes its place, and `said` records that. A translated file states every option, so
    any of its values may be without effect.

    Args:
        config: What the recipe returned.
        recipe: Its name, for messages.
        overrides: Key and text of each command-line setting, such as ('train.max_steps', '10'); or key and value of
            each setting of a call in Python.
        source: Where the values in `config` are from.
        given: Values that a YAML file sets on top of `config`, by key. Of a translated file, those that it states;
            `config` has the defaults of its system.
        notes: Lines for the user that the run begins with.
        by: Whose settings `overrides` are.

    Raises:
        UserError: There are unknown keys, wrong types or contradictions; the message lists all of them.
    """
    settings, values, stated = plain(dict(overrides)), plain(config), _leaves(given or {})
    typed = _leaves(settings)
    own = [problem.keys[0] for problem in checks.check(_build(Config, values, "", [])) if problem.moot]
    wrong = [problem for key, value in (given or {}).items() if (problem := set_value(values, key, plain(value)))]
    is_text = by == "command line"
    wrong += [problem for key, value in settings.items() if (problem := _override(values, key, value, is_text))]
    moot = list(_of_other_datasets(values, typed))
    if (asked := _build(Config, values, "", [])).train.recommend:
        own_values = () if source == "translation" else rules.changed(asked)
        better, lines = recommended.recommend(asked, {*typed, *stated, *own_values})
        for key, value in better.items():
            set_value(values, key, value)
        notes += lines
    mine = () if source == "translation" else (*own, *stated)
    while True:
        problems = list(wrong)
        resolved = _build(Config, values, "", problems)
        # An option that already has a problem of its own is not checked in combination with others.
        judged = {key for problem in problems for key in problem.keys}
        found = [problem for problem in checks.check(resolved) if judged.isdisjoint(problem.keys)]
        spared = [problem for problem in found if problem.moot and problem.keys[0] not in (*typed, *mine)]
        if not spared:
            break
        for problem in spared:
            option = keys.lookup(problem.keys[0])
            assert option is not None
            set_value(values, problem.keys[0], option.default)
        moot += spared
    refuse(recipe, problems + found)
    kept = {*typed, *stated, *rules.changed(resolved)}
    said = [Said(key, by if key in typed else source) for key, _, _ in rules.every_option(resolved) if key in kept]
    # That a default of the other system has no effect is nothing its user needs to know.
    told = [problem for problem in moot if given is None or source == "recipe" or problem.keys[0] in stated]
    said += [Said(problem.keys[0], source, f"{source}: {problem.text}") for problem in told]
    return dataclasses.replace(resolved, said=tuple(said), notes=notes)


def _of_other_datasets(values: dict[str, Any], typed: Container[str]) -> Iterator[Problem]:
    """Resets what belongs to the recipe's own dataset, such as its split, in entries whose path was typed."""
    for list_name in ("datasets", "eval_datasets"):
        entries = values.get("data", {}).get(list_name, ())
        for i, fields in enumerate(entries if isinstance(entries, list) else ()):
            entry = f"data.{list_name}[{i}]"
            own = isinstance(fields, dict) and f"{entry}.path" in typed
            for name in ("subset", "revision", "split", "glob", "ds_type") if own else ():
                default, key = getattr(Dataset(), name), f"{entry}.{name}"
                if key not in typed and fields.get(name, default) != default:
                    text = f"{key} = {fields[name]!r}: has no effect: it belongs to the recipe's own dataset"
                    yield Problem((key,), text, moot=True)
                    fields[name] = default


def as_dict(config: Config) -> dict[str, Any]:
    """The options, as nested dicts."""
    return {name: value for name, value in dataclasses.asdict(config).items() if name not in NOT_OPTIONS}


def to_json(config: Config) -> str:
    """The config as JSON text, read back by `from_json`."""
    return json.dumps(as_dict(config), indent=2) + "\n"


def from_json(text: str, source: str = "saved config") -> Config:
    """The config that `to_json` wrote; options added since then have their defaults. `source` is its name in errors.

    An option that was renamed since then is read by its old name.

    Raises:
        UserError: Not JSON, an unknown key, or a wrong type.
    """
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{source}: not JSON: {error}") from error
    if isinstance(values, dict) and "model_type" in values:
        raise UserError(f"{source}: it describes a model, not a run")
    for old, new in keys.RENAMED.items() if isinstance(values, dict) else ():
        section, _, name = old.partition(".")
        if isinstance(values.get(section), dict) and name in values[section]:
            set_value(values, new, values[section].pop(name))
    problems: list[Problem] = []
    config = _build(Config, values, "", problems)
    refuse(source, problems)
    return config


def refuse(source: str, problems: list[Problem]) -> None:
    """Raises UserError with all problems of a file, if there are any."""
    if len(problems) == 1:
        raise UserError(f"{source}: {problems[0].text}")
    if problems:
        raise UserError("\n  ".join([f"{source}: {len(problems)} problems", *(problem.text for problem in problems)]))


def _leaves(given: Mapping[str, Any]) -> set[str]:
    """The keys of values, with those of list entries."""
    lists = {key: value for key, value in given.items() if keys.has_entries(key) and isinstance(value, list | tuple)}
    entries = [(f"{key}[{i}]", entry) for key, value in lists.items() for i, entry in enumerate(value)]
    return {*given, *(f"{at}.{name}" for at, entry in entries if isinstance(entry, Mapping) for name in entry)}


def plain(value: Any) -> Any:
    """ConfigDicts as dicts, tuples as lists, all the way down."""
    if isinstance(value, ConfigDict | dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def _override(values: dict[str, Any], key: str, value: Any, is_text: bool) -> Problem | None:
    """Sets one option in the plain tree, or says why not; `is_text`: as it was typed on the command line."""
    option = keys.lookup(key)
    if option is None:
        return _unknown(key, value)
    return set_value(values, key, _from_text(value, option.annotation) if is_text else value)


def set_value(values: dict[str, Any], key: str, value: Any) -> Problem | None:
    """Sets one option in the plain tree; returns a problem if the key's list index does not exist."""
    *parents, name = re.findall(r"\w+", key)
    node: Any = values
    for i, parent in enumerate(parents):
        if isinstance(node, list):
            if int(parent) >= len(node):
                found = f"{'.'.join(parents[:i])} has no entry {parent}; its length is {len(node)}, counted from 0"
                return Problem((key,), f"{key} = {value!r}: {found}")
            node = node[int(parent)]
        elif isinstance(node, dict):
            node = node.setdefault(parent, {})
    if isinstance(node, dict):  # otherwise it is not a section, which `_build` reports
        node[name] = value
    return None


def _build(section: Any, values: Any, prefix: str, problems: list[Problem]) -> Any:
    """A section's dataclass from a mapping; wrong values are added to `problems` and replaced by their defaults."""
    if not isinstance(values, dict):
        key = prefix.removesuffix(".")
        problems.append(Problem((key,), f"{key} = {values!r}: expected a section ({section.__doc__})"))
        return section()
    annotations = typing.get_type_hints(section)
    fields = {}
    for name, value in values.items():
        key, annotation = f"{prefix}{name}", annotations.get(name)
        if annotation is None or (section is Config and name in NOT_OPTIONS):
            problems.append(_unknown(key, value))
        elif dataclasses.is_dataclass(annotation):
            fields[name] = _build(annotation, value, f"{key}.", problems)
        elif (entry := keys.entry_type(annotation)) and isinstance(value, list):
            fields[name] = tuple(_build(entry, item, f"{key}[{i}].", problems) for i, item in enumerate(value))
        else:
            rule = section.__dataclass_fields__[name]
            if value == -1 and annotation == int | None and not rules.inside(-1, rule.metadata["within"]):
                value = None  # as other toolkits write a count that is not set
            try:
                fields[name] = _convert(value, annotation)
            except TypeError:
                meaning = rule.metadata["doc"]
                expected = keys.describe(annotation)
                if _is_infinite_or_nan(value):
                    expected = f"a finite {expected}"
                elif isinstance(value, str) and typing.get_origin(annotation) is tuple:
                    is_section = keys.entry_type(annotation) is not None
                    expected += f" such as ({f'dataset(path={value!r})' if is_section else repr(value)},)"
                problems.append(Problem((key,), f"{key} = {value!r}: expected {expected} ({meaning})"))
    return section(**fields)


def _is_infinite_or_nan(value: Any) -> bool:
    try:
        return not math.isfinite(float(value))
    except (TypeError, ValueError):
        return False


def _convert(value: Any, annotation: Any) -> Any:
    """The value as the annotated type. Only ints are converted to float, and lists to tuples.

    Raises:
        TypeError: It is of another type, or not a finite number.
    """
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (Union, types.UnionType):
        for member in arguments:
            with contextlib.suppress(TypeError):
                return _convert(value, member)
    elif origin is Literal:
        if any(type(value) is type(allowed) and value == allowed for allowed in arguments):
            return value
    elif origin is tuple:
        if isinstance(value, list | tuple):
            return tuple(_convert(item, arguments[0]) for item in value)
    elif annotation is float:
        if type(value) in (int, float) and math.isfinite(value):
            return float(value)
    elif type(value) is annotation:
        return value
    raise TypeError


_WORD = r"([\w.*=/:~-]+|<[^<>,]+>)"  # a name, a path, a pattern of these, or a special token


def _from_text(text: str, annotation: Any) -> Any:
    """The value that a command-line text means for an option of this type; the text itself if it fits none.

    Texts as people write them: yes and no, lists without quotes (q_proj,v_proj), \\n for the end of a line.
    """
    if annotation is bool and text.lower() in _TRUTH:
        return _TRUTH[text.lower()]
    several = "," in text and tuple[str, ...] in typing.get_args(annotation)
    if re.fullmatch(f"{_WORD}(,{_WORD})*", text) and (several or _is_list_of_words(annotation)):
        return tuple(text.split(","))
    try:
        literal = ast.literal_eval({"true": "True", "false": "False"}.get(text, text))
        # A quoted string keeps its quotes: the shell has already removed its own, so these belong to the value.
        if not isinstance(literal, str):
            return None if literal is None else _convert(literal, annotation)
    except (ValueError, SyntaxError, TypeError):
        pass
    # Harmless in a regular expression, where backslash-n and a newline mean the same.
    return re.sub(r"(?<!\\)\\([nt])", lambda escape: {"n": "\n", "t": "\t"}[escape[1]], text)


def _is_list_of_words(annotation: Any) -> bool:
    """Whether it is a list of texts, or of the names that a Literal allows."""
    if typing.get_origin(annotation) is not tuple:
        return False
    member = typing.get_args(annotation)[0]
    return member is str or typing.get_origin(member) is Literal


def _unknown(key: str, value: Any) -> Problem:
    nearest = keys.nearest(key)
    return Problem((key, nearest.key) if nearest else (key,), f"{key} = {value!r}: {keys.no_such_option(key)}")
