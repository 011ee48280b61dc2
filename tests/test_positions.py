"""positions.py: rotary against complex numbers, the rest against formulas by loops, and all by their properties."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mha_lessons.positions import (
    ROTARY_LAYOUTS,
    LearnedEncoding,
    RelativePositionBias,
    SinusoidalEncoding,
    alibi_bias,
    alibi_slopes,
    relative_position_index,
    resize_positions,
    rotary,
    sinusoidal_encoding,
)
from tests.agree import assert_agree, assert_rounded_once, randn

bounded = settings(max_examples=25)
layouts = pytest.mark.parametrize("layout", ROTARY_LAYOUTS)
float64 = torch.float64


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
def test_rotary_says_what_is_wrong(call, error, words):
    with pytest.raises(error, match=words):
        call()


def sinusoid_by_loops(n, d_model, base, offset):
    def entry(position, column):
        angle = position / base ** (2 * (column // 2) / d_model)
        return math.cos(angle) if column % 2 else math.sin(angle)

    rows = [[entry(offset + i, column) for column in range(d_model)] for i in range(n)]
    return torch.tensor(rows, dtype=float64).reshape(n, d_model)


@bounded
@given(
    n=st.integers(0, 6),
    d_model=st.integers(1, 9),
    base=st.sampled_from([10_000.0, 7.0, 100]),
    offset=st.integers(0, 7000),
)
def test_sinusoid_is_the_formula(n, d_model, base, offset):
    out = sinusoidal_encoding(n, d_model, base=base, offset=offset, dtype=float64)
    assert_agree(out, sinusoid_by_loops(n, d_model, base, offset), tolerance=1e-11)


def test_sinusoid_defaults():
    assert torch.equal(sinusoidal_encoding(5, 6), sinusoidal_encoding(5, 6, base=10_000.0, offset=0))
    assert sinusoidal_encoding(5, 6).dtype == torch.float32


def test_odd_width_ends_with_a_sine():
    out = sinusoidal_encoding(2, 5, dtype=float64)
    assert out[0].tolist() == [0, 1, 0, 1, 0]
    assert out[1, 4].item() == pytest.approx(math.sin(10_000**-0.8), abs=1e-15)


def test_sinusoid_has_no_last_position():
    far = sinusoidal_encoding(1, 14, offset=1_234_567)
    assert_agree(far.double(), sinusoid_by_loops(1, 14, 10_000, 1_234_567), tolerance=1e-6)


def test_dot_product_of_two_rows_depends_on_their_distance_alone():
    table = sinusoidal_encoding(30, 12, dtype=float64)
    products = table @ table.T
    for distance in range(30):
        along = products.diagonal(distance)
        assert_agree(along, along[:1].expand_as(along))
    assert_agree(products.diagonal(), torch.full((30,), 6.0, dtype=float64))  # d_model / 2


def test_a_shift_turns_each_pair_of_columns():
    # (sin, cos) turns clockwise: seen as (cos, sin) it turns as rotary turns it.
    table = sinusoidal_encoding(9, 6, dtype=float64)
    turned = rotary(table[:1].unflatten(-1, (3, 2)).flip(-1).flatten(-2), offset=4)
    assert_agree(turned.unflatten(-1, (3, 2)).flip(-1).flatten(-2), table[4:5])


@pytest.mark.parametrize("module", [SinusoidalEncoding(5).double(), LearnedEncoding(8, 5).double()])
def test_tokens_of_one_item_differ_and_items_agree(module):
    out = module(torch.zeros(2, 3, 5, dtype=float64))
    assert torch.equal(out[0], out[1])
    assert not torch.isclose(out[0, 0], out[0, 1]).all()


def test_sinusoidal_module_adds():
    x = randn(2, 4, 7, seed=0)
    out = SinusoidalEncoding(7)(x, offset=3)
    assert_agree(out, x + sinusoid_by_loops(4, 7, 10_000, 3))
    assert out[1, 0, 0] == x[1, 0, 0] + math.sin(3)
    assert SinusoidalEncoding(7)(x.to(torch.bfloat16)).dtype == torch.bfloat16
    assert not list(SinusoidalEncoding(7).parameters())
    heads = randn(2, 3, 4, 7, seed=1)  # positions stand second to last, however many axes lead
    assert_agree(SinusoidalEncoding(7)(heads), heads + sinusoid_by_loops(4, 7, 10_000, 0))


def test_learned_module_adds_the_rows_of_its_table():
    module, x = LearnedEncoding(6, 5).double(), randn(2, 3, 5, seed=0)
    assert torch.equal(module(x), x + module.table[:3])
    assert torch.equal(module(x, offset=3), x + module.table[3:6])
    assert module(x.to(torch.bfloat16)).dtype == torch.bfloat16
    module(x).sum().backward()
    assert torch.equal(module.table.grad, torch.tensor([2, 2, 2, 0, 0, 0.0], dtype=float64)[:, None].expand(6, 5))


@pytest.mark.parametrize(("n", "offset", "last"), [(7, 0, 6), (1, 6, 6), (4, 3, 6), (1, -1, -1)])
def test_learned_positions_end(n, offset, last):
    with pytest.raises(ValueError, match=rf"positions {offset} to {last} .* ends at 5.*larger max_len"):
        LearnedEncoding(6, 5)(torch.zeros(2, n, 5), offset=offset)


def published_slopes(num_heads):
    """The rule of ALiBi's authors: the next lower power of two, then every other slope of the next higher."""
    if math.log2(num_heads).is_integer():
        first = 2 ** (-(2 ** -(math.log2(num_heads) - 3)))
        return [first * first**i for i in range(num_heads)]
    lower = 2 ** math.floor(math.log2(num_heads))
    return published_slopes(lower) + published_slopes(2 * lower)[0::2][: num_heads - lower]


