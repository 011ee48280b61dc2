"""The axis glossary, and one function that checks shapes against it.

    b  batch             i  query position    d  width of a head (d_k)
    n  positions         j  key position      e  width of the model (d_model)
    h  head              c  channel           p  patch

The same letters stand in einops patterns, docstrings, plot labels and prose. Heads come before positions,
``(b h i d)``; attention weights are ``(b h i j)``, a row for each query.
"""

import torch


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
