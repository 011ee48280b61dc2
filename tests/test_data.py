"""The data files: whole, split as promised, decoded rightly, and honest about damage."""

import hashlib
import io
import re
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from torch.testing import assert_close

from mha_lessons import data
from tests.bench import digits as digits_bench
from tests.bench import extrapolation as extrapolation_bench

README = (data.FOLDER / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout with an empty data folder, to put damaged files into."""
    (tmp_path / "pyproject.toml").touch()
    folder = tmp_path / "data"
    folder.mkdir()
    monkeypatch.setattr(data, "FOLDER", folder)
    return folder


def test_readme_code_and_files_agree():
    listed = {name: sha for sha, name in re.findall(r"^    ([0-9a-f]{64})  (\S+)$", README, flags=re.MULTILINE)}
    found = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in data.FOLDER.iterdir()
        if path.name not in {"README.md", "readme.png", "LICENSE-Apache-2.0.txt"}
    }
    assert found == listed == data.SHA256


@pytest.mark.parametrize(
    ("split", "first", "end"), [("train", 0, 1147), ("validation", 1147, 1347), ("test", 1347, 1797)]
)
def test_digits_are_split_as_promised(split, first, end):
    with np.load(data.FOLDER / "digits.npz") as file:
        raw, names = file["images"], file["labels"]
    chosen = np.random.default_rng(0).permutation(1797)[first:end]
    images, labels = data.load_digits(split)
    assert images.shape == (end - first, 1, 8, 8)
    assert images.dtype == torch.float32
    assert labels.dtype == torch.int64
    assert images.min() == 0
    assert images.max() == 1
    assert_close(images[:, 0] * 16, torch.from_numpy(raw[chosen]).float())
    assert labels.tolist() == names[chosen].tolist()


def test_three_nearest_neighbours_name_the_digits():
    (train, train_labels), (more, more_labels) = data.load_digits("train"), data.load_digits("validation")
    test, labels = data.load_digits("test")
    distances = torch.cdist(test.flatten(1), torch.cat([train, more]).flatten(1))
    votes = torch.cat([train_labels, more_labels])[distances.topk(3, largest=False).indices]
    share = (votes.mode(dim=1).values == labels).double().mean().item()
    assert share == pytest.approx(0.991, abs=0.001)  # as data/README.md says


def test_stored_results_hold_every_row_and_seed():
    rows = data.load_digits_results()
    assert set(rows) == {*digits_bench.ROWS, digits_bench.NEIGHBOURS}
    for name, row in rows.items():
        assert {"validation", "test"} <= set(row)
        assert {len(shares) for shares in row.values()} == {1 if name == digits_bench.NEIGHBOURS else 3}
        assert all(0 <= share <= 1 for shares in row.values() for share in shares)
    # Without positions the order of the patches cannot matter.
    assert rows["ViT, no positions"]["test"] == rows["ViT, no positions"]["test, patches in reverse order"]


def test_stored_results_of_the_neighbours_are_measured_again():
    assert digits_bench.row(digits_bench.NEIGHBOURS) == data.load_digits_results()[digits_bench.NEIGHBOURS]


def test_unknown_split_names_the_three():
    with pytest.raises(ValueError, match=r"'dev'.*'train', 'validation', 'test'"):
        data.load_digits("dev")


@pytest.mark.parametrize("name", data.PHOTOS)
def test_photos_are_colour_first(name):
    photo = data.load_photo(name)
    assert photo.shape == (3, 224, 224)
    assert photo.dtype == torch.float32
    with Image.open(data.FOLDER / f"photo_{name}.png") as image:
        for row, column in ((190, 60), (3, 200), (120, 121)):
            pixel = torch.tensor(image.getpixel((column, row)))  # Pillow counts x first
            assert_close(photo[:, row, column] * 255, pixel.float())


def test_the_orange_suit_is_orange():
    red, green, blue = data.load_photo("astronaut")[:, 190, 60]
    assert red > 0.7
    assert blue < green < 0.4


def test_the_results_on_longer_texts_are_those_that_the_bench_makes():
    results = data.load_extrapolation_results()
    assert list(results) == list(extrapolation_bench.TASKS)
    for kinds in results.values():
        assert list(kinds) == list(extrapolation_bench.KINDS)
        for rates in kinds.values():
            assert rates.shape == (len(extrapolation_bench.SEEDS), len(extrapolation_bench.TESTED_AT))
    at_128 = {(task, kind): rates[:, -1] for task, kinds in results.items() for kind, rates in kinds.items()}
    assert at_128["recency", "ALiBi"].min() > 0.97  # as data/README.md says
    assert results["distance"]["ALiBi"].max() < 0.8
    assert max(at_128[task, kind].max() for task in results for kind in ("sinusoidal", "learned")) < 0.45


def test_the_tasks_of_the_bench_ask_what_they_say():
    for name, task in extrapolation_bench.TASKS.items():
        tokens, targets = task(torch.Generator().manual_seed(0), 20, b=3)
        for row, asked in zip(tokens.tolist(), targets.tolist(), strict=True):
            for place, target in enumerate(asked):
                letters = [token for token in row[:place] if token] if row[place] == 0 else []
                before = row[:place][-3:-2] if name == "distance" else letters[-1:]
                assert target == (before or [-100])[0]


def test_unknown_photo_names_the_four():
    with pytest.raises(ValueError, match=r"'cat'.*'astronaut', 'chelsea', 'coffee', 'rocket'"):
        data.load_photo("cat")


def test_vit_attention_is_decoded_consistently():
    vit = data.load_vit_attention()
    assert vit.photos == data.PHOTOS
    assert vit.full_layers == (0, 6, 11)
    assert vit.cls.shape == (4, 12, 6, 257)
    assert vit.head_mean.shape == (4, 12, 257, 257)
    assert vit.full.shape == (4, 3, 6, 257, 257)
    for weights in (vit.cls, vit.head_mean, vit.full):
        assert weights.dtype == torch.float32
        assert weights.min() >= 0
        assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
    # The three were stored apart: rows of CLS, head means and full weights must tell the same story.
    layers = list(vit.full_layers)
    assert_close(vit.full[..., 0, :], vit.cls[:, layers], atol=0.003, rtol=0)
    assert_close(vit.full.mean(2), vit.head_mean[:, layers], atol=0.003, rtol=0)


def test_minilm_is_dequantised_row_by_row():
    weights, vocabulary = data.load_minilm()
    assert len(vocabulary) == len(set(vocabulary)) == 8000
    assert vocabulary[:1] + vocabulary[100:104] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert vocabulary[-1] == "##ering"
    assert all(weight.dtype == torch.float32 for weight in weights.values())
    assert not any(name.endswith(".scale") for name in weights)
    assert sum(weight.numel() for weight in weights.values()) == 13_744_896
    with np.load(data.FOLDER / "minilm_int8.npz") as file:
        for name in ("embeddings.word_embeddings.weight", "encoder.layer.5.intermediate.dense.weight"):
            scale = file[f"{name}.scale"].astype(np.float32)
            assert np.array_equal(weights[name].numpy(), file[name].astype(np.float32) * scale)


def test_missing_file_says_how_to_restore_it(checkout):
    with pytest.raises(FileNotFoundError, match=r"digits\.npz is missing.*b2dab7.*git checkout -- data/digits\.npz"):
        data.load_digits("test")


def test_without_a_checkout_the_error_says_to_clone(checkout):
    (checkout.parent / "pyproject.toml").unlink()
    with pytest.raises(FileNotFoundError, match=r"digits\.npz is missing.*clone it and run `pip install -e \.`"):
        data.load_digits("test")
    checkout.rmdir()
    with pytest.raises(FileNotFoundError, match="clone it"):
        data.load_minilm()


@pytest.mark.parametrize(
    ("name", "load"),
    [
        ("digits.npz", lambda: data.load_digits("train")),
        ("digits_results.json", data.load_digits_results),
        ("extrapolation_results.json", data.load_extrapolation_results),
        ("photo_rocket.png", lambda: data.load_photo("rocket")),
        ("vit_attention.npz", data.load_vit_attention),
        ("minilm_int8.npz", data.load_minilm),
        ("minilm_vocab.txt", data.load_minilm),
    ],
)
@pytest.mark.parametrize("damage", ["truncated", "altered", "empty"])
def test_damaged_file_is_refused(checkout, name, load, damage):
    for whole in ("minilm_int8.npz", name):
        shutil.copy(data.__file__.replace("mha_lessons", "data").replace("data.py", whole), checkout)
    content = (checkout / name).read_bytes()
    middle = len(content) // 2
    altered = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    (checkout / name).write_bytes({"truncated": content[:-1], "altered": altered, "empty": b""}[damage])
    with pytest.raises(ValueError, match=rf"{name} is truncated or altered.*{data.SHA256[name]}") as error:
        load()
    assert f"git checkout -- data/{name}" in str(error.value)


def test_pickled_objects_are_never_loaded(checkout, monkeypatch):
    stream = io.BytesIO()
    np.savez(stream, images=np.array([{}], dtype=object), labels=np.zeros(1))
    (checkout / "digits.npz").write_bytes(stream.getvalue())
    monkeypatch.setitem(data.SHA256, "digits.npz", hashlib.sha256(stream.getvalue()).hexdigest())
    with pytest.raises(ValueError, match="allow_pickle=False"):
        data.load_digits("train")
