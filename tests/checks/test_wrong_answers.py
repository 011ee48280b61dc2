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


def a_lower_floor(maximum, total, mix, scores, v):
    new = torch.maximum(maximum, scores.amax(-1))
    shift = new.clamp(min=-1e4)
    kept, weights = (maximum - shift).exp(), (scores - shift[..., None]).exp()
    return new, total * kept + weights.sum(-1), mix * kept[..., None] + weights @ v


def forward(new_maximum, start=-torch.inf):
    def flash_forward(q, k, v, block):
        maximum, total, mix = torch.full_like(q[..., 0], start), 0, 0
        for keys, values in zip(k.split(block, dim=-2), v.split(block, dim=-2), strict=True):
            scores = q @ keys.mT / q.shape[-1] ** 0.5
            new = new_maximum(maximum, scores)
            weights, kept = (scores - new[..., None]).exp(), (maximum - new).exp()
            total, mix = total * kept + weights.sum(-1), mix * kept[..., None] + weights @ values
            maximum = new
        return mix / total[..., None], maximum + total.log()

    return flash_forward


def of_all_rows(maximum, scores):
    return torch.maximum(maximum, scores.max())


def of_this_tile(maximum, scores):
    return scores.amax(-1)


def of_the_first_tile(maximum, scores):
    return torch.where(maximum == -torch.inf, scores.amax(-1), maximum)


def running(maximum, scores):
    return torch.maximum(maximum, scores.amax(-1))


def shifted_merge(shift):
    def merge(out_a, lse_a, out_b, lse_b):
        at = shift(lse_a, lse_b).nan_to_num(neginf=0)
        a, b = (lse_a - at).exp(), (lse_b - at).exp()
        total = a + b
        mix = (out_a * a[..., None] + out_b * b[..., None]) / total[..., None]
        return mix.where(total[..., None] > 0, 0), at + total.log()

    return merge


def tiles_of_a_rounded_shift(n_queries, n_keys, block_q, block_k):
    ends = torch.arange(0, n_queries, block_q).add(block_q).clamp(max=n_queries)
    return (-(-ends // block_k) + -(-(n_keys - n_queries) // block_k)).clamp(min=0)


def by_scale_factor(table, old_grid, new_grid):
    picture = table[1:].unflatten(0, old_grid).permute(2, 0, 1)[None]
    factors = new_grid[0] / old_grid[0], new_grid[1] / old_grid[1]
    resized = torch.nn.functional.interpolate(picture, scale_factor=factors, mode="bicubic", align_corners=False)
    return torch.cat([table[:1], resized[0].flatten(1).mT])


def softmax_less(shift):
    def attention(q, k, v):
        scores = q @ k.mT / q.shape[-1] ** 0.5
        weights = (scores - shift(scores)).exp()
        return weights / weights.sum(-1, keepdim=True) @ v

    return attention


def decode_less(shift):
    def decode_step(q, k, v, k_cache, v_cache):
        k, v = torch.cat([k_cache, k], -2), torch.cat([v_cache, v], -2)
        return softmax_less(shift)(q, k, v), k, v

    return decode_step


def self_less(shift):
    return lambda x, w_q, w_k, w_v: softmax_less(shift)(x @ w_q, x @ w_k, x @ w_v)


def at_least_0(scores):
    return scores.amax(-1, keepdim=True).clamp(min=0)


def turned_in_half_precision(x, theta):
    angle = torch.arange(x.shape[-2]).bfloat16().to(x.dtype) * theta
    a, b = x.unbind(-1)
    return torch.stack([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


def distances_in_half_precision(num_heads, n_queries, n_keys):
    distance = (torch.arange(n_keys - n_queries, n_keys)[:, None] - torch.arange(n_keys)).abs().bfloat16().float()
    return -(2.0 ** (-8 * torch.arange(1, num_heads + 1) / num_heads))[:, None, None] * distance


def a_table_of_512(n_queries, n_keys):
    return torch.ones(n_queries, 512, dtype=torch.bool).tril(n_keys - n_queries)[:, :n_keys]


def filled_lower(scores, mask):
    return scores.masked_fill(~mask, -1e10).softmax(-1).masked_fill(~mask, 0.0)


def undoing_dropout(weights, v):
    return weights @ v / weights.sum(-1, keepdim=True).clamp(min=1)


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
        (checks.online_step, a_lower_floor),
        (checks.flash_forward, forward(of_all_rows)),
        (checks.flash_forward, forward(of_this_tile)),
        (checks.flash_forward, forward(of_the_first_tile)),
        (checks.flash_forward, forward(running, start=-1e4)),
        (checks.merge_parts, shifted_merge(lambda a, b: torch.maximum(a, b).clamp(min=0))),
        (checks.merge_parts, shifted_merge(lambda a, b: a)),
        (checks.merge_parts, shifted_merge(lambda a, b: torch.maximum(a, b).max())),
        (checks.tile_bounds, tiles_of_a_rounded_shift),
        (checks.resize_positions, by_scale_factor),
        (checks.decode_step, decode_less(torch.max)),
        (checks.decode_step, decode_less(at_least_0)),
        (checks.self_attention, self_less(at_least_0)),
        (checks.rotary_pair, turned_in_half_precision),
        (checks.alibi, distances_in_half_precision),
        (checks.causal, a_table_of_512),
        (checks.safe_softmax, filled_lower),
        (checks.attend, undoing_dropout),
    ],
)
def test_is_refused(check, wrong):
    task = check.exercise
    right, *others = (same_outcome(call(wrong, case), call(task.oracle, case)) for case in task.cases())
    assert right, "wrong on the easiest input already"
    assert not all(others), "no input tells it from ours"  # a known mistake would be refused by its name all the same
    assert not check(wrong).passed
