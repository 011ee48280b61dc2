"""How well the digits' ViT reads, what its parts are worth, and whether attention tells which patches matter.

`python -m tests.bench.digits > data/digits_results.json` makes the table that lesson 6 shows, in about four minutes;
names of rows after the command measure these alone. Each row is a model trained with three seeds. The settings were
chosen on "validation"; "test" is only reported. One thread, so the same machine gives the same file; the seconds,
those of one core, go to stderr.
"""

import functools
import json
import sys
import time

import torch
from torch import nn

from mha_lessons.data import load_digits
from mha_lessons.transformer import train
from mha_lessons.vit import VisionTransformer, attention_rollout, patchify, train_on_pictures, unpatchify

COMMAND = "python -m tests.bench.digits > data/digits_results.json"
SEEDS = (0, 1, 2)


def vit(patch_size: int = 4, num_heads: int = 4, num_layers: int = 2) -> VisionTransformer:
    sizes = {"patch_size": patch_size, "num_heads": num_heads, "num_layers": num_layers}
    return VisionTransformer(image_size=8, channels=1, num_classes=10, d_model=64, **sizes)


def vit_without_positions() -> VisionTransformer:
    model = vit()
    nn.init.zeros_(model.positions)
    model.positions.requires_grad_(False)
    return model


def logistic_regression() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def train_without_shifts(
    model: nn.Module, images: torch.Tensor, labels: torch.Tensor, *, lr: float, seed: int
) -> list[float]:
    """As many pictures as ``train_on_pictures`` draws, each where it stands."""

    def draw(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.randint(len(images), (32,), generator=generator)
        return images[chosen], labels[chosen]

    return train(model, draw, nn.functional.cross_entropy, steps=40 * len(images) // 32, lr=lr, seed=seed)


# Each row: what makes the model, and how it is trained. On "validation" the last two do better without shifts.
ROWS = {
    "ViT": (vit, train_on_pictures),
    "ViT, one head": (functools.partial(vit, num_heads=1), train_on_pictures),
    "ViT, one layer": (functools.partial(vit, num_layers=1), train_on_pictures),
    "ViT, no positions": (vit_without_positions, train_on_pictures),
    "ViT, patch 2": (functools.partial(vit, patch_size=2), train_on_pictures),
    "ViT, no shifts": (vit, functools.partial(train_without_shifts, lr=3e-3)),
    "logistic regression": (logistic_regression, functools.partial(train_without_shifts, lr=1e-2)),
    "MLP 64-128-10": (mlp, functools.partial(train_without_shifts, lr=1e-2)),
}
NEIGHBOURS = "3 nearest neighbours"


def turned_round(images: torch.Tensor, patch_size: int) -> torch.Tensor:
    """The same patches of every picture, in reverse order: none stays in its place."""
    patches, side = patchify(images, patch_size), images.shape[-1] // patch_size
    return unpatchify(patches.flip(1), patch_size, (side, side))


def hidden(images: torch.Tensor, patch_size: int, ranks: torch.Tensor) -> torch.Tensor:
    """The pictures with the quarter of their patches that ranks (b n) put highest painted blank."""
    patches, side = patchify(images, patch_size), images.shape[-1] // patch_size
    chosen = ranks.topk(ranks.shape[1] // 4).indices
    blank = patches.scatter(1, chosen[..., None].expand(-1, -1, patches.shape[-1]), 0.0)
    return unpatchify(blank, patch_size, (side, side))


def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    return round((model(images).argmax(-1) == labels).double().mean().item(), 4)


def occlusion(model: VisionTransformer, images: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """The accuracy that is left when a quarter of the patches is hidden, by what chose them."""
    patch_size = model.patches.patch_size
    _, weights = model(images, return_weights=True)
    last, rolled = weights[-1].mean(1)[:, 0, 1:], attention_rollout(weights)[:, 0, 1:]
    generator = torch.Generator().manual_seed(0)
    by = {"most attended": last, "least attended": -last, "highest rollout": rolled, "lowest rollout": -rolled}
    by |= {"most ink": patchify(images, patch_size).sum(-1)}
    left = {name: accuracy(model, hidden(images, patch_size, ranks), labels) for name, ranks in by.items()}
    draws = [torch.rand(last.shape, generator=generator) for _ in range(20)]
    random = [accuracy(model, hidden(images, patch_size, ranks), labels) for ranks in draws]
    return left | {"random": round(sum(random) / len(random), 4)}


@torch.no_grad()
def measured(model: nn.Module) -> dict[str, float]:
    images, labels = load_digits("test")
    found = {"validation": accuracy(model, *load_digits("validation")), "test": accuracy(model, images, labels)}
    if isinstance(model, VisionTransformer):
        found["test, patches in reverse order"] = accuracy(
            model, turned_round(images, model.patches.patch_size), labels
        )
        left = occlusion(model, images, labels)
        found |= {f"test, hidden: {name}": share for name, share in left.items()}
    return found


def nearest_neighbours(images: torch.Tensor) -> torch.Tensor:
    """The votes for each digit (b 10) of the three training pictures that are nearest."""
    train_images, train_labels = load_digits("train")
    distances = torch.cdist(images.flatten(1).double(), train_images.flatten(1).double())
    votes = train_labels[distances.topk(3, largest=False).indices]
    return nn.functional.one_hot(votes, 10).sum(1)


def row(name: str) -> dict[str, list[float]]:
    """What was measured, each a list with one number for each seed."""
    if name == NEIGHBOURS:
        return {what: [share] for what, share in measured(nearest_neighbours).items()}
    make, teach = ROWS[name]
    found = []
    for seed in SEEDS:
        torch.manual_seed(seed)
        model = make()
        began = time.process_time()
        teach(model, *load_digits("train"), seed=seed)
        print(f"{name}, seed {seed}: {time.process_time() - began:.1f} s", file=sys.stderr, flush=True)
        found.append(measured(model))
    return {what: [one[what] for one in found] for what in found[0]}


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    rows = {name: row(name) for name in names or [*ROWS, NEIGHBOURS]}
    print(json.dumps({"command": COMMAND, "seeds": SEEDS, "rows": rows}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
