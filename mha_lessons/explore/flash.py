"""Explorers of flash attention: one row's running numbers, tile by tile, and the tiles of a whole attention."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import ipywidgets as widgets
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator

from mha_lessons import plots
from mha_lessons.attention import scaled_dot_product_attention
from mha_lessons.explore.explorer import (
    BESIDE,
    BESIDE_TYPE,
    Explorer,
    FigurePanel,
    WeightsPanel,
    counted,
    end_at_last_step,
    share_width,
    small_type,
)
from mha_lessons.flash import Tiling
from mha_lessons.masks import causal_mask

MOST_HEADS, MOST_TOKENS, WIDEST = 8, 32, 64
ORDERS = ("as drawn", "largest first", "largest last")
FACTORS = {
    "exp(old - new)": lambda old, new: (old - new).exp(),
    "exp(new - old), inverted": lambda old, new: (new - old).exp(),
    "none": lambda old, new: torch.ones_like(new),
}
CHANNELS = 6
MOST_STEPS = 64
MOST_TOTAL = 1e7  # the inverted factor reaches 7e6
NEVER, TO_COME, DONE, NOW = range(4)
TILE_COLOURS = ("#BBBBBB", "#F2F2F2", plots.COLOURS[5], plots.COLOURS[1])
LEAST_ERROR, EXACT = 1e-18, 1e-12
STRIP = 1 / 12  # how thick Q, K and V are drawn, to the side of the scores


@functools.cache
def _vectors() -> torch.Tensor:
    """(3 h n d) of variance 1. Each slider takes a part, so that the numbers that stay in view stay the same."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, MOST_HEADS, MOST_TOKENS, WIDEST, generator=generator, dtype=torch.float64)


def _freeze_layout(fig: Figure) -> None:
    """Lay the figure out now and never again, for that takes longer than all else when a slider moves."""
    fig.draw_without_rendering()
    fig.set_layout_engine("none")


@dataclass(frozen=True)
class Stepped:
    """One row after some tiles: its scores (j), and maximum, sum and output as they run and as they are exactly.

    The exact ones are those of the keys seen so far. ``tile`` is the last one, ``running_output`` (c) is mix / sum.
    """

    scores: np.ndarray
    tile: slice
    maximum: float
    running_total: float
    total: float
    running_output: np.ndarray
    output: np.ndarray
    factor: str
    summary: str
    note: str


def _row_tiles(length: int, block: int) -> range:
    """Where each tile of a row starts."""
    return range(0, length, block)


def draw_online(d_k: int, length: int, block: int, order: str, factor: str, step: int) -> Stepped:
    """Softmax of one row in one pass, stopped after some tiles.

    Args:
        d_k: width of the head.
        length: number of keys.
        block: keys per tile.
        order: one of ``ORDERS``: where the largest score stands.
        factor: a name in ``FACTORS``: what the old sum and output are multiplied by.
        step: tiles done; cut to the number of tiles.
    """
    q, k, values = _vectors()[:, 0, :length]
    scores = 3 * (k[:, :d_k] @ q[0, :d_k]) / q[0, :d_k].norm()  # spread 3, whatever the width: maxima then differ
    if order != "as drawn":
        scores = scores.sort(descending=order == "largest first").values
    values = values[:, :CHANNELS]
    tiles = _row_tiles(length, block)
    step = min(step, len(tiles))
    maximum, total, mix = torch.tensor(-torch.inf, dtype=scores.dtype), scores.new_zeros(()), scores.new_zeros(CHANNELS)
    for start in tiles[:step]:
        tile = slice(start, min(start + block, length))
        new = torch.maximum(maximum, scores[tile].max())
        # Nothing is there to be multiplied at the first tile, where exp(new - old) would be infinite.
        old_counts = FACTORS[factor](maximum, new) if start else scores.new_zeros(())
        weights = (scores[tile] - new).exp()
        total, mix = total * old_counts + weights.sum(), mix * old_counts + weights @ values[tile]
        maximum = new
    seen = slice(0, tile.stop)
    exact_total, exact_output = (scores[seen] - maximum).exp().sum(), scores[seen].softmax(0) @ values[seen]
    equal = torch.allclose(mix / total, exact_output, rtol=0, atol=EXACT)
    note = (
        f"After tile {step}{', the last' * (step == len(tiles))}: "
        f"{f'old numbers times {old_counts:.3g}' if step > 1 else 'nothing is old yet'}; maximum {maximum:.2f}, sum "
        f"{total:.3g} (exact {exact_total:.3g}); output equals the softmax over the {counted(seen.stop, 'key')} "
        f"seen so far: {equal}."
    )
    summary = (
        f"tile {step} of {len(tiles)}, {seen.stop} of {length} keys, d_k {d_k}, {order}, {factor}: exact {bool(equal)}"
    )
    return Stepped(
        scores.numpy(),
        tile,
        float(maximum),
        float(total),
        float(exact_total),
        (mix / total).numpy(),
        exact_output.numpy(),
        factor,
        summary,
        note,
    )


