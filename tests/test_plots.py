"""Pictures: what stands in them, and that the same input gives the same bytes."""

import io

import matplotlib.pyplot as plt
import numpy as np
import pytest
from PIL import Image

from mha_lessons import plots


def rgb(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))


def test_the_same_figure_gives_the_same_bytes_and_is_not_registered():
    def drawn():
        fig, ax = plots.figure(width=3, height=2)
        ax.plot([0, 1])
        return plots.png(fig)

    assert drawn() == drawn()
    assert plt.get_fignums() == []


def test_show_gives_a_picture_with_words_and_a_caption(monkeypatch):
    shown = []
    monkeypatch.setattr(plots, "display", lambda content, **options: shown.append((content, options)))
    fig, ax = plots.figure(width=3, height=2)
    ax.plot([0, 1])
    plots.show(fig, alt="a < b: a line")
    (picture, options), (caption, _) = shown
    assert options["metadata"]["image/png"]["alt"] == "a < b: a line"
    assert picture["text/plain"] == "[figure: a < b: a line]"
    assert rgb(picture["image/png"]).std() > 1
    assert "a &lt; b: a line" in caption.data


def test_show_asks_for_words():
    fig, _ = plots.figure()
    with pytest.raises(ValueError, match="alt is empty"):
        plots.show(fig, alt=" ")


def test_matrix_writes_its_numbers_where_they_belong():
    _, ax = plots.figure(width=4, height=3)
    plots.matrix(ax, [[0.0, 1.0, 0.25], [3.0, 0.5, 2.0]], rows="ab", columns="xyz", title="t", digits=1)
    numbers = {text.get_position(): text.get_text() for text in ax.texts}
    assert numbers[(2, 0)] == "0.2"
    assert numbers[(0, 1)] == "3.0"
    assert [label.get_text() for label in ax.get_xticklabels()] == ["x", "y", "z"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["a", "b"]


def test_a_signed_matrix_is_symmetric_around_zero():
    _, ax = plots.figure()
    image = plots.matrix(ax, [[-1.0, 3.0]], rows="a", columns="xy", signed=True)
    assert image.get_clim() == (-3.0, 3.0)


def test_numbers_can_be_read_on_their_cells():
    _, ax = plots.figure()
    plots.matrix(ax, [[0.0, 1.0]], rows="a", columns="xy")
    assert [text.get_color() for text in ax.texts] == ["white", "black"]


@pytest.mark.parametrize("num_heads", [1, 3, 4, 8, 12])
def test_the_grid_has_a_panel_for_each_head_on_one_scale(num_heads):
    rng = np.random.default_rng(0)
    weights = rng.dirichlet(np.ones(7), size=(num_heads, 4))
    fig = plots.attention_grid(weights, list("abcd"), list("tuvwxyz"))
    images = [ax.images[0] for ax in fig.axes if ax.images]
    assert len(images) == num_heads
    assert {image.get_clim() for image in images} == {(0.0, weights.max())}
    for head, image in enumerate(images):
        np.testing.assert_allclose(image.get_array(), weights[head])
    assert rgb(plots.png(fig)).std() > 1


def test_stacked_pictures_keep_their_pixels():
    pictures = []
    for width in (2, 3):
        fig, ax = plots.figure(width=width, height=2)
        ax.plot([0, width])
        pictures.append(plots.png(fig))
    page = rgb(plots.stacked(pictures))
    assert page.shape == (400, 300, 3)
    np.testing.assert_array_equal(page[:200, :200], rgb(pictures[0]))
    np.testing.assert_array_equal(page[200:], rgb(pictures[1]))
