"""masks.py: True = may attend, the last query stands at the last key, and masks meet while they are boolean."""

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.attention.bias import causal_lower_right

from mha_lessons.masks import causal_mask, check_mask, combine_masks, padding_mask, sliding_window_mask
from tests.agree import assert_agree

pytorch_attention = nn.functional.scaled_dot_product_attention
bounded = settings(max_examples=30)
lengths_of_both = st.tuples(st.integers(0, 7), st.integers(0, 7))


def by_loops(n_queries, n_keys, may_see):
    """A mask from a rule on (query position, key position), positions counted so that the last ones meet."""
    mask = torch.zeros(n_queries, n_keys, dtype=torch.bool)
    for i in range(n_queries):
        for j in range(n_keys):
            mask[i, j] = may_see(n_keys - n_queries + i, j)
    return mask


@bounded
@given(lengths_of_both)
def test_causal_is_its_definition(lengths):
    i, j = lengths
    mask = causal_mask(i, j)
    assert mask.dtype == torch.bool
    assert torch.equal(mask, by_loops(i, j, lambda query, key: key <= query))
    assert torch.equal(causal_mask(i), causal_mask(i, i))


@pytest.mark.parametrize(("i", "j"), [(1, 6), (2, 6), (5, 6), (6, 6), (5, 3)])
def test_c04_causal_is_aligned_to_the_lower_right(i, j):
    q, k, v = torch.randn(2, 3, i, 4).double(), torch.randn(2, 3, j, 4).double(), torch.randn(2, 3, j, 5).double()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Lower right causal bias will produce NaNs")  # torch 2.13: zeros
        oracle = pytorch_attention(q, k, v, attn_mask=causal_lower_right(i, j))
    assert_agree(pytorch_attention(q, k, v, attn_mask=causal_mask(i, j)), oracle)
    if j >= i:
        assert causal_mask(i, j)[-1].all()
        assert torch.equal(causal_mask(i, j), causal_mask(j)[j - i :])


def test_c10_true_means_may_attend():
    q, k, v = torch.randn(3, 2, 4, 5).double()
    out = pytorch_attention(q, k, v, attn_mask=causal_mask(4))
    assert_agree(out[:, 0], v[:, 0])
    assert_agree(out, pytorch_attention(q, k, v, is_causal=True))
    layer, x = nn.MultiheadAttention(6, 3, batch_first=True).double(), torch.randn(2, 4, 6).double()
    weights = layer(x, x, x, attn_mask=~causal_mask(4), average_attn_weights=False)[1]  # there, True = hide
    assert torch.equal(weights != 0, causal_mask(4).expand(2, 3, 4, 4))


@bounded
@given(lengths_of_both, st.integers(1, 9))
def test_window_is_its_definition(lengths, window):
    i, j = lengths
    mask = sliding_window_mask(i, window, j)
    assert mask.dtype == torch.bool
    assert torch.equal(mask, by_loops(i, j, lambda query, key: query - window < key <= query))
    assert torch.equal(sliding_window_mask(i, window), sliding_window_mask(i, window, i))


def test_window_sees_itself_and_the_keys_before():
    assert sliding_window_mask(2, 3, 5).int().tolist() == [[0, 1, 1, 1, 0], [0, 0, 1, 1, 1]]
    assert torch.equal(sliding_window_mask(3, 10**30), causal_mask(3))
    assert torch.equal(sliding_window_mask(4, 1), torch.eye(4).bool())
    assert torch.equal(sliding_window_mask(4, 4, 6).sum(1), torch.tensor([3, 4, 4, 4]))


@bounded
@given(st.lists(st.integers(0, 6), min_size=1, max_size=4), st.integers(0, 3))
def test_padding_shows_the_first_keys_of_each_sequence(lengths, extra):
    n_keys = max(lengths) + extra
    expected = torch.tensor([[j < length for j in range(n_keys)] for length in lengths]).view(
        len(lengths), 1, 1, n_keys
    )
    for given_lengths in (lengths, tuple(lengths), torch.tensor(lengths), torch.tensor(lengths, dtype=torch.uint8)):
        mask = padding_mask(given_lengths, n_keys)
        assert mask.dtype == torch.bool
        assert torch.equal(mask, expected.bool())
    assert torch.equal(padding_mask(lengths), expected.bool()[..., : max(lengths)])


@pytest.mark.parametrize(("length", "dtype"), [(200, torch.uint8), (100, torch.int8), (7, torch.int16)])
def test_lengths_of_a_short_dtype_meet_many_keys(length, dtype):
    mask = padding_mask(torch.tensor([length], dtype=dtype), 70_000)
    assert mask.sum() == length
    assert mask[..., :length].all()


