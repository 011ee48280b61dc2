"""The exercises as they stand in the notebooks: the stub is not attempted, the folded answer passes."""

import re

from mha_lessons import checks
from tests.notebooks.execute import tags


def exercises(notebook):
    """(stub cell, check cell, answer cell) for each exercise; raises where they do not follow one another."""
    cells = notebook.cells
    for position, cell in enumerate(cells):
        if "exercise" in tags(cell):
            check, answer = cells[position + 1 : position + 3]
            assert "check" in tags(check), f"the cell after {cell.id} is not its [check]"
            assert "answer" in tags(answer), f"the cell after {check.id} is not its [answer]"
            yield cell, check, answer


def namespace_of(notebook):
    """What the set-up cell defines."""
    (setup,) = [cell for cell in notebook.cells if "setup" in tags(cell)]
    namespace = {}
    exec(setup.source, namespace)
    return namespace


def test_stub_check_and_answer(notebook):
    namespace = namespace_of(notebook)
    found = list(exercises(notebook))
    assert len(found) >= 3
    for stub, check, answer in found:
        called = re.fullmatch(r"checks\.(\w+)\((\w+)\)", check.source.strip())
        assert called, f"{check.id} is not one line checks.name(name)"
        exercise, function = called.groups()
        assert exercise == function, f"{check.id} checks {function} with checks.{exercise}"
        assert f"def {function}(" in stub.source, f"{stub.id} does not define {function}"
        exec(stub.source, namespace)
        untouched = getattr(checks, exercise)(namespace[function])
        assert not untouched.attempted, f"the stub in {stub.id} counts as attempted"
        learners = namespace[function]
        namespace.pop(f"answer_{function}", None)
        exec(answer.source, namespace)
        assert namespace[function] is learners, f"{answer.id} overwrites the learner's {function}"
        report = getattr(checks, exercise)(namespace[f"answer_{function}"])
        assert report.passed, f"{answer.id}: {report.diagnosis}"
