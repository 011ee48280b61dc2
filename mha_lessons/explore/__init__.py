"""The explorers: one function a widget, each a row of controls around a pure draw function."""

from mha_lessons.explore.attention import pretrained_heads, sentence_attention
from mha_lessons.explore.flash import online_softmax, tiles
from mha_lessons.explore.heads import heads
from mha_lessons.explore.masks import decoding, masking
from mha_lessons.explore.positions import positions
from mha_lessons.explore.scaling import scaling
from mha_lessons.explore.vit import patches, pretrained_vit, untrained_vit

__all__ = [
    "decoding",
    "heads",
    "masking",
    "online_softmax",
    "patches",
    "positions",
    "pretrained_heads",
    "pretrained_vit",
    "scaling",
    "sentence_attention",
    "tiles",
    "untrained_vit",
]
