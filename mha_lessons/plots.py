"""Pictures: arrays in, a matplotlib Figure or Axes out.

Figures are made without pyplot, so that none stays registered after it was shown, however often a slider moves.
"""

import html
import io
import math
import re
from collections.abc import Sequence

import matplotlib
import numpy as np
from IPython.display import display
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import Normalize, PowerNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

# Okabe and Ito's colours can be told apart with any common colour blindness; the line styles say the same again.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINE_STYLES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)), (0, (8, 1.5)))
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
        alt: what the picture shows, in a sentence. It becomes the picture's caption, and its alternative text where
            the page supports one (JupyterLab does not).

    Raises:
        ValueError: the words are missing.
    """
    if not alt.strip():
        raise ValueError("alt is empty; expected a sentence that says what the figure shows")
    # The plain text says nothing of the picture: it is what a folded output shows, before the reader has predicted.
    display({"image/png": png(fig), "text/plain": "[figure]"}, metadata={"image/png": {"alt": alt}}, raw=True)
    caption = f'<p style="max-width: 60em; margin: 0 0 0.5em">{html.escape(alt)}</p>'
    display({"text/html": caption, "text/plain": alt}, raw=True)


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
    gamma: float = 1.0,
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
        gamma: the colours follow this power of a number that is not signed; below 1 shows small numbers.

    Returns:
        The AxesImage, for a colour bar.
    """
    values = np.asarray(values, dtype=float)
    top = top or float(np.abs(values).max()) or 1.0
    norm = Normalize(-top, top) if signed else PowerNorm(gamma, 0.0, top)
    image = ax.imshow(values, cmap=SIGNED_MAP if signed else WEIGHT_MAP, norm=norm)
    ax.set_xticks(range(len(columns)), columns, rotation=_rotation(columns))
    ax.set_yticks(range(len(rows)), rows)
    ax.tick_params(length=0)
    ax.set_title(title)
    ax.spines[:].set_visible(False)
    if digits is not None:
        for (i, j), value in np.ndenumerate(values):
            ax.text(j, i, f"{value:.{digits}f}", ha="center", va="center", color=_readable_on(image, value))
    return image


def _each(labels: Sequence[str], step: int | None) -> list[str]:
    """Every label, every second one, ... or none, with gaps for the others."""
    return [label if step and place % step == 0 else "" for place, label in enumerate(labels)]


def _rotation(labels: Sequence[str]) -> int:
    return 90 if sum(len(label) + 2 for label in labels if label) > 34 else 0


def _readable_on(image, value: float) -> str:
    red, green, blue, _ = image.cmap(image.norm(value))
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"


