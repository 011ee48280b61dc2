"""The engine on small tasks of its own; the real exercises are in test_exercises.py."""

import inspect

import pytest
import torch

from mha_lessons.checks.engine import exercise


@exercise(
    axes="... i j, h -> ... i j",
    inputs=lambda normal: [(normal(3, 5), 2), (normal(4, 2), 3), (normal(2, 3, 5, 4), 2), (normal(6, 2, 4), 3)],
    mistakes=[
        (lambda x, h: x + h, "You added h."),
        (lambda x, h: x.mT @ x * h, "You multiplied by itself."),
        (lambda x, h: x * h if x.ndim == 2 else x * torch.nan, "You made NaN of a batch."),
    ],
)
def scaled(x, h):
    """Multiply x (... i j) by the number h."""
    return x * h


@exercise(axes="n -> n, ", inputs=lambda normal: [(normal(4),), (normal(6),)], mistakes=[])
def squares_and_sum(x):
    return x**2, x.sum()


@exercise(axes="d -> ", inputs=lambda _: [(4,), (9,)], mistakes=[])
def root(d):
    return d**0.5


FIRST = "With x (i j) = (3, 5) and h = 2, "


def failed(check, candidate):
    report = check(candidate)
    assert report.attempted
    assert not report.passed
    return report.diagnosis


def test_the_check_is_a_documented_function_of_one_candidate_that_does_not_show_the_oracle():
    assert scaled.__name__ == "scaled"
    assert scaled.__doc__.startswith("Multiply x")
    assert list(inspect.signature(scaled).parameters) == ["candidate"]
    assert "x * h" not in inspect.getsource(scaled)


def test_a_right_answer_passes():
    report = scaled(lambda x, h: h * x)
    assert report.passed
    assert report.attempted
    assert report.diagnosis == "Your function agrees with ours on all 4 inputs."


def test_a_right_answer_may_return_a_view_of_its_argument():
    @exercise(axes="i j -> j i", inputs=lambda normal: [(normal(3, 5),), (normal(2, 2),)], mistakes=[])
    def transposed(x):
        return x.mT

    assert transposed(lambda x: x.T).passed


def test_a_stub_is_not_attempted():
    def stub(x, h):
        raise NotImplementedError

    report = scaled(stub)
    assert not report.attempted
    assert not report.passed


def test_what_cannot_be_called_is_told():
    assert "no function, but what is of type int." in failed(scaled, 3)
    assert "no function, but what is a single tensor." in failed(scaled, torch.zeros(2))
    assert "`checks.scaled(scaled)`" in failed(scaled, 3)


def test_wrong_parameters_are_told_before_anything_is_run():
    assert failed(scaled, lambda x: 1 / 0).startswith("Your function takes (x), but it is called with (x, h).")
    assert "takes (x, h, b)" in failed(scaled, lambda x, h, b: x)
    assert "`def scaled(x, h):`" in failed(scaled, lambda: None)
    assert scaled(lambda *both: both[0] * both[1]).passed
    assert scaled(lambda x, h, extra=None: x * h).passed
    assert scaled(torch.mul).passed  # a built-in function that does not tell its parameters


def test_none_is_told_as_a_forgotten_return():
    assert failed(scaled, lambda x, h: None) == f"{FIRST}your function returned None: did you forget `return`?"


def test_an_error_and_an_exit_are_told_and_an_interrupt_passes_through():
    def leaves(x, h):
        raise SystemExit("bye")

    def interrupted(x, h):
        raise KeyboardInterrupt

    assert failed(scaled, lambda x, h: x / (h - h) + [] * h).startswith(f"{FIRST}your function raised TypeError: ")
    assert "SystemExit: bye. It was line 2 of `leaves`: `raise SystemExit" in failed(scaled, leaves)
    with pytest.raises(KeyboardInterrupt):
        scaled(interrupted)


def test_a_changed_argument_is_named_though_the_result_is_right():
    def in_place(x, h):
        x *= h
        return x

    def reshaped(x, h):
        result = x * h
        x.unsqueeze_(0)
        return result

    for candidate in (in_place, reshaped):
        assert failed(scaled, candidate).startswith("Your function changed its argument `x` in place")


def test_a_mistake_is_recognised_by_its_results():
    assert failed(scaled, lambda x, h: h + x) == "You added h."


def test_a_mistake_is_recognised_in_another_dtype():
    assert failed(scaled, lambda x, h: (x + h).float()) == "You added h."


def test_a_mistake_is_recognised_where_it_raises_and_has_another_shape():
    assert failed(scaled, lambda x, h: h * (x.transpose(-1, -2) @ x)) == "You multiplied by itself."


def test_a_mistake_is_recognised_by_nan():
    assert failed(scaled, lambda x, h: x * h + (torch.nan if x.ndim > 2 else 0)) == "You made NaN of a batch."


def test_a_mistake_is_not_recognised_when_one_input_differs():
    told = failed(scaled, lambda x, h: x + h if x.ndim == 2 else x)
    assert told.startswith(f"{FIRST}your result at ")


