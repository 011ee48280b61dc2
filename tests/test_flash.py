"""flash.py: the same numbers as the plain formula, forwards and backwards, and never anything of size n²."""

import importlib.util
import math
import sys
import types

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from mha_lessons import flash
from mha_lessons.attention import scaled_dot_product_attention
from mha_lessons.flash import Tiling, flash_attention, merge_attention, online_softmax, plain_cost, tiled_cost
from mha_lessons.masks import causal_mask, padding_mask
from tests.agree import assert_agree, randn

bounded = settings(deadline=None, derandomize=True, max_examples=60)


def qkv(*, b=2, h=3, i=7, j=11, d=4, dv=5, seed=0, dtype=torch.float64, grad=False):
    shapes = (b, h, i, d), (b, h, j, d), (b, h, j, dv)
    return [randn(*shape, seed=seed + n, dtype=dtype).requires_grad_(grad) for n, shape in enumerate(shapes)]


def joined(mask, causal, i, j):
    """One mask that says what a mask and causal say together."""
    if not causal:
        return mask
    if mask is None:
        return causal_mask(i, j)
    return mask & causal_mask(i, j) if mask.dtype == torch.bool else mask.masked_fill(~causal_mask(i, j), -torch.inf)


def plain(q, k, v, mask=None, *, causal=False, scale=None):
    """out and lse by the formula, every score at once."""
    mask = joined(mask, causal, q.shape[-2], k.shape[-2])
    out, _ = scaled_dot_product_attention(q, k, v, mask, scale=scale)
    scores = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return out, scores.logsumexp(dim=-1)


def assert_same_attention(inputs, mask=None, *, causal=False, scale=None, tolerance=1e-12, **blocks):
    """Output, lse and the three gradients agree with the plain formula."""
    out, lse = flash_attention(*inputs, mask, causal=causal, scale=scale, return_lse=True, **blocks)
    expected, expected_lse = plain(*inputs, mask, causal=causal, scale=scale)
    assert_agree(out, expected, tolerance=tolerance)
    assert torch.equal(lse.isinf(), expected_lse.isinf())
    assert_agree(lse[~lse.isinf()], expected_lse[~lse.isinf()].detach(), tolerance=tolerance)
    weight = torch.randn_like(out)
    found = torch.autograd.grad(out, inputs, weight)
    for actual, wanted in zip(found, torch.autograd.grad(expected, inputs, weight), strict=True):
        assert_agree(actual, wanted, tolerance=tolerance)


# --- online softmax ---


@bounded
@given(st.integers(0, 9), st.integers(1, 10), st.floats(0, 1), st.integers(0, 99))
@example(6, 2, 0.9, 1)
def test_online_softmax_is_softmax(n, block, hidden, seed):
    scores = randn(2, 3, n, seed=seed) * 30
    scores[randn(2, 3, n, seed=seed + 1) < torch.tensor(hidden).double() * 3 - 1.5] = -torch.inf
    expected = torch.where((scores > -torch.inf).any(-1, keepdim=True), scores, 0).softmax(-1)
    expected = expected * (scores > -torch.inf)
    assert_agree(online_softmax(scores, block), expected)


def test_online_softmax_rescales_when_the_maximum_comes_last():
    scores = torch.tensor([[0.0, 1.0, 700.0], [700.0, 1.0, 0.0], [-800.0, -801.0, -802.0]])
    assert_agree(online_softmax(scores, 1), scores.softmax(-1), tolerance=1e-6)


def test_online_softmax_has_the_gradient_of_softmax():
    scores, weight = randn(3, 7, seed=0).requires_grad_(), randn(3, 7, seed=1)
    actual, expected = (torch.autograd.grad(p, scores, weight) for p in (online_softmax(scores, 3), scores.softmax(-1)))
    assert_agree(actual[0], expected[0])


def test_online_softmax_keeps_half_precision():
    scores = (randn(4, 50, seed=0) * 5).half()
    assert_agree(online_softmax(scores, 8), scores.softmax(-1), tolerance=2e-3)


