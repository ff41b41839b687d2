"""Columns: the arrays of a batch, declared by the objective that reads them."""

from typing import Literal, NamedTuple

import numpy as np

from jaxtune.image_layout import ImageLayout


class Column(NamedTuple):
    """An array of a row, (positions,), and of a batch, (micro-batches, rows, positions); `width` adds a last axis.

    With `per="patch"` a position is a patch of the row's images, not a token.

    The columns in `MADE` are computed when a row is built. All other columns are stored with the documents. The value
    of a token, like its loss weight, is at the position that predicts the token; the value of a document or a unit is
    at each of its tokens.

    Attributes:
        name: the column's key in a row and in a batch.
        dtype: the dtype of the array.
        per: whether each token, each document, each unit or each patch has a value. A unit is one document or several
            that are packed into the same row.
        padding: the value at positions without a token, target or patch; "seq_len": the length of the row.
        width: number of values at each position, the size of the last axis; None: one value, and no such axis.
        length: number of positions of a row, if each patch has a value; None: the length of the row.
    """

    name: str
    dtype: type[np.generic]
    per: Literal["token", "document", "unit", "patch"] = "token"
    padding: float | Literal["seq_len"] = 0
    width: int | None = None
    length: int | None = None

    def shape(self, *positions: int) -> tuple[int, ...]:
        """Return the shape of the column's array from the shape of the positions of tokens."""
        positions = positions if self.length is None else (*positions[:-1], self.length)
        return positions if self.width is None else (*positions, self.width)


TOKENS = Column("tokens", np.int32)
TARGETS = Column("targets", np.int32)  # the next token of the same document
POSITIONS = Column("positions", np.int32)  # from 0 in each document
SEGMENT_IDS = Column("segment_ids", np.int32, "document")  # 1, 2, ... in a row
UNIT_IDS = Column("unit_ids", np.int32, "unit")  # 1, 2, ... in a row
# The first position that a token may attend to. Padding has the length of the row: it attends to no position.
KEY_START = Column("key_start", np.int32, "document", "seq_len")
LAST = Column("last", np.bool_)  # whether the token is the last one of its document
PLACE = Column("place", np.int32)  # the token's position in the row, if rows are dealt to devices: see `deal`
LOSS_WEIGHT = Column("loss_weight", np.float32)  # weight of the loss of predicting the target


def further_columns(modules: int) -> tuple[Column, Column]:
    """Return the columns of the tokens 2, ..., modules + 1 after each token of the same document, and of their weights.

    The weight of a token is its loss_weight, also if the next token has none; a token after the document's end has 0.
    """
    targets = Column("further_targets", np.int32, width=modules)
    return targets, Column("further_loss_weight", np.float32, width=modules)


_MADE = (TOKENS, TARGETS, POSITIONS, SEGMENT_IDS, UNIT_IDS, KEY_START, LAST, *further_columns(1))

# The number of a document's label, from 0; for regression, the value.
LABEL = Column("label", np.float32, "document")
# Rows of a decision model's head, by the type of question; option i of a question has row i of its type.
QUESTION_ROWS = {"noul": range(2), "score": range(2, 12), "choice": range(12, 32)}
HEAD_ROWS = 32
# The target probability of each row of the head at a document, a question; NOT_AN_OPTION: the question lacks it.
NOT_AN_OPTION = -1.0
OPTION_SHARES = Column("option_shares", np.float32, "document", NOT_AN_OPTION, width=HEAD_ROWS)
# Whether a unit's answer is wanted, 1 or 0.
DESIRABLE = Column("desirable", np.float32, "unit")
# The score of the chosen answer less the score of the rejected one.
SCORE_DELTA = Column("score_delta", np.float32, "unit")
# The log-probability of a document's trained tokens by the reference of a preference loss: see `weights.reference`.
REFERENCE = Column("reference_log_prob", np.float32, "document")

