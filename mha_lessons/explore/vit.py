"""Explorers of pictures: how fine to cut them, where a pretrained ViT looks, and what an untrained one shows."""

import functools
from dataclasses import dataclass

import ipywidgets as widgets
import numpy as np
import torch
from matplotlib.patches import Rectangle

from mha_lessons import plots
from mha_lessons.data import PHOTOS, ViTAttention, load_photo, load_vit_attention
from mha_lessons.explore.explorer import CannotBeError, Explorer, FigurePanel, WeightsPanel
from mha_lessons.vit import VisionTransformer

PATCH_SIZES = (4, 7, 8, 14, 16, 28, 32, 56, 112)
SIDES = (112, 160, 192, 220, 224)
WIDTHS = (192, 384, 768)
GRID, PATCH = 16, 14  # the stored maps: 16 x 16 patches of 14 pixels


@functools.cache
def _photo(name: str) -> np.ndarray:
    return load_photo(name).numpy()


@functools.cache
def _pretrained() -> ViTAttention:
    return load_vit_attention()


@dataclass(frozen=True)
class Cut:
    """A picture with its patches apart, the number of tokens n, and the width e."""

    picture: np.ndarray
    tokens: int
    d_model: int
    summary: str
    note: str


def layer_cost(tokens, d_model: int) -> tuple:
    """Multiplications in one layer of a ViT for one picture: between tokens, and in each token alone.

    Args:
        tokens: n, a number or an array.
        d_model: e.

    Returns:
        2 n² e for the scores and the weighted sums, and 12 n e² for four projections and an MLP four times as wide.
    """
    return 2 * tokens**2 * d_model, 12 * tokens * d_model**2


