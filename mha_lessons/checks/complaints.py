"""What is wrong with one result or one error, in words; each is the end of a sentence "With q ..., "."""

import linecache
import os
import re
import sysconfig
import traceback
from pathlib import Path

import torch

# Code in these folders is not the learner's: an error is told with the last line that lies in none of them.
_FOLDERS = (Path(__file__).parents[1], *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))
_GIVE_DTYPE = "Give it the dtype of the arguments, as in `torch.zeros(3, 5, dtype=x.dtype)`."
_LIBRARIES = ("<frozen ", *(f"{folder}{os.sep}" for folder in _FOLDERS))


def agree(got: object, expected: object, **tolerance: float) -> bool:
    """Whether two results are equal to rounding, NaN where the other is NaN; the dtype does not count."""
    try:
        torch.testing.assert_close(got, expected, check_dtype=False, equal_nan=True, **tolerance)
    except Exception:  # other numbers, or things that cannot be compared, such as nested tensors
        return False
    return True


def about_tensor(name: str, got: object, expected: torch.Tensor, pattern: str, sizes: dict[str, int]) -> str | None:
    """Compare a result with the expected tensor: type, shape, dtype, then numbers. None where all is right.

    Args:
        name: what the result is called, as in "your result".
        got: what the learner's function returned.
        expected: what the oracle returned.
        pattern: the axes of the expected tensor, as in ``"... i j"``.
        sizes: the sizes of the axis letters in the arguments.
    """
    if not isinstance(got, torch.Tensor):
        wanted = "torch.Tensor" if expected.ndim else "number"
        return f"{name} is {kind(got)}; return one {wanted} and nothing beside it."
    if not is_plain(got):
        return f"{name} is a tensor whose numbers cannot be read one by one; return a plain, dense one."
    if got.shape != expected.shape:
        letters = _guess_letters(got.shape, expected.shape, pattern, sizes)
        wanted = spell(pattern, expected.shape)
        return f"{name} has shape {spell(letters, got.shape)}; expected {wanted}."
    if got.dtype != expected.dtype and not (_is_whole(got) and _is_whole(expected)):
        return _about_dtype(name, got, expected)
    if got.device != expected.device:
        return f"{name} is on {got.device}; leave it where the arguments are, on {expected.device}."
    return _about_numbers(name, got.detach(), expected, pattern)


def is_plain(value: object) -> bool:
    """Whether a value is a tensor that can be compared number by number: not sparse, nested or quantized."""
    return (
        isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and not (value.is_nested or value.is_quantized)
    )


def _is_whole(x: torch.Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def _about_dtype(name: str, got: torch.Tensor, expected: torch.Tensor) -> str:
    came, wanted = (str(tensor.dtype).removeprefix("torch.") for tensor in (got, expected))
    told = f"{name} has dtype {came}; expected {wanted}."
    if got.is_floating_point() and expected.is_floating_point():
        # Not forgiven, though the numbers may be right: the next product with a float64 tensor would raise.
        told += f" A tensor on the way was made as {came}. {_GIVE_DTYPE}"
        if expected.dtype == torch.float32:
            told += " Where these are whole numbers, end with `.float()`."
    return told


def _about_numbers(name: str, got: torch.Tensor, expected: torch.Tensor, pattern: str) -> str | None:
    stray = got.isfinite() != expected.isfinite()
    if stray.any():
        index, verb = _first(stray), "is"
    elif not agree(got, expected):
        error = (got.double() - expected.double()).nan_to_num().abs()
        index, verb = _first(error == error.max()), "differs most: it is"
    else:
        return None
    place = f" at {list(index)} of {spell(pattern, got.shape)}" if index else ""
    came, wanted = (f"{tensor[index].item():.4g}" for tensor in (got, expected))
    return f"{name}{place} {verb} {came}; expected {wanted}."


def about_error(error: BaseException) -> str:
    """The error, its message and the learner's own line, without the file's path, which differs between machines."""
    message = _message(error)
    told = f"your function raised {type(error).__name__}{': ' if message else ''}{message}."
    function, number, source = _learners_line(error)
    line = f" It was line {number} of `{function}`: `{source}`." if source else ""
    return f"{told}{line}{_hint(message)}"


def _hint(message: str) -> str:
    """What to do about an error whose own words do not say it."""
    if "same dtype" in message:
        return " " + _GIVE_DTYPE
    pair = re.search(r"return_types\.(max|min)\b", message)
    if pair:
        return f" `{pair[1]}(dim)` returns a pair, values and their places; `a{pair[1]}(dim)` the values alone."
    return ""


def _message(error: BaseException) -> str:
    try:
        return str(error).strip().split("\n")[0].rstrip(".")
    except Exception:  # a learner's own class of errors may not know how to tell itself
        return ""


def unwritten(error: BaseException | None) -> str | None:
    """The name of the learner's function that raised NotImplementedError itself: "" if unknown, None if none did.

    PyTorch raises it too, for a dtype it lacks.
    """
    if not isinstance(error, NotImplementedError):
        return None
    function, _, source = _learners_line(error)
    return function if not source or "NotImplementedError" in source else None


def _learners_line(error: BaseException) -> tuple[str, int, str]:
    """Where the learner's code was when it raised: function, line counted from its ``def``, and what stands there.

    Names are empty and the number 0 where none of it is the learner's.
    """
    lines = [
        (frame, number)
        for frame, number in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith(_LIBRARIES)
    ]
    if not lines:
        return "", 0, ""
    frame, number = lines[-1]
    code = frame.f_code
    source = linecache.getline(code.co_filename, number, frame.f_globals).strip()
    return code.co_name, number - code.co_firstlineno + 1, source


def kind(value: object) -> str:
    """What a result is, as in "your result is a tuple of 2"."""
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return "a single tensor" if isinstance(value, torch.Tensor) else f"of type {type(value).__name__}"


def spell(pattern: str | None, shape: torch.Size) -> str:
    """Letters and sizes, "(... i j) = (2, 3, 5)"; the dots go where no axis leads."""
    axes = (pattern or "").split()
    if "..." in axes and len(axes) > len(shape):
        axes.remove("...")
    return f"({' '.join(axes)}) = {tuple(shape)}" if axes and "_" not in axes else f"{tuple(shape)}"


def _guess_letters(shape: torch.Size, expected: torch.Size, pattern: str, sizes: dict[str, int]) -> str | None:
    """Read a wrong shape in axis letters, "j i" for a transposed one; None where the sizes leave it open."""
    lead = len(expected) - len(pattern.replace("...", "").split())
    letters = [[letter for letter, known in sizes.items() if known == size] for size in shape[lead:]]
    if shape[:lead] != expected[:lead] or any(len(fitting) != 1 for fitting in letters):
        return None
    return " ".join(["..."] * (lead > 0) + [fitting[0] for fitting in letters])


def _first(wrong: torch.Tensor) -> tuple[int, ...]:
    return tuple(wrong.nonzero()[0].tolist())
