"""The draw functions of the flash attention explorers, over their whole range, and what they must equal."""

import itertools

import numpy as np
import pytest
import torch

from mha_lessons.attention import scaled_dot_product_attention
from mha_lessons.explore import online_softmax, tiles
from mha_lessons.explore.flash import (
    CHANNELS,
    DONE,
    EXACT,
    FACTORS,
    MOST_STEPS,
    MOST_TOKENS,
    MOST_TOTAL,
    NEVER,
    NOW,
    ORDERS,
    TO_COME,
    _vectors,
    draw_online,
    draw_tiles,
)
from mha_lessons.flash import Tiling
from mha_lessons.masks import causal_mask

RIGHT, INVERTED, NONE = FACTORS


@pytest.mark.parametrize(
    ("d_k", "length", "block", "order", "factor", "step"),
    list(itertools.product([2, 64], [2, MOST_TOKENS], [1, 8], ORDERS, FACTORS, [1, MOST_TOKENS])),
)
def test_every_corner_of_the_stepper_has_finite_numbers(d_k, length, block, order, factor, step):
    state = draw_online(d_k, length, block, order, factor, step)
    assert state.scores.shape == (length,)
    assert state.output.shape == state.running_output.shape == (CHANNELS,)
    assert np.isfinite([state.maximum, state.running_total, state.total, *state.running_output]).all()


@pytest.mark.parametrize("step", range(1, 9))
@pytest.mark.parametrize("order", ORDERS)
def test_the_right_factor_is_exact_at_every_step(order, step):
    state = draw_online(8, 30, 4, order, RIGHT, step)
    seen = state.scores[: state.tile.stop]
    assert state.maximum == seen.max()
    assert state.running_total == pytest.approx(np.exp(seen - seen.max()).sum())
    np.testing.assert_allclose(state.running_output, state.output, rtol=0, atol=EXACT)
    assert state.summary.endswith("exact True")


@pytest.mark.parametrize("factor", [INVERTED, NONE])
def test_a_wrong_factor_shows_unless_the_largest_score_comes_first(factor):
    ends = {order: draw_online(8, 16, 4, order, factor, 4) for order in ORDERS[1:]}
    assert ends["largest first"].running_total == pytest.approx(ends["largest first"].total)
    assert ends["largest last"].running_total > 2 * ends["largest last"].total
    assert ends["largest last"].summary.endswith("exact False")


def test_the_last_step_of_the_stepper_is_the_softmax_of_the_row():
    state = draw_online(8, 15, 4, "as drawn", RIGHT, 99)
    weights = torch.as_tensor(state.scores).softmax(0)
    np.testing.assert_allclose(state.running_output, weights @ _vectors()[2, 0, :15, :CHANNELS], rtol=0, atol=EXACT)
    assert state.tile == slice(12, 15)
    assert state.note.startswith("After tile 4, the last: old numbers times")


@pytest.mark.parametrize("factor", FACTORS)
def test_nothing_is_old_at_the_first_tile(factor):
    assert draw_online(8, 16, 4, "as drawn", factor, 1).note.startswith("After tile 1: nothing is old yet; maximum")
    assert draw_online(8, 16, 4, "as drawn", factor, 2).note.startswith("After tile 2: old numbers times")


def test_one_key_is_no_keys():
    explorer = online_softmax()
    title = explorer.panels[0].scores_ax.get_title
    assert title() == "keys 4 to 7 are read now (orange)"
    assert "over the 8 keys seen so far" in explorer.state.note
    explorer.controls["block"].value, explorer.controls["step"].value = 1, 1
    assert title() == "key 0 is read now (orange)"
    assert "over the 1 key seen so far" in explorer.state.note


def test_the_stepper_shows_its_numbers():
    explorer = online_softmax()
    (panel,) = explorer.panels
    explorer.controls["step"].value = 3
    state = explorer.state
    assert [bar.get_height() for bar in panel.outputs] == state.running_output.tolist()
    assert panel.exact.get_ydata().tolist() == state.output.tolist()
    assert panel.maximum.get_ydata() == [state.maximum] * 2
    assert panel.total.get_height() == state.running_total


