"""Answers to lesson 1's exercises that people write, which the bank of exercises does not ask for."""

import pytest
import torch

from mha_lessons import checks


def exp_over_the_sum(shift):
    def softmax_rows(scores):
        weights = (scores - shift(scores)).exp()
        return weights / weights.sum(-1, keepdim=True)

    return softmax_rows


def failed(check, candidate):
    report = check(candidate)
    assert not report.passed
    return report.diagnosis


def test_softmax_rows_accepts_the_maximum_alone_as_what_is_subtracted():
    assert checks.softmax_rows(exp_over_the_sum(lambda s: s.amax(-1, keepdim=True))).passed
    assert checks.softmax_rows(exp_over_the_sum(lambda s: s.max(-1, keepdim=True).values)).passed
    for shift, words in [
        (lambda s: s.mean(-1, keepdim=True), "You subtracted the middle of each row, such as its mean"),
        (lambda s: s[..., 0].unsqueeze(-1), "You subtracted each row's first score, so a score"),
        (lambda s: s.min(-1, keepdim=True).values, "You subtracted each row's smallest score, so a score"),
        (lambda s: s[..., -1:], "nan"),
        (lambda s: s.median(-1, keepdim=True).values, "You subtracted the middle of each row"),
    ]:
        assert words in failed(checks.softmax_rows, exp_over_the_sum(shift))


def test_softmax_rows_tells_the_numbers_for_which_a_clamp_is_wrong():
    told = failed(checks.softmax_rows, lambda scores: scores.clamp(-50, 50).softmax(-1))
    assert "With scores (i j) = (3, 5) (scores from -1001 to 1001), your result" in told


def test_softmax_rows_tells_what_max_returns():
    told = failed(checks.softmax_rows, exp_over_the_sum(lambda s: s.max(-1, keepdim=True)))
    assert "`amax(dim)` the values alone" in told


def test_attend_wants_weights_used_as_they_come():
    told = failed(checks.attend, lambda weights, v: weights @ v / weights.sum(dim=-1)[..., None])
    assert told.startswith("You divided by the sum of the weights.")
    told = failed(checks.attend, lambda weights, v: weights.masked_fill(weights < 1e-4, 0) @ v)
    assert "(weights from " in told


@pytest.mark.parametrize("root", [lambda d: 2, lambda d: {4: 2.0, 8: 8**0.5, 2: 2**0.5, 3: 3**0.5}.get(d, 2.0)])
def test_scores_with_a_root_for_some_widths_alone_fail_and_leading_axes_are_not_blamed(root):
    told = failed(checks.scores, lambda q, k: q @ k.mT / root(q.shape[-1]))
    assert "With q (i d) = (2, 7) and k (j d) = (4, 7), your result at [" in told
    assert "axes may lead" not in told


def test_scores_in_float64_alone_fail():
    told = failed(checks.scores, lambda q, k: q.double() @ k.mT.double() / torch.tensor(q.shape[-1]).sqrt())
    assert "With the same arguments in float32, your result has dtype float64; expected float32." in told
