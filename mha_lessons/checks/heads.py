"""Exercises on the heads of ``attention.py``: cut the width into heads, put them together, and fuse the projections."""

import torch

from mha_lessons.attention import merge_heads, split_heads
from mha_lessons.checks.engine import exercise


def _cut(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    """(b n (h d)) -> (b n h d): in heads, which still stand behind the positions."""
    return x.unflatten(-1, (num_heads, -1))


@exercise(
    axes="b n _, h -> b h n d",
    inputs=lambda normal: [
        (normal(1, 5, 6), 3),
        (normal(2, 3, 8), 4),
        (normal(3, 6, 6), 3),
        (normal(2, 4, 16), 4),
    ],
    mistakes=[
        (
            lambda x, num_heads: x.reshape(len(x), num_heads, x.shape[1], -1),
            "You reshaped straight to (b h n d). The shape is right, but head 0 now holds the whole width of the first "
            "tokens and tokens are mixed. Cut the last axis first, (b n h d), then swap n and h: "
            "`x.view(b, n, h, d).transpose(1, 2)`.",
        ),
        (
            lambda x, num_heads: _cut(x, num_heads),
            "You cut the width, but left the heads behind the positions, (b n h d). Attention would then run between "
            "the heads of one token. Swap the two axes: `.transpose(1, 2)`.",
        ),
        (
            lambda x, num_heads: x.unflatten(-1, (-1, num_heads)).movedim(-1, 1),
            "You cut the width as (d h), so head 0 gets the channels 0, h, 2h and so on. A head is a block of "
            "neighbouring channels, (h d): `x.view(b, n, h, d)`.",
        ),
        (
            lambda x, num_heads: x.unflatten(-1, (-1, num_heads)).transpose(1, 2),
            "You made d heads of width h: you took num_heads for the width of a head. Cut the width as (h d), where d "
            "is the width divided by num_heads.",
        ),
        (
            lambda x, num_heads: _cut(x, num_heads).permute(0, 2, 3, 1),
            "Your result is (b h d n): you moved the positions to the end. Keep the channels of a head last, "
            "(b h n d): only n and h change places.",
        ),
        (
            lambda x, num_heads: _cut(x, num_heads).transpose(1, 3),
            "You swapped the positions with the channels: your result is (b d h n). Swap n and h, which are axes 1 and "
            "2 of (b n h d).",
        ),
        (
            lambda x, num_heads: _cut(x, num_heads).movedim(2, 0),
            "Your heads stand before the batch, (h b n d). The batch stays first, (b h n d): "
            "`torch.stack(..., dim=1)` or `.transpose(1, 2)`.",
        ),
        (
            lambda x, num_heads: x[:, None].expand(-1, num_heads, -1, -1),
            "You gave every head the whole width. A head gets its own block of width / num_heads channels.",
        ),
    ],
)
def split(x, num_heads):
    """Cut the width into heads: write ``split(x, num_heads)``.

    Head 0 gets the first d = width / num_heads channels of every token, head 1 the next d, and so on.

    Args:
        x: (b n (h d)).
        num_heads: h.

    Returns:
        (b h n d).
    """
    return split_heads(x, num_heads)


@exercise(
    axes="b h n d -> b n _",
    inputs=lambda normal: [
        (normal(1, 3, 5, 2),),
        (normal(2, 4, 3, 2),),
        (normal(3, 3, 3, 3),),
    ],
    mistakes=[
        (
            lambda x: x.reshape(len(x), x.shape[2], -1),
            "You reshaped without moving the heads back, so pieces of different tokens stand in one token. The shape "
            "is right. Swap n and h first: `x.transpose(1, 2).reshape(b, n, h * d)`.",
        ),
        (
            lambda x: x.permute(0, 2, 3, 1).flatten(2),
            "You put the channels together as (d h), so neighbours come from different heads. The heads stand side by "
            "side, (h d): the outer part is the head.",
        ),
        (
            lambda x: x.transpose(1, 2),
            "You moved the heads back, but did not put them together: your result is (b n h d). Make the last two axes "
            "one: `.flatten(2)`.",
        ),
        (
            lambda x: x.flatten(1, 2),
            "You put the heads one after another as if they were tokens, (b (h n) d). They stand side by side in the "
            "width of each token: swap n and h, then join the last two axes.",
        ),
        (
            lambda x: x.transpose(2, 3).reshape(len(x), x.shape[2], -1),
            "You swapped n and d. The axes to swap are h and n, which are 1 and 2.",
        ),
        (
            lambda x: x.mean(1),
            "You averaged the heads, so what each one found is blurred and the width is that of one head. Put them "
            "side by side.",
        ),
        (
            lambda x: x.sum(1),
            "You added the heads up, so what each one found is mixed and the width is that of one head. Put them side "
            "by side; adding is the work of W_O.",
        ),
    ],
)
def merge(x):
    """Put the heads side by side: write ``merge(x)``, the inverse of ``split``.

    A token's first d channels are what head 0 has for it, the next d what head 1 has, and so on.

    Args:
        x: (b h n d).

    Returns:
        (b n (h d)).
    """
    return merge_heads(x)


def _fused(x: torch.Tensor, w_qkv: torch.Tensor, num_heads: int) -> torch.Tensor:
    """(b n 3 h d), right so far: queries, keys and values, each cut into heads."""
    return (x @ w_qkv).unflatten(-1, (3, num_heads, -1))


@exercise(
    axes="b n e, e _, h -> b h n d, b h n d, b h n d",
    inputs=lambda normal: [
        (normal(1, 5, 4), normal(4, 18), 3),
        (normal(2, 3, 8), normal(8, 24), 4),
        (normal(2, 3, 6), normal(6, 18), 3),
        (normal(3, 3, 12), normal(12, 36), 2),
    ],
    mistakes=[
        (
            lambda x, w_qkv, num_heads: _fused(x, w_qkv, num_heads).unbind(2),
            "Your q, k and v are (b n h d): you took the three parts, but left the heads behind the positions. The "
            "scores would be (b n h h): heads attend to each other inside one token and tokens never meet. Swap n and "
            "h in each: `.transpose(1, 2)`.",
        ),
        (
            lambda x, w_qkv, num_heads: tuple(
                part.reshape(len(x), num_heads, x.shape[1], -1) for part in (x @ w_qkv).chunk(3, -1)
            ),
            "You reshaped each part straight to (b h n d), so tokens are mixed, though the shapes are right. Cut the "
            "last axis first, (b n h d), then swap n and h.",
        ),
        (
            lambda x, w_qkv, num_heads: (x @ w_qkv).reshape(len(x), 3, num_heads, x.shape[1], -1).unbind(1),
            "You reshaped straight to (b 3 h n d), so tokens are mixed and q holds parts of k. Only the last axis may "
            "be cut, to (b n 3 h d); then move axes.",
        ),
        (
            lambda x, w_qkv, num_heads: (x @ w_qkv).unflatten(-1, (num_heads, 3, -1)).permute(3, 0, 2, 1, 4).unbind(0),
            "You cut the last axis as (h 3 d): a q, k and v for each head in turn. Some models store it so, but here "
            "the columns are all of q, then all of k, then all of v: (3 h d).",
        ),
        (
            lambda x, w_qkv, num_heads: (x @ w_qkv).unflatten(-1, (3, -1, num_heads)).permute(2, 0, 4, 1, 3).unbind(0),
            "You cut the last axis as (3 d h), so head 0 gets the channels 0, h, 2h and so on. A head is a block of "
            "neighbouring channels: (3 h d).",
        ),
        (
            lambda x, w_qkv, num_heads: (x @ w_qkv).unflatten(-1, (-1, num_heads, 3)).permute(4, 0, 2, 1, 3).unbind(0),
            "You took q, k and v from every third column. They are three blocks, one after the other: (3 h d).",
        ),
        (
            lambda x, w_qkv, num_heads: tuple(split_heads(part, num_heads) for part in (x @ w_qkv).chunk(3, -1))[::-1],
            "You returned v, k, q. The order is q, k, v.",
        ),
        (
            lambda x, w_qkv, num_heads: tuple(
                split_heads((x @ w_qkv).chunk(3, -1)[part], num_heads) for part in (0, 2, 1)
            ),
            "You returned q, v, k: keys and values are swapped. The order is q, k, v.",
        ),
        (
            lambda x, w_qkv, num_heads: (x @ w_qkv).chunk(3, -1),
            "You cut the product into q, k and v, but not into heads: each is (b n (h d)). Split each, as in `split`.",
        ),
        (
            lambda x, w_qkv, num_heads: [_fused(x, w_qkv, num_heads)[part] for part in (1, 0, 2)],
            "You returned k before q: the columns of w_qkv are those of W_Q, then W_K, then W_V.",
        ),
    ],
)
def fused_qkv(x, w_qkv, num_heads):
    """Queries, keys and values from one product: write ``fused_qkv(x, w_qkv, num_heads)``.

    The columns of ``w_qkv`` are those of W_Q, then W_K, then W_V, so ``x @ w_qkv`` is (b n (3 h d)).

    Args:
        x: tokens (b n e).
        w_qkv: the three projections side by side, (e (3 h d)).
        num_heads: h.

    Returns:
        q, k and v, each (b h n d), as a tuple.
    """
    return tuple(split_heads(part, num_heads) for part in (x @ w_qkv).chunk(3, dim=-1))
