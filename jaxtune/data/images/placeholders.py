"""The text of an image in a prompt: as a chat template writes it, and expanded to image tokens.

The same as in `replace_image_token` of a family's Processor in transformers.
"""

from collections.abc import Callable
from dataclasses import dataclass

from jaxtune.errors import UserError
from jaxtune.image_layout import ImageLayout, ImageRef
from jaxtune.tokenizer_type import Tokenizer


@dataclass(frozen=True)
class Placeholder:
    """The text of images for a family and a tokenizer.

    Attributes:
        written: the text that the chat template writes for an image.
        token: the image token, which the expanded text has once for each embedding.
        expand: returns the expanded text from rows and columns of embeddings.
        around: the texts that the chat template writes before and after it, and `expand` keeps.
    """

    written: str
    token: str
    expand: Callable[[int, int], str]
    around: tuple[str, str] = ("", "")

    def __call__(self, ref: ImageRef, layout: ImageLayout) -> str:
        """Return the expanded text of an image."""
        return self.expand(ref.grid[0] // layout.merge, ref.grid[1] // layout.merge)


# Families by the text around the image tokens: names in the tokenizer of the tokens, and their usual texts.
_GEMMA = {"boi_token": ("<start_of_image>", "<|image>"), "eoi_token": ("<end_of_image>", "<image|>")}
_AROUND = {"qwen": ("<|vision_start|>", "<|vision_end|>"), "ernie": ("<|IMAGE_START|>", "<|IMAGE_END|>")}


def find_placeholder(family: str, tokenizer: Tokenizer, layout: ImageLayout) -> Placeholder:
    """Return the placeholder of a family, the model_type of config.json.

    Raises:
        UserError: the tokenizer lacks a token that it needs.
    """
    token = tokenizer.convert_ids_to_tokens(layout.token)
    if not isinstance(token, str):
        raise UserError(f"the tokenizer has no token {layout.token}, the model's image token")
    if family == "mistral3":
        end_of_row, end = (_known(text, tokenizer) for text in ("[IMG_BREAK]", "[IMG_END]"))
        return Placeholder(token, token, lambda rows, columns: _in_rows(token, end_of_row, end, rows, columns))
    if family.startswith("gemma"):
        begin, end = (_special(name, texts, tokenizer) for name, texts in _GEMMA.items())
        if family.startswith("gemma3"):
            return Placeholder(begin, token, lambda rows, columns: f"\n\n{begin}{token * (rows * columns)}{end}\n\n")
        return Placeholder(token, token, lambda rows, columns: f"{begin}{token * (rows * columns)}{end}")
    around = next((texts for name, texts in _AROUND.items() if family.startswith(name)), ("", ""))
    return Placeholder(token, token, lambda rows, columns: token * (rows * columns), around)


def _in_rows(token: str, end_of_row: str, end: str, rows: int, columns: int) -> str:
    row = token * columns
    return (row + end_of_row) * (rows - 1) + row + end


def _special(name: str, usual: tuple[str, ...], tokenizer: Tokenizer) -> str:
    """Return a token that the tokenizer names, else the first of its usual texts that the tokenizer knows."""
    named = getattr(tokenizer, name, None)
    vocabulary = tokenizer.get_vocab()
    return named or _known(next((text for text in usual if text in vocabulary), usual[0]), tokenizer)


def _known(text: str, tokenizer: Tokenizer) -> str:
    if text not in tokenizer.get_vocab():
        raise UserError(f"the tokenizer has no token {text}, which the images of this model need")
    return text
