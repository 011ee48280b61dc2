"""The explorers: one function a widget, each a row of controls around a pure draw function."""

from mha_lessons.explore.attention import sentence_attention, weights

__all__ = ["sentence_attention", "weights"]
