import dataclasses

import pytest

from mha_lessons.checks import Report

PASSED = Report(True, True, "All agree.")
FAILED = Report(False, True, "Use `a < b` & not <b>.")
STUB = Report(False, False, "Write it.")


@pytest.mark.parametrize(
    ("report", "headline"),
    [(PASSED, "✓ Passed."), (FAILED, "✗ Not yet."), (STUB, "○ Not attempted yet.")],
    ids=["passed", "failed", "stub"],
)
def test_text_and_html_say_the_same_in_symbol_and_words(report, headline):
    assert repr(report) == f"{headline} {report.diagnosis}"
    assert f"<strong>{headline}</strong>" in report._repr_html_()


def test_html_escapes_the_diagnosis_and_marks_code():
    shown = FAILED._repr_html_()
    assert "Use <code>a &lt; b</code> &amp; not &lt;b&gt;." in shown


def test_html_sets_no_colour_of_text_or_ground_so_that_both_themes_can_show_it():
    style = PASSED._repr_html_().split('"')[1]
    assert "border-left" in style
    assert "background" not in style
    assert not any(rule.strip().startswith("color") for rule in style.split(";"))


def test_a_report_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        STUB.passed = True
