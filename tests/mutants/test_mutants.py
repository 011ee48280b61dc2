"""Every planted fault is caught by the test that it names, and that test passes without the fault."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from tests.mutants.runner import Mutant, complaint, copy_package, load_mutants, plant, run_tests

MUTANTS = load_mutants()
HARMLESS = Mutant(
    case="no fault at all",
    file="shapes.py",
    find="    axes = pattern.split()\n",
    replace='    axes = pattern.split(" ")\n',
    test="tests/test_shapes.py::test_known_sizes_that_fit_pass",
)


@pytest.fixture(scope="module")
def pool():
    with ThreadPoolExecutor(2) as pool:
        yield pool
        pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="module")
def complaints(request, pool, tmp_path_factory):
    """The outcome to come of each mutant that this run asks for, two at a time."""
    mine = [item for item in request.session.items if getattr(item, "originalname", None) == test_is_caught.__name__]
    asked = [item.callspec.params["mutant"] for item in mine]
    return {mutant: pool.submit(complaint, mutant, tmp_path_factory.mktemp("mutant")) for mutant in asked}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.file}-{mutant.case}")
def test_is_caught(mutant, complaints):
    said = complaints[mutant].result()
    assert said is None, f"{mutant.case} ({mutant.file}) {said}"


def test_the_named_tests_pass_without_a_fault(pool, tmp_path):
    copy, nodes = copy_package(tmp_path), sorted({mutant.test for mutant in MUTANTS})
    for outcome in pool.map(lambda part: run_tests(copy, part), (nodes[::2], nodes[1::2])):
        assert outcome.failures == [], outcome.printed
        nodes = [node for node in nodes if not any(passed.startswith(node) for passed in outcome.passed)]
    assert nodes == [], "these ran no test"


def test_no_fault_is_planted_twice():
    assert len({(mutant.file, mutant.case) for mutant in MUTANTS}) == len(MUTANTS)
    assert len({(mutant.file, mutant.find, mutant.replace) for mutant in MUTANTS}) == len(MUTANTS)


def test_a_harmless_edit_survives(tmp_path):
    assert complaint(HARMLESS, tmp_path).startswith("survives tests/test_shapes.py::test_known_sizes")


@pytest.mark.parametrize(
    "edit", ["    axes = pattern.split(\n", "    axes = letters.split()\n", "import nothing_like_it\n"]
)
def test_broken_code_proves_nothing(edit, tmp_path):
    assert complaint(replace(HARMLESS, replace=edit), tmp_path).startswith("proves nothing")


def test_a_text_that_is_not_there_once_is_refused(tmp_path):
    copy = copy_package(tmp_path)
    with pytest.raises(ValueError, match=r"shapes\.py holds the text to find 0 times; expected once"):
        plant(replace(HARMLESS, find="not there"), copy)
    with pytest.raises(ValueError, match="holds the text to find 1 times; expected once, and another text"):
        plant(replace(HARMLESS, replace=HARMLESS.find), copy)
