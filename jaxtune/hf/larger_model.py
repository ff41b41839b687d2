"""A decoder written in place of the one in a larger model, such as one that sees images."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from jaxtune.hf.tensor_sources import ALL_DTYPES, check_content, current_name, older_name, open_sources, weight_files
from jaxtune.hf.weights import Tensor


def in_place(folder: Path, tensors: Iterable[Tensor], untouched: Callable[[str], bool]) -> Iterator[Tensor]:
    """Tensors in place of those of a Hugging Face folder, by the names that these have there; then the untouched ones.

    Those are read, each when it is written, and are what they are in the folder, bit by bit.
    """
    sources = open_sources(weight_files(folder))
    older = any(current_name(name) != name for name in sources)
    for tensor in tensors:
        yield tensor._replace(name=older_name(tensor.name) if older else tensor.name)
    others = {name: source for name, source in sources.items() if untouched(name)}
    check_content(others.values())
    for name, source in others.items():
        yield Tensor(name, source.shape, ALL_DTYPES[source.dtype], source.whole)
