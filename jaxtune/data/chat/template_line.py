"""The line of a run that says which chat template it uses, and why.

Processes that tokenise import chat_template.py, and must not import jax, so it is not there.
"""

from collections.abc import Iterator

from jaxtune.config.schema import ChatOptions
from jaxtune.data.chat.chat_template import MARK, source_of
from jaxtune.hf import describe_template
from jaxtune.tokenizer_type import Tokenizer


def say_template(tokenizer: Tokenizer, chat: ChatOptions, masks: bool = True) -> Iterator[str]:
    """Yield a line that says which chat template is used and why, if there is one.

    Args:
        tokenizer: the tokenizer with the template.
        chat: the section chat.
        masks: whether to say how the trained text is found.
    """
    if source := source_of(tokenizer):
        marks = "its {% generation %} marks say what the assistant writes"
        how = marks if MARK.search(source) else "the assistant's turns are found in the rendered text"
        yield f"chat template: {describe_template(source, chat.template)}{f'; {how}' if masks else ''}"
