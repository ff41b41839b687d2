"""YAML files as plain values, with the line of each option for messages."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from jaxtune.errors import UserError


@dataclass(frozen=True)
class Written:
    """What a YAML file says: its values, and the line of each by its dotted name (`datasets[0].path`)."""

    values: dict[str, Any]
    lines: dict[str, int]


class _Loader(yaml.SafeLoader):
    """Values only, no objects. A key that is written twice is an error, and 2e-4 a number, as in YAML 1.2."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key is not text: quote {{...}}", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} is written twice", key.start_mark)
            seen.add(key.value)
        return {str(key): value for key, value in super().construct_mapping(node, deep).items()}


_NUMBER = re.compile(r"[-+]?\d[\d_]*(\.\d*)?[eE][-+]?\d+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+0123456789"))


def read(file: Path, name: str) -> Written:
    """Reads a file; `name` is how errors call it.

    Raises:
        UserError: Not YAML, with the line, or not a mapping from options to values.
    """
    try:
        loader = _Loader(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, yaml.reader.ReaderError) as error:
        raise UserError(f"{name}: not text in UTF-8: {error}") from error
    try:
        node = loader.get_single_node()
        lines: dict[str, int] = {}
        if node is not None:
            _find_lines(node, "", lines, {})
        values = {} if node is None else loader.construct_document(node)
    except RecursionError:
        raise UserError(f"{name}: nested too deeply") from None
    except (TypeError, ValueError) as error:  # a date that is none, a key that is a list, a tag that does not fit
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
    return Written(values, lines)


def _find_lines(node: yaml.Node, name: str, lines: dict[str, int], finished: dict[int, bool]) -> None:
    """`finished`: of each node that was met, whether all below it were; an alias is the node that it stands for."""
    lines.setdefault(name, node.start_mark.line + 1)
    if id(node) in finished:
        if not finished[id(node)]:
            raise yaml.MarkedYAMLError(problem="an alias inside of what it stands for", problem_mark=node.start_mark)
        return
    finished[id(node)] = False
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner = f"{name}.{key.value}" if name else str(key.value)
            lines[inner] = key.start_mark.line + 1
            _find_lines(value, inner, lines, finished)
    elif isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            _find_lines(item, f"{name}[{i}]", lines, finished)
    finished[id(node)] = True
