"""Merging of LoRA adapters that have the same base and the same modules.

The updates of the weights are merged, scale * B @ A. A weighted sum of updates is exactly one product, of the Bs
and the As side by side. Sums of the Bs and of the As would give another update, because their product has mixed terms.
"""

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32

from jaxtune import hf
from jaxtune.errors import UserError
from jaxtune.hf.tensors.tensor_sources import DTYPES, check_content
from jaxtune.lora.options import LoraOptions
from jaxtune.merging.methods import cast, merge_differences, slerp_weights, sum_weights
from jaxtune.merging.options import METHODS, MergeOptions

Matrix = Float32[np.ndarray, "rows columns"]


class Update(NamedTuple):
    """The update b @ a of a weight.

    Attributes:
        a: (rank, in).
        b: (out, rank).
    """

    a: Matrix
    b: Matrix


class Merged(NamedTuple):
    """A merged update.

    Attributes:
        update: its best approximation of the adapter's rank.
        whole: sum of squares of the merged update.
        kept: sum of squares of the approximation.
    """

    update: Update
    whole: float
    kept: float


def merge_adapters(folders: Sequence[Path], output: Path, options: MergeOptions, rank: int | None) -> float:
    """Write the merged adapter to a folder, module by module. The files appear when all are complete.

    It has the dtype, base and tokenizer of the first adapter, and a scale of 1.

    Args:
        folders: folders of PEFT adapters.
        output: the folder to write.
        options: method and options. An adapter's update is its difference from the base.
        rank: largest rank of the result; None: the sum of the ranks, which is exact, or the largest one if the method
            prunes updates.

    Returns:
        The share of the merged updates that the result has, by sums of squares.

    Raises:
        UserError: the adapters differ in base or modules, or have more than LoRA's A and B.
    """
    adapters = [_open(folder) for folder in folders]
    _check_alike(folders, adapters)
    check_content(source for adapter in adapters for source in adapter.tensors.values())
    ranks = {module: _choose_rank(adapters, module, options, rank) for module in sorted(adapters[0].modules)}
    shares: dict[str, tuple[float, float]] = {}

    @functools.lru_cache(maxsize=1)  # A and B are written one after the other
    def merge(module: str) -> Update:
        reads = [partial(_read, adapter, module) for adapter in adapters]
        merged = _merge(module, reads, ranks[module], options)
        shares[module] = (merged.whole, merged.kept)
        return merged.update

    usual = Counter(ranks.values()).most_common(1)[0][0]  # rank_pattern has the others
    others = {module: size for module, size in ranks.items() if size != usual}
    alphas = {module: float(size) for module, size in others.items()}
    first, lora = adapters[0], LoraOptions(enabled=True, rank=usual, alpha=float(usual))  # alpha / rank = 1
    with hf.staging_folder(output, replaces=re.compile("(?!)")) as stage:  # (?!) matches no file: none is removed
        tensors = _tensors(first, ranks, merge)
        hf.write_adapter(stage, tensors, lora, first.base_model, first.revision, tuple(ranks), (), others, alphas)
        hf.copy_tokenizer_files(folders[0], stage)
    whole, kept = (sum(sizes) for sizes in zip(*shares.values()))
    return kept / whole if whole else 1.0


def _open(folder: Path) -> hf.SavedAdapter:
    """Read an adapter's headers. Raises UserError if it has more than the A and B of linear layers."""
    adapter = hf.read_adapter(folder)
    further = [name for name in adapter.tensors if not re.search(r"\.lora_[AB]\.weight$", name)]
    if further or adapter.parameters:
        what = f"{further[0]} is not lora_A or lora_B" if further else f"{adapter.parameters[0]} are experts"
        raise UserError(
            f"{folder}: {what}, and only these are merged for linear layers; merge each adapter into its model "
            "(`merge_and_unload` of peft), then merge the models"
        )
    return adapter


def _check_alike(folders: Sequence[Path], adapters: Sequence[hf.SavedAdapter]) -> None:
    """Raise UserError unless all adapters have the same base, and the same modules with weights of the same shape."""
    first = adapters[0]
    for folder, adapter in zip(folders[1:], adapters[1:]):
        if (adapter.base_model, adapter.revision) != (first.base_model, first.revision):
            raise UserError(
                f"{folder} is an adapter of {_base(adapter)} and {folders[0]} of {_base(first)}; if both are the same "
                "model, give it the same name in both (base_model_name_or_path in adapter_config.json)"
            )
        if differing := sorted(adapter.modules ^ first.modules):
            has, lacks = (folder, folders[0]) if differing[0] in adapter.modules else (folders[0], folder)
            raise UserError(
                f"{differing[0]} has an adapter in {has} and none in {lacks}; merge adapters of the same modules"
            )
        for module in first.modules:
            shapes = [_shape(one, module) for one in (first, adapter)]
            if shapes[0] != shapes[1]:
                raise UserError(
                    f"{folder}: {module} is adapted as a weight {shapes[1]}, and in {folders[0]} as {shapes[0]}; merge "
                    "adapters of the same base"
                )


def _base(adapter: hf.SavedAdapter) -> str:
    return f"{adapter.base_model} at {adapter.revision}" if adapter.revision else f"{adapter.base_model}"