@pytest.mark.parametrize(
    ("scores", "block", "error", "says"),
    [
        (torch.zeros(3).long(), 1, TypeError, "int64"),
        (torch.zeros(3), 0, ValueError, "block is 0"),
        (torch.zeros(3), 1.0, TypeError, "block"),
        (torch.tensor(1.0), 1, ValueError, "axes"),
        ([1.0], 1, TypeError, "list"),
    ],
)
def test_online_softmax_refuses(scores, block, error, says):
    with pytest.raises(error, match=says):
        online_softmax(scores, block)


# --- the same numbers as the plain formula ---

mask_kinds = st.sampled_from(["none", "bool", "float"])


def random_mask(kind, shape, seed):
    if kind == "none":
        return None
    keep, bias = (randn(math.prod(shape), seed=seed + n).view(shape) for n in (0, 1))
    return keep > -0.3 if kind == "bool" else (3 * bias).masked_fill(keep <= -0.3, -torch.inf)


@settings(bounded, max_examples=150)
@given(
    i=st.integers(1, 13),
    j=st.integers(1, 13),
    block_q=st.integers(1, 8),
    block_k=st.integers(1, 16),
    causal=st.booleans(),
    kind=mask_kinds,
    axes=st.lists(st.booleans(), max_size=4),
    scale=st.sampled_from([None, 0.3, 2.0]),
    seed=st.integers(0, 99),
)
def test_agrees_with_the_plain_formula(i, j, block_q, block_k, causal, kind, axes, scale, seed):
    full = (2, 3, i, j)[4 - len(axes) :]
    mask = random_mask(kind, [n if keep else 1 for n, keep in zip(full, axes, strict=True)], seed)
    inputs = qkv(i=i, j=j, seed=seed, grad=True)
    assert_same_attention(inputs, mask, causal=causal, scale=scale, block_q=block_q, block_k=block_k)


@pytest.mark.parametrize(("i", "j"), [(700, 1100), (1100, 700), (513, 513)])
@pytest.mark.parametrize("causal", [False, True])
def test_agrees_with_its_own_blocks_and_ragged_tails(i, j, causal):
    assert_same_attention(qkv(b=1, h=2, i=i, j=j, grad=True), causal=causal)


def test_c13_the_causal_bound_comes_from_the_last_row():
    for block_q in range(1, 7):
        for block_k in (1, 2, 3, 4, 8, 12, 20):
            for i, j in ((12, 12), (5, 12), (12, 5)):
                q, k, v = qkv(b=1, h=2, i=i, j=j)
                out = flash_attention(q, k, v, causal=True, block_q=block_q, block_k=block_k)
                assert_agree(out, plain(q, k, v, causal=True)[0])


def test_causal_is_pytorchs_where_the_lengths_agree():
    q, k, v = qkv(i=19, j=19)
    expected = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert_agree(flash_attention(q, k, v, causal=True, block_q=7, block_k=12), expected)


