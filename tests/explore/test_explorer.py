"""The frame of every explorer: what it shows, says and raises when a control moves."""

import base64
import io
import re
from types import SimpleNamespace

import ipywidgets as widgets
import numpy as np
import pytest
from IPython.core.formatters import DisplayFormatter
from PIL import Image

from mha_lessons import plots
from mha_lessons.explore.explorer import CannotBeError, Explorer, FigurePanel, WeightsPanel


def draw(n):
    if n == 3:
        raise CannotBeError("3 <is> not possible: choose 2")
    if n == 5:
        raise RuntimeError("broken")
    weights = np.full((2, n, n + 1), 1 / (n + 1), np.float32)
    return SimpleNamespace(
        weights=weights, queries=["q"] * n, keys=["k"] * (n + 1), summary=f"n {n}", note="odd" if n % 2 else ""
    )


@pytest.fixture
def explorer():
    slider = widgets.IntSlider(2, 1, 5, description="n")
    return Explorer("test explorer", {"n": slider}, draw, [WeightsPanel()], alt="Weights of two heads.")


def test_a_move_redraws_the_weights(explorer):
    explorer.controls["n"].value = 4
    assert explorer.panels[0].widget.weights.shape == (1, 2, 4, 5)
    assert explorer.state.summary == "n 4"


def test_what_cannot_be_is_explained_and_the_picture_stays(explorer):
    before = explorer.panels[0].widget.weights.copy()
    explorer.controls["n"].value = 3
    assert "Cannot be: 3 &lt;is&gt; not possible" in explorer.message.value
    assert "The picture is the last one that could be." in explorer.message.value
    np.testing.assert_array_equal(explorer.panels[0].widget.weights, before)
    explorer.controls["n"].value = 4
    assert "Cannot be" not in explorer.message.value


def test_only_a_refresh_clears_what_cannot_be(explorer):
    view, shown = explorer.panels[0].widget, []
    explorer.follow(view, SimpleNamespace(update=shown.append))
    explorer.controls["n"].value = 3
    view.head, view.query = 1, 1
    assert "Cannot be" in explorer.message.value
    assert [state.summary for state in shown] == ["n 2", "n 2"]
    explorer.controls["n"].value = 2
    assert "Cannot be" not in explorer.message.value


def test_a_choice_in_the_canvas_leaves_the_note(explorer):
    explorer.follow(explorer.panels[0].widget, SimpleNamespace(update=lambda state: None))
    explorer.controls["n"].value = 1
    explorer.panels[0].widget.head = 1
    assert "odd" in explorer.message.value


def test_two_lines_of_words_move_no_picture(explorer):
    line_height = float(re.search(r"line-height: ([\d.]+)\"", explorer.message.value)[1])
    assert float(explorer.message.layout.min_height.removesuffix("em")) >= 2 * line_height


def test_a_failure_is_shown_in_words_and_raised(explorer):
    with pytest.raises(RuntimeError, match="broken"):
        explorer.controls["n"].value = 5
    assert "RuntimeError: broken" in explorer.message.value


def test_a_failure_after_a_choice_in_the_canvas_is_shown_too(explorer):
    view = explorer.panels[0].widget
    broken = SimpleNamespace(update=lambda state: 1 / 0)
    explorer.follow(view, broken)
    with pytest.raises(ZeroDivisionError):
        view.head = 1
    assert "ZeroDivisionError" in explorer.message.value


def test_a_first_state_that_cannot_be_is_the_authors_fault():
    with pytest.raises(CannotBeError):
        Explorer("test", {"n": widgets.IntSlider(3, 1, 5)}, draw, [WeightsPanel()], alt="Weights of two heads.")


def test_a_note_is_shown(explorer):
    explorer.controls["n"].value = 1
    assert "odd" in explorer.message.value


def test_the_text_form_is_short_and_has_no_address(explorer):
    assert repr(explorer) == "test explorer: n 2"
    explorer.name = "x" * 200
    assert len(repr(explorer)) == 110


def test_the_output_carries_a_picture_with_words(explorer):
    data, metadata = explorer._repr_mimebundle_()
    assert data["text/plain"] == repr(explorer)
    assert "application/vnd.jupyter.widget-view+json" in data
    picture = Image.open(io.BytesIO(base64.b64decode(data["image/png"])))
    assert np.asarray(picture).std() > 1
    assert metadata["image/png"]["alt"] == "Weights of two heads."
    assert DisplayFormatter().format(explorer)[1]["image/png"]["alt"] == "Weights of two heads."


def test_a_figure_panel_keeps_its_figure():
    fig, ax = plots.figure(width=3, height=2)
    (line,) = ax.plot([0, 1], [0, 1])
    panel = FigurePanel(fig, lambda state: line.set_ydata([0, state]))
    pictures = []
    for height in (0.2, 0.2, 0.9, 0.2):  # the first draw may still settle the layout
        panel.update(height)
        pictures.append(bytes(panel.widget.value))
    assert pictures[1] == pictures[3] != pictures[2]
    assert len(ax.lines) == 1


def test_moves_leave_no_figure_registered(explorer):
    import matplotlib.pyplot as plt

    for n in (1, 2, 4) * 10:
        explorer.controls["n"].value = n
        explorer._repr_mimebundle_()
    assert plt.get_fignums() == []
