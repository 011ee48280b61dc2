"""Exercises on masks: who may look at whom, rows that see nothing, and decoding with a cache."""

from collections.abc import Callable
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention as torch_attention

from mha_lessons.attention import scaled_dot_product_attention
from mha_lessons.checks.engine import exercise
from mha_lessons.masks import causal_mask, combine_masks, padding_mask


def _ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.bool)


@exercise(
    axes="i, j -> i j",
    inputs=lambda normal: [(4, 4), (2, 5), (1, 6), (5, 3), (2, 520)],
    mistakes=[
        (
            lambda n_queries, n_keys: _ones(n_queries, n_keys).tril(),
            "Your triangle starts at the upper left: right when there are as many queries as keys, but a single new "
            "query with a cache of 6 keys would see the first key alone. The last query must see every key: shift the "
            "diagonal by n_keys - n_queries.",
        ),
        (
            lambda n_queries, n_keys: _ones(n_queries, n_keys).triu(n_keys - n_queries + 1),
            "Your mask is inverted: True stands for the future, as `nn.MultiheadAttention` wants it. Here True means "
            "may attend: use `tril`, or put `~` before it.",
        ),
        (
            lambda n_queries, n_keys: _ones(n_queries, n_keys).triu(1),
            "Your mask is inverted, True stands for the future; and it starts at the upper left. True means may "
            "attend, and the last query must see every key: `tril` with its diagonal shifted by n_keys - n_queries.",
        ),
        (
            lambda n_queries, n_keys: _ones(n_queries, n_keys).tril(n_keys - n_queries - 1),
            "No query sees its own key, and the first sees nothing at all. A query sees the keys up to and including "
            "its own position: move the diagonal by one.",
        ),
        (
            lambda n_queries, n_keys: _ones(n_queries, n_keys).triu(n_keys - n_queries),
            "Each query sees itself and the future: you kept the upper triangle. Keep the lower one: `tril`.",
        ),
        (
            lambda n_queries, n_keys: _ones(n_queries, n_keys).tril(n_queries - n_keys),
            "You shifted the diagonal the wrong way. With more keys than queries each query sees more, so the shift is "
            "n_keys - n_queries.",
        ),
        (
            lambda n_queries, n_keys: _ones(n_keys, n_queries).tril(),
            "Your mask is (j i), a row for each key. A row belongs to a query: make it (n_queries, n_keys), and let "
            "the last query see every key.",
        ),
        (
            lambda n_queries, n_keys: torch.where(causal_mask(n_queries, n_keys), 0.0, -torch.inf),
            "You returned numbers to be added to the scores, 0 and -inf. They are right, but here a mask is boolean, "
            "so that masks can be combined with `&`: True = may attend.",
        ),
    ],
)
def causal(n_queries, n_keys):
    """Hide the future: write ``causal(n_queries, n_keys)``, the mask in which True = may attend.

    The queries are the last ``n_queries`` of ``n_keys`` positions, as with a cache: the last query sees every key.

    Args:
        n_queries: number of queries i, a whole number.
        n_keys: number of keys j, a whole number.

    Returns:
        The mask (i j), bool.
    """
    return causal_mask(n_queries, n_keys)


def _seen(lengths: torch.Tensor, n_keys: int) -> torch.Tensor:
    return torch.arange(n_keys) < lengths[:, None]


