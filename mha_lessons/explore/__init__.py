"""The explorers: one function a widget, each a row of controls around a pure draw function."""

from mha_lessons.explore.attention import pretrained_heads, sentence_attention

__all__ = ["pretrained_heads", "sentence_attention"]