def test_c05_a_hidden_first_tile_and_a_hidden_row():
    keep = torch.tensor([[0, 0, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)
    inputs = qkv(i=4, j=4, grad=True)
    bias = torch.zeros(4, 4, dtype=torch.float64).masked_fill(~keep, -torch.inf)
    for mask in (keep, bias):
        assert_same_attention(inputs, mask, block_q=2, block_k=2)
        out, lse = flash_attention(*inputs, mask, block_q=2, block_k=2, return_lse=True)
        assert (out[..., 2, :] == 0).all()
        assert (lse[..., 2] == -torch.inf).all()
        assert (torch.autograd.grad(out.sum(), inputs)[0][..., 2, :] == 0).all()


def test_scores_far_below_zero_in_a_visible_row():
    """A shift that starts at 0, or a finite sentinel, loses these."""
    q, k, v = qkv(i=3, j=8, grad=True)
    assert_same_attention((q, k, v), torch.full((3, 8), -3000.0, dtype=torch.float64), block_k=3, tolerance=1e-9)
    assert_same_attention((q, k, v), torch.linspace(-1e6, 1e6, 8).double(), block_k=3, tolerance=1e-9)


@pytest.mark.parametrize("low", [-1e9, -1e30, torch.finfo(torch.float32).min])
def test_a_row_of_very_low_numbers_is_a_mean(low):
    """In units of log 2 the lowest would be -inf; and beside such a maximum, the log of a sum is lost."""
    inputs = qkv(i=3, j=8, dtype=torch.float32, grad=True)
    mask = torch.zeros(3, 8)
    mask[1], mask[2, 4:] = low, -torch.inf
    assert_same_attention(inputs, mask, block_k=3, tolerance=2e-5)
    out = flash_attention(*inputs, mask, block_k=3)
    assert_agree(out[..., 1, :], inputs[2].mean(-2), tolerance=1e-5)


def test_a_padded_tail_takes_no_weight():
    """Keys filled up to a whole tile with zeros would score 0 and take weight where all scores are low."""
    q, k, v = qkv(i=3, j=5, grad=True)
    q, k = q.detach() - 4, k.detach() + 4
    assert_same_attention((q.requires_grad_(), k.requires_grad_(), v), block_q=2, block_k=4)


def test_c28_gradients_by_gradcheck():
    inputs = qkv(b=1, h=2, i=3, j=5, d=2, dv=3, grad=True)
    mask = torch.tensor([[1, 0, 1, 1, 0], [0, 0, 0, 0, 0], [0, 0, 0, 1, 1]], dtype=torch.bool)
    for arguments in ({}, {"causal": True, "scale": 0.9}, {"mask": mask}):
        assert torch.autograd.gradcheck(
            lambda q, k, v, a=arguments: flash_attention(q, k, v, block_q=2, block_k=2, **a), inputs
        )


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)])
def test_gradients_of_some_inputs_alone(wanted):
    inputs = qkv()
    chosen = [inputs[n].requires_grad_() for n in wanted]
    actual = torch.autograd.grad(flash_attention(*inputs, block_q=3, block_k=4).square().sum(), chosen)
    for found, expected in zip(actual, torch.autograd.grad(plain(*inputs)[0].square().sum(), chosen), strict=True):
        assert_agree(found, expected)


def test_lse_carries_no_gradient_and_a_second_derivative_is_refused():
    q, k, v = qkv(grad=True)
    out, lse = flash_attention(q, k, v, return_lse=True)
    assert out.requires_grad
    assert not lse.requires_grad
    (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(("i", "j"), [(40, 70), (600, 1100)])
def test_half_precision(dtype, tolerance, i, j):
    inputs = qkv(b=1, i=i, j=j, d=16, dtype=dtype, grad=True)
    exact = [x.detach().float().requires_grad_() for x in inputs]
    out, lse = flash_attention(*inputs, causal=True, return_lse=True)
    expected, expected_lse = plain(*exact, causal=True)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    assert_agree(out.float(), expected, tolerance=tolerance)
    assert_agree(lse, expected_lse.detach(), tolerance=1e-5)
    grads = torch.autograd.grad(out, inputs, torch.ones_like(out))
    for grad, wanted in zip(grads, torch.autograd.grad(expected.sum(), exact), strict=True):
        assert grad.dtype == dtype
        assert_agree(grad.float(), wanted, tolerance=5 * tolerance)


def test_half_precision_does_not_overflow_inside():
    q, k, v = (torch.full((2, 6, 64), 200.0).half() for _ in range(3))  # q·k = 2.6 million; float16 ends at 65504
    assert_agree(flash_attention(q, k, v, block_k=4), v)


@pytest.mark.parametrize("onednn", [True, False])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["none", "bool", "float"])
def test_large_tiles_by_either_library(monkeypatch, onednn, causal, kind):
    if not onednn:
        monkeypatch.setattr(flash, "_onednn_linear", None)
    mask = random_mask(kind, (600, 1100), 5)
    inputs = qkv(b=1, h=1, i=600, j=1100, d=64, dv=64, dtype=torch.float32, grad=True)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    out, weight = flash_attention(*inputs, mask, causal=causal), randn(1, 1, 600, 64, seed=9)
    expected = plain(*exact, mask, causal=causal)[0]
    assert_agree(out.double(), expected, tolerance=2e-6)
    grads = torch.autograd.grad(out, inputs, weight.float())
    for actual, wanted in zip(grads, torch.autograd.grad(expected, exact, weight), strict=True):
        assert_agree(actual.double(), wanted, tolerance=1e-5)


