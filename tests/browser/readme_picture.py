"""Take the README's picture from the running lesson: ``python -m tests.browser.readme_picture``."""

import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from tests.browser.conftest import NOTEBOOKS
from tests.browser.jupyter import CHROMIUM_FLAGS, find_chromium, jupyterlab
from tests.browser.lab_page import LabPage

LESSON = "01_queries_keys_values.ipynb"
PICTURE = Path(__file__).parents[2] / "data" / "readme.png"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        root, home = Path(folder, "notebooks"), Path(folder, "home")
        shutil.copytree(NOTEBOOKS, root, ignore=shutil.ignore_patterns(".*"))
        home.mkdir()
        with jupyterlab(root, home) as (address, token), sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=find_chromium(), args=CHROMIUM_FLAGS)
            page = browser.new_page(viewport={"width": 1440, "height": 1100})
            lab = LabPage(page, f"{address}/lab?token={token}", root)
            lab.open(LESSON)
            lab.run(lab.tagged("setup", "widget"))
            (output,) = lab.widgets(lab.tagged("widget")[0])  # the pretrained heads
            output.locator(".mha-view canvas").press("Enter")  # enlarges the chosen one
            page.wait_for_timeout(1000)
            output.screenshot(path=PICTURE)
            lab.close()
            browser.close()
    print(f"wrote {PICTURE}")


if __name__ == "__main__":
    main()
