"""What the bank of exercises does not ask: which gradients `safe_softmax` accepts, and how it tells a wrong one."""

import pytest
import torch

from mha_lessons import checks


def filled_and_mended(scores, mask):
    return scores.masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num()


def added_and_mended(scores, mask):
    bias = torch.zeros_like(scores).masked_fill(~mask, -torch.inf)
    return torch.where(mask, (scores + bias).softmax(-1), 0.0)


def twice_the_gradient(scores, mask):
    weights = filled_and_mended(scores, mask)
    return 2 * weights - weights.detach()


def without_gradient(scores, mask):
    return filled_and_mended(scores.detach(), mask)


def mended_in_place(scores, mask):
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    weights[~mask.expand_as(weights)] = 0.0
    return weights


def test_any_answer_with_finite_gradients_passes():
    assert checks.safe_softmax(filled_and_mended).passed
    report = checks.safe_softmax(without_gradient)
    assert report.passed
    assert "no gradient flows back" in report.diagnosis


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (added_and_mended, "Your weights are right, but the gradient is NaN: you added -inf"),
        (twice_the_gradient, "the numbers are right, but the gradient that flows back to `scores` at"),
        (mended_in_place, "modified by an inplace operation"),
    ],
)
def test_a_wrong_gradient_is_told(answer, words):
    report = checks.safe_softmax(answer)
    assert not report.passed
    assert words in report.diagnosis
