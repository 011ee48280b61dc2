"""The explorers of masks over their whole range, and what they must equal."""

import base64
import io
import itertools

import numpy as np
import pytest
import torch
from PIL import Image

from mha_lessons import plots
from mha_lessons.attention import MultiHeadAttention
from mha_lessons.explore import decoding, masking
from mha_lessons.explore.masks import D_MODEL, KINDS, MOST, draw_decoded, draw_masked, keys_computed
from mha_lessons.masks import causal_mask, sliding_window_mask

WIDE = {"num_heads": 2, "d_k": 4, "length": 6, "n_queries": 6, "real": 4, "window": MOST}


def allowed(**changed):
    return ~torch.from_numpy(draw_masked(**WIDE | changed).hidden)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("num_heads", "d_k", "length", "n_queries", "real", "window"),
    list(itertools.product([1, 8], [2, 64], [2, MOST], [1, MOST], [0, MOST], [1, MOST])),
)
def test_every_corner_gives_weights_on_allowed_keys_only(kind, num_heads, d_k, length, n_queries, real, window):
    state = draw_masked(kind, num_heads, d_k, length, n_queries, real, window)
    queries = min(n_queries, length)
    assert state.weights.shape == (num_heads, queries, length)
    assert (len(state.queries), len(state.keys)) == (queries, length)
    assert (state.weights[:, state.hidden] == 0).all()
    sees = ~state.hidden.all(-1)
    np.testing.assert_allclose(state.weights.sum(-1), np.broadcast_to(sees, (num_heads, queries)), atol=1e-5)
    assert ("see no key" in state.note) == (not sees.all())


def test_each_kind_is_its_definition():
    real = torch.arange(6) < 4
    assert allowed(kind="nothing hidden").all()
    assert torch.equal(allowed(kind="causal"), causal_mask(6))
    assert torch.equal(allowed(kind="causal", window=2), sliding_window_mask(6, 2))
    assert torch.equal(allowed(kind="padding"), real.expand(6, 6))
    assert torch.equal(allowed(kind="causal and padding"), causal_mask(6) & real)
    packed = allowed(kind="two texts in one row")
    assert torch.equal(packed[:4, :4], causal_mask(4))
    assert torch.equal(packed[4:, 4:], causal_mask(2))
    assert packed.sum() == 13


@pytest.mark.parametrize("kind", KINDS)
def test_fewer_queries_are_the_last_rows(kind):
    """The whole kind of fault C04: a mask or a token that starts at the upper left."""
    whole, last = draw_masked(kind, **WIDE), draw_masked(kind, **WIDE | {"n_queries": 2})
    np.testing.assert_array_equal(last.hidden, whole.hidden[-2:])
    np.testing.assert_allclose(last.weights, whole.weights[:, -2:], atol=1e-6)
    assert list(last.queries) == list(whole.queries[-2:])


def test_the_pads_are_named():
    assert list(draw_masked("padding", **WIDE).keys[3:]) == ["on", "[pad]", "[pad]"]
    assert "[pad]" not in draw_masked("causal", **WIDE).keys


def test_a_cut_is_said():
    assert draw_masked("padding", **WIDE | {"real": 9}).note == "Only 6 positions: real tokens are cut to that."
    assert "queries and real tokens are cut" in draw_masked("padding", **WIDE | {"real": 9, "n_queries": 9}).note
    assert (
        draw_masked("causal", **WIDE | {"n_queries": 9, "real": 9}).note == "Only 6 positions: queries are cut to that."
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("slider", "little"), [("real tokens", {"real": 3}), ("window", {"window": 3})])
def test_a_slider_that_hides_nothing_says_so(kind, slider, little):
    """Only where it stands away from the value that hides nothing under any kind."""
    everything = WIDE | {"real": 6}
    words = f'Under "{kind}" the slider "{slider}" plays no part.'
    hides = not torch.equal(allowed(kind=kind, **everything), allowed(kind=kind, **everything | little))
    assert (words in draw_masked(kind, **everything | little).note) == (not hides)
    assert draw_masked(kind, **everything).note == ""


