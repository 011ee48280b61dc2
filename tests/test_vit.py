"""vit.py: patches against unfold and convolution, the transformer by its properties, rollout against a loop."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mha_lessons.data import load_digits
from mha_lessons.vit import (
    PatchEmbedding,
    VisionTransformer,
    attention_rollout,
    patchify,
    shift_by_a_pixel,
    train_on_pictures,
    unpatchify,
)
from tests.agree import assert_agree, randn

bounded = settings(max_examples=25)
sizes = {
    "b": st.integers(1, 3),
    "c": st.integers(1, 4),
    "rows": st.integers(1, 4),
    "columns": st.integers(1, 4),
    "p": st.integers(1, 4),
    "seed": st.integers(0, 99),
}


@bounded
@given(**sizes)
def test_patchify_agrees_with_unfold_and_back(b, c, rows, columns, p, seed):
    images = randn(b, c, rows * p, columns * p, seed=seed)
    patches = patchify(images, p)
    assert torch.equal(patches, nn.functional.unfold(images, p, stride=p).mT)
    assert torch.equal(unpatchify(patches, p, (rows, columns)), images)


def test_c40_a_patch_holds_its_own_pixels_alone():
    owner = torch.arange(6).reshape(1, 1, 2, 3).repeat_interleave(4, 2).repeat_interleave(4, 3).expand(2, 3, 8, 12)
    assert (patchify(owner, 4) == torch.arange(6)[:, None]).all()


def test_c40_channels_come_first_in_a_patch():
    images = torch.arange(12).reshape(1, 3, 2, 2)
    assert patchify(images, 2).tolist() == [[list(range(12))]]


@bounded
@given(**sizes)
def test_patch_embedding_is_a_strided_convolution(b, c, rows, columns, p, seed):
    images = randn(b, c, rows * p, columns * p, seed=seed)
    module = PatchEmbedding((rows * p, columns * p), p, c, 5).double()
    kernel = module.proj.weight.view(5, c, p, p)
    assert_agree(module(images), nn.functional.conv2d(images, kernel, module.proj.bias, stride=p).flatten(2).mT)
    assert module.grid == (rows, columns)


def test_a_single_number_is_a_square_picture():
    for size in (8, np.int64(8)):
        assert repr(PatchEmbedding(size, 2, 3, 5).image_size) == "(8, 8)"


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ((1, 3, 220, 224), "H is 220 and patch_size is 16: 220 / 16 leaves 12 pixels over"),
        ((1, 3, 224, 220), "W is 220 and patch_size is 16: 220 / 16 leaves 12 pixels over"),
        ((1, 3, 220, 224), "such as 224"),
        ((1, 224, 224, 3), "channels seem to stand last: use images.permute(0, 3, 1, 2)"),
    ],
)
def test_patches_that_do_not_fit_are_refused(shape, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        patchify(torch.zeros(shape), 16)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: patchify(torch.zeros(3, 8, 8), 4), ValueError, "(3, 8, 8)"),
        (lambda: patchify([[0.0]], 4), TypeError, "list"),
        (lambda: patchify(torch.zeros(1, 3, 8, 8), 0), ValueError, "patch_size is 0"),
        (lambda: patchify(torch.zeros(1, 3, 8, 8), 4.0), TypeError, "patch_size is 4.0"),
        (lambda: unpatchify(torch.zeros(1, 6, 12), 2, (2, 2)), ValueError, "6 patches and the grid is 2 x 2 = 4"),
        (lambda: unpatchify(torch.zeros(1, 6, 12), 2, (-2, -3)), ValueError, "-2"),
        (lambda: unpatchify(torch.zeros(1, 6, 10), 2, (2, 3)), ValueError, "10 numbers and patch_size is 2"),
        (lambda: unpatchify(torch.zeros(1, 6, 12), 0, (2, 3)), ValueError, "patch_size is 0"),
        (lambda: unpatchify(torch.zeros(1, 6, 12), True, (2, 3)), TypeError, "patch_size is True"),
        (lambda: unpatchify(torch.zeros(1, 6, 12), 2, 6), TypeError, "grid is 6; expected two ints, the height"),
        (lambda: unpatchify(torch.zeros(1, 6, 12), 2, (2.0, 3)), TypeError, "a side of grid is 2.0"),
        (lambda: unpatchify(torch.zeros(1, 6, 12), 2, "23"), TypeError, "a side of grid is '2'"),
        (lambda: small_vit(num_layers=-1), ValueError, "num_layers is -1"),
        (lambda: small_vit(num_classes=-1), ValueError, "num_classes is -1"),
        (lambda: PatchEmbedding(220, 16, 3, 8), ValueError, "220 / 16 leaves 12 pixels over"),
        (lambda: PatchEmbedding((32, 20), 16, 3, 8), ValueError, "W is 20"),
        (lambda: PatchEmbedding(0, 16, 3, 8), ValueError, "a side of image_size is 0"),
        (lambda: PatchEmbedding(8.0, 2, 3, 8), TypeError, "image_size is 8.0; expected two ints"),
        (lambda: PatchEmbedding((8, 8, 3), 2, 3, 8), ValueError, "image_size is (8, 8, 3); expected two ints"),
        (lambda: PatchEmbedding(16, 16, 0, 8), ValueError, "channels is 0"),
        (lambda: PatchEmbedding(8, 4, 3, 5)(torch.zeros(1, 3, 8, 12)), ValueError, "(1, 3, 8, 12); expected (b c H W)"),
        (lambda: PatchEmbedding(8, 4, 3, 5)(torch.zeros(1, 8, 8, 3)), ValueError, "permute(0, 3, 1, 2)"),
        (lambda: PatchEmbedding(8, 4, 1, 5)(torch.zeros(1, 1, 8, 8).byte()), TypeError, "torch.uint8"),
        (lambda: attention_rollout([]), ValueError, "no layer"),
        (lambda: attention_rollout([torch.zeros(2, 0, 4, 4)]), ValueError, "number of heads of layer 0 is 0"),
        (lambda: attention_rollout([torch.ones(2, 1, 4, 4).long()]), TypeError, "layer 0 are torch.int64"),
        (
            lambda: attention_rollout([torch.zeros(2, 1, 4, 4), torch.zeros(2, 1, 4, 4).double()]),
            TypeError,
            "layer 1 are torch.float64",
        ),
        (lambda: attention_rollout([torch.zeros(2, 4, 4)]), ValueError, "layer 0 has shape (2, 4, 4)"),
        (lambda: attention_rollout([torch.zeros(2, 1, 4, 3)]), ValueError, "layer 0 has shape (2, 1, 4, 3)"),
        (
            lambda: attention_rollout([torch.zeros(2, 1, 4, 4), torch.zeros(1, 1, 4, 4)]),
            ValueError,
            "layer 1 has shape (1, 1, 4, 4)",
        ),
        (
            lambda: train_on_pictures(nn.Flatten(), torch.zeros(3, 1, 2, 2), torch.zeros(2)),
            ValueError,
            "3 images and 2 labels",
        ),
    ],
)
def test_what_cannot_be_is_refused(call, error, text):
    with pytest.raises(error, match=re.escape(text)):
        call()


def small_vit(**options):
    sizes = {"image_size": (6, 4), "patch_size": 2, "channels": 3, "num_classes": 5, "d_model": 8, "num_heads": 2}
    return VisionTransformer(**(sizes | {"num_layers": 2} | options)).double().eval()


def test_the_forward_pass_written_out():
    model, images = small_vit(), randn(3, 3, 6, 4, seed=0)
    nn.init.normal_(model.cls)
    x = torch.cat([model.cls.expand(3, 1, 8), model.patches(images)], dim=1) + model.positions
    for block in model.blocks:
        x, _ = block(x)
    logits, weights = model(images, return_weights=True)
    assert_agree(logits, model.head(model.norm(x))[:, 0])
    assert torch.equal(model(images), logits)
    assert [layer.shape for layer in weights] == [(3, 2, 7, 7)] * 2
    assert not (weights[0] == weights[1]).all()


def test_weights_tell_where_cls_looked():
    model, images = small_vit(), randn(1, 3, 6, 4, seed=0)
    block = model.blocks[0]
    x = torch.cat([model.cls.expand(1, 1, 8), model.patches(images)], dim=1) + model.positions
    assert_agree(model(images, return_weights=True)[1][0], block.attention(block.norm_1(x))[1])


def test_without_positions_patches_may_be_shuffled():
    model, images = small_vit(), randn(2, 3, 6, 4, seed=0)
    order = torch.tensor([4, 2, 0, 5, 1, 3])
    shuffled = unpatchify(patchify(images, 2)[:, order], 2, (3, 2))
    assert (model(images) - model(shuffled)).abs().max() > 1e-6
    nn.init.zeros_(model.positions)
    assert_agree(model(images), model(shuffled))


def test_vit_hands_its_options_on():
    model = small_vit(mlp_ratio=3, dropout=0.5)
    assert model.blocks[1].mlp[0].out_features == 24
    assert (model.blocks[1].attention.dropout, model.blocks[1].dropout.p, model.dropout.p) == (0.5, 0.5, 0.5)
    assert small_vit().blocks[0].mlp[0].out_features == 16
    assert model.positions.shape == (7, 8)


def test_dropout_is_for_training_alone():
    model, images = small_vit(dropout=0.5), randn(2, 3, 6, 4, seed=0)
    assert torch.equal(model(images), model(images))
    model.train()
    assert not torch.equal(model(images), model(images))


def rollout_by_loops(weights):
    """Each output's recipe, carried from the first layer to the last."""
    b, _, n, _ = weights[0].shape
    made_of = torch.eye(n, dtype=torch.float64).expand(b, n, n).clone()
    for layer in weights:
        after = torch.zeros_like(made_of)
        for item in range(b):
            for i in range(n):
                for j in range(n):
                    share = layer[item, :, i, j].mean() / 2 + (0.5 if i == j else 0)
                    after[item, i] += share * made_of[item, j]
        made_of = after
    return made_of