@pytest.fixture
def of_onednn(monkeypatch):
    """The shapes of all products that oneDNN is asked for."""
    shapes = []

    def linear(x, weight, *rest):
        shapes.append((*x.shape, len(weight)))
        return x @ weight.T

    monkeypatch.setattr(flash, "_onednn_linear", linear)
    return shapes


def test_large_products_go_to_onednn_both_ways(of_onednn):
    inputs = qkv(b=1, h=1, i=1024, j=1024, d=64, dv=64, dtype=torch.float32, grad=True)
    flash_attention(*inputs).sum().backward()
    assert of_onednn.count((512, 64, 512)) == 4 + 2 * 4  # scores, made twice, and the gradient of the weights
    assert of_onednn.count((512, 512, 64)) == 4 + 3 * 4  # the output and three gradients


@pytest.mark.parametrize(
    ("n", "d", "dtype"), [(64, 64, torch.float32), (500, 64, torch.float32), (512, 64, torch.double)]
)
def test_small_odd_and_double_ones_do_not(of_onednn, n, d, dtype):
    flash_attention(*qkv(b=1, h=1, i=n, j=n, d=d, dv=d, dtype=dtype))
    assert not of_onednn


def test_onednn_is_left_alone_where_it_is_switched_off_or_a_compiler_works(monkeypatch, of_onednn):
    inputs = qkv(b=1, h=1, i=512, j=512, d=64, dv=64, dtype=torch.float32)
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        flash_attention(*inputs)
    enabled = torch._C._get_mkldnn_enabled()
    try:
        torch._C._set_mkldnn_enabled(False)
        flash_attention(*inputs)
    finally:
        torch._C._set_mkldnn_enabled(enabled)
    assert not of_onednn
    flash_attention(*inputs)
    assert of_onednn


