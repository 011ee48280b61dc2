"""The draw function of the sentence explorer, over its whole range, and what it must equal."""

import itertools

import numpy as np
import pytest
import torch

from mha_lessons.explore import pretrained_heads, sentence_attention
from mha_lessons.explore.attention import PRETRAINED_LAYER, SENTENCES, draw_sentence
from mha_lessons.explore.explorer import CannotBeError
from mha_lessons.pretrained import MiniLM


@pytest.mark.parametrize(
    ("num_heads", "d_k", "length", "temperature"), list(itertools.product([1, 12], [2, 64], [2, 15], [0.1, 10.0]))
)
def test_every_corner_gives_weights(num_heads, d_k, length, temperature):
    state = draw_sentence(SENTENCES[0], num_heads, d_k, length, temperature, False)
    n = len(state.queries)
    assert state.weights.shape == (num_heads, n, n)
    assert state.values.shape == (num_heads, n, d_k)
    np.testing.assert_allclose(state.weights.sum(-1), 1, atol=1e-5)


@pytest.mark.parametrize("sentence", SENTENCES)
def test_the_pretrained_switch_gives_the_models_own_weights(sentence):
    model = MiniLM.load()
    tokens = model.tokenize(sentence)
    state = draw_sentence(sentence, 12, 32, len(tokens), 1.0, True)
    expected = model(tokens)[1][PRETRAINED_LAYER][0]
    torch.testing.assert_close(torch.as_tensor(state.weights), expected, rtol=1e-4, atol=1e-5)


def test_the_sentences_are_in_the_vocabulary():
    for sentence in SENTENCES:
        assert "[UNK]" not in MiniLM.load().tokenize(sentence)


def test_other_sizes_than_the_models_own_are_explained():
    with pytest.raises(CannotBeError, match=r"12 heads of width 32.*4 of 8"):
        draw_sentence(SENTENCES[0], 4, 8, 5, 1.0, True)


def test_temperature_goes_from_even_to_hard():
    hot = draw_sentence(SENTENCES[0], 4, 32, 8, 10.0, False).weights
    cold = draw_sentence(SENTENCES[0], 4, 32, 8, 0.1, False).weights
    assert np.abs(hot - 1 / 8).max() < 0.05
    assert cold.max(-1).mean() > 0.5


def test_a_short_sentence_says_so():
    assert "7 tokens" in draw_sentence("The old man the boat", 1, 2, 15, 1.0, False).note


def test_drawing_leaves_the_random_state_alone():
    before = torch.get_rng_state()
    draw_sentence(SENTENCES[0], 3, 5, 4, 1.0, False)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_sum_panel_follows_the_chosen_token():
    explorer = sentence_attention()
    view, image = (panel.widget for panel in explorer.panels)
    assert explorer.state.queries[view.query] == "it"
    pictures = [bytes(image.value)]
    for name, number in (("query", 2), ("head", 3)):
        view.set_trait(name, number)
        pictures.append(bytes(image.value))
    assert len(set(pictures)) == 3


def test_the_sum_panel_shows_the_output_of_the_layer():
    explorer = sentence_attention()
    view, panel = explorer.panels[0].widget, explorer.panels[1]
    view.query, view.head = 5, 2
    state = explorer.state
    expected = state.weights[2, 5] @ state.values[2]
    np.testing.assert_allclose(panel.strips.get_array()[-1], expected, rtol=1e-5, atol=1e-6)
    bars = [bar.get_width() for bar in panel.bars][: len(state.keys)]
    np.testing.assert_allclose(bars, state.weights[2, 5])


def test_fewer_heads_and_tokens_than_the_chosen_ones():
    explorer = sentence_attention()
    view = explorer.panels[0].widget
    view.query, view.head = 14, 3
    explorer.controls["length"].value = 2
    explorer.controls["num_heads"].value = 1
    assert (view.query, view.head) == (1, 0)


def test_the_choice_is_never_outside_the_weights():
    explorer = sentence_attention()
    view = explorer.panels[0].widget
    for controls, head, query in [
        ({"num_heads": 12, "pretrained": True}, 11, 14),
        ({"num_heads": 8, "length": 2, "pretrained": False}, 7, 1),
    ]:
        for name, value in controls.items():
            explorer.controls[name].value = value
        view.head, view.query = head, query


@pytest.mark.parametrize("layer", [0, 5])
def test_pretrained_heads_are_the_models_own(layer):
    explorer = pretrained_heads()
    explorer.controls["layer"].value = layer
    tokens = MiniLM.load().tokenize(SENTENCES[0])
    expected = MiniLM.load()(tokens)[1][layer]
    torch.testing.assert_close(torch.tensor(explorer.panels[0].widget.weights), expected)
    assert explorer.panels[0].widget.query_tokens == tokens
