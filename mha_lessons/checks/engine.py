"""How an answer is checked: several inputs, an oracle, and well-known mistakes that are recognised by trying them.

To add an exercise, write its oracle in the file here that bears the name of the maths module, and hand the name on
in ``__init__.py``. The tests find it there; they need no change.

    @exercise(
        axes="... i d, ... j d -> ... i j",
        inputs=lambda normal: [
            (normal(3, 4), normal(5, 4)),
            (normal(2, 3, 4, 8), normal(2, 3, 6, 8)),
        ],
        mistakes=[
            (lambda q, k: q @ k.mT, "Your scores are not scaled: they grow with d_k. Divide them by √d_k."),
        ],
    )
    def scores(q, k):
        \"\"\"The task, which the learner reads as ``checks.scores?``.\"\"\"
        return q @ k.mT / q.shape[-1] ** 0.5

- ``axes`` names the axes of each argument and of each result by the letters of ``shapes.py``. A whole number
  that is an argument is named by the letter that it sets, as in ``"b n e, h -> b h n d"``; ``_`` stands for any other.
- ``inputs`` gets ``normal(*shape)``, which draws seeded float64 numbers, and returns a list of argument tuples, the
  plainest first. Let sizes differ within a case (i != j, h != n), let axes lead in some, and add a square case
  where only a square one shows a mistake. Where a tensor has ``requires_grad_()`` and the result is a single one,
  the gradient that flows back to that tensor must be right too.
- ``mistakes`` pairs a wrong answer with the sentence that names the mistake, its symptom and what to do. It is
  recognised when the learner's results equal its results on every input, so each must differ from the oracle
  and from all others on at least one (the tests hold this). It may raise where the learner's function would.
- ``also``, for what numbers do not show, gets an answer whose numbers are right and returns what is wrong, or None.

An answer that is right on all inputs is tried on the first one in other forms: see ``Exercise.further_cases``.
"""

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch

from mha_lessons.checks import complaints
from mha_lessons.checks.report import Report
from mha_lessons.shapes import check_shape

_checking = ContextVar("checking", default=False)

_COUNT_FROM_THE_END = (
    " More axes may lead (batch, heads), so count from the end: `dim=-1`, `.mT`, `x.shape[-1]` for the width, "
    "`x.shape[-2]` for the rows."
)
_RESHAPE = " Heads are views, not contiguous in memory: use `reshape`, not `view`, or call `.contiguous()` first."
_KEEP_NOTHING = " Keep nothing between calls: the result depends on the arguments alone."


def exercise(
    *, axes: str, inputs: Callable, mistakes: list[tuple[Callable, str]], also: Callable = lambda candidate: None
) -> Callable:
    """Turn an oracle into the public check ``name(candidate) -> Report`` with the oracle's name and docstring.

    The arguments are explained at the top of this file. The check's attribute ``exercise`` is the ``Exercise``.
    """

    def decorate(oracle: Callable) -> Callable[[Callable], Report]:
        task = Exercise(oracle, axes, inputs, tuple(mistakes), also)

        def check(candidate: Callable) -> Report:
            return task.check(candidate)

        # Not functools.wraps: help would then show the oracle's parameters and source instead of `candidate`.
        check.__name__ = check.__qualname__ = oracle.__name__
        check.__module__, check.__doc__ = oracle.__module__, oracle.__doc__
        check.exercise = task
        return check

    return decorate


class Outcome(NamedTuple):
    """What one call gave: its result or its error, which arguments it changed, and the gradients asked for."""

    result: Any = None
    error: BaseException | None = None
    changed: tuple[int, ...] = ()
    gradients: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True)
