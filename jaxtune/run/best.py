"""The best evaluation of a run by one metric, and early stopping."""

import dataclasses
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from jaxtune.config.schema import Config, EvalOptions
from jaxtune.data import Feed, PromptFeed
from jaxtune.errors import UserError
from jaxtune.evaluation.evaluator import metric_names
from jaxtune.training.assembly import Program


@dataclass(frozen=True)
class BestTracker:
    """The best evaluation so far and the number of evaluations without improvement; saved in checkpoints.

    Attributes:
        step: Step of the best evaluation; None before the first evaluation.
        value: Value of eval.best_metric at that step.
        no_better: Number of evaluations in a row that did not improve by more than eval.min_improvement.
    """

    step: int | None = None
    value: float | None = None
    no_better: int = 0

    def after(self, step: int, metrics: Mapping[str, float], options: EvalOptions) -> "BestTracker":
        """Return the updated record after an evaluation.

        As in transformers' EarlyStoppingCallback, an evaluation counts as no better unless it beats the best value by
        more than the threshold. It may still become the best one. NaN is never better.

        Raises:
            UserError: The evaluation has no eval.best_metric.
        """
        check_metric(options, metrics)
        value = metrics[options.best_metric]
        if self.value is None:
            return BestTracker(step, value) if not math.isnan(value) else BestTracker(no_better=self.no_better + 1)
        gain = value - self.value if is_larger_better(options) else self.value - value  # positive: better
        # A comparison with NaN is false, so NaN is neither an improvement nor the best value.
        no_better = 0 if gain > options.min_improvement else self.no_better + 1
        return BestTracker(step, value, no_better) if gain > 0 else dataclasses.replace(self, no_better=no_better)

    def ending(self, options: EvalOptions) -> str:
        """Return why the run should end; "" if it should not."""
        if options.target is not None and self.value is not None:
            gain = self.value - options.target if is_larger_better(options) else options.target - self.value
            if gain >= 0:
                return f"{options.best_metric} is {self.value:.6g}, as good as eval.target={options.target:.6g}"
        if options.patience is not None and self.no_better >= options.patience:
            best = "" if self.step is None else f", of step {self.step}, is {self.value:.6g}"
            return f"{self.no_better} evaluations (eval.patience) were no better: the best {options.best_metric}{best}"
        return ""


def is_judged(config: Config) -> bool:
    """Whether the run uses the best evaluation: for ckpt.keep_best, eval.patience or eval.target."""
    return config.ckpt.keep_best or config.eval.patience is not None or config.eval.target is not None


def check_best_metric(config: Config, program: Program, feed: Feed | PromptFeed) -> None:
    """Check before the run, as `check_metric`, that its evaluations will have eval.best_metric, if they are judged.

    Not with rewards: the names of their metrics are known once completions are rewarded.
    """
    if is_judged(config) and not isinstance(feed, PromptFeed):
        check_metric(config.eval, metric_names(config, program, feed.eval_rows))


def check_metric(options: EvalOptions, names: Collection[str]) -> None:
    """Raise UserError if eval.best_metric is not among the names of an evaluation's metrics."""
    if options.best_metric not in names:
        raise UserError(f"eval.best_metric={options.best_metric!r}: an evaluation has {', '.join(names)}")


def is_larger_better(options: EvalOptions) -> bool:
    """Whether a larger value of eval.best_metric is better."""
    if options.larger_is_better is not None:
        return options.larger_is_better
    return not options.best_metric.endswith(("loss", "perplexity", "divergence"))  # accuracies and rewards grow