def test_an_answer_for_the_first_case_only_is_told_the_case_that_fails():
    first, _ = scaled.exercise.cases()[0]
    told = failed(scaled, lambda x, h: 2 * first)
    assert told.startswith("Right with x (i j) = (3, 5) and h = 2, but not always. With x (i j) = (4, 2) and h = 3, ")
    assert "your result has shape (3, 5); expected (i j) = (4, 2)." in told


def test_an_answer_that_fails_with_leading_axes_is_told_to_count_from_the_end():
    told = failed(scaled, lambda x, h: x * h if x.ndim == 2 else x)
    assert "With x (... i j) = (2, 3, 5, 4) and h = 2, your result at [" in told
    assert told.endswith("`dim=-1`, `.mT`, `x.shape[-1]` for the width, `x.shape[-2]` for the rows.")
    assert "axes may lead" not in failed(scaled, lambda x, h: x)
    assert "axes may lead" not in failed(scaled, lambda x, h: x if x.ndim == 3 else x * h)


def test_an_answer_that_is_wrong_by_value_is_not_told_to_count_axes():
    """Its first item may be right by luck; the axes are to blame where each item is right alone."""
    case = next(case for case in scaled.exercise.cases() if case[0].ndim > 2)
    largest = case[0][0, 0].abs().max()
    told = failed(scaled, lambda x, h: (x * h).clamp(-h * largest, h * largest))
    assert told.startswith(FIRST)
    assert "axes may lead" not in told


def test_views_that_are_not_contiguous_are_tried():
    told = failed(scaled, lambda x, h: (x.view(-1) * h).view(x.shape))
    assert "the same arguments as views of other tensors" in told
    assert "use `reshape`, not `view`" in told


def test_random_answers_are_told_and_the_report_stays_the_same():
    def noisy(x, h):
        return x * h + torch.randn(())

    told = failed(scaled, noisy)
    assert "two calls with the same arguments gave two results" in told
    assert failed(scaled, noisy) == told

    def sometimes_right(x, h):
        return x * h * (torch.rand(()) < 0.5)

    reports = set()
    for seed in range(8):
        torch.manual_seed(seed)
        reports.add(scaled(sometimes_right))
    assert len(reports) == 1


@pytest.mark.parametrize(
    "blocked",
    [
        lambda x, h: (x * h).detach(),
        lambda x, h: torch.tensor((x * h).tolist(), dtype=x.dtype),
        lambda x, h: torch.from_numpy(x.numpy() * h),
        torch.no_grad()(lambda x, h: x * h),
    ],
    ids=["detach", "tolist", "numpy", "no_grad"],
)
def test_an_answer_without_gradient_passes_with_a_remark(blocked):
    report = scaled(blocked)
    assert report.passed
    assert "no gradient flows back" in report.diagnosis


def test_gradients_are_asked_for_only_where_the_oracle_has_them():
    @exercise(axes="n -> n", inputs=lambda normal: [(normal(4),)], mistakes=[])
    def positive(x):
        return x > 0

    with torch.no_grad():  # the remark is about the function, not about where the check is called
        assert scaled(lambda x, h: x * h).diagnosis.endswith("inputs.")
        assert "no gradient flows back" in scaled(lambda x, h: (x * h).detach()).diagnosis
    assert positive(lambda x: x.gt(0)).diagnosis.endswith("inputs.")


def test_an_answer_that_remembers_results_by_their_shapes_is_told():
    memo = {}

    def remembering(x, h):
        if x.shape not in memo:
            memo[x.shape] = x * h
        return memo[x.shape]

    for _ in range(2):  # the second time nothing is computed at all
        told = failed(scaled, remembering)
        assert told.startswith("Right with x (i j) = (3, 5) and h = 2, but not always. With other numbers of the same")
        assert told.endswith("Keep nothing between calls: the result depends on the arguments alone.")


def test_an_answer_that_is_right_for_the_first_calls_alone_is_told():
    calls = []

    def tiring(x, h):
        calls.append(x)
        return x * h if len(calls) <= len(scaled.exercise.cases() + scaled.exercise.further_cases()) - 1 else x

    told = failed(scaled, tiring)
    assert "With the same arguments once more, your result at [" in told
    assert told.endswith("Keep nothing between calls: the result depends on the arguments alone.")
    calls.clear()
    assert failed(root, lambda d: calls.append(d) or (d if len(calls) > 2 else d**0.5)).startswith("Right with d = 4,")


@pytest.mark.parametrize(
    "wide", [lambda x, h: x.double() * h, lambda x, h: torch.zeros(x.shape, dtype=torch.float64) + x * h]
)
def test_an_answer_that_is_float64_whatever_comes_is_told(wide):
    told = failed(scaled, wide)
    assert "With the same arguments in float32, your result has dtype float64; expected float32." in told
    assert "dtype=x.dtype" in told