@settings(max_examples=10)
@given(b=st.integers(1, 2), h=st.integers(1, 3), n=st.integers(1, 4), layers=st.integers(1, 3), seed=st.integers(0, 99))
def test_rollout_carries_shares_through_the_layers(b, h, n, layers, seed):
    weights = list(randn(layers, b, h, n, n, seed=seed).softmax(-1))
    out = attention_rollout(weights)
    assert_agree(out, rollout_by_loops(weights))
    assert_agree(out.sum(-1), torch.ones(b, n, dtype=torch.float64))


def test_rollout_lets_the_first_layer_act_first():
    first, second = torch.eye(3).roll(1, 0)[None, None].double(), torch.eye(3).double()[None, None].clone()
    second[0, 0, 2] = torch.tensor([1.0, 0, 0])
    both = attention_rollout([first, second])[0]
    assert_agree(both, (second[0, 0] + torch.eye(3)) / 2 @ (first[0, 0] + torch.eye(3)) / 2)
    assert not torch.allclose(both, attention_rollout([second, first])[0])


def test_shift_moves_a_picture_by_at_most_a_pixel_and_keeps_its_channels():
    images = torch.zeros(200, 2, 5, 4)
    images[:, 0, 2, 1], images[:, 1, 2, 1] = 1.0, 2.0
    out = shift_by_a_pixel(images, torch.Generator().manual_seed(0))
    assert torch.equal(out[:, 0] * 2, out[:, 1])
    item, row, column = (out[:, 0] == 1).nonzero(as_tuple=True)
    assert item.tolist() == list(range(200))
    assert set(zip(row.tolist(), column.tolist(), strict=True)) == {(y, x) for y in (1, 2, 3) for x in (0, 1, 2)}


def test_shift_lets_nothing_come_round():
    out = shift_by_a_pixel(torch.ones(50, 1, 3, 3), torch.Generator().manual_seed(0))
    assert set(out.sum((1, 2, 3)).tolist()) == {9.0, 6.0, 4.0}


def test_the_same_seed_trains_the_same_model():
    images, labels = load_digits("train")
    finals = []
    for _ in range(2):
        torch.manual_seed(0)
        model = VisionTransformer(
            image_size=8, patch_size=4, channels=1, num_classes=10, d_model=16, num_heads=2, num_layers=1, dropout=0.1
        )
        losses = train_on_pictures(model, images[:64], labels[:64], epochs=3, seed=1)
        assert len(losses) == 6
        finals.append(model(images[:4]))
    assert torch.equal(*finals)


def test_a_vit_learns_the_digits():
    """A short training; the whole one is measured by tests/bench/digits.py."""
    images, labels = load_digits("train")
    model = VisionTransformer(
        image_size=8, patch_size=4, channels=1, num_classes=10, d_model=32, num_heads=4, num_layers=2
    )
    train_on_pictures(model, images, labels, epochs=8)
    images, labels = load_digits("validation")
    assert (model(images).argmax(-1) == labels).float().mean() > 0.85
