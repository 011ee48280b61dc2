"""Exercises on the scale and on saturation: the factor itself, the entropy of the weights, softmax's Jacobian."""

import math

import torch

from mha_lessons.checks.engine import exercise


@exercise(
    axes="e, h ->",
    inputs=lambda normal: [(512, 8), (512, 16), (60, 3), (768, 12), (32, 32)],
    mistakes=[
        (
            lambda d_model, num_heads: d_model**-0.5,
            "You divided by √d_model. A head's dot product has d_k = d_model / num_heads terms, so your scores are "
            "√num_heads times too small and the weights too even. Divide by √d_k.",
        ),
        (
            lambda d_model, num_heads: num_heads / d_model,
            "You divided by d_k, once in full or by its root twice, so the scores are √d_k times too small and the "
            "weights nearly equal. Divide by √d_k, once.",
        ),
        (
            lambda d_model, num_heads: (d_model / num_heads) ** -1 / 2,
            "`**` binds before `/`, so `d_k ** -1 / 2` is 1 / (2 d_k). Write `d_k ** -0.5`.",
        ),
        (
            lambda d_model, num_heads: (d_model / num_heads) ** 0.5,
            "You returned √d_k. That is what to divide by; the task asks for the factor to multiply by, which is "
            "its inverse: `d_k ** -0.5`.",
        ),
        (
            lambda d_model, num_heads: d_model**0.5,
            "You returned √d_model. A head's dot product has d_k = d_model / num_heads terms, and the scores are "
            "multiplied by what you return: `d_k ** -0.5`.",
        ),
        (
            lambda d_model, num_heads: d_model / num_heads,
            "You returned d_k, the number of terms of a dot product. The scores are multiplied by what you return, so "
            "that their standard deviation becomes 1: `d_k ** -0.5`.",
        ),
        (
            lambda d_model, num_heads: num_heads**-0.5,
            "You divided by the root of the number of heads, but heads do not meet in a dot product. What grows is "
            "its number of terms, d_k = d_model / num_heads. Divide by √d_k.",
        ),
        (
            lambda d_model, num_heads: (d_model * num_heads) ** -0.5,
            "You multiplied d_model by the number of heads. Heads share the width, so d_k = d_model / num_heads. "
            "Divide by √d_k.",
        ),
        (
            lambda d_model, num_heads: 1.0,
            "You returned 1, which scales nothing: the standard deviation of the scores stays √d_k. Return "
            "`d_k ** -0.5`.",
        ),
    ],
)
def attention_scale(d_model, num_heads):
    """By what are the dot products multiplied? Write ``attention_scale(d_model, num_heads)``.

    The model's width is shared out equally between the heads. Queries and keys have variance 1, and so shall the
    scores that a head hands to its softmax.

    Args:
        d_model: the width e of the model, an int.
        num_heads: the number h of heads, an int that divides it.

    Returns:
        One positive number, the factor on q·k.
    """
    return (d_model / num_heads) ** -0.5


def _share_of_log(entropy: torch.Tensor, count: int) -> torch.Tensor:
    return entropy / math.log(count)


def _with_zeros(normal) -> torch.Tensor:
    """Weights of which half a row is 0: one row is hard, one is even."""
    weights = (9 * normal(2, 3, 4)).softmax(-1)
    weights[0, 0] = torch.tensor([0.0, 1.0, 0.0, 0.0])
    weights[1, 2] = torch.tensor([0.5, 0.0, 0.5, 0.0])
    return weights


_LOG_OF_ZERO = (
    "A weight of 0 gives NaN: log 0 is minus infinity, and 0 times infinity is no number. Its share of the entropy is "
    "0: use `torch.special.entr(weights)`, which is -α log α with 0 at 0."
)


