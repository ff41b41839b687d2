"""Tokenises and packs the data of a recipe, counts it, and shows what would be trained on.

No weights are read. A sample is shown as token(id|label|weight), label and weight being those of the loss: -100 and 0,
in grey, where a token is only context; trained tokens are green.
"""

import sys
from functools import partial
from typing import TYPE_CHECKING

from absl import flags
from rich.console import Console
from rich.text import Text

from jaxtune import command, hf
from jaxtune.config.schema import Config
from jaxtune.data import Documents, Rows, open_documents
from jaxtune.data.formats import IGNORED_LABEL

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def describe(documents: Documents, i: int, tokenizer: "PreTrainedTokenizerFast") -> Text:
    """The i-th document as coloured token(id|label|weight)."""
    tokens, weights = documents.read(i, 0, int(documents.lengths[i]))
    text = Text()
    for position, (token, weight) in enumerate(zip(tokens.tolist(), weights.tolist())):
        if position == 0:
            weight = 0.0  # nothing comes before it that could predict it
        shown = str(tokenizer.decode([token])).replace("\n", "\\n")
        style = "green" if weight else "bright_black"
        text.append(shown, style).append(f"({token}|{token if weight else IGNORED_LABEL}|{weight:g}) ", f"{style} dim")
    return text


def _define_flags(values: flags.FlagValues):
    flags.DEFINE_integer("show", 3, "samples to show", flag_values=values, lower_bound=0)


def _main(values: flags.FlagValues, config: Config):
    assert config.model.path is not None
    tokenizer = hf.load_tokenizer(hf.resolve(config.model.path, config.model.revision, weights=False))
    train, validation = open_documents(config, tokenizer)
    console = Console(soft_wrap=True, highlight=False)
    for note in dict.fromkeys(config.left_out + train.notes + (validation.notes if validation else ())):
        console.print(note, markup=False)
    console.print(f"training: {Rows(train, config.data, epochs=1).counts}")
    if validation:
        console.print(f"validation: {Rows(validation, config.data, epochs=1).counts}")
    for i in range(min(values.show, len(train))):
        console.print(f"\nsample {i}:", describe(train, i, tokenizer))


main = partial(command.run, _define_flags, _main)

if __name__ == "__main__":
    sys.exit(main())
