"""The exercise bank: every exercise in ``checks`` is found and tried; a lesson that adds one changes nothing here."""

import functools
import importlib
import inspect
import pkgutil
import time

import pytest
import torch

from mha_lessons import checks
from mha_lessons.checks.engine import Exercise, Outcome, call, same_outcome
from mha_lessons.shapes import check_shape


def exercises_in(module):
    return {name: it for name, it in vars(module).items() if isinstance(getattr(it, "exercise", None), Exercise)}


CHECKS = exercises_in(checks)
each_check = pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
each_mistake = pytest.mark.parametrize(
    ("check", "wrong", "diagnosis"),
    [
        pytest.param(check, *mistake, id=f"{name}-{number}")
        for name, check in CHECKS.items()
        for number, mistake in enumerate(check.exercise.mistakes)
    ],
)


def stub(check):
    """A function with the exercise's own parameters that is not written yet."""
    namespace = {}
    exec(f"def {check.__name__}({', '.join(check.exercise.arguments)}):\n    raise NotImplementedError", namespace)
    return namespace[check.__name__]


@functools.cache
def outcomes(check, function):
    return [call(function, case) for case in check.exercise.cases()]


def tensors(case):
    return [value for value in case if isinstance(value, torch.Tensor)]


def test_the_exercises_are_found_and_all_are_handed_on():
    modules = [
        importlib.import_module(f"{checks.__name__}.{module.name}") for module in pkgutil.iter_modules(checks.__path__)
    ]
    written = set().union(*map(exercises_in, modules))
    assert written == set(CHECKS)
    assert set(CHECKS) < set(checks.__all__)
    assert {"scores", "softmax_rows", "attend", "self_attention"} <= written


@each_check
def test_the_docstring_states_the_task(check):
    task = inspect.getdoc(check)
    assert f"``{check.__name__}({', '.join(check.exercise.arguments)})``" in task
    assert "Args:" in task
    assert "Returns:" in task


@each_check
def test_the_inputs_are_several_and_of_unlike_sizes(check):
    cases, again = check.exercise.cases(), check.exercise.cases()
    shapes = [tuple(value.shape if isinstance(value, torch.Tensor) else value for value in case) for case in cases]
    assert len({repr(shape) for shape in shapes}) >= 2
    for case, same in zip(cases, again, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(tensors(case), tensors(same), strict=True))
    if "..." in check.exercise.axes:
        assert any("..." in check.exercise.describe(case) for case in cases)


@each_check
def test_the_axes_fit_the_arguments_and_the_results(check):
    arguments, results = check.exercise.patterns
    for case in check.exercise.cases():
        got = check.exercise.oracle(*case)
        pairs = [
            *zip(arguments, case, strict=True),
            *zip(results, got if isinstance(got, tuple) else [got], strict=True),
        ]
        sizes = {}
        for pattern, value in pairs:
            if isinstance(value, torch.Tensor) and pattern:
                sizes |= check_shape(value, pattern, name=check.__name__, **sizes)


@each_check
def test_the_right_answer_passes(check):
    report = check(check.exercise.oracle)
    assert report.passed, report
    assert report.attempted
    assert report.diagnosis.endswith("inputs."), "a remark on the reference itself"


@each_check
def test_an_untouched_stub_is_not_attempted(check):
    report = check(stub(check))
    assert not report.attempted
    assert not report.passed


@each_check
def test_returning_none_is_attempted(check):
    report = check(lambda *args: None)
    assert report.attempted
    assert not report.passed
    assert "did you forget `return`?" in report.diagnosis


@each_check
def test_raising_is_told_with_the_line(check):
    def broken(*args):
        number = 0
        return 1 / number

    report = check(broken)
    assert report.attempted
    assert "ZeroDivisionError: division by zero. It was line 3 of `broken`: `return 1 / number`" in report.diagnosis


@each_check
def test_changing_an_argument_is_told(check):
    positions = [i for i, value in enumerate(check.exercise.cases()[0]) if isinstance(value, torch.Tensor)]
    for position in positions:

        def changing(*args, position=position):
            result = check.exercise.oracle(*args)
            args[position].logical_not_() if args[position].dtype == torch.bool else args[position].add_(1)
            return result

        report = check(changing)
        assert not report.passed
        assert f"changed its argument `{check.exercise.arguments[position]}` in place" in report.diagnosis


