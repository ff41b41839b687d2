"""Objectives: pure functions (scores, micro-batch) -> sums of loss, weight and metrics."""
