import pytest
import torch

from mha_lessons.checks import complaints

EXPECTED = torch.arange(15.0, dtype=torch.float64).reshape(3, 5)
SIZES = {"i": 3, "j": 5, "d": 4}


def told(got, expected=EXPECTED, pattern="... i j"):
    return complaints.about_tensor("your result", got, expected, pattern, SIZES)


def test_a_right_result_gets_no_complaint():
    assert told(EXPECTED + 1e-12) is None


def test_other_types_are_named():
    for got, name in [(EXPECTED.numpy(), "of type ndarray"), ([1, 2], "a list of 2"), ((EXPECTED,), "a tuple of 1")]:
        assert told(got) == f"your result is {name}; return one torch.Tensor and nothing beside it."


@pytest.mark.parametrize(
    ("shape", "came"),
    [
        ((5, 3), "(j i) = (5, 3)"),
        ((3, 4), "(i d) = (3, 4)"),
        ((3, 5, 4), "(i j d) = (3, 5, 4)"),
        ((7, 5), "(7, 5)"),
        ((), "()"),
    ],
)
def test_a_wrong_shape_is_read_in_letters_and_sizes(shape, came):
    assert told(torch.zeros(shape)) == f"your result has shape {came}; expected (i j) = (3, 5)."


def test_leading_axes_are_dots_and_letters_that_could_be_several_are_left_out():
    expected = torch.zeros(2, 3, 5)
    assert "shape (... j i) = (2, 5, 3); expected (... i j) = (2, 3, 5)." in told(torch.zeros(2, 5, 3), expected)
    assert "shape (7, 3, 5); expected" in told(torch.zeros(7, 3, 5), expected)
    square = complaints.about_tensor("it", torch.zeros(3, 4), torch.zeros(3, 3), "i j", {"i": 3, "j": 3, "d": 4})
    assert square == "it has shape (3, 4); expected (i j) = (3, 3)."


def test_a_wrong_dtype_is_told_with_advice_for_floating_point_alone():
    assert "has dtype float32; expected float64. A tensor on the way was made as float32." in told(EXPECTED.float())
    assert told(EXPECTED, EXPECTED > 3) == "your result has dtype float64; expected bool."


def test_another_device_is_told():
    assert "is on meta; leave it where the arguments are, on cpu" in told(EXPECTED.to("meta"))


@pytest.mark.parametrize(("value", "word"), [(torch.nan, "nan"), (torch.inf, "inf"), (-torch.inf, "-inf")])
def test_a_number_that_is_not_finite_is_told_before_larger_differences(value, word):
    got = EXPECTED.clone()
    got[0, 0], got[1, 2] = 1e6, value
    assert told(got) == f"your result at [1, 2] of (i j) = (3, 5) is {word}; expected 7."


def test_the_first_largest_difference_is_told():
    got = EXPECTED.clone()
    got[0, 1], got[2, 1], got[2, 3] = 1.5, -89, 113
    assert told(got) == "your result at [2, 1] of (i j) = (3, 5) differs most: it is -89; expected 11."


def test_infinities_of_the_wrong_sign_and_booleans_are_told():
    hidden = torch.tensor([0.0, -torch.inf])
    assert "at [1] of (j) = (2,) differs most: it is inf; expected -inf" in told(-hidden, hidden, "j")
    assert "at [0] of (j) = (2,) differs most: it is 1; expected 0" in told(hidden + 1, hidden, "j")
    keep = torch.tensor([True, False])
    assert "at [0] of (j) = (2,) differs most: it is 0; expected 1" in told(~keep, keep, "j")


def test_a_number_without_axes_has_no_place():
    assert told(torch.tensor(2.0), torch.tensor(3.0), "") == "your result differs most: it is 2; expected 3."


def caught(function):
    try:
        function()
    except Exception as error:
        return error


def test_an_error_is_told_with_the_learners_own_line_and_no_path():
    def helper(x):
        # A second line.
        return x.softmax(dim=9)

    words = complaints.about_error(caught(lambda: helper(EXPECTED)))
    assert words.startswith("your function raised IndexError: Dimension out of range")
    assert words.endswith("It was line 3 of `helper`: `return x.softmax(dim=9)`.")
    assert "/" not in words


def test_the_line_is_the_learners_though_python_code_of_a_library_raised():
    def learner():
        return torch.nn.Linear(3, 2)(EXPECTED[0, :1].float())

    words = complaints.about_error(caught(learner))
    assert "It was line 2 of `learner`: `return torch.nn.Linear(3, 2)(EXPECTED[0, :1].float())`." in words


def test_an_error_without_a_learners_line_or_message_is_told_by_its_type():
    assert complaints.about_error(ValueError()) == "your function raised ValueError."


def test_only_the_first_line_of_a_message_is_told_and_ends_in_one_full_stop():
    assert complaints.about_error(ValueError("Bad.\nSee more.")) == "your function raised ValueError: Bad."


def test_an_error_that_cannot_tell_itself_is_told_by_its_type():
    class MuteError(Exception):
        def __str__(self):
            raise RuntimeError

    assert complaints.about_error(MuteError()) == "your function raised MuteError."


@pytest.mark.parametrize("name", ["max", "min"])
def test_a_pair_of_values_and_places_is_told_with_the_method_that_gives_values_alone(name):
    for use in (lambda pair: EXPECTED - pair, lambda pair: pair.exp(), lambda pair: torch.sub(EXPECTED, pair)):
        words = complaints.about_error(caught(lambda use=use: use(getattr(EXPECTED, name)(-1))))
        assert words.endswith(
            f"`{name}(dim)` returns a pair, values and their places; `a{name}(dim)` the values alone."
        )
    other = caught(lambda: EXPECTED.sort().exp())
    assert complaints.about_error(other).endswith("exp())`.")


def test_a_stub_is_told_from_an_operation_that_pytorch_lacks():
    def stub():
        raise NotImplementedError("write me")

    assert complaints.unwritten(caught(stub)) == "stub"
    assert complaints.unwritten(NotImplementedError()) == ""
    lacking = caught(lambda: torch.arange(3).softmax(0))
    assert isinstance(lacking, NotImplementedError)
    assert complaints.unwritten(lacking) is None
    assert complaints.unwritten(ValueError()) is None
    assert complaints.unwritten(None) is None
