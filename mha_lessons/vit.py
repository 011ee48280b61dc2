"""From a picture to a sentence of patches, and the transformer that reads it."""

from collections.abc import Callable, Iterable, Sequence
from numbers import Integral

import einops
import torch
from torch import nn

from mha_lessons.positions import check_grid
from mha_lessons.shapes import check_count, check_shape
from mha_lessons.transformer import Block, train


def patchify(images: torch.Tensor, patch_size: int) -> torch.Tensor:
    """Cut pictures into square patches, row by row, and lay each patch flat: channels first, then rows, then columns.

    Args:
        images: (b c H W).
        patch_size: side p of a patch in pixels; must divide H and W.

    Returns:
        (b n (c p p)) with n = H/p · W/p.

    Raises:
        TypeError: images are no tensor.
        ValueError: not four axes, or the patches do not fit: a strided convolution would drop the rest in silence.

    Source: Dosovitskiy et al.: An Image is Worth 16x16 Words (2021), section 3.1.
    Oracle: ``F.unfold(images, p, stride=p).mT``.
    """
    size = check_shape(images, "b c H W", name="images")
    _check_fits(size["H"], size["W"], patch_size, _hint_if_channels_last(images))
    return einops.rearrange(images, "b c (y p1) (x p2) -> b (y x) (c p1 p2)", p1=patch_size, p2=patch_size)


def unpatchify(patches: torch.Tensor, patch_size: int, grid: tuple[int, int]) -> torch.Tensor:
    """Put flat patches back together: the inverse of ``patchify``.

    Args:
        patches: (b n (c p p)).
        patch_size: side p of a patch in pixels.
        grid: (rows, columns) of patches.

    Returns:
        (b c H W) = (b, c, rows · p, columns · p).

    Raises:
        TypeError: patches are no tensor, grid is no pair, or a size no int.
        ValueError: a size is less than 1, n is not rows · columns, or a patch is not c · p · p numbers long.
    """
    size = check_shape(patches, "b n length", name="patches")
    rows, columns = check_grid(grid, "grid")
    check_count(patch_size, "patch_size", least=1)
    if rows * columns != size["n"]:
        raise ValueError(f"there are {size['n']} patches and the grid is {rows} x {columns} = {rows * columns}")
    if size["length"] % patch_size**2:
        raise ValueError(
            f"a patch holds {size['length']} numbers and patch_size is {patch_size}; "
            f"expected a multiple of {patch_size} · {patch_size}, one square for each channel"
        )
    p = patch_size
    return einops.rearrange(patches, "b (y x) (c p1 p2) -> b c (y p1) (x p2)", y=rows, x=columns, p1=p, p2=p)


def _check_fits(height: int, width: int, patch_size: int, hint: str = "") -> None:
    check_count(patch_size, "patch_size", least=1)
    for name, pixels in (("H", height), ("W", width)):
        if left_over := pixels % patch_size:
            raise ValueError(
                f"{name} is {pixels} and patch_size is {patch_size}: {pixels} / {patch_size} leaves {left_over} "
                f"pixels over. Crop or resize to a multiple of it, such as {pixels - left_over + patch_size}{hint}"
            )


def _hint_if_channels_last(images: torch.Tensor) -> str:
    last = images.shape[-1] <= 4 < images.shape[1]
    return "; channels seem to stand last: use images.permute(0, 3, 1, 2)" if last else ""


