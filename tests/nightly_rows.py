"""Rows of a test that `pytest` leaves out, because they take long (the marker nightly in pyproject.toml)."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pytest
from family_configs import FAMILIES


def nightly(*values: Any) -> Any:
    """Return a row of values as parameters of a test, marked nightly."""
    return pytest.param(*values, marks=pytest.mark.nightly)


def nightly_except(kept: Collection[Any], rows: Iterable[Any]) -> list[Any]:
    """Return the rows as parameters of a test; those that are not `kept` are marked nightly."""
    rows = list(rows)
    assert all(row in rows for row in kept)
    return [row if row in kept else nightly(row) for row in rows]


def every_family(kept: Collection[str], *more: Any, left_out: Mapping[str, str] = {}) -> list[Any]:
    """Return a row of each tiny config in FAMILIES and `more` values; those that are not `kept` are marked nightly.

    left_out: configs without a row, and why.
    """
    assert FAMILIES.keys() >= {*kept, *left_out}
    rows = [name for name in FAMILIES if name not in left_out]
    return [pytest.param(name, *more) if name in kept else nightly(name, *more) for name in rows]
