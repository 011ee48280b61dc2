"""The explorers of pictures: every corner, the numbers that they tell, and what their panels show."""

import itertools

import numpy as np
import pytest
import torch

from mha_lessons import plots
from mha_lessons.data import PHOTOS, load_photo, load_vit_attention
from mha_lessons.explore.explorer import CannotBeError
from mha_lessons.explore.vit import (
    PATCH_SIZES,
    SIDES,
    WIDTHS,
    draw_patches,
    draw_pretrained_vit,
    draw_untrained_vit,
    layer_cost,
    patches,
    pretrained_vit,
    untrained_vit,
)
from mha_lessons.transformer import Block


@pytest.mark.parametrize(("patch_size", "side"), list(itertools.product(PATCH_SIZES, SIDES)))
def test_every_patch_size_cuts_the_photo_or_the_reason_is_told(patch_size, side):
    if side % patch_size:
        with pytest.raises(CannotBeError, match=f"{side} / {patch_size} leaves {side % patch_size} pixels over"):
            draw_patches("rocket", patch_size, side, 192)
        return
    state = draw_patches("rocket", patch_size, side, 192)
    assert state.tokens == 1 + (side // patch_size) ** 2
    pixels = load_photo("rocket").numpy()[:, :side, :side]
    gap = max(1, patch_size // 8)
    np.testing.assert_array_equal(state.picture, plots.apart(pixels, patch_size, gap))
    assert len(f"patches: {state.summary}") <= 110


def test_the_pixels_that_a_convolution_drops_are_counted():
    with pytest.raises(CannotBeError, match=r"12 pixels over .* 10\.6% of the picture"):
        draw_patches("coffee", 16, 220, 384)


def test_the_cost_is_that_of_a_block():
    """Counted on a real block: every product of matrices, by its sizes."""
    n, e = 5, 8
    counted = {"between": 2 * n * n * e, "alone": 0}
    for module in Block(e, 2, mlp_ratio=4).modules():
        if isinstance(module, torch.nn.Linear):
            counted["alone"] += n * module.weight.numel()
    assert layer_cost(n, e) == (counted["between"], counted["alone"])


def test_the_marks_stand_on_the_lines():
    explorer = patches()
    panel = explorer.panels[0]
    for d_model in (WIDTHS[0], WIDTHS[-1]):
        explorer.controls["d_model"].value = d_model
        for line, mark in zip(panel.lines, panel.marks, strict=True):
            (x,), (y,) = mark.get_data()
            assert x == explorer.state.tokens
            assert np.exp(np.interp(np.log(x), np.log(line.get_xdata()), np.log(line.get_ydata()))) == pytest.approx(y)


@pytest.mark.parametrize("d_model", WIDTHS)
def test_the_lines_meet_inside_the_axes(d_model):
    explorer = patches()
    explorer.controls["d_model"].value = d_model
    panel, meet = explorer.panels[0], 6 * d_model
    between, alone = layer_cost(meet, d_model)
    assert between == alone
    assert panel.cost_ax.get_xlim()[0] < meet < panel.cost_ax.get_xlim()[1]
    low, high = panel.cost_ax.get_ylim()
    for line in panel.lines:
        assert line.get_xdata()[-1] > meet
        assert low < line.get_ydata().min() < line.get_ydata().max() < high


@pytest.mark.parametrize("photo", PHOTOS)
@pytest.mark.parametrize(("layer", "head"), list(itertools.product([0, 6, 11], [0, 5])))
def test_pretrained_maps_are_the_stored_ones(photo, layer, head):
    vit, number = load_vit_attention(), PHOTOS.index(photo)
    for row, column in itertools.product([0, 15], [0, 15, 7]):
        state = draw_pretrained_vit(photo, layer, head, row, column)
        np.testing.assert_array_equal(state.cls.flatten(), vit.cls[number, layer, head, 1:])
        asked = vit.full[number, vit.full_layers.index(layer), head, 1 + 16 * row + column]
        np.testing.assert_array_equal(state.patch.flatten(), asked[1:])
        assert len(f"pretrained ViT: {state.summary}") <= 110


def test_other_layers_show_the_mean_over_the_heads_and_say_so():
    state = draw_pretrained_vit("chelsea", 5, 3, 2, 9)
    expected = load_vit_attention().head_mean[1, 5, 1 + 2 * 16 + 9, 1:]
    np.testing.assert_array_equal(state.patch.flatten(), expected)
    assert "layers 0, 6, 11 only" in state.note
    assert "mean" in state.titles[1]
    assert "only" not in draw_pretrained_vit("chelsea", 6, 3, 2, 9).note


def test_the_frame_marks_the_patch_that_asks():
    explorer = pretrained_vit()
    explorer.controls["row"].value, explorer.controls["column"].value = 3, 12
    panel = explorer.panels[0]
    assert [frame.get_xy() for frame in panel.frames] == [(12 * 14 - 0.5, 3 * 14 - 0.5)] * 2
    shown = np.asarray(panel.images[2].get_array())
    expected = plots.over_photo(explorer.state.pixels, explorer.state.patch)
    np.testing.assert_array_equal(shown, np.moveaxis(expected, 0, -1))


@pytest.mark.parametrize(
    ("num_heads", "d_k", "num_layers", "grid", "gain"),
    list(itertools.product([1, 8], [2, 32], [1, 4], [2, 7], [1, 100])),
)
def test_every_corner_of_an_untrained_vit_gives_weights(num_heads, d_k, num_layers, grid, gain):
    state = draw_untrained_vit("coffee", num_heads, d_k, num_layers, grid, gain)
    n = 1 + grid**2
    assert state.weights.shape == (num_heads, n, n)
    assert state.queries == state.keys
    assert len(state.keys) == n
    np.testing.assert_allclose(state.weights.sum(-1), 1, atol=1e-5)
    assert len(f"untrained ViT: {state.summary}") <= 110


def test_a_gain_sharpens_the_weights():
    soft, sharp = (draw_untrained_vit("coffee", 4, 16, 1, 7, gain).weights for gain in (1.0, 10.0))
    assert sharp.max(-1).mean() > 2 * soft.max(-1).mean()
    # One layer: its input does not depend on the gain, so the scores are ten times as far apart.
    np.testing.assert_allclose(
        np.log(sharp[0, 3, 5] / sharp[0, 3, 6]), 10 * np.log(soft[0, 3, 5] / soft[0, 3, 6]), rtol=1e-2
    )


def test_drawing_leaves_the_random_state_alone():
    before = torch.get_rng_state()
    draw_untrained_vit("rocket", 2, 4, 1, 2, 1.0)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_map_follows_the_chosen_query():
    explorer = untrained_vit()
    view, panel = explorer.panels[0].widget, explorer.panels[1]
    before = bytes(panel.widget.value)
    view.head, view.query = 2, 17
    assert bytes(panel.widget.value) != before
    state = explorer.state
    expected = plots.over_photo(state.pixels, state.weights[2, 17, 1:].reshape(7, 7))
    np.testing.assert_array_equal(np.asarray(panel.image.get_array()), np.moveaxis(expected, 0, -1))
    assert panel.ax.get_title() == "where (2, 2) looks in head 2"
