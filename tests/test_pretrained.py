"""The pretrained model, against PyTorch's own layers and against what data/README.md says was measured."""

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from mha_lessons import data
from mha_lessons.pretrained import MiniLM

TIRED = "The animal didn't cross the street because it was too tired"
WIDE = "The animal didn't cross the street because it was too wide"
SWAPPED = "The street was not crossed by the animal because it was too tired"

# The roles in data/README.md are means over these. Every word is one whole piece of the vocabulary.
SENTENCES = (
    TIRED,
    WIDE,
    SWAPPED,
    "The bank of the river was covered with snow",
    "The bank raised its rates again this year",
    "She gave him the book because he asked for it",
    "The dog saw the cat, and then the cat saw the dog",
    "The old man the boat",
)

README = (data.FOLDER / "README.md").read_text(encoding="utf-8")


def readme_row(first_cell):
    """The numbers in the README's table row that begins with these words."""
    (row,) = re.findall(rf"^\| {re.escape(first_cell)} \|(.*)$", README, flags=re.MULTILINE)
    return [float(number) for number in re.findall(r"\d?\.\d+", row)]


@pytest.fixture(scope="module")
def model():
    return MiniLM.load()


def run(model, sentence):
    """The tokens, and the weights of all layers and heads: (layer h i j)."""
    tokens = model.tokenize(sentence)
    return tokens, torch.stack(model(tokens)[1])[:, 0]


# --- tokens


@pytest.mark.parametrize(
    ("sentence", "pieces"),
    [
        (TIRED, "the animal didn ' t cross the street because it was too tired"),
        ("", ""),
        (" \t\n\r\u00a0\u2028 ", ""),
        ("Ångström, NAÏVE cafés", "an ##gs ##t ##ro ##m , na ##ive cafe ##s"),
        ("old\tman\nthe\rboat", "old man the boat"),
        ("queries", "q ##ue ##ries"),
        ("a😀 😀 b", "[UNK] [UNK] b"),
        ("東京x", "東 京 x"),
        ("[MASK] [CLS]", "[ mask ] [ c ##ls ]"),
        ("$5+3=8 ~a^b`c|d", "$ 5 + 3 = 8 ~ a ^ b ` c | d"),
        ("zero\u200dwidth nul\x00l bad\ufffd", "zero ##w ##id ##th n ##ul ##l bad"),
        ("x" * 60, "x" + " ##x" * 59),
        ("x" * 101, "[UNK]"),
    ],
)
def test_tokens(model, sentence, pieces):
    assert model.tokenize(sentence) == ["[CLS]", *pieces.split(), "[SEP]"]


@pytest.mark.parametrize("sentence", SENTENCES)
def test_each_word_of_the_menu_is_one_piece(model, sentence):
    words = re.findall(r"\w+|[^\w\s]", sentence.lower())
    assert model.tokenize(sentence) == ["[CLS]", *words, "[SEP]"]


@given(text=st.text(max_size=20))
def test_any_text_gives_tokens_of_the_vocabulary(model, text):
    try:
        tokens = model.tokenize(text)
    except ValueError:
        return  # some characters become several pieces, so even 20 may be too many
    assert set(tokens) <= set(model.ids)
    assert [tokens[0], tokens[-1]] == ["[CLS]", "[SEP]"]
    assert not {"[CLS]", "[SEP]", "[MASK]", "[PAD]"} & set(tokens[1:-1])


def test_length_limit(model):
    assert len(model.tokenize("the " * 62)) == 64
    with pytest.raises(ValueError, match=r"65 pieces.*at most 64"):
        model.tokenize("the " * 63)
    with pytest.raises(ValueError, match="65 tokens came; expected 1 to 64"):
        model(["the"] * 65)


def test_bad_tokens_are_refused(model):
    with pytest.raises(TypeError, match="sentence is a list; expected a str"):
        model.tokenize(["the"])
    for call in (model, model.embed, model.layer_inputs):
        with pytest.raises(TypeError, match=r"use tokenize\(sentence\)"):
            call("the")
        with pytest.raises(ValueError, match=r"not in the vocabulary: \['The', 'zebra'\]"):
            call(["The", "the", "zebra"])
    with pytest.raises(ValueError, match="0 tokens came"):
        model([])


# --- the encoder


def test_equals_pytorchs_encoder(model):
    """The same weights in nn.TransformerEncoderLayer, which is post-norm BERT when told so."""
    theirs = nn.TransformerEncoderLayer(
        384, 12, 1536, dropout=0, activation="gelu", layer_norm_eps=1e-12, batch_first=True
    ).eval()
    tokens = model.tokenize(WIDE)
    inputs, (hidden, weights) = model.layer_inputs(tokens), model(tokens)
    assert len(inputs) == len(weights) == 6
    for i, (ours, x, wanted) in enumerate(zip(model.layers, inputs, [*inputs[1:], hidden], strict=True)):
        projections = (ours.attention.q_proj, ours.attention.k_proj, ours.attention.v_proj)
        state = {
            "self_attn.in_proj_weight": torch.cat([p.weight for p in projections]),
            "self_attn.in_proj_bias": torch.cat([p.bias for p in projections]),
        }
        for name, part in (
            ("self_attn.out_proj", ours.attention.out_proj),
            ("linear1", ours.mlp[0]),
            ("linear2", ours.mlp[2]),
            ("norm1", ours.attention_norm),
            ("norm2", ours.mlp_norm),
        ):
            state |= {f"{name}.weight": part.weight, f"{name}.bias": part.bias}
        theirs.load_state_dict(state)
        with torch.no_grad():
            assert_close(theirs(x), wanted, atol=1e-4, rtol=0)
            their_out, their_weights = theirs.self_attn(x, x, x, average_attn_weights=False)
        assert_close(their_weights, weights[i], atol=1e-5, rtol=0)
        assert_close(their_out, ours.attention(x)[0], atol=1e-4, rtol=0)


