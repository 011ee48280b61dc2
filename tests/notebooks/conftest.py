import copy
import json
from functools import cache
from pathlib import Path

import nbformat
import pytest

from tests.notebooks.execute import executed, lessons, read, tags

ROOT = Path(__file__).parents[2]
SWEEP = f"""
import sys
sys.path.insert(0, {json.dumps(str(ROOT))})
from tests.notebooks.sweep import sweep
print("moves:", sweep(Out[max(Out)]))
"""


def pytest_generate_tests(metafunc):
    if "lesson" in metafunc.fixturenames:
        metafunc.parametrize("lesson", lessons(), ids=lambda path: path.stem)


@pytest.fixture
def notebook(lesson: Path):
    return read(lesson)


@cache
def _swept(lesson: Path):
    """The notebook after a run of its own, with a sweep of every widget straight after its cell."""
    notebook = copy.deepcopy(read(lesson))
    cells = []
    for cell in notebook.cells:
        cells.append(cell)
        if cell.cell_type == "code" and "widget" in tags(cell):
            sweep = nbformat.v4.new_code_cell(SWEEP, id=f"sweep-{cell.id}", metadata={"tags": ["raises-exception"]})
            cells.append(sweep)
    notebook.cells = cells
    return executed(notebook)


@pytest.fixture
def swept(lesson: Path):
    return _swept(lesson)
