"""Comparison for the maths: finite first (a NaN passes `max(err) < tol`), then close, then the same shape and dtype."""

import torch
from torch.testing import assert_close


def assert_agree(actual, expected, *, tolerance=1e-12):
    """Both are finite, of one shape and dtype, and differ by no more than the tolerance, absolute and relative."""
    assert torch.isfinite(actual).all(), f"not finite: {actual}"
    assert torch.isfinite(expected).all(), f"the expectation is not finite: {expected}"
    assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def assert_rounded_once(actual, exact):
    """Equal to a float64 result but for one rounding, at the end, to a shorter dtype: half a unit in the last place."""
    assert torch.isfinite(actual).all(), f"not finite: {actual}"
    assert torch.isfinite(exact).all(), f"the expectation is not finite: {exact}"
    assert_close(actual.double(), exact, rtol=0.55 * torch.finfo(actual.dtype).eps, atol=2e-5)


def randn(*shape, seed, dtype=torch.float64):
    """Normal numbers of a seed of their own: hypothesis must be able to make an example again."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