@exercise(
    axes="b, j -> b 1 1 j",
    inputs=lambda normal: [
        (torch.tensor([3, 5]), 5),
        (torch.tensor([1, 4, 6]), 6),
        (torch.tensor([2, 0, 3]), 3),
        (torch.tensor([2, 3]), 6),
    ],
    mistakes=[
        (
            lambda lengths, n_keys: ~_seen(lengths, n_keys)[:, None, None, :],
            "Your mask is inverted: True stands at the pads, as `nn.MultiheadAttention` wants its `key_padding_mask`. "
            "Here True means may attend: the real tokens.",
        ),
        (
            lambda lengths, n_keys: _seen(lengths, n_keys),
            "Your numbers are right and your shape is (b j). Beside scores (b h i j) it would be read as (i j), a row "
            "for each query. Give heads and queries an axis of size 1 each: `mask[:, None, None, :]`.",
        ),
        (
            lambda lengths, n_keys: _seen(lengths, n_keys)[:, None, :],
            "Your shape is (b 1 j): beside scores (b h i j) the batch would be read as heads. Add one axis more: "
            "`mask[:, None, None, :]`.",
        ),
        (
            lambda lengths, n_keys: _seen(lengths, n_keys)[:, None, :, None],
            "Your mask stands on the axis of the queries, (b 1 i 1): it silences the pads' own rows, while every real "
            "token still reads the pads. Put it on the keys: `mask[:, None, None, :]`.",
        ),
        (
            lambda lengths, n_keys: (torch.arange(n_keys) <= lengths[:, None])[:, None, None, :],
            "Your mask shows one pad of each sequence: positions count from 0, so the real ones are those below the "
            "length. Use `<`, not `<=`.",
        ),
        (
            lambda lengths, n_keys: _seen(lengths, n_keys).flip(-1)[:, None, None, :],
            "You hid the front: that fits sequences padded on the left. Here the pads follow the real tokens.",
        ),
        (
            lambda lengths, n_keys: (torch.arange(n_keys) < lengths.max()).expand(len(lengths), 1, 1, -1),
            "All your rows are alike: you used the longest length for every sequence. Compare the positions with each "
            "sequence's own length, `lengths[:, None]`.",
        ),
        (
            lambda lengths, n_keys: _seen(lengths, int(lengths.max()))[:, None, None, :],
            "Your mask ends with the longest sequence, so where more pads follow it does not fit the scores. Count the "
            "positions up to `n_keys`.",
        ),
        (
            lambda lengths, n_keys: _ones(len(lengths), 1, 1, n_keys),
            "Your mask hides nothing. True may stand only at the real tokens, the positions below each sequence's "
            "length.",
        ),
    ],
)
def padding(lengths, n_keys):
    """Hide the pads: write ``padding(lengths, n_keys)``, the mask in which True = may attend.

    Sequence b has ``lengths[b]`` real tokens, and pads after them up to ``n_keys``.

    Args:
        lengths: (b) whole numbers, each 0 to ``n_keys``.
        n_keys: number of keys j, a whole number.

    Returns:
        The mask (b 1 1 j), bool; the axes of size 1 stand for heads and queries.
    """
    return padding_mask(lengths, n_keys)


