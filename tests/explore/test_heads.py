"""The explorer of heads: every size on its sliders, what cannot be, and the shapes beside the weights."""

import itertools
import threading
import time
from types import SimpleNamespace

import ipywidgets as widgets
import numpy as np
import pytest
import torch

from mha_lessons.attention import MultiHeadAttention
from mha_lessons.explore import heads
from mha_lessons.explore.explorer import CannotBeError, Explorer
from mha_lessons.explore.heads import draw_heads


@pytest.mark.parametrize(
    ("d_model", "num_heads", "d_k", "length"), list(itertools.product([8, 128], [1, 16], [1, 64], [2, 32]))
)
def test_every_corner_gives_weights(d_model, num_heads, d_k, length):
    state = draw_heads(d_model, num_heads, d_k, length)
    assert state.weights.shape == (num_heads, length, length)
    assert len(state.queries) == len(state.keys) == length
    assert state.sizes == {"n": length, "d_model": d_model, "num_heads": num_heads, "d_k": d_k}
    np.testing.assert_allclose(state.weights.sum(-1), 1, atol=1e-5)


@pytest.mark.parametrize("d_model", range(8, 129, 8))
def test_without_a_width_heads_divide_or_the_reason_is_told(d_model):
    for num_heads in range(1, 17):
        if d_model % num_heads == 0:
            assert draw_heads(d_model, num_heads, 0, 3).sizes["d_k"] == d_model // num_heads
        else:
            with pytest.raises(CannotBeError, match=f"{num_heads} heads do not divide d_model {d_model}") as told:
                draw_heads(d_model, num_heads, 0, 3)
            advised = int(str(told.value).split("Choose ")[1].split()[0])
            assert d_model % advised == 0
            assert 1 <= advised < num_heads


def test_the_weights_are_the_layers_own():
    torch.manual_seed(0)
    layer, x = MultiHeadAttention(24, 3, d_k=5), torch.randn(1, 7, 24)
    np.testing.assert_array_equal(draw_heads(24, 3, 5, 7).weights, layer(x)[1][0].detach().numpy())


def test_a_head_of_width_1_ranks_the_keys_one_way_or_the_other():
    order = draw_heads(64, 4, 1, 12).weights.argsort(-1)  # (h i j)
    upwards, downwards = order[:, :1], order[:, :1, ::-1]
    assert ((order == upwards).all(-1) | (order == downwards).all(-1)).all()


def test_the_note_says_whether_the_heads_fill_the_width():
    assert "cuts the width as it is" in draw_heads(64, 4, 0, 2).note
    assert "cuts the width as it is" in draw_heads(64, 4, 16, 2).note
    assert "lead from 64 to 32 channels" in draw_heads(64, 4, 8, 2).note


def test_one_head_is_no_heads():
    assert draw_heads(64, 1, 8, 2).note.startswith("1 head of d_k 8 makes 8 channels, d_model is 64. ")
    assert draw_heads(64, 2, 8, 2).note.startswith("2 heads of d_k 8 make 16 channels, ")
    assert draw_heads(64, 1, 1, 2).note.endswith("lead from 64 to 1 channel, and W_O leads back.")


def test_drawing_leaves_the_random_state_alone():
    before = torch.get_rng_state()
    draw_heads(16, 2, 0, 3)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_flow_follows_the_sliders():
    explorer = heads()
    view, image = (panel.widget for panel in explorer.panels)
    flow, first = explorer.panels[1].figure, bytes(image.value)
    explorer.controls["length"].value, explorer.controls["num_heads"].value = 9, 8
    assert view.weights.shape == (1, 8, 9, 9)
    assert "(b h i j)\n(1, 8, 9, 9)" in [text.get_text() for text in flow.axes[0].texts]
    assert bytes(image.value) != first


def test_what_cannot_be_is_explained_and_the_pictures_stay():
    explorer = heads()
    before = bytes(explorer.panels[1].widget.value)
    explorer.controls["num_heads"].value = 5
    assert "Cannot be: 5 heads do not divide d_model 64" in explorer.message.value
    assert bytes(explorer.panels[1].widget.value) == before
    explorer.controls["d_k"].value = 8
    assert "Cannot be" not in explorer.message.value


def test_controls_moved_by_two_threads_are_drawn_one_after_the_other():
    drawing, overlaps = [], []

    def draw(a, b):
        overlaps.append(len(drawing))
        drawing.append((a, b))
        time.sleep(0.02)
        drawing.pop()
        return SimpleNamespace(summary="", note="")

    controls = {name: widgets.IntSlider(1, 1, 3) for name in "ab"}
    explorer = Explorer("test", controls, draw, [], alt="Nothing is shown here.")
    movers = [threading.Thread(target=setattr, args=(slider, "value", 3)) for slider in explorer.controls.values()]
    for mover in movers:
        mover.start()
    for mover in movers:
        mover.join()
    assert overlaps == [0, 0, 0]
