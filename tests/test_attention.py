"""attention.py against PyTorch in float64, and by the properties that published attention code has broken.

A name such as test_c03_... stands for a case of that number in the list of faults that real code has had.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mha_lessons.attention import KVCache, MultiHeadAttention, merge_heads, scaled_dot_product_attention, split_heads
from mha_lessons.masks import causal_mask, combine_masks, padding_mask
from mha_lessons.positions import rotary
from tests.agree import assert_agree, assert_rounded_once, randn

pytorch_attention = nn.functional.scaled_dot_product_attention
bounded = settings(max_examples=20)
halves = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
MASKS = ("none", "bool", "some rows hidden", "float", "float with -inf")


def gradients(outputs, inputs):
    """Gradients of a sum with uneven coefficients, so that no two entries can be exchanged unseen."""
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    loss = sum((out * torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)).sum() for out in outputs)
    return torch.autograd.grad(loss, inputs, retain_graph=True)


def make_mask(kind, shape, seed):
    """A mask of one of the kinds in MASKS; of the bool ones only "some rows hidden" may hide a whole row."""
    if kind == "none":
        return None
    if kind.startswith("float"):
        bias = randn(*shape, seed=seed)
        return bias.masked_fill(bias > 1, -torch.inf) if kind == "float with -inf" else bias
    mask = randn(*shape, seed=seed) > 0
    if kind == "bool":
        mask[..., 0] = True
    return mask


@st.composite
def inputs(draw):
    """q, k, v and a mask, with no two sizes alike where that could hide a mistake."""
    leading = draw(st.sampled_from([(), (3,), (2, 3), (2, 1, 3), (1, 2, 2, 2)]))
    i, j, d, dv = draw(st.sampled_from([(4, 5, 3, 2), (2, 6, 4, 5), (5, 3, 2, 7), (1, 4, 6, 3), (6, 1, 3, 2)]))
    seed = draw(st.integers(0, 999))
    q, k, v = (
        randn(*leading, *shape, seed=seed + n).requires_grad_() for n, shape in enumerate([(i, d), (j, d), (j, dv)])
    )
    mask_shape = draw(st.sampled_from([(*leading, i, j), (i, j), (*leading[:1], *[1] * len(leading[1:]), i, j)]))
    return q, k, v, make_mask(draw(st.sampled_from(MASKS)), mask_shape, seed + 3)


# The formula


@bounded
@given(inputs(), st.sampled_from([None, 0.3, 2.0]))
def test_equals_pytorch_with_gradients(case, scale):
    q, k, v, mask = case
    out, weights = scaled_dot_product_attention(q, k, v, mask, scale=scale)
    oracle = pytorch_attention(q, k, v, attn_mask=mask, scale=scale)
    assert_agree(out, oracle)
    assert weights.shape == (*q.shape[:-1], k.shape[-2])
    for ours, theirs in zip(gradients(out, (q, k, v)), gradients(oracle, (q, k, v)), strict=True):
        assert_agree(ours, theirs)


@bounded
@given(inputs())
def test_weights_are_a_softmax_over_the_keys(case):
    q, k, v, mask = case
    out, weights = scaled_dot_product_attention(q, k, v, mask)
    identity = torch.eye(k.shape[-2], dtype=v.dtype).expand(*v.shape[:-1], -1)
    oracle = pytorch_attention(q, k, identity, attn_mask=mask)  # values that name their key
    assert_agree(weights, oracle)
    assert_agree(weights @ v, out)
    total = weights.sum(-1)
    hidden = torch.zeros_like(total) if mask is None else torch.zeros(total.shape)
    if mask is not None:
        allowed = mask if mask.dtype == torch.bool else mask != -torch.inf
        hidden = (~allowed.any(-1)).expand_as(total)
    assert_agree(total, 1 - hidden.double())
    for ours, theirs in zip(gradients(weights, (q, k)), gradients(oracle, (q, k)), strict=True):
        assert_agree(ours, theirs)


def test_by_hand():
    q, k = torch.tensor([[1.0, 0.0, 0.0, 0.0]]), torch.tensor([[2 * math.log(3), 0, 0, 0], [0, 9, 9, 9]])
    out, weights = scaled_dot_product_attention(q, k, torch.tensor([[8.0, 0, 4], [0, 12, 4]]))
    assert_agree(weights, torch.tensor([[0.75, 0.25]]), tolerance=1e-6)  # scores log 3 and 0 after 1/√4
    assert_agree(out, torch.tensor([[6.0, 3.0, 4.0]]), tolerance=1e-6)


def test_a_scale_of_0_is_a_scale():
    q, k, v = torch.randn(2, 4, 3).double(), torch.randn(2, 5, 3).double(), torch.randn(2, 5, 2).double()
    out, weights = scaled_dot_product_attention(q, k, v, scale=0)
    assert_agree(weights, torch.full((2, 4, 5), 0.2).double(), tolerance=1e-7)
    assert_agree(out, v.mean(-2, keepdim=True).expand(2, 4, 2))


def test_the_scale_comes_before_a_product_that_overflows():
    q, k, v = torch.full((2, 4), 2e19), torch.full((3, 4), 2e19), torch.randn(3, 5)  # q·k = 1.6e39; float32: 3.4e38
    out, _ = scaled_dot_product_attention(q, k, v, scale=1e-20)
    assert_agree(out, v.mean(0, keepdim=True).expand(2, 5), tolerance=1e-6)


def test_leading_axes_broadcast():
    q, k, v = torch.randn(2, 3, 4, 5).double(), torch.randn(3, 6, 5).double(), torch.randn(6, 2).double()
    mask = torch.rand(2, 1, 4, 6) > 0.4
    out, weights = scaled_dot_product_attention(q, k, v, mask)
    k, v = k.expand(2, 3, 6, 5), v.expand(2, 3, 6, 2)
    assert_agree(out, pytorch_attention(q, k, v, attn_mask=mask))
    assert weights.shape == (2, 3, 4, 6)
    shared_query = scaled_dot_product_attention(q[0, 0], k, v, mask)[0]
    assert_agree(shared_query, pytorch_attention(q[:1, :1].expand_as(q), k, v, attn_mask=mask))


@pytest.mark.parametrize(
    "shape", [(), (1,), (6,), (1, 1), (1, 6), (4, 1), (4, 6), (3, 1, 1), (2, 1, 1, 6), (1, 3, 4, 1)]
)
def test_any_mask_that_broadcasts(shape):
    q, k, v = torch.randn(2, 3, 4, 5).double(), torch.randn(2, 3, 6, 5).double(), torch.randn(2, 3, 6, 2).double()
    for mask in (torch.rand(shape) > 0.5, torch.randn(shape).double(), torch.randn(shape)):
        full = mask.expand(2, 3, 4, 6)
        full = full if mask.dtype == torch.bool else full.double()
        out, _ = scaled_dot_product_attention(q, k, v, mask)
        assert_agree(out, pytorch_attention(q, k, v, attn_mask=full))


def test_no_keys_and_no_queries():
    q, k, v = torch.randn(2, 3, 4), torch.randn(2, 0, 4), torch.randn(2, 0, 5)
    for mask in (None, torch.ones(3, 0).bool(), torch.zeros(3, 0)):
        out, weights = scaled_dot_product_attention(q, k, v, mask)
        assert torch.equal(out, torch.zeros(2, 3, 5))
        assert weights.shape == (2, 3, 0)
    out, weights = scaled_dot_product_attention(q[:, :0], q, q, torch.ones(0, 3).bool())
    assert (out.shape, weights.shape) == ((2, 0, 4), (2, 0, 3))


def test_a_learned_float_mask_gets_its_gradient():
    q, k, v = torch.randn(2, 4, 3).double(), torch.randn(2, 5, 3).double(), torch.randn(2, 5, 2).double()
    bias = torch.zeros(4, 5, dtype=torch.float64)
    bias[1], bias[0, 2] = 1.0, 1.0
    bias.requires_grad_()  # only 0 and 1, but learned: not a keep mask in disguise
    ours = gradients(scaled_dot_product_attention(q, k, v, bias)[0], (bias,))[0]
    assert_agree(ours, gradients(pytorch_attention(q, k, v, attn_mask=bias), (bias,))[0])


def test_c18_scores_are_divided_by_the_root_of_the_head_width():
    q, k = torch.randn(2, 4, 8, 64, 64).double()
    _, weights = scaled_dot_product_attention(q, k, k)
    entropy = -(weights * weights.log()).sum(-1).mean() / math.log(64)
    assert 0.87 < entropy < 0.90  # 0.985 for the root of d_model = 512, 0.145 without a scale
    layer = MultiHeadAttention(32, 8).double()
    x = torch.randn(2, 5, 32).double()
    q, k = split_heads(layer.q_proj(x), 8), split_heads(layer.k_proj(x), 8)
    assert_agree(layer(x)[1], (q @ k.mT / math.sqrt(4)).softmax(-1))


def test_c10_c20_row_0_of_a_causal_mask_sees_itself():
    q, k, v = torch.randn(2, 3, 4, 5).double(), torch.randn(2, 3, 4, 5).double(), torch.randn(2, 3, 4, 2).double()
    out, weights = scaled_dot_product_attention(q, k, v, causal_mask(4))
    assert torch.equal(out[..., 0, :], v[..., 0, :])
    assert torch.equal(weights != 0, causal_mask(4).expand_as(weights))
    assert_agree(out, pytorch_attention(q, k, v, is_causal=True))


def test_c20_a_float_mask_of_0_and_1_is_refused():
    q, k, v = torch.randn(2, 4, 3), torch.randn(2, 5, 3), torch.randn(2, 5, 2)
    rows = torch.tensor([[1.0], [0], [1], [1]])  # a mask of one column hides whole rows
    for mask in (causal_mask(4, 5).float(), causal_mask(4, 5).double(), torch.ones(4, 5).half(), rows):
        with pytest.raises(ValueError, match=r"holds only 0 and 1\. A float mask is added to the scores"):
            scaled_dot_product_attention(q, k, v, mask)
    plain = scaled_dot_product_attention(q, k, v)[0]
    assert_agree(scaled_dot_product_attention(q, k, v, torch.zeros(4, 5))[0], plain, tolerance=1e-6)


@pytest.mark.parametrize("window", [1, 2])
def test_c04_the_last_queries_of_a_causal_pass(window):
    q, k, v = torch.randn(2, 3, 6, 4).double(), torch.randn(2, 3, 6, 4).double(), torch.randn(2, 3, 6, 5).double()
    full, _ = scaled_dot_product_attention(q, k, v, causal_mask(6))
    last, _ = scaled_dot_product_attention(q[..., -window:, :], k, v, causal_mask(window, 6))
    assert_agree(last, full[..., -window:, :])


# Rows that see nothing, and content that nobody sees


def no_key_for_row_1(kind):
    mask = torch.tensor([[1, 0, 1, 0, 0], [0, 0, 0, 0, 0], [1, 1, 0, 1, 1], [0, 0, 0, 0, 1]]).bool()
    if kind == "bool":
        return mask
    lowest = torch.zeros(4, 5, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    return lowest + torch.tensor([[0.5], [3.0], [-1.0], [2.0]]) if kind == "float" else lowest


@pytest.mark.parametrize("kind", ["bool", "float", "0 and -inf"])
def test_c03_c22_a_row_that_sees_nothing_is_zero_with_finite_gradients(kind):
    q, k, v = (torch.randn(2, 3, *size).double().requires_grad_() for size in ((4, 6), (5, 6), (5, 2)))
    mask = no_key_for_row_1(kind)
    out, weights = scaled_dot_product_attention(q, k, v, mask)
    assert torch.equal(out[..., 1, :], torch.zeros(2, 3, 2).double())
    assert torch.equal(weights[..., 1, :], torch.zeros(2, 3, 5).double())
    oracle = pytorch_attention(q, k, v, attn_mask=mask)
    assert_agree(out, oracle)
    dq, dk, dv = gradients((out, weights), (q, k, v))
    assert torch.equal(dq[..., 1, :], torch.zeros(2, 3, 6).double())
    assert dk.isfinite().all()
    assert dv.isfinite().all()
    for ours, theirs in zip(gradients(out, (q, k, v)), gradients(oracle, (q, k, v)), strict=True):
        assert_agree(ours, theirs)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_c03_every_parameter_of_the_layer_gets_a_finite_gradient(kind):
    layer = MultiHeadAttention(8, 2).double()
    query, key = torch.randn(2, 4, 8).double(), torch.randn(2, 5, 8).double()
    out, weights = layer(query, key, mask=no_key_for_row_1(kind))
    out[:, [0, 2, 3]].square().sum().backward()  # the loss does not even read the row
    for name, parameter in layer.named_parameters():
        assert parameter.grad.isfinite().all(), name
    assert torch.equal(weights[:, :, 1], torch.zeros(2, 2, 5).double())
    assert torch.equal(out[:, 1], layer.out_proj.bias.expand(2, 8))


def test_c22_a_very_low_but_finite_mask_is_a_mean():
    q, k, v = torch.randn(2, 4, 3).double(), torch.randn(2, 5, 3).double(), torch.randn(2, 5, 2).double()
    lowest = torch.full((4, 5), torch.finfo(torch.float64).min, dtype=torch.float64)
    assert_agree(scaled_dot_product_attention(q, k, v, lowest)[0], v.mean(-2, keepdim=True).expand(2, 4, 2))


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_hidden_content_reaches_nothing(poison):
    mask = combine_masks(padding_mask([5, 3], 5), causal_mask(4, 5))  # keys 3 and 4 are hidden in item 1 alone
    mask = mask.expand(2, 3, 4, 5).clone()
    mask[0, 1, 2], mask[0, 2, :, 4] = False, False  # in head 1 a row sees nothing, in head 2 nobody sees key 4
    clean = [torch.randn(2, 3, *size).double() for size in ((4, 6), (5, 6), (5, 2))]
    dirty = [x.clone() for x in clean]
    dirty[0][0, 1, 2] = poison
    for hidden in (dirty[1], dirty[2]):
        hidden[1, :, 3:], hidden[0, 2, 4] = poison, poison
    results = []
    for tensors in (clean, dirty):
        q, k, v = (x.requires_grad_() for x in tensors)
        out, weights = scaled_dot_product_attention(q, k, v, mask)
        results.append((out, weights, *gradients((out, weights), (q, k, v))))
    for from_clean, from_dirty in zip(*results, strict=True):
        assert from_clean.isfinite().all()
        assert torch.equal(from_clean, from_dirty)
    dk = results[1][3]
    assert torch.equal(dk[1, :, 3:], torch.zeros_like(dk[1, :, 3:]))


def test_hidden_content_reaches_nothing_through_a_padding_mask_alone():
    q, k, v = torch.randn(2, 3, 4, 6), torch.randn(2, 3, 5, 6), torch.randn(2, 3, 5, 2)
    expected = scaled_dot_product_attention(q, k, v, padding_mask([5, 3]))
    k[1, :, 3:], v[1, :, 3:] = math.nan, math.nan
    for ours, clean in zip(scaled_dot_product_attention(q, k, v, padding_mask([5, 3])), expected, strict=True):
        assert torch.equal(ours, clean)


def test_torchs_transforms_see_no_branch_on_a_mask():
    q, masks = torch.randn(2, 4, 3).double(), torch.rand(5, 4, 4) > 0.4
    out = torch.vmap(lambda mask: scaled_dot_product_attention(q, q, q, mask)[0])(masks)
    assert_agree(out, torch.stack([scaled_dot_product_attention(q, q, q, mask)[0] for mask in masks]))
    shapes = scaled_dot_product_attention(q.to("meta"), q.to("meta"), q.to("meta"), masks[0].to("meta"))
    assert [x.shape for x in shapes] == [(2, 4, 3), (2, 4, 4)]
    layer, x = MultiHeadAttention(6, 2).to("meta"), torch.empty(2, 4, 6, device="meta")
    assert layer(x, mask=masks[0].to("meta"))[0].shape == (2, 4, 6)
    with pytest.raises(TypeError, match=r"query is torch\.float64"):
        layer(x.double())


def test_a_causal_prefix_does_not_know_the_future():
    layer = MultiHeadAttention(12, 3, rotary=True).double()
    x = torch.randn(2, 7, 12).double()
    changed = x.clone()
    changed[:, 4:] = torch.randn(2, 3, 12).double()
    (one, weights_one), (two, weights_two) = (layer(t, mask=causal_mask(7)) for t in (x, changed))
    assert torch.equal(one[:, :4], two[:, :4])  # to the last bit: the arithmetic is the same
    assert torch.equal(weights_one[:, :, :4], weights_two[:, :, :4])
    assert (one[:, 4:] != two[:, 4:]).any(-1).all()


# Precision


@halves
def test_c21_half_precision_does_not_overflow(dtype):
    big = torch.full((2, 3, 128), 64.0, dtype=dtype)  # q·k = 128 · 64 · 64 = 524,288; float16 ends at 65,504
    k = torch.cat([big, -big[:, :1]], dim=1)
    v = torch.randn(2, 4, 5).to(dtype)
    for scale in (None, 1.0):
        out, weights = scaled_dot_product_attention(big, k, v, scale=scale)
        assert (out.dtype, weights.dtype) == (dtype, dtype)
        third = torch.tensor([1 / 3, 1 / 3, 1 / 3, 0]).to(dtype).expand(2, 3, 4)
        assert torch.equal(weights, third)
        mean = v[:, :3].double().mean(1, keepdim=True).expand(2, 3, 5)
        assert_rounded_once(out, mean)


@halves
@pytest.mark.parametrize("kind", ["none", "bool", "float", "half float"])
def test_half_precision_is_rounded_once(dtype, kind):
    q, k = (4 * torch.randn(2, 2, 3, 5, 64)).to(dtype)
    v = torch.randn(2, 3, 5, 6).to(dtype)
    mask = {"none": None, "bool": causal_mask(5), "float": torch.randn(5, 5), "half float": torch.randn(5, 5).to(dtype)}
    out, weights = scaled_dot_product_attention(q, k, v, mask[kind])
    exact = scaled_dot_product_attention(q.double(), k.double(), v.double(), mask[kind])
    for ours, truth in zip((out, weights), exact, strict=True):
        assert ours.dtype == dtype
        assert_rounded_once(ours, truth)


@halves
def test_half_precision_rows_that_see_nothing(dtype):
    q, k, v = (torch.randn(2, 3, *size).to(dtype).requires_grad_() for size in ((4, 6), (5, 6), (5, 2)))
    for mask in (no_key_for_row_1("bool"), no_key_for_row_1("float").to(dtype)):
        out, weights = scaled_dot_product_attention(q, k, v, mask)
        assert torch.equal(weights[..., 1, :], torch.zeros(2, 3, 5, dtype=dtype))
        for gradient in gradients((out, weights), (q, k, v)):
            assert gradient.dtype == dtype
            assert gradient.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_layer_keeps_the_dtype(dtype):
    layer = MultiHeadAttention(8, 4, num_kv_heads=2, rotary=True).to(dtype)
    for result in layer(torch.randn(2, 5, 8, dtype=dtype), mask=causal_mask(5)):
        assert result.dtype == dtype


@pytest.mark.parametrize("options", [{}, {"rotary": True, "num_kv_heads": 1}])
def test_layers_stack_under_autocast(options):
    first, second = MultiHeadAttention(8, 2, **options), MultiHeadAttention(8, 2, **options)
    x = torch.randn(2, 5, 8)
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = second(first(x)[0], mask=causal_mask(5))
        assert out.dtype == torch.bfloat16
        for wrong in (x.double(), x.long()):
            with pytest.raises(TypeError, match=r"and the layer is torch\.float32"):
                first(wrong)
    assert_agree(out.float(), second(first(x)[0], mask=causal_mask(5))[0], tolerance=0.05)
    with pytest.raises(TypeError, match=r"query is torch\.bfloat16"):
        first(x.bfloat16())


# Dropout


def test_dropout_drops_the_share_asked_for_and_scales_the_rest():
    q, k, v = torch.zeros(4, 200, 3), torch.randn(4, 50, 3), torch.eye(50).expand(4, 50, 50)
    out, weights = scaled_dot_product_attention(
        q, k, v, dropout_p=0.3
    )  # the values name their key: out is what was kept
    assert_agree(weights, torch.full((4, 200, 50), 1 / 50), tolerance=1e-6)
    kept = out != 0
    assert abs(kept.float().mean() - 0.7) < 0.01  # four standard errors of 40,000 draws
    assert_agree(out[kept], torch.full_like(out[kept], 1 / 50 / 0.7), tolerance=1e-6)
    again, _ = scaled_dot_product_attention(q, k, v, dropout_p=0.3)
    assert not torch.equal(out, again)


def test_dropout_of_everything_and_of_nothing():
    q, k, v = torch.randn(2, 4, 3), torch.randn(2, 5, 3), torch.randn(2, 5, 2)
    assert torch.equal(scaled_dot_product_attention(q, k, v, dropout_p=1.0)[0], torch.zeros(2, 4, 2))
    state = torch.get_rng_state()
    scaled_dot_product_attention(q, k, v, dropout_p=0.0)
    assert torch.equal(torch.get_rng_state(), state)


def test_c36_the_returned_weights_are_those_before_dropout():
    layer = MultiHeadAttention(8, 2, dropout=0.2).double()
    x = torch.randn(3, 6, 8).double()
    out, weights = layer(x, mask=causal_mask(6))
    assert torch.equal(weights[:, :, 0, 0], torch.ones(3, 2).double())  # after dropout: 0 or 1.25
    assert_agree(weights.sum(-1), torch.ones(3, 2, 6).double())
    still = layer.eval()(x, mask=causal_mask(6))
    assert_agree(weights, still[1])
    assert not torch.allclose(out, still[0])
    assert torch.equal(layer(x, mask=causal_mask(6))[0], still[0])


# Heads


@bounded
@given(st.sampled_from([(), (2,), (2, 3)]), st.integers(1, 5), st.sampled_from([(2, 3), (3, 2), (4, 1), (1, 5)]))
def test_split_and_merge_are_inverse(leading, n, heads_and_width):
    h, d = heads_and_width
    x = randn(*leading, n, h * d, seed=n)
    heads = split_heads(x, h)
    assert heads.shape == (*leading, h, n, d)
    for head in range(h):
        assert torch.equal(heads[..., head, :, :], x[..., head * d : (head + 1) * d])
    assert torch.equal(merge_heads(heads), x)


def test_c08_merging_gives_back_the_tokens():
    x = torch.arange(24.0).view(2, 3, 4)
    assert merge_heads(split_heads(x, 2))[0, 0].tolist() == [0, 1, 2, 3]  # without the transpose: 0, 1, 4, 5
    own = torch.eye(3).bool()  # a token that sees itself alone takes its own value
    heads = split_heads(x, 2)
    assert torch.equal(merge_heads(scaled_dot_product_attention(heads, heads, heads, own)[0]), x)


def test_c07_attention_is_between_tokens_not_between_heads():
    layer = MultiHeadAttention(8, 2).double()
    x = torch.randn(3, 5, 8).double()
    changed = x.clone()
    changed[:, 4] += 1
    (before, weights), (after, _) = layer(x), layer(changed)
    assert weights.shape == (3, 2, 5, 5)
    assert (before[:, 0] - after[:, 0]).abs().amax(-1).min() > 1e-3


def test_c37_weights_are_shown_head_by_head():
    layer = MultiHeadAttention(2, 2, bias=False).double()
    x = torch.tensor([[[1.0, -1.0], [-1.0, 1.0]]]).double()
    with torch.no_grad():
        layer.q_proj.weight.copy_(10 * torch.eye(2))
        layer.k_proj.weight.copy_(torch.tensor([[10.0, 0], [0, -10.0]]))
    sharp = torch.stack([torch.eye(2), 1 - torch.eye(2)])[None].double()
    assert_agree(layer(x)[1], sharp)  # their mean is 0.5 everywhere


# The layer


def as_theirs(mask):
    """PyTorch's layer hides where a bool mask is True."""
    return ~mask if mask is not None and mask.dtype == torch.bool else mask


