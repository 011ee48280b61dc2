"""What is true of every lesson's file: the template's order, its limits, and how outputs are stored."""

import itertools
import re

import nbformat
import pytest

from tests.notebooks.execute import METADATA, WIDGET_VIEW, digest, tags

ORDER = ("title", "setup", "predict", "widget", "pitfall", "exercise", "summary")
KNOWN = {*ORDER, "check", "answer", "notes", "measured"}
SLIDE_TYPES = {"slide", "subslide", "fragment", "skip", "notes", "-"}
# JupyterLab shows the first line of a folded output; it must not be the answer.
NEUTRAL = "Compare with your prediction:"
MOST_CELLS, MOST_LINES, MOST_SETUP_LINES = 45, 12, 6
FORBIDDEN = {
    r"^\s*[%!]": "a magic or a shell command",
    r";\s*$": "a semicolon at the end of a line",
    r"\binteract(ive)?\(|\bOutput\(": "interact, interactive or Output, which swallow errors",
    r"\bsys\.path\b": "sys.path",
    r"\bpyplot\b": "pyplot; use plots.figure",
}


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def lines(cell):
    """The lines that count: none that are blank, nor the one that keeps a folded answer out of sight."""
    return [line for line in cell.source.splitlines() if line.strip() and NEUTRAL not in line]


def faults(notebook) -> list[str]:
    """Everything about the file that is not as it must be, a sentence each."""
    return [
        *_file_faults(notebook),
        *_order_faults(notebook),
        *(f"{cell.id}: {fault}" for cell in notebook.cells for fault in _cell_faults(cell)),
        *(f"{cell.id}: {fault}" for cell in code(notebook) for fault in _code_faults(cell)),
        *(f"{cell.id}: {fault}" for cell in code(notebook) for fault in _output_faults(cell)),
    ]


def _file_faults(notebook):
    if notebook.metadata != METADATA:
        yield f"the metadata are {notebook.metadata}; expected {METADATA}: run `python run.py notebooks`"
    counts = [cell.execution_count for cell in code(notebook)]
    if counts != list(range(1, len(counts) + 1)):
        yield f"execution counts are {counts}: run `python run.py notebooks`"
    ids = [cell.id for cell in notebook.cells]
    if len(set(ids)) < len(ids):
        yield "cell ids repeat"


def _order_faults(notebook):
    cells = notebook.cells
    counted = [cell for cell in cells if not tags(cell) & {"notes", "answer"}]
    if len(counted) > MOST_CELLS:
        yield f"{len(counted)} cells beside notes and answers; expected at most {MOST_CELLS}"
    tagged = {tag: [i for i, cell in enumerate(cells) if tag in tags(cell)] for tag in KNOWN}
    missing = [tag for tag in (*ORDER, "notes") if not tagged[tag]]
    if missing:
        yield f"no cell is tagged {missing}"
        return
    if (
        tagged["title"] != [0]
        or tagged["summary"] != [len(cells) - 1]
        or code(notebook)[0] is not cells[tagged["setup"][0]]
    ):
        yield "the first cell is the title, the first code cell the set-up, the last cell the summary"
    firsts = [tagged[tag][0] for tag in ORDER if tag != "widget"]
    explorer_is_placed = any(tagged["predict"][0] < place < tagged["exercise"][0] for place in tagged["widget"])
    if firsts != sorted(firsts) or not explorer_is_placed:
        yield f"the parts are out of order; expected {ORDER}"
    if not re.match(r"# \d+\. .+\?$", cells[0].source.splitlines()[0]):
        yield "the title is no numbered question"
    if not 3 <= len(tagged["predict"]) <= 12:
        yield f"{len(tagged['predict'])} predictions; expected at least three"
    for place in tagged["predict"]:
        answers = _answers(cells[place + 1 :])
        if not answers:
            yield f"{cells[place].id}: no code cell below it shows the answer"
        for cell in answers:
            if not cell.metadata.get("jupyter", {}).get("outputs_hidden"):
                yield f"{cell.id}: the answer to the prediction in {cells[place].id} is not folded"
            if not _first_line(cell.outputs[0]).startswith((NEUTRAL, "[figure]", "[progress bar")):
                yield f"{cell.id}: the folded output begins with the answer; begin it with print({NEUTRAL!r})"