@pytest.mark.parametrize("block", [1, 2, 4, 8])
@pytest.mark.parametrize("d_k", [2, 4, 8, 16, 32, 64])
def test_the_largest_sum_is_on_the_axis(d_k, block):
    assert 1 <= draw_online(d_k, MOST_TOKENS, block, "largest last", INVERTED, MOST_TOKENS).running_total < MOST_TOTAL


def test_the_sum_is_drawn_as_high_as_it_is():
    explorer = online_softmax()
    for name, value in (("order", "largest last"), ("factor", INVERTED), ("block", 1), ("length", MOST_TOKENS)):
        explorer.controls[name].value = value
    explorer.controls["step"].value = MOST_TOKENS
    panel = explorer.panels[0]
    assert panel.total.get_height() == explorer.state.running_total > 1e5
    assert panel.total_ax.get_ylim()[1] > explorer.state.running_total


@pytest.mark.parametrize("make", [online_softmax, tiles])
def test_the_slider_of_steps_ends_at_the_last_tile(make):
    explorer = make()
    step, length = explorer.controls["step"], explorer.controls["length"]
    first = step.value
    length.value = MOST_TOKENS
    assert step.value == first, "a step that still fits moved"
    step.value = step.max
    assert f"tile {step.max} of {step.max}," in explorer.state.summary
    length.value = 9
    assert f"tile {step.value} of {step.max}," in explorer.state.summary
    assert step.value == step.max == {online_softmax: 3, tiles: 4}[make]
    length.value = 2
    assert (step.min, step.value, step.max) == (1, 1, 1)


@pytest.mark.parametrize(
    ("make", "name", "value", "most"),
    [
        (online_softmax, "block", 1, 16),
        (online_softmax, "length", 32, 8),
        (tiles, "block_q", 4, 18),
        (tiles, "block_k", 32, 3),
        (tiles, "causal", True, 15),
        (tiles, "length", 32, 16),
    ],
)
def test_each_size_moves_the_end_of_the_slider(make, name, value, most):
    explorer = make()
    explorer.controls[name].value = value
    assert explorer.controls["step"].max == most


CORNERS = list(itertools.product([1, 8], [2, 64], [2, 5, MOST_TOKENS], [4, 32], [4, 32], [False, True]))


@pytest.mark.parametrize(("num_heads", "d_k", "length", "block_q", "block_k", "causal"), CORNERS)
def test_every_corner_ends_at_exact_attention(num_heads, d_k, length, block_q, block_k, causal):
    state = draw_tiles(num_heads, d_k, length, block_q, block_k, causal, MOST_STEPS)
    q, k, v = _vectors()[:, :num_heads, :length, :d_k]
    _, weights = scaled_dot_product_attention(q, k, v, causal_mask(length) if causal else None, scale=2 * d_k**-0.5)
    np.testing.assert_allclose(state.weights, weights, rtol=0, atol=EXACT)
    assert (state.error < EXACT).all()
    assert (state.hidden == ~causal_mask(length).numpy()).all() if causal else state.hidden is None


@pytest.mark.parametrize(
    ("length", "block_q", "block_k", "causal"), list(itertools.product([2, 32], [4, 32], [4, 32], [0, 1]))
)
def test_all_tiles_have_a_number_and_can_be_reached(length, block_q, block_k, causal):
    assert len(draw_tiles(1, 2, length, block_q, block_k, bool(causal), 1).tiles) <= MOST_STEPS


def test_tiles_are_those_of_the_library_in_its_order():
    assert draw_tiles(1, 4, 24, 8, 16, True, 3).tiles == list(Tiling(24, 24, 8, 16, True))


def test_a_row_is_exact_once_its_block_of_queries_is_done():
    state = draw_tiles(2, 16, 24, 8, 8, False, 5)
    assert (state.error[:8] < EXACT).all()
    assert (state.error[8:] > 1e-3).all()
    np.testing.assert_allclose(state.weights.sum(-1), np.repeat([1.0, 1.0, 0.0], 8)[None].repeat(2, 0), atol=EXACT)


@pytest.mark.parametrize("step", [1, 6])
def test_keys_to_come_are_not_hidden_but_0(step):
    state = draw_tiles(2, 16, 24, 8, 8, True, step)
    np.testing.assert_array_equal(state.hidden, ~causal_mask(24).numpy())
    assert (state.weights[:, state.kinds == TO_COME] == 0).all()
    assert "Weights still to come are 0." in state.note
    assert draw_tiles(2, 16, 24, 8, 8, False, step).hidden is None
    assert "to come" not in draw_tiles(2, 16, 24, 8, 8, True, MOST_STEPS).note


