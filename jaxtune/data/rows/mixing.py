"""Mix datasets: each one whole, or in given shares."""

import dataclasses

import numpy as np
from jaxtyping import Int64

from jaxtune.config.schema import DataOptions, Dataset
from jaxtune.data.formats.units import Documents


def mix(documents: Documents, entries: tuple[Dataset, ...], data: DataOptions) -> Documents:
    """Return the documents of several entries in the shares that the entries set, the same documents in each epoch.

    - data.mixing='interleave_under': as many units as possible without repeating one. One dataset is used whole, the
      others in part.
    - data.mixing='interleave_over': as few units as it takes to use every unit. One dataset is used once, units of the
      others are repeated.
    - data.samples_per_epoch: this many units; a dataset that has too few repeats them. With data.mixing='concat' the
      shares are the sizes of the datasets.

    Args:
        documents: the documents, with a part for each entry, in their order.
        entries: the entries; all have a weight, or none has.
        data: reads mixing, mixing_temperature, samples_per_epoch, shuffle and seed.
    """
    if data.mixing == "concat" and data.samples_per_epoch is None:
        return documents
    ends = np.cumsum([len(part.units) - 1 for part in documents.parts])
    # Chosen units are ascending until here, so the units of an entry are one range.
    groups = np.split(documents.chosen, np.searchsorted(documents.chosen, ends[:-1]))
    sizes = np.array([len(group) for group in groups])
    if data.mixing == "concat":
        weights = sizes.astype(np.float64)
    elif entries[0].weight is not None:
        weights = np.array([entry.weight for entry in entries], np.float64)
    else:
        # Temperature-scaled mixing of T5 (Raffel et al. 2020): at temperature 1 shares follow the sizes; the higher it
        # is, the more equal they are.
        temperature = data.mixing_temperature
        weights = np.ones(len(sizes)) if temperature is None else np.maximum(sizes, 1) ** (1 / temperature)
    left = sizes > 0  # a small dataset may be held out whole
    if data.samples_per_epoch is not None:
        # Rounding the running sum, not each share, makes the counts add up to samples_per_epoch.
        ends = np.cumsum(weights * left) / np.sum(weights * left) * data.samples_per_epoch
        counts = np.diff(np.rint(ends), prepend=0).astype(int)
    else:
        # sizes / weights is the length of the mixture at which a dataset is used up, up to a factor; the first or the
        # last dataset decides.
        most = np.min if data.mixing == "interleave_under" else np.max
        counts = np.rint(weights * most((sizes / weights)[left])).astype(int)
        # Rounding must not leave out a dataset that has units.
        counts = np.where(left, np.maximum(counts, 1), 0)
    # np.resize begins again at the start of the array, so no unit occurs a second time before all have occurred once.
    drawn = [np.resize(_shuffle(group, data, i), count) for i, (group, count) in enumerate(zip(groups, counts))]
    # Units of a dataset are spread evenly over (0, 1), and the datasets are merged in this order.
    places = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
    order = np.arange(len(places)) if data.mixing == "concat" else np.argsort(places, kind="stable")
    parts = tuple(
        dataclasses.replace(part, notes=(*part.notes, f"{part.name}: {count:,} drawn of {size:,}"))
        for part, count, size in zip(documents.parts, counts, sizes)
    )
    return dataclasses.replace(documents, parts=parts, chosen=np.concatenate(drawn)[order])


def _shuffle(units: Int64[np.ndarray, "n"], data: DataOptions, part: int) -> Int64[np.ndarray, "n"]:
    if not data.shuffle:
        return units
    # As in `splits.hold_out`: the raw stream never changes between versions of numpy.
    random = np.random.Philox(np.random.SeedSequence(data.seed, spawn_key=(2, part))).random_raw(len(units))
    return units[np.argsort(random, kind="stable")]