@exercise(
    axes="... i j -> ... i",
    inputs=lambda normal: [
        (normal(3, 5).softmax(-1),),
        ((3 * normal(2, 3, 4, 6)).softmax(-1),),
        ((2 * normal(4, 4)).softmax(-1),),
        (_with_zeros(normal),),
        (_with_zeros(normal).float(),),
    ],
    mistakes=[
        (lambda weights: _share_of_log(-(weights * weights.log()).sum(-1), weights.shape[-1]), _LOG_OF_ZERO),
        (
            lambda weights: -(weights * weights.log()).sum(-1),
            f"{_LOG_OF_ZERO} And divide by log n, so that even weights give 1 for any number of keys.",
        ),
        (
            lambda weights: _share_of_log(-(weights * weights.clamp_min(1e-300).log()).sum(-1), weights.shape[-1]),
            "Right in float64. In float32, whose least number is about 1e-45, 1e-300 is 0, and 0 times log 0 is NaN. "
            "Use `torch.special.entr(weights)`, which is -α log α with 0 at 0.",
        ),
        (
            lambda weights: torch.special.entr(weights).sum(-1),
            "This is the entropy in nats: even weights give log n, so rows of different lengths cannot be compared. "
            "Divide by log n, where n is the number of keys, `weights.shape[-1]`.",
        ),
        (
            lambda weights: torch.special.entr(weights).sum(-1) / math.log(2),
            "This is the entropy in bits: even weights give log₂ n, so rows of different lengths cannot be compared. "
            "Divide by the logarithm of the number of keys, `math.log(weights.shape[-1])`.",
        ),
        (
            lambda weights: -_share_of_log(torch.special.entr(weights).sum(-1), weights.shape[-1]),
            "Your entropies are negative. Logarithms of weights are negative, so the sum needs a minus: -Σ α log α.",
        ),
        (
            lambda weights: _share_of_log(torch.special.entr(weights).sum(-2), weights.shape[-2]),
            "You summed over the queries, so there is one number for each key. A distribution is a row: sum over the "
            "keys, `dim=-1`.",
        ),
        (
            lambda weights: _share_of_log(torch.special.entr(weights).sum(-1), weights.shape[-2]),
            "You divided by the logarithm of the number of queries. What sets the largest entropy of a row is the "
            "number of keys, `weights.shape[-1]`.",
        ),
        (
            lambda weights: _share_of_log(torch.special.entr(weights).sum(-1), len(weights)),
            "You divided by log(len(weights)), but `len` is the size of the first axis, not of the last. The number of "
            "keys is `weights.shape[-1]`.",
        ),
        (
            lambda weights: torch.special.entr(weights).sum(-1) / weights.shape[-1],
            "You divided by n, as for a mean. The largest entropy of n weights is log n: divide by "
            "`math.log(weights.shape[-1])`, and even weights give 1.",
        ),
        (
            lambda weights: _share_of_log(torch.special.entr(weights).sum((-2, -1)), weights.shape[-1]),
            "You added up the rows: there is one number for the whole table. Each query has an entropy of its own: "
            "sum over the keys alone, `dim=-1`.",
        ),
        (
            lambda weights: _share_of_log(torch.special.entr(weights.softmax(-1)).sum(-1), weights.shape[-1]),
            "You took a softmax of what are weights already, so every row looks almost even. Use them as they come.",
        ),
        (
            lambda weights: 1 - _share_of_log(torch.special.entr(weights).sum(-1), weights.shape[-1]),
            "You returned 1 minus the answer: even weights must give 1 and a hard choice 0.",
        ),
    ],
)
def entropy_of_rows(weights):
    """How even is each row? Write ``entropy_of_rows(weights)``: the entropy -Σ α log α over the keys, divided by log n.

    n is the number of keys, so even weights give 1. A hard choice gives 0: a weight of 0 adds nothing to the sum.

    Args:
        weights: (... i j), a row for each query, each row summing to 1; other axes (batch, heads) may lead.

    Returns:
        The entropies (... i), from 0 to 1.
    """
    return _share_of_log(torch.special.entr(weights).sum(dim=-1), weights.shape[-1])


def _outer(alpha: torch.Tensor) -> torch.Tensor:
    return alpha[..., :, None] * alpha[..., None, :]


@exercise(
    axes="... j -> ... j m",
    inputs=lambda normal: [
        (normal(4).softmax(-1),),
        (normal(2, 3, 5).softmax(-1),),
        ((5 * normal(3, 3)).softmax(-1),),
    ],
    mistakes=[
        (
            lambda alpha: alpha * (1 - alpha),
            "You returned α(1 - α), the slope of each weight by its own score. Weights compete, so each score moves "
            "all of them: the Jacobian is a table, `torch.diag_embed(alpha)` minus the products α_j α_m.",
        ),
        (
            lambda alpha: torch.diag_embed(alpha * (1 - alpha)),
            "Your table is right on the diagonal and 0 beside it: that is n separate sigmoids. Weights compete: when "
            "one score rises, the other weights fall by α_j α_m.",
        ),
        (
            lambda alpha: torch.diag_embed(alpha),
            "You left out the products: your columns do not sum to 0, so the weights would no longer sum to 1. "
            "Subtract α_j α_m everywhere.",
        ),
        (
            lambda alpha: -_outer(alpha),
            "You left out the diagonal: a weight would fall when its own score rises. Add `torch.diag_embed(alpha)`.",
        ),
        (
            _outer,
            "You returned the products α_j α_m alone. They are subtracted from the diagonal: "
            "`torch.diag_embed(alpha)` minus them.",
        ),
        (
            lambda alpha: _outer(alpha) - torch.diag_embed(alpha),
            "Your signs are turned round: a weight would fall when its own score rises. It is the diagonal minus the "
            "products.",
        ),
        (
            lambda alpha: torch.diag_embed(alpha) + _outer(alpha),
            "You added the products: when one score rises, all weights would grow. Weights compete, so subtract them.",
        ),
        (
            lambda alpha: torch.eye(alpha.shape[-1]).to(alpha) - _outer(alpha),
            "You took the identity in place of the diagonal of weights, so a weight of 0 would still move. Use "
            "`torch.diag_embed(alpha)`.",
        ),
        (
            lambda alpha: torch.diag_embed(alpha) - alpha[..., None] * alpha,
            "Right for a single row. With more axes in front, the second factor needs its new axis too, or rows meet "
            "other rows: `alpha[..., :, None] * alpha[..., None, :]`.",
        ),
        (
            lambda alpha: torch.diag_embed(alpha.softmax(-1)) - _outer(alpha.softmax(-1)),
            "You took a softmax of what are weights already. Use them as they come.",
        ),
    ],
)
def softmax_jacobian(alpha):
    """How does each weight move with each score? Write ``softmax_jacobian(alpha)``, where α is the softmax of scores.

    Entry (j, m) is ∂α_j / ∂s_m: α_j (1 - α_j) on the diagonal and -α_j α_m beside it, which is diag(α) - ααᵀ.

    Args:
        alpha: weights (... j) that sum to 1 over the last axis; other axes (batch, heads, queries) may lead.

    Returns:
        The Jacobian (... j m), a square table for each row of weights.
    """
    return torch.diag_embed(alpha) - _outer(alpha)
