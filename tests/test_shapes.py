"""shapes.py: reading a shape by letters, and saying in words what does not fit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import mutually_broadcastable_shapes

from mha_lessons.shapes import broadcast_shape, check_count, check_shape

bounded = settings(max_examples=25)


@bounded
@given(st.lists(st.integers(0, 4), max_size=3), st.lists(st.integers(0, 5), min_size=1, max_size=4))
def test_reads_the_named_axes_from_the_end(leading, named):
    letters = "bhid"[: len(named)]
    x = torch.empty(*leading, *named)
    assert check_shape(x, "... " + " ".join(letters), name="x") == dict(zip(letters, named, strict=True))
    if not leading:
        assert check_shape(x, " ".join(letters), name="x") == dict(zip(letters, named, strict=True))


def test_known_sizes_that_fit_pass():
    assert check_shape(torch.empty(2, 3, 4), "b n e", name="x", n=3, e=4, h=99) == {"b": 2, "n": 3, "e": 4}


def test_no_axes_at_all():
    assert check_shape(torch.tensor(1.0), "...", name="x") == {}


@pytest.mark.parametrize(
    ("tensor", "pattern", "sizes", "error", "words"),
    [
        ([[1.0]], "i d", {}, TypeError, r"keys is a list; expected a torch.Tensor with axes \(i d\)"),
        (torch.empty(2, 3), "b i d", {}, ValueError, r"keys has shape \(2, 3\), 2 axes; expected 3: \(b i d\)"),
        (torch.empty(2, 3, 4), "i d", {}, ValueError, r"3 axes; expected 2: \(i d\)"),
        (torch.empty(3), "... i d", {}, ValueError, r"1 axes; expected at least 2: \(... i d\)"),
        (torch.empty(2, 3), "i d", {"d": 4}, ValueError, r"shape \(2, 3\), read as \(i d\); expected d = 4"),
        (torch.empty(2, 3), "i d", {"d": 4, "i": 5}, ValueError, "expected d = 4, i = 5"),
        (torch.empty(9, 2, 3), "... i d", {"i": 9}, ValueError, "expected i = 9"),
    ],
)
def test_says_what_does_not_fit(tensor, pattern, sizes, error, words):
    with pytest.raises(error, match=words):
        check_shape(tensor, pattern, name="keys", **sizes)


@pytest.mark.parametrize("value", [2.0, True, "2", None])
def test_a_count_is_an_int(value):
    with pytest.raises(TypeError, match=f"heads is {value!r}, a {type(value).__name__}; expected an int"):
        check_count(value, "heads")


def test_a_count_has_a_least():
    check_count(0, "window")
    check_count(3, "window", least=3)
    with pytest.raises(ValueError, match="window is 2; expected 3 or more"):
        check_count(2, "window", least=3)
    with pytest.raises(ValueError, match="window is -1; expected 0 or more"):
        check_count(-1, "window")


@bounded
@given(mutually_broadcastable_shapes(num_shapes=3, max_dims=4, min_side=0, max_side=3))
def test_broadcast_shape_is_numpys(shapes):
    assert broadcast_shape(*shapes.input_shapes) == shapes.result_shape


@pytest.mark.parametrize("shapes", [((2,), (3,)), ((4, 1), (2, 3), (5, 3)), ((0,), (2,))])
def test_shapes_that_do_not_fit_are_refused(shapes):
    with pytest.raises(ValueError, match="do not broadcast together"):
        broadcast_shape(*shapes)
