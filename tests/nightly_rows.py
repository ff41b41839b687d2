"""Rows of a test that `pytest` leaves out, because they take long (the marker nightly in pyproject.toml)."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def nightly(*values: Any) -> Any:
    """Return a row of values as parameters of a test, marked nightly."""
    return pytest.param(*values, marks=pytest.mark.nightly)


def nightly_except(kept: Collection[Any], rows: Iterable[Any]) -> list[Any]:
    """Return the rows as parameters of a test; those that are not `kept` are marked nightly."""
    rows = list(rows)
    assert all(row in rows for row in kept)
    return [row if row in kept else nightly(row) for row in rows]