class _RowPanel(FigurePanel):
    """The row's scores with their running maximum, and beside them sum and output, running and exact."""

    def __init__(self) -> None:
        fig, (self.scores_ax, self.total_ax, self.output_ax) = plots.figure(
            1, 3, width=11, height=3.8, width_ratios=[5, 1.4, 3]
        )
        super().__init__(fig, self._redraw)
        self.bars = self.scores_ax.bar(range(MOST_TOKENS), np.zeros(MOST_TOKENS))
        self.maximum = self.scores_ax.axhline(0, color=plots.COLOURS[6], linestyle="--", label="running maximum")
        self.scores_ax.set(xlabel="key", ylabel="score", ylim=(-10, 10), title=" ")
        self.scores_ax.legend(loc="lower right")
        (self.total,) = self.total_ax.bar([0], [1.0], color=plots.COLOURS[0])
        (self.exact_total,) = self.total_ax.plot([0], [1.0], marker="D", color=plots.COLOURS[6])
        self.total_ax.set(title="sum", xticks=[], xlim=(-1, 1), yscale="log", ylim=(0.5, MOST_TOTAL))
        self.outputs = self.output_ax.bar(range(CHANNELS), np.zeros(CHANNELS), color=plots.COLOURS[0], label="running")
        (self.exact,) = self.output_ax.plot(
            range(CHANNELS), np.zeros(CHANNELS), marker="D", linestyle="", color=plots.COLOURS[6], label="exact so far"
        )
        self.output_ax.set(title="output", xlabel="channel", ylim=(-3.5, 2.5))
        self.output_ax.legend(loc="lower right", ncols=2, fontsize=11)
        self.total_ax.minorticks_off()
        self.scores_ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        _freeze_layout(fig)

    def _redraw(self, state: Stepped) -> None:
        length = len(state.scores)
        for key, bar in enumerate(self.bars):
            bar.set_height(state.scores[key] if key < length else 0)
            now, seen = state.tile.start <= key < state.tile.stop, key < state.tile.stop
            bar.set_facecolor(TILE_COLOURS[NOW] if now else TILE_COLOURS[DONE] if seen else TILE_COLOURS[NEVER])
        self.scores_ax.set_xlim(-0.6, length - 0.4)
        first, last = state.tile.start, state.tile.stop - 1
        read = f"key {first} is" if first == last else f"keys {first} to {last} are"
        self.scores_ax.set_title(f"{read} read now (orange)")
        self.maximum.set_ydata([state.maximum] * 2)
        self.total.set_height(state.running_total)
        self.exact_total.set_ydata([state.total])
        for bar, height in zip(self.outputs, state.running_output, strict=True):
            bar.set_height(height)
        self.exact.set_ydata(state.output)


def online_softmax() -> Explorer:
    """Step through one row, tile by tile: the running maximum, sum and output beside the exact ones."""
    controls = {
        "step": widgets.IntSlider(2, 1, MOST_TOKENS, description="tiles done"),
        "factor": widgets.ToggleButtons(options=list(FACTORS), description="factor", style={"button_width": "auto"}),
        "order": widgets.ToggleButtons(options=ORDERS, description="scores"),
        "length": widgets.IntSlider(16, 2, MOST_TOKENS, description="sequence length"),
        "d_k": widgets.SelectionSlider(options=[2, 4, 8, 16, 32, WIDEST], value=8, description="d_k"),
        "block": widgets.SelectionSlider(options=[1, 2, 4, 8], value=4, description="keys per tile"),
    }
    end_at_last_step(controls, lambda length, block, **_: len(_row_tiles(length, block)))
    panel = _RowPanel()
    panel.widget.layout.max_width = "1100px"
    return Explorer(
        "online softmax",
        controls,
        draw_online,
        [panel],
        alt="The scores of one row in tiles, their running maximum, and the running sum and output on the exact ones.",
    )


@dataclass(frozen=True)
class Tiled:
    """Attention after some tiles: weights (h i j) as they are so far, and each row's error (i).

    ``hidden`` (i j) are the cells above the diagonal, if causal: a weight still to come is 0, not hidden. ``kinds``
    (i j) says of each cell whether it is never computed, to come, done or being done now.
    """

    weights: np.ndarray
    hidden: np.ndarray | None
    queries: Sequence[str]
    keys: Sequence[str]
    tiles: list[tuple[slice, slice]]
    step: int
    kinds: np.ndarray
    error: np.ndarray
    summary: str
    note: str


