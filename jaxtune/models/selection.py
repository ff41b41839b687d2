"""The one selector: a regex, or a list of names, over Hugging Face names with their layer number."""

import logging
import re
from collections.abc import Iterable

from jaxtune.errors import UserError

log = logging.getLogger("jaxtune")


def select(
    pattern: str | tuple[str, ...], names: Iterable[str], option: str, others: Iterable[str] = ()
) -> frozenset[str]:
    """Names that match: found by the regex anywhere in them, or ending in one of the listed dotted names.

    Logs how many matched. Raises UserError, naming `option`, where nothing does: a selection that selects nothing is
    a mistake. `others`: names that the option never applies to; where one of them matches, the error says so.
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