def _answers(cells):
    """The cells that show something between a prediction and the text that says what came out."""
    told = [cell for cell in cells if "notes" not in tags(cell)]
    shown = itertools.takewhile(lambda cell: cell.cell_type == "code", told)
    return [cell for cell in shown if not all(map(_is_progress, cell.outputs)) and "widget" not in tags(cell)]


def _is_progress(output):
    return _first_line(output).startswith("[progress bar")


def _first_line(output):
    return (output.get("text") or output.get("data", {}).get("text/plain", "")).partition("\n")[0]


def _cell_faults(cell):
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", cell.id) or re.fullmatch(r"[0-9a-f]{8}", cell.id):
        yield "its id is no words joined by hyphens"
    if tags(cell) - KNOWN:
        yield f"unknown tags {tags(cell) - KNOWN}"
    if cell.metadata.get("slideshow", {}).get("slide_type") not in SLIDE_TYPES:
        yield "no slide type"
    if "notes" in tags(cell) and (cell.cell_type != "markdown" or "minutes" not in cell.source):
        yield "a lecturer's cell is text that says how many minutes"
    if "notes" in tags(cell) and not cell.source.startswith("<details><summary>For lecturers"):
        yield "a lecturer's cell is not folded, so a learner reads it first"
    if re.search(r"nbval|PYTEST_VALIDATE", f"{cell.metadata} {cell.source}", flags=re.IGNORECASE):
        yield "hidden from nbval"
    if set(cell.metadata) - {"tags", "slideshow", "jupyter", "measured_source"}:
        yield f"metadata that no lesson needs: {set(cell.metadata)}"
    if set(cell.metadata.get("jupyter", {})) - {"outputs_hidden" if "answer" not in tags(cell) else "source_hidden"}:
        yield "a source is folded in answers alone, and no output is folded there"
    if tags(cell) & {"check", "widget", "exercise"} and "jupyter" in cell.metadata:
        yield "folded, and the reader must see it"


def _code_faults(cell):
    for pattern, what in FORBIDDEN.items():
        if re.search(pattern, cell.source, flags=re.MULTILINE):
            yield f"holds {what}"
    most = MOST_SETUP_LINES if "setup" in tags(cell) else MOST_LINES
    if len(lines(cell)) > most and "answer" not in tags(cell):
        yield f"{len(lines(cell))} lines; expected at most {most}"
    if "answer" in tags(cell) and (cell.outputs or not cell.metadata.get("jupyter", {}).get("source_hidden")):
        yield "an answer that is not folded, or shows something"
    if "setup" in tags(cell) and "run.py lab" not in cell.source:
        yield "does not say how to install what is missing"
    if "measured" in tags(cell) and cell.metadata.get("measured_source") != digest(cell):
        yield "its source changed since it was measured: run `python run.py notebooks`"
    if "widget" in tags(cell) and not re.match(r"explore\.\w+\(", cell.source):
        yield "a widget cell is one call of explore"
    shows = re.search(r"^(print|plots\.show|checks\.|explore\.)", cell.source, flags=re.MULTILINE)
    if shows and not cell.outputs:
        yield "shows something, but no output is stored"


def _output_faults(cell):
    for output in cell.outputs:
        text = str({k: v for k, v in output.get("data", {}).items() if k != "image/png"}) + output.get("text", "")
        if output.output_type == "error" or output.get("name") == "stderr":
            yield f"stores an error: {output}"
        if WIDGET_VIEW in output.get("data", {}):
            yield "stores the id of a widget that exists no more"
        if re.search(r"-0\.0*(?![0-9])", text):
            yield "shows -0.0"
        if re.search(r"0x[0-9a-f]{6,}|/(home|root|work|tmp|Users)/", text):
            yield "shows an address or a path of one machine"
        if any("timestamp" in key or "iopub" in key for key in [*output.get("metadata", {}), *cell.metadata]):
            yield "stores a time"


