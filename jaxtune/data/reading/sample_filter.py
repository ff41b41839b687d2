"""Select the samples and columns of a source that an entry uses, and apply the user's own function."""

from collections.abc import Callable
from itertools import islice

from jaxtune.config.schema import Dataset
from jaxtune.data.chat.messages import clip
from jaxtune.data.reading.readers import Report, Sample, Samples
from jaxtune.data.reading.user_files import load
from jaxtune.errors import UserError


def select_samples(samples: Samples, entry: Dataset, report: Report) -> Samples:
    """Yield the samples that the entry selects, with the selected columns, changed by the entry's function.

    Raises:
        UserError: no sample has a selected column; the function does not exist.
    """
    change = load(entry.function, "data: function") if entry.function else None
    missing = set(entry.select_columns or ())
    # First every shards-th sample, then the first `samples` among them.
    for where, sample in islice(islice(samples, entry.shard_idx or 0, None, entry.shards or 1), entry.samples):
        if entry.select_columns is not None:
            missing -= sample.keys()
            sample = {column: sample[column] for column in entry.select_columns if column in sample}
        if change is not None:
            try:
                sample = _apply(sample, change)
            except UserError as error:
                report(UserError(f"{where}: {entry.function}: {error}"))
                continue
        if sample is not None:
            yield where, sample
    if missing:
        raise UserError(f"data: select_columns: no sample has {', '.join(map(repr, sorted(missing)))}")


def _apply(sample: Sample, change: Callable[[dict], object]) -> Sample | None:
    """Return the user's function of a sample; None leaves the sample out, and a text becomes the column `returned`."""
    try:
        result = change(dict(sample))
    except Exception as error:  # the function is the user's program: it can fail in any way
        raise UserError(f"{type(error).__name__}: {error}") from error
    if isinstance(result, str):
        return {**sample, "returned": result}
    if result is not None and not isinstance(result, dict):
        raise UserError(
            f"it must return a dict of columns, a text, or None to leave the sample out, not {clip(repr(result))}"
        )
    return result
