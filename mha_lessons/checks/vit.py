"""Exercises on ``vit.py``: cut a picture, embed it by a convolution, follow attention, and carry positions over."""

import einops
import torch
from torch.nn.functional import conv2d, interpolate, unfold

from mha_lessons import positions, vit
from mha_lessons.checks.engine import exercise


def _unfolded(images: torch.Tensor, p: int) -> torch.Tensor:
    """(b c H W) -> (b c y x p p): cut, with the channels still in front of the grid."""
    return images.unfold(2, p, p).unfold(3, p, p)


def _cut(images: torch.Tensor, p: int, order: str) -> torch.Tensor:
    return einops.rearrange(images, f"b c (y p1) (x p2) -> {order}", p1=p, p2=p)


@exercise(
    axes="b c H W, p -> b n _",
    inputs=lambda normal: [
        (normal(1, 3, 4, 6), 2),
        (normal(2, 3, 6, 3), 3),
        (normal(2, 2, 8, 8), 2),
        (normal(3, 1, 8, 4), 4),
    ],
    mistakes=[
        (
            lambda images, p: _unfolded(images, p).reshape(len(images), -1, images.shape[1] * p * p),
            "You unfolded and reshaped, but the channels still stand before the grid: a token now holds one channel of "
            "several patches. The shape is right and the picture is scrambled. Move the channels behind the grid "
            "first: `.permute(0, 2, 3, 1, 4, 5)`.",
        ),
        (
            lambda images, p: images.reshape(len(images), -1, images.shape[1] * p * p),
            "You only reshaped, so a token is a run of pixels of one row of the picture, not a square. Cut both H and "
            "W in two, (y p) and (x p), and move axes before you join them.",
        ),
        (
            lambda images, p: _cut(images, p, "b (y x) (p1 p2 c)"),
            "In your patches the channels come last, (p p c): a flattened convolution kernel has them first. Join "
            "them as (c p p).",
        ),
        (
            lambda images, p: _cut(images, p, "b (x y) (c p1 p2)"),
            "You read the patches column by column. Go row by row, as one reads: (y x).",
        ),
        (
            lambda images, p: _cut(images, p, "b (y x) (c p2 p1)"),
            "Each of your patches lies on its side: its columns come before its rows. Join the pixels as (c p1 p2), "
            "with p1 cut from H.",
        ),
        (
            lambda images, p: _cut(images, p, "b (p1 p2) (c y x)"),
            "You swapped grid and patch: a token holds every p-th pixel of the whole picture. Cut H as (y p), so that "
            "the inner part belongs to the patch.",
        ),
        (
            lambda images, p: unfold(images, p, stride=p),
            "`unfold` gives (b (c p p) n): the patches are its columns. Swap the last two axes: `.mT`.",
        ),
        (
            lambda images, p: unfold(images, p).mT,
            "Your patches overlap: you moved the window by one pixel. Move it by a whole patch: `stride=patch_size`.",
        ),
        (
            lambda images, p: _cut(images, p, "b y x (c p1 p2)"),
            "You kept the grid as two axes, (b y x (c p p)). A sentence has one: join them, row by row.",
        ),
        (
            lambda images, p: _cut(images, p, "b (c y x) (p1 p2)"),
            "You made a token of each channel of each patch, three times as many for a colour picture. A token holds "
            "all channels of its patch, (c p p).",
        ),
    ],
)
def patchify(images, patch_size):
    """Cut pictures into squares: write ``patchify(images, patch_size)``.

    Patches are read row by row. In a patch come all pixels of channel 0, row by row, then those of channel 1, and
    so on. The sizes always fit.

    Args:
        images: (b c H W).
        patch_size: side p of a patch in pixels.

    Returns:
        (b n (c p p)) with n = H/p · W/p.
    """
    return vit.patchify(images, patch_size)


def _kernel(images: torch.Tensor, weight: torch.Tensor, p: int) -> torch.Tensor:
    return weight.view(-1, images.shape[1], p, p)


def _grid(images, weight, bias, p) -> torch.Tensor:
    """(b e y x), right so far."""
    return conv2d(images, _kernel(images, weight, p), bias, stride=p)


