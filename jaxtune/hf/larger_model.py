"""Write a trained decoder as its base's files have it: under their names, and inside a larger model if there is one."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from jaxtune.hf.tensors.tensor_sources import ALL_DTYPES, check_content, older_name, open_sources, weight_files
from jaxtune.hf.tensors.tensor_writing import OutputTensor


def with_untouched(
    folder: Path, tensors: Iterable[OutputTensor], untouched: Callable[[str], bool]
) -> Iterator[OutputTensor]:
    """Yield the decoder's `tensors`, then the folder's untouched tensors.

    Untouched tensors are copied bit for bit; each is read when it is written.
    """
    yield from tensors
    copied = {name: source for name, source in open_sources(weight_files(folder)).items() if untouched(name)}
    check_content(copied.values())
    for name, source in copied.items():
        yield OutputTensor(name, source.shape, ALL_DTYPES[source.dtype], source.whole, take_part=lambda: None)


def named_as_in_files(folder: Path, tensors: Iterable[OutputTensor]) -> Iterator[OutputTensor]:
    """Yield the tensors under the names that a Hugging Face folder has for them."""
    files = open_sources(weight_files(folder))
    rename = older_name(files)
    for tensor in tensors:
        yield tensor if tensor.name in files else tensor._replace(name=rename(tensor.name))