class PatchEmbedding(nn.Module):
    """Each patch, laid flat, through one linear map.

    It equals a convolution with stride p whose kernel is ``proj.weight`` seen as (e c p p).

    Args:
        image_size: side of a square picture in pixels, or (H, W).
        patch_size: side p of a patch in pixels; must divide H and W.
        channels: c.
        d_model: width e.

    Attributes:
        grid: (rows, columns) of patches. proj: ``nn.Linear``, (c p p) -> e.

    Raises:
        TypeError: a size is no int.
        ValueError: a size is less than 1, or the patches do not fit.

    Source: Dosovitskiy et al.: An Image is Worth 16x16 Words (2021), equation 1.
    Oracle: ``F.conv2d(images, proj.weight.view(e, c, p, p), proj.bias, stride=p).flatten(2).mT``.
    """

    def __init__(self, image_size: int | tuple[int, int], patch_size: int, channels: int, d_model: int) -> None:
        super().__init__()
        square = isinstance(image_size, Integral)
        height, width = check_grid((image_size, image_size) if square else image_size, "image_size")
        for name, value in (("channels", channels), ("d_model", d_model)):
            check_count(value, name, least=1)
        _check_fits(height, width, patch_size)
        self.image_size, self.patch_size, self.channels = (height, width), patch_size, channels
        self.grid = (height // patch_size, width // patch_size)
        self.proj = nn.Linear(channels * patch_size**2, d_model)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Cut and project.

        Args:
            images: (b c H W), of the dtype of ``proj``.

        Returns:
            (b n e), patches row by row.

        Raises:
            TypeError: images are no tensor, or of another dtype.
            ValueError: images are not of the size this layer was made for.
        """
        check_shape(images, "b c H W", name="images")
        if tuple(images.shape[1:]) != (self.channels, *self.image_size):
            raise ValueError(
                f"images have shape {tuple(images.shape)}; expected (b c H W) = (b, {self.channels}, "
                f"{self.image_size[0]}, {self.image_size[1]}){_hint_if_channels_last(images)}"
            )
        if images.dtype != (expected := self.proj.weight.dtype):
            raise TypeError(f"images are {images.dtype} and the layer is {expected}: use images.to({expected})")
        return self.proj(patchify(images, self.patch_size))


class VisionTransformer(nn.Module):
    """A picture as a sentence: patches and one extra token, CLS, whose last state names the class.

    Args:
        image_size: side of a square picture in pixels, or (H, W).
        patch_size: side of a patch in pixels; must divide H and W.
        channels: c.
        num_classes: how many classes.
        d_model: width e.
        num_heads: heads h of each layer.
        num_layers: number of blocks.
        mlp_ratio: width of each MLP's hidden layer over d_model.
        dropout: chance to drop a weight, or an entry of what a block adds, while training.

    Attributes:
        patches: ``PatchEmbedding``. cls: (e). positions: (1 + n, e), CLS first. blocks, norm, head.

    Raises:
        TypeError: a size is no int.
        ValueError: a size is less than 1, or ``PatchEmbedding`` or ``Block`` refuses it.

    Source: Dosovitskiy et al.: An Image is Worth 16x16 Words (2021), equations 1-4.
    """

    def __init__(
        self,
        *,
        image_size: int | tuple[int, int],
        patch_size: int,
        channels: int,
        num_classes: int,
        d_model: int,
        num_heads: int,
        num_layers: int,
        mlp_ratio: float = 2,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_count(num_classes, "num_classes", least=1)
        check_count(num_layers, "num_layers", least=1)
        self.patches = PatchEmbedding(image_size, patch_size, channels, d_model)
        rows, columns = self.patches.grid
        self.cls = nn.Parameter(torch.zeros(d_model))
        # A spread of .2 tells the patches apart from the first step on; .02 is for long training.
        self.positions = nn.Parameter(0.2 * torch.randn(1 + rows * columns, d_model))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(d_model, num_heads, mlp_ratio=mlp_ratio, dropout=dropout) for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, num_classes)

    def forward(
        self, images: torch.Tensor, *, return_weights: bool = False
    ) -> torch.Tensor | tuple[torch.Tensor, list[torch.Tensor]]:
        """Score the classes.

        Args:
            images: (b c H W).
            return_weights: return the weights too.

        Returns:
            logits (b classes); with ``return_weights`` also a list of weights (b h n n), one for each layer,
            where position 0 is CLS.

        Raises:
            TypeError, ValueError: as ``PatchEmbedding.forward``.
        """
        patches = self.patches(images)
        cls = self.cls.expand(len(images), 1, -1)
        x = self.dropout(torch.cat([cls, patches], dim=1) + self.positions)
        weights = []
        for block in self.blocks:
            x, seen = block(x)
            weights.append(seen)
        logits = self.head(self.norm(x[:, 0]))
        return (logits, weights) if return_weights else logits


def attention_rollout(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Follow attention through all layers: how much of each input position each output position is made of.

    A layer passes on half of what it saw and half of what it had (the residual): Â = (A + I) / 2, with A the
    mean over the heads. The whole way is Â_L ... Â_2 Â_1: the first layer acts first, so it stands on the right.

    Args:
        weights: (b h n n) of each layer, first to last; a row is a query.

    Returns:
        (b n n), rows that sum to 1.

    Raises:
        TypeError: a layer's weights are no floating-point tensor, or of another dtype than the first's.
        ValueError: no layers came, their shapes are not (b h n n) with one b and n, or a layer has no head.

    Source: Abnar and Zuidema: Quantifying Attention Flow in Transformers (2020), section 3.
    """
    if len(weights) == 0:
        raise ValueError("weights hold no layer; expected (b h n n) for each layer, first to last")
    n = check_shape(weights[0], "b h n n", name="weights of layer 0")["n"]
    rollout = torch.eye(n).to(weights[0])
    for number, layer in enumerate(weights):
        size = check_shape(layer, "b h i j", name=f"weights of layer {number}", b=len(weights[0]), i=n, j=n)
        if not layer.dtype.is_floating_point or layer.dtype != rollout.dtype:
            raise TypeError(f"weights of layer {number} are {layer.dtype}; expected one floating-point dtype for all")
        check_count(size["h"], f"the number of heads of layer {number}", least=1)
        rollout = (layer.mean(dim=1) + torch.eye(n).to(layer)) / 2 @ rollout
    return rollout


def shift_by_a_pixel(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Move each picture by -1, 0 or 1 pixel down and across; what comes in at the edge is 0.

    Args:
        images: (b c H W).
        generator: where the random numbers come from.

    Returns:
        (b c H W).
    """
    size = check_shape(images, "b c H W", name="images")
    down, across = torch.randint(3, (2, size["b"]), generator=generator)
    places = nn.functional.pad(images, (1, 1, 1, 1)).unfold(2, size["H"], 1).unfold(3, size["W"], 1)  # b c 3 3 H W
    return places[torch.arange(size["b"]), :, down, across]


def train_on_pictures(
    model: nn.Module,
    images: torch.Tensor,
    labels: torch.Tensor,
    *,
    epochs: int = 40,
    batch_size: int = 32,
    seed: int = 0,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> list[float]:
    """Teach a model to name pictures, each shifted by a pixel when it is drawn. The settings suit the digits.

    Args:
        model: images (b c H W) -> logits (b classes); changed in place, and left in evaluation mode.
        images: (n c H W).
        labels: (n) int64.
        epochs: how often each picture is drawn, on average.
        batch_size: pictures in a batch.
        seed, progress: as in ``train``.

    Returns:
        the loss of each step.

    Raises:
        ValueError: there is not one label for each picture, or as ``train``.
    """
    if len(images) != len(labels):
        raise ValueError(f"there are {len(images)} images and {len(labels)} labels; expected one for each")

    def draw(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.randint(len(images), (batch_size,), generator=generator)
        return shift_by_a_pixel(images[chosen], generator), labels[chosen]

    return train(
        model,
        draw,
        nn.functional.cross_entropy,
        steps=epochs * len(images) // batch_size,
        lr=3e-3,
        weight_decay=0.1,
        warmup=0.2,
        seed=seed,
        progress=progress,
    )