@exercise(
    axes="b c H W, e _, e, p -> b n e",
    inputs=lambda normal: [
        (normal(1, 3, 4, 6), normal(5, 12), normal(5), 2),
        (normal(2, 2, 6, 9), normal(4, 18), normal(4), 3),
        (normal(2, 2, 4, 4), normal(4, 8), normal(4), 2),
    ],
    mistakes=[
        (
            lambda images, weight, bias, p: (
                conv2d(images, weight.view(-1, p, p, images.shape[1]).permute(0, 3, 1, 2), bias, stride=p).flatten(2).mT
            ),
            "You read the rows of `weight` as (p p c). They are (c p p), channels first, as the kernel wants them: "
            "`weight.view(e, c, p, p)`, and nothing to permute.",
        ),
        (
            lambda images, weight, bias, p: conv2d(images, _kernel(images, weight, p).mT, bias, stride=p).flatten(2).mT,
            "Your kernel lies on its side: rows and columns of a patch are swapped. `weight.view(e, c, p, p)` needs no "
            "transpose.",
        ),
        (
            lambda images, weight, bias, p: (
                conv2d(images, _kernel(images, weight, p).flip(-1, -2), bias, stride=p).flatten(2).mT
            ),
            "You turned the kernel round. PyTorch's convolution does not flip it, so it needs no turning.",
        ),
        (
            lambda images, weight, bias, p: conv2d(images, _kernel(images, weight, p), None, stride=p).flatten(2).mT,
            "You left out the bias. Hand it to `conv2d`, or add it at the end.",
        ),
        (
            lambda images, weight, bias, p: conv2d(images, _kernel(images, weight, p), bias).flatten(2).mT,
            "Your kernel moves by one pixel, so patches overlap and there are far more than n. Let it step a whole "
            "patch: `stride=patch_size`.",
        ),
        (
            _grid,
            "Your result is still a picture, (b e y x). Make the grid one axis and put the channels last: "
            "`.flatten(2).mT`.",
        ),
        (
            lambda images, weight, bias, p: _grid(images, weight, bias, p).flatten(2),
            "Your result is (b e n). A sentence has the width last: swap the last two axes with `.mT`.",
        ),
        (
            lambda images, weight, bias, p: _grid(images, weight, bias, p).reshape(len(images), -1, len(weight)),
            "You reshaped (b e y x) to (b n e). The shape is right, but a token now holds one channel of many patches. "
            "Flatten the grid, then swap the axes: `.flatten(2).mT`.",
        ),
        (
            lambda images, weight, bias, p: _grid(images, weight, bias, p).mT.flatten(2).mT,
            "You read the patches column by column. Keep the grid as it is and flatten it: `.flatten(2).mT`.",
        ),
    ],
)
def patch_embed_as_conv(images, weight, bias, patch_size):
    """Cut and project in one step: write ``patch_embed_as_conv(images, weight, bias, patch_size)`` with ``F.conv2d``.

    It gives what ``patchify(images, patch_size) @ weight.T + bias`` gives.

    Args:
        images: (b c H W).
        weight: (e (c p p)), as an ``nn.Linear`` stores it.
        bias: (e).
        patch_size: side p of a patch in pixels.

    Returns:
        (b n e), patches row by row.
    """
    return vit.patchify(images, patch_size) @ weight.mT + bias


def _eye(weights: torch.Tensor) -> torch.Tensor:
    return torch.eye(weights.shape[-1], dtype=weights.dtype)


def _product(layers: torch.Tensor, later_on_the_left: bool = True) -> torch.Tensor:
    """(l b n n) -> (b n n)."""
    product = layers[0]
    for layer in layers[1:]:
        product = layer @ product if later_on_the_left else product @ layer
    return product


def _mixed(weights: torch.Tensor) -> torch.Tensor:
    return (weights.mean(2) + _eye(weights)) / 2


