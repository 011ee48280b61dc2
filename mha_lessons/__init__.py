"""Multi-head attention, one tested implementation of everything that the lessons show.

Nothing is handed on from here: an import says where to look, as in
``from mha_lessons.attention import MultiHeadAttention``.
"""
