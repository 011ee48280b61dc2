"""The exercises' checks: ``checks.name(your_function)`` returns a ``Report``.

``checks.name?`` in a notebook shows the task: its arguments are those of the function that you write.
The files bear the names of the maths modules; ``engine.py`` says how an exercise is added.
"""

from mha_lessons.checks.attention import attend, scores, self_attention, softmax_rows
from mha_lessons.checks.report import Report

__all__ = ["Report", "attend", "scores", "self_attention", "softmax_rows"]
