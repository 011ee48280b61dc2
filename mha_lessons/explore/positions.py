"""Explorer of positions: an encoding, the scores that it makes by distance, and the weights."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import ipywidgets as widgets
import numpy as np
import torch

from mha_lessons import plots
from mha_lessons.explore.explorer import Explorer, FigurePanel, WeightsPanel
from mha_lessons.positions import alibi_bias, rotary, sinusoidal_encoding

KINDS = ("none", "sinusoidal", "learned (untrained)", "rotary", "ALiBi")
MOST_HEADS, WIDEST_MODEL, WIDEST_HEAD, MOST_TOKENS = 8, 64, 64, 48
WITHOUT_BASE = {
    "none": "Without positions the base plays no part.",
    "learned (untrained)": "Learned positions have no base: that slider plays no part.",
    "ALiBi": "ALiBi has no base: that slider plays no part.",
}


@dataclass(frozen=True)
class Positioned:
    """What one encoding does to a token that is the same everywhere.

    ``encoding`` (n columns) is what it adds to a token, how it turns (1, 0, 1, 0, ...), or what it adds to the scores
    of the last query; scores and weights are (h i j).
    """

    kind: str
    encoding: np.ndarray
    scores: np.ndarray
    weights: np.ndarray
    queries: Sequence[str]
    keys: Sequence[str]
    summary: str
    note: str


@functools.cache
def _drawn() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A token (e), projections (2 h e d) and learned rows (n e). Each slider takes a part, so that the rest stays."""
    generator = torch.Generator().manual_seed(0)
    shapes = (WIDEST_MODEL,), (2, MOST_HEADS, WIDEST_MODEL, WIDEST_HEAD), (MOST_TOKENS, WIDEST_MODEL)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)


