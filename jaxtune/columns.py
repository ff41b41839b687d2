"""Columns: the arrays of a batch, declared by the objective that reads them."""

from typing import Literal, NamedTuple

import numpy as np


class Column(NamedTuple):
    """An array of a row, (positions,); of a batch, (micro-batches, rows, positions); with a `width` one axis more.

    The columns in `MADE` are computed when a row is built. Any other column is stored with the documents: a token's
    value stands at the position where that token is the target, like its loss weight; the value of a document or a
    unit stands at each of its tokens.

    Attributes:
        name: its key in a row and in a batch.
        dtype: of the array.
        per: whether each token, document or unit has a value. A unit is packed whole: one document, or several.
        padding: the value at positions that hold no token or no target; "seq_len": the length of the row.
        width: how many values each position has, the last axis; None: one, and no such axis.
    """

    name: str
    dtype: type[np.generic]
    per: Literal["token", "document", "unit"] = "token"
    padding: float | Literal["seq_len"] = 0
    width: int | None = None

    def shape(self, *positions: int) -> tuple[int, ...]:
        """The shape of its array, of that of the positions."""
        return positions if self.width is None else (*positions, self.width)


TOKENS = Column("tokens", np.int32)
TARGETS = Column("targets", np.int32)  # the next token of the same document
POSITIONS = Column("positions", np.int32)  # from 0 in each document
SEGMENT_IDS = Column("segment_ids", np.int32, "document")  # 1, 2, ... in a row
UNIT_IDS = Column("unit_ids", np.int32, "unit")  # 1, 2, ... in a row
# The first position that a token may attend to. Padding attends to nothing.
KEY_START = Column("key_start", np.int32, "document", "seq_len")
LAST = Column("last", np.bool_)  # whether it is the last token of its document
PLACE = Column("place", np.int32)  # its position in the row, where rows are dealt to devices: see `deal`
MADE = frozenset(column.name for column in (TOKENS, TARGETS, POSITIONS, SEGMENT_IDS, UNIT_IDS, KEY_START, LAST))

LOSS_WEIGHT = Column("loss_weight", np.float32)  # weight of the loss of predicting the target
# Which label a document has, counted from 0; of a regression, the value.
LABEL = Column("label", np.float32, "document")
# Whether a unit's answer is wanted, 1 or 0; by how much the score of the chosen answer exceeds that of the other.
DESIRABLE = Column("desirable", np.float32, "unit")
SCORE_DELTA = Column("score_delta", np.float32, "unit")
# The log-probability of a document's trained tokens by the reference of a preference loss: see `weights.reference`.
REFERENCE = Column("reference_log_prob", np.float32, "document")

# How much better a completion is than others of its prompt; the log-probability of each token before it was trained.
ADVANTAGE = Column("advantage", np.float32, "document")
OLD_LOG_PROB = Column("old_log_prob", np.float32)


def of_teacher(top_k: int) -> tuple[Column, Column]:
    """A teacher's likeliest tokens in place of each target, and their log-probabilities; last that of any other token.

    See `scoring.teacher_scores`.
    """
    return Column("teacher_tokens", np.int32, width=top_k), Column("teacher_log_probs", np.float32, width=top_k + 1)


# Columns that are computed of the documents by a model, before the first step: `Rows.with_column` adds them.
ADDED = frozenset({REFERENCE.name, *(column.name for column in of_teacher(1))})

NEXT_TOKEN = (TOKENS, TARGETS, POSITIONS, SEGMENT_IDS, KEY_START, LOSS_WEIGHT)
"""The columns that next-token prediction on packed rows reads."""

LABELLED = (TOKENS, POSITIONS, SEGMENT_IDS, KEY_START, LAST, LABEL)
"""The columns that classification of the documents in packed rows reads."""

SCORED = (TOKENS, POSITIONS, SEGMENT_IDS, KEY_START, LAST)
"""The columns that a reward model of the documents in packed rows reads."""
