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
    assert picture["text/plain"] == "[figure]"
    assert rgb(picture["image/png"]).std() > 1
    assert "a &lt; b: a line" in caption["text/html"]
    assert caption["text/plain"] == "a < b: a line"


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


def flow_texts(fig):
    return [text.get_text() for text in fig.axes[0].texts if text.get_text()]


def test_the_flow_has_a_shape_on_every_arrow():
    fig = plots.head_flow(n=5, d_model=12, num_heads=3, d_k=2)
    labels = [text for text in flow_texts(fig) if "\n" in text]
    arrows = [text for text in fig.axes[0].texts if getattr(text, "arrow_patch", None)]
    assert len(labels) == len(arrows)
    for label in (
        "(b n e)\n(1, 5, 12)",
        "(b n (h d))\n(1, 5, 6)",
        "(b h j d)\n(1, 3, 5, 2)",
        "(b h i j)\n(1, 3, 5, 5)",
    ):
        assert label in labels
    assert {"$W_Q$ (12, 6)", "$W_K$ (12, 6)", "$W_V$ (12, 6)", "$W_O$ (6, 12)"} <= set(flow_texts(fig))
    assert rgb(plots.png(fig)).std() > 1


def test_a_resized_flow_is_the_flow_of_that_size():
    fig = plots.head_flow(n=5, d_model=12, num_heads=3, d_k=2)
    bars = [patch for patch in fig.axes[0].patches if patch.get_gid()]
    assert sum(bar.get_visible() for bar in bars) == 3 * 6  # six boxes stand for each head's own work
    plots.resize_head_flow(fig, n=7, d_model=64, num_heads=16, d_k=8)
    other = plots.head_flow(n=7, d_model=64, num_heads=16, d_k=8)
    assert flow_texts(fig) == flow_texts(other)
    assert plots.png(fig) == plots.png(other)


def test_words_of_the_largest_flow_hide_nothing_and_stay_in_the_picture():
    fig = plots.head_flow(n=32, d_model=128, num_heads=16, d_k=64)
    renderer = fig.canvas.get_renderer()
    texts = [text for text in fig.axes[0].texts if text.get_text()]
    words = {text.get_text(): text.get_window_extent(renderer) for text in texts if "\n" not in text.get_text()}
    shapes = [text.get_window_extent(renderer) for text in texts if "\n" in text.get_text()]
    boxes = [patch.get_window_extent(renderer) for patch in fig.axes[0].patches if not patch.get_gid()]
    for number, shape in enumerate(shapes):
        assert fig.bbox.x0 <= shape.x0 < shape.x1 <= fig.bbox.x1
        assert fig.bbox.y0 <= shape.y0 < shape.y1 <= fig.bbox.y1
        assert not any(shape.overlaps(other) for other in (*boxes, *shapes[:number]))
    for text, extent in words.items():
        assert any(box.x0 <= extent.x0 and extent.x1 <= box.x1 for box in boxes if box.overlaps(extent)), text


PIXELS = np.random.default_rng(0).random((3, 4, 6))


def test_a_photo_is_drawn_with_its_channels_last():
    _, ax = plots.figure()
    image = plots.photo(ax, PIXELS, title="t")
    np.testing.assert_array_equal(image.get_array()[1, 5], PIXELS[:, 1, 5])
    assert ax.get_title() == "t"
    assert len(ax.get_xticks()) == 0


def test_ink_is_dark_on_white_paper():
    fig, ax = plots.figure(width=2, height=1)
    plots.photo(ax, np.array([[[0.0, 0.0, 1.0, 1.0]]]))
    row = rgb(plots.png(fig))[50].mean(-1)
    assert row[60] > 250
    assert row[140] < 5


def test_weights_lie_over_their_own_patches():
    weights = np.array([[0.1, 0.0, 0.2], [0.0, 0.0, 0.4]])
    picture = plots.over_photo(PIXELS, weights)
    assert picture.shape == PIXELS.shape
    colour = (picture - 0.45 * PIXELS.mean(0)) / 0.55
    expected = plots.matplotlib.colormaps["viridis"](weights / 0.4)[..., :3]
    for (row, column), _ in np.ndenumerate(weights):
        patch = colour[:, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
        np.testing.assert_allclose(patch, np.broadcast_to(expected[row, column, :, None, None], (3, 2, 2)))


def test_patches_move_apart_and_keep_their_pixels():
    picture = plots.apart(PIXELS, 2, gap=1)
    assert picture.shape == (3, 6, 9)
    for row in range(2):
        for column in range(3):
            got = picture[:, 3 * row : 3 * row + 2, 3 * column : 3 * column + 2]
            np.testing.assert_array_equal(got, PIXELS[:, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2])
    assert (picture[:, 2::3] == 1).all()
    assert (picture[:, :, 2::3] == 1).all()


@pytest.mark.parametrize(("n", "num_heads", "written"), [(16, 4, 16), (20, 2, 20), (24, 4, 12), (50, 4, 17)])
def test_of_many_labels_only_as_many_are_written_as_can_be_read(n, num_heads, written):
    names = [f"t{place}" for place in range(n)]
    fig = plots.attention_grid(np.full((num_heads, n, n), 1 / n), names, names)
    for labels in (fig.axes[0].get_yticklabels(), fig.axes[0].get_xticklabels()):
        shown = [label.get_text() for label in labels if label.get_text()]
        assert shown == names[:: round(n / written)]
        assert all(label.get_fontsize() >= 5.99 for label in labels)