def _shape(adapter: hf.SavedAdapter, module: str) -> tuple[int, int]:
    """Return the shape of the weight that a module's adapter updates."""
    a, b = (adapter.tensors[f"{module}.lora_{half}.weight"].shape for half in "AB")
    return b[0], a[1]


def _choose_rank(adapters: Sequence[hf.SavedAdapter], module: str, options: MergeOptions, most: int | None) -> int:
    """Return the rank of a module in the merged adapter."""
    ranks = [adapter.of_module(module)[0] for adapter in adapters]
    if METHODS[options.method].prunes:
        return min(most or max(ranks), *_shape(adapters[0], module))  # no matrix has a larger rank
    total = sum(rank for rank, weight in zip(ranks, options.weights) if weight)
    return total if most is None else min(most, total)


def _read(adapter: hf.SavedAdapter, module: str) -> Update:
    """Read the update of a module, with its scale in A."""
    sources = [adapter.tensors[f"{module}.lora_{half}.weight"] for half in "AB"]
    a, b = (source.whole().astype(np.float32) for source in sources)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise UserError(f"{sources[0].file}: {module} has NaN or infinite values; it cannot be merged")
    rank, alpha = adapter.of_module(module)
    return Update(a * np.float32(alpha / (rank**0.5 if adapter.use_rslora else rank)), b)


def _merge(module: str, reads: Sequence[Callable[[], Update]], rank: int, options: MergeOptions) -> Merged:
    """Merge the updates of a module."""
    if METHODS[options.method].prunes:
        dense = [lambda read=read: _product(read()) for read in reads]
        return _approximate(merge_differences(module, dense, options), rank)
    updates = [read() for read in reads]
    interpolates = options.method == "slerp"
    factors = slerp_weights(_cosine(*updates), options.t) if interpolates else sum_weights(options)
    chosen = [(one, factor) for one, factor, weight in zip(updates, factors, options.weights) if weight]
    # [B1 B2] [A1; A2] = B1 A1 + B2 A2, exactly.
    a = np.concatenate([update.a * np.float32(factor) for update, factor in chosen])
    update = Update(a, np.concatenate([update.b for update, _ in chosen], axis=1))
    if rank < len(a):
        return _reduce(update, rank)
    return Merged(update, *[_inner(update, update)] * 2)  # nothing is lost


def _product(update: Update) -> Matrix:
    return update.b @ update.a  # (out, rank) (rank, in)


def _cosine(first: Update, second: Update) -> float:
    """Return the cosine of the angle between two updates, without computing them; 0 if one is zero."""
    norms = (_inner(first, first) * _inner(second, second)) ** 0.5
    return float(np.clip(_inner(first, second) / norms, -1, 1)) if norms else 0.0


def _inner(one: Update, other: Update) -> float:
    """Return the sum of the products of the values of two updates."""
    # sum(B1 A1 * B2 A2) = sum((B1^T B2) * (A1 A2^T)): products of (rank, rank), without the updates themselves.
    halves = (one.b.T.astype(np.float64) @ other.b, one.a.astype(np.float64) @ other.a.T)
    return float(np.sum(halves[0] * halves[1]))


def _reduce(update: Update, rank: int) -> Merged:
    """Return the best approximation of a smaller rank: SVD of the small factors of a QR decomposition."""
    # B A = Q_b (R_b R_a^T) Q_a^T, so the SVD of the small middle matrix gives the one of B A.
    (of_b, right), (of_a, left) = np.linalg.qr(update.b), np.linalg.qr(update.a.T)
    u, sizes, v = np.linalg.svd(right @ left.T)
    rank = min(rank, len(sizes))
    smaller = Update((sizes[:rank, None] * v[:rank]) @ of_a.T, of_b @ u[:, :rank])  # (rank, in), (out, rank)
    return Merged(smaller, float(np.sum(sizes**2)), float(np.sum(sizes[:rank] ** 2)))


def _approximate(matrix: Matrix, rank: int) -> Merged:
    """Return the best approximation of a rank, by eigenvectors of the matrix times its transpose."""
    wide = matrix if len(matrix) <= matrix.shape[1] else matrix.T  # the smaller product
    sizes, vectors = np.linalg.eigh(wide.astype(np.float64) @ wide.T)  # sizes: squares of the singular values
    top = vectors[:, ::-1][:, :rank].astype(np.float32)  # eigh sorts upwards
    update = Update(top.T @ matrix, top) if wide is matrix else Update(top.T, matrix @ top)
    return Merged(update, float(sizes.sum()), float(sizes[-rank:].sum()))


def _tensors(
    first: hf.SavedAdapter, ranks: Mapping[str, int], merge: Callable[[str], Update]
) -> Iterator[hf.OutputTensor]:
    """Yield A and B of each module, whose data is read and merged when they are written."""
    for module, rank in ranks.items():
        rows, columns = _shape(first, module)
        for half, shape in (("A", (rank, columns)), ("B", (rows, rank))):
            source = first.tensors[name := f"{module}.lora_{half}.weight"]
            dtype = DTYPES[source.dtype]
            yield hf.OutputTensor(name, shape, dtype, partial(_half, merge, module, half, dtype, source.file))


def _half(merge: Callable[[str], Update], module: str, half: str, dtype: np.dtype, file: Path) -> np.ndarray:
    return cast(getattr(merge(module), half.lower()), dtype, f"{file}: lora_{half} of {module}")
