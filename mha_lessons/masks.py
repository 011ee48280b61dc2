"""Who may look at whom: boolean masks in which True means "may attend", everywhere.

``F.scaled_dot_product_attention`` reads a mask the same way; ``nn.MultiheadAttention`` reads it the other way
round (True = hide). Masks are combined while they are boolean and reach the scores once, so that no two large
negative numbers are ever added.
"""

from collections.abc import Sequence

import torch

from mha_lessons.shapes import broadcast_shape, check_count


def _distance_back(n_queries: int, n_keys: int | None) -> torch.Tensor:
    """How far each key lies behind each query, (i j); negative in the future.

    The last query stands at the last key: with a cache the new queries are the last of all positions.
    """
    n_keys = n_queries if n_keys is None else n_keys
    check_count(n_queries, "n_queries")
    check_count(n_keys, "n_keys")
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
    check_count(window, "window", least=1)
    back = _distance_back(n_queries, n_keys)
    window = min(window, back.shape[-1])  # a larger one sees no more, and may not fit int64
    return (back >= 0) & (back < window)


def padding_mask(lengths: torch.Tensor | Sequence[int], n_keys: int | None = None) -> torch.Tensor:
    """Every query sees the real keys of its own sequence and none of the padding after them.

    Args:
        lengths: (b) whole numbers, the count of real tokens of each sequence.
        n_keys: number of keys j; None: the longest length.

    Returns:
        (b 1 1 j) bool: the two axes of size 1 stand for heads and queries.

    Raises:
        TypeError: lengths are not whole numbers, or n_keys is no int.
        ValueError: lengths are not one axis, one lies outside 0 ... n_keys, or n_keys is negative.
    """
    try:
        lengths = torch.as_tensor(lengths)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"lengths are {lengths!r}; expected whole numbers, the count of real tokens of each sequence"
        ) from None
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
    lengths = lengths.long()  # n_keys may be more than a short dtype can hold
    if n_keys is None:
        n_keys = max([0, *lengths.tolist()])
    check_count(n_keys, "n_keys")
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


def check_mask(mask: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Refuse a mask that does not fit the scores of these queries and keys, or that cannot mean what it says.

    Args:
        mask: bool (True = may attend) or floating point (added to the scores).
        q: (... i d).
        k: (... j d).

    Returns:
        The mask with at least the axes (i j), each of the full size or 1.

    Raises:
        TypeError: the mask is neither bool nor floating point.
        ValueError: it does not broadcast to (... i j), or it is a float mask that holds only 0 and 1 (a keep mask
            in disguise: added, it would hide nothing).
    """
    if not isinstance(mask, torch.Tensor):
        raise TypeError(
            f"mask is a {type(mask).__name__}; expected a bool tensor (True = may attend) or a float tensor"
        )
    if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
        raise TypeError(
            f"mask is {mask.dtype}; expected bool (True = may attend) or floating point (added): use mask.bool()"
        )
    scores_shape = (*broadcast_shape(q.shape[:-2], k.shape[:-2]), q.shape[-2], k.shape[-2])
    try:
        fits = broadcast_shape(mask.shape, scores_shape) == scores_shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"mask has shape {tuple(mask.shape)}; expected one that broadcasts to the scores' {scores_shape}, "
            "axes (... i j): a mask for each batch item needs an axis of size 1 for the heads, as in mask[:, None]"
        )
    mask = torch.atleast_2d(mask)
    if mask.dtype != torch.bool and _holds_only_0_and_1(mask):
        raise ValueError(
            "mask is floating point and holds only 0 and 1. A float mask is added to the scores, so this one would "
            "hide nothing: use mask.bool() if 1 means may attend, or 0 and -inf"
        )
    return mask


def _holds_only_0_and_1(mask: torch.Tensor) -> bool:
    # A mask that requires grad is a learned bias, whatever its numbers are now. A few rows at a time: the
    # comparison makes a tensor of the mask's size, and most masks show in their first rows what they are.
    only = all(bool(((rows == 0) | (rows == 1)).all()) for rows in mask.split(64, dim=-2))
    return only and not mask.requires_grad and bool(mask.any())


def without_unseen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sees: torch.Tensor, seen: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """0 in place of keys and values that no query sees, and of queries that see no key.

    A weight of 0 does not stop a NaN, forwards or backwards: 0 · NaN is NaN.

    Args:
        q: (... i d).
        k: (... j d).
        v: (... j dv).
        sees: (... i) bool, whether a query sees a key.
        seen: (... j) bool, whether a key is seen by a query. Here and in ``sees`` the axis may be 1.

    Returns:
        q, k and v, with the leading axes of ``sees`` and ``seen`` where these have more.
    """
    sees, seen = sees[..., None], seen[..., None]
    return torch.where(sees, q, 0), torch.where(seen, k, 0), torch.where(seen, v, 0)
