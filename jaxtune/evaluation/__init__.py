"""How good a model is: `evaluator` on rows, `validation` on a config's validation data, benchmark tasks of
lm-evaluation-harness, and how far an export is from its run.
"""