# The advantage of a token's completion over the other completions of its prompt; 0 with too little entropy.
ADVANTAGE = Column("advantage", np.float32)
# The log-probability of each token under the policy before it is trained on the completion.
OLD_LOG_PROB = Column("old_log_prob", np.float32)
# The log-probability of each token by the engine that sampled it; NaN: unknown.
SAMPLED_LOG_PROB = Column("sampled_log_prob", np.float32)


def routed_experts(width: int) -> Column:
    """Return the column of the experts, of all layers with experts, that a token's prediction went through.

    Like a log-probability, a token's value is at the position that predicts it: the experts of that position. -1: the
    router chooses.
    """
    return Column("routed_experts", np.int16, padding=-1, width=width)


def teacher_columns(top_k: int) -> tuple[Column, Column]:
    """Return the columns of a teacher's top-k tokens at each target, and of their log-probabilities.

    The last log-probability is the one of all other tokens together. See `scoring.teacher_scores`.
    """
    return Column("teacher_tokens", np.int32, width=top_k), Column("teacher_log_probs", np.float32, width=top_k + 1)


# The number of the teacher of a document.
TEACHER = Column("teacher", np.int32, "document")

# One past the last position that a token may attend to, if that is not the token itself: tokens of an image may see
# each other. 0 for padding.
KEY_END = Column("key_end", np.int32)
# The number of an image token's embedding among those that the row's patches become; -1: the token has its own.
IMAGE_PLACE = Column("image_place", np.int32, padding=-1)
# Rotary positions of a token along time, height and width, if the model's images have positions in two axes.
ROPE_POSITIONS = Column("rope_positions", np.int32, width=3)


def image_columns(layout: ImageLayout, patches: int) -> tuple[Column, ...]:
    """Return the columns that a vision tower adds to an objective's.

    patches: patches of a row. Patches of an image are adjacent, in the order of `ImageLayout`; images follow one
    another in the order of their tokens. Padding sees no patch: its intervals are empty.
    """
    columns = [
        # Pixels of each patch, (channels, rows, columns) in one axis, normalised as the image processor does.
        Column("patches", np.float32, "patch", width=layout.patch_values, length=patches),
        Column("patch_positions", np.int32, "patch", width=2, length=patches),  # row and column in the image
        Column("patch_grid", np.int32, "patch", padding=1, width=2, length=patches),  # rows and columns of the image
        # The interval of patches of the same image; below, of the same window of the image.
        Column("patch_start", np.int32, "patch", length=patches),
        Column("patch_end", np.int32, "patch", length=patches),
    ]
    if layout.window is not None:
        columns += [Column(f"window_{edge}", np.int32, "patch", length=patches) for edge in ("start", "end")]
    columns.append(IMAGE_PLACE)
    columns += [ROPE_POSITIONS] * layout.rope_axes + [KEY_END] * layout.bidirectional
    return tuple(columns)


_OF_IMAGES = image_columns(ImageLayout(1, 1, 0, window=1, rope_axes=True, bidirectional=True), 1)
OF_IMAGES = frozenset(column.name for column in _OF_IMAGES)
OF_PATCHES = frozenset(column.name for column in _OF_IMAGES if column.per == "patch")
MADE = OF_IMAGES | {column.name for column in _MADE}

# Columns that a model computes from the documents before the first step: `Rows.with_column` adds them.
ADDED = frozenset({REFERENCE.name, *(column.name for column in teacher_columns(1))})

NEXT_TOKEN = (TOKENS, TARGETS, POSITIONS, SEGMENT_IDS, KEY_START, LOSS_WEIGHT)
"""The columns that next-token prediction on packed rows reads."""

LABELLED = (TOKENS, POSITIONS, SEGMENT_IDS, KEY_START, LAST, LABEL)
"""The columns that classification of the documents in packed rows reads."""

ASKED = (TOKENS, POSITIONS, SEGMENT_IDS, KEY_START, LAST, OPTION_SHARES)
"""The columns that a decision model of the documents in packed rows reads."""

SCORED = (TOKENS, POSITIONS, SEGMENT_IDS, KEY_START, LAST)
"""The columns that a reward model of the documents in packed rows reads."""
