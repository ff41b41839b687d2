"""Evaluations judged by one metric: which is the best, and whether the run should end."""

import dataclasses
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from jaxtune.config.schema import Config, Eval
from jaxtune.errors import UserError


@dataclass(frozen=True)
class Standing:
    """Of the evaluations so far: the best one, and how many since then were no better; part of a checkpoint.

    `step` is None before the first evaluation.
    """

    step: int | None = None
    value: float | None = None
    no_better: int = 0

    def after(self, step: int, metrics: Mapping[str, float], options: Eval) -> "Standing":
        """The standing after an evaluation.

        What counts as no better is what transformers' EarlyStoppingCallback counts: a value that is not better than the
        best one by more than the threshold. It may still be the best. NaN is never better.

        Raises:
            UserError: There is no such metric.
        """
        check_metric(options, metrics)
        value = metrics[options.best_metric]
        if self.value is None:
            return Standing(step, value) if not math.isnan(value) else Standing(no_better=self.no_better + 1)
        gain = value - self.value if is_larger_better(options) else self.value - value
        no_better = 0 if gain > options.min_improvement else self.no_better + 1
        return Standing(step, value, no_better) if gain > 0 else dataclasses.replace(self, no_better=no_better)

    def ending(self, options: Eval) -> str:
        """Why the run should end; "" if it should not."""
        if options.target is not None and self.value is not None:
            gain = self.value - options.target if is_larger_better(options) else options.target - self.value
            if gain >= 0:
                return f"{options.best_metric} is {self.value:.6g}, as good as eval.target={options.target:.6g}"
        if options.patience is not None and self.no_better >= options.patience:
            best = "" if self.step is None else f", of step {self.step}, is {self.value:.6g}"
            return f"{self.no_better} evaluations (eval.patience) were no better: the best {options.best_metric}{best}"
        return ""


def is_judged(config: Config) -> bool:
    """Whether anything depends on which evaluation is best."""
    return config.ckpt.keep_best or config.eval.patience is not None or config.eval.target is not None


def check_metric(options: Eval, names: Collection[str]) -> None:
    """Raises UserError where an evaluation, which has metrics of these names, has no eval.best_metric."""
    if options.best_metric not in names:
        raise UserError(f"eval.best_metric={options.best_metric!r}: an evaluation has {', '.join(names)}")


def is_larger_better(options: Eval) -> bool:
    """Whether a larger value of eval.best_metric is the better one."""
    if options.larger_is_better is not None:
        return options.larger_is_better
    return not options.best_metric.endswith(("loss", "perplexity"))
