"""The pictures stored in the notebooks, which nbval skips: redrawn ones must look the same, none may be blank."""

import base64
import io

import numpy as np
from PIL import Image

from tests.notebooks.execute import tags

TOLERANCE = 12.0  # levels of 255, as the average of the worst tile; fonts and rounding move single pixels
BLUR, TILE = 4, 16  # pixels


def pixels(png: bytes) -> np.ndarray:
    """A PNG file as (height width 3) numbers."""
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"), dtype=float)


def pictures(cell):
    """Every PNG among a cell's outputs."""
    encoded = [output.data["image/png"] for output in cell.outputs if "image/png" in output.get("data", {})]
    return [pixels(base64.b64decode(png)) for png in encoded]


def averaged(values: np.ndarray, size: int) -> np.ndarray:
    """(height width ...) averaged over squares of the given size; what does not fill one is left out."""
    height, width = (length // size * size for length in values.shape[:2])
    squares = values[:height, :width].reshape(height // size, size, width // size, size, *values.shape[2:])
    return squares.mean(axis=(1, 3))


def difference(one: np.ndarray, other: np.ndarray) -> float:
    """How far the slightly blurred pictures differ in the tile where they differ most; infinite where the sizes do.

    An average over the whole picture would not see one curve or one head that is wrong.
    """
    if one.shape != other.shape:
        return float("inf")
    blurred = np.abs(averaged(one, BLUR) - averaged(other, BLUR)).mean(axis=-1)
    return float(averaged(blurred, TILE // BLUR).max())


def is_blank(picture: np.ndarray) -> bool:
    """Whether the middle of the picture, where axes have their content, is all of one colour."""
    height, width, _ = picture.shape
    middle = picture[height // 8 : -height // 8, width // 8 : -width // 8]
    return bool(middle.std(axis=(0, 1)).max() < 1.0)


def test_redrawn_figures_equal_the_stored_ones(notebook, swept):
    redrawn = {cell.id: cell for cell in swept.cells}
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        stored, new = pictures(cell), pictures(redrawn[cell.id])
        assert len(stored) == len(new), f"{cell.id}: {len(stored)} pictures are stored, a run draws {len(new)}"
        for number, (one, other) in enumerate(zip(stored, new, strict=True)):
            assert not is_blank(one), f"{cell.id}: stored picture {number} is blank"
            assert not is_blank(other), f"{cell.id}: picture {number} is blank"
            if "measured" not in tags(cell):
                assert difference(one, other) < TOLERANCE, f"{cell.id}: picture {number} differs from the stored one"


def words(cell):
    """The alternative text of each picture of a cell."""
    return [output.metadata for output in cell.outputs if "image/png" in output.get("data", {})]


def test_stored_words_are_those_of_the_source(notebook, swept):
    redrawn = {cell.id: cell for cell in swept.cells}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert words(cell) == words(redrawn[cell.id]), f"{cell.id}: run `python run.py notebooks`"


def test_every_figure_has_words(notebook):
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                alt = output.metadata.get("image/png", {}).get("alt", "")
                assert len(alt.split()) >= 5, f"{cell.id}: a picture without words; use plots.show(fig, alt=...)"


def test_the_comparison_sees_a_moved_line_and_a_blank_plot():
    from mha_lessons import plots

    def drawn(heights):
        fig, ax = plots.figure(width=4, height=3)
        if heights:
            ax.bar(range(3), heights)
        else:
            ax.set_axis_off()
        return pixels(plots.png(fig))

    assert difference(drawn([1, 2, 3]), drawn([1, 2, 3])) == 0
    assert difference(drawn([1, 2, 3]), drawn([1, 3, 2])) > TOLERANCE
    weights = np.random.default_rng(0).dirichlet(np.ones(6), size=(4, 6))
    names = list("abcdef")
    pages = [plots.attention_grid(weights[order], names, names) for order in ([0, 1, 2, 3], [0, 2, 1, 3])]
    right, swapped = (pixels(plots.png(page)) for page in pages)
    assert difference(right, swapped) > TOLERANCE
    lines = []
    for heights in ([1, 2, 3], [1, 2.5, 3]):
        fig, ax = plots.figure(width=4, height=3)
        ax.plot([0, 1, 2], heights)
        ax.set_ylim(0, 4)
        lines.append(pixels(plots.png(fig)))
    assert difference(*lines) > TOLERANCE
    assert is_blank(drawn([]))
    assert not is_blank(drawn([1, 2, 3]))
