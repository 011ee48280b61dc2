"""The real data of the lessons: digits, photographs, and what two pretrained models learned.

Every file lies in the checkout's ``data/`` folder, whose README gives source, licence and shapes. A file's
sha256 is compared with the table below before it is decoded: a lesson never runs on a damaged file.
"""

import hashlib
import io
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

FOLDER = Path(__file__).resolve().parent.parent / "data"

SHA256 = {
    "digits.npz": "b2dab7b501728c22e9119ad76740b2e17c77a231e42d1e592380d90886f1a05e",
    "digits_results.json": "b53cb8e9e1b76f3118beabc7d2ee91a6e666bbd0c72fb5217eca1a7059d311bd",
    "extrapolation_results.json": "dfa9474bd102cde7d626beeb34a9009a37624f546c022edab3ff94d784a98e19",
    "minilm_int8.npz": "fa782180969c0e2da013dd48b0b4a7085ba76dd7d9d10bbc7ad2aee08a52a699",
    "minilm_vocab.txt": "04332de50cb467423bfd623703c8c05e830a57a2f325cda835a29bef7626655f",
    "photo_astronaut.png": "9ba8815c2b9bff870af8d6773cc33bb71b2336910b83c3e848920b44e645e107",
    "photo_chelsea.png": "408745e575e3a966558d0ecdb8c076141cbdd26d4b3bf49112a1836e9e109940",
    "photo_coffee.png": "1d63efba8e0e1129d7c2b4188bba2b5a0b7b1580ff699b927860032498cc223c",
    "photo_rocket.png": "1fec8b0c647807cbb586107b9b306d26c34ea24266397227ee2da286b1eb27b7",
    "vit_attention.npz": "7618813897cf10e53ff41ad39e039c5f30b95c710fb40b36b98be7268276843e",
}

PHOTOS = ("astronaut", "chelsea", "coffee", "rocket")

# Where each split begins and ends in one fixed shuffle of the 1797 digits.
DIGIT_SPLITS = {"train": (0, 1147), "validation": (1147, 1347), "test": (1347, 1797)}


def load_digits(split: str) -> tuple[Tensor, Tensor]:
    """Load one split of 1797 real handwritten digits.

    The order is ``numpy.random.default_rng(0).permutation(1797)``: its first 1147 are "train", the next 200
    "validation" and the last 450 "test". Choose settings on "validation", and report "test" once.

    Args:
        split: "train", "validation" or "test".

    Returns:
        images (n 1 8 8) float32 in [0, 1], and labels (n) int64 in 0..9.

    Raises:
        ValueError: there is no such split, or the file is damaged.
        FileNotFoundError: the file is missing.
    """
    if split not in DIGIT_SPLITS:
        raise ValueError(f"there is no split {split!r}; choose one of {', '.join(map(repr, DIGIT_SPLITS))}")
    first, end = DIGIT_SPLITS[split]
    arrays = _load_arrays("digits.npz")
    chosen = np.random.default_rng(0).permutation(len(arrays["labels"]))[first:end]
    images = torch.from_numpy(arrays["images"][chosen]).float().div(16)  # the file counts ink from 0 to 16
    return images[:, None], torch.from_numpy(arrays["labels"][chosen]).long()


def load_digits_results() -> dict[str, dict[str, list[float]]]:
    """Load what tests/bench/digits.py measured: models that read the digits, each trained with three seeds.

    Returns:
        for each model, by name, what was measured: a list with one share of the pictures for each seed.

    Raises:
        ValueError: the file is damaged.
        FileNotFoundError: the file is missing.
    """
    return json.loads(_read("digits_results.json"))["rows"]


def load_extrapolation_results() -> dict[str, dict[str, Tensor]]:
    """Load what tests/bench/extrapolation.py measured: each encoding, trained at n = 32, on longer texts.

    Returns:
        for each task, by name, and each encoding: accuracies (3 3), a row for each seed, at n = 32, 64 and 128.

    Raises:
        ValueError: the file is damaged.
        FileNotFoundError: the file is missing.
    """
    results: dict[str, dict[str, Tensor]] = {}
    for row in json.loads(_read("extrapolation_results.json"))["rows"]:
        results.setdefault(row["task"], {})[row["kind"]] = torch.tensor(row["accuracy"])
    return results