def named_gradients(outputs, module, leaves):
    """Gradients of the inputs by their number, and of the parameters by their name."""
    wanted = dict(enumerate(leaves)) | dict(module.named_parameters())
    return dict(zip(wanted, gradients(outputs, list(wanted.values())), strict=True))


@bounded
@given(
    sizes=st.sampled_from([(8, 2, 4, 5), (6, 3, 5, 2), (12, 4, 3, 7), (10, 5, 1, 4)]),
    batch=st.integers(2, 3),
    cross=st.booleans(),
    bias=st.booleans(),
    batch_first=st.booleans(),
    kind=st.sampled_from(["none", "bool", "float", "float with -inf"]),
    seed=st.integers(0, 999),
)
def test_equals_pytorchs_layer_with_all_gradients(sizes, batch, cross, bias, batch_first, kind, seed):
    d_model, num_heads, i, j = sizes
    torch.manual_seed(seed)
    module = nn.MultiheadAttention(d_model, num_heads, bias=bias, batch_first=batch_first, dtype=torch.float64)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    layer = MultiHeadAttention.from_torch(module)
    query = randn(batch, i, d_model, seed=seed + 1).requires_grad_()
    key, value = (randn(batch, j, d_model, seed=seed + n).requires_grad_() for n in (2, 3))
    given_inputs = (query, key, value) if cross else (query, query, query)
    mask = make_mask(kind, (i, given_inputs[1].shape[1]), seed + 4)
    if mask is not None and mask.is_floating_point():
        mask[:, 0] = 0.25  # a row that saw nothing would be NaN in theirs
    order = (0, 1, 2) if batch_first else (1, 0, 2)
    theirs = module(*(x.permute(order) for x in given_inputs), attn_mask=as_theirs(mask), average_attn_weights=False)
    theirs = theirs[0].permute(order), theirs[1]
    ours = layer(*(given_inputs if cross else (query,)), mask=mask)
    for one, two in zip(ours, theirs, strict=True):
        assert_agree(one, two)
    leaves = (query, key, value) if cross else (query,)
    ours, theirs = (named_gradients(*pair, leaves) for pair in ((ours, layer), (theirs, module)))
    for n in range(len(leaves)):
        assert_agree(ours[n], theirs[n])
    for part in ("weight", "bias") if bias else ("weight",):
        assert_agree(torch.cat([ours[f"{name}_proj.{part}"] for name in "qkv"]), theirs[f"in_proj_{part}"])
        assert_agree(ours[f"out_proj.{part}"], theirs[f"out_proj.{part}"])