def test_one_query_is_no_queries():
    note = draw_masked("padding", **WIDE | {"n_queries": 1, "real": 0}).note
    assert note == "Queries that see no key, so that their weights are all 0: 1 of 1."


def test_the_mask_stands_beside_the_weights():
    explorer = masking()
    mask, weights = (panel.widget for panel in explorer.panels)
    explorer.controls["n_queries"].value = 3
    np.testing.assert_array_equal(mask.weights[0, 0], ~explorer.state.hidden)
    assert mask._hidden == explorer.state.hidden.tobytes()
    assert weights._hidden == np.broadcast_to(explorer.state.hidden, explorer.state.weights.shape).tobytes()
    assert len(repr(explorer)) < 110


@pytest.mark.parametrize(
    ("num_heads", "d_k", "length", "step"), list(itertools.product([1, 4], [2, 32], [2, MOST], [1, MOST]))
)
def test_decoding_equals_one_causal_pass(num_heads, d_k, length, step):
    state = draw_decoded(num_heads, d_k, length, step)
    step = min(step, length)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        x = torch.randn(1, MOST, D_MODEL, dtype=torch.float64)[:, :step]
        _, expected = MultiHeadAttention(D_MODEL, num_heads, d_k=d_k).double()(x, mask=causal_mask(step))
    np.testing.assert_allclose(state.weights, expected[0], atol=1e-6)
    assert "one causal pass to 1e-12: True" in state.note
    assert f"asks {step} key{'s' * (step > 1)} in the cache" in state.note


def test_a_step_adds_a_row_and_leaves_the_others():
    five, six = draw_decoded(2, 8, 12, 5), draw_decoded(2, 8, 12, 6)
    np.testing.assert_array_equal(six.weights[:, :5, :5], five.weights)
    assert (six.weights[:, :5, 5] == 0).all()


def test_the_keys_are_counted():
    made = [range(step) for step in range(1, 8)]  # without a cache, step t makes the keys 0 ... t - 1
    assert keys_computed(7) == (7, sum(map(len, made)))
    panel = decoding().panels[1]
    assert [list(line.get_ydata()) for line in (panel.cached, panel.without)] == [
        [0, 1, 2, 3, 4, 5],
        [0, 1, 3, 6, 10, 15],
    ]


def test_drawing_leaves_the_random_state_alone():
    before = torch.get_rng_state()
    draw_masked("causal", **WIDE)
    draw_decoded(2, 8, 12, 5)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("explorer", [masking, decoding])
def test_the_output_carries_a_picture(explorer):
    data, metadata = explorer()._repr_mimebundle_()
    assert np.asarray(Image.open(io.BytesIO(base64.b64decode(data["image/png"])))).std() > 1
    assert len(metadata["image/png"]["alt"].split()) >= 5


def test_hidden_cells_of_a_picture_are_grey():
    weights, hidden = np.full((1, 2, 2), 0.5), np.array([[False, True], [False, False]])
    pictures = [plots.png(plots.attention_grid(weights, "ab", "ab", hidden=shown)) for shown in (None, hidden)]
    plain, hatched = (np.asarray(Image.open(io.BytesIO(picture)).convert("RGB"), dtype=int) for picture in pictures)
    changed = hatched[(plain != hatched).any(-1)]
    assert len(changed) > 1000
    assert (np.ptp(changed, axis=-1) < 60).mean() > 0.9


def test_the_slider_of_steps_ends_at_the_length():
    explorer = decoding()
    step, length = explorer.controls["step"], explorer.controls["length"]
    assert (step.value, step.max) == (5, 12)
    length.value = MOST
    assert (step.value, step.max) == (5, MOST)
    step.value, length.value = MOST, 4
    assert (step.value, step.max) == (4, 4)
    assert "step 4 of 4," in explorer.state.summary
    assert explorer.panels[0].widget.query == 3


def test_the_newest_query_is_the_chosen_one():
    explorer = decoding()
    view = explorer.panels[0].widget
    chosen = [view.query]
    for step in (9, 2):
        explorer.controls["step"].value = step
        chosen.append(view.query)
    assert chosen == [4, 8, 1]