def test_the_lesson_follows_the_template(notebook):
    nbformat.validate(notebook)
    assert faults(notebook) == []


def _tagged(notebook, tag):
    return next(cell for cell in notebook.cells if tag in tags(cell))


def _folded(notebook):
    return [cell for cell in code(notebook) if cell.metadata.get("jupyter", {}).get("outputs_hidden")]


# Each takes a sound notebook and its first cell that prints, and spoils one thing.
PLANTED = {
    "widget state": lambda notebook, cell: notebook.metadata.update(widgets={}),
    "kernel of one machine": lambda notebook, cell: notebook.metadata.kernelspec.update(name="conda-env-mine-py"),
    "run out of order": lambda notebook, cell: cell.update(execution_count=99),
    "never run": lambda notebook, cell: cell.update(execution_count=None, outputs=[]),
    "no stored output": lambda notebook, cell: cell.update(outputs=[]),
    "stored error": lambda notebook, cell: cell.update(
        outputs=[nbformat.v4.new_output("error", ename="E", evalue="e", traceback=[])]
    ),
    "stored warning": lambda notebook, cell: cell.update(
        outputs=[nbformat.v4.new_output("stream", name="stderr", text="w")]
    ),
    "minus zero": lambda notebook, cell: cell.update(outputs=[nbformat.v4.new_output("stream", text="-0.00\n")]),
    "a path": lambda notebook, cell: cell.update(outputs=[nbformat.v4.new_output("stream", text="/home/me\n")]),
    "exercise before pitfall": lambda notebook, cell: notebook.cells.insert(3, _tagged(notebook, "exercise")),
    "long cell": lambda notebook, cell: cell.update(source=cell.source + "\npass" * 13),
    "interact": lambda notebook, cell: cell.update(source="widgets.interact(f)"),
    "magic": lambda notebook, cell: cell.update(source="%timeit f()"),
    "hidden from nbval": lambda notebook, cell: cell.update(source="# NBVAL_IGNORE_OUTPUT\n" + cell.source),
    "hidden in its old name": lambda notebook, cell: cell.update(
        source="# PYTEST_VALIDATE_IGNORE_OUTPUT\n" + cell.source
    ),
    "foreign metadata": lambda notebook, cell: cell.metadata.update(editable=False),
    "folded check": lambda notebook, cell: _tagged(notebook, "check").metadata.update(jupyter={"outputs_hidden": True}),
    "folded exercise": lambda notebook, cell: _tagged(notebook, "exercise").metadata.update(
        jupyter={"source_hidden": True}
    ),
    "answer that prints": lambda notebook, cell: _tagged(notebook, "answer").update(
        outputs=[nbformat.v4.new_output("stream", text="right\n")]
    ),
    "no hint in the set-up": lambda notebook, cell: _tagged(notebook, "setup").update(source="import torch"),
    "random id": lambda notebook, cell: cell.update(id="0a1b2c3d"),
    "unknown tag": lambda notebook, cell: cell.metadata.update(tags=["raises-exception"]),
    "open notes": lambda notebook, cell: _tagged(notebook, "notes").update(source="5 minutes. Ask."),
    "answer on the fold": lambda notebook, cell: _folded(notebook)[0].update(
        outputs=[nbformat.v4.new_output("stream", text="42\n")]
    ),
    "open answer": lambda notebook, cell: _tagged(notebook, "answer").metadata.pop("jupyter"),
    "unfolded prediction": lambda notebook, cell: _folded(notebook)[0].metadata.pop("jupyter"),
    "prediction without an answer": lambda notebook, cell: notebook.cells[-1].metadata.tags.append("predict"),
    "unfolded further answer": lambda notebook, cell: _folded(notebook)[-1].metadata.pop("jupyter"),
    "no slide type": lambda notebook, cell: cell.metadata.pop("slideshow"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_seen(notebook, fault):
    PLANTED[fault](notebook, next(cell for cell in code(notebook) if "print(" in cell.source))
    assert faults(notebook) != []
