"""Explorers of attention itself: a sentence's weights, untrained and pretrained."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import ipywidgets as widgets
import numpy as np
import torch

from mha_lessons import plots
from mha_lessons.attention import MultiHeadAttention, scaled_dot_product_attention, split_heads
from mha_lessons.explore.explorer import (
    BESIDE,
    CannotBeError,
    Explorer,
    FigurePanel,
    WeightsPanel,
    share_width,
    small_type,
)
from mha_lessons.pretrained import D_MODEL, NUM_LAYERS, MiniLM

SENTENCES = (
    "The animal didn't cross the street because it was too tired",
    "The animal didn't cross the street because it was too wide",
    "The street was not crossed by the animal because it was too tired",
    "She gave him the book because he asked for it",
    "The dog saw the cat, and then the cat saw the dog",
    "The old man the boat",
)
PRETRAINED_LAYER = 3


@dataclass(frozen=True)
class Attended:
    """What one attention layer did: weights (h i j) and values (h j d), with a label for each query and key."""

    weights: np.ndarray
    values: np.ndarray
    queries: Sequence[str]
    keys: Sequence[str]
    summary: str
    note: str = ""


@functools.lru_cache(maxsize=64)
def _untrained_layer(d_model: int, num_heads: int, d_k: int) -> MultiHeadAttention:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MultiHeadAttention(d_model, num_heads, d_k=d_k).requires_grad_(False)


def draw_sentence(
    sentence: str, num_heads: int, d_k: int, length: int, temperature: float, pretrained: bool
) -> Attended:
    """One layer's attention over the first tokens of a sentence.

    Args:
        sentence: any text.
        num_heads: h.
        d_k: width of a head.
        length: how many tokens to take, from the first.
        temperature: the scores are divided by it once more; 1 is the usual 1/√d_k.
        pretrained: the trained projections of layer 3 of MiniLM and that layer's true input, in place of seeded
            random projections of the token embeddings.

    Raises:
        CannotBeError: pretrained, and heads or d_k are not that model's.
    """
    model = MiniLM.load()
    tokens = model.tokenize(sentence)
    note = f"The sentence has {len(tokens)} tokens: all are shown." if length > len(tokens) else ""
    tokens = tokens[:length]
    if pretrained:
        layer = model.layers[PRETRAINED_LAYER].attention
        if (num_heads, d_k) != (layer.num_heads, layer.d_k):
            raise CannotBeError(
                f"the pretrained layer has {layer.num_heads} heads of width {layer.d_k}, and the sliders say "
                f"{num_heads} of {d_k}. Set heads to {layer.num_heads} and d_k to {layer.d_k}, or switch it off."
            )
        x = model.layer_inputs(tokens)[PRETRAINED_LAYER][0]
    else:
        # Unit variance, as Xavier's matrices expect; the scores of an untrained layer are all alike otherwise.
        x = torch.nn.functional.layer_norm(model.embed(tokens), (D_MODEL,))
        layer = _untrained_layer(D_MODEL, num_heads, d_k)
    q, k, v = (split_heads(project(x), num_heads) for project in (layer.q_proj, layer.k_proj, layer.v_proj))
    _, weights = scaled_dot_product_attention(q, k, v, scale=d_k**-0.5 / temperature)
    kind = "pretrained" if pretrained else "untrained"
    summary = f"{kind}, {num_heads} heads, d_k {d_k}, {len(tokens)} tokens, largest weight {weights.max():.2f}"
    return Attended(weights.numpy(), v.numpy(), tokens, tokens, summary, note)


class _SumPanel(FigurePanel):
    """The weighted sum that makes one token's output: a bar for each weight, a strip for each weighted value."""

    def __init__(self, view) -> None:
        fig, (self.bars_ax, self.strips_ax) = plots.figure(1, 2, **BESIDE, sharey=True)
        super().__init__(fig, self._redraw)
        self.view = view
        self.bars = self.bars_ax.barh(range(64), np.zeros(64), color=plots.COLOURS[0])
        self.strips = self.strips_ax.imshow(np.zeros((2, 2)), cmap=plots.SIGNED_MAP, aspect="auto")
        self.strips_ax.set(xlabel="channel of the head", xticks=[])
        self.bars_ax.set(xlabel="weight α", xlim=(0, 1))
        self.strips_ax.set_title("α · value, and their sum", loc="left")
        self.title = self.bars_ax.set_title(" ", loc="right")
        fig.colorbar(self.strips, ax=self.strips_ax)
        small_type(fig)

    def _redraw(self, state: Attended) -> None:
        head, query = self.view.head, self.view.query
        alpha = state.weights[head, query]
        weighted = alpha[:, None] * state.values[head]
        n = len(alpha)
        gap = np.full((1, weighted.shape[1]), np.nan)
        self.strips.set_data(np.concatenate([weighted, gap, weighted.sum(0, keepdims=True)]))
        self.strips.set_extent((0, weighted.shape[1], n + 1.5, -0.5))
        top = float(np.abs(weighted.sum(0)).max())
        self.strips.set_clim(-top, top)
        for bar, width in zip(self.bars, np.pad(alpha, (0, len(self.bars) - n)), strict=True):
            bar.set_width(width)
        self.bars_ax.set_ylim(n + 1.5, -0.5)
        self.bars_ax.set_yticks([*range(n), n + 1], [*state.keys, "sum"])
        self.title.set_text(f'"{state.queries[query]}" asks in head {head}')


