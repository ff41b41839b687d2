"""From datasets to batches: read, render, tokenise once, plan, load.

Importing `columns` loads only numpy; everything else is imported on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxtune.data.chat.chat_template import ChatTemplate
    from jaxtune.data.chat.template_line import say_template
    from jaxtune.data.formats.units import Documents
    from jaxtune.data.images.image_reader import open_reader
    from jaxtune.data.rows.feed import Feed, is_chat, open_feed, rows_to_evaluate
    from jaxtune.data.rows.loader import abstract_batch, batches
    from jaxtune.data.rows.packed_rows import Counts, Rows
    from jaxtune.data.rows.prompt_feed import PromptFeed, PromptSet, columns_of, open_prompt_sets, open_prompts
    from jaxtune.data.rows.splits import open_documents, open_validation, prepare_documents
    from jaxtune.data.rows.streams import Stream

_HOMES = {
    "chat.chat_template": ("ChatTemplate",),
    "chat.template_line": ("say_template",),
    "images.image_reader": ("open_reader",),
    "rows.feed": ("Feed", "is_chat", "open_feed", "rows_to_evaluate"),
    "rows.loader": ("abstract_batch", "batches"),
    "rows.prompt_feed": ("PromptFeed", "PromptSet", "columns_of", "open_prompt_sets", "open_prompts"),
    "rows.packed_rows": ("Counts", "Rows"),
    "rows.splits": ("open_documents", "open_validation", "prepare_documents"),
    "rows.streams": ("Stream",),
    "formats.units": ("Documents",),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"jaxtune.data.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