def test_an_answer_for_up_to_four_axes_is_told_to_count_from_the_end():
    told = failed(scaled, lambda x, h: x * h if x.ndim < 5 else x)
    assert "With x (... i j) = (1, 2, 1, 3, 5) and h = 2, your result at [" in told
    assert told.endswith("`dim=-1`, `.mT`, `x.shape[-1]` for the width, `x.shape[-2]` for the rows.")


def test_leading_axes_are_not_blamed_for_what_fails_without_them_too():
    told = failed(scaled, lambda x, h: x * h if x.shape[-1] != 4 else x)
    assert "With x (... i j) = (2, 3, 5, 4) and h = 2, your result at [" in told
    assert "axes may lead" not in told


def test_between_which_numbers_arguments_lie_is_told_where_sizes_do_not_tell_the_cases_apart():
    @exercise(axes="n -> n", inputs=lambda _: [(torch.ones(2),), (torch.tensor([-1e3, 2.5]),)], mistakes=[])
    def same(x):
        return x

    told = failed(same, lambda x: x.clamp(-50, 50))
    assert (
        "Right with x (n) = (2,), but not always. With x (n) = (2,) (x from -1000 to 2.5), your result at [0]" in told
    )
    assert "from" not in failed(same, lambda x: x + 1)


def test_a_check_inside_the_function_that_is_checked_ends_and_is_told():
    def inside(x, h):
        scaled(inside)
        return x * h

    told = failed(scaled, inside)
    assert "a check was called inside the function that is checked. Begin the line of the check" in told
    assert told.endswith("It was line 2 of `inside`: `scaled(inside)`.")
    assert scaled(lambda x, h: x * h).passed  # the next check runs


def test_endless_recursion_is_told():
    def endless(x, h):
        return endless(x, h)

    assert "your function raised RecursionError" in failed(scaled, endless)


@pytest.mark.parametrize(
    "strange",
    [
        lambda x, h: (x * h).to_sparse(),
        lambda x, h: torch.nested.as_nested_tensor([x[0], x[1]]),
        lambda x, h: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8),
    ],
    ids=["sparse", "nested", "quantized"],
)
@pytest.mark.filterwarnings("ignore")  # that PyTorch's nested and quantized tensors are no lasting thing
def test_tensors_that_cannot_be_read_number_by_number_are_told(strange):
    assert "your result is a tensor whose numbers cannot be read one by one" in failed(scaled, strange)
    assert "result 1 of 2 is a tensor whose" in failed(squares_and_sum, lambda x: (strange(x[:, None], 1), x.sum()))


def test_numbers_that_cannot_be_read_are_told():
    assert "your result is of type complex" in failed(root, lambda d: 2 + 0j)
    assert "your result is of type int" in failed(root, lambda d: 10**400)
    assert "your result is on meta" in failed(root, lambda d: torch.tensor(2.0, dtype=torch.float64, device="meta"))


def test_what_a_candidate_sets_for_all_of_pytorch_reaches_neither_the_notebook_nor_the_next_call():
    seen = []

    def setting(x, h):
        seen.append((torch.get_default_dtype(), torch.is_grad_enabled()))
        torch.set_default_dtype(torch.float16)
        torch.set_grad_enabled(False)
        return x * h

    assert scaled(setting).passed
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()
    assert set(seen) == {(torch.float32, True)}
    with torch.no_grad():
        scaled(setting)
        assert not torch.is_grad_enabled()


def test_several_results_are_compared_one_by_one():
    assert squares_and_sum(lambda x: (x**2, x.sum())).passed
    assert squares_and_sum(lambda x: [x**2, x.sum()]).passed
    assert "your result is a single tensor; return a tuple of 2" in failed(squares_and_sum, lambda x: x**2)
    assert "your result is a tuple of 1; return a tuple of 2" in failed(squares_and_sum, lambda x: (x**2,))
    assert "result 2 of 2 has shape (n) = (4,); expected ()." in failed(squares_and_sum, lambda x: (x**2, x))
    assert "result 1 of 2 at [" in failed(squares_and_sum, lambda x: (x**3, x.sum()))


def test_a_number_is_compared_as_a_number():
    assert root(lambda d: d**0.5).passed
    assert root(lambda d: int(d**0.5)).passed
    assert root(lambda d: torch.tensor(d).sqrt()).passed
    assert failed(root, lambda d: d) == "With d = 4, your result differs most: it is 4; expected 2."
    assert "your result is of type str" in failed(root, lambda d: "2")


def test_a_check_leaves_the_global_random_state_alone():
    before = torch.get_rng_state()
    scaled(lambda x, h: x * h * torch.rand(()))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_check_computes_in_one_thread_and_gives_the_others_back():
    used, before = set(), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        scaled(lambda x, h: used.add(torch.get_num_threads()))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert used == {1}


def test_a_whole_number_argument_sets_the_size_of_its_letter():
    assert "your result has shape (i h) = (3, 2); expected (i j) = (3, 5)." in failed(scaled, lambda x, h: x[:, :h])