@each_check
def test_an_answer_for_the_first_input_only_fails_and_is_told_where(check):
    first = call(check.exercise.oracle, check.exercise.cases()[0]).result
    report = check(lambda *args: first)
    assert not report.passed
    assert report.diagnosis.startswith(
        f"Right with {check.exercise.describe(check.exercise.cases()[0])}, but not always. With "
    )


def mapped(result, change):
    return tuple(map(change, result)) if isinstance(result, tuple) else change(result)


def takes_numbers(check):
    return any(value.is_floating_point() for value in tensors(check.exercise.cases()[0]))


@each_check
def test_the_oracle_keeps_float32(check):
    for words, case, _ in check.exercise.further_cases():
        if "float32" in words:
            result = check.exercise.oracle(*case)
            results = result if isinstance(result, tuple) else (result,)
            assert all(part.dtype in (torch.float32, torch.bool, torch.int64) for part in results)


@each_check
def test_the_first_case_in_another_form_asks_for_the_same_gradients(check):
    asked = [value.requires_grad for value in tensors(check.exercise.cases()[0])]
    for _, case, _ in check.exercise.further_cases():
        assert [value.requires_grad for value in tensors(case)] == asked


@each_check
def test_an_answer_in_float64_alone_fails(check):
    if not takes_numbers(check):
        return
    report = check(lambda *args: mapped(check.exercise.oracle(*args), torch.Tensor.double))
    assert not report.passed
    assert "float32" in report.diagnosis


@each_check
def test_remembering_by_shapes_fails(check):
    memo = {}

    def remembering(*args):
        key = tuple(value.shape if isinstance(value, torch.Tensor) else value for value in args)
        return memo.setdefault(repr(key), check.exercise.oracle(*args))

    report = check(remembering)
    assert not report.passed or not tensors(check.exercise.cases()[0])


@each_check
def test_an_answer_for_the_first_calls_alone_fails(check):
    calls = []

    def tiring(*args):
        calls.append(args)
        result = check.exercise.oracle(*args)
        return result if len(calls) <= len(check.exercise.cases()) else mapped(result, lambda part: part != part)

    assert not check(tiring).passed


@each_check
def test_an_answer_that_fails_with_more_axes_than_the_cases_have_fails(check):
    if "..." not in check.exercise.axes:
        return
    most = max(value.ndim for case in check.exercise.cases() for value in tensors(case))

    def limited(*args):
        result = check.exercise.oracle(*args)
        return mapped(result, torch.zeros_like) if any(v.ndim > most for v in tensors(args)) else result

    report = check(limited)
    assert not report.passed
    assert "count from the end" in report.diagnosis


@each_check
def test_the_global_random_state_is_left_alone(check):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    check(check.exercise.oracle)
    check(lambda *args: torch.rand(3))
    assert torch.equal(torch.get_rng_state(), before)


@each_check
def test_at_least_three_mistakes_are_known_each_by_its_own_words(check):
    words = [diagnosis for _, diagnosis in check.exercise.mistakes]
    assert len(words) >= 3
    assert len(set(words)) == len(words)


@each_mistake
def test_a_known_mistake_is_diagnosed(check, wrong, diagnosis):
    report = check(lambda *args: wrong(*args))
    assert report.attempted
    assert not report.passed
    assert report.diagnosis == diagnosis
    assert diagnosis.endswith(".")


@each_mistake
def test_a_mistake_gives_other_numbers_than_the_oracle_and_than_all_other_mistakes(check, wrong, diagnosis):
    ours, right = outcomes(check, wrong), outcomes(check, check.exercise.oracle)
    pairs = zip(ours, right, strict=True)
    telling = [our.error is None and not same_outcome(our, expected) for our, expected in pairs]
    assert any(telling), "it differs from the oracle nowhere, or only by an error"
    for other, words in check.exercise.mistakes:
        same = all(map(same_outcome, ours, outcomes(check, other)))
        assert words == diagnosis or not same, f"no input tells it from: {words}"


@each_check
def test_a_check_takes_well_under_a_second(check):
    def seconds():
        start = time.process_time()  # not the clock: other programs may be busy
        check(lambda *args: torch.zeros(()))
        return time.process_time() - start

    assert min(seconds() for _ in range(3)) < 0.3


def test_outcomes_differ_when_only_one_raised():
    assert not same_outcome(Outcome(result=1), Outcome(error=ValueError()))