@pytest.mark.parametrize("num_heads", range(1, 34))
def test_alibi_slopes_follow_the_published_rule(num_heads):
    slopes = alibi_slopes(num_heads)
    assert_agree(slopes, torch.tensor(published_slopes(num_heads)), tolerance=1e-7)
    assert len(slopes.unique()) == num_heads


def test_alibi_slopes_by_hand():
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    assert_agree(alibi_slopes(3), torch.tensor([2**-4, 2**-8, 2**-2]), tolerance=0)


@bounded
@given(num_heads=st.integers(1, 7), n_queries=st.integers(0, 5), n_keys=st.integers(0, 5))
def test_alibi_is_minus_slope_times_distance_from_the_lower_right(num_heads, n_queries, n_keys):
    bias, slopes = alibi_bias(num_heads, n_queries, n_keys), alibi_slopes(num_heads)
    assert bias.shape == (num_heads, n_queries, n_keys)
    assert torch.isfinite(bias).all()
    for h, i, j in itertools.product(range(num_heads), range(n_queries), range(n_keys)):
        assert bias[h, i, j] == -slopes[h] * abs((n_keys - n_queries + i) - j)


def test_alibi_of_a_square():
    assert alibi_bias(2, 3)[0].tolist() == (-torch.tensor([[0, 1, 2], [1, 0, 1], [2, 1, 0]]) / 16).tolist()
    assert "-0." not in str(alibi_bias(2, 1).tolist())


@pytest.mark.parametrize(("height", "width"), [(1, 1), (2, 3), (3, 2), (1, 4), (5, 1), (7, 7)])
def test_relative_index_numbers_the_offsets(height, width):
    index = relative_position_index(height, width)
    cells = list(itertools.product(range(height), range(width)))
    number_of = {}
    for (i, (row, column)), (j, (key_row, key_column)) in itertools.product(enumerate(cells), repeat=2):
        offset = (row - key_row, column - key_column)
        assert number_of.setdefault(offset, index[i, j].item()) == index[i, j].item()
    count = (2 * height - 1) * (2 * width - 1)
    assert sorted(number_of.values()) == list(range(count))
    assert [number_of[offset] for offset in sorted(number_of)] == list(range(count))  # query minus key, row by row
    assert index.dtype == torch.int64


def test_relative_bias_looks_up_each_offset():
    module = RelativePositionBias(4, 2, 3)
    bias = module()
    assert bias.shape == (4, 6, 6)
    assert module.table.shape == (15, 4)
    assert torch.equal(bias[2], module.table[:, 2][relative_position_index(2, 3)])
    assert list(module.state_dict()) == ["table"]


def test_relative_bias_learns():
    module = RelativePositionBias(1, 2, 2)
    module().sum().backward()
    assert module.table.grad.flatten().tolist() == [1, 2, 1, 2, 4, 2, 1, 2, 1]  # how many pairs share each offset


def cubic_weights(old, new):
    """(new old) weights of one axis: Keys' kernel with a = -3/4 about each new centre, edges repeated."""

    def kernel(t, a=-0.75):
        t = abs(t)
        near, far = (a + 2) * t**3 - (a + 3) * t**2 + 1, a * t**3 - 5 * a * t**2 + 8 * a * t - 4 * a
        return near if t <= 1 else far if t < 2 else 0.0

    weights = torch.zeros(new, old, dtype=float64)
    for i in range(new):
        centre = (i + 0.5) * old / new - 0.5
        for j in range(math.floor(centre) - 1, math.floor(centre) + 3):
            weights[i, min(max(j, 0), old - 1)] += kernel(centre - j)
    return weights


