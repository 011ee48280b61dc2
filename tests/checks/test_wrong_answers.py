"""Answers that agree with ours on easy inputs and are wrong, one for each input that was added because of it."""

import math

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from mha_lessons import checks
from mha_lessons.checks.engine import call, same_outcome


def ending_with_the_longest(lengths, n_keys):
    return (torch.arange(int(lengths.max())) < lengths[:, None])[:, None, None, :]


def padded_ones(lengths, n_keys):
    return pad_sequence([torch.ones(n, dtype=torch.bool) for n in lengths], batch_first=True)[:, None, None, :]


def a_whole_root(d_model, num_heads):
    return 1 / math.isqrt(d_model // num_heads)


def a_power_of_two(d_model, num_heads):
    return 2.0 ** -round(math.log2(d_model / num_heads) / 2)


def clamped_logarithm(weights):
    return -(weights * weights.clamp_min(1e-300).log()).sum(-1) / math.log(weights.shape[-1])


def shared_again(scores, mask):
    left = scores.softmax(-1) * mask
    return left / left.sum(-1, keepdim=True).clamp_min(1e-30)


def less_the_mean(scores, mask):
    left = (scores - scores.mean(-1, keepdim=True)).exp() * mask
    return left / left.sum(-1, keepdim=True).clamp_min(1e-30)


def overflowing(q, k, v):
    weights = (q @ k.mT / q.shape[-1] ** 0.5).exp()
    return weights / weights.sum(-1, keepdim=True) @ v


def overflowing_self(x, w_q, w_k, w_v):
    return overflowing(x @ w_q, x @ w_k, x @ w_v)


def overflowing_decode(q, k, v, k_cache, v_cache):
    k, v = torch.cat([k_cache, k], -2), torch.cat([v_cache, v], -2)
    return overflowing(q, k, v), k, v


def waves(position, d_model):
    angle = position[:, None] * 10_000.0 ** (-torch.arange(0, d_model, 2) / d_model)
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(-2)[:, :d_model]


def a_table_of_5000(n, d_model, offset):
    return waves(torch.arange(5000), d_model)[offset : offset + n]


def positions_in_half_precision(n, d_model, offset):
    return waves(torch.arange(offset, offset + n).bfloat16().float(), d_model)


def a_low_shift(maximum, total, mix, scores, v):
    new = torch.maximum(maximum, scores.amax(-1))
    shift = new.clamp(min=-20)
    kept, weights = (maximum - shift).exp(), (scores - shift[..., None]).exp()
    return new, total * kept + weights.sum(-1), mix * kept[..., None] + weights @ v


@pytest.mark.parametrize(
    ("check", "wrong"),
    [
        (checks.padding, ending_with_the_longest),
        (checks.padding, padded_ones),
        (checks.attention_scale, a_whole_root),
        (checks.attention_scale, a_power_of_two),
        (checks.entropy_of_rows, clamped_logarithm),
        (checks.safe_softmax, shared_again),
        (checks.safe_softmax, less_the_mean),
        (checks.self_attention, overflowing_self),
        (checks.decode_step, overflowing_decode),
        (checks.sinusoid, a_table_of_5000),
        (checks.sinusoid, positions_in_half_precision),
        (checks.online_step, a_low_shift),
    ],
)
def test_is_refused(check, wrong):
    task = check.exercise
    right, *others = (same_outcome(call(wrong, case), call(task.oracle, case)) for case in task.cases())
    assert right, "wrong on the easiest input already"
    assert not all(others), "no input tells it from ours"  # a known mistake would be refused by its name all the same
    assert not check(wrong).passed
