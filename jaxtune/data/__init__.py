"""From datasets to batches: read, render, tokenise once, plan, load.

Importing `data.columns` loads only numpy; everything else is imported on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxtune.data.chat import ChatTemplate
    from jaxtune.data.feed import Feed, open_feed, rows_to_evaluate
    from jaxtune.data.loader import abstract_batch, batches
    from jaxtune.data.prompt_feed import PromptFeed, open_prompt_sets, open_prompts
    from jaxtune.data.rows import Counts, Rows
    from jaxtune.data.splits import open_documents, open_validation, prepare_documents
    from jaxtune.data.streams import Stream
    from jaxtune.data.units import Documents

_HOMES = {
    "chat": ("ChatTemplate",),
    "feed": ("Feed", "open_feed", "rows_to_evaluate"),
    "loader": ("abstract_batch", "batches"),
    "prompt_feed": ("PromptFeed", "open_prompt_sets", "open_prompts"),
    "rows": ("Counts", "Rows"),
    "splits": ("open_documents", "open_validation", "prepare_documents"),
    "streams": ("Stream",),
    "units": ("Documents",),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"jaxtune.data.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