def test_cells_are_done_now_to_come_or_never_computed():
    kinds = draw_tiles(1, 4, 24, 8, 8, True, 2).kinds
    rows, columns = list(Tiling(24, 24, 8, 8, True))[1]
    assert (kinds[rows, columns] == NOW).all()
    assert kinds[0, 0] == DONE
    assert kinds[23, 0] == TO_COME
    assert kinds[0, 23] == NEVER
    assert not (draw_tiles(1, 4, 24, 8, 8, False, 2).kinds == NEVER).any()


def test_what_is_held_is_one_tile_however_many_heads():
    assert "held 64 of 1152" in draw_tiles(2, 16, 24, 8, 8, False, 1).summary
    assert "held 64 of 4608" in draw_tiles(8, 16, 24, 8, 8, False, 1).summary
    assert "held 9 of 9" in draw_tiles(1, 16, 3, 8, 8, False, 1).summary


@pytest.mark.parametrize("step", [1, MOST_STEPS])
def test_what_is_held_is_the_largest_tile_visited(step):
    assert "held 192 of 1152" in draw_tiles(2, 16, 24, 32, 32, True, step).summary  # 24 x 8: those on the diagonal
    assert "held 64 of 1152" in draw_tiles(2, 16, 24, 8, 8, True, step).summary


def test_the_tiles_panel_numbers_the_tiles_where_they_are():
    explorer = tiles()
    panel = explorer.panels[0]
    explorer.controls["causal"].value = True
    shown = [text for text in panel.numbers if text.get_text()]
    assert [text.get_text() for text in shown] == [str(number + 1) for number in range(len(explorer.state.tiles))]
    for text, (rows, columns) in zip(shown, explorer.state.tiles, strict=True):
        x, y = text.get_position()
        assert columns.start < 24 * x < columns.stop
        assert rows.start < 24 * y < rows.stop
    widths = [bar.get_width() for bar in panel.bars][: len(explorer.state.error)]
    np.testing.assert_allclose(widths, explorer.state.error.clip(1e-18))


def test_the_strips_mark_the_blocks_that_are_read_now():
    explorer = tiles()
    explorer.controls["step"].value = 6
    rows, columns = explorer.state.tiles[5]
    strips = {name: strip.get_array() for name, strip in explorer.panels[0].strips.items()}
    for name, block, shape in (("Q", rows, (24, 1)), ("K", columns, (1, 24)), ("V", columns, (1, 24))):
        assert strips[name].shape == shape
        assert np.flatnonzero(strips[name] == NOW).tolist() == list(range(24))[block]
        assert (strips[name] == TO_COME).sum() == 16


def test_only_what_is_there_is_named():
    explorer = tiles()
    panel = explorer.panels[0]
    assert panel.title.get_text() == "tile 5 of 9 in orange"
    explorer.controls["causal"].value = True
    assert panel.title.get_text() == "tile 5 of 15 in orange; dark grey: never computed"
    np.testing.assert_array_equal(panel.scores.get_array(), explorer.state.kinds)
    for name, value in (("length", 2), ("block_k", 8)):
        explorer.controls[name].value = value
    assert panel.title.get_text() == "tile 1 of 1 in orange"


def test_a_number_stands_only_where_it_has_room():
    explorer = tiles()
    panel = explorer.panels[0]
    for name, value in (("block_q", 4), ("block_k", 4), ("length", MOST_TOKENS)):
        explorer.controls[name].value = value
    assert all(text.get_text() for text in panel.numbers)
    explorer.controls["causal"].value = True
    shown = [text.get_text() for text in panel.numbers if text.get_text()]
    assert len(shown) == 28  # the squares below the diagonal


def test_drawing_leaves_the_random_state_alone():
    before = torch.get_rng_state()
    _vectors.cache_clear()
    draw_online(8, 16, 4, "as drawn", RIGHT, 1)
    draw_tiles(1, 2, 5, 4, 4, False, 1)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_stays_in_view_stays_the_same():
    short, long = (draw_tiles(2, 8, n, 4, 4, True, MOST_STEPS).weights for n in (10, 20))
    np.testing.assert_allclose(long[:, :10, :10], short, rtol=0, atol=EXACT)