def test_a_lesson_can_recompute_a_head_by_hand(model):
    tokens = model.tokenize(TIRED)
    x, layer = model.layer_inputs(tokens)[3][0], model.layers[3].attention
    q, k = layer.q_proj(x)[:, 32:64], layer.k_proj(x)[:, 32:64]  # head 1 of 12, each 32 wide
    assert_close((q @ k.T / math.sqrt(32)).softmax(dim=-1), model(tokens)[1][3][0, 1])


def test_shapes_and_rows(model):
    tokens = model.tokenize("The old man the boat")
    hidden, weights = model(tokens)
    assert hidden.shape == (1, 7, 384)
    assert hidden.isfinite().all()
    for layer in weights:
        assert layer.shape == (1, 12, 7, 7)
        assert_close(layer.sum(-1), torch.ones(1, 12, 7))


def test_embeddings_know_the_word_and_not_its_place(model):
    embedded = model.embed(["the", "animal", "the"])
    assert embedded.shape == (3, 384)
    assert torch.equal(embedded[0], embedded[2])
    assert not torch.allclose(embedded[0], embedded[1])
    state, _ = data.load_minilm()
    row = state["embeddings.word_embeddings.weight"][model.ids["animal"]]
    row = row + state["embeddings.token_type_embeddings.weight"][0]
    norm = state["embeddings.LayerNorm.weight"], state["embeddings.LayerNorm.bias"]
    assert_close(embedded[1], nn.functional.layer_norm(row, (384,), *norm, eps=1e-12))


def test_places_reach_the_first_layer(model):
    first = model.layer_inputs(["the", "animal", "the"])[0]
    assert not torch.allclose(first[0, 0], first[0, 2])


def test_like_sentences_get_like_vectors(model):
    """What the model was trained for: if this holds, nothing in it is far off."""
    small, little, bank = (
        nn.functional.normalize(model(model.tokenize(sentence))[0].mean(1)[0], dim=0)
        for sentence in (
            "A small dog ran home",
            "The little dogs went to their house",
            "The bank raised its rates",
        )
    )
    assert small @ little > 0.6
    assert small @ bank < 0.2


def test_frozen_and_shared(model):
    assert MiniLM.load() is model
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())


def test_loading_leaves_random_numbers_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    MiniLM.load.__func__.__wrapped__(MiniLM)  # past the cache
    assert torch.equal(torch.rand(3), expected)


# --- what data/README.md says was measured


@pytest.mark.parametrize("head", [(5, 11), (3, 1), (4, 0), None])
def test_what_it_attends_to(model, head):
    measured = []
    for sentence in (TIRED, WIDE, SWAPPED):
        tokens, weights = run(model, sentence)
        heads = weights.mean((0, 1)) if head is None else weights[head]
        it, animal, street = map(tokens.index, ("it", "animal", "street"))
        measured += [heads[it, animal].item(), heads[it, street].item()]
        if sentence == TIRED:
            others = [i for i in range(len(tokens)) if i != it]
            control = heads[others, animal].mean().item()
    first_cell = "all 72, mean" if head is None else f"{head[0]}.{head[1]}"
    assert [*measured, control] == pytest.approx(readme_row(first_cell), abs=0.001)


def test_head_5_11_is_a_topic_column(model):
    tokens, weights = run(model, TIRED)
    column = weights[5, 11, :, tokens.index("animal")]
    assert column[0].item() == pytest.approx(0.55, abs=0.01)
    assert column[tokens.index("was")].item() == pytest.approx(0.54, abs=0.01)
    assert (column > 0.3).sum() > len(tokens) / 2


def _same_word_elsewhere(tokens, weights):
    again = torch.tensor([[a == b and i != j for j, b in enumerate(tokens)] for i, a in enumerate(tokens)])
    return (weights[0, 8] * again).sum(-1)[again.any(-1)]


def _entropy(tokens, weights):
    return torch.special.entr(weights[0, 7]).sum(-1) / math.log(len(tokens))


@pytest.mark.parametrize(
    ("role", "weights_of"),
    [
        ("0.2, previous token", lambda tokens, w: w[0, 2].diagonal(-1)),
        ("1.8, next token", lambda tokens, w: w[1, 8].diagonal(1)),
        ("0.8, the same word elsewhere (words that occur twice)", _same_word_elsewhere),
        ("4.5, [CLS]", lambda tokens, w: w[4, 5, :, 0]),
        ("all 72 heads, [CLS]", lambda tokens, w: w[..., 0]),
        ("all 72 heads, [SEP]", lambda tokens, w: w[..., -1]),
        ("0.7, entropy as a share of the largest possible", _entropy),
    ],
)
def test_roles(model, role, weights_of):
    means = torch.stack([weights_of(*run(model, s)).mean() for s in SENTENCES])
    # A sentence without a repeated word has no mean for that role.
    assert means.nanmean().item() == pytest.approx(readme_row(role)[-1], abs=0.0051)
