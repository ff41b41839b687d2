"""Write a trained decoder back into the larger model that contains it, such as a vision-language model."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from jaxtune.hf.tensor_sources import ALL_DTYPES, check_content, current_name, older_name, open_sources, weight_files
from jaxtune.hf.weights import OutputTensor


def replace_decoder(
    folder: Path, tensors: Iterable[OutputTensor], untouched: Callable[[str], bool]
) -> Iterator[OutputTensor]:
    """Yield the decoder's `tensors` under the names used in a Hugging Face folder, then the folder's untouched tensors.

    Untouched tensors are copied bit for bit; each is read when it is written.
    """
    sources = open_sources(weight_files(folder))
    older = any(current_name(name) != name for name in sources)
    for tensor in tensors:
        yield tensor._replace(name=older_name(tensor.name) if older else tensor.name)
    copied = {name: source for name, source in sources.items() if untouched(name)}
    check_content(copied.values())
    for name, source in copied.items():
        yield OutputTensor(name, source.shape, ALL_DTYPES[source.dtype], source.whole)
