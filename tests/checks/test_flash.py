"""What the bank of exercises does not ask: that tile counts are those of the mask, and answers that people write."""

import itertools

import pytest
import torch

from mha_lessons import checks
from mha_lessons.masks import causal_mask


@pytest.mark.parametrize(
    ("n_queries", "n_keys", "block_q", "block_k"), list(itertools.product([1, 5, 12], [1, 5, 12], [1, 3, 4], [2, 4, 5]))
)
def test_c13_tile_bounds_are_the_last_tiles_with_a_visible_key(n_queries, n_keys, block_q, block_k):
    mask = causal_mask(n_queries, n_keys)
    last_tiles = [
        max([0, *(number for number, tile in enumerate(rows.split(block_k, dim=1), start=1) if tile.any())])
        for rows in mask.split(block_q)
    ]
    assert checks.tile_bounds.exercise.oracle(n_queries, n_keys, block_q, block_k).tolist() == last_tiles


def forward_with(first_maximum, factor):
    def flash_forward(q, k, v, block):
        maximum, total, mix = torch.full_like(q[..., 0], first_maximum), 0, 0
        for keys, values in zip(k.split(block, dim=-2), v.split(block, dim=-2), strict=True):
            scores = q @ keys.mT / q.shape[-1] ** 0.5
            new = torch.maximum(maximum, scores.amax(dim=-1))
            weights, kept = (scores - new[..., None]).exp(), factor(maximum, new)
            total, mix = total * kept + weights.sum(dim=-1), mix * kept[..., None] + weights @ values
            maximum = new
        return mix / total[..., None], maximum + total.log()

    return flash_forward


@pytest.mark.parametrize(
    ("first_maximum", "factor", "words"),
    [
        (-torch.inf, lambda old, new: (old - new).exp(), "Your function agrees with ours"),
        (-torch.inf, lambda old, new: (new - old).exp(), "Your factor is upside down"),
        (-torch.inf, lambda old, new: torch.ones_like(new), "You did not rescale what the earlier tiles gave"),
        (0.0, lambda old, new: (old - new).exp(), "Your maximum starts at 0"),
    ],
)
def test_flash_forward_tells_what_people_write(first_maximum, factor, words):
    assert checks.flash_forward(forward_with(first_maximum, factor)).diagnosis.startswith(words)


def all_at_once(q, k, v, block):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def joined_in_the_end(q, k, v, block):
    scores = torch.cat([q @ part.mT / q.shape[-1] ** 0.5 for part in k.split(block, dim=-2)], dim=-1)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def queries_a_block_at_a_time(q, k, v, block):
    scores = [part @ k.mT / q.shape[-1] ** 0.5 for part in q.split(block, dim=-2)]
    return torch.cat([part.softmax(-1) @ v for part in scores], -2), torch.cat([s.logsumexp(-1) for s in scores], -1)


@pytest.mark.parametrize(
    ("answer", "shape"),
    [(all_at_once, "(20, 101)"), (joined_in_the_end, "(20, 101)"), (queries_a_block_at_a_time, "(7, 101)")],
)
def test_flash_forward_sees_that_more_scores_than_a_block_are_held(answer, shape):
    report = checks.flash_forward(answer)
    assert not report.passed
    assert f"a tensor of shape {shape}: scores of more keys than a block has" in report.diagnosis


def test_flash_forward_that_calls_an_unwritten_step_is_told_which():
    def online_step(maximum, total, mix, scores, v):
        raise NotImplementedError

    def flash_forward(q, k, v, block):
        return online_step(q[..., 0], q[..., 0], q, q @ k.mT, v)

    report = checks.flash_forward(flash_forward)
    assert report.attempted
    assert report.diagnosis.startswith("Your function calls `online_step`, which is not written yet.")


def test_flash_forward_tells_a_split_of_the_batch():
    def flash_forward(q, k, v, block):
        maximum, total, mix = torch.full_like(q[..., 0], -torch.inf), 0, 0
        for keys, values in zip(k.split(block), v.split(block), strict=True):
            scores = q @ keys.mT / q.shape[-1] ** 0.5
            new = torch.maximum(maximum, scores.amax(dim=-1))
            weights, kept = (scores - new[..., None]).exp(), (maximum - new).exp()
            total, mix = total * kept + weights.sum(dim=-1), mix * kept[..., None] + weights @ values
            maximum = new
        return mix / total[..., None], maximum + total.log()

    assert checks.flash_forward(flash_forward).diagnosis.startswith("You split the first axis")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_tile_bounds_may_be_of_any_whole_type(dtype):
    assert checks.tile_bounds(lambda *args: checks.tile_bounds.exercise.oracle(*args).to(dtype)).passed
    floating = checks.tile_bounds(lambda *args: checks.tile_bounds.exercise.oracle(*args).double())
    assert not floating.passed
    short = checks.tile_bounds(lambda *args: checks.tile_bounds.exercise.oracle(*args)[:-1])
    assert "(_)" not in short.diagnosis


def test_c05_online_step_wants_the_maximum_of_a_row_without_keys_to_stay():
    def filled(maximum, total, mix, scores, v):
        new = torch.maximum(maximum, scores.amax(dim=-1)).nan_to_num(neginf=-1e4)
        kept, weights = (maximum - new).exp(), (scores - new[..., None]).exp()
        return new, total * kept + weights.sum(dim=-1), mix * kept[..., None] + weights @ v

    report = checks.online_step(filled)
    assert not report.passed
    assert "is -1e+04; expected -inf" in report.diagnosis
