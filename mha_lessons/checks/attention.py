"""Exercises on ``attention.py``: scores, weights, outputs, and the whole of it."""

from collections.abc import Callable

import torch
from torch.nn.functional import normalize, one_hot

from mha_lessons.attention import scaled_dot_product_attention
from mha_lessons.checks.engine import exercise


def _all_axes_turned(x: torch.Tensor) -> torch.Tensor:
    """What ``x.T`` gives, without PyTorch's warning."""
    return x.permute(*reversed(range(x.ndim)))


@exercise(
    axes="... i d, ... j d -> ... i j",
    inputs=lambda normal: [
        (normal(3, 4), normal(5, 4)),
        (normal(2, 7), normal(4, 7)),
        (normal(2, 3, 4, 8), normal(2, 3, 6, 8)),
        (normal(3, 5, 2), normal(3, 5, 2)),
        (normal(3, 3, 3), normal(3, 3, 3)),
    ],
    mistakes=[
        (
            lambda q, k: q @ k.mT,
            "You did not scale the dot products, so they grow with the width of a head and the softmax will "
            "saturate. Divide them by √d_k, which is `q.shape[-1] ** 0.5`.",
        ),
        (
            lambda q, k: q @ k.mT / q.shape[-1],
            "You divided by d_k, once in full or by its root twice, so the scores are √d_k times too small and the "
            "weights will be nearly equal. Divide by √d_k, once: `q.shape[-1] ** 0.5`.",
        ),
        (
            lambda q, k: q @ k.mT / q.shape[-1] ** 1 / 2,
            "`**` binds before `/`, so `d ** 1 / 2` divides by d and then by 2. Write `d ** 0.5`.",
        ),
        (
            lambda q, k: q @ k.mT * q.shape[-1] ** 0.5,
            "You multiplied by √d_k, so the scores are d_k times too large. Divide by it.",
        ),
        (
            lambda q, k: q @ k.mT / k.shape[-2] ** 0.5,
            "You divided by the root of the number of keys, so adding a key would change all other scores. "
            "Divide by the root of the width d_k, the last axis of q: `q.shape[-1] ** 0.5`.",
        ),
        (
            lambda q, k: q @ k.mT / q.shape[-2] ** 0.5,
            "You divided by the root of the number of queries, so asking one question more would change the "
            "answers to all others. Divide by the root of the width d_k: `q.shape[-1] ** 0.5`.",
        ),
        (
            lambda q, k: q @ k.mT / len(q) ** 0.5,
            "You divided by √len(q), but `len` is the size of the first axis, not of the last. Divide by √d_k, "
            "which is `q.shape[-1] ** 0.5`.",
        ),
        (
            lambda q, k: k @ q.mT / q.shape[-1] ** 0.5,
            "Your scores are transposed, (j i): a row belongs to a key. A row must belong to a query: `q @ k.mT`.",
        ),
        (
            lambda q, k: q @ _all_axes_turned(k) / q.shape[-1] ** 0.5,
            "`.T` turns all axes round, so it fits a single table only. Swap the last two axes: `q @ k.mT`.",
        ),
        (
            lambda q, k: normalize(q, dim=-1) @ normalize(k, dim=-1).mT,
            "You divided by the lengths of the vectors, which gives cosines between -1 and 1, so a token can no "
            "longer ask louder than another. Divide the plain dot products by √d_k, the same for all.",
        ),
        (
            lambda q, k: (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1),
            "You returned the weights: your rows sum to 1. Scores come before the softmax; leave it out here.",
        ),
    ],
)
def scores(q, k):
    """How well does each key fit each query? Write ``scores(q, k)``: the dot products q·kᵀ, divided by √d_k.

    Args:
        q: queries (... i d), where d is d_k, the width of a head, and other axes (batch, heads) may lead.
        k: keys (... j d).

    Returns:
        The scaled scores (... i j), a row for each query.
    """
    return q @ k.mT / q.shape[-1] ** 0.5