@bounded
@given(
    old=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    new=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    num_prefix=st.integers(0, 2),
    seed=st.integers(0, 99),
)
def test_resize_is_cubic_along_rows_and_columns(old, new, num_prefix, seed):
    table = randn(num_prefix + old[0] * old[1], 3, seed=seed)
    out = resize_positions(table, old, new, num_prefix=num_prefix)
    grid = table[num_prefix:].unflatten(0, old)
    rows, columns = cubic_weights(old[0], new[0]), cubic_weights(old[1], new[1])
    assert_agree(out[num_prefix:], torch.einsum("yr,xc,rce->yxe", rows, columns, grid).flatten(0, 1))
    assert torch.equal(out[:num_prefix], table[:num_prefix])


def test_resize_agrees_with_interpolate():
    table = randn(1 + 6, 4, seed=0)
    picture = table[1:].T.reshape(1, 4, 2, 3)
    options = {"mode": "bicubic", "align_corners": False, "antialias": False}
    expected = nn.functional.interpolate(picture, size=(5, 2), **options)[0].flatten(1).T
    assert_agree(resize_positions(table, (2, 3), (5, 2))[1:], expected)


def test_resize_to_the_same_grid_changes_nothing():
    table = randn(1 + 6, 4, seed=0)
    assert_agree(resize_positions(table, (2, 3), (2, 3)), table)


def test_rows_stay_rows():
    row = torch.arange(2.0, dtype=float64).repeat_interleave(3)[:, None]  # a 2 x 3 grid whose cells hold their row
    out = resize_positions(row, (2, 3), (4, 5), num_prefix=0).reshape(4, 5)
    assert_agree(out, out[:, :1].expand(4, 5))
    assert (out[1:] > out[:-1]).all()


def test_resize_keeps_dtype_and_gradient():
    table = torch.randn(7, 4, requires_grad=True)
    resize_positions(table, (2, 3), (3, 3)).sum().backward()
    assert torch.isfinite(table.grad).all()
    assert resize_positions(table.to(torch.bfloat16), (2, 3), (3, 3)).dtype == torch.bfloat16


def test_resize_names_both_numbers():
    with pytest.raises(ValueError, match=r"table has 7 rows; expected .* 1 \+ 3 · 3 = 10"):
        resize_positions(torch.zeros(7, 4), (3, 3), (4, 4))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sinusoidal_encoding(-1, 4), "n is -1"),
        (lambda: sinusoidal_encoding(3, 0), "d_model is 0"),
        (lambda: sinusoidal_encoding(3, 4, base=0), "base is 0"),
        (lambda: SinusoidalEncoding(0), "d_model is 0"),
        (lambda: SinusoidalEncoding(4)(torch.zeros(2, 3, 5)), "expected e = 4"),
        (lambda: LearnedEncoding(0, 4), "max_len is 0"),
        (lambda: LearnedEncoding(4, 0), "d_model is 0"),
        (lambda: LearnedEncoding(9, 4)(torch.zeros(2, 3, 5)), "expected e = 4"),
        (lambda: alibi_slopes(0), "num_heads is 0"),
        (lambda: alibi_bias(0, 3), "num_heads is 0"),
        (lambda: alibi_bias(2, -1), "n_queries is -1"),
        (lambda: alibi_bias(2, 1, -1), "n_keys is -1"),
        (lambda: relative_position_index(0, 2), "height is 0"),
        (lambda: relative_position_index(2, 0), "width is 0"),
        (lambda: RelativePositionBias(0, 2, 2), "num_heads is 0"),
        (lambda: resize_positions(torch.zeros(7, 4), (2, 3), (0, 3)), "new_grid is 0"),
        (lambda: resize_positions(torch.zeros(2, 7, 4), (2, 3), (3, 3)), "expected 2"),
        (lambda: resize_positions(torch.zeros(7, 4), (2, 3), (3, 3, 1)), r"new_grid is \(3, 3, 1\); expected two ints"),
    ],
)
def test_what_cannot_be_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    "call",
    [
        lambda: sinusoidal_encoding(2.0, 4),
        lambda: sinusoidal_encoding(2, 4.0),
        lambda: alibi_slopes(True),
        lambda: relative_position_index(2.0, 2),
        lambda: SinusoidalEncoding(4)(torch.zeros(2, 3, 4, dtype=torch.int64)),
        lambda: LearnedEncoding(9, 4)(torch.zeros(2, 3, 4, dtype=torch.int64)),
        lambda: resize_positions([[0.0]], (1, 1), (2, 2)),
        lambda: resize_positions(torch.zeros(7, 4), 6, (3, 3)),
    ],
)
def test_wrong_types_are_refused(call):
    with pytest.raises(TypeError, match="expected"):
        call()
