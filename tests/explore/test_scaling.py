"""The draw function of the scaling explorer, over its whole range, against autograd and known numbers."""

import itertools

import numpy as np
import pytest
import torch

from mha_lessons.explore import scaling
from mha_lessons.explore.scaling import DIVISORS, _queries_and_keys, draw_scaling

CORNERS = list(itertools.product([2, 512], [2, 32], [1, 8], DIVISORS))


@pytest.mark.parametrize(("d_k", "length", "num_heads", "divisor"), CORNERS)
def test_every_corner_gives_weights_and_gauges(d_k, length, num_heads, divisor):
    state = draw_scaling(d_k, length, num_heads, divisor)
    assert state.weights.shape == state.scores.shape == (num_heads, length, length)
    np.testing.assert_allclose(state.weights.sum(-1), 1, atol=1e-12)
    assert state.entropy.shape == state.gradient.shape == (num_heads, length)
    assert (state.entropy >= 0).all()
    assert (state.entropy <= 1 + 1e-12).all()
    assert np.isfinite(state.gradient).all()
    assert len(state.queries) == len(state.keys) == length
    assert len(f"scaling: {state.summary}") <= 110


# Case C18: d_k 64 and 8 heads.
@pytest.mark.parametrize(
    ("divisor", "std", "entropy"), [("none", 8.0, 0.14), ("√d_k", 1.0, 0.87), ("√d_model", 8**-0.5, 0.98)]
)
def test_c18_each_divisor_has_its_own_spread_and_entropy(divisor, std, entropy):
    state = draw_scaling(64, 32, 8, divisor)
    assert state.scores.std() == pytest.approx(std, rel=0.03)
    assert state.entropy.mean() == pytest.approx(entropy, abs=0.01)


@pytest.mark.parametrize("divisor", DIVISORS)
def test_the_gradient_is_autograds(divisor):
    d_k, length, num_heads = 16, 5, 2
    state = draw_scaling(d_k, length, num_heads, divisor)
    wide = draw_scaling(d_k, length, num_heads, "none").scores  # q kᵀ
    by = DIVISORS[divisor](d_k, num_heads)
    np.testing.assert_allclose(state.scores, wide / by)
    q, k = _queries_and_keys()[:, 1, :length, :d_k]
    np.testing.assert_allclose((q @ k.mT).numpy(), wide[1], rtol=1e-10)
    jacobian = torch.autograd.functional.jacobian(lambda query: (k @ query / by).softmax(-1), q[3])
    assert state.gradient[1, 3] == pytest.approx(jacobian.norm().item(), rel=1e-9)


def test_the_entropy_is_that_of_the_distribution():
    state = draw_scaling(8, 6, 2, "√d_k")
    expected = torch.distributions.Categorical(torch.as_tensor(state.weights)).entropy() / np.log(6)
    np.testing.assert_allclose(state.entropy, expected)


def test_with_one_head_both_roots_are_the_same():
    one, other = draw_scaling(32, 8, 1, "√d_k"), draw_scaling(32, 8, 1, "√d_model")
    np.testing.assert_array_equal(one.weights, other.weights)


def test_what_stays_in_view_stays_the_same():
    large, small = draw_scaling(64, 32, 8, "none"), draw_scaling(64, 5, 2, "none")
    np.testing.assert_allclose(small.scores, large.scores[:2, :5, :5], rtol=1e-9, atol=1e-12)


def test_drawing_leaves_the_random_state_alone():
    _queries_and_keys.cache_clear()
    before = torch.get_rng_state()
    draw_scaling(64, 8, 2, "none")
    assert torch.equal(torch.get_rng_state(), before)


def test_the_note_says_the_width_and_the_divisor():
    note = draw_scaling(64, 8, 8, "√d_model").note
    assert "d_model = heads · d_k = 512" in note
    assert "divided by 22.63" in note


def test_the_panel_follows_the_chosen_query_and_shows_its_numbers():
    explorer = scaling()
    panel, view = explorer.panels[0], explorer.panels[1].widget
    before = bytes(panel.widget.value)
    view.head, view.query = 2, 5
    assert bytes(panel.widget.value) != before
    state = explorer.state
    np.testing.assert_allclose(panel.row.get_data().values, state.weights[2, 5])
    assert panel.entropy.bar.get_width() == pytest.approx(state.entropy[2, 5])
    assert panel.entropy.line.get_xdata()[0] == pytest.approx(np.median(state.entropy))
    assert panel.gradient.bar.get_x() + panel.gradient.bar.get_width() == pytest.approx(state.gradient[2, 5])
    assert panel.histogram.get_data().values.max() == 1


def test_fewer_heads_and_tokens_than_the_chosen_ones():
    explorer = scaling()
    panel, view = explorer.panels[0], explorer.panels[1].widget
    view.head, view.query = 3, 15
    explorer.controls["num_heads"].value = 1
    explorer.controls["length"].value = 2
    assert (view.head, view.query) == (0, 1)
    np.testing.assert_allclose(panel.row.get_data().values, explorer.state.weights[0, 1])


def test_the_gauge_ends_where_its_axis_ends():
    explorer = scaling()
    explorer.controls["d_k"].value = 512
    explorer.controls["divisor"].value = "none"
    panel, view = explorer.panels[0], explorer.panels[1].widget
    head, query = np.unravel_index(explorer.state.gradient.argmin(), explorer.state.gradient.shape)
    assert explorer.state.gradient[head, query] < panel.gradient.least
    view.head, view.query = int(head), int(query)
    assert panel.gradient.bar.get_width() == 0
    assert explorer.state.gradient.max() < panel.gradient.most
