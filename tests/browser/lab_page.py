"""What the browser tests do in JupyterLab, in a lesson's words: open a notebook, run tagged cells, move a slider."""

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import nbformat
from playwright.sync_api import Locator, Page, sync_playwright

from tests.browser.jupyter import CHROMIUM_FLAGS, jupyterlab

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"

# The pixels of a canvas or of a picture, as text that can be compared.
PIXELS = """element => {
    if (element instanceof HTMLCanvasElement) return element.toDataURL();
    if (!element.complete || !element.naturalWidth) return "";
    const copy = new OffscreenCanvas(element.naturalWidth, element.naturalHeight);
    copy.getContext("2d").drawImage(element, 0, 0);
    return String(copy.getContext("2d").getImageData(0, 0, copy.width, copy.height).data);
}"""
# JupyterLab's debugger logs this when a kernel ends while it still asks for its state.
CLOSING_NOISE = "Could not restore the debugger state"
OPEN = """async path => {
    const panel = await jupyterapp.commands.execute("docmanager:open", {path, factory: "Notebook"});
    await panel.context.ready;
    await panel.revealed;
    jupyterapp.shell.activateById(panel.id);
}"""
# A run right after the kernel turned idle may come back with nothing run: the execution count tells.
RUN = """async index => {
    const panel = jupyterapp.shell.currentWidget;
    await panel.sessionContext.ready;
    const cell = panel.content.widgets[index];
    cell.model.clearExecution();
    panel.content.activeCellIndex = index;
    panel.content.deselectAll();
    await jupyterapp.commands.execute("notebook:run-cell");
    return cell.model.executionCount && cell.model.outputs.toJSON();
}"""
ADD = """async source => {
    const notebook = jupyterapp.shell.currentWidget.content;
    notebook.activeCellIndex = notebook.widgets.length - 1;
    await jupyterapp.commands.execute("notebook:insert-cell-below");
    notebook.activeCell.model.sharedModel.setSource(source);
    return notebook.activeCellIndex;
}"""
SHUT_DOWN = "() => jupyterapp.shell.currentWidget.sessionContext.shutdown()"
IDLE = "() => jupyterapp.shell.currentWidget.sessionContext.session?.kernel?.status === 'idle'"
TRUSTED = "() => jupyterapp.shell.currentWidget.content.widgets.some(cell => cell.model.trusted)"
CLOSE = """async () => {
    for (const panel of [...jupyterapp.shell.widgets("main")]) {
        if (!panel.sessionContext) continue;
        await panel.sessionContext.ready; // a kernel that is still starting cannot be ended cleanly
        await panel.sessionContext.shutdown().catch(() => {});
        panel.context.model.dirty = false;
        panel.dispose();
    }
}"""


@contextmanager
def opened_lab(chromium: str, folder: Path, *, width: int = 1280, height: int = 900) -> Iterator["LabPage"]:
    """JupyterLab over a copy of the notebooks, open in Chromium; both end with the block."""
    root, home = folder / "notebooks", folder / "home"
    shutil.copytree(NOTEBOOKS, root, ignore=shutil.ignore_patterns(".*"))
    home.mkdir()
    with jupyterlab(root, home) as (address, token), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_FLAGS)
        try:
            page = browser.new_page(viewport={"width": width, "height": height})
            yield LabPage(page, f"{address}/lab?token={token}", root)
        finally:
            browser.close()


