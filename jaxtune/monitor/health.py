"""Signs that a run does not learn, noticed early and not when the run has ended."""

from collections.abc import Iterator, Mapping

from jaxtune.optim.options import OPTIMIZERS

IN_A_ROW = 5  # steps
HIGH_RATE = 0.1  # for optimizers whose updates are normalised
_CAUSES = "the model is saturated (is optim.learning_rate too high?), or no token is a target"


class Health:
    """Checks one training step after another."""

    def __init__(self, optimizer: str) -> None:
        self._rate_counts = OPTIMIZERS[optimizer].normalised
        self._no_gradient = self._same_loss = 0  # steps in a row
        self._loss: float | None = None

    def notice(self, values: Mapping[str, float]) -> Iterator[str]:
        """Yield notices after a step; values: its metrics, with loss, grad_norm and learning_rate."""
        loss, rate = values["loss"], values["learning_rate"]
        self._no_gradient = self._no_gradient + 1 if values["grad_norm"] == 0 else 0
        self._same_loss = self._same_loss + 1 if loss == self._loss and rate > 0 else 0
        self._loss = loss
        if self._no_gradient == IN_A_ROW:
            yield f"the gradient is 0 in {IN_A_ROW} steps in a row, so nothing is learned: {_CAUSES}"
        if self._same_loss == IN_A_ROW:
            yield f"the loss is {loss:g} to the last digit in {IN_A_ROW + 1} steps in a row: {_CAUSES}"
        if self._rate_counts and rate > HIGH_RATE:
            self._rate_counts = False
            yield f"a learning rate of {rate:g} moves every weight by about as much in each step; 1e-6 to 1e-2 is usual"