def _sentence_menu() -> widgets.Dropdown:
    return widgets.Dropdown(options=SENTENCES, description="sentence", layout={"width": "36em", "max_width": "100%"})


def sentence_attention() -> Explorer:
    """Move heads, d_k, length and temperature, and see a sentence's attention; choose a token to see its sum."""
    controls = {
        "sentence": _sentence_menu(),
        "num_heads": widgets.SelectionSlider(options=[1, 2, 4, 8, 12], value=4, description="heads"),
        "d_k": widgets.SelectionSlider(options=[2, 4, 8, 16, 32, 64], value=32, description="d_k"),
        "length": widgets.IntSlider(15, 2, 15, description="sequence length"),
        "temperature": widgets.FloatLogSlider(1.0, min=-1, max=1, step=0.1, description="temperature"),
        "pretrained": widgets.Checkbox(False, description="pretrained heads (12 heads of d_k 32)"),
    }
    weights_panel = WeightsPanel()
    sum_panel = _SumPanel(weights_panel.widget)
    share_width(weights_panel, sum_panel)
    explorer = Explorer(
        "sentence attention",
        controls,
        draw_sentence,
        [weights_panel, sum_panel],
        alt="Heatmaps of attention weights, one for each head, and the weighted sum that makes one token's output.",
    )
    view = weights_panel.widget
    explorer.follow(view, sum_panel)
    view.query = explorer.state.queries.index("it")
    return explorer


def draw_pretrained(sentence: str, layer: int) -> Attended:
    """The weights of every head of one layer of MiniLM on a whole sentence.

    Args:
        sentence: any text of at most 64 tokens.
        layer: 0 to 5.
    """
    model = MiniLM.load()
    tokens = model.tokenize(sentence)
    weights = model(tokens)[1][layer][0].numpy()
    summary = (
        f"layer {layer}, {len(weights)} heads, {len(tokens)} tokens, mean weight on [CLS] {weights[..., 0].mean():.2f}"
    )
    return Attended(weights, np.empty(0), tokens, tokens, summary)


def pretrained_heads() -> Explorer:
    """Choose a sentence and a layer of MiniLM, and read the weights of its heads."""
    controls = {
        "sentence": _sentence_menu(),
        "layer": widgets.IntSlider(PRETRAINED_LAYER, 0, NUM_LAYERS - 1, description="layer"),
    }
    panel = WeightsPanel()
    explorer = Explorer(
        "pretrained heads",
        controls,
        draw_pretrained,
        [panel],
        alt="The attention weights of the 12 heads of one layer of MiniLM on a sentence.",
    )
    tokens = explorer.state.queries
    panel.widget.head, panel.widget.query, panel.widget.key = 1, tokens.index("it"), tokens.index("animal")
    return explorer