def load_photo(name: str) -> Tensor:
    """Load a real photograph.

    Args:
        name: one of ``PHOTOS``.

    Returns:
        (c H W) = (3 224 224) float32 in [0, 1], channels red, green, blue.

    Raises:
        ValueError: there is no such photo, or the file is damaged.
        FileNotFoundError: the file is missing.
    """
    if name not in PHOTOS:
        raise ValueError(f"there is no photo {name!r}; choose one of {', '.join(map(repr, PHOTOS))}")
    pixels = np.array(Image.open(io.BytesIO(_read(f"photo_{name}.png"))))
    return torch.from_numpy(pixels).permute(2, 0, 1).float().div(255)


@dataclass(frozen=True)
class ViTAttention:
    """What a pretrained ViT-S/14 attends to in the photos: 12 layers, 6 heads, CLS and 16 x 16 patches.

    Every row of weights sums to 1. Position 0 is CLS; patch (row, column) is position 1 + 16 row + column.

    Args:
        photos: the names of the photos, in the order of every first axis.
        cls: what CLS attends to, (photo layer h j) = (4 12 6 257).
        head_mean: the weights averaged over the heads, (photo layer i j) = (4 12 257 257).
        full_layers: the layers, counted from 0, that ``full`` holds.
        full: the weights of every head of those layers, (photo layer h i j) = (4 3 6 257 257).
    """

    photos: tuple[str, ...]
    cls: Tensor
    head_mean: Tensor
    full_layers: tuple[int, ...]
    full: Tensor


def load_vit_attention() -> ViTAttention:
    """Load the attention weights of a DINOv2-layout ViT-S/14 on the four photos (32 MB once decoded).

    Returns:
        the weights as float32; see ``ViTAttention``.

    Raises:
        ValueError: the file is damaged.
        FileNotFoundError: the file is missing.
    """
    arrays = _load_arrays("vit_attention.npz")

    def decode(name: str) -> Tensor:
        # The file keeps 255 √weight: a byte of that is fine enough for the many small weights of a row.
        return _rows_to_one(torch.from_numpy(arrays[name]).float().square())

    return ViTAttention(
        photos=tuple(arrays["photos"].tolist()),
        cls=_rows_to_one(torch.from_numpy(arrays["cls"]).float()),
        head_mean=decode("head_mean_sqrt_u8"),
        full_layers=tuple(arrays["full_layers"].tolist()),
        full=decode("full_sqrt_u8"),
    )


def load_minilm() -> tuple[dict[str, Tensor], list[str]]:
    """Load the weights and the vocabulary of all-MiniLM-L6-v2, a small pretrained language model.

    A matrix is stored as whole numbers from -127 to 127 and one scale a row; their product is returned.
    ``mha_lessons.pretrained.MiniLM`` runs the model.

    Returns:
        weights, float32 by their name in the model, and the 8000 pieces of the vocabulary: piece t belongs to
        row t of "embeddings.word_embeddings.weight".

    Raises:
        ValueError: a file is damaged.
        FileNotFoundError: a file is missing.
    """
    arrays = {name: torch.from_numpy(a) for name, a in _load_arrays("minilm_int8.npz").items()}
    weights = {name: a.float() for name, a in arrays.items() if not name.endswith(".scale")}
    for name in weights:
        if f"{name}.scale" in arrays:
            weights[name] *= arrays[f"{name}.scale"].float()
    return weights, _read("minilm_vocab.txt").decode("utf-8").split("\n")[:-1]


def _rows_to_one(weights: Tensor) -> Tensor:
    """Divide each row by its sum, which rounding has moved from 1."""
    return weights / weights.sum(-1, keepdim=True)


def _load_arrays(name: str) -> dict[str, np.ndarray]:
    """Read every array of an .npz file whose sha256 is right."""
    with np.load(io.BytesIO(_read(name)), allow_pickle=False) as arrays:
        return dict(arrays)


def _read(name: str) -> bytes:
    """Return a data file's bytes, or say what is wrong with it and how to restore it."""
    path = FOLDER / name
    restore = f"restore it with: git checkout -- data/{name}"
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        if not (FOLDER.parent / "pyproject.toml").is_file():
            restore = "the data comes with the repository: clone it and run `pip install -e .` in its folder"
        raise FileNotFoundError(f"{path} is missing (expected sha256 {SHA256[name]}); {restore}") from None
    found = hashlib.sha256(content).hexdigest()
    if found != SHA256[name]:
        raise ValueError(
            f"{path} is truncated or altered: its {len(content)} bytes have sha256 {found}; "
            f"expected {SHA256[name]}; {restore}"
        )
    return content
