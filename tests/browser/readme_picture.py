"""Take the README's picture from the running lesson: ``python -m tests.browser.readme_picture``."""

import tempfile
from pathlib import Path

from tests.browser.jupyter import find_chromium
from tests.browser.lab_page import opened_lab

LESSON = "01_queries_keys_values.ipynb"
PICTURE = Path(__file__).parents[2] / "data" / "readme.png"


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        opened_lab(find_chromium(), Path(folder), width=1440, height=1100) as lab,
    ):
        lab.open(LESSON)
        lab.run(lab.tagged("setup", "widget"))
        (output,) = lab.widgets(lab.tagged("widget")[0])  # the pretrained heads
        output.locator(".mha-view canvas").press("Enter")  # enlarges the chosen one
        lab.page.wait_for_timeout(1000)
        output.screenshot(path=PICTURE)
        lab.close()
    print(f"wrote {PICTURE}")


if __name__ == "__main__":
    main()
