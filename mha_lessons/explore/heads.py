"""The explorer of heads: sizes on sliders, what each head looks at, and the shapes on the way."""

from dataclasses import dataclass

import ipywidgets as widgets
import numpy as np
import torch

from mha_lessons import plots
from mha_lessons.attention import MultiHeadAttention
from mha_lessons.explore.explorer import CannotBeError, Explorer, FigurePanel, WeightsPanel, counted


@dataclass(frozen=True)
class Heads:
    """What a layer of some sizes did: weights (h i j), a label for each token, and the sizes themselves."""

    weights: np.ndarray
    queries: list[str]
    keys: list[str]
    sizes: dict[str, int]
    summary: str
    note: str


def draw_heads(d_model: int, num_heads: int, d_k: int, length: int) -> Heads:
    """The weights of an untrained layer on random tokens, the same for the same sizes.

    Args:
        d_model: e.
        num_heads: h.
        d_k: width of a head; 0: d_model / num_heads.
        length: tokens n.

    Raises:
        CannotBeError: d_k is 0 and the heads do not divide d_model.
    """
    if d_k == 0 and d_model % num_heads:
        divisors = [h for h in range(1, num_heads + 1) if d_model % h == 0]
        raise CannotBeError(
            f"{num_heads} heads do not divide d_model {d_model}: {d_model} / {num_heads} is no whole number. "
            f"Choose {divisors[-1]} heads, or give d_k a number of its own."
        )
    width = d_k or d_model // num_heads
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        layer = MultiHeadAttention(d_model, num_heads, d_k=width)
        _, weights = layer(torch.randn(1, length, d_model))
    sizes = {"n": length, "d_model": d_model, "num_heads": num_heads, "d_k": width}
    channels = counted(num_heads * width, "channel")
    joined = f"{counted(num_heads, 'head')} of d_k {width} {'make' if num_heads > 1 else 'makes'} {channels}"
    note = f"{joined}, d_model is {d_model}. " + (
        "The split cuts the width as it is."
        if num_heads * width == d_model
        else f"So W_Q, W_K and W_V lead from {d_model} to {channels}, and W_O leads back."
    )
    names = [str(i) for i in range(length)]
    summary = f"d_model {d_model}, {num_heads} heads, d_k {width}, {length} tokens, largest weight {weights.max():.2f}"
    return Heads(weights[0].numpy(), names, names, sizes, summary, note)


def heads() -> Explorer:
    """Move d_model, heads, d_k and length; see each head's weights, and the shape on every arrow of the layer."""
    widths = [("d_model / heads", 0), *((str(d_k), d_k) for d_k in (1, 2, 4, 8, 16, 32, 64))]
    controls = {
        "d_model": widgets.IntSlider(64, 8, 128, 8, description="d_model"),
        "num_heads": widgets.IntSlider(4, 1, 16, description="heads"),
        "d_k": widgets.SelectionSlider(options=widths, description="d_k", layout={"width": "24em"}),
        "length": widgets.IntSlider(12, 2, 32, description="sequence length"),
    }
    flow = plots.head_flow(n=12, d_model=64, num_heads=4, d_k=16)
    flow_panel = FigurePanel(flow, lambda state: plots.resize_head_flow(flow, **state.sizes))
    flow_panel.widget.layout.flex = "1 0 100%"  # a row of its own: beside the weights its words would be too small
    return Explorer(
        "heads",
        controls,
        draw_heads,
        [WeightsPanel(), flow_panel],
        alt="Heatmaps of the weights of four heads, and the flow through the layer with the shape on every arrow.",
    )
