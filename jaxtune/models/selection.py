"""The selector of all options: a regex, or a list of names, matched against Hugging Face names with layer numbers."""

import logging
import re
from collections.abc import Iterable

from jaxtune.errors import UserError

log = logging.getLogger("jaxtune")


def select(
    pattern: str | tuple[str, ...], names: Iterable[str], option: str, others: Iterable[str] = ()
) -> frozenset[str]:
    """Return the names that the regex matches anywhere, or that end in one of the listed dotted names.

    Logs how many matched. Raises UserError, with the name of the option, if nothing matches: an empty selection is a
    mistake. `others`: names that the option never applies to; if one of these matches instead, the error says so.
    """
    names = tuple(names)
    chosen: set[str] = set()
    for one in (pattern,) if isinstance(pattern, str) else pattern:
        expression = one if isinstance(pattern, str) else rf"(^|\.){re.escape(one)}$"
        matched = {name for name in names if re.search(expression, name)}
        if not matched:
            other = next((name for name in others if re.search(expression, name)), None)
            known = f"; {option.partition('.')[0]} leaves {other} alone, so it needs no {option}" if other else ""
            example = ", ".join(names[:3])
            raise UserError(f"{option}={one!r} matches none of {len(names)} names, for example {example}{known}")
        chosen |= matched
    log.info("%s: %r matches %d of %d", option, pattern, len(chosen), len(names))
    return frozenset(chosen)
