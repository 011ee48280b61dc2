"""Who may look at whom: boolean masks in which True means "may attend", everywhere.

``F.scaled_dot_product_attention`` reads a mask the same way; ``nn.MultiheadAttention`` reads it the other way
round (True = hide). Masks are combined while they are boolean and reach the scores once, so that no two large
negative numbers are ever added.
"""

from collections.abc import Sequence
from numbers import Integral

import torch


def _check_count(value: int, name: str, least: int = 0) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} is {value!r}, a {type(value).__name__}; expected an int")
    if value < least:
        raise ValueError(f"{name} is {value}; expected {least} or more")


def _distance_back(n_queries: int, n_keys: int | None) -> torch.Tensor:
    """How far each key lies behind each query, (i j); negative in the future.

    The last query stands at the last key: with a cache the new queries are the last of all positions.
    """
    n_keys = n_queries if n_keys is None else n_keys
    _check_count(n_queries, "n_queries")
    _check_count(n_keys, "n_keys")
    query_position = torch.arange(n_queries)[:, None] + (n_keys - n_queries)
    return query_position - torch.arange(n_keys)


def causal_mask(n_queries: int, n_keys: int | None = None) -> torch.Tensor:
    """Each query sees the keys up to its own position; the last query sees every key.

    The triangle is aligned to the lower right. ``is_causal=True`` of PyTorch aligns it to the upper left, which
    differs as soon as the two lengths do (pytorch/pytorch#108108).

    Args:
        n_queries: number of queries i.
        n_keys: number of keys j; None: as many as queries.

    Returns:
        (i j) bool. With more queries than keys, the first queries see nothing.

    Raises:
        TypeError: a length is no int.
        ValueError: a length is negative.

    Oracle: ``torch.nn.attention.bias.causal_lower_right``.
    """
    return _distance_back(n_queries, n_keys) >= 0


def sliding_window_mask(n_queries: int, window: int, n_keys: int | None = None) -> torch.Tensor:
    """Each query sees the last ``window`` keys up to and including its own position.

    Args:
        n_queries: number of queries i.
        window: how many keys a query sees at most, 1 or more.
        n_keys: number of keys j; None: as many as queries. Aligned as in ``causal_mask``.

    Returns:
        (i j) bool.

    Raises:
        TypeError: an argument is no int.
        ValueError: a length is negative, or ``window`` is less than 1.

    Source: Beltagy, Peters, Cohan: Longformer (2020), section 3.1, in its causal form.
    """
    _check_count(window, "window", least=1)
    back = _distance_back(n_queries, n_keys)
    return (back >= 0) & (back < window)


def padding_mask(lengths: torch.Tensor | Sequence[int], n_keys: int | None = None) -> torch.Tensor:
    """Every query sees the real keys of its own sequence and none of the padding after them.

    Args:
        lengths: (b) whole numbers, the count of real tokens of each sequence.
        n_keys: number of keys j; None: the longest length.

    Returns:
        (b 1 1 j) bool: the two axes of size 1 stand for heads and queries.

    Raises:
        TypeError: lengths are not whole numbers.
        ValueError: lengths are not one axis, or one lies outside 0 ... n_keys.
    """
    lengths = torch.as_tensor(lengths)
    if lengths.numel() == 0 and not lengths.dtype.is_complex:
        lengths = lengths.long()  # an empty list arrives as floats
    if lengths.dtype.is_floating_point or lengths.dtype.is_complex or lengths.dtype == torch.bool:
        raise TypeError(
            f"lengths are {lengths.dtype}; expected whole numbers, the count of real tokens of each sequence"
        )
    if lengths.ndim != 1:
        raise ValueError(
            f"lengths have shape {tuple(lengths.shape)}; expected one axis (b), a length for each sequence"
        )
    n_keys = int(lengths.max()) if n_keys is None and lengths.numel() else n_keys or 0
    _check_count(n_keys, "n_keys")
    outside = lengths[(lengths < 0) | (lengths > n_keys)]
    if outside.numel():
        raise ValueError(
            f"a length is {int(outside[0])}; expected 0 to n_keys = {n_keys}: raise n_keys or cut the sequence"
        )
    positions = torch.arange(n_keys, device=lengths.device)
    return (positions < lengths[:, None])[:, None, None, :]


def combine_masks(*masks: torch.Tensor) -> torch.Tensor:
    """A key may be seen where every mask allows it.

    Args:
        *masks: bool masks that broadcast together, such as (i j) causal and (b 1 1 j) padding.

    Returns:
        bool, of the broadcast shape.

    Raises:
        TypeError: a mask is not a bool tensor.
        ValueError: no mask came, or the shapes do not broadcast together.
    """
    if not masks:
        raise ValueError("combine_masks got no mask; expected at least one")
    for number, mask in enumerate(masks):
        if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
            kind = mask.dtype if isinstance(mask, torch.Tensor) else type(mask).__name__
            raise TypeError(f"mask {number} is {kind}; expected a bool tensor in which True = may attend")
    try:
        masks = torch.broadcast_tensors(*masks)
    except RuntimeError:
        shapes = ", ".join(str(tuple(mask.shape)) for mask in masks)
        raise ValueError(
            f"masks of shapes {shapes} do not broadcast together; expected axes (b h i j), size 1 where shared"
        ) from None
    return torch.stack(masks).all(0)
