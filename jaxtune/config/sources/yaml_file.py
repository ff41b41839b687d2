"""YAML files as plain values, with the line of each option for messages."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from jaxtune.errors import UserError


@dataclass(frozen=True)
class YamlFile:
    """The contents of a YAML file.

    Attributes:
        values: The values.
        lines: The line of each value, by its dotted name (`datasets[0].path`).
        repeated: Keys that are written twice in one section, and the lines of the first and the last, whose value
            counts.
    """

    values: dict[str, Any]
    lines: dict[str, int]
    repeated: dict[str, tuple[int, int]] = field(default_factory=dict)

    def line(self, name: str) -> int:
        """Return the line of an option; for one from an alias or `<<`, the line of the alias or `<<`."""
        while name and name not in self.lines:
            name = re.sub(r"\[\d+\]$|\.?[^.]*$", "", name, count=1)  # without its last [0] or .name
            # Without a line of its own, the value came from a `<<` in an enclosing mapping.
            if brought := self.lines.get(f"{name}.<<" if name else "<<"):
                return brought
        return self.lines.get(name, 1)


MAX_VALUES = 100_000
"""Limit for a file, with aliases expanded: nine lines of nested aliases can expand to a billion values."""


class _Loader(yaml.SafeLoader):
    """A loader of values, not objects. 2e-4 is a number, as in YAML 1.2, and keys stay text: `no`, not False."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[str, Any]:
        self.flatten_mapping(node)  # puts the keys from `<<` first, so that the mapping's own keys override them
        return {str(key.value): self.construct_object(value, deep) for key, value in node.value}


# YAML 1.1, which PyYAML implements, reads 2e-4 (no dot) as text.
_NUMBER = re.compile(r"[-+]?\d[\d_]*(\.\d*)?[eE][-+]?\d+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+0123456789"))  # the characters it begins with


def read(file: Path, name: str) -> YamlFile:
    """Read a file.

    Args:
        file: The file.
        name: Its name in errors.

    Raises:
        UserError: The file is not YAML (the message has the line), or not a mapping from options to values.
    """
    try:
        loader = _Loader(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, yaml.reader.ReaderError) as error:
        raise UserError(f"{name}: not text in UTF-8: {error}") from error
    try:
        node = loader.get_single_node()
        lines: dict[str, int] = {}
        repeated: dict[str, tuple[int, int]] = {}
        if node is not None:
            _find_lines(node, "", lines, {}, repeated)
        values = {} if node is None else loader.construct_document(node)
    except RecursionError:
        raise UserError(f"{name}: nested too deeply") from None
    except (TypeError, ValueError) as error:  # an invalid date, a list as a key, a tag of another type
        raise UserError(f"{name}: {error}; put text into quotes") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}" if mark else ""
        raise UserError(f"{name}{where}: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise UserError(f"{name}: {error}") from error
    finally:
        loader.dispose()
    if not isinstance(values, dict):
        raise UserError(f"{name}: expected options with values, such as 'train:' and 'max_steps: 100' below it")
    return YamlFile(values, lines, repeated)


def parse_value(text: str) -> Any:
    """Return the value that a text would be in a YAML file; text that is not YAML stays text."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError:
        return text


def _find_lines(
    node: yaml.Node,
    name: str,
    lines: dict[str, int],
    sizes: dict[int, int | None],
    repeated: dict[str, tuple[int, int]],
) -> int:
    """Record the line of each option below a node, and return the number of values with aliases expanded.

    Runs before any value is constructed, so that expanding aliases cannot exhaust memory.

    Args:
        node: The node; an alias is the node that it refers to.
        name: The dotted name of the node.
        lines: Lines by name, filled here.
        sizes: Sizes of visited nodes by id; None while a node is being visited.
        repeated: Lines of keys that are written twice, by name, filled here.

    Raises:
        yaml.MarkedYAMLError: An alias inside its own node, too many values, or a key that a config cannot have.
    """
    lines.setdefault(name, node.start_mark.line + 1)
    if id(node) in sizes:
        if (size := sizes[id(node)]) is None:
            raise yaml.MarkedYAMLError(problem="an alias inside its own value", problem_mark=node.start_mark)
        return size
    sizes[id(node)] = None
    sizes[id(node)] = size = 1 + sum(
        _find_lines(value, inner, lines, sizes, repeated) for inner, value in _below(node, name, lines, repeated)
    )
    if size > MAX_VALUES:
        problem = f"more than {MAX_VALUES:,} values after its aliases are expanded"
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
    return size


def _below(
    node: yaml.Node, name: str, lines: dict[str, int], repeated: dict[str, tuple[int, int]]
) -> Iterator[tuple[str, yaml.Node]]:
    """Yield (dotted name, node) of the values directly below a node, and record the lines of keys."""
    keys: dict[str, int] = {}
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key is not text: quote {{...}}", problem_mark=key.start_mark)
            inner = f"{name}.{key.value}" if name else key.value
            lines[inner] = key.start_mark.line + 1
            if key.value in keys:
                repeated[inner] = keys[key.value], lines[inner]
            keys.setdefault(key.value, lines[inner])
            yield inner, value
    elif isinstance(node, yaml.SequenceNode):
        yield from ((f"{name}[{i}]", item) for i, item in enumerate(node.value))
