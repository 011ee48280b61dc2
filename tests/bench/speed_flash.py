"""Tiled attention beside PyTorch's fused kernel and the plain formula: b 1, h 8, d 64, float32, one thread."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from mha_lessons.flash import flash_attention
from mha_lessons.masks import causal_mask
from tests.bench import ratio

LENGTHS = (2048, 4096)
FORWARD, BOTH_WAYS = 1.3, 2.0
BESIDE_PLAIN = {False: 1 / 3, True: 1 / 6}
MEMORY = 1 / 20
MEMORY_LENGTH = 8192
STATUS = Path("/proc/self/status")

fused = nn.functional.scaled_dot_product_attention


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False) -> torch.Tensor:
    """softmax(q kᵀ / √d) v, all scores at once."""
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(~causal_mask(q.shape[-2]), -torch.inf)
    return scores.softmax(dim=-1) @ v


def measure() -> Iterator[tuple[str, float, float]]:
    """Forward, forward and backward, beside the plain formula, and memory."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two shared cores make many small steps noisy
    try:
        for n in LENGTHS:
            for causal in (False, True):
                yield from _speed(n, causal)
        if STATUS.exists():
            yield f"peak memory beside plain, n {MEMORY_LENGTH}", _peak("ours") / _peak("plain"), MEMORY
    finally:
        torch.set_num_threads(threads)


def _speed(n: int, causal: bool) -> Iterator[tuple[str, float, float]]:
    q, k, v, weight = torch.randn(4, 1, 8, n, 64)
    which = f"n {n}, {'causal' if causal else 'full'}"
    yield (
        f"forward, {which}",
        ratio(lambda: flash_attention(q, k, v, causal=causal), lambda: fused(q, k, v, is_causal=causal), pairs=9),
        FORWARD,
    )
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    yield (
        f"forward and backward, {which}",
        ratio(
            lambda: torch.autograd.grad(flash_attention(*inputs, causal=causal), inputs, weight),
            lambda: torch.autograd.grad(fused(*inputs, is_causal=causal), inputs, weight),
            pairs=5,
        ),
        BOTH_WAYS,
    )
    if n == max(LENGTHS):
        found = ratio(lambda: flash_attention(q, k, v, causal=causal), lambda: plain(q, k, v, causal), pairs=7)
        yield f"forward beside plain, {which}", found, BESIDE_PLAIN[causal]


def _peak(which: str) -> int:
    """Peak kB that a forward pass of one head adds to a fresh process (a child inherits its parent's ru_maxrss)."""
    command = [sys.executable, "-m", __name__, which]
    return int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout)


def _report_peak(which: str) -> None:
    attend = {"ours": flash_attention, "plain": plain}[which]
    torch.set_num_threads(1)
    q, k, v = torch.randn(3, 1, 1, MEMORY_LENGTH, 64)
    attend(*(x[..., :512, :] for x in (q, k, v)))  # what the libraries set up once
    before = _high_water()
    attend(q, k, v)
    print(_high_water() - before)


def _high_water() -> int:
    return next(int(line.split()[1]) for line in STATUS.read_text().splitlines() if line.startswith("VmHWM"))


if __name__ == "__main__":
    _report_peak(sys.argv[1])