@pytest.mark.parametrize("mkldnn", [torch.ops.mkldnn, types.SimpleNamespace()])
def test_it_loads_once_more_and_without_the_operator(monkeypatch, mkldnn):
    monkeypatch.setattr(torch.ops, "mkldnn", mkldnn)
    spec = importlib.util.spec_from_file_location("flash_again", flash.__file__)
    again = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "flash_again", again)
    spec.loader.exec_module(again)
    q, k, v = qkv(b=1, h=1, i=512, j=512, d=64, dv=64, dtype=torch.float32)
    assert_agree(again.flash_attention(q, k, v), plain(q, k, v)[0], tolerance=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_overlapping_rows(dtype):
    """Windows of a signal, each one step on, are a view whose rows share memory."""
    windows = randn(1087, seed=0, dtype=dtype).unfold(0, 64, 1)
    q, other = (randn(n, 64, seed=n, dtype=dtype) for n in (512, 1024))
    for k, v in ((windows, other), (other, windows)):
        assert_agree(flash_attention(q, k, v), plain(q, k, v)[0], tolerance=2e-6)


@pytest.mark.parametrize("size", [1e2, 1e5, 1e10])
def test_weights_that_are_made_again_sum_to_1(size):
    """A maximum that is rounded on its way to the backward pass is a factor on them all."""
    q, k = (size * randn(1000, n, 4, seed=n, dtype=torch.float32) for n in (1, 3))
    v = torch.ones(1000, 3, 1, requires_grad=True)
    (grad,) = torch.autograd.grad(flash_attention(q, k, v).sum(), v)
    assert_agree(grad.sum(dim=1), torch.ones(1000, 1), tolerance=1e-6)


@pytest.mark.parametrize("n", [7, 513])
def test_autocast_does_not_reach_inside(n):
    inputs = qkv(b=1, i=n, j=n, d=64, dtype=torch.float32, grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = flash_attention(*inputs)
        grads = torch.autograd.grad(out.sum(), inputs)
    expected = plain(*inputs)[0]
    assert_agree(out, expected, tolerance=1e-5)
    for actual, wanted in zip(grads, torch.autograd.grad(expected.sum(), inputs), strict=True):
        assert_agree(actual, wanted, tolerance=1e-5)


def test_a_scale_of_0_is_a_scale():
    q, k, v = qkv()
    assert_agree(flash_attention(q, k, v, scale=0, block_k=4), v.mean(-2, keepdim=True).expand(2, 3, 7, 5))


def test_functional_gradients():
    q, k, v = qkv(grad=True)
    found = torch.func.grad(lambda x: flash_attention(x, k.detach(), v.detach(), block_k=4).square().sum())(q.detach())
    assert_agree(found, torch.autograd.grad(plain(q, k, v)[0].square().sum(), q)[0])


def test_leading_axes_broadcast():
    """Any number of them; a key/value head shared by several query heads is a view."""
    q, k, v = randn(2, 6, 5, 4, seed=0), randn(2, 1, 7, 4, seed=1), randn(6, 7, 3, seed=2)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    assert_same_attention(inputs, causal=True, block_q=2, block_k=3)
    assert_same_attention([randn(n, 4, seed=n).requires_grad_() for n in (5, 7, 7)], block_q=2, block_k=3)
    assert_same_attention([randn(2, 1, 3, n, 4, seed=n).requires_grad_() for n in (5, 7, 7)], block_q=2, block_k=3)


def test_strided_inputs_and_gradients():
    x = randn(2, 6, 3, 4, seed=0).requires_grad_()
    q = x.transpose(1, 2)
    assert_agree(flash_attention(q, q, q, block_q=4, block_k=4), plain(q, q, q)[0])
    actual = torch.autograd.grad(flash_attention(q, q, q, block_q=4).sum(), x)[0]  # the gradient of sum has stride 0
    assert_agree(actual, torch.autograd.grad(plain(q, q, q)[0].sum(), x)[0])


@pytest.mark.parametrize(("i", "j"), [(0, 3), (3, 0), (0, 0)])
@pytest.mark.parametrize("causal", [False, True])
def test_no_queries_or_no_keys(i, j, causal):
    inputs = qkv(i=i, j=j, grad=True)
    out, lse = flash_attention(*inputs, causal=causal, return_lse=True)
    assert torch.equal(out, torch.zeros(2, 3, i, 5, dtype=torch.float64))
    assert torch.equal(lse, torch.full((2, 3, i), -torch.inf, dtype=torch.float64))
    assert all((grad == 0).all() for grad in torch.autograd.grad(out.sum(), inputs))
    assert flash_attention(*qkv(b=0)).shape == (0, 3, 7, 5)


def test_hidden_content_reaches_nothing():
    clean = qkv(i=6, j=8, grad=True)
    mask = padding_mask([5, 8])
    mask = mask & (torch.arange(6) != 2)[:, None]  # query 2 sees nothing
    dirty = [x.detach().clone() for x in clean]
    dirty[0][:, :, 2], dirty[1][0, :, 5:], dirty[2][0, :, 5:] = torch.nan, torch.nan, torch.inf
    dirty = [x.requires_grad_() for x in dirty]
    for causal in (False, True):
        outs = [flash_attention(*x, mask, causal=causal, block_q=4, block_k=3) for x in (clean, dirty)]
        assert_agree(outs[1], outs[0])
        grads = [torch.autograd.grad(out.square().sum(), x) for out, x in zip(outs, (clean, dirty), strict=True)]
        for actual, expected in zip(grads[1], grads[0], strict=True):
            assert_agree(actual, expected)


@pytest.mark.parametrize("blocks", [(1, 1), (2, 3), (4, 8), (512, 512)])
@pytest.mark.parametrize(("i", "j"), [(6, 6), (3, 8), (7, 4)])
def test_what_mask_and_diagonal_hide_together_reaches_nothing(i, j, blocks):
    """Neither of the two alone hides it from every query."""
    for shape in ((2, 1, i, j), (1, j), (i, 1), (2, 3, i, j)):
        mask = random_mask("bool", shape, 3)
        both = (mask & causal_mask(i, j)).expand(2, 3, i, j)
        clean = qkv(i=i, j=j, grad=True)
        visible = both.any(3), both.any(2), both.any(2)
        dirty = [x.detach().where(part[..., None], torch.nan) for x, part in zip(clean, visible, strict=True)]
        found = []
        for inputs in (clean, [x.requires_grad_() for x in dirty]):
            out = flash_attention(*inputs, mask, causal=True, block_q=blocks[0], block_k=blocks[1])
            found.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
        for actual, expected in zip(found[1], found[0], strict=True):
            assert_agree(actual, expected)


def test_a_visible_nan_is_not_hidden():
    q, k, v = qkv()
    k[0, 0, 3] = torch.nan
    out = flash_attention(q, k, v, block_q=2, block_k=2)
    assert out[0, 0].isnan().all()
    assert torch.isfinite(out[0, 1:]).all()


def test_inputs_stay_as_they_were():
    inputs = [*qkv(), randn(7, 11, seed=9)]
    before = [x.clone() for x in inputs]
    flash_attention(*inputs, causal=True, block_q=2, block_k=3)
    assert all(torch.equal(x, old) for x, old in zip(inputs, before, strict=True))


def refused():
    q, k, v = qkv()
    yield {"k": k[..., :3]}, ValueError, "k has shape"
    yield {"v": v[..., :4, :]}, ValueError, "v has shape"
    yield {"q": q[..., :0], "k": k[..., :0]}, ValueError, "empty"
    yield {"k": k[:, :2]}, ValueError, "leading axes"
    yield {"v": v.float()}, TypeError, "float32"
    yield {"q": q.long(), "k": k.long(), "v": v.long()}, TypeError, "int64"
    yield {"q": [1.0]}, TypeError, "list"
    yield {"mask": torch.zeros(7, 10)}, ValueError, "mask has shape"
    yield {"mask": torch.zeros(2, 2, 3, 7, 11)}, ValueError, "mask has shape"
    yield {"mask": torch.zeros(7, 11).int()}, TypeError, "int32"
    yield {"mask": [[True]]}, TypeError, "list"
    yield {"mask": causal_mask(7, 11).double()}, ValueError, "only 0 and 1"
    yield {"mask": torch.ones(7, 11).half()}, ValueError, "only 0 and 1"
    yield {"mask": causal_mask(7, 1).double()}, ValueError, "only 0 and 1"
    yield {"mask": torch.zeros(7, 11, requires_grad=True)}, ValueError, "detach"
    yield {"block_q": 0}, ValueError, "block_q is 0"
    yield {"block_k": 2.0}, TypeError, "block_k"


@pytest.mark.parametrize(("changed", "error", "says"), list(refused()))
def test_refuses(changed, error, says):
    arguments = dict(zip("qkv", qkv(), strict=True)) | changed
    with pytest.raises(error, match=says):
        flash_attention(**arguments)


# --- what is never made ---


class Watch(TorchDispatchMode):
    """How many numbers the largest tensor has that is made."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor):
                self.largest = max(self.largest, x.numel())
        return result


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("kind", "shape"), [("none", ()), ("bool", (1, 1, 1, 2048)), ("bool", (2048, 1)), ("float", (2048,))]
)
def test_memory_is_linear_both_ways(causal, kind, shape):
    n = 2048
    inputs = qkv(b=1, h=1, i=n, j=n, d=16, dv=16, dtype=torch.float32, grad=True)
    with Watch() as watch:
        flash_attention(*inputs, random_mask(kind, shape, 5), causal=causal).sum().backward()
    assert 0 < watch.largest < n * n / 8


def test_the_watch_sees_what_the_plain_formula_makes():
    inputs = qkv(b=1, h=1, i=200, j=200, d=16, dv=16)
    with Watch() as watch:
        plain(*inputs)
    assert watch.largest == 200 * 200


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_full_mask_is_not_copied(kind):
    """Views of the mask are as large as it is; what is made anew is not."""
    n = 512
    inputs = qkv(b=1, h=2, i=n, j=n, d=16, dv=16, dtype=torch.float32, grad=True)
    mask = random_mask(kind, (n, n), 5)

    class New(Watch):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = super().__torch_dispatch__(func, types, args, kwargs)
            if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() != mask.data_ptr():
                self.new = max(getattr(self, "new", 0), result.untyped_storage().nbytes() // 4)
            return result

    with New() as watch:
        flash_attention(*inputs, mask, block_q=64, block_k=64).sum().backward()
    assert watch.new < n * n / 8


@pytest.mark.parametrize(("i", "j"), [(8, 8), (12, 12), (5, 12), (12, 5), (7, 20)])
@pytest.mark.parametrize("blocks", [(4, 4), (4, 2), (2, 4), (5, 3), (7, 12), (3, 16)])
def test_tiles_cover_what_is_visible_and_none_lies_above_the_diagonal(i, j, blocks):
    visible = causal_mask(i, j)
    for causal in (False, True):
        tiling, visits = Tiling(i, j, *blocks, causal), torch.zeros(i, j)
        for rows, columns in tiling:
            tile = visits[rows, columns]
            assert tile.numel() > 0
            assert tile.shape[0] <= blocks[0]
            assert tile.shape[1] <= blocks[1]
            assert not causal or visible[rows, columns].any()
            assert not causal or visible[rows, columns].all() or tiling.is_diagonal(rows, columns)
            assert causal or not tiling.is_diagonal(rows, columns)
            tile += 1
        assert visits.max() <= 1
        assert (visits[visible if causal else ...] == 1).all()


def flops(n, d, dtype, *, causal, both_ways=False, **blocks):
    """As PyTorch counts them, in units of one product of queries and keys."""
    inputs = qkv(b=1, h=1, i=n, j=n, d=d, dv=d, dtype=dtype, grad=True)
    with FlopCounterMode(display=False) as counter:
        out = flash_attention(*inputs, causal=causal, **blocks)
        if both_ways:
            out.sum().backward()
    return counter.get_total_flops() / (2 * n * n * d)


@pytest.mark.parametrize(("d", "dtype"), [(8, torch.float32), (64, torch.float32), (64, torch.float64)])
def test_flops_are_those_that_torch_counts(d, dtype):
    """Two products forwards, as in the cost model, and five more backwards; a little over half of it if causal."""
    assert flops(1536, d, dtype, causal=False) == 2 == tiled_cost(1536, d, 192 * 1024).flops / (2 * 1536**2 * d)
    assert flops(1536, d, dtype, causal=False, both_ways=True) == 7
    causal = flops(1536, d, dtype, causal=True)
    assert 1 < causal < 1.2
    assert flops(1536, d, dtype, causal=True, both_ways=True) == 3.5 * causal


def test_causal_visits_about_half_the_scores():
    scores = 28 * 64 + 8 * (8 + 6 + 4 + 2) * 2  # 7 + 6 + ... + 1 tiles below the diagonal; 8 on it, in quarters
    assert flops(64, 4, torch.float64, causal=True, block_q=8, block_k=8) == 2 * scores / 64**2


# --- joining parts ---


@bounded
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 99), mask_kinds)
def test_c27_parts_joined_by_their_lse(sizes, seed, kind):
    q, k, v = qkv(i=5, j=sum(sizes), seed=seed)
    mask = random_mask("bool" if kind == "none" else kind, (5, sum(sizes)), seed)
    parts = zip(*(x.split(sizes, dim=-2) for x in (k, v)), mask.split(sizes, dim=-1), strict=True)
    out, lse = torch.zeros_like(q[..., :1]).expand(2, 3, 5, 5), torch.full((2, 3, 5), -torch.inf, dtype=q.dtype)
    for part in parts:  # from nothing: out 0 and lse -inf join as nothing
        out, lse = merge_attention(out, lse, *flash_attention(q, *part, block_k=2, return_lse=True))
    expected, expected_lse = plain(q, k, v, mask)
    assert_agree(out, expected)
    assert torch.equal(lse.isinf(), expected_lse.isinf())
    assert_agree(lse[~lse.isinf()], expected_lse[~lse.isinf()])


def test_lse_is_natural_and_holds_the_maximum():
    q, k, v = torch.zeros(1, 2, 4), torch.zeros(1, 8, 4), torch.zeros(1, 8, 4)
    assert_agree(flash_attention(q, k, v, return_lse=True)[1], torch.full((1, 2), math.log(8)), tolerance=1e-6)
    bias = torch.full((2, 8), 50.0)
    lse = flash_attention(q, k, v, bias, return_lse=True)[1]
    assert_agree(lse, torch.full((1, 2), 50 + math.log(8)), tolerance=1e-6)


def test_joining_has_the_true_gradient_where_lse_carries_one():
    q, k, v = qkv(grad=True)
    parts = plain(q, k[..., :4, :], v[..., :4, :]), plain(q, k[..., 4:, :], v[..., 4:, :])
    out, _ = merge_attention(*parts[0], *parts[1])
    found = torch.autograd.grad(out.square().sum(), (q, k, v))
    for actual, wanted in zip(found, torch.autograd.grad(plain(q, k, v)[0].square().sum(), (q, k, v)), strict=True):
        assert_agree(actual, wanted)


def test_joining_refuses():
    out, lse = randn(2, 3, 5, seed=0), randn(2, 3, seed=1)
    cases = [
        ((out, lse, out[:, :2], lse[:, :2]), ValueError, "out_b"),
        ((out, lse[:, :2], out, lse), ValueError, "lse_a"),
        ((out, lse[0], out, lse), ValueError, "lse_a"),
        ((out, lse, out.float(), lse), TypeError, "float32"),
        ((out, lse.long(), out, lse), TypeError, "int64"),
        ((out, lse, None, lse), TypeError, "NoneType"),
    ]
    for arguments, error, says in cases:
        with pytest.raises(error, match=says):
            merge_attention(*arguments)
    q, k, v = qkv(grad=True)
    part = flash_attention(q, k, v, return_lse=True)
    with pytest.raises(ValueError, match="no_grad"):
        merge_attention(*part, *part)
    with torch.no_grad():
        assert_agree(merge_attention(*part, *part)[0], part[0])


# --- the cost model ---


def counted_plain(n, d):
    """FlashAttention's algorithm 0, line by line: numbers moved."""
    return (2 * n * d + n * n) + (n * n + n * n) + (n * n + n * d + n * d)


def counted_tiled(n, d, numbers):
    """FlashAttention's algorithm 1, line by line: numbers moved."""
    width = -(-numbers // (4 * d))
    height, moved = min(width, d), n * d + 2 * n
    for start in range(0, n, width):
        moved += 2 * min(width, n - start) * d
        for at in range(0, n, height):
            lines = min(height, n - at)
            moved += (2 * lines * d + 2 * lines) + (lines * d + 2 * lines)
    return moved


@bounded
@given(st.integers(1, 50), st.integers(1, 12), st.integers(4, 60), st.sampled_from([2, 4]))
def test_costs_are_those_of_the_algorithms(n, d, rows, width):
    plainly, tiled = (
        plain_cost(n, d, bytes_per_number=width),
        tiled_cost(n, d, rows * d * width, bytes_per_number=width),
    )
    assert plainly.bytes_moved == width * counted_plain(n, d)
    assert tiled.bytes_moved == width * counted_tiled(n, d, rows * d)
    assert plainly.flops == tiled.flops == 2 * n * n * d * 2
    assert (plainly.bytes_held, tiled.bytes_held) == (2 * n * n * width, 2 * n * width)
    assert plainly.intensity == plainly.flops / plainly.bytes_moved


def test_theorem_2():
    """Moved: n² for plain attention; n² d² / M for tiles: four times the memory, a quarter of the traffic."""
    assert plain_cost(2**16, 64).bytes_moved / plain_cost(2**15, 64).bytes_moved == pytest.approx(4, rel=0.01)
    moved = [tiled_cost(2**16, 64, size).bytes_moved for size in (2**16, 2**18)]
    assert moved[0] / moved[1] == pytest.approx(4, rel=0.05)
    numbers = 2**16 // 4
    assert moved[0] / 4 == pytest.approx(12 * (2**16) ** 2 * 64**2 / numbers, rel=0.05)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: plain_cost(0, 64), ValueError, "n is 0"),
        (lambda: plain_cost(8, 64.0), TypeError, "d is"),
        (lambda: tiled_cost(8, 64, 4 * 4 * 64 - 1), ValueError, "4 d = 256"),
        (lambda: tiled_cost(8, 64, 0), ValueError, "fast_memory is 0"),
    ],
)
def test_costs_refuse(call, error, says):
    with pytest.raises(error, match=says):
        call()
