"""A teacher on a vLLM server, which returns the likeliest tokens at each target of a step's answers."""

from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Bool, Float64

from jaxtune.columns import Column, teacher_columns
from jaxtune.config.schema import Config
from jaxtune.models.head.divergence import NEVER
from jaxtune.parallel import multihost
from jaxtune.rollout.server_pool import ServerPool
from jaxtune.rollout.server_scores import score_prompts


class TeacherServer:
    """Asks a server for the columns of `columns.teacher_columns`; only process 0 talks to it."""

    def __init__(self, config: Config, url: str, vocabulary: int):
        """`vocabulary`: the student's number of tokens."""
        self._servers, self._vocabulary = ServerPool([url]), vocabulary
        self._top_k, self._seconds = config.distill.top_k, config.rollout.server_seconds

    def score(
        self,
        weights: Sequence[Sequence[float]],
        shown: Sequence[tuple[Sequence[int], Sequence[float]]],
        own: Bool[np.ndarray, " documents"],
    ) -> Mapping[Column, np.ndarray]:
        """Return the columns of all tokens of a step's documents. Raises UserError as `score_prompts`.

        Args:
            weights: the loss weights of the student's tokens, of each document.
            shown: the tokens that the teacher sees, and their loss weights; as many are trained as of the student's.
            own: whether each document is this teacher's.
        """
        ends = np.cumsum([0, *map(len, weights)])
        tokens = np.zeros((ends[-1], self._top_k), np.int32)
        log_probs = np.zeros((ends[-1], self._top_k + 1), np.float32)
        if multihost.is_main():
            asked = [document for document, is_own in enumerate(own) if is_own]
            scores = score_prompts(
                self._servers,
                [shown[document][0] for document in asked],
                self._top_k,
                vocabulary=self._vocabulary,
                timeout=self._seconds,
            )
            for document, (likeliest, of_likeliest) in zip(asked, scores):
                # A document's first token has no scores, and is never trained.
                seen = np.flatnonzero(shown[document][1]) - 1
                places = ends[document] + np.flatnonzero(weights[document])
                tokens[places], log_probs[places] = likeliest[seen], _with_rest(of_likeliest[seen])
        if jax.process_count() > 1:
            tokens, log_probs = multihost_utils.broadcast_one_to_all((tokens, log_probs))
        return dict(zip(teacher_columns(self._top_k), (np.asarray(tokens), np.asarray(log_probs))))


def _with_rest(log_probs: Float64[np.ndarray, "t k"]) -> Float64[np.ndarray, "t k+1"]:
    """Append the log-probability of all other tokens together."""
    rest = 1 - np.exp(log_probs).sum(-1, keepdims=True)
    # The server computes in single precision, so a smaller rest is rounding error.
    rest = np.where(rest > 1e-7, np.log(np.maximum(rest, 1e-7)), NEVER)
    return np.concatenate([np.maximum(log_probs, NEVER), rest], axis=1)