def attention_grid(
    weights: np.ndarray,
    queries: Sequence[str],
    keys: Sequence[str],
    *,
    hidden: np.ndarray | None = None,
    head_names: Sequence[str] | None = None,
) -> Figure:
    """The attention weights of each head as a heatmap, all on one colour scale, which follows their square root.

    Args:
        weights: (h i j).
        queries, keys: a label for each row and column; of many only every second, third ... is written.
        hidden: bool, broadcastable to (h i j); True cells are grey, which tells them from a weight of 0.
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
    points = 150.0 * cell / 3.6 / max(len(queries), len(keys))
    every = max(1, math.ceil(6.0 / points))  # labels of fewer than 6 points cannot be read
    for head, ax in enumerate(axes.flat):
        if head >= num_heads:
            ax.remove()
            continue
        first_column, last_row = head % columns == 0, head + columns >= num_heads
        image = matrix(
            ax,
            weights[head],
            rows=_each(queries, every if first_column else None),
            columns=_each(keys, every if last_row else None),
            title=head_names[head] if head_names else f"head {head}",
            digits=None,
            top=top,
            gamma=0.5,  # as in the live view: most weights are small
        )
        if hidden is not None:
            grey = np.where(np.broadcast_to(hidden, weights.shape)[head], 0.2, np.nan)
            ax.imshow(grey, cmap="Greys", vmin=0.0, vmax=1.0)
        ax.tick_params(labelsize=min(13.0, points * every))
    fig.colorbar(image, ax=list(fig.axes), label="attention weight", shrink=0.8)
    fig.supxlabel("key")
    fig.supylabel("query")
    return fig


def photo(ax: Axes, pixels: np.ndarray, *, title: str = ""):
    """Draw a picture without ticks.

    Args:
        ax: where to draw.
        pixels: (c H W) in [0, 1], c = 3, or 1 for ink on paper.
        title: above the picture.

    Returns:
        The AxesImage.
    """
    ax.set(xticks=[], yticks=[], title=title)
    ax.spines[:].set_visible(False)
    rows = np.moveaxis(np.asarray(pixels), 0, -1)
    # Three channels need no map. Not smoothed: the PNG takes half the time and half the bytes.
    return ax.imshow(rows, cmap="Greys", vmin=0.0, vmax=1.0, interpolation="nearest")


def over_photo(pixels: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """A photograph in grey with the weights of its patches over it in colour.

    Args:
        pixels: (3 H W) in [0, 1].
        weights: (rows columns) at least 0, one for each patch; rows divide H and columns divide W.

    Returns:
        (3 H W), where the largest weight has the brightest colour.
    """
    pixels, weights = np.asarray(pixels), np.asarray(weights, dtype=float)
    rows, columns = weights.shape
    patch = np.ones((pixels.shape[1] // rows, pixels.shape[2] // columns))
    colour = matplotlib.colormaps[WEIGHT_MAP](np.kron(weights / (weights.max() or 1.0), patch))[..., :3]
    return 0.45 * pixels.mean(0) + 0.55 * np.moveaxis(colour, -1, 0)


def apart(pixels: np.ndarray, patch_size: int, gap: int = 2) -> np.ndarray:
    """Move the patches of a picture apart, so that one sees where it is cut.

    Args:
        pixels: (c H W) in [0, 1].
        patch_size: side of a patch in pixels; divides H and W.
        gap: pixels of value 1 on the right of and below each patch.

    Returns:
        (c H' W'), larger by a gap for each row and column of patches.
    """
    pixels = np.asarray(pixels)
    channels, height, width = pixels.shape
    grid = pixels.reshape(channels, height // patch_size, patch_size, width // patch_size, patch_size)
    padded = np.pad(grid, ((0, 0), (0, 0), (0, gap), (0, 0), (0, gap)), constant_values=1.0)
    return padded.reshape(channels, *(count * (patch_size + gap) for count in padded.shape[1::2]))


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


# The boxes of the flow: centre and width in inches, words, whether each head does it alone, and the colour.
_FLOW_BOXES = (
    (3.9, 5.5, 6.4, "X, the tokens", False, 6),
    (1.6, 4.4, 1.8, "$W_Q$ {e (h d)}", False, 0),
    (3.9, 4.4, 1.8, "$W_K$ {e (h d)}", False, 1),
    (6.2, 4.4, 1.8, "$W_V$ {e (h d)}", False, 2),
    (1.6, 3.2, 1.8, "split into heads", True, 0),
    (3.9, 3.2, 1.8, "split into heads", True, 1),
    (6.2, 3.2, 1.8, "split into heads", True, 2),
    (2.75, 2.0, 4.1, "scores = q kᵀ / √d$_k$", True, 6),
    (2.75, 0.7, 4.1, "softmax over the keys: weights", True, 6),
    (6.2, 0.7, 1.8, "weights · v", True, 6),
    (9.2, 0.7, 1.8, "merge the heads", False, 6),
    (9.2, 3.2, 1.8, "$W_O$ {(h d) e}", False, 6),
    (9.2, 5.5, 1.8, "output", False, 6),
)
# Each arrow of the flow: from, to, and the axes of what travels along it.
_FLOW_ARROWS = (
    *(((x, 5.25), (x, 4.65), "b n e") for x in (1.6, 3.9, 6.2)),
    *(((x, 4.15), (x, 3.45), "b n (h d)") for x in (1.6, 3.9, 6.2)),
    ((1.6, 2.95), (1.6, 2.25), "b h i d"),
    ((3.9, 2.95), (3.9, 2.25), "b h j d"),
    ((6.2, 2.95), (6.2, 0.95), "b h j d"),
    ((2.75, 1.75), (2.75, 0.95), "b h i j"),
    ((4.8, 0.7), (5.3, 0.7), "b h i j"),
    ((7.1, 0.7), (8.3, 0.7), "b h i d"),
    ((9.2, 0.95), (9.2, 2.95), "b n (h d)"),
    ((9.2, 3.45), (9.2, 5.25), "b n e"),
)
_MOST_HEADS = 16


def head_flow(*, n: int, d_model: int, num_heads: int, d_k: int) -> Figure:
    """Multi-head self-attention as boxes and arrows, with the shape of what travels along each arrow.

    What is done in each head alone bears a small bar for each head, up to 16.

    Args:
        n: tokens; queries i and keys j are as many.
        d_model: e.
        num_heads: h.
        d_k: d.

    Returns:
        A Figure, which ``resize_head_flow`` changes to other sizes.
    """
    fig, ax = figure(width=10.4, height=6.2)
    fig.set_layout_engine("none")  # the places are fixed, and a slider need not wait for a layout
    ax.set(position=(0, 0, 1, 1), xlim=(0.3, 10.7), ylim=(-0.2, 6.0))
    ax.set_axis_off()
    for x, y, width, words, is_per_head, number in _FLOW_BOXES:
        colour = COLOURS[number]
        ax.add_patch(
            Rectangle((x - width / 2, y - 0.25), width, 0.5, facecolor="white", edgecolor=colour, linewidth=1.5)
        )
        for head in range(_MOST_HEADS if is_per_head else 0):
            corner = (x - width / 2 + 0.1 + head * (width - 0.2) / _MOST_HEADS, y - 0.19)
            ax.add_patch(Rectangle(corner, 0.8 * (width - 0.2) / _MOST_HEADS, 0.09, facecolor=colour, gid=str(head)))
        ax.text(x, y + 0.06 * is_per_head, "", label=words, ha="center", va="center", fontsize=12)
    for start, end, axes in _FLOW_ARROWS:
        ax.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": "black", "lw": 1.5})
        across = start[1] == end[1]
        middle = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2)
        place = (middle[0], middle[1] - 0.3) if across else (middle[0] + 0.1, middle[1])
        alignment = {"ha": "center", "va": "top"} if across else {"ha": "left", "va": "center"}
        ax.text(*place, "", label=f"({axes})\n{{{axes}}}", fontsize=10.5, **alignment)
    resize_head_flow(fig, n=n, d_model=d_model, num_heads=num_heads, d_k=d_k)
    return fig


def resize_head_flow(fig: Figure, *, n: int, d_model: int, num_heads: int, d_k: int) -> None:
    """Write other sizes into a figure made by ``head_flow``, whose arguments these are."""
    sizes = {"b": 1, "n": n, "i": n, "j": n, "e": d_model, "h": num_heads, "d": d_k}
    (ax,) = fig.axes
    for text in ax.texts:
        text.set_text(re.sub(r"\{(.*?)\}", lambda axes: str(_shape(axes[1], sizes)), text.get_label()))
    for patch in ax.patches:
        if patch.get_gid():
            patch.set_visible(int(patch.get_gid()) < num_heads)


def _shape(axes: str, sizes: dict[str, int]) -> tuple[int, ...]:
    """The shape that "b n (h d)" has: letters in one pair of brackets are one axis."""
    groups = re.findall(r"\(.*?\)|\w", axes)
    return tuple(math.prod(sizes[letter] for letter in re.findall(r"\w", group)) for group in groups)
