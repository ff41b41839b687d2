"""The type of a tokenizer. Only type checkers import it from transformers, which takes seconds to import."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast as Tokenizer
else:
    Tokenizer = Any
