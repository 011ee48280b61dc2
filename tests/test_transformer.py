"""transformer.py: blocks against PyTorch's layer, the models by their properties, the loop against a plain one."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mha_lessons.masks import causal_mask
from mha_lessons.positions import LearnedEncoding, SinusoidalEncoding, alibi_bias
from mha_lessons.transformer import Block, CausalLM, Transformer, token_loss, train, warmup_cosine
from tests.agree import assert_agree, randn


def copied_from_torch(layer, block):
    """Give a Block the weights of an ``nn.TransformerEncoderLayer``."""
    block.attention = block.attention.from_torch(layer.self_attn)
    for ours, theirs in (
        (block.norm_1, layer.norm1),
        (block.norm_2, layer.norm2),
        (block.mlp[0], layer.linear1),
        (block.mlp[2], layer.linear2),
    ):
        ours.load_state_dict(theirs.state_dict())
    return block


@pytest.mark.parametrize("masked", [False, True])
def test_block_agrees_with_torch(masked):
    options = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True, "dtype": torch.float64}
    layer = nn.TransformerEncoderLayer(12, 3, 30, **options)
    for norm in (layer.norm1, layer.norm2):
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    block = copied_from_torch(layer, Block(12, 3, mlp_ratio=2.5).double())
    mask = causal_mask(5) if masked else None
    x = randn(2, 5, 12, seed=0).requires_grad_()
    out, weights = block(x, mask)
    expected = layer(x, src_mask=None if mask is None else ~mask)
    assert_agree(out, expected)
    assert weights.shape == (2, 3, 5, 5)
    along = randn(2, 5, 12, seed=1)
    ours, theirs = torch.autograd.grad((out * along).sum(), x), torch.autograd.grad((expected * along).sum(), x)
    assert_agree(ours[0], theirs[0])


def test_block_without_mlp_adds_attention_alone():
    block, x = Block(8, 2, mlp_ratio=0).double(), randn(2, 3, 8, seed=0)
    assert_agree(block(x)[0], x + block.attention(block.norm_1(x))[0])
    assert not any("mlp" in name or "norm_2" in name for name, _ in block.named_parameters())


def test_block_hands_its_options_to_attention():
    block = Block(8, 2, d_k=6, dropout=0.5, rotary=True)
    assert (block.attention.d_k, block.attention.dropout, block.attention.rotary) == (6, 0.5, True)
    x = torch.randn(1, 3, 8)
    assert not torch.equal(block(x)[0], block(x)[0])
    assert torch.equal(block.eval()(x)[0], block(x)[0])


def some_tokens(b, n, vocab_size=11, seed=0):
    return torch.randint(vocab_size, (b, n), generator=torch.Generator().manual_seed(seed))


def build(kind, model=CausalLM, **options):
    knows = {
        "none": {},
        "sinusoidal": {"position": SinusoidalEncoding(12)},
        "learned": {"position": LearnedEncoding(9, 12)},
        "rotary": {"rotary": True},
        "alibi": {"score_bias": partial(alibi_bias, 2)},
    }
    return model(11, 12, 2, 2, **knows[kind], **options).double().eval()


KINDS = ["none", "sinusoidal", "learned", "rotary", "alibi"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_future_cannot_change_the_past(kind):
    model, tokens = build(kind), some_tokens(3, 7)
    changed = tokens.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 11
    before, after = model(tokens), model(changed)
    assert before.shape == (3, 7, 11)
    assert_agree(before[:, :4], after[:, :4])
    assert (before[:, 4:] - after[:, 4:]).abs().amax(-1).min() > 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_only_without_positions_the_tokens_may_be_permuted(kind):
    model, tokens, order = build(kind, Transformer), some_tokens(3, 7), torch.tensor([3, 0, 6, 1, 5, 2, 4])
    difference = (model(tokens)[:, order] - model(tokens[:, order])).abs().max()
    assert (difference < 1e-12) == (kind == "none")


def test_score_bias_is_added_to_the_scores():
    model = build("alibi", Transformer)
    nn.init.zeros_(model.blocks[0].attention.q_proj.weight)  # its biases are 0 already: the scores are the bias alone
    _, weights = model(some_tokens(2, 5), return_weights=True)
    assert_agree(weights[0], alibi_bias(2, 5).double().softmax(-1).expand(2, 2, 5, 5))


def test_score_bias_survives_the_causal_mask():
    model = build("alibi")
    nn.init.zeros_(model.blocks[0].attention.q_proj.weight)
    _, weights = model(some_tokens(2, 5), return_weights=True)
    expected = alibi_bias(2, 5).double().masked_fill(~causal_mask(5), -torch.inf).softmax(-1)
    assert_agree(weights[0], expected.expand(2, 2, 5, 5))


def test_return_weights_gives_each_layer():
    model, tokens = build("none"), some_tokens(3, 7)
    logits, weights = model(tokens, return_weights=True)
    assert torch.equal(logits, model(tokens))
    assert [layer.shape for layer in weights] == [(3, 2, 7, 7)] * 2
    assert not (weights[0] == weights[1]).all()
    for layer in weights:
        assert (layer.triu(1) == 0).all()


def test_the_forward_pass_written_out():
    model, tokens = build("sinusoidal", Transformer), some_tokens(2, 5)
    x = SinusoidalEncoding(12)(model.embedding.weight[tokens] * 12**0.5)
    for block in model.blocks:
        x, _ = block(x)
    assert_agree(model(tokens), model.norm(x) @ model.head.weight.T)


def test_token_vectors_are_as_large_as_a_sinusoidal_encoding():
    model = Transformer(500, 64, 2, 1)
    on_the_way_in = model.embedding.weight * 64**0.5
    assert on_the_way_in.var().item() == pytest.approx(1, abs=0.05)


def test_tied_head_is_the_embedding():
    tied, untied = CausalLM(11, 12, 2, 1, tied=True), CausalLM(11, 12, 2, 1)
    assert tied.head.weight is tied.embedding.weight
    assert untied.head.weight is not untied.embedding.weight
    counts = [sum(p.numel() for p in model.parameters()) for model in (untied, tied)]
    assert counts[0] - counts[1] == 11 * 12


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: Block(8, 3), ValueError, "3"),
        (lambda: Block(8, 2, mlp_ratio=-1), ValueError, "mlp_ratio is -1"),
        (lambda: CausalLM(5, 8, 2, 1)(torch.zeros(3, dtype=torch.int64)), ValueError, "b n"),
        (lambda: CausalLM(5, 8, 2, 1)(torch.zeros(2, 3)), TypeError, "float32; expected torch.int64"),
        (lambda: CausalLM(5, 8, 2, 1)(torch.tensor([[0, 5]])), ValueError, "a token is 5; expected 0 to 4"),
        (lambda: CausalLM(5, 8, 2, 1)(torch.tensor([[0, -1]])), ValueError, "a token is -1; expected 0 to 4"),
        (lambda: token_loss(torch.zeros(2, 3, 5), torch.zeros(2, 4)), ValueError, r"\(2, 4\).*\(2, 3\)"),
    ],
)
def test_what_cannot_be_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


@settings(max_examples=15)
@given(leading=st.lists(st.integers(1, 3), min_size=1, max_size=3), v=st.integers(2, 5), seed=st.integers(0, 99))
def test_token_loss_is_the_mean_over_the_positions_that_count(leading, v, seed):
    logits, targets = randn(*leading, v, seed=seed), some_tokens(1, math.prod(leading), v, seed)[0].reshape(leading)
    targets.view(-1)[1::2] = -100
    rows = zip(logits.log_softmax(-1).flatten(0, -2), targets.flatten(), strict=True)
    chosen = [row[target].item() for row, target in rows if target >= 0]
    assert_agree(token_loss(logits, targets), torch.tensor(-sum(chosen) / len(chosen), dtype=torch.float64))


def test_learning_rate_rises_in_a_line_and_falls_as_a_cosine():
    assert [warmup_cosine(done, 0.2) for done in (0.0, 0.05, 0.1)] == pytest.approx([0, 0.25, 0.5])
    assert [warmup_cosine(done, 0.2) for done in (0.2, 0.4, 0.6, 1)] == pytest.approx([1, 0.5 + 0.5**1.5, 0.5, 0])
    assert warmup_cosine(0, 0) == 1


def draw_line(generator):
    """Points on one plane: what a linear layer can learn."""
    x = torch.randn(16, 3, generator=generator)
    return x, x @ torch.tensor([[1.0], [-2.0], [0.5]]) + 3


def plain_training(model, steps, lr, warmup, clip, seed):
    """The loop as PyTorch's own pieces make it."""
    weights = [model.weight]
    rest = [p for p in model.parameters() if p is not model.weight]
    groups = [{"params": weights, "weight_decay": 0.3}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.8, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: warmup_cosine((i + 0.5) / steps, warmup))
    generator, losses = torch.Generator().manual_seed(seed), []
    for _ in range(steps):
        x, y = draw_line(generator)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def test_train_is_adamw_with_warmup_cosine_and_clipping():
    ours, plain = nn.Linear(3, 1), nn.Linear(3, 1)
    plain.load_state_dict(ours.state_dict())
    options = {"steps": 30, "lr": 0.1, "warmup": 0.3, "clip": 0.5, "seed": 4}
    losses = train(ours, draw_line, nn.functional.mse_loss, weight_decay=0.3, betas=(0.8, 0.95), **options)
    assert losses == pytest.approx(plain_training(plain, **options), rel=1e-5)
    assert_agree(ours.weight, plain.weight, tolerance=1e-5)
    assert_agree(ours.bias, plain.bias, tolerance=1e-5)