def spread_by_distance(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The least, mean and greatest score at each distance.

    Args:
        scores: (n n), a row a query.

    Returns:
        distances, query minus key, from -(n-1) to n-1, and three numbers for each.
    """
    n = len(scores)
    distances = np.arange(1 - n, n)
    along = [scores.diagonal(-distance) for distance in distances]
    least, mean, most = (np.array([measure(scores) for scores in along]) for measure in (np.min, np.mean, np.max))
    return distances, least, mean, most


def _on_base(kind: str, d_model: int, d_k: int) -> str:
    """Why the base plays no part, or "" where it does."""
    if kind in WITHOUT_BASE:
        return WITHOUT_BASE[kind]
    name, width = ("d_k", d_k) if kind == "rotary" else ("d_model", d_model)
    if width > 2:
        return ""
    return f"With {name} {width} there is one frequency, 1 whatever the base: that slider plays no part."


def draw_positions(kind: str, d_model: int, base: float, num_heads: int, d_k: int, length: int) -> Positioned:
    """One untrained layer's scores over the same token repeated, so that whatever differs comes from the positions.

    Args:
        kind: one of ``KINDS``.
        d_model: width e, 1 to 64; odd ones too.
        base: of the wavelengths, for the sinusoidal and the rotary encoding.
        num_heads: h.
        d_k: width of a head, even.
        length: number of tokens n.
    """
    token, projections, learned = _drawn()
    added = torch.zeros(length, d_model, dtype=torch.float64)
    if kind == "sinusoidal":
        added = sinusoidal_encoding(length, d_model, base=base, dtype=torch.float64)
    elif kind == "learned (untrained)":
        added = learned[:length, :d_model] * 0.5**0.5  # as large as a sinusoid
    x = (token[:d_model] + added) / d_model**0.5
    q, k = x @ projections[:, :num_heads, :d_model, :d_k]
    encoding = added
    if kind == "rotary":
        q, k = rotary(q, base=base), rotary(k, base=base)
        unturned = torch.tensor([1.0, 0.0], dtype=torch.float64).repeat(length, d_k // 2)
        encoding = rotary(unturned, base=base)
    scores = q @ k.mT / d_k**0.5
    if kind == "ALiBi":
        bias = alibi_bias(num_heads, length)
        scores, encoding = scores + bias, bias[:, -1].T
    spread = max(float((most - least).max()) for _, least, _, most in map(spread_by_distance, scores.numpy()))
    at_one = "the same at one distance" if spread < 1e-9 else f"up to {spread:.2f} apart at one distance"
    sizes = f"{num_heads} heads, d_k {d_k}"
    note = f"Scores are {at_one}. {_on_base(kind, d_model, d_k)}".strip()
    numbers = (tensor.numpy() for tensor in (encoding, scores, scores.softmax(dim=-1)))
    tokens = [str(position) for position in range(length)]
    summary = f"{kind}, d_model {d_model}, {sizes}, {length} tokens, {at_one}"
    return Positioned(kind, *numbers, tokens, tokens, summary, note)


class _DistancePanel(FigurePanel):
    """The encoding as a heatmap, and the chosen head's score against the distance."""

    def __init__(self, view) -> None:
        fig, (self.encoding_ax, self.score_ax) = plots.figure(2, 1, width=6, height=6.6)
        super().__init__(fig, self._redraw)
        self.view = view
        self.heat = self.encoding_ax.imshow(np.zeros((2, 2)), cmap=plots.SIGNED_MAP, aspect="auto")
        self.encoding_ax.set_ylabel("position")
        bar = fig.colorbar(self.heat, ax=self.encoding_ax)
        fig.set_layout_engine("none")  # the places are fixed, and a slider need not wait for a layout
        places = (0.14, 0.58, 0.7, 0.36), (0.87, 0.58, 0.03, 0.36), (0.14, 0.09, 0.83, 0.36)
        for ax, place in zip((self.encoding_ax, bar.ax, self.score_ax), places, strict=True):
            ax.set_position(place)
        (self.mean,) = self.score_ax.plot([], [], color=plots.COLOURS[0], linestyle="-", label="mean")
        edges = {"color": plots.COLOURS[1], "linestyle": ":", "linewidth": 1.5}
        (self.least,) = self.score_ax.plot([], [], label="least and greatest", **edges)
        (self.most,) = self.score_ax.plot([], [], **edges)
        self.score_ax.set(xlabel="distance: query minus key", ylabel="score")
        self.score_ax.legend(loc="lower center", fontsize=10, ncols=2)

    def _redraw(self, state: Positioned) -> None:
        n, columns = state.encoding.shape
        self.heat.set_data(state.encoding)
        self.heat.set_extent((-0.5, columns - 0.5, n - 0.5, -0.5))
        top = float(np.abs(state.encoding).max()) or 1.0
        self.heat.set_clim(-top, top)
        self.encoding_ax.set_xlabel({"ALiBi": "head"}.get(state.kind, "channel"))
        self.encoding_ax.set_title({"ALiBi": "bias of the last query"}.get(state.kind, state.kind))
        distances, least, mean, most = spread_by_distance(state.scores[self.view.head])
        for line, heights in ((self.least, least), (self.mean, mean), (self.most, most)):
            line.set_data(distances, heights)
        low, high = float(least.min()), float(most.max())
        room = max(0.1, 0.1 * (high - low))
        self.score_ax.set(xlim=(1 - n, n - 1), ylim=(low - 3 * room, high + room))
        self.score_ax.set_title(f"scores of head {self.view.head}")


def positions() -> Explorer:
    """Choose an encoding and its sizes: see the encoding, the score by distance, and the weights."""
    controls = {
        "kind": widgets.Dropdown(options=KINDS, value="sinusoidal", description="encoding"),
        "d_model": widgets.IntSlider(32, 1, WIDEST_MODEL, description="d_model"),
        "base": widgets.SelectionSlider(
            options=[2.0, 10.0, 100.0, 1000.0, 10_000.0, 500_000.0], value=10_000.0, description="base"
        ),
        "num_heads": widgets.SelectionSlider(options=[1, 2, 3, 4, 6, MOST_HEADS], value=4, description="heads"),
        "d_k": widgets.SelectionSlider(options=[2, 4, 8, 16, 32, WIDEST_HEAD], value=8, description="d_k"),
        "length": widgets.IntSlider(24, 2, MOST_TOKENS, description="sequence length"),
    }
    weights_panel = WeightsPanel()
    distance_panel = _DistancePanel(weights_panel.widget)
    explorer = Explorer(
        "positions",
        controls,
        draw_positions,
        [weights_panel, distance_panel],
        alt="Weights of four heads over one repeated token, the sinusoidal encoding, and one head's score by distance.",
    )
    explorer.follow(weights_panel.widget, distance_panel, names=["head"])
    return explorer
