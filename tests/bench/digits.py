"""How well the digits' ViT reads, and what its parts are worth: `python -m tests.bench.digits` prints a JSON table.

Every row is a model trained with three seeds by ``train_on_pictures``. The settings were chosen on "validation";
"test" is only reported. One thread, so that the seconds are those of one core.
"""

import json
import sys
import time

import torch

from mha_lessons.data import load_digits
from mha_lessons.vit import VisionTransformer, patchify, train_on_pictures, unpatchify

SEEDS = (0, 1, 2)
SIZES = {"patch_size": 4, "num_heads": 4, "num_layers": 2}
VARIANTS = {
    "the ViT": {},
    "one head": {"num_heads": 1},
    "one layer": {"num_layers": 1},
    "no positions": {},
    "patch 2": {"patch_size": 2},
}


def without_positions(model: VisionTransformer) -> None:
    torch.nn.init.zeros_(model.positions)
    model.positions.requires_grad_(False)


def turned_round(images: torch.Tensor, patch_size: int) -> torch.Tensor:
    """The same patches of every picture, in reverse order: none stays in its place."""
    patches, side = patchify(images, patch_size), images.shape[-1] // patch_size
    return unpatchify(patches.flip(1), patch_size, (side, side))


@torch.no_grad()
def accuracy(model: VisionTransformer, images: torch.Tensor, labels: torch.Tensor) -> float:
    return round((model(images).argmax(-1) == labels).float().mean().item(), 4)


def measure(name: str, seed: int) -> dict[str, float]:
    torch.manual_seed(seed)
    sizes = SIZES | VARIANTS[name]
    model = VisionTransformer(image_size=8, channels=1, num_classes=10, d_model=64, **sizes)
    if name == "no positions":
        without_positions(model)
    began = time.process_time()
    train_on_pictures(model, *load_digits("train"), seed=seed)
    seconds = round(time.process_time() - began, 1)
    images, labels = load_digits("test")
    return {
        "validation": accuracy(model, *load_digits("validation")),
        "test": accuracy(model, images, labels),
        "test, patches in reverse order": accuracy(model, turned_round(images, sizes["patch_size"]), labels),
        "seconds": seconds,
    }


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    print(json.dumps({name: [measure(name, seed) for seed in SEEDS] for name in names or VARIANTS}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