def draw_patches(photo: str, patch_size: int, side: int, d_model: int) -> Cut:
    """Cut a photo into patches and count what that costs.

    Args:
        photo: one of ``PHOTOS``.
        patch_size: side of a patch in pixels.
        side: side of the square taken from the photo's upper left corner.
        d_model: e.

    Raises:
        CannotBeError: the patches do not fit.
    """
    if left_over := side % patch_size:
        fitting = side - left_over
        raise CannotBeError(
            f"{side} / {patch_size} leaves {left_over} pixels over on each side. A strided convolution would drop "
            f"them in silence, {1 - (fitting / side) ** 2:.1%} of the picture. Choose a patch size that divides {side}."
        )
    picture = plots.apart(_photo(photo)[:, :side, :side], patch_size, gap=max(1, patch_size // 8))
    grid = side // patch_size
    tokens = 1 + grid**2
    between, alone = layer_cost(tokens, d_model)
    note = (
        f"{grid} x {grid} patches of {3 * patch_size**2} numbers and CLS make {tokens} tokens. In a layer each head "
        f"has {tokens**2:,} weights, and {between / (between + alone):.0%} of all multiplications are between tokens."
    )
    summary = f"{photo} {side} x {side}, patch {patch_size}, {tokens} tokens, {tokens**2} weights a head"
    return Cut(picture, tokens, d_model, summary, note)


class _CutPanel(FigurePanel):
    """The picture with its patches apart, and a layer's cost for any number of tokens with a mark at this one."""

    def __init__(self) -> None:
        fig, (photo_ax, self.cost_ax) = plots.figure(1, 2, width=9, height=4.2)
        super().__init__(fig, self._redraw)
        self.image = plots.photo(photo_ax, np.ones((3, 2, 2)))
        self.tokens = np.geomspace(4, 10_000, 50)  # at n = 6 e the lines meet, 4608 for the widest
        self.lines = [self.cost_ax.loglog(self.tokens, self.tokens, label=label)[0] for label in ("", "")]
        self.marks = [self.cost_ax.plot([1], [1], "o", color=line.get_color())[0] for line in self.lines]
        for line, label in zip(self.lines, ("between tokens, 2 n² e", "in each token, 12 n e²"), strict=True):
            line.set_label(label)
        self.cost_ax.set(xlabel="tokens n", ylabel="multiplications in a layer", xlim=(4, 10_000), ylim=(1e3, 1e12))
        self.cost_ax.legend(loc="upper left", fontsize=11)
        self.cost_ax.minorticks_off()
        fig.canvas.draw()
        fig.set_layout_engine("none")  # nothing moves from here on, so a slider need not wait for a layout

    def _redraw(self, state: Cut) -> None:
        height, width = state.picture.shape[1:]
        self.image.set_data(np.moveaxis(state.picture, 0, -1))
        self.image.set_extent((0, width, height, 0))
        costs = layer_cost(self.tokens, state.d_model)
        here = layer_cost(state.tokens, state.d_model)
        for line, mark, cost, point in zip(self.lines, self.marks, costs, here, strict=True):
            line.set_ydata(cost)
            mark.set_data([state.tokens], [point])


def patches() -> Explorer:
    """Move the patch size, the photo's size and the width: see the patches, their number and what a layer costs."""
    controls = {
        "patch_size": widgets.SelectionSlider(options=PATCH_SIZES, value=16, description="patch size"),
        "side": widgets.SelectionSlider(options=SIDES, value=224, description="side of the photo"),
        "d_model": widgets.SelectionSlider(options=WIDTHS, value=384, description="d_model"),
        "photo": widgets.Dropdown(options=PHOTOS, value="chelsea", description="photo"),
    }
    return Explorer(
        "patches",
        controls,
        draw_patches,
        [_CutPanel()],
        alt="A photo of a cat cut into 14 x 14 patches, and the cost of a layer for any number of tokens.",
    )


@dataclass(frozen=True)
class Looks:
    """Where CLS and one patch look in a photo: two maps (16 16) over its patches, and the patch's (row, column)."""

    pixels: np.ndarray
    cls: np.ndarray
    patch: np.ndarray
    place: tuple[int, int]
    titles: tuple[str, str]
    summary: str
    note: str


def draw_pretrained_vit(photo: str, layer: int, head: int, row: int, column: int) -> Looks:
    """Where one head of the pretrained ViT looks.

    Args:
        photo: one of ``PHOTOS``.
        layer: 0 to 11.
        head: 0 to 5.
        row, column: the patch that asks, each 0 to 15.
    """
    vit, number, query = _pretrained(), PHOTOS.index(photo), 1 + GRID * row + column
    has_heads = layer in vit.full_layers
    if has_heads:
        asked, by = vit.full[number, vit.full_layers.index(layer), head, query], f"head {layer}.{head}"
        note = ""
    else:
        asked, by = vit.head_mean[number, layer, query], f"layer {layer}, mean of its heads"
        note = (
            f"What each head does for a patch is stored for layers {', '.join(map(str, vit.full_layers))} only: the "
            "map on the right is the mean over the heads."
        )
    cls = vit.cls[number, layer, head]
    kept = f"CLS keeps {cls[0]:.0%} of its weight for itself, the patch gives CLS {asked[0]:.0%}."
    maps = (weights[1:].view(GRID, GRID).numpy() for weights in (cls, asked))
    summary = f"{photo}, head {layer}.{head}, CLS to itself {cls[0]:.2f}, patch ({row}, {column}) to CLS {asked[0]:.2f}"
    titles = (f"CLS, head {layer}.{head}", f"the patch, {by}")
    return Looks(_photo(photo), *maps, (row, column), titles, summary, f"{kept} {note}")


class _LooksPanel(FigurePanel):
    """The photo with the patch that asks, where CLS looks, and where the patch looks."""

    def __init__(self) -> None:
        fig, self.axes = plots.figure(1, 3, width=11, height=4)
        super().__init__(fig, self._redraw)
        self.images = [plots.photo(ax, np.ones((3, GRID * PATCH, GRID * PATCH))) for ax in self.axes]
        self.frames = []
        for ax in self.axes[::2]:
            self.frames.append(Rectangle((0, 0), PATCH, PATCH, fill=False, edgecolor=plots.COLOURS[1], linewidth=3))
            ax.add_patch(self.frames[-1])
        self.axes[0].set_title("the patch that asks")

    def _redraw(self, state: Looks) -> None:
        maps = [plots.over_photo(state.pixels, weights) for weights in (state.cls, state.patch)]
        for image, pixels in zip(self.images, [state.pixels, *maps], strict=True):
            image.set_data(np.moveaxis(pixels, 0, -1))
        for frame in self.frames:
            row, column = state.place
            frame.set_xy((column * PATCH - 0.5, row * PATCH - 0.5))
        for ax, title in zip(self.axes[1:], state.titles, strict=True):
            ax.set_title(title)


def pretrained_vit() -> Explorer:
    """Choose a photo, a layer, a head and a patch, and see where a DINOv2-layout ViT-S/14 looks."""
    controls = {
        "layer": widgets.IntSlider(11, 0, 11, description="layer"),
        "head": widgets.IntSlider(2, 0, 5, description="head"),
        "row": widgets.IntSlider(11, 0, GRID - 1, description="row of the patch"),
        "column": widgets.IntSlider(10, 0, GRID - 1, description="column of the patch"),
        "photo": widgets.Dropdown(options=PHOTOS, value="coffee", description="photo"),
    }
    return Explorer(
        "pretrained ViT",
        controls,
        draw_pretrained_vit,
        [_LooksPanel()],
        alt="A photo of a cup with one patch marked, and over it where CLS and that patch look in one head.",
    )


@dataclass(frozen=True)
class Untrained:
    """The last layer's weights (h i j), a label for each token, and the photo with its grid's side."""

    weights: np.ndarray
    queries: list[str]
    keys: list[str]
    pixels: np.ndarray
    grid: int
    summary: str
    note: str


def draw_untrained_vit(photo: str, num_heads: int, d_k: int, num_layers: int, grid: int, gain: float) -> Untrained:
    """The last layer's weights of a ViT with random weights.

    Args:
        photo: one of ``PHOTOS``.
        num_heads: h.
        d_k: width of a head; d_model is h · d_k.
        num_layers: number of blocks.
        grid: patches on each side of the photo.
        gain: all scores are multiplied by it; 1 leaves the initialisation as it is.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = VisionTransformer(
            image_size=GRID * PATCH,
            patch_size=GRID * PATCH // grid,
            channels=3,
            num_classes=2,
            d_model=num_heads * d_k,
            num_heads=num_heads,
            num_layers=num_layers,
        )
        for block in model.blocks:
            block.attention.q_proj.weight *= gain
            block.attention.q_proj.bias *= gain
        pixels = _photo(photo)
        _, weights = model(2 * torch.from_numpy(pixels)[None] - 1, return_weights=True)
    last = weights[-1][0].numpy()
    names = ["CLS", *(f"({row}, {column})" for row in range(grid) for column in range(grid))]
    largest, even = last.max(), 1 / len(names)
    note = (
        f"Nothing was learned here. {grid} x {grid} patches and CLS; the largest weight is {largest / even:.1f} times "
        f"an even share of 1/{len(names)}."
    )
    summary = (
        f"{photo}, untrained, {num_layers} layers, {num_heads} heads, d_k {d_k}, {len(names)} tokens, gain {gain:.3g}, "
        f"largest {largest:.2f}"
    )
    return Untrained(last, names, names, pixels, grid, summary, note)


class _MapPanel(FigurePanel):
    """The row of the chosen query in the chosen head, over the photo."""

    def __init__(self, view) -> None:
        fig, self.ax = plots.figure(width=4.5, height=4.5)
        super().__init__(fig, self._redraw)
        self.view = view
        self.image = plots.photo(self.ax, np.ones((3, GRID * PATCH, GRID * PATCH)))

    def _redraw(self, state: Untrained) -> None:
        head, query = self.view.head, self.view.query
        weights = state.weights[head, query, 1:].reshape(state.grid, state.grid)
        self.image.set_data(np.moveaxis(plots.over_photo(state.pixels, weights), 0, -1))
        self.ax.set_title(f"where {state.queries[query]} looks in head {head}")


def untrained_vit() -> Explorer:
    """Move heads, d_k, layers, the number of patches and the gain of a ViT that has learned nothing."""
    controls = {
        "num_heads": widgets.SelectionSlider(options=[1, 2, 4, 6, 8], value=4, description="heads"),
        "d_k": widgets.SelectionSlider(options=[2, 4, 8, 16, 32], value=16, description="d_k"),
        "num_layers": widgets.IntSlider(2, 1, 4, description="layers"),
        "grid": widgets.SelectionSlider(
            options=[(str(1 + side**2), side) for side in (2, 4, 7)], value=7, description="sequence length"
        ),
        "gain": widgets.FloatLogSlider(1.0, min=0, max=2, step=0.25, description="gain of the scores"),
        "photo": widgets.Dropdown(options=PHOTOS, value="coffee", description="photo"),
    }
    weights_panel = WeightsPanel()
    weights_panel.widget.layout = {"width": "58%", "min_width": "400px"}
    map_panel = _MapPanel(weights_panel.widget)
    explorer = Explorer(
        "untrained ViT",
        controls,
        draw_untrained_vit,
        [weights_panel, map_panel],
        alt="The weights of four heads of an untrained ViT, nearly even, and one row of them over a photo.",
    )
    explorer.follow(weights_panel.widget, map_panel)
    return explorer
