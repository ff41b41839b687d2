"""Every pair of options of a system is in a file that becomes a config, or is refused by lines that name an option.

The files are a covering array: each has many options with values of their rows, drawn with a fixed seed.
"""

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from golden.foreign_tables import IN_ENTRY, INSTEAD, SYSTEMS
from golden.foreign_tables.option_values import options, promises

from jaxtune.config import foreign, keys, read_recipe
from jaxtune.errors import UserError

OPTIONS_IN_A_FILE = 20


def choices(dialect: str) -> dict[tuple[str, str], list[Any]]:
    """Return values to try of each option that has an effect here, by (list of entries or "", name)."""
    found: dict[tuple[str, str], list[Any]] = {}
    for entries, name, row in options(dialect):
        of = foreign.table(dialect)[entries].entries if entries else ""
        if row.key or row.values:
            values = [value for value, _ in promises(row, f"{of}[i].{row.keys[0]}" if of else row.keys[0])]
        elif row.convert:
            source = SYSTEMS[dialect].TOGETHER[f"{entries}.{name}" if entries else name][0]
            place = source[entries][0] if entries else source
            values = [place[name]] if name in place else []
        else:
            values = []
        if values:
            found[entries, name] = values
    return found


def covering(count: int, size: int, rng: np.random.Generator) -> Iterator[list[int]]:
    """Yield sets of `size` numbers below `count`, so that every pair of numbers is in one of them."""
    left = ~np.eye(count, dtype=bool)
    while left.any():
        chosen = [int(rng.choice(np.flatnonzero(left.any(axis=1))))]
        while len(chosen) < min(size, count):
            # The number with the most new pairs; ties are broken at random.
            gain = left[:, chosen].sum(axis=1) + rng.random(count) * 0.5
            gain[chosen] = -1
            chosen.append(int(gain.argmax()))
        left[np.ix_(chosen, chosen)] = False
        yield chosen


def files(dialect: str) -> Iterator[dict[str, Any]]:
    """Yield files with every pair of options."""
    of = choices(dialect)
    names, rng = list(of), random.Random(f"pairs of {dialect}")
    for chosen in covering(len(names), OPTIONS_IN_A_FILE, np.random.default_rng(rng.randrange(2**32))):
        file = dict(SYSTEMS[dialect].LEAST)
        for entries, name in (names[i] for i in chosen):
            value = rng.choice(of[entries, name])
            if entries:
                like = file.get(entries) or (None if (dialect, entries) in INSTEAD else file.get("datasets"))
                first = like[0] if like else {"path": "a/b"}
                file[entries] = [{**first, **IN_ENTRY.get(name, {}), name: value}]
            else:
                file[name] = value
        yield file


@pytest.mark.parametrize("dialect", foreign.DIALECTS)
def test_every_pair_of_options_is_accepted_or_refused_by_name(dialect, tmp_path):
    path = tmp_path / "its.yaml"
    known, accepted = foreign.table(dialect), 0
    for file in files(dialect):
        path.write_text(json.dumps(file))
        try:
            read_recipe(str(path), dialect=dialect).resolve()
            accepted += 1
        except UserError as error:
            first, *problems = str(error).split("\n")
            for line in problems or [first]:
                named = any(name in line for name in known) or any(key in line for key in keys.options())
                assert named and len(line) < 400, (line, file)
    assert accepted