def draw_tiles(num_heads: int, d_k: int, length: int, block_q: int, block_k: int, causal: bool, step: int) -> Tiled:
    """Attention in tiles, in the order in which ``flash_attention`` visits them, stopped after some.

    Args:
        num_heads: h.
        d_k: width of a head.
        length: number of tokens n.
        block_q, block_k: the largest tile.
        causal: leave out the tiles above the diagonal.
        step: tiles done; cut to the number of tiles.
    """
    q, k, v = _vectors()[:, :num_heads, :length, :d_k]
    mask = causal_mask(length) if causal else torch.ones(length, length, dtype=torch.bool)
    tiles = list(Tiling(length, length, block_q, block_k, causal))
    step = min(step, len(tiles))
    scores = (2 * q @ k.mT * d_k**-0.5).masked_fill(~mask, -torch.inf)
    kinds = np.full((length, length), NEVER)
    maximum, total = q.new_full((num_heads, length, 1), -torch.inf), q.new_zeros(num_heads, length, 1)
    mix = torch.zeros_like(v)
    for number, (rows, columns) in enumerate(tiles, start=1):
        kinds[rows, columns] = NOW if number == step else DONE if number < step else TO_COME
        if number > step:
            continue
        tile = scores[:, rows, columns]
        new = torch.maximum(maximum[:, rows], tile.amax(-1, keepdim=True))
        kept, weights = (maximum[:, rows] - new).exp(), (tile - new).exp()
        total[:, rows] = total[:, rows] * kept + weights.sum(-1, keepdim=True)
        mix[:, rows] = mix[:, rows] * kept + weights @ v[:, columns]
        maximum[:, rows] = new
    seen = torch.as_tensor(kinds >= DONE) & mask
    begun = total.clamp(min=1)  # 0 in the rows to come
    weights = torch.where(seen, (scores - maximum.nan_to_num(neginf=0.0)).exp() / begun, 0.0)
    exact, _ = scaled_dot_product_attention(q, k, v, mask, scale=2 * d_k**-0.5)
    error = (mix / begun - exact).abs().amax(dim=(0, 2))
    finished = int((error < EXACT).sum())
    held = max((rows.stop - rows.start) * (columns.stop - columns.start) for rows, columns in tiles)
    full = num_heads * length * length
    note = (
        f"{finished} of {length} rows are exact. Largest error of the output: {float(error.max()):.1e}. Scores held at "
        f"once: {held}; plain attention holds {full}. "
        f"{'All tiles are done.' if step == len(tiles) else 'Weights still to come are 0.'}"
    )
    summary = (
        f"{num_heads} heads, d_k {d_k}, {length} tokens, tile {step} of {len(tiles)}, {finished} rows exact, held "
        f"{held} of {full}"
    )
    names = [str(position) for position in range(length)]
    hidden = ~mask.numpy() if causal else None
    return Tiled(weights.numpy(), hidden, names, names, tiles, step, kinds, error.numpy(), summary, note)


