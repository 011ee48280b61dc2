"""The exercises' checks: ``checks.name(your_function)`` returns a ``Report``.

``checks.name?`` in a notebook shows the task: its arguments are those of the function that you write.
The files bear the names of the maths modules; ``engine.py`` says how an exercise is added.
"""

from mha_lessons.checks.attention import attend, scores, self_attention, softmax_rows
from mha_lessons.checks.flash import flash_forward, merge_parts, online_step, tile_bounds
from mha_lessons.checks.heads import fused_qkv, merge, split
from mha_lessons.checks.masks import causal, combine, decode_step, padding, safe_softmax
from mha_lessons.checks.positions import alibi, relative_index, rotary_pair, sinusoid
from mha_lessons.checks.report import Report
from mha_lessons.checks.scaling import attention_scale, entropy_of_rows, softmax_jacobian
from mha_lessons.checks.vit import patch_embed_as_conv, patchify, resize_positions, rollout

__all__ = [
    "Report",
    "alibi",
    "attend",
    "attention_scale",
    "causal",
    "combine",
    "decode_step",
    "entropy_of_rows",
    "flash_forward",
    "fused_qkv",
    "merge",
    "merge_parts",
    "online_step",
    "padding",
    "patch_embed_as_conv",
    "patchify",
    "relative_index",
    "resize_positions",
    "rollout",
    "rotary_pair",
    "safe_softmax",
    "scores",
    "self_attention",
    "sinusoid",
    "softmax_jacobian",
    "softmax_rows",
    "split",
    "tile_bounds",
]
