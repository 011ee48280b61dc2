"""positions.py: turning by position, against complex numbers and by the properties that it is used for."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mha_lessons.positions import ROTARY_LAYOUTS, rotary
from tests.agree import assert_agree, assert_rounded_once, randn

bounded = settings(max_examples=25)
layouts = pytest.mark.parametrize("layout", ROTARY_LAYOUTS)


def turned_by_complex_numbers(x, offset, base, layout):
    """Pair m as one complex number, times exp(i · position · base^(-2m/d))."""
    n, d = x.shape[-2:]
    pairs = x.unflatten(-1, (2, d // 2)).mT if layout == "half" else x.unflatten(-1, (d // 2, 2))
    frequency = torch.tensor([base ** (-2 * m / d) for m in range(d // 2)], dtype=torch.float64)
    angle = torch.arange(offset, offset + n, dtype=torch.float64)[:, None] * frequency
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angle), angle))
    return (turned.mT if layout == "half" else turned).flatten(-2)


@bounded
@given(
    leading=st.lists(st.integers(1, 3), max_size=3),
    n=st.integers(1, 5),
    pairs=st.integers(1, 4),
    offset=st.integers(0, 50),
    base=st.sampled_from([10_000.0, 7.0, 500_000]),
    layout=st.sampled_from(ROTARY_LAYOUTS),
    seed=st.integers(0, 999),
)
def test_rotary_is_multiplication_by_a_complex_number(leading, n, pairs, offset, base, layout, seed):
    x = randn(*leading, n, 2 * pairs, seed=seed)
    out = rotary(x, offset=offset, base=base, layout=layout)
    assert_agree(out, turned_by_complex_numbers(x, offset, base, layout))


def test_rotary_defaults():
    x = torch.randn(2, 3, 5, 6).double()
    assert torch.equal(rotary(x), rotary(x, offset=0, base=10_000.0, layout="interleaved"))


@layouts
def test_rotary_of_no_positions(layout):
    assert rotary(torch.empty(2, 0, 4), layout=layout).shape == (2, 0, 4)


def test_rotary_layouts_by_hand():
    x = torch.tensor([[1.0, 0.0, 0.0, 0.0]]).double()
    c, s = math.cos(1), math.sin(1)
    assert_agree(rotary(x, offset=1, layout="interleaved"), torch.tensor([[c, s, 0, 0]], dtype=torch.float64))
    assert_agree(rotary(x, offset=1, layout="half"), torch.tensor([[c, 0, s, 0]], dtype=torch.float64))


@layouts
def test_rotary_products_depend_on_the_distance_alone(layout):
    q, k = torch.randn(2, 3, 1, 8).double()

    def product(i, j):
        return (rotary(q, offset=i, layout=layout) * rotary(k, offset=j, layout=layout)).sum(-1)

    for distance in (-3, 2, 11):
        assert_agree(product(20, 20 - distance), product(87, 87 - distance))
    assert (product(20, 18) - product(20, 19)).abs().min() > 1e-3
    assert (product(20, 18) - product(18, 20)).abs().min() > 1e-3  # the sign of the distance counts


@layouts
def test_rotary_keeps_lengths_and_leaves_position_0(layout):
    x = torch.randn(2, 4, 5, 6).double()
    out = rotary(x, layout=layout)
    assert torch.equal(out[..., 0, :], x[..., 0, :])
    assert_agree(out.norm(dim=-1), x.norm(dim=-1))


@layouts
def test_c23_rotary_continues_at_the_offset(layout):
    x = torch.randn(2, 7, 6).double()
    whole = rotary(x, layout=layout)
    pieces = [rotary(x[:, a:b], offset=a, layout=layout) for a, b in ((0, 3), (3, 4), (4, 7))]
    assert_agree(torch.cat(pieces, dim=1), whole)
    same_length = x[:, :3]
    assert not torch.allclose(
        rotary(same_length, offset=1, layout=layout), rotary(same_length, offset=2, layout=layout)
    )


@layouts
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rotary_angles_are_exact_at_large_positions(dtype, layout):
    x = torch.randn(3, 5, 16).to(dtype)  # at a million, float32 holds an angle to 0.06, half precision none at all
    out = rotary(x, offset=1_000_003, layout=layout)
    assert out.dtype == dtype
    assert_rounded_once(out, turned_by_complex_numbers(x.double(), 1_000_003, 10_000.0, layout))


@layouts
def test_rotary_gradient(layout):
    x = torch.randn(2, 3, 4).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda t: rotary(t, offset=5, layout=layout), (x,))


@layouts
def test_rotary_changes_nothing_in_place(layout):
    x = torch.randn(2, 3, 4).double()
    before = x.clone()
    rotary(x, layout=layout).zero_()
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: rotary(torch.ones(3, 4).int()), TypeError, "x is torch.int32; expected floating-point"),
        (lambda: rotary([[1.0, 2.0]]), TypeError, "x is a list; expected a torch.Tensor"),
        (lambda: rotary(torch.ones(4)), ValueError, r"1 axes; expected at least 2: \(... n d\)"),
        (lambda: rotary(torch.ones(3, 5)), ValueError, "d is 5; rotary turns pairs of channels, so expected an even"),
        (
            lambda: rotary(torch.ones(3, 4), layout="halves"),
            ValueError,
            "layout is 'halves'; expected one of 'interleaved'",
        ),
        (lambda: rotary(torch.ones(3, 4), base=0.0), ValueError, "base is 0.0; expected a positive number"),
        (lambda: rotary(torch.ones(3, 4), base=math.nan), ValueError, "base is nan; expected a positive"),
    ],
)
def test_says_what_is_wrong(call, error, words):
    with pytest.raises(error, match=words):
        call()