def _both(n_queries: int, n_keys: int, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    return causal_mask(n_queries, n_keys), padding_mask(lengths, n_keys)


@exercise(
    axes="i j, b 1 1 j -> b 1 i j",
    inputs=lambda normal: [_both(4, 4, [4, 2, 3]), _both(3, 6, [1, 6]), _both(4, 4, [0, 4, 1, 2])],
    mistakes=[
        (
            lambda causal, padding: causal | padding,
            "You joined the masks by *or* (`+` of two boolean masks is the same): a key hidden by one of them is seen "
            "if the other shows it. A key may be seen only where both are True: `&`.",
        ),
        (
            lambda causal, padding: causal.int() + padding.int(),
            "You added the masks as numbers 0, 1 and 2. Read as booleans these mean *or*; added to scores they hide "
            "nothing. A key may be seen where both are True: `&`.",
        ),
        (
            lambda causal, padding: causal ^ padding,
            "You joined the masks by *either ... or* (`^`, or `!=`): a key that both show is hidden. Use `&`.",
        ),
        (
            lambda causal, padding: ~(causal & padding),
            "Your mask is inverted: True stands where a key is hidden. True means may attend: leave out the `~`.",
        ),
        (
            lambda causal, padding: causal & padding.transpose(-2, -1),
            "You turned the padding to the axis of the queries: the pads' own rows are silenced, which nobody asked "
            "for, and it fits only where there are as many queries as keys. It comes as (b 1 1 j) and broadcasts by "
            "itself: `causal & padding`.",
        ),
        (
            lambda causal, padding: causal & padding[:, 0],
            "Your shape is (b i j): beside scores (b h i j) the batch would be read as heads. Keep the axis of size 1 "
            "for the heads, (b 1 i j).",
        ),
        (
            lambda causal, padding: sum(
                torch.where(mask, 0.0, torch.finfo(torch.float32).min) for mask in (causal, padding)
            ),
            "You turned both masks into large negative numbers and added them: where both hide a key the sum overflows "
            "to -inf, and a row of these becomes NaN. Join them while they are boolean: `&`.",
        ),
    ],
)
def combine(causal, padding):
    """Join two masks: write ``combine(causal, padding)``; a key may be seen only where both masks allow it.

    Args:
        causal: (i j), bool, True = may attend.
        padding: (b 1 1 j), bool, True = may attend.

    Returns:
        One mask (b 1 i j), bool.
    """
    return combine_masks(causal, padding)


def _hide(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return scores.masked_fill(~mask, -torch.inf)


def _far_apart() -> torch.Tensor:
    """Three rows of four scores. In rows 0 and 1 a hidden one is by far the largest; in 1 and 2 the visible differ."""
    return torch.tensor([[2e3, 0, 1, -9], [0, 2e3, 4e3, 1], [-9, -2e3, 2e3, 1]], dtype=torch.float64)


def _shared_again(scores: torch.Tensor, mask: torch.Tensor, least: float) -> torch.Tensor:
    """The softmax over all keys, and what falls to the visible ones shared out again."""
    left = scores.softmax(-1) * mask
    return left / left.sum(-1, keepdim=True).clamp(min=least)


@exercise(
    axes="... i j, ... i j -> ... i j",
    inputs=lambda normal: [
        (normal(3, 5).requires_grad_(), torch.tensor([[1, 0, 1, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]]).bool()),
        ((3 * normal(2, 3, 4, 6)).requires_grad_(), causal_mask(4, 6) & padding_mask([1, 5], 6)),
        (normal(4, 4).requires_grad_(), _ones(4, 4).triu(1)),
        ((normal(3, 3) - 2e9).requires_grad_(), causal_mask(3)),
        ((1e100 * normal(3, 3) - 3e100).requires_grad_(), causal_mask(3)),
        (_far_apart().requires_grad_(), torch.tensor([[0, 1, 1, 0], [1, 1, 0, 1], [0, 1, 1, 1]]).bool()),
    ],
    mistakes=[
        (
            lambda scores, mask: _hide(scores, mask).softmax(-1),
            "A row that may attend to nothing is NaN: all its scores are -inf, and the softmax divides 0 by 0. Fill "
            "such a row with 0 before the softmax, and set its weights to 0 after it.",
        ),
        (
            lambda scores, mask: (scores + torch.where(mask, 0.0, -torch.inf)).softmax(-1).nan_to_num(),
            "Your weights are right, but the gradient is NaN: you added -inf and mended the row after the softmax. "
            "That mends the forward pass alone: the softmax's own gradient is 0 times NaN, and a sum hands it on. Fill "
            "such a row with 0 before the softmax, and set its weights to 0 after it.",
        ),
        (
            lambda scores, mask: scores.masked_fill(~mask, -1e9).softmax(-1),
            "A row that may attend to nothing gets equal weights on hidden keys, since -1e9 everywhere is no "
            "difference; and true scores below -1e9 lose to hidden ones. Fill with -inf, and set such rows to 0.",
        ),
        (
            lambda scores, mask: scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1),
            "A row that may attend to nothing gets equal weights on the hidden keys: all its scores are the same "
            "finite number. Set the weights of such a row to 0 after the softmax.",
        ),
        (
            lambda scores, mask: scores.masked_fill(~mask, -1e9).softmax(-1).masked_fill(~mask, 0.0),
            "Where the true scores lie below -1e9 the hidden keys win the softmax, and after you set these to 0 the "
            "row is all 0. A finite fill has a score that beats it: fill with -inf.",
        ),
        (
            lambda scores, mask: scores.softmax(-1).masked_fill(~mask, 0.0),
            "You hid the keys after the softmax: they took their share before they vanished, so the rows sum to less "
            "than 1. Hide them before it, with -inf.",
        ),
        (
            lambda scores, mask: _shared_again(scores, mask, 0.0),
            "You took the softmax over all keys and shared out again what was left. A hidden score far above the rest "
            "takes all, and nothing is left: 0 / 0, as in a row that may attend to nothing. Hide the keys before the "
            "softmax, with -inf.",
        ),
        (
            lambda scores, mask: _shared_again(scores, mask, 1e-30),
            "You took the softmax over all keys and shared out again what was left. A hidden score far above the rest "
            "takes all, and the visible keys get 0. Hide the keys before the softmax, with -inf.",
        ),
        (
            lambda scores, mask: (scores + mask).softmax(-1),
            "You added the mask to the scores: True counts as 1, so a hidden key only loses a factor e. Hide it with "
            "`masked_fill(~mask, -torch.inf)`.",
        ),
        (
            lambda scores, mask: scores.masked_fill(~mask, 0.0).softmax(-1),
            "You filled the hidden scores with 0, but a score of 0 is a score like any other: exp(0) = 1. Fill with "
            "-inf, whose exp is 0.",
        ),
        (
            lambda scores, mask: (
                scores.masked_fill(mask, -torch.inf)
                .masked_fill(mask.all(-1, keepdim=True), 0.0)
                .softmax(-1)
                .masked_fill(mask, 0.0)
            ),
            "You hid the keys that may be seen: True means may attend. Fill where the mask is False, `~mask`.",
        ),
        (
            lambda scores, mask: scores.masked_fill(mask, -torch.inf).softmax(-1),
            "You hid the keys that may be seen, for True means may attend: fill where the mask is False, `~mask`. And "
            "a row with no key left is NaN: fill it with 0 before the softmax, and set its weights to 0 after it.",
        ),
    ],
)
def safe_softmax(scores, mask):
    """Softmax over the keys that may be seen: write ``safe_softmax(scores, mask)``.

    A row in which no key may be seen gets weights 0, and the gradient is finite everywhere.

    Args:
        scores: (... i j), of any size: -2e9 is a score.
        mask: bool, True = may attend; broadcasts to (... i j).

    Returns:
        The weights (... i j).
    """
    alone = ~mask.any(dim=-1, keepdim=True)
    return _hide(scores, mask).masked_fill(alone, 0.0).softmax(dim=-1).masked_fill(~mask, 0.0)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(q, k, v)[0]


def _high_and_low(normal) -> tuple[torch.Tensor, ...]:
    """Two heads: in the first all scores are very high, in the second very low."""
    q, k, v, k_cache, v_cache = _one_token(normal, 2, cached=5, d=4)
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64)[:, None, None]
    return 60 + q, signs * (60 + k), v, signs * (60 + k_cache), v_cache