class Exercise:
    """A task as data; the top of this file explains the fields."""

    oracle: Callable
    axes: str
    inputs: Callable
    mistakes: tuple[tuple[Callable, str], ...]
    also: Callable

    @property
    def name(self) -> str:
        return self.oracle.__name__

    @property
    def arguments(self) -> list[str]:
        return list(inspect.signature(self.oracle).parameters)

    @property
    def patterns(self) -> tuple[list[str], list[str]]:
        """The axes of each argument and of each result."""
        arguments, results = ([axes.strip() for axes in side.split(",")] for side in self.axes.split("->"))
        return arguments, results

    def cases(self, seed: int = 0) -> list[tuple]:
        """The argument tuples, made anew and alike at each call; the global random state stays as it is."""
        generator = torch.Generator().manual_seed(seed)
        return self.inputs(partial(torch.randn, generator=generator, dtype=torch.float64, device="cpu"))

    def further_cases(self) -> list[tuple[str, tuple, str]]:
        """The first case in other forms, each between words for it and advice.

        They are for answers that remember results by shape, know one dtype, want contiguous memory, count axes or
        count calls.
        """
        case = self.cases()[0]
        # Masks and lengths are seldom drawn: their rows change places instead.
        other = tuple(_changed(value, lambda x: x if _is_drawn(x) else x.roll(1, 0)) for value in self.cases(seed=1)[0])
        arguments, _ = self.patterns
        further = []
        if any(isinstance(value, torch.Tensor) for value in case):
            further.append(("other numbers of the same shapes", other, _KEEP_NOTHING))
        if any(map(_is_drawn, case)):
            single = tuple(_changed(value, lambda x: x.float() if _is_drawn(x) else x) for value in case)
            further.append(("the same arguments in float32", single, ""))
            turned = tuple(_changed(value, _turned_in_memory) for value in case)
            further.append(("the same arguments as views of other tensors", turned, _RESHAPE))
        if "..." in "".join(arguments):
            pairs = zip(case, other, arguments, strict=True)
            # Both sets of numbers side by side: axes that are all 1 would hide a sum over them.
            led = tuple(
                _changed(one, lambda x, y=two: torch.stack([x, y])[None, :, None]) if "..." in axes else one
                for one, two, axes in pairs
            )
            further.append((self.describe(led), led, _COUNT_FROM_THE_END))
        return [*further, ("the same arguments once more", case, _KEEP_NOTHING)]

    def check(self, candidate: Callable) -> Report:
        """Judge an answer: can it be called, is it a known mistake, does anything else differ?"""
        diagnosis = self._cannot_be_called(candidate)
        if diagnosis:
            return Report(False, True, diagnosis)
        with _apart():
            outcomes = [call(candidate, case) for case in self.cases()]
            unwritten = complaints.unwritten(outcomes[0].error)
            if unwritten is not None:
                return self._about_unwritten(candidate, unwritten)
            diagnosis = (
                self._changed_argument(outcomes)
                or self._known_mistake(outcomes)
                or self._first_difference(candidate, outcomes)
                or self._further_difference(candidate)
                or self.also(candidate)
            )
            if diagnosis:
                return Report(False, True, diagnosis)
            remark = self._gradient_remark(candidate)
        return Report(True, True, f"Your function agrees with ours on all {len(outcomes)} inputs.{remark}")

    def _cannot_be_called(self, candidate: object) -> str | None:
        if not callable(candidate):
            return (
                "The check was given no function, but what is "
                f"{complaints.kind(candidate)}. Hand over the function itself, without calling it: "
                f"`checks.{self.name}({self.name})`."
            )
        try:
            signature = inspect.signature(candidate)
        except (TypeError, ValueError):  # some built-in functions do not tell their parameters
            return None
        try:
            signature.bind(*self.arguments)
        except TypeError:
            ours = ", ".join(self.arguments)
            return (
                f"Your function takes ({', '.join(signature.parameters)}), but it is called with ({ours}). "
                f"Begin it with `def {self.name}({ours}):`."
            )
        return None

    def _about_unwritten(self, candidate: Callable, unwritten: str) -> Report:
        if unwritten in ("", getattr(candidate, "__name__", "")):
            return Report(False, False, "Replace `raise NotImplementedError` by your code and run again.")
        return Report(
            False,
            True,
            f"Your function calls `{unwritten}`, which is not written yet. Write that one first. If it is an exercise "
            f"too, its answer, `answer_{unwritten}`, will do once you have run that cell.",
        )

    def _changed_argument(self, outcomes: list[Outcome]) -> str | None:
        changed = [self.arguments[position] for outcome in outcomes for position in outcome.changed]
        if not changed:
            return None
        return (
            f"Your function changed its argument `{changed[0]}` in place, so the caller's tensor is not what it "
            "was. Make a new tensor: no `+=`, `-=`, `*=`, `/=` and no assignment to entries of an argument, and "
            "no method whose name ends in `_`."
        )

    def _known_mistake(self, outcomes: list[Outcome]) -> str | None:
        for wrong, diagnosis in self.mistakes:
            pairs = zip(outcomes, self.cases(), strict=True)
            if all(same_outcome(outcome, call(wrong, case)) for outcome, case in pairs):
                return diagnosis
        return None

    def _first_difference(self, candidate: Callable, outcomes: list[Outcome]) -> str | None:
        """Tell the first case that fails, and which case before it was right: together they show what is special."""
        cases = self.cases()
        for index, (case, outcome) in enumerate(zip(cases, outcomes, strict=True)):
            complaint = self._complaint(case, outcome)
            if complaint is None:
                continue
            if same_outcome(outcome, outcome) and not same_outcome(outcome, call(candidate, case)):
                complaint = "two calls with the same arguments gave two results. Leave out what is random."
            right = f"Right with {self.describe(cases[0])}, but not always. " if index else ""
            values = self._values(case) if self.describe(case) in map(self.describe, cases[:index]) else ""
            advice = _COUNT_FROM_THE_END if self._fails_by_leading_axes(candidate, cases[: index + 1]) else ""
            return f"{right}With {self.describe(case)}{values}, {complaint}{advice}"
        return None

    def _further_difference(self, candidate: Callable) -> str | None:
        """Whether an answer that is right so far fails on the first case in another form."""
        for words, case, advice in self.further_cases():
            complaint = self._complaint(case, call(candidate, case))
            if complaint:
                first = self.describe(self.cases()[0])
                return f"Right with {first}, but not always. With {words}, {complaint}{advice}"
        return None

    def _fails_by_leading_axes(self, candidate: Callable, cases: list[tuple]) -> bool:
        """Whether the last case is the first one with leading axes, and each item of these is answered well alone."""
        *before, case = cases
        if not self._has_leading_axes(case) or any(map(self._has_leading_axes, before)):
            return False
        items = self._items(case)
        return all(self._complaint(item, call(candidate, item)) is None for item in items)

    def _items(self, case: tuple) -> list[tuple]:
        """A case without its leading axes, once for each item of these."""
        arguments, _ = self.patterns
        own = [len(axes.split()) - 1 if "..." in axes else None for axes in arguments]
        leads = [x.shape[: x.ndim - axes] if axes is not None else () for x, axes in zip(case, own, strict=True)]
        every = product(*map(range, max(leads, key=len)))
        return [
            tuple(
                _changed(x, lambda x, lead=lead, index=index: x[_fitted(index, lead)]) if lead else x
                for x, lead in zip(case, leads, strict=True)
            )
            for index in every
        ]

    def _complaint(self, case: tuple, outcome: Outcome) -> str | None:
        """What is wrong with one outcome, as the end of a sentence that begins "With q ..."."""
        if outcome.error is not None:
            return complaints.about_error(outcome.error)
        if outcome.result is None:
            return "your function returned None: did you forget `return`?"
        expected = self.oracle(*case)
        got, expected = _as_numbers(outcome.result, expected)
        arguments, results = self.patterns
        sizes = {}
        for pattern, value in zip(arguments, case, strict=True):
            sizes |= _read(pattern, value)
        if not isinstance(expected, tuple):
            told = complaints.about_tensor("your result", got, expected, results[0], sizes)
            return told or self._gradient_complaint(case, outcome)
        if not isinstance(got, tuple | list) or len(got) != len(expected):
            return f"your result is {complaints.kind(got)}; return a tuple of {len(expected)} tensors."
        parts = zip(got, expected, results, strict=True)
        told = [
            complaints.about_tensor(f"result {number} of {len(expected)}", *part, sizes)
            for number, part in enumerate(parts, start=1)
        ]
        return next(filter(None, told), None)

    def _gradient_complaint(self, case: tuple, outcome: Outcome) -> str | None:
        """Whether a gradient that the case asks for is wrong; one that does not flow at all is only remarked on."""
        asked = [place for place, value in enumerate(case) if _wants_gradient(value)]
        expected = call(self.oracle, case).gradients
        for place, got, wanted in zip(asked, outcome.gradients, expected, strict=False):
            name = f"the numbers are right, but the gradient that flows back to `{self.arguments[place]}`"
            told = complaints.about_tensor(name, got, wanted, self.patterns[0][place], {})
            if told:
                return told
        return None

    def _gradient_remark(self, candidate: Callable) -> str:
        """A right answer without gradient passes, since the task asks for numbers; but training would need it."""
        ours, theirs = self._flows(self.oracle), self._flows(candidate)
        if all(got or not wanted for got, wanted in zip(theirs, ours, strict=True)):
            return ""
        return (
            " One thing for later: no gradient flows back through it, so nothing before it could be trained. "
            "Look for `.detach()`, `.item()`, `.tolist()`, `.numpy()`, `torch.no_grad()` or `torch.tensor(...)`."
        )

    def _flows(self, function: Callable) -> list[bool]:
        """For each result of a function, whether a gradient flows back from it."""
        case = self.cases()[0]
        for value in case:
            if _is_drawn(value):
                value.requires_grad_()
        with torch.enable_grad(), _settings_kept(), warnings.catch_warnings(action="ignore"):
            try:
                result = function(*case)
            except Exception:  # .numpy() of a tensor that has a gradient raises
                return [False] * len(self.patterns[1])
        results = result if isinstance(result, tuple | list) else [result]
        return [isinstance(part, torch.Tensor) and part.requires_grad for part in results]

    def describe(self, case: tuple) -> str:
        """The arguments in words: "q (i d) = (3, 4) and k (j d) = (5, 4)"."""
        patterns, _ = self.patterns
        *first, last = (
            f"{name} {complaints.spell(pattern, value.shape)}"
            if isinstance(value, torch.Tensor)
            else f"{name} = {value!r}"
            for name, pattern, value in zip(self.arguments, patterns, case, strict=True)
        )
        return f"{', '.join(first)} and {last}" if first else last

    def _values(self, case: tuple) -> str:
        """Between which numbers the arguments lie, where sizes alone do not tell a case from another."""
        told = [
            f"{name} from {value.min():.4g} to {value.max():.4g}"
            for name, value in zip(self.arguments, case, strict=True)
            if _is_drawn(value)
        ]
        return f" ({', '.join(told)})" if told else ""

    def _has_leading_axes(self, case: tuple) -> bool:
        patterns, _ = self.patterns
        return any("..." in p and v.ndim >= len(p.split()) for p, v in zip(patterns, case, strict=True))