@exercise(
    axes="_ b h n n -> b n n",
    inputs=lambda normal: [
        (normal(2, 1, 3, 4, 4).softmax(-1),),
        (normal(3, 2, 2, 5, 5).softmax(-1),),
        (normal(1, 3, 2, 3, 3).softmax(-1),),
        (normal(4, 2, 4, 4, 4).softmax(-1),),
    ],
    mistakes=[
        (
            lambda weights: _product(weights.mean(2)),
            "You left out the residual: a layer passes on what it saw and what it had. Mix each layer's weights "
            "with the identity first: (A + I) / 2.",
        ),
        (
            lambda weights: _product(_mixed(weights), later_on_the_left=False),
            "You multiplied in the wrong order. The first layer acts first, so it stands on the right: "
            "`rollout = layer @ rollout`.",
        ),
        (
            lambda weights: _product(weights.mean(2), later_on_the_left=False),
            "You left out the residual, (A + I) / 2, and multiplied in the wrong order: the first layer acts first, "
            "so it stands on the right.",
        ),
        (
            lambda weights: _product(weights.mean(2) + _eye(weights)),
            "You added the identity, but did not halve: your rows sum to 2 to the power of the number of layers. "
            "Divide each layer by 2.",
        ),
        (
            lambda weights: _mixed(weights)[-1],
            "You took the last layer alone. Multiply all of them, the first on the right.",
        ),
        (
            lambda weights: weights[-1].mean(1),
            "You returned the raw weights of the last layer. Multiply (A + I) / 2 of all layers.",
        ),
        (
            lambda weights: _mixed(weights).mean(0),
            "You averaged the layers. They act one after the other, so multiply their matrices.",
        ),
        (
            lambda weights: _mixed(weights).prod(0),
            "You multiplied entry by entry. Use the product of matrices, `@`.",
        ),
        (
            lambda weights: _product((weights.amax(2) + _eye(weights)) / 2),
            "You took the strongest head of each pair, so rows sum to more than 1. Average the heads.",
        ),
        (
            lambda weights: _product((weights.sum(2) + _eye(weights)) / 2),
            "You added the heads up, so rows sum to more than 1. Average them.",
        ),
        (
            lambda weights: _product(_mixed(weights))[:, 0],
            "You returned the row of CLS alone. Return the whole table, (b n n); its row 0 is that of CLS.",
        ),
        (
            lambda weights: _product((weights + _eye(weights)) / 2).mean(1),
            "You followed each head by itself and averaged at the end. But a layer mixes its heads before the next one "
            "looks: average the heads of each layer first.",
        ),
        (
            lambda weights: _product(_mixed(weights.transpose(-1, -2))),
            "You transposed the weights: rows must be queries, which sum to 1.",
        ),
    ],
)
def rollout(weights):
    """Follow attention through all layers: write ``rollout(weights)``.

    A layer passes on half of what it saw and half of what it had: (A + I) / 2, with A the mean over its heads. The
    layers act one after the other, so their matrices are multiplied, the first layer on the right.

    Args:
        weights: (layers b h n n), first layer first; a row is a query.

    Returns:
        (b n n), rows that sum to 1.
    """
    return vit.attention_rollout(list(weights))


def _resized(table, old_grid, new_grid, num_prefix=1, **how) -> torch.Tensor:
    """Any interpolation of the rows after the prefix, seen as a picture of the old grid."""
    picture = table[num_prefix:].unflatten(0, old_grid).permute(2, 0, 1)[None]
    how = {"mode": "bicubic", "align_corners": False} | how
    return torch.cat([table[:num_prefix], interpolate(picture, new_grid, **how)[0].flatten(1).mT])


def _viewed(table, old_grid, new_grid) -> torch.Tensor:
    """The rows read as channels, without moving an axis."""
    picture = table[1:].reshape(1, -1, *old_grid)
    resized = interpolate(picture, new_grid, mode="bicubic", align_corners=False)[0]
    return torch.cat([table[:1], resized.flatten(1).mT])


def _channels_mixed(table, old_grid, new_grid) -> torch.Tensor:
    """The way there is right, and on the way back no axis is moved."""
    grown = _resized(table, old_grid, new_grid)
    return torch.cat([grown[:1], grown[1:].mT.reshape(-1, table.shape[1])])


def _along_a_line(table, old_grid, new_grid) -> torch.Tensor:
    line = interpolate(table[1:].mT[None], new_grid[0] * new_grid[1], mode="linear", align_corners=False)
    return torch.cat([table[:1], line[0].mT])


