"""The explorer of positions: every size on its sliders, and the property that each encoding promises."""

import itertools

import numpy as np
import pytest
import torch

from mha_lessons.explore import positions
from mha_lessons.explore.positions import KINDS, draw_positions, spread_by_distance
from mha_lessons.positions import alibi_bias, rotary, sinusoidal_encoding


@pytest.mark.parametrize("kind", KINDS)
def test_every_corner_gives_weights(kind):
    for d_model, base, num_heads, d_k, length in itertools.product([1, 64], [2.0, 5e5], [1, 3, 8], [2, 64], [2, 48]):
        state = draw_positions(kind, d_model, base, num_heads, d_k, length)
        assert state.scores.shape == state.weights.shape == (num_heads, length, length)
        assert len(state.queries) == len(state.keys) == len(state.encoding) == length
        assert np.isfinite(state.scores).all()
        np.testing.assert_allclose(state.weights.sum(-1), 1)
        assert len(f"positions: {state.summary}") <= 110


@pytest.mark.parametrize(("kind", "is_relative"), [*zip(KINDS, (True, False, False, True, True), strict=True)])
def test_which_scores_depend_on_the_distance_alone(kind, is_relative):
    state = draw_positions(kind, 32, 1e4, 3, 8, 20)
    for scores in state.scores:
        _, least, _, most = spread_by_distance(scores)
        assert ((most - least).max() < 1e-12) == is_relative
    assert ("the same at one distance" in state.note) == is_relative


def test_the_summary_tells_the_greatest_spread_of_all_heads():
    state = draw_positions("learned (untrained)", 32, 1e4, 4, 8, 20)
    spreads = [max(np.ptp(scores.diagonal(s)) for s in range(-19, 20)) for scores in state.scores]
    assert max(spreads) > spreads[0]
    assert f"up to {max(spreads):.2f} apart" in state.summary


def test_spread_by_distance_by_hand():
    distances, least, mean, most = spread_by_distance(np.array([[1.0, 5.0], [7.0, 3.0]]))
    assert distances.tolist() == [-1, 0, 1]  # query minus key: the upper right corner is query 0, key 1
    assert least.tolist() == [5, 1, 7]
    assert mean.tolist() == [5, 2, 7]
    assert most.tolist() == [5, 3, 7]


def test_the_encodings_shown_are_the_librarys_own():
    def shown(kind):
        return torch.from_numpy(draw_positions(kind, 7, 100.0, 3, 4, 5).encoding)

    assert not shown("none").any()
    assert torch.equal(shown("sinusoidal"), sinusoidal_encoding(5, 7, base=100.0, dtype=torch.float64))
    assert torch.equal(shown("ALiBi"), alibi_bias(3, 5)[:, -1].T)
    ones = torch.tensor([1.0, 0, 1, 0], dtype=torch.float64).expand(5, 4)
    assert torch.equal(shown("rotary"), rotary(ones, base=100.0))
    assert shown("learned (untrained)").unique().numel() == 35


def test_a_moved_slider_keeps_the_rest():
    short, long = (draw_positions("sinusoidal", 16, 1e4, heads, 8, n) for heads, n in ((2, 5), (4, 9)))
    np.testing.assert_allclose(short.scores, long.scores[:2, :5, :5])


def test_alibi_adds_its_bias_to_equal_scores():
    plain, sloped = (draw_positions(kind, 16, 1e4, 6, 8, 9).scores for kind in ("none", "ALiBi"))
    np.testing.assert_allclose(sloped - plain, alibi_bias(6, 9), atol=1e-6)


def test_the_note_says_where_the_base_plays_no_part():
    for kind, d_model, d_k in itertools.product(KINDS, (1, 2, 3, 8), (2, 4)):
        said = "plays no part" in draw_positions(kind, d_model, 1e4, 2, d_k, 3).note
        changed = not np.array_equal(*(draw_positions(kind, d_model, base, 2, d_k, 3).scores for base in (2.0, 1e4)))
        assert said == (not changed), (kind, d_model, d_k)


def test_the_note_says_why_the_base_plays_no_part():
    assert "Without positions the base plays no part." in draw_positions("none", 8, 1e4, 2, 4, 3).note
    assert "With d_k 2 there is one frequency, 1 whatever the base" in draw_positions("rotary", 8, 1e4, 2, 2, 3).note
    assert "With d_model 1 there is one frequency" in draw_positions("sinusoidal", 1, 1e4, 2, 4, 3).note


def test_drawing_leaves_the_random_state_alone():
    before = torch.get_rng_state()
    draw_positions("rotary", 8, 1e4, 2, 4, 3)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_curve_follows_the_chosen_head():
    explorer = positions()
    view, panel = explorer.panels[0].widget, explorer.panels[1]
    for head in (0, 3):
        view.head = head
        np.testing.assert_allclose(panel.mean.get_ydata(), spread_by_distance(explorer.state.scores[head])[2])
    picture = bytes(panel.widget.value)
    explorer.controls["num_heads"].value = 1
    assert view.head == 0
    assert bytes(panel.widget.value) != picture