@contextmanager
def _apart() -> Iterator[None]:
    """Run a check apart from the notebook, whose random state, threads and gradient mode stay as they are.

    What a candidate draws is the same each time, and so is its report. One thread computes: tensors so small gain
    nothing from more, and on a busy machine threads wait long. A candidate that calls a check would never end.
    """
    if _checking.get():
        raise RuntimeError(
            "a check was called inside the function that is checked. Begin the line of the check at the left margin, "
            "outside the function"
        )
    token, threads = _checking.set(True), torch.get_num_threads()
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.default_generator.manual_seed(0)
            torch.set_num_threads(1)
            yield
    finally:
        torch.set_num_threads(threads)
        _checking.reset(token)


@contextmanager
def _settings_kept() -> Iterator[None]:
    """Take back what a function may set for all of PyTorch: the default dtype and whether gradients are recorded."""
    dtype, grad = torch.get_default_dtype(), torch.is_grad_enabled()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(grad)


def call(function: Callable, case: tuple) -> Outcome:
    """Call a function with a copy of the arguments and note what comes."""
    leaves = copy.deepcopy(case)
    # Copies once more where a gradient is asked for: PyTorch itself refuses to change a leaf in place.
    own = tuple(value.clone() if _wants_gradient(value) else value for value in leaves)
    try:
        with _settings_kept():
            result = function(*own)
        gradients = _gradients(result, leaves)
    except (Exception, SystemExit) as error:  # KeyboardInterrupt stops the check, as it should
        return Outcome(error=error)
    changed = tuple(
        position
        for position, (now, before) in enumerate(zip(own, case, strict=True))
        if isinstance(before, torch.Tensor | list) and not complaints.agree(now, before, rtol=0, atol=0)
    )
    return Outcome(result, changed=changed, gradients=gradients)