def test_padding_equals_pytorchs_key_padding_mask():
    module = nn.MultiheadAttention(12, 3, batch_first=True, dtype=torch.float64)
    query, key = torch.randn(3, 4, 12).double(), torch.randn(3, 6, 12).double()
    hidden = torch.arange(6) >= torch.tensor([[6], [2], [4]])
    theirs = module(query, key, key, key_padding_mask=hidden, average_attn_weights=False)
    ours = MultiHeadAttention.from_torch(module)(query, key, mask=padding_mask([6, 2, 4]))
    for one, two in zip(ours, theirs, strict=True):
        assert_agree(one, two)


@pytest.mark.parametrize("leading", [(), (3,), (2, 3)])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "d_k"), [(4, 2, None), (6, 3, 5), (4, 1, 2), (3, 3, 7)])
def test_grouped_heads_and_d_k_equal_pytorchs(leading, num_heads, num_kv_heads, d_k):
    layer = MultiHeadAttention(12, num_heads, num_kv_heads=num_kv_heads, d_k=d_k).double()
    width = d_k or 12 // num_heads
    query, key, value = (torch.randn(*leading, n, 12).double().requires_grad_() for n in (4, 5, 5))
    mask = torch.rand(4, 5) > 0.3
    mask[:, 2] = True
    out, weights = layer(query, key, value, mask)

    def heads(x, projection, h):
        x = nn.functional.linear(x, projection.weight, projection.bias).reshape(-1, x.shape[-2], h, width)
        return x.transpose(1, 2)

    q = heads(query, layer.q_proj, num_heads)
    k, v = heads(key, layer.k_proj, num_kv_heads), heads(value, layer.v_proj, num_kv_heads)
    read = pytorch_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    oracle = layer.out_proj(read.transpose(1, 2).flatten(2)).view(*leading, 4, 12)
    assert_agree(out, oracle)
    repeated = k.repeat_interleave(num_heads // num_kv_heads, dim=1)
    scores = (q @ repeated.mT / math.sqrt(width)).masked_fill(~mask, -torch.inf)
    assert_agree(weights, scores.softmax(-1).view(*leading, num_heads, 4, 5))
    leaves = [query, key, value, *layer.parameters()]
    for ours, theirs in zip(gradients(out, leaves), gradients(oracle, leaves), strict=True):
        assert_agree(ours, theirs)


def test_key_defaults_to_query_and_value_to_key():
    layer = MultiHeadAttention(6, 2).double()
    query, key = torch.randn(2, 4, 6).double(), torch.randn(2, 5, 6).double()
    assert torch.equal(layer(query)[0], layer(query, query, query)[0])
    assert torch.equal(layer(query, key)[0], layer(query, key, key)[0])


def test_rotary_layer_turns_queries_and_keys_but_not_values():
    layer = MultiHeadAttention(12, 2, num_kv_heads=1, rotary=True).double()
    x = torch.randn(2, 5, 12).double()
    q, k, v = split_heads(layer.q_proj(x), 2), layer.k_proj(x)[:, None], layer.v_proj(x)[:, None]
    read = pytorch_attention(rotary(q), rotary(k), v, enable_gqa=True)
    assert_agree(layer(x)[0], layer.out_proj(merge_heads(read)))


def test_permuting_tokens_permutes_the_output():
    layer = MultiHeadAttention(12, 3).double()
    x, key = torch.randn(2, 5, 12).double(), torch.randn(2, 6, 12).double()
    order, key_order = torch.tensor([3, 0, 4, 1, 2]), torch.tensor([5, 2, 0, 1, 4, 3])
    out, weights = layer(x)
    permuted, permuted_weights = layer(x[:, order])
    assert_agree(permuted, out[:, order])
    assert_agree(permuted_weights, weights[:, :, order][..., order])
    assert_agree(layer(x, key[:, key_order])[0], layer(x, key)[0])
    turning = MultiHeadAttention(12, 3, rotary=True).double()
    assert not torch.allclose(turning(x[:, order])[0], turning(x)[0][:, order])


def test_starts_from_xavier_with_zero_biases():
    layer = MultiHeadAttention(64, 4, d_k=32)
    for projection in (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj):
        bound = math.sqrt(6 / (64 + 128))
        assert 0.95 * bound < projection.weight.abs().max() <= bound
        assert torch.equal(projection.bias, torch.zeros_like(projection.bias))
    assert all(projection.bias is None for projection in MultiHeadAttention(8, 2, bias=False).children())


# Weights from PyTorch


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("training", [True, False])
def test_from_torch_takes_all_over(bias, batch_first, dtype, training):
    module = nn.MultiheadAttention(6, 3, bias=bias, dropout=0.25, batch_first=batch_first, dtype=dtype).train(training)
    layer = MultiHeadAttention.from_torch(module)
    assert (layer.training, layer.dropout, layer.num_heads, layer.d_model) == (training, 0.25, 3, 6)
    assert all(parameter.dtype == dtype for parameter in layer.parameters())
    assert all((projection.bias is not None) == bias for projection in layer.children())
    before = module.in_proj_weight.clone(), module.out_proj.weight.clone()
    x = torch.randn(2, 4, 6, dtype=dtype)
    theirs = x if batch_first else x.transpose(0, 1)
    expected = module.eval()(theirs, theirs, theirs, average_attn_weights=False)
    out = expected[0] if batch_first else expected[0].transpose(0, 1)
    ours = layer.eval()(x)
    for one, two in zip(ours, (out, expected[1]), strict=True):
        assert_agree(one, two, tolerance={torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype])
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    assert torch.equal(module.in_proj_weight, before[0])  # a copy, not a view
    assert torch.equal(module.out_proj.weight, before[1])


@pytest.mark.parametrize("frozen", ["in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"])
def test_from_torch_keeps_frozen_what_was(frozen):
    module = nn.MultiheadAttention(6, 3)
    module.get_parameter(frozen).requires_grad_(False)
    part = frozen.split("_" if frozen.startswith("in") else ".")[-1]
    expected = {f"{name}_proj.{part}" for name in ("qkv" if frozen.startswith("in") else ["out"])}
    layer = MultiHeadAttention.from_torch(module)
    assert {name for name, parameter in layer.named_parameters() if not parameter.requires_grad} == expected


@pytest.mark.parametrize(
    ("module", "error", "words"),
    [
        (nn.Linear(4, 4), TypeError, "module is a Linear; expected an nn.MultiheadAttention"),
        (nn.MultiheadAttention(4, 2, kdim=3), ValueError, "kdim 3 and vdim 4 beside embed_dim 4"),
        (nn.MultiheadAttention(4, 2, vdim=5), ValueError, "kdim 4 and vdim 5 beside embed_dim 4"),
        (nn.MultiheadAttention(4, 2, add_bias_kv=True), ValueError, "made with add_bias_kv, which appends a key"),
        (nn.MultiheadAttention(4, 2, add_zero_attn=True), ValueError, "made with add_zero_attn, which appends a key"),
    ],
)
def test_from_torch_refuses(module, error, words):
    with pytest.raises(error, match=words):
        MultiHeadAttention.from_torch(module)


# The cache

LAYERS = [
    {},
    {"rotary": True},
    {"num_kv_heads": 2, "rotary": True},
    {"num_kv_heads": 1, "d_k": 6},
]


@pytest.mark.parametrize("options", LAYERS)
@pytest.mark.parametrize("chunks", [(1,) * 7, (3, 1, 2, 1), (7,), (2, 5)])
def test_c04_c23_decoding_equals_one_causal_pass(options, chunks):
    layer = MultiHeadAttention(16, 4, **options).double()
    x = torch.randn(2, 7, 16).double()
    full, full_weights = layer(x, mask=causal_mask(7))
    cache, start = KVCache(), 0
    for n in chunks:
        end = start + n
        mask = None if n == 1 else causal_mask(n, end)
        out, weights = layer(x[:, start:end], mask=mask, cache=cache)
        assert_agree(out, full[:, start:end])
        assert_agree(weights, full_weights[:, :, start:end, :end])
        assert len(cache) == end
        start = end
    assert repr(cache) == "KVCache(7 positions)"
    assert cache.k.shape == (2, layer.num_kv_heads, 7, layer.d_k)


def test_c23_decoding_with_padding_and_another_length():
    layer = MultiHeadAttention(16, 4, rotary=True).double()
    for n in (5, 6):  # the same chunk length at two offsets
        x = torch.randn(2, n, 16).double()
        padding = padding_mask([n, n - 2])
        full, _ = layer(x, mask=combine_masks(causal_mask(n), padding))
        cache = KVCache()
        layer(x[:, : n - 2], mask=combine_masks(causal_mask(n - 2), padding[..., : n - 2]), cache=cache)
        out, _ = layer(x[:, n - 2 :], mask=combine_masks(causal_mask(2, n), padding), cache=cache)
        assert_agree(out, full[:, n - 2 :])


def test_decoding_trains_as_one_causal_pass():
    layer = MultiHeadAttention(8, 2).double()
    x = torch.randn(2, 4, 8).double().requires_grad_()
    cache, outs = KVCache(), []
    for t in range(4):
        outs.append(layer(x[:, t : t + 1], cache=cache)[0])
    leaves = [x, *layer.parameters()]
    decoded, whole = torch.cat(outs, dim=1), layer(x, mask=causal_mask(4))[0]
    for ours, theirs in zip(gradients(decoded, leaves), gradients(whole, leaves), strict=True):
        assert_agree(ours, theirs)


def test_dropout_works_beside_a_cache():
    layer, x = MultiHeadAttention(8, 2, dropout=0.5).double(), torch.randn(2, 6, 8).double()
    assert not torch.allclose(layer(x, cache=KVCache())[0], layer.eval()(x, cache=KVCache())[0])


def test_joining_leaves_the_cache_as_it_was():
    cache = KVCache()
    assert (len(cache), repr(cache)) == (0, "KVCache(0 positions)")
    cache.k, cache.v = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 5)
    k, v = torch.randn(2, 3, 1, 5), torch.randn(2, 3, 1, 5)
    joined_k, joined_v = cache.joined(k, v)
    assert torch.equal(joined_k, torch.cat([cache.k, k], dim=2))
    assert torch.equal(joined_v, torch.cat([cache.v, v], dim=2))
    assert len(cache) == 4


