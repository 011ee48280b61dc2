"""Pictures: arrays in, a matplotlib Figure or Axes out.

Figures are made without pyplot, so that none stays registered after it was shown, however often a slider moves.
"""

import io
from collections.abc import Sequence

import matplotlib
import numpy as np
from IPython.display import HTML, display
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

# Okabe and Ito's colours can be told apart with any common colour blindness; the line styles say the same again.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINE_STYLES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)), "-")
WEIGHT_MAP = "viridis"
SIGNED_MAP = "PuOr"

STYLE = {
    "font.size": 13,
    "axes.titlesize": 14,
    "axes.labelsize": 13,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": matplotlib.cycler(color=COLOURS, linestyle=LINE_STYLES),
    "lines.linewidth": 2.5,
    "lines.markersize": 7,
    "legend.frameon": False,
    "figure.labelsize": 13,
    "figure.dpi": 100,
    "font.family": "DejaVu Sans",  # comes with matplotlib, so pictures are the same on every machine
}


# For all figures, since a lesson's own ax.legend() or ax.text() must look like ours.
matplotlib.rcParams.update(STYLE)


def figure(rows: int = 1, columns: int = 1, *, width: float = 8.0, height: float = 4.0, **subplots):
    """A figure in the lessons' style, and its axes.

    Args:
        rows, columns: how many axes.
        width, height: inches, at 100 dots an inch.
        **subplots: handed to ``Figure.subplots``, as in ``sharey=True``.

    Returns:
        The Figure, and one Axes or an array of them.
    """
    fig = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(fig)
    return fig, fig.subplots(rows, columns, **subplots)


def png(fig: Figure) -> bytes:
    """The figure as a PNG file; the same figure gives the same bytes."""
    file = io.BytesIO()
    fig.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()


def show(fig: Figure, alt: str) -> None:
    """Show a figure in a notebook, with words for readers who cannot see it.

    Args:
        fig: any Figure.
        alt: what the picture shows, in a sentence. It becomes the picture's alternative text and its caption.

    Raises:
        ValueError: the words are missing.
    """
    if not alt.strip():
        raise ValueError("alt is empty; expected a sentence that says what the figure shows")
    display({"image/png": png(fig), "text/plain": f"[figure: {alt}]"}, metadata={"image/png": {"alt": alt}}, raw=True)
    display(HTML(f'<p style="max-width: 60em; margin: 0 0 0.5em">{_escaped(alt)}</p>'))


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def matrix(
    ax: Axes,
    values: np.ndarray,
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    title: str = "",
    digits: int | None = 2,
    signed: bool = False,
    top: float | None = None,
):
    """Draw a small matrix as coloured cells with its numbers in them.

    Args:
        ax: where to draw.
        values: (i j).
        rows, columns: a label for each row and column.
        title: above the matrix.
        digits: decimals of the numbers; None: no numbers.
        signed: colours for negative and positive numbers apart; else for 0 to ``top``.
        top: the number at the end of the colour scale; None: the largest magnitude.

    Returns:
        The AxesImage, for a colour bar.
    """
    values = np.asarray(values, dtype=float)
    top = top or float(np.abs(values).max()) or 1.0
    image = ax.imshow(values, cmap=SIGNED_MAP if signed else WEIGHT_MAP, vmin=-top if signed else 0.0, vmax=top)
    ax.set_xticks(range(len(columns)), columns, rotation=_rotation(columns))
    ax.set_yticks(range(len(rows)), rows)
    ax.tick_params(length=0)
    ax.set_title(title)
    ax.spines[:].set_visible(False)
    if digits is not None:
        for (i, j), value in np.ndenumerate(values):
            ax.text(j, i, f"{value:.{digits}f}", ha="center", va="center", color=_readable_on(image, value))
    return image


def _rotation(labels: Sequence[str]) -> int:
    return 90 if sum(len(label) + 2 for label in labels) > 34 else 0


def _readable_on(image, value: float) -> str:
    red, green, blue, _ = image.cmap(image.norm(value))
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"


def attention_grid(
    weights: np.ndarray, queries: Sequence[str], keys: Sequence[str], *, head_names: Sequence[str] | None = None
) -> Figure:
    """The attention weights of each head as a heatmap, all on one colour scale.

    Args:
        weights: (h i j).
        queries, keys: a label for each row and column.
        head_names: a title for each head; None: "head 0", "head 1", ...

    Returns:
        A Figure.
    """
    weights = np.asarray(weights, dtype=float)
    num_heads = len(weights)
    columns = min(num_heads, 4)
    rows = -(-num_heads // columns)
    cell = 3.6 if num_heads <= 2 else 2.4
    fig, axes = figure(rows, columns, width=max(5.0, cell * columns + 1.2), height=cell * rows + 0.8, squeeze=False)
    top = float(weights.max()) or 1.0
    for head, ax in enumerate(axes.flat):
        if head >= num_heads:
            ax.remove()
            continue
        first_column, last_row = head % columns == 0, head + columns >= num_heads
        image = matrix(
            ax,
            weights[head],
            rows=queries if first_column else [""] * len(queries),
            columns=keys if last_row else [""] * len(keys),
            title=head_names[head] if head_names else f"head {head}",
            digits=None,
            top=top,
        )
        ax.tick_params(labelsize=min(13.0, 150.0 * cell / 3.6 / max(len(queries), len(keys))))
    fig.colorbar(image, ax=list(fig.axes), label="attention weight", shrink=0.8)
    fig.supxlabel("key")
    fig.supylabel("query")
    return fig


def stacked(pictures: Sequence[bytes]) -> bytes:
    """PNG files one below the other, as one PNG file.

    Args:
        pictures: PNG files, at least one.

    Returns:
        A PNG file as wide as the widest.
    """
    images = [Image.open(io.BytesIO(picture)).convert("RGB") for picture in pictures]
    page = Image.new("RGB", (max(image.width for image in images), sum(image.height for image in images)), "white")
    top = 0
    for image in images:
        page.paste(image, (0, top))
        top += image.height
    file = io.BytesIO()
    page.save(file, format="PNG", optimize=True)
    return file.getvalue()
