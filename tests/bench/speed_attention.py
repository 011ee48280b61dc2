"""The layer beside PyTorch's own, asked for its weights too: theirs averages them over the heads, ours never does."""

from collections.abc import Iterator

import torch
from torch import nn

from mha_lessons.attention import MultiHeadAttention
from tests.bench import ratio

BOUND = 1.3


def measure() -> Iterator[tuple[str, float, float]]:
    """Forward at b 8, n 256, d_model 512, 8 heads: without gradients in eval mode, and with them in training mode."""
    theirs = nn.MultiheadAttention(512, 8, batch_first=True)
    ours = MultiHeadAttention.from_torch(theirs)
    x = torch.randn(8, 256, 512)

    def our_forward() -> object:
        return ours(x)

    def their_forward() -> object:
        return theirs(x, x, x, need_weights=True)

    for mode, training in (("no grad, eval", False), ("with grad, train", True)):
        ours.train(training), theirs.train(training)
        with torch.set_grad_enabled(training):
            yield f"MultiHeadAttention forward, {mode}", ratio(our_forward, their_forward, pairs=31), BOUND