def refuse(*_):
    raise RuntimeError("after attention")


@pytest.mark.parametrize(
    ("query", "mask", "error", "words"),
    [
        (torch.randn(2, 1, 8), torch.ones(1, 2).bool(), ValueError, r"mask has shape \(1, 2\)"),
        (torch.randn(2, 1, 8), torch.ones(1, 4), ValueError, "holds only 0 and 1"),
        (torch.randn(2, 1, 8), torch.ones(1, 4).int(), TypeError, "mask is torch.int32"),
        (
            torch.randn(3, 1, 8),
            None,
            ValueError,
            r"holds keys of shape \(2, 2, 3, 4\) and the new ones are \(3, 2, 1, 4\)",
        ),
        (torch.randn(2, 1, 8).double(), None, TypeError, "query is torch.float64"),
        (torch.randn(2, 1, 7), None, ValueError, "expected e = 8"),
        (torch.randn(2, 1, 8), None, RuntimeError, "after attention"),
    ],
)
def test_a_call_that_raises_leaves_the_cache_unchanged(query, mask, error, words):
    layer, cache = MultiHeadAttention(8, 2), KVCache()
    layer(torch.randn(2, 3, 8), cache=cache)
    if error is RuntimeError:
        layer.out_proj.register_forward_hook(refuse)
    k, v, content = cache.k, cache.v, cache.k.clone()
    with pytest.raises(error, match=words):
        layer(query, mask=mask, cache=cache)
    assert cache.k is k
    assert cache.v is v
    assert torch.equal(cache.k, content)
    empty = KVCache()
    if mask is not None:
        with pytest.raises(error):
            layer(query, mask=mask[:, :1].expand(1, 3), cache=empty)
        assert empty.k is None