def _exp_over(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.exp() / x.exp().sum(dim, keepdim=True)


def _shifted_exp(x: torch.Tensor) -> torch.Tensor:
    return (x - x.amax(-1, keepdim=True)).exp()


def _far_apart_within_rows(normal) -> torch.Tensor:
    """Three rows of five scores, each with scores around 1000, 0 and -1000; the first is the largest in row 0 alone."""
    row = torch.tensor([1000.0, 0.0, -1000.0, 3.0, 0.0], dtype=torch.float64)
    return normal(3, 5) + torch.stack([row.roll(places) for places in range(3)])


def _far_apart(normal) -> torch.Tensor:
    """Three rows of five scores, around 1000, 0 and -1000."""
    return normal(3, 5) + torch.tensor([[1000.0], [0.0], [-1000.0]], dtype=torch.float64)


_STILL_OVERFLOWS = (
    "so a score that lies 1000 above it still overflows: exp(1000) is infinite and the weight NaN. Subtract each row's "
    "maximum, `scores.amax(dim=-1, keepdim=True)`: then no exponent is above 0."
)
_OVER_EVERYTHING = (
    "You took one softmax over all entries: the whole table sums to 1, not each row. Take it over the keys, so that "
    "each query shares out a weight of 1: `dim=-1`."
)


@exercise(
    axes="... i j -> ... i j",
    inputs=lambda normal: [
        (normal(3, 5),),
        (2 * normal(2, 3, 4, 6),),
        (normal(3, 5, 2),),
        (normal(4, 4),),
        (_far_apart(normal),),
        (_far_apart_within_rows(normal),),
    ],
    mistakes=[
        (
            lambda scores: scores.softmax(-2),
            "Your rows do not sum to 1, your columns do: you took the softmax over the queries. Take it over the "
            "keys, `dim=-1`.",
        ),
        (
            lambda scores: scores.softmax(0),
            "You took the softmax over axis 0. In one table those are the queries, so columns sum to 1; with a batch "
            "in front its items share a weight of 1. Count from the end: the keys are `dim=-1`.",
        ),
        (
            lambda scores: scores.softmax(1),
            "You took the softmax over axis 1. In one table those are the keys; with batch and heads in front they are "
            "the heads. Count from the end: the keys are `dim=-1`.",
        ),
        (lambda scores: scores.flatten().softmax(0).reshape(scores.shape), _OVER_EVERYTHING),
        (
            lambda scores: scores.exp() / scores.exp().sum(),
            f"{_OVER_EVERYTHING} And exp(1000) is infinite: subtract each row's maximum before `exp`.",
        ),
        (
            lambda scores: _exp_over(scores, -1),
            "Your weights are right while scores are small, and NaN when they are near 1000: exp(1000) is infinite. "
            "Subtract each row's maximum before `exp`: the weights stay the same and nothing overflows.",
        ),
        (
            lambda scores: _exp_over(scores - scores.max(), -1),
            "You subtracted the largest score of all, so a row that lies far below it becomes 0 / 0, which is NaN. "
            "Subtract each row's own maximum: `scores.amax(dim=-1, keepdim=True)`.",
        ),
        (
            lambda scores: _exp_over(scores - scores.mean(-1, keepdim=True), -1),
            f"You subtracted the middle of each row, such as its mean, {_STILL_OVERFLOWS}",
        ),
        (
            lambda scores: _exp_over(scores - scores[..., :1], -1),
            f"You subtracted each row's first score, {_STILL_OVERFLOWS}",
        ),
        (
            lambda scores: _exp_over(scores - scores.amin(-1, keepdim=True), -1),
            f"You subtracted each row's smallest score, {_STILL_OVERFLOWS}",
        ),
        (
            lambda scores: _exp_over(scores, -2),
            "Your rows do not sum to 1, your columns do: sum over the keys, `dim=-1`. And exp(1000) is infinite: "
            "subtract each row's maximum before `exp`.",
        ),
        (
            lambda scores: _shifted_exp(scores) / _shifted_exp(scores).sum(-1),
            "Your sum lost its axis, so row 0's sum divides column 0, and where the sizes differ it raises. Keep the "
            "axis: `sum(dim=-1, keepdim=True)`.",
        ),
        (
            lambda scores: scores.exp() / scores.exp().sum(-1),
            "Your sum lost its axis, so row 0's sum divides column 0, and where the sizes differ it raises. Keep the "
            "axis: `sum(dim=-1, keepdim=True)`. And exp(1000) is infinite: subtract each row's maximum before `exp`.",
        ),
        (
            lambda scores: scores.exp(),
            "You took `exp`, but did not divide: your rows do not sum to 1. Divide by the sum over the keys, and "
            "subtract each row's maximum before `exp`, so that large scores do not overflow.",
        ),
        (
            _shifted_exp,
            "You took `exp` of scores minus their maximum, but did not divide: the largest weight of each row is 1. "
            "Divide by `sum(dim=-1, keepdim=True)`.",
        ),
        (
            lambda scores: scores / scores.sum(-1, keepdim=True),
            "You divided the scores by their sum without `exp`: rows sum to 1, but some weights are negative. "
            "Take `exp` first, which makes them positive.",
        ),
        (
            lambda scores: scores.log_softmax(-1),
            "You returned the logarithms of the weights: all are negative. Use `softmax`, not `log_softmax`.",
        ),
        (
            lambda scores: scores.sigmoid(),
            "You took a sigmoid: each weight is between 0 and 1, but a row does not sum to 1, as keys do not "
            "compete. Take the softmax over the keys, `dim=-1`.",
        ),
    ],
)
def softmax_rows(scores):
    """Turn scores into weights. Write ``softmax_rows(scores)``: a softmax over the keys.

    Each query's weights are exp(score) / sum of exp(score): positive, and they sum to 1. Scores near 1000 must give
    numbers too. Try it with ``exp`` and a sum; ``torch.softmax`` counts as well.

    Args:
        scores: (... i j), a row for each query; other axes (batch, heads) may lead.

    Returns:
        The weights (... i j).
    """
    return scores.softmax(dim=-1)


@exercise(
    axes="... i j, ... j d -> ... i d",
    inputs=lambda normal: [
        (normal(3, 5).softmax(-1), normal(5, 4)),
        (normal(2, 3, 4, 6).softmax(-1), normal(2, 3, 6, 8)),
        (normal(2, 5, 5).softmax(-1), normal(2, 5, 3)),
        # Weights that do not sum to 1, as after dropout, and some so small that whoever drops them drops all.
        (2 * normal(3, 5).softmax(-1), normal(5, 4)),
        (1e-6 * normal(3, 5).softmax(-1), 1e6 * normal(5, 4)),
    ],
    mistakes=[
        (
            lambda weights, v: weights.mT @ v,
            "You transposed the weights, so each output is mixed by a column, and raises where there are not as many "
            "queries as keys. A row holds a query's weights: `weights @ v`.",
        ),
        (
            lambda weights, v: v.mean(-2, keepdim=True).expand(*weights.shape[:-1], -1),
            "You took the plain mean of the values: all queries get the same output and the weights play no part. "
            "Weigh the values first: `weights @ v`.",
        ),
        (
            lambda weights, v: v.sum(-2, keepdim=True).expand(*weights.shape[:-1], -1),
            "You added the values up without weights: all queries get the same output. Weigh the values first: "
            "`weights @ v`.",
        ),
        (
            lambda weights, v: one_hot(weights.argmax(-1), weights.shape[-1]).to(v) @ v,
            "You took only the value with the largest weight (hard attention): the others play no part, and no "
            "gradient reaches the weights. Add up all values, each times its weight: `weights @ v`.",
        ),
        (
            lambda weights, v: weights[..., None] * v[..., None, :, :],
            "You multiplied each value by its weight, but did not add them up: the axis of keys is still there, "
            "(... i j d). Sum over it, or write `weights @ v`.",
        ),
        (
            lambda weights, v: (weights[..., None] * v[..., None, :, :]).sum(-3),
            "You summed over the queries, so an output belongs to a key, (... j d). Sum over the keys: `weights @ v`.",
        ),
        (
            lambda weights, v: weights.softmax(-1) @ v,
            "You took a softmax of what are weights already, so they become almost equal, and so do the outputs. "
            "Use them as they come: `weights @ v`.",
        ),
        (
            lambda weights, v: weights @ v / weights.sum(-1, keepdim=True),
            "You divided by the sum of the weights. After a softmax that changes nothing; but weights after dropout, "
            "or of a query that may see nothing, do not sum to 1, and must stay as they are: `weights @ v`.",
        ),
        (
            lambda weights, v: (weights.mean(-3, keepdim=True) if weights.ndim > 2 else weights) @ v,
            "You averaged the weights over the heads, so all heads look at the same keys. Let each head keep its own "
            "weights: `weights @ v` does so.",
        ),
    ],
)
def attend(weights, v):
    """Mix the values: write ``attend(weights, v)``, where each output is the sum of the values, each times its weight.

    Args:
        weights: (... i j), a row for each query; other axes (batch, heads) may lead.
        v: values (... j d).

    Returns:
        The outputs (... i d).
    """
    return weights @ v


def _mix(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, width: float | None = None) -> torch.Tensor:
    """Attention from q, k and v with the root of any width as the scale."""
    return (q @ k.mT / (width or q.shape[-1]) ** 0.5).softmax(-1) @ v


def _projected(mix: Callable) -> Callable:
    """A function of queries, keys and values as one of x and the three matrices."""
    return lambda x, w_q, w_k, w_v: mix(x @ w_q, x @ w_k, x @ w_v)


@exercise(
    axes="... n e, e d, e d, e d -> ... n d",
    inputs=lambda normal: [
        (normal(3, 6), *(normal(6, 4) / 2 for _ in "qkv")),
        (normal(2, 3, 5, 8), *(normal(8, 4) / 2 for _ in "qkv")),
        (normal(2, 4, 5), *(normal(5, 5) / 2 for _ in "qkv")),
        (normal(3, 3, 3), *(normal(3, 3) for _ in "qkv")),
        (60 * normal(3, 6), *(normal(6, 4) / 2 for _ in "qkv")),
        (60 + normal(3, 6), normal(6, 4).abs(), -normal(6, 4).abs(), normal(6, 4)),  # all scores are very low
    ],
    mistakes=[
        (
            _projected(lambda q, k, v: _mix(q, q, v)),
            "You made the keys with w_q. Query and key of a token are then the same vector, the scores are symmetric, "
            "and tokens tend to look at themselves. Keys are `x @ w_k`.",
        ),
        (
            _projected(lambda q, k, v: _mix(k, k, v)),
            "You made the queries with w_k. Query and key of a token are then the same vector, the scores are "
            "symmetric, and tokens tend to look at themselves. Queries are `x @ w_q`.",
        ),
        (
            _projected(lambda q, k, v: _mix(k, q, v)),
            "You swapped queries and keys: the scores are transposed, so each token gives the attention that it should "
            "get. The scores are (x @ w_q) (x @ w_k)ᵀ.",
        ),
        (
            _projected(lambda q, k, v: _mix(q, k, k)),
            "You mixed the keys: what a token is found by became what it says. Mix the values, `x @ w_v`.",
        ),
        (
            _projected(lambda q, k, v: _mix(q, k, q)),
            "You mixed the queries: what a token asks became what it says. Mix the values, `x @ w_v`.",
        ),
        (
            lambda x, w_q, w_k, w_v: _mix(x @ w_q, x @ w_k, x),
            "You mixed the tokens themselves: w_v plays no part and the result has the width of x. Mix the values, "
            "`x @ w_v`.",
        ),
        (
            lambda x, w_q, w_k, w_v: _mix(x, x, x @ w_v),
            "You compared the tokens themselves: w_q and w_k play no part and tokens tend to look at themselves. "
            "Queries are `x @ w_q` and keys `x @ w_k`.",
        ),
        (
            lambda x, w_q, w_k, w_v: _mix(x @ w_q.mT, x @ w_k.mT, x @ w_v.mT),
            "You transposed the matrices, which raises unless they are square. A matrix of `nn.Linear` is stored "
            "transposed; these are not: `x @ w_q`.",
        ),
        (
            _projected(lambda q, k, v: _mix(q, k, v, 1.0)),
            "You did not scale the scores, so the softmax saturates as d_k grows. Divide them by √d_k, the root of "
            "the width of a query.",
        ),
        (
            lambda x, w_q, w_k, w_v: _mix(x @ w_q, x @ w_k, x @ w_v, x.shape[-1]),
            "You divided by √d_model, the width of x, so the weights are too even when heads are narrower than x. "
            "Divide by √d_k, the root of the width of a query.",
        ),
        (
            lambda x, w_q, w_k, w_v: _mix(x @ w_q, x @ w_k, x @ w_v, x.shape[-2]),
            "You divided by √n, the root of the number of tokens, so a longer sentence changes every score. "
            "Divide by √d_k, the root of the width of a query.",
        ),
        (
            _projected(lambda q, k, v: _mix(q, k, v, q.shape[-1] ** 2)),
            "You divided by d_k, so the weights are nearly equal. Divide by √d_k, the root of the width of a query.",
        ),
        (
            _projected(lambda q, k, v: (q @ k.mT / q.shape[-1] ** 0.5).softmax(-2) @ v),
            "You took the softmax over the queries: the weights' columns sum to 1, their rows do not. Take it over the "
            "keys, `dim=-1`.",
        ),
        (
            _projected(lambda q, k, v: (q @ k.mT / q.shape[-1] ** 0.5).softmax(0) @ v),
            "You took the softmax over axis 0. In one table those are the queries, so columns sum to 1; with a batch "
            "in front its items share a weight of 1. Count from the end: the keys are `dim=-1`.",
        ),
        (
            _projected(lambda q, k, v: (q @ k.mT / q.shape[-1] ** 0.5).softmax(1) @ v),
            "You took the softmax over axis 1. In one table those are the keys; with a batch in front they are not. "
            "Count from the end: the keys are `dim=-1`.",
        ),
        (
            _projected(lambda q, k, v: (q @ _all_axes_turned(k) / q.shape[-1] ** 0.5).softmax(-1) @ v),
            "`.T` turns all axes round, so it fits a single table only. Swap the last two axes: `q @ k.mT`.",
        ),
        (
            _projected(lambda q, k, v: _exp_over(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v),
            "Right while scores are small, and NaN when they are near 1000: exp(1000) is infinite. Use your "
            "`softmax_rows`, or subtract each row's maximum before `exp`.",
        ),
        (
            _projected(lambda q, k, v: q @ k.mT / q.shape[-1] ** 0.5 @ v),
            "You left out the softmax: scores are no weights, some are negative and rows do not sum to 1. Take the "
            "softmax over the keys, `dim=-1`, before you mix the values.",
        ),
        (
            _projected(lambda q, k, v: (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)),
            "You returned the weights. One step is missing: mix the values with them, `weights @ (x @ w_v)`.",
        ),
    ],
)
def self_attention(x, w_q, w_k, w_v):
    """The whole of it: write ``self_attention(x, w_q, w_k, w_v)``: each token asks all tokens and mixes the answers.

    Queries, keys and values are ``x @ w_q``, ``x @ w_k`` and ``x @ w_v``; then come scaled scores, softmax over the
    keys and the weighted sum of the values. The three functions before this one may help.

    Args:
        x: tokens (... n e), where e is d_model and other axes (batch) may lead.
        w_q, w_k, w_v: the projections (e d), where d is d_k.

    Returns:
        The outputs (... n d), without the weights.
    """
    out, _ = scaled_dot_product_attention(x @ w_q, x @ w_k, x @ w_v)
    return out
