"""Templates that are filled with the columns of a sample: '{title}: {body}'."""

import functools
import string
from collections.abc import Mapping
from typing import Any

from jaxtune.data.chat.messages import clip
from jaxtune.errors import UserError


def is_template(field: str) -> bool:
    """Whether a field is a text with columns in braces, not the name of one column."""
    return "{" in field


def columns_in(field: str) -> tuple[str, ...]:
    """Return the columns that a template names; a field that is not a template names one column.

    Raises UserError as `fill`.
    """
    return tuple(name for _, name in _parts(field) if name is not None) if is_template(field) else (field,)


def fill(template: str, values: Mapping[str, Any]) -> str:
    """Return the template with names replaced by their values.

    Raises:
        UserError: a brace is not closed, or holds more than a name; a value is missing, or not text or a number.
    """
    return "".join(fill_to(template, "", values))


def fill_to(template: str, name: str, values: Mapping[str, Any]) -> tuple[str, str]:
    """Return the filled template in two parts, split before the first `name`; the second is "" if it does not occur."""
    before, after = [], []
    texts = before
    for text, named in _parts(template):
        texts.append(text)
        texts = after if named == name else texts
        texts += [] if named is None else [_as_text(values, named)]
    return "".join(before), "".join(after)


@functools.lru_cache
def _parts(template: str) -> tuple[tuple[str, str | None], ...]:
    """Return pairs of a text and the name after it; None at the end of the template."""
    try:
        parsed = list(string.Formatter().parse(template))  # (text, name, format after :, conversion after !)
    except ValueError as error:
        raise UserError(f"{clip(repr(template))}: {error}; write {{{{ and }}}} for plain braces") from None
    for _, name, form, conversion in parsed:
        if name is not None and (not name or form or conversion):
            raise UserError(f"{clip(repr(template))}: braces must hold the name of a column and nothing else")
    # Some documentation writes {'title'} for {title}.
    return tuple((text, name and name.strip("'")) for text, name, _, _ in parsed)


def _as_text(values: Mapping[str, Any], name: str) -> str:
    if name not in values:
        raise UserError(f"missing column {name!r}; it has {', '.join(map(str, values)) or 'none'}")
    value = values[name]
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise UserError(f"column {name!r} must be text or a number, found {clip(repr(value))}")
    return str(value)
