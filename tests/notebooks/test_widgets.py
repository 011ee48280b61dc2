"""Every explorer in every notebook, with every control moved to its ends, alone and together."""

import pytest

from tests.notebooks.execute import tags


def test_every_widget_moves_without_an_error(swept):
    sweeps = [cell for cell in swept.cells if cell.id.startswith("sweep-")]
    assert sweeps, "no cell is tagged [widget]"
    for cell in sweeps:
        errors = [output for output in cell.outputs if output.output_type == "error"]
        assert not errors, f"{cell.id}: {errors[0].ename}: {errors[0].evalue}"
        text = "".join(output.text for output in cell.outputs)
        assert text.startswith("moves: "), f"{cell.id}: the cell before it does not end in an explorer"


def test_a_lesson_has_an_explorer_with_sliders(swept):
    moves = [
        int(output.text.split()[1])
        for cell in swept.cells
        if cell.id.startswith("sweep-")
        for output in cell.outputs
        if output.get("name") == "stdout"
    ]
    assert max(moves) > 2


def test_stored_widgets_are_pictures(notebook):
    widgets = [cell for cell in notebook.cells if "widget" in tags(cell)]
    assert widgets
    for cell in widgets:
        (output,) = cell.outputs
        assert set(output.data) == {"text/plain", "image/png"}, f"{cell.id} stores {set(output.data)}"
        assert len(output.data["text/plain"]) <= 110
        assert output.metadata["image/png"]["alt"].strip()


@pytest.mark.parametrize("fault", ["raises", "stands still"])
def test_the_sweep_sees_a_broken_explorer(fault):
    from types import SimpleNamespace

    import ipywidgets as widgets
    import numpy as np

    from mha_lessons.explore.explorer import Explorer, WeightsPanel
    from tests.notebooks.sweep import sweep

    def draw(n):
        if fault == "raises" and n == 3:
            raise RuntimeError("planted")
        weights = np.full((1, 2, 2), 0.5, np.float32)
        return SimpleNamespace(weights=weights, queries="ab", keys="ab", summary="", note="")

    explorer = Explorer("planted", {"n": widgets.IntSlider(1, 1, 3)}, draw, [WeightsPanel()], alt="planted")
    with pytest.raises(RuntimeError if fault == "raises" else AssertionError):
        sweep(explorer)
