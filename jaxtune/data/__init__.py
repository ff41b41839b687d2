"""From datasets to batches: read, render, tokenise once, plan, load."""

from jaxtune.data.chat import ChatTemplate
from jaxtune.data.documents import Documents
from jaxtune.data.feed import Feed, open_feed
from jaxtune.data.loader import abstract_batch, batches
from jaxtune.data.rows import Counts, Rows
from jaxtune.data.splits import open_documents
