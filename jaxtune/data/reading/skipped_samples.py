"""Samples that a run leaves out: the loss that is worth a warning, and the line that lists bad samples."""

from collections.abc import Sequence

from jaxtune.errors import format_count

LISTED = 5  # skipped samples that are shown to the user
LITTLE = 0.05  # share of the samples, or of their tokens: a loss above it is worth a warning


def list_skipped(problems: Sequence[str], count: int) -> str:
    """Return a line with the number of skipped samples, and the first LISTED of their problems."""
    more = ["..."] if count > LISTED else []
    return "\n  ".join([f"{format_count(count, 'sample')} skipped:", *problems[:LISTED], *more])
