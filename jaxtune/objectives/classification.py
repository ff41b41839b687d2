"""Classification of documents by the scores after the last token, as transformers' ForSequenceClassificationLoss."""

import jax
import jax.numpy as jnp

from jaxtune.columns import LABELLED
from jaxtune.models.head.score import Batch, LabelScores
from jaxtune.objectives.objective import Objective, Sums


def classification(labels: int) -> Objective:
    """Return the objective -log softmax(logits)[label], a mean over documents; metric: accuracy.

    With one label it is a regression: (logit - value)^2, without the metric.
    """
    return Objective(_squared_error if labels == 1 else _cross_entropy, LABELLED, counts="documents")


def _cross_entropy(scores: LabelScores, batch: Batch) -> Sums:
    # The column is float32, because for regression it holds values.
    logits, label = scores.logits, batch["label"].astype(jnp.int32)
    right = label[..., None] == jnp.arange(logits.shape[-1])
    loss = jax.nn.logsumexp(logits, axis=-1) - jnp.sum(jnp.where(right, logits, 0.0), axis=-1)
    last, documents = batch["last"], jnp.sum(batch["last"], dtype=jnp.int32)
    correct = jnp.sum((jnp.argmax(logits, axis=-1) == label) & last, dtype=jnp.int32)
    return Sums(jnp.sum(jnp.where(last, loss, 0.0)), documents, {"accuracy": (correct, documents)})


def _squared_error(scores: LabelScores, batch: Batch) -> Sums:
    loss, last = jnp.square(scores.logits[..., 0] - batch["label"]), batch["last"]
    return Sums(jnp.sum(jnp.where(last, loss, 0.0)), jnp.sum(last, dtype=jnp.int32))
