"""progress.py: nothing in a script; in a notebook one bar, whose stored trace is the same after every run."""

import contextlib
import subprocess
import sys
from types import SimpleNamespace

import nbformat
import pytest
from nbclient import NotebookClient

from mha_lessons import progress as module
from mha_lessons.progress import progress


@pytest.fixture
def bars(monkeypatch):
    """The bars that are displayed, as if a notebook's kernel ran the test."""
    shown = []
    monkeypatch.setattr(module, "get_ipython", lambda: SimpleNamespace(kernel=object()))
    monkeypatch.setattr(module, "display", shown.append)
    return shown


def state(bar):
    return bar.words.value, bar.bar.value, bar.bar.max, bar.bar.bar_style


def test_a_script_shows_nothing(capfd):
    assert list(progress(range(3), "counting")) == [0, 1, 2]
    assert capfd.readouterr() == ("", "")


def test_a_bar_ends_with_done(bars):
    assert list(progress("abc", "spelling")) == ["a", "b", "c"]
    assert [state(bar) for bar in bars] == [("done: 3 of 3", 3, 3, "")]
    assert bars[0].children[0].value == "spelling"


def test_a_bar_follows_the_loop(bars, monkeypatch):
    monkeypatch.setattr(module, "SECONDS_BETWEEN_UPDATES", -1)
    seen = [state(bars[0])[:2] for _ in progress(range(3), "counting")]
    assert seen == [("0 of 3", 0), ("1 of 3", 1), ("2 of 3", 2)]


def test_a_quick_loop_is_not_slowed_by_its_bar(bars, monkeypatch):
    monkeypatch.setattr(module, "SECONDS_BETWEEN_UPDATES", 1000)
    assert [state(bars[0])[0] for _ in progress(range(3), "counting")] == ["0 of 3"] * 3
    assert state(bars[0])[0] == "done: 3 of 3"


def test_a_total_may_be_given_or_unknown(bars):
    list(progress(iter("abc"), "given", total=3))
    list(progress(iter("abc"), "unknown"))
    assert [state(bar)[:3] for bar in bars] == [("done: 3 of 3", 3, 3), ("done: 3", 1, 1)]


def test_an_empty_loop_is_done(bars):
    assert list(progress([], "nothing")) == []
    assert state(bars[0])[0] == "done: 0"


def leave_by_break():
    for i in progress(range(9), "counting"):
        if i == 4:
            break


def leave_by_raising():
    with contextlib.suppress(ZeroDivisionError):
        for i in progress(range(9), "counting"):
            1 / (i - 4)


def leave_by_a_failing_iterable():
    with contextlib.suppress(ZeroDivisionError):
        list(progress((1 / (i - 4) for i in range(9)), "counting", total=9))


@pytest.mark.parametrize("leave", [leave_by_break, leave_by_raising, leave_by_a_failing_iterable])
def test_a_loop_that_is_left_says_where(bars, leave):
    leave()
    assert state(bars[0]) == ("stopped: 4 of 9", 4, 9, "warning")


def test_the_stored_words_never_change(bars):
    texts = {bars[0]._repr_mimebundle_()["text/plain"] for _ in progress(range(3), "counting")}
    texts.add(bars[0]._repr_mimebundle_()["text/plain"])
    assert texts == {"[progress bar: counting]"}


CELLS = [
    "from mha_lessons.progress import progress\nimport time",
    "for i in progress(range(4), 'counting'):\n    time.sleep(0.11)\nprint(i)",
    "for i in progress(range(9), 'breaking'):\n    if i == 4: break",
    "try:\n    for i in progress(iter('ab'), 'raising'): 1 / 0\nexcept ZeroDivisionError:\n    print('caught')",
]


def test_a_real_notebook_stores_one_line_and_passes_nbval(tmp_path):
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS])
    book.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    NotebookClient(book, timeout=60).execute()
    stored = [[output.get("text") or output.data["text/plain"] for output in cell.outputs] for cell in book.cells]
    expected = [[], ["[progress bar: counting]", "3\n"], ["[progress bar: breaking]"]]
    assert stored == [*expected, ["[progress bar: raising]", "caught\n"]]
    widgets = book.metadata.widgets["application/vnd.jupyter.widget-state+json"]["state"].values()
    words = [widget["state"].get("value") for widget in widgets if widget["model_name"] == "LabelModel"]
    assert {"done: 4 of 4", "stopped: 4 of 9", "stopped: 0"} <= set(words)

    del book.metadata["widgets"]
    for cell in book.cells:
        for output in cell.outputs:
            output.get("data", {}).pop("application/vnd.jupyter.widget-view+json", None)
    nbformat.write(book, tmp_path / "bars.ipynb")
    command = [sys.executable, "-m", "pytest", "--nbval", "--nbval-current-env", "-p", "no:cacheprovider", "-q"]
    done = subprocess.run([*command, "bars.ipynb"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
