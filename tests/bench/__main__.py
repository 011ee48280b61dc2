"""Measure every subject, or those named, and end with code 1 when a bound is missed."""

import importlib
import pkgutil
import sys

import torch

from tests import bench


def main(words: list[str]) -> int:
    """Print one line for each measurement and return the exit code."""
    modules = {module.name for module in pkgutil.iter_modules(bench.__path__)}
    subjects = sorted(name.removeprefix("speed_") for name in modules if name.startswith("speed_"))
    unknown = set(words) - set(subjects)
    if unknown:
        print(f"no such subject: {', '.join(sorted(unknown))}; there are: {', '.join(subjects)}")
        return 2
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; our time over theirs, median of pairs")
    missed = 0
    for subject in words or subjects:
        torch.manual_seed(0)
        for what, found, bound in importlib.import_module(f"tests.bench.speed_{subject}").measure():
            missed += found > bound
            verdict = "holds" if found <= bound else "MISSED"
            print(f"{subject}: {what}: {found:.2f}, at most {bound:g}: {verdict}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