# Nothing in place, and words for what is wrong


def test_no_argument_is_changed_in_place():
    layer = MultiHeadAttention(8, 2, rotary=True, dropout=0.5)
    q, k, v = torch.randn(2, 2, 4, 4), torch.randn(2, 2, 5, 4), torch.randn(2, 2, 5, 4)
    x, key = torch.randn(2, 4, 8), torch.randn(2, 5, 8)
    float_mask = no_key_for_row_1("float").float()
    arguments = [q, k, v, x, key, no_key_for_row_1("bool"), float_mask]
    before = [argument.clone() for argument in arguments]
    for mask in (None, arguments[5], float_mask):
        scaled_dot_product_attention(q, k, v, mask, dropout_p=0.5)
        for argument in layer(x, key, key, mask):
            argument.detach().zero_()  # nor does the result share memory with them
    split_heads(x, 2)
    merge_heads(q)
    for argument, copy in zip(arguments, before, strict=True):
        assert torch.equal(argument, copy)
        assert argument._version == 0


def ones(*shape):
    return torch.ones(*shape)


def filled_cache():
    cache = KVCache()
    MultiHeadAttention(8, 2)(ones(2, 3, 8), cache=cache)
    return cache


def attend(q=(2, 4, 3), k=(2, 5, 3), v=(2, 5, 2), mask=None, **options):
    return scaled_dot_product_attention(ones(*q), ones(*k), ones(*v), mask, **options)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            lambda: scaled_dot_product_attention([1.0], ones(1, 1), ones(1, 1)),
            TypeError,
            "q is a list; expected a torch",
        ),
        (lambda: attend(q=(3,)), ValueError, r"q has shape \(3,\), 1 axes; expected at least 2: \(... i d\)"),
        (lambda: attend(k=(2, 5, 4)), ValueError, r"k has shape \(2, 5, 4\), read as \(... j d\); expected d = 3"),
        (lambda: attend(v=(2, 6, 2)), ValueError, r"v has shape \(2, 6, 2\), read as \(... j dv\); expected j = 5"),
        (lambda: attend(q=(2, 4, 0), k=(2, 5, 0)), ValueError, "its last axis, d, is empty"),
        (
            lambda: attend(k=(3, 5, 3), v=(3, 5, 2)),
            ValueError,
            r"leading axes of q, k, v do not fit together.*\(3, 5, 3\)",
        ),
        (lambda: scaled_dot_product_attention(*[ones(2, 2).int()] * 3), TypeError, "expected one floating-point dtype"),
        (
            lambda: scaled_dot_product_attention(ones(2, 2), ones(2, 2).double(), ones(2, 2)),
            TypeError,
            "q, k, v are torch.float32, torch.float64, torch.float32",
        ),
        (lambda: attend(mask=[[True]]), TypeError, r"mask is a list; expected a bool tensor \(True = may attend\)"),
        (lambda: attend(mask=ones(4, 5).int()), TypeError, r"mask is torch.int32; expected bool.*use mask.bool\(\)"),
        (lambda: attend(mask=ones(4, 4).bool()), ValueError, r"mask has shape \(4, 4\).*the scores' \(2, 4, 5\)"),
        (
            lambda: attend(mask=ones(3, 2, 4, 5).bool()),
            ValueError,
            r"axis of size 1 for the heads, as in mask\[:, None\]",
        ),
        (lambda: attend(dropout_p=1.5), ValueError, "dropout"),
        (lambda: attend(dropout_p=-0.5), ValueError, "dropout_p is -0.5; expected a chance from 0 to 1"),
        (lambda: attend(dropout_p=math.nan), ValueError, "dropout_p is nan"),
        (lambda: attend(dropout_p="x"), TypeError, "dropout_p is 'x', a str; expected a number from 0 to 1"),
        (
            lambda: split_heads(ones(2, 3, 8), 3),
            ValueError,
            "num_heads is 3 and the width of x is 8; expected the first",
        ),
        (lambda: split_heads(ones(2, 3, 8), 0), ValueError, "num_heads is 0; expected 1 or more"),
        (lambda: split_heads(ones(2, 3, 8), 2.0), TypeError, "num_heads is 2.0, a float; expected an int"),
        (lambda: split_heads(ones(8), 2), ValueError, r"x has shape \(8,\), 1 axes; expected at least 2"),
        (lambda: merge_heads(ones(3, 4)), ValueError, r"2 axes; expected at least 3: \(... h n d\)"),
        (
            lambda: MultiHeadAttention(10, 4),
            ValueError,
            "num_heads is 4 and d_model is 10; expected the first to divide",
        ),
        (lambda: MultiHeadAttention(8, 4, num_kv_heads=3), ValueError, "num_kv_heads is 3 and num_heads is 4"),
        (lambda: MultiHeadAttention(8, 4, num_kv_heads=0), ValueError, "num_kv_heads is 0; expected 1 or more"),
        (lambda: MultiHeadAttention(8, 0, d_k=2), ValueError, "expected 1 or more"),
        (lambda: MultiHeadAttention(8, 2, d_k=0), ValueError, "d_k is 0; expected 1 or more"),
        (lambda: MultiHeadAttention(8, 2, d_k=2.5), TypeError, "d_k is 2.5, a float; expected an int"),
        (lambda: MultiHeadAttention(0, 2, d_k=2), ValueError, "d_model is 0; expected 1 or more"),
        (lambda: MultiHeadAttention(8.0, 2), TypeError, "d_model is 8.0, a float; expected an int"),
        (lambda: MultiHeadAttention(8, 2, dropout=1.5), ValueError, "dropout is 1.5; expected a chance from 0 to 1"),
        (lambda: MultiHeadAttention(8, 2, dropout=math.nan), ValueError, "dropout is nan"),
        (lambda: MultiHeadAttention(8, 2, dropout="x"), TypeError, "dropout is 'x', a str; expected a number"),
        (lambda: MultiHeadAttention(8, 2)(ones(2, 3, 8), cache=()), TypeError, "cache is a tuple; expected a KVCache"),
        (
            lambda: MultiHeadAttention(8, 2).double()(ones(2, 1, 8).double(), cache=filled_cache()),
            TypeError,
            "the cache holds torch.float32 and the new keys are torch.float64; start a new KVCache",
        ),
        (lambda: MultiHeadAttention(6, 2, rotary=True), ValueError, "d_k is 3; rotary turns pairs of channels"),
        (lambda: MultiHeadAttention(8, 2)(ones(2, 3, 7)), ValueError, r"query has shape \(2, 3, 7\).*expected e = 8"),
        (lambda: MultiHeadAttention(8, 2)(ones(2, 3, 8), ones(2, 3, 7)), ValueError, "key has shape.*expected e = 8"),
        (
            lambda: MultiHeadAttention(8, 2)(ones(2, 3, 8), ones(2, 4, 8), ones(2, 5, 8)),
            ValueError,
            r"value has shape \(2, 5, 8\).*expected j = 4",
        ),
        (lambda: MultiHeadAttention(8, 2)([1.0]), TypeError, "query is a list; expected a torch.Tensor"),
        (
            lambda: MultiHeadAttention(8, 2)(ones(2, 3, 8).double()),
            TypeError,
            r"query is torch.float64 and the layer is torch.float32; convert one: x.to\(torch.float32\)",
        ),
        (
            lambda: MultiHeadAttention(8, 2)(ones(2, 3, 8), ones(2, 3, 8).int()),
            TypeError,
            "key is torch.int32 and the layer",
        ),
        (
            lambda: MultiHeadAttention(8, 2)(ones(2, 3, 8), ones(4, 3, 8)),
            ValueError,
            "leading axes of q, k, v do not fit",
        ),
        (
            lambda: MultiHeadAttention(8, 2)(ones(2, 3, 8), mask=ones(2, 3, 3).bool()[:, :2]),
            ValueError,
            "mask has shape",
        ),
    ],
)
def test_says_what_is_wrong(call, error, words):
    with pytest.raises(error, match=words):
        call()