def test_padding_of_no_sequences():
    assert padding_mask([]).shape == (0, 1, 1, 0)
    assert padding_mask([], 3).shape == (0, 1, 1, 3)
    assert padding_mask(torch.tensor([0, 0])).shape == (2, 1, 1, 0)


def test_c21_masks_are_joined_by_and_while_boolean():
    causal, padding = causal_mask(3, 4), padding_mask([4, 2])  # key 3 of item 1 is hidden by both from query 0 and 1
    both = combine_masks(causal, padding)
    assert both.dtype == torch.bool
    assert both[:, 0].int().tolist() == [
        [[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]],
        [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0]],
    ]


def test_combining_broadcasts_and_takes_any_number():
    one, two, three = torch.rand(2, 1, 1, 5) > 0.3, torch.rand(3, 4, 5) > 0.3, torch.rand(4, 1) > 0.3
    assert torch.equal(combine_masks(one, two, three), one & two & three)
    assert torch.equal(combine_masks(two), two)


def test_combining_changes_no_mask():
    one, two = causal_mask(4), sliding_window_mask(4, 2)
    combine_masks(one, two).zero_()
    combine_masks(one).zero_()
    assert torch.equal(one, causal_mask(4))
    assert torch.equal(two, sliding_window_mask(4, 2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_c20_a_float_mask_of_0_and_1_is_refused_in_any_form(dtype):
    q, k = torch.randn(100, 3), torch.randn(5, 3)
    for mask in (causal_mask(100, 5), torch.tensor([[1, 1, 0, 1, 0]]), torch.arange(100)[:, None] < 70):
        with pytest.raises(ValueError, match="holds only 0 and 1"):
            check_mask(mask.to(dtype), q, k)
    late = torch.zeros(100, 5, dtype=dtype)
    late[99, 4] = 0.5  # in the last row alone it shows that it is a bias
    assert check_mask(late, q, k) is not None


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: causal_mask(2.5), TypeError, "n_queries is 2.5, a float; expected an int"),
        (lambda: causal_mask(2, 3.0), TypeError, "n_keys is 3.0, a float; expected an int"),
        (lambda: causal_mask(True), TypeError, "n_queries is True, a bool; expected an int"),
        (lambda: causal_mask(-1), ValueError, "n_queries is -1; expected 0 or more"),
        (lambda: causal_mask(1, -2), ValueError, "n_keys is -2; expected 0 or more"),
        (lambda: sliding_window_mask(3, 0), ValueError, "window is 0; expected 1 or more"),
        (lambda: sliding_window_mask(3, 1.5), TypeError, "window is 1.5, a float"),
        (lambda: sliding_window_mask(-3, 1), ValueError, "n_queries is -3"),
        (lambda: padding_mask([1.0, 2.0]), TypeError, "lengths are torch.float32; expected whole numbers"),
        (lambda: padding_mask([True, False]), TypeError, "lengths are torch.bool; expected whole numbers"),
        (lambda: padding_mask([1 + 2j]), TypeError, "lengths are torch.complex64"),
        (lambda: padding_mask(None), TypeError, "lengths are None; expected whole numbers"),
        (lambda: padding_mask(["a"]), TypeError, r"lengths are \['a'\]; expected whole numbers"),
        (lambda: padding_mask([[1, 2]]), ValueError, r"lengths have shape \(1, 2\); expected one axis \(b\)"),
        (lambda: padding_mask(3), ValueError, r"lengths have shape \(\); expected one axis"),
        (lambda: padding_mask([2, 5], 4), ValueError, "a length is 5; expected 0 to n_keys = 4: raise n_keys or cut"),
        (lambda: padding_mask([2, -1], 4), ValueError, "a length is -1; expected 0 to n_keys = 4"),
        (lambda: padding_mask([-1]), ValueError, "a length is -1; expected 0 to n_keys = 0"),
        (lambda: padding_mask([1], -2), ValueError, "n_keys is -2; expected 0 or more"),
        (lambda: padding_mask([1], 2.0), TypeError, "n_keys is 2.0, a float"),
        (lambda: padding_mask([0], 0.0), TypeError, "n_keys is 0.0, a float"),
        (combine_masks, ValueError, "got no mask; expected at least one"),
        (
            lambda: combine_masks(causal_mask(2), torch.ones(2, 2)),
            TypeError,
            "mask 1 is torch.float32; expected a bool",
        ),
        (
            lambda: combine_masks(None),
            TypeError,
            "mask 0 is NoneType; expected a bool tensor in which True = may attend",
        ),
        (
            lambda: combine_masks(causal_mask(2), padding_mask([2, 3])),
            ValueError,
            r"shapes \(2, 2\), \(2, 1, 1, 3\) do not broadcast together; expected axes \(b h i j\)",
        ),
    ],
)
def test_says_what_is_wrong(call, error, words):
    with pytest.raises(error, match=words):
        call()
