"""Explorer of the scale: what the divisor before the softmax does to scores, weights, entropy and gradient."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import ipywidgets as widgets
import numpy as np
import torch

from mha_lessons import plots
from mha_lessons.explore.explorer import BESIDE, Explorer, FigurePanel, WeightsPanel, share_width, small_type

DIVISORS = {
    "none": lambda d_k, num_heads: 1.0,
    "√d_k": lambda d_k, num_heads: math.sqrt(d_k),
    "√d_model": lambda d_k, num_heads: math.sqrt(num_heads * d_k),
    "d_k": lambda d_k, num_heads: float(d_k),
}
MOST_HEADS, MOST_TOKENS, WIDEST = 8, 32, 512
LEAST_GRADIENT, MOST_GRADIENT = 1e-6, 100.0


@dataclass(frozen=True)
class Scaled:
    """Scores and weights (h i j); entropy / log n and the size of ∂α/∂q for each query (h i)."""

    scores: np.ndarray
    weights: np.ndarray
    entropy: np.ndarray
    gradient: np.ndarray
    queries: Sequence[str]
    keys: Sequence[str]
    summary: str
    note: str


@functools.cache
def _queries_and_keys() -> torch.Tensor:
    """(2 h n d) of variance 1. Each slider takes a part, so that the numbers that stay in view stay the same."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, MOST_HEADS, MOST_TOKENS, WIDEST, generator=generator, dtype=torch.float64)


def draw_scaling(d_k: int, length: int, num_heads: int, divisor: str) -> Scaled:
    """Attention weights of random queries and keys of variance 1, their scores divided by one of ``DIVISORS``.

    Args:
        d_k: width of a head, up to 512.
        length: number of tokens n, from 2 to 32.
        num_heads: h, up to 8; d_model is h · d_k.
        divisor: a name in ``DIVISORS``.
    """
    q, k = _queries_and_keys()[:, :num_heads, :length, :d_k]
    by = DIVISORS[divisor](d_k, num_heads)
    scores = q @ k.mT / by
    weights = scores.softmax(dim=-1)
    entropy = torch.special.entr(weights).sum(dim=-1) / math.log(length)
    # ∂αⱼ/∂q is αⱼ (kⱼ - Σ α k) / divisor: a weight moves with what sets its key apart from the average key.
    apart = torch.cdist(weights @ k, k, compute_mode="donot_use_mm_for_euclid_dist")
    gradient = (weights * apart).norm(dim=-1) / by
    summary = (
        f"divisor {divisor}, {num_heads} heads, d_k {d_k}, {length} tokens, "
        f"score std {scores.std():.2f}, entropy / log n {entropy.mean():.2f}"
    )
    note = (
        f"d_model = heads · d_k = {num_heads * d_k}. Scores are divided by {by:.4g}; their std is {scores.std():.3g}."
    )
    numbers = (tensor.numpy() for tensor in (scores, weights, entropy, gradient))
    return Scaled(*numbers, [f"q{i}" for i in range(length)], [f"k{j}" for j in range(length)], summary, note)


class _ScalePanel(FigurePanel):
    """All scores as a histogram, the chosen query's weights, and its entropy and gradient as two gauges."""

    def __init__(self, view) -> None:
        fig, axes = plots.figure(2, 2, **BESIDE, gridspec_kw={"height_ratios": [4, 1]})
        super().__init__(fig, self._redraw)
        self.view = view
        (self.scores_ax, self.row_ax), (self.entropy_ax, self.gradient_ax) = axes
        self.histogram = self.scores_ax.stairs([1.0], [0.0, 1.0], fill=True, color=plots.COLOURS[0])
        (self.normal,) = self.scores_ax.plot([], [], color=plots.COLOURS[6], linestyle="--", label="std 1")
        self.scores_ax.set(xlabel="scores of all heads", ylim=(0, 1.05), yticks=[], title="scores (dashed: std 1)")
        self.row = self.row_ax.stairs([1.0], [0.0, 1.0], fill=True, color=plots.COLOURS[0])
        self.row_ax.set(xlabel="key", ylabel="weight α", ylim=(0, 1.05))
        self.row_title = self.row_ax.set_title(" ")
        self.row_ax.xaxis.get_major_locator().set_params(integer=True)
        self.entropy = _Gauge(self.entropy_ax, "entropy / log n", 0.0, 1.0)
        self.gradient_ax.set_xscale("log")
        self.gradient = _Gauge(self.gradient_ax, "gradient ‖∂α/∂q‖", LEAST_GRADIENT, MOST_GRADIENT)
        self.entropy_ax.set_title("bar: this query, line: median of all", loc="left")
        small_type(fig)

    def _redraw(self, state: Scaled) -> None:
        # The view still points at what it showed before: it is updated after this panel, which stands first.
        last_head, last_query = np.array(state.entropy.shape) - 1
        head, query = min(self.view.head, last_head), min(self.view.query, last_query)
        widest = max(4.0, float(np.abs(state.scores).max()))
        counts, edges = np.histogram(state.scores, bins=41, range=(-widest, widest))
        self.histogram.set_data(counts / counts.max(), edges)
        x = np.linspace(-widest, widest, 401)
        self.normal.set_data(x, np.exp(-(x**2) / 2))
        self.scores_ax.set_xlim(-widest, widest)
        alpha = state.weights[head, query]
        self.row.set_data(alpha, np.arange(len(alpha) + 1) - 0.5)
        self.row_ax.set_xlim(-0.5, len(alpha) - 0.5)
        self.row_title.set_text(f"weights of {state.queries[query]} in head {head}")
        self.entropy.show(state.entropy[head, query], np.median(state.entropy))
        self.gradient.show(state.gradient[head, query], np.median(state.gradient))


class _Gauge:
    """A bar for one number and a line for the median of all, on an axis that never moves."""

    def __init__(self, ax, label: str, least: float, most: float) -> None:
        self.least, self.most = least, most
        (self.bar,) = ax.barh([0], [0.0], left=least, color=plots.COLOURS[1])
        self.line = ax.axvline(least, color=plots.COLOURS[6], linestyle="-")
        ax.set(xlabel=label, xlim=(least, most), yticks=[])

    def show(self, value: float, median: float) -> None:
        value, median = np.clip([value, median], self.least, self.most)
        self.bar.set_width(value - self.least)
        self.line.set_xdata([median, median])


def scaling() -> Explorer:
    """Move d_k, length, heads and the divisor: see the scores' spread, one query's weights, entropy and gradient."""
    controls = {
        "d_k": widgets.SelectionSlider(options=[2, 4, 8, 16, 32, 64, 128, 256, WIDEST], value=64, description="d_k"),
        "length": widgets.IntSlider(16, 2, MOST_TOKENS, description="sequence length"),
        "num_heads": widgets.SelectionSlider(options=[1, 2, 4, MOST_HEADS], value=4, description="heads"),
        "divisor": widgets.ToggleButtons(options=list(DIVISORS), value="√d_k", description="divide by"),
    }
    weights_panel = WeightsPanel()
    scale_panel = _ScalePanel(weights_panel.widget)
    share_width(scale_panel, weights_panel)
    explorer = Explorer(
        "scaling",
        controls,
        draw_scaling,
        [scale_panel, weights_panel],
        alt="Scores as a histogram, one query's weights, its entropy and gradient, and the weights of four heads.",
    )
    explorer.follow(weights_panel.widget, scale_panel)
    return explorer
