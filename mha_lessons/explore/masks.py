"""Explorers of masks: a mask beside the weights that it leaves, and decoding one token at a time."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import ipywidgets as widgets
import numpy as np
import torch

from mha_lessons import plots
from mha_lessons.attention import KVCache, MultiHeadAttention, scaled_dot_product_attention
from mha_lessons.explore.explorer import Explorer, FigurePanel, WeightsPanel, counted, end_at_last_step
from mha_lessons.masks import causal_mask, combine_masks, padding_mask, sliding_window_mask

WORDS = ["the", "cat", "sat", "on", "the", "mat", "and", "the", "dog", "lay", "on", "the", "rug", "in", "the", "sun"]
MOST = len(WORDS)
D_MODEL = 32
KINDS = ("nothing hidden", "causal", "padding", "causal and padding", "two texts in one row")
USES_REAL = ("padding", "causal and padding", "two texts in one row")
USES_WINDOW = ("causal", "causal and padding")


@dataclass(frozen=True)
class Masked:
    """A mask and the weights under it: weights (h i j), hidden (i j), with a label for each query and key."""

    weights: np.ndarray
    hidden: np.ndarray
    queries: Sequence[str]
    keys: Sequence[str]
    summary: str
    note: str = ""


def _mask(kind: str, n_queries: int, n_keys: int, real: int, window: int) -> torch.Tensor:
    """The mask of a kind, (i j) bool: the queries are the last of the positions."""
    everything = torch.ones(n_queries, n_keys, dtype=torch.bool)
    if kind == "two texts in one row":
        text = torch.arange(n_keys) >= real  # the second text begins where the first one ends
        return combine_masks(text[n_keys - n_queries :, None] == text, causal_mask(n_queries, n_keys))
    causal = sliding_window_mask(n_queries, window, n_keys) if "causal" in kind else everything
    padding = padding_mask([real], n_keys)[0, 0] if "padding" in kind else everything
    return combine_masks(causal, padding)


def _on_sliders(kind: str, length: int, n_queries: int, real: int, window: int) -> list[str]:
    """What to say of sliders that are cut, or that move nothing though they stand where they could hide something."""
    cut = ["queries"] * (n_queries > length) + ["real tokens"] * (kind in USES_REAL and real > length)
    idle = ["real tokens"] * (kind not in USES_REAL and real < length)
    idle += ["window"] * (kind not in USES_WINDOW and window < length)
    notes = [f"Only {length} positions: {' and '.join(cut)} are cut to that."] * bool(cut)
    return notes + [f'Under "{kind}" the slider "{name}" plays no part.' for name in idle]


def draw_masked(kind: str, num_heads: int, d_k: int, length: int, n_queries: int, real: int, window: int) -> Masked:
    """Random queries and keys under a mask of a kind.

    Args:
        kind: one of ``KINDS``.
        num_heads: h.
        d_k: width of a head.
        length: number of keys j.
        n_queries: number of queries i, the last of the positions; cut to ``length``.
        real: how many tokens are real, or belong to the first text; cut to ``length``.
        window: how many keys a query sees at most where the mask is causal.
    """
    sliders = _on_sliders(kind, length, n_queries, real, window)
    n_queries, real = min(n_queries, length), min(real, length)
    mask = _mask(kind, n_queries, length, real, window)
    generator = torch.Generator().manual_seed(0)
    # All positions are drawn and the first ones kept, so that a token keeps its vectors when the length moves.
    q, k = torch.randn(2, num_heads, MOST, d_k, generator=generator)[:, :, :length]
    _, weights = scaled_dot_product_attention(q[:, length - n_queries :], k, k, mask)
    tokens = WORDS[:real] + ["[pad]"] * (length - real) if "padding" in kind else WORDS[:length]
    blind = int((~mask.any(-1)).sum())
    unseeing = [f"Queries that see no key, so that their weights are all 0: {blind} of {n_queries}."] * (blind > 0)
    summary = (
        f"{kind}, {num_heads} heads, d_k {d_k}, {n_queries} x {length}, {int(mask.sum())} pairs may attend, "
        f"last row's largest {weights[:, -1].max():.2f}"
    )
    queries = tokens[length - n_queries :]
    return Masked(weights.numpy(), ~mask.numpy(), queries, tokens, summary, " ".join(sliders + unseeing))


class _MaskPanel(WeightsPanel):
    """The mask itself, as one heatmap of 1 (may attend) and hatched cells (hidden)."""

    def __init__(self) -> None:
        super().__init__(["mask"])
        self.widget.layout.flex = "1 1 280px"

    def update(self, state: Masked) -> None:
        super().update(replace(state, weights=(~state.hidden)[None]))

    def picture(self, state: Masked) -> bytes:
        fig, ax = plots.figure(width=4.4, height=4)
        allowed = np.where(state.hidden, np.nan, 1.0)
        title = "mask: coloured = may attend"
        plots.matrix(ax, allowed, rows=state.queries, columns=state.keys, title=title, digits=None, top=1)
        return plots.png(fig)


def masking() -> Explorer:
    """Choose a mask, its lengths and its window, and see the weights that it leaves beside it."""
    controls = {
        "kind": widgets.Dropdown(options=KINDS, value="causal and padding", description="mask"),
        "num_heads": widgets.SelectionSlider(options=[1, 2, 4, 8], value=4, description="heads"),
        "d_k": widgets.SelectionSlider(options=[2, 4, 8, 16, 32, 64], value=8, description="d_k"),
        "length": widgets.IntSlider(10, 2, MOST, description="sequence length"),
        "n_queries": widgets.IntSlider(10, 1, MOST, description="queries (last ones)"),
        "real": widgets.IntSlider(7, 0, MOST, description="real tokens"),
        "window": widgets.IntSlider(MOST, 1, MOST, description="window"),
    }
    mask_panel, weights_panel = _MaskPanel(), WeightsPanel()
    for axis in ("query", "key"):  # the cell chosen in one is chosen in the other, with no kernel between
        widgets.jslink((mask_panel.widget, axis), (weights_panel.widget, axis))
    return Explorer(
        "masking",
        controls,
        draw_masked,
        [mask_panel, weights_panel],
        alt="A causal mask joined with padding, and under it the weights of each head; hidden cells are grey.",
    )


@dataclass(frozen=True)
class Decoded(Masked):
    """What decoding has made so far, and its step among ``length`` tokens."""

    step: int = 1
    length: int = 1


def keys_computed(step: int) -> tuple[int, int]:
    """How many keys were computed after some steps: each once with a cache, all again at every step without.

    Args:
        step: how many tokens were decoded.

    Returns:
        The number with a cache, and the number without.
    """
    return step, step * (step + 1) // 2


def draw_decoded(num_heads: int, d_k: int, length: int, step: int) -> Decoded:
    """Decode the first tokens one at a time with a cache, and compare with one causal pass.

    Args:
        num_heads: h.
        d_k: width of a head.
        length: how many tokens there are.
        step: how many of them were decoded; cut to ``length``.
    """
    step = min(step, length)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        x = torch.randn(1, MOST, D_MODEL, dtype=torch.float64)[:, :step]
        layer = MultiHeadAttention(D_MODEL, num_heads, d_k=d_k).double()
        one_pass, _ = layer(x, mask=causal_mask(step))
        cache, weights = KVCache(), torch.zeros(num_heads, step, step)
        outputs = []
        for t in range(step):
            out, row = layer(x[:, t : t + 1], cache=cache)
            outputs.append(out)
            weights[:, t, : t + 1] = row[0, :, 0]
    equal = torch.allclose(torch.cat(outputs, dim=1), one_pass, rtol=0, atol=1e-12)
    tokens = WORDS[:step]
    with_cache, without = keys_computed(step)
    note = (
        f'Step {step}: "{tokens[-1]}" asks {counted(len(cache), "key")} in the cache, its own included. '
        f"Outputs so far equal those of one causal pass to 1e-12: {equal}."
    )
    summary = (
        f"{num_heads} heads, d_k {d_k}, step {step} of {length}, keys computed: {with_cache} with a cache, "
        f"{without} without"
    )
    hidden = ~causal_mask(step).numpy()
    return Decoded(weights.numpy(), hidden, tokens, tokens, summary, note, step=step, length=length)


class _WorkPanel(FigurePanel):
    """Keys computed so far, with a cache and without, with a mark at the present step."""

    def __init__(self) -> None:
        fig, self.ax = plots.figure(width=5, height=3.6)
        super().__init__(fig, self._redraw)
        (self.without,) = self.ax.plot([], [], marker="o", markevery=[-1], label="without a cache")
        (self.cached,) = self.ax.plot([], [], marker="o", markevery=[-1], label="with a cache")
        self.ax.set(xlabel="tokens decoded", ylabel="keys computed so far")
        self.ax.xaxis.get_major_locator().set_params(integer=True)
        self.ax.legend(loc="upper left")

    def _redraw(self, state: Decoded) -> None:
        steps = range(state.step + 1)
        for line, counts in zip((self.cached, self.without), zip(*map(keys_computed, steps), strict=True), strict=True):
            line.set_data(steps, counts)
        self.ax.set(xlim=(0, state.length + 0.5), ylim=(0, keys_computed(state.length)[1] * 1.05))


def decoding() -> Explorer:
    """Decode a toy sequence step by step, and see each new row of weights and the work that the cache saves."""
    controls = {
        "step": widgets.IntSlider(5, 1, MOST, description="step"),
        "num_heads": widgets.SelectionSlider(options=[1, 2, 4], value=2, description="heads"),
        "d_k": widgets.SelectionSlider(options=[2, 4, 8, 16, 32], value=8, description="d_k"),
        "length": widgets.IntSlider(12, 2, MOST, description="sequence length"),
    }
    end_at_last_step(controls, lambda length, **_: length)
    weights_panel = WeightsPanel()
    explorer = Explorer(
        "decoding",
        controls,
        draw_decoded,
        [weights_panel, _WorkPanel()],
        alt="The weights of five decoded tokens, a new row at each step, and the number of keys computed so far.",
    )

    def choose_the_newest(_: object = None) -> None:
        weights_panel.widget.query = explorer.state.step - 1

    controls["step"].observe(choose_the_newest, names="value")
    choose_the_newest()
    return explorer