@exercise(
    axes="_ e, _, _ -> n e",
    inputs=lambda normal: [
        (normal(7, 3), (2, 3), (4, 6)),
        (normal(13, 4), (4, 3), (2, 6)),
        (normal(17, 2), (4, 4), (5, 3)),
        (normal(10, 5), (3, 3), (3, 3)),
        (normal(17, 2), (2, 8), (4, 4)),
        (normal(23, 2), (11, 2), (15, 3)),  # 11 times 15/11 falls short of 15 in floating point
    ],
    mistakes=[
        (
            lambda table, old_grid, new_grid: _resized(table, old_grid[::-1], new_grid),
            "You swapped rows and columns of the old grid: a square grid hides it, any other is scrambled. The table "
            "was read row by row: `unflatten(0, (rows, columns))`.",
        ),
        (
            lambda table, old_grid, new_grid: _resized(table, old_grid, new_grid[::-1]),
            "You swapped rows and columns of the new grid. `interpolate` wants (rows, columns), as new_grid has them.",
        ),
        (
            lambda table, old_grid, new_grid: _resized(table, old_grid[::-1], new_grid[::-1]),
            "You swapped rows and columns in both grids: as many positions come out, but they belong to other places. "
            "The table was read row by row: (rows, columns).",
        ),
        (
            lambda table, old_grid, new_grid: _resized(table, old_grid, new_grid)[1:],
            "You dropped the first row. It is CLS's, which has no place in the picture: put it back in front as it is.",
        ),
        (
            lambda table, old_grid, new_grid: torch.cat(
                [torch.zeros_like(table[:1]), _resized(table, old_grid, new_grid)[1:]]
            ),
            "You put zeros where CLS's position was learned. Put the first row back as it is.",
        ),
        (
            lambda table, old_grid, new_grid: torch.cat([_resized(table, old_grid, new_grid)[1:], table[:1]]),
            "You put CLS's row at the end. It comes first.",
        ),
        (
            _channels_mixed,
            "You reshaped (e rows columns) to (n e) at once, so the channels are mixed. Flatten the grid first, then "
            "swap the axes: `.flatten(1).mT`.",
        ),
        (
            lambda table, old_grid, new_grid: _resized(table, old_grid, new_grid, align_corners=True),
            "You aligned the corners, so the spacing of the grid changes. A position belongs to the middle of its "
            "patch: `align_corners=False`.",
        ),
        (
            lambda table, old_grid, new_grid: _resized(table, old_grid, new_grid, mode="bilinear"),
            "You interpolated in straight lines (bilinear). The task asks for `mode='bicubic'`.",
        ),
        (
            lambda table, old_grid, new_grid: _resized(table, old_grid, new_grid, mode="nearest", align_corners=None),
            "You copied the nearest position, so neighbours become equal (`interpolate` does so unless told). The task "
            "asks for `mode='bicubic'`.",
        ),
        (
            lambda table, old_grid, new_grid: _resized(table, old_grid, new_grid, antialias=True),
            "You smoothed with `antialias=True`, which changes the numbers where the grid shrinks. Leave it off.",
        ),
        (
            lambda table, old_grid, new_grid: _viewed(table, old_grid, new_grid),
            "You reshaped the table straight to channels, rows and columns, so numbers of different channels are "
            "mixed. The channels stand last: make the grid two axes, then move the channels to the front.",
        ),
        (
            _along_a_line,
            "You interpolated along the list of positions, as if the patches stood in a line: the end of a row runs "
            "into the next one. Make it a grid first.",
        ),
    ],
)
def resize_positions(table, old_grid, new_grid):
    """Carry learned positions over to another grid: write ``resize_positions(table, old_grid, new_grid)``.

    Row 0 is CLS's and stays as it is. The others are the old grid, row by row: see them as a picture with e channels
    and resize it with ``F.interpolate`` (bicubic, ``align_corners=False``, no antialiasing).

    Args:
        table: ((1 + rows · columns) e).
        old_grid: (rows, columns) of the table.
        new_grid: (rows, columns) wanted.

    Returns:
        ((1 + new rows · new columns) e).
    """
    return positions.resize_positions(table, old_grid, new_grid)
