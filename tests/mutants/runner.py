"""Plants one fault in a copy of the package and says whether the named test notices.

Each mutant runs in a process of its own, forked from a server that has imported the slow libraries already but never
``mha_lessons``: so the mutant costs the test it runs and little more. Where there is no fork, it costs the imports too.
"""

import contextlib
import gc
import io
import multiprocessing
import os
import shutil
import sys
import tomllib
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
TIME_LIMIT = 120  # seconds; a fault can hang a test
# With these a mutant is no wrong code but broken code, which any test would notice.
BROKEN_CODE = (
    "SyntaxError",
    "IndentationError",
    "ImportError",
    "ModuleNotFoundError",
    "NameError",
    "UnboundLocalError",
)

# The last three are what torch.broadcast_shapes, assert_close and PyTorch's causal bias import when first used.
PRELOAD = ["einops", "numpy", "matplotlib", "PIL.Image", "hypothesis", "pytest", "torch.testing"]
PRELOAD += ["torch.fx.experimental.symbolic_shapes", "torch.distributed.tensor", "torch.nn.attention.bias"]

_methods = multiprocessing.get_all_start_methods()
_context = multiprocessing.get_context("forkserver" if "forkserver" in _methods else "spawn")
if "forkserver" in _methods:
    _context.set_forkserver_preload(PRELOAD)


@dataclass(frozen=True)
class Mutant:
    """One fault, and the test that must notice it."""

    case: str
    file: str
    find: str
    replace: str
    test: str


@dataclass(frozen=True)
class Outcome:
    """What the tests did: which passed, and each failure as (when, node, name of the exception, its text)."""

    passed: list[str]
    failures: list[tuple[str, str, str, str]]
    printed: str


def load_mutants() -> list[Mutant]:
    """All mutants of all lists, in the order of the files' names."""
    files = sorted(Path(__file__).parent.glob("*.toml"))
    return [Mutant(**entry) for file in files for entry in tomllib.loads(file.read_text("utf-8"))["mutant"]]


def complaint(mutant: Mutant, folder: Path) -> str | None:
    """Run the mutant's test in a copy of the package made under ``folder``; None when the fault is caught."""
    copy = copy_package(folder)
    plant(mutant, copy)
    outcome = run_tests(copy, [mutant.test], stop_at_first=True)
    for when, node, error, text in outcome.failures:
        if when != "call" or error in BROKEN_CODE:
            return f"proves nothing, for it breaks the {when} of {node}: {error}: {text}"
    if not outcome.failures:
        return f"survives {mutant.test}: mend the test\n{outcome.printed}"
    return None


def copy_package(folder: Path) -> Path:
    """A folder with a copy of the package, and the data beside it as in a checkout."""
    shutil.copytree(REPO / "mha_lessons", folder / "mha_lessons", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "pyproject.toml").touch()
    try:
        os.symlink(REPO / "data", folder / "data", target_is_directory=True)
    except OSError:  # Windows allows links to some users only
        shutil.copytree(REPO / "data", folder / "data")
    return folder


def plant(mutant: Mutant, copy: Path) -> None:
    """Make the edit.

    Raises:
        ValueError: the text to find is not there exactly once.
    """
    path = copy / "mha_lessons" / mutant.file
    source = path.read_text("utf-8")
    count = source.count(mutant.find)
    if count != 1 or mutant.find == mutant.replace:
        raise ValueError(
            f"{mutant.file} holds the text to find {count} times; expected once, and another text in its place:\n"
            f"{mutant.find}"
        )
    path.write_text(source.replace(mutant.find, mutant.replace), "utf-8")


def run_tests(copy: Path, nodes: list[str], *, stop_at_first: bool = False) -> Outcome:
    """Run pytest nodes of this checkout against another copy of the package, in a process of its own."""
    ours, theirs = _context.Pipe(duplex=False)
    process = _context.Process(target=_child, args=(str(copy), nodes, stop_at_first, theirs))
    process.start()
    theirs.close()
    try:
        if not ours.poll(TIME_LIMIT):
            return Outcome([], [("call", ", ".join(nodes), "TimeoutError", f"more than {TIME_LIMIT} s")], "")
        return ours.recv()
    except EOFError:
        process.join()
        return Outcome([], [("process", ", ".join(nodes), "EOFError", f"it ended with code {process.exitcode}")], "")
    finally:
        process.kill()
        process.join()
        ours.close()


class _Witness:
    """A pytest plugin that notes what passes and what fails, and how."""

    def __init__(self) -> None:
        self.passed: list[str] = []
        self.failures: list[tuple[str, str, str, str]] = []

    def pytest_collection(self) -> None:
        # The first failure will do: to look for the smallest example takes many times as long.
        from hypothesis import Phase, settings

        settings.register_profile("first failure", settings(phases=[Phase.explicit, Phase.generate]))
        settings.load_profile("first failure")

    def pytest_runtest_logreport(self, report) -> None:
        if report.when == "call" and report.passed:
            self.passed.append(report.nodeid)

    def pytest_exception_interact(self, node, call, report) -> None:
        self.failures.append((report.when, node.nodeid, call.excinfo.typename, str(call.excinfo.value)))


def _child(copy: str, nodes: list[str], stop_at_first: bool, report_to: Connection) -> None:
    import pytest
    import torch

    gc.freeze()  # what was imported before the fork stays: pytest need not search it for garbage, which takes longest
    torch.set_num_threads(1)  # two of us run at a time
    os.chdir(copy)  # where a test starts another Python, that one too must find the copy first
    os.environ["PYTHONPATH"] = copy
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # none is needed here, and pytest refuses one already imported
    sys.path.insert(0, copy)
    import mha_lessons  # before pytest puts the checkout first; its modules then come from the copy too

    if Path(mha_lessons.__file__).parent != Path(copy, "mha_lessons"):
        raise RuntimeError(f"the package came from {mha_lessons.__file__}; expected the copy in {copy}")
    witness, printed = _Witness(), io.StringIO()
    options = ["-q", "--no-header", "--assert=plain", "-p", "no:cacheprovider", f"--rootdir={REPO}"]
    options += ["-x"] * stop_at_first
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        pytest.main([*options, *(str(REPO / node) for node in nodes)], plugins=[witness])
    report_to.send(Outcome(witness.passed, witness.failures, printed.getvalue()))
