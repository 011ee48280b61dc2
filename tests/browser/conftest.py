"""Fixtures of the browser tests: one JupyterLab and one page for all of them, a notebook closed after each test."""

import os
from collections.abc import Iterator

import pytest

from tests.browser.jupyter import find_chromium
from tests.browser.lab_page import LabPage, opened_lab

NO_BROWSER = "no Chromium or Chrome found: install one, or name its path in MHA_CHROMIUM"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say why browser tests were skipped, without anyone asking for it."""
    if find_chromium() is None:
        terminalreporter.write_line(f"Browser tests did not run: {NO_BROWSER}")


@pytest.fixture(scope="package")
def chromium() -> str:
    """The browser's path. Without one the tests are skipped, or fail where the environment requires them."""
    path = find_chromium()
    if path is None:
        if os.environ.get("MHA_REQUIRE_BROWSER") == "1":
            pytest.fail(f"MHA_REQUIRE_BROWSER is 1 and there is {NO_BROWSER}")
        pytest.skip(NO_BROWSER)
    return path


@pytest.fixture(scope="package")
def session(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabPage]:
    """JupyterLab, over a copy of the notebooks, open in Chromium."""
    with opened_lab(chromium, tmp_path_factory.mktemp("lab")) as page:
        yield page


@pytest.fixture
def lab(session: LabPage) -> Iterator[LabPage]:
    """The page, with no notebook open; afterwards nothing is left open, and no error may have been logged."""
    session.errors.clear()
    yield session
    session.close()
    assert not session.errors, "errors in the browser's console:\n" + "\n".join(session.errors)