def _fitted(index: tuple[int, ...], lead: tuple[int, ...]) -> tuple[int, ...]:
    """An index into axes that broadcast: fewer of them, or some of size 1."""
    return tuple(min(at, size - 1) for at, size in zip(index[len(index) - len(lead) :], lead, strict=True))


def _changed(value: Any, change: Callable) -> Any:
    """An argument with another tensor in its place; one that asks for a gradient still does."""
    if not isinstance(value, torch.Tensor):
        return value
    return change(value).detach().requires_grad_(value.requires_grad)


def _turned_in_memory(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, column by column in memory."""
    return x.mT.contiguous().mT if _is_drawn(x) and x.ndim > 1 else x


def _is_drawn(value: object) -> bool:
    """Whether an argument is a tensor of floating point, and not whole numbers or a mask."""
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _wants_gradient(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _gradients(result: object, case: tuple) -> tuple[torch.Tensor, ...]:
    """The gradient of the sum of the result's squares at each argument that asks for it; none where none flows."""
    asked = [value for value in case if _wants_gradient(value)]
    if not asked or not _wants_gradient(result):
        return ()
    found = torch.autograd.grad(result.square().sum(), asked, allow_unused=True)
    return () if None in found else found


def same_outcome(one: Outcome, other: Outcome) -> bool:
    """Whether two calls ended alike: both raised, or both gave the same numbers. The dtype does not count."""
    if one.error is not None or other.error is not None:
        return one.error is not None and other.error is not None
    same_gradients = complaints.agree(one.gradients, other.gradients)
    return complaints.agree(*_as_numbers(one.result, other.result)) and same_gradients


def _as_numbers(got: Any, expected: Any) -> tuple[Any, Any]:
    """Where a number is expected, an int, a float or a tensor without axes will do: make all of them tensors."""
    if isinstance(expected, int | float):
        return _as_number(got), _as_number(expected)
    return got, expected


def _as_number(value: Any) -> Any:
    if isinstance(value, int | float) or getattr(value, "ndim", None) == 0:  # NumPy's scalars have ndim, too
        with suppress(RuntimeError, OverflowError):  # a tensor on meta, or 10**400: these stay what they are
            return torch.tensor(float(value), dtype=torch.float64)
    return value


def _read(pattern: str, value: object) -> dict[str, int]:
    """The sizes that an argument gives to axis letters."""
    if isinstance(value, torch.Tensor):
        return check_shape(value, pattern, name="argument") if pattern else {}
    return {pattern: value} if isinstance(value, int) else {}
