"""What is measured, not tested: a busy machine would make a test of it fail.

`python -m tests.bench [subject ...]` compares the package's speed with PyTorch's. Each module ``speed_<subject>.py``
here is a subject. Its function ``measure()`` yields ``(what, ratio, bound)``: in words what ran, our time over theirs,
and the most that is allowed. To add a subject, add a module: it is found by its name.
"""

import statistics
import time
from collections.abc import Callable


def ratio(ours: Callable[[], object], theirs: Callable[[], object], pairs: int = 15) -> float:
    """The median of ours / theirs over pairs that run one right after the other, each first in turn.

    Whatever else the machine does slows both of a pair, and the median forgets the pairs that it slows unevenly.
    """
    ours(), theirs()  # warm up
    ratios = []
    for pair in range(pairs):
        if pair % 2:
            mine, other = _seconds(ours), _seconds(theirs)
        else:
            other, mine = _seconds(theirs), _seconds(ours)
        ratios.append(mine / other)
    return statistics.median(ratios)


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