class LabPage:
    """One JupyterLab page.

    Attributes:
        page: Playwright's page.
        root: the folder that the server shows.
        errors: what the page logged as an error, or threw, since the list was cleared.
    """

    def __init__(self, page: Page, address: str, root: Path):
        self.page, self.root = page, root
        self.errors: list[str] = []
        page.set_default_timeout(20_000)
        page.on("console", lambda message: self._note(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self._note(f"{error}\n{error.stack}"))
        page.goto(address)
        page.wait_for_function("window.jupyterapp?.commands.hasCommand('notebook:run-cell')")
        page.evaluate("jupyterapp.restored")

    def _note(self, error: str) -> None:
        if not error.startswith(CLOSING_NOISE):
            self.errors.append(error)

    def open(self, name: str) -> None:
        """Open a notebook of the root; nothing in it is run."""
        self.book = nbformat.read(self.root / name, as_version=4)
        self.page.evaluate(OPEN, name)
        self.notebook = self.page.locator(".jp-NotebookPanel:visible .jp-Notebook")
        self.cell(0).wait_for(state="attached")

    def write(self, name: str, *sources: str) -> None:
        """Make a notebook of code cells in the root; all carry the tag "widget"."""
        cells = [nbformat.v4.new_code_cell(source, metadata={"tags": ["widget"]}) for source in sources]
        kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
        nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), self.root / name)

    def tagged(self, *tags: str) -> list[int]:
        """The indices of the code cells that carry one of the tags."""
        cells = enumerate(self.book.cells)
        return [n for n, cell in cells if cell.cell_type == "code" and set(tags) & set(cell.metadata.get("tags", []))]

    def run(self, cells: Iterable[int]) -> None:
        """Run cells by index, one after the other, through the notebook's own command.

        Raises:
            AssertionError: a cell did not run, or wrote an error.
        """
        for index in cells:
            outputs = None
            for _ in range(5):
                outputs = self.page.evaluate(RUN, index)
                if outputs is not None:
                    break
                self.page.wait_for_timeout(500)
            assert outputs is not None, f"cell {index} did not run"
            broken = [out for out in outputs if out["output_type"] == "error" or out.get("name") == "stderr"]
            assert not broken, f"cell {index} failed: {broken}"

    def add_and_run(self, source: str) -> None:
        """Add a cell below the last one and run it."""
        last = self.page.evaluate(ADD, source)
        self.run([last])

    def theme(self, name: str) -> None:
        """Change JupyterLab's theme, and wait until it is on and the splash screen over the change is gone."""
        self.page.evaluate("theme => jupyterapp.commands.execute('apputils:change-theme', {theme})", name)
        self.page.wait_for_function("theme => document.body.dataset.jpThemeName === theme", arg=name)
        self.page.locator("#jupyterlab-splash").wait_for(state="detached")

    def wait_until_idle(self) -> None:
        """Wait until the kernel has nothing left to do."""
        self.page.wait_for_function(IDLE)

    def shut_down_kernel(self) -> None:
        """End the open notebook's kernel; its outputs stay on the page."""
        self.page.evaluate(SHUT_DOWN)

    def is_trusted(self) -> bool:
        """Whether JupyterLab trusts any cell of the open notebook."""
        return self.page.evaluate(TRUSTED)

    def cell(self, index: int) -> Locator:
        """A cell of the open notebook."""
        return self.notebook.locator(f".jp-Cell[data-windowed-list-index='{index}']")

    def widgets(self, index: int) -> list[Locator]:
        """The outputs of a cell that hold a live widget."""
        return self.cell(index).locator(".jp-OutputArea-output:has(.jupyter-widgets, .mha-view)").all()

    def move(self, slider: Locator) -> None:
        """Focus a slider's handle and press a real arrow key, to the left where it stands at its right end."""
        slider.focus()
        at_end = slider.get_attribute("aria-valuenow") == slider.get_attribute("aria-valuemax")
        self.page.keyboard.press("ArrowLeft" if at_end else "ArrowRight")

    def pixels(self, output: Locator) -> list[str]:
        """The pixels of the canvases and images in an output, as text that can be compared."""
        return output.locator("canvas, img").evaluate_all(f"all => all.map({PIXELS})")

    def changed(self, output: Locator, before: list[str], seconds: float = 5) -> bool:
        """Whether the pixels come to differ from those before, within some seconds."""
        for _ in range(round(20 * seconds)):
            if self.pixels(output) != before:
                return True
            self.page.wait_for_timeout(50)
        return False

    def screenshot(self, path: Path) -> None:
        """The page as a PNG, to look at."""
        self.page.screenshot(path=path)

    def close(self) -> None:
        """Close what is open, unsaved, and end its kernel."""
        self.page.evaluate(CLOSE)
