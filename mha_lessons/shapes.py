"""The axis glossary, and what checks shapes and sizes against it.

    b  batch             i  query position    d  width of a head (d_k)
    n  positions         j  key position      e  width of the model (d_model)
    h  head              c  channel           p  patch

The same letters stand in einops patterns, docstrings, plot labels and prose. Heads come before positions,
``(b h i d)``; attention weights are ``(b h i j)``, a row for each query.
"""

from itertools import zip_longest
from numbers import Integral

import torch


def check_count(value: int, name: str, least: int = 0) -> None:
    """Refuse what is no int, or is too small.

    Args:
        value: a count, such as a number of heads.
        name: what the caller calls it, for the error's text.
        least: the smallest that will do.

    Raises:
        TypeError: ``value`` is no int (True and False are none either).
        ValueError: ``value`` is less than ``least``.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} is {value!r}, a {type(value).__name__}; expected an int")
    if value < least:
        raise ValueError(f"{name} is {value}; expected {least} or more")


def check_shape(tensor: torch.Tensor, pattern: str, *, name: str, **sizes: int) -> dict[str, int]:
    """Match a tensor's shape with a pattern of axis letters and return the size of each named axis.

    Args:
        tensor: any tensor.
        pattern: axis names from first to last, as in ``"b h i d"``. A first ``...`` stands for any number of
            leading axes.
        name: what the caller calls the tensor, for the error's text.
        **sizes: sizes that are known already, as in ``d=64``.

    Returns:
        The size of each axis that the pattern names.

    Raises:
        TypeError: ``tensor`` is no tensor.
        ValueError: the number of axes or a size differs from the pattern.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}; expected a torch.Tensor with axes ({pattern})")
    axes = pattern.split()
    open_front = axes[0] == "..."
    named = axes[1:] if open_front else axes
    shape = tuple(tensor.shape)
    if len(shape) < len(named) or (len(shape) > len(named) and not open_front):
        count = f"at least {len(named)}" if open_front else str(len(named))
        raise ValueError(f"{name} has shape {shape}, {len(shape)} axes; expected {count}: ({pattern})")
    found = dict(zip(named, shape[len(shape) - len(named) :], strict=True))
    wrong = {axis: size for axis, size in sizes.items() if axis in found and found[axis] != size}
    if wrong:
        wanted = ", ".join(f"{axis} = {size}" for axis, size in wrong.items())
        raise ValueError(f"{name} has shape {shape}, read as ({pattern}); expected {wanted}")
    return found


def broadcast_shape(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that tensors of these shapes take together; ValueError where they do not fit.

    Like ``torch.broadcast_shapes``, whose first call loads a computer algebra system and takes half a second.
    """
    axes = [set(sizes) - {1} for sizes in zip_longest(*(reversed(shape) for shape in shapes), fillvalue=1)]
    if any(len(sizes) > 1 for sizes in axes):
        raise ValueError(f"shapes {', '.join(map(str, map(tuple, shapes)))} do not broadcast together")
    return tuple(max(sizes, default=1) for sizes in reversed(axes))


def check_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[int, ...]:
    """Refuse queries, keys and values that do not fit together.

    Args:
        q: (... i d).
        k: (... j d).
        v: (... j dv).

    Returns:
        The leading axes that the three share once they are broadcast.

    Raises:
        TypeError: not tensors, not floating point, or of different dtypes.
        ValueError: the shapes do not fit, or d is 0.
    """
    sizes = check_shape(q, "... i d", name="q")
    keys = check_shape(k, "... j d", name="k", d=sizes["d"])
    check_shape(v, "... j dv", name="v", j=keys["j"])
    if sizes["d"] == 0:
        raise ValueError(f"q has shape {tuple(q.shape)}: its last axis, d, is empty; expected 1 or more")
    if not q.dtype.is_floating_point or k.dtype != q.dtype or v.dtype != q.dtype:
        raise TypeError(f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}; expected one floating-point dtype for all three")
    try:
        return broadcast_shape(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    except ValueError:
        shapes = f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        raise ValueError(f"the leading axes of q, k, v do not fit together: their shapes are {shapes}") from None