def _overflowing(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    weights = (q @ k.mT / q.shape[-1] ** 0.5).exp()
    return weights / weights.sum(-1, keepdim=True) @ v


def _grown(k_cache: torch.Tensor, k: torch.Tensor, dim: int = -2) -> torch.Tensor:
    return torch.cat([k_cache, k], dim=dim)


def _decoded(mix: Callable) -> Callable:
    """The right keys and values to return, and any way to mix them."""

    def decode(q, k, v, k_cache, v_cache):
        keys, values = _grown(k_cache, k), _grown(v_cache, v)
        return mix(q, keys, values), keys, values

    return decode


def _one_token(normal, *lead: int, cached: int, d: int) -> tuple[torch.Tensor, ...]:
    return tuple(normal(*lead, n, d) for n in (1, 1, 1, cached, cached))


@exercise(
    axes="... i d, ... i d, ... i d, ... j d, ... j d -> ... i d, ... n d, ... n d",
    inputs=lambda normal: [
        _one_token(normal, cached=5, d=4),
        _one_token(normal, 2, 3, cached=4, d=8),
        _one_token(normal, 1, cached=1, d=3),
        _one_token(normal, 3, 2, cached=0, d=5),
        tuple(60 * part for part in _one_token(normal, cached=5, d=4)),
        _high_and_low(normal),
    ],
    mistakes=[
        (
            lambda q, k, v, k_cache, v_cache: (_attend(q, k_cache, v_cache), _grown(k_cache, k), _grown(v_cache, v)),
            "The new token does not see itself: you attended to the cache before the new key and value joined it. Join "
            "them first, then attend.",
        ),
        (
            lambda q, k, v, k_cache, v_cache: (_attend(q, k, v), _grown(k_cache, k), _grown(v_cache, v)),
            "The new token sees itself alone: its output is its own value. Attend to the cached keys and values too.",
        ),
        (
            lambda q, k, v, k_cache, v_cache: (
                _attend(q, _grown(k_cache, k), _grown(v_cache, v)),
                k_cache.clone(),
                v_cache.clone(),
            ),
            "Your output is right, but you returned the old cache: the next step will not see this token. Return the "
            "keys and values with the new ones behind them.",
        ),
        (
            lambda q, k, v, k_cache, v_cache: (_attend(q, _grown(k_cache, k), _grown(v_cache, v)), k, v),
            "Your output is right, but you returned the new key and value alone: the next step will not see what came "
            "before. Return the whole of them, old and new.",
        ),
        (
            lambda q, k, v, k_cache, v_cache: (
                _attend(q, _grown(k_cache, k), _grown(v_cache, v)),
                _grown(k, k_cache),
                _grown(v, v_cache),
            ),
            "Your output is right, since attention knows no order, but you put the new token in front of the cache, so "
            "the order of the positions is lost. Put it behind: `torch.cat([k_cache, k], dim=-2)`.",
        ),
        (
            _decoded(partial(torch_attention, is_causal=True)),
            "You used `is_causal=True`, whose triangle starts at the upper left: your one query sees the first key "
            "alone. The newest token may see all keys, so no mask is needed.",
        ),
        (
            _decoded(partial(torch_attention, scale=1.0)),
            "You did not scale the scores. Divide them by √d_k, the root of the width of the query.",
        ),
        (
            _decoded(_overflowing),
            "Right while scores are small, and NaN when they are near 1000: exp(1000) is infinite. Use "
            "`scores.softmax(dim=-1)`, or subtract each row's maximum before `exp`.",
        ),
        (
            _decoded(lambda q, keys, values: _attend(q, keys, keys)),
            "You mixed the keys: the output must be a mix of the values.",
        ),
        (
            lambda q, k, v, k_cache, v_cache: (
                _attend(q, _grown(k_cache, k, 0), _grown(v_cache, v, 0)),
                _grown(k_cache, k, 0),
                _grown(v_cache, v, 0),
            ),
            "You joined along axis 0. With batch and heads in front that is the batch, not the positions. Count from "
            "the end: `dim=-2`.",
        ),
    ],
)
def decode_step(q, k, v, k_cache, v_cache):
    """Decode one token with a cache: write ``decode_step(q, k, v, k_cache, v_cache)``.

    The new token attends to all keys so far, its own included.

    Args:
        q, k, v: query, key and value of the new token, each (... 1 d); other axes (batch, heads) may lead.
        k_cache, v_cache: those of the tokens before it, each (... j d); j may be 0.

    Returns:
        A tuple of three: the output (... 1 d), and keys and values (... j+1 d), the new ones behind the old ones.
    """
    keys, values = _grown(k_cache, k), _grown(v_cache, v)
    return _attend(q, keys, values), keys, values
