"""Scores that another model computes once, before the first step: of a reference, or of a teacher."""