def test_weight_decay_spares_biases_norms_embeddings_and_positions():
    model = build("learned", mlp_ratio=2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    nothing_to_learn = lambda inputs, targets: 0 * inputs.sum()  # noqa: E731
    draw = lambda generator: (some_tokens(2, 5), None)  # noqa: E731
    train(model, draw, nothing_to_learn, steps=3, lr=0.1, weight_decay=0.5)
    linear = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    shrunk = {name for name, parameter in model.named_parameters() if (parameter < 1).all()}
    assert shrunk == linear
    assert "head.weight" in shrunk


def test_train_repeats_itself_and_leaves_the_random_state_alone():
    def run(seed, before):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        torch.manual_seed(before)
        state = torch.get_rng_state()
        losses = train(model, draw_line, nn.functional.mse_loss, steps=5, lr=0.01, seed=seed)
        assert torch.equal(torch.get_rng_state(), state)
        return losses

    assert run(3, before=1) == run(3, before=2)
    assert run(3, before=1) != run(4, before=1)


def test_train_switches_dropout_on_and_off():
    model, seen = nn.Sequential(nn.Linear(3, 1), nn.Dropout(0.5)).eval(), []

    def loss(outputs, targets):
        seen.append(model.training)
        return nn.functional.mse_loss(outputs, targets)

    train(model, draw_line, loss, steps=2, lr=0.01)
    assert seen == [True, True]
    assert not model.training


def test_train_shows_its_progress():
    shown = []
    train(nn.Linear(3, 1), draw_line, nn.functional.mse_loss, steps=4, lr=0.01, progress=lambda s: shown.extend(s) or s)
    assert shown == [0, 1, 2, 3]


def test_a_loss_that_is_not_finite_stops_the_training():
    model = nn.Linear(3, 1)
    before = model.weight.clone()
    with pytest.raises(ValueError, match=r"the loss is nan at step 0: lower lr = 0\.5"):
        train(model, draw_line, lambda out, y: (out - y).sum() * torch.nan, steps=3, lr=0.5)
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("options", [{"steps": 0}, {"steps": 3, "warmup": 1.0}, {"steps": 3, "warmup": -0.1}])
def test_train_refuses_what_makes_no_schedule(options):
    with pytest.raises(ValueError, match="expected 1 or more, and 0 <= share < 1"):
        train(nn.Linear(3, 1), draw_line, nn.functional.mse_loss, lr=0.1, **options)


def test_a_tiny_model_learns_to_repeat():
    """Predict the token two back: it needs positions and two layers' worth of nothing but attention."""

    def draw(generator):
        tokens = torch.randint(8, (32, 12), generator=generator)
        targets = tokens.roll(2, dims=1)
        targets[:, :2] = -100
        return tokens, targets

    torch.manual_seed(0)
    model = CausalLM(8, 32, 4, 1, mlp_ratio=0, rotary=True)
    losses = train(model, draw, token_loss, steps=150, lr=1e-2)
    assert losses[0] == pytest.approx(math.log(8), abs=0.6)
    assert losses[-1] < 0.1