class _TilesPanel(FigurePanel):
    """Q down, K and V across, the tiles between them numbered in their order, and how far each row is from exact.

    The scores are 1 wide and 1 high, whatever the number of tokens.
    """

    def __init__(self) -> None:
        fig, (self.ax, self.error_ax) = plots.figure(1, 2, **BESIDE)
        super().__init__(fig, self._redraw)
        fig.set_layout_engine("none")  # the places are fixed, so that the scores fill the height
        tall = (BESIDE["height"] - 0.4) / (1 + 3 * STRIP)  # of the scores, in inches; above them is a line of words
        self.side = tall * 72  # in points
        _place(self.ax, 0.08, 0.05, tall * (1 + 1.5 * STRIP), tall * (1 + 3 * STRIP))
        _place(self.error_ax, tall * (1 + 1.5 * STRIP) + 0.25, 0.05, 1.4, tall)
        self.title = fig.text(0.015, 0.985, "", va="top")
        self.strips = {
            "Q": self._image((-1.5 * STRIP, -0.5 * STRIP, 1, 0)),
            "K": self._image((0, 1, -2 * STRIP, -3 * STRIP)),
            "V": self._image((0, 1, -0.5 * STRIP, -1.5 * STRIP)),
        }
        for name, strip in self.strips.items():
            left, right, bottom, top = strip.get_extent()
            self.ax.text((left + right) / 2, (bottom + top) / 2, name, ha="center", va="center")
        self.scores = self._image((0, 1, 1, 0))
        self.borders = LineCollection([], colors="black", linewidths=1, clip_on=False)
        self.ax.add_collection(self.borders)
        self.ax.set(xlim=(-1.5 * STRIP, 1), ylim=(1, -3 * STRIP))
        self.ax.set_axis_off()
        self.numbers = [self.ax.text(0, 0, "", ha="center", va="center") for _ in range(MOST_STEPS)]
        self.bars = self.error_ax.barh(range(MOST_TOKENS), np.full(MOST_TOKENS, LEAST_ERROR))
        self.error_ax.set_title("error of\neach row", pad=8)
        self.error_ax.set(xscale="log", xlim=(LEAST_ERROR, 10), yticks=[])
        self.error_ax.xaxis.tick_top()
        self.error_ax.spines[:].set_visible(False)
        self.error_ax.spines[["top", "left"]].set_visible(True)
        self.error_ax.set_xticks([1e-16, 1e-8, 1])
        self.error_ax.minorticks_off()
        small_type(fig)

    def _image(self, extent: tuple[float, float, float, float]) -> AxesImage:
        colours = ListedColormap(TILE_COLOURS)
        return self.ax.imshow(np.zeros((1, 1)), cmap=colours, vmin=NEVER, vmax=NOW, extent=extent, aspect="auto")

    def _redraw(self, state: Tiled) -> None:
        n = len(state.queries)
        rows, columns = state.tiles[state.step - 1]
        for name, block in (("Q", rows), ("K", columns), ("V", columns)):
            strip = np.full(n, TO_COME)
            strip[block] = NOW
            self.strips[name].set_data(strip[:, None] if name == "Q" else strip[None])
        self.scores.set_data(state.kinds)
        self._number(state.tiles, n)
        never = "; dark grey: never computed" * bool((state.kinds == NEVER).any())
        self.title.set_text(f"tile {state.step} of {len(state.tiles)} in orange{never}")
        for bar, error in zip(self.bars, np.pad(state.error, (0, MOST_TOKENS - n)), strict=True):
            bar.set_width(max(error, LEAST_ERROR))
            bar.set_facecolor(plots.COLOURS[2] if error < EXACT else plots.COLOURS[1])
        self.error_ax.set_ylim(n - 0.5, -0.5)

    def _number(self, tiles: list[tuple[slice, slice]], n: int) -> None:
        """Outline the tiles of n tokens, and number those that have room for their number."""
        self.borders.set_segments([np.array(_outline(*tile)) / n for tile in tiles])
        for text in self.numbers:
            text.set_text("")
        for number, (text, (rows, columns)) in enumerate(zip(self.numbers, tiles, strict=False), start=1):
            width, height = ((block.stop - block.start) * self.side / n for block in (columns, rows))
            # In this type a digit is about 0.64 wide, and 0.2 is left around the number.
            if width >= BESIDE_TYPE * (0.64 * len(str(number)) + 0.2) and height >= BESIDE_TYPE:
                text.set_text(str(number))
                text.set_position(((columns.start + columns.stop) / 2 / n, (rows.start + rows.stop) / 2 / n))


def _place(ax: Axes, left: float, bottom: float, width: float, height: float) -> None:
    """Put axes at a place in the figure, in inches."""
    across, up = ax.figure.get_size_inches()
    ax.set_position((left / across, bottom / up, width / across, height / up))


def _outline(rows: slice, columns: slice) -> list[tuple[int, int]]:
    left, right, top, bottom = columns.start, columns.stop, rows.start, rows.stop
    return [(left, top), (right, top), (right, bottom), (left, bottom), (left, top)]


def tiles() -> Explorer:
    """Move through the tiles in their order: weights so far, each row's error, and how many scores are held."""
    controls = {
        "step": widgets.IntSlider(5, 1, MOST_STEPS, description="tiles done"),
        "num_heads": widgets.SelectionSlider(options=[1, 2, 4, MOST_HEADS], value=2, description="heads"),
        "d_k": widgets.SelectionSlider(options=[2, 4, 8, 16, 32, WIDEST], value=16, description="d_k"),
        "length": widgets.IntSlider(24, 2, MOST_TOKENS, description="sequence length"),
        "block_q": widgets.SelectionSlider(options=[4, 8, 16, 32], value=8, description="queries per tile"),
        "block_k": widgets.SelectionSlider(options=[4, 8, 16, 32], value=8, description="keys per tile"),
        "causal": widgets.Checkbox(False, description="causal"),
    }
    end_at_last_step(
        controls,
        lambda length, block_q, block_k, causal, **_: len(list(Tiling(length, length, block_q, block_k, causal))),
    )
    weights_panel, tiles_panel = WeightsPanel(), _TilesPanel()
    share_width(tiles_panel, weights_panel)
    return Explorer(
        "tiles",
        controls,
        draw_tiles,
        [tiles_panel, weights_panel],
        alt="The scores cut into numbered tiles, five of them done, the error of each row, and the weights so far.",
    )
