"""AttentionView under real keys and a real mouse, in notebooks that the tests write."""

from collections.abc import Callable

import pytest
from playwright.sync_api import Locator

from tests.browser.lab_page import LabPage

VIEW = """
import numpy as np
from mha_lessons.attention_view import AttentionView

weights = np.arange(1, 25).reshape(2, 3, 4) / 24
hidden = np.eye(3, 4, k=3, dtype=bool)
view = AttentionView(weights, ["<b>", "it", "was"], ["the", "animal", "<i>x", "."], hidden=hidden)
view
"""
FRAMES = """
import ipywidgets
import numpy as np
from mha_lessons.attention_view import AttentionView

weights = np.random.default_rng(0).dirichlet(np.ones(16), size=(4, 2, 16))
weights[:, :, :, 0] = 0.5  # the chosen weight and the scale stay: only the cells can show that the frame moved
view = AttentionView(weights)
slider = ipywidgets.IntSlider(0, 0, 3)
link = ipywidgets.jslink((slider, "value"), (view, "frame"))
ipywidgets.VBox([slider, view])
"""


@pytest.fixture
def show(lab: LabPage) -> Callable[[str], Locator]:
    """A function that runs a cell in a notebook of its own and returns the view that it shows."""

    def run_and_find(source: str) -> Locator:
        lab.write("scratch.ipynb", source)
        lab.open("scratch.ipynb")
        lab.run([0])
        view = lab.cell(0).locator(".mha-view")
        view.locator(".mha-line", has_text="query").wait_for()
        return view

    return run_and_find


def press(lab: LabPage, view: Locator, *keys: str) -> str:
    """What the line says after some keys."""
    view.locator("canvas").focus()
    for key in keys:
        lab.page.keyboard.press(key)
    lab.page.wait_for_timeout(100)
    return view.locator(".mha-line").inner_text()


def test_keys_choose_and_the_kernel_hears_of_it(lab: LabPage, show):
    view = show(VIEW)
    assert press(lab, view) == 'head 0 · query "<b>" looks at key "the": 0.042'
    assert press(lab, view, "ArrowDown", "ArrowRight") == 'head 0 · query "it" looks at key "animal": 0.250'
    assert press(lab, view, "PageDown", "]") == 'head 1 · query "it" looks at key "animal": 0.750'
    assert press(lab, view, "[", "ArrowUp", "ArrowUp", *["ArrowRight"] * 9).endswith('cannot see key ".": hidden')
    assert view.locator("canvas").get_attribute("aria-label").endswith('cannot see key ".": hidden')
    lab.wait_until_idle()
    lab.add_and_run("print(view.head, view.query, view.key, view.enlarged)")
    assert lab.cell(1).locator(".jp-OutputArea-output").inner_text().strip() == "0 0 3 False"


def test_keys_that_come_faster_than_frames_all_count(lab: LabPage, show):
    view = show(VIEW)
    view.locator("canvas").evaluate("""canvas => {
        for (const key of ["ArrowRight", "ArrowRight", "ArrowDown", "ArrowDown"])
            canvas.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true, cancelable: true}));
    }""")
    view.locator(".mha-line", has_text='query "was" looks at key "<i>x"').wait_for(timeout=3000)


def test_enter_and_double_click_enlarge_a_head(lab: LabPage, show):
    view = show(VIEW)
    canvas = view.locator("canvas")
    small, height = lab.pixels(view), canvas.bounding_box()["height"]
    press(lab, view, "Enter")
    large, large_height = lab.pixels(view), canvas.bounding_box()["height"]
    assert large != small
    assert large_height >= height
    press(lab, view, "Escape")
    assert lab.pixels(view) == small
    assert canvas.bounding_box()["height"] == height
    canvas.dblclick(position={"x": 120, "y": 60})
    lab.page.wait_for_timeout(100)
    assert canvas.bounding_box()["height"] == large_height
    press(lab, view, "ArrowUp", "ArrowUp", *["ArrowLeft"] * 4)
    assert lab.pixels(view) == large


def test_a_click_holds_the_choice(lab: LabPage, show):
    view = show(VIEW)
    line, canvas = view.locator(".mha-line"), view.locator("canvas")
    for x, y in [(120, 60), (220, 60)]:
        canvas.hover(position={"x": x, "y": y})
        lab.page.wait_for_timeout(50)
    hovered = line.inner_text()
    assert hovered != 'head 0 · query "<b>" looks at key "the": 0.042'
    canvas.click(position={"x": 220, "y": 60})
    canvas.hover(position={"x": 120, "y": 160})
    lab.page.wait_for_timeout(50)
    assert line.inner_text() == hovered


def test_tokens_are_text_and_choose_by_click(lab: LabPage, show):
    view = show(VIEW)
    assert view.locator(".mha-strip b, .mha-strip i").count() == 0
    strips = view.locator(".mha-strip")
    assert strips.locator("button").all_inner_texts() == ["<b>", "it", "was", "the", "animal", "<i>x", "."]
    strips.locator("button", has_text="was").click()
    strips.locator("button", has_text="<i>x").click()
    view.locator(".mha-line", has_text='query "was" looks at key "<i>x": 0.458').wait_for()
    shades = strips.nth(1).locator("button").evaluate_all("all => all.map(b => b.style.background)")
    assert len(set(shades)) == 4


def test_tokens_of_white_space_can_be_seen(lab: LabPage, show):
    source = VIEW.replace('["<b>", "it", "was"]', r'[" ", "\n", " a"]')
    view = show(source)
    assert view.locator(".mha-strip").first.locator("button").all_inner_texts() == ["␣", "⏎", " a"]


def test_linked_frames_move_without_a_kernel(lab: LabPage, show):
    view = show(FRAMES)
    output = lab.widgets(0)[0]
    lab.shut_down_kernel()
    before = lab.pixels(output)
    lab.move(output.locator(".noUi-handle"))
    assert lab.changed(output, before)
    assert press(lab, view, "ArrowRight").startswith('head 0 · query "0" looks at key "1"')
    # ipywidgets itself logs that nobody listens; anything else that was logged still fails the test.
    lab.errors[:] = [error for error in lab.errors if "Could not send widget sync message" not in error]


def test_the_dark_theme_redraws_in_its_own_ink(lab: LabPage, show):
    view = show(VIEW)
    light = lab.pixels(view)
    lab.theme("JupyterLab Dark")
    try:
        assert lab.changed(view, light)
        dark = lab.pixels(view)
    finally:
        lab.theme("JupyterLab Light")
    assert lab.changed(view, dark)


def test_an_error_in_the_browser_is_said_in_words(lab: LabPage, show):
    view = show(VIEW)
    lab.add_and_run("view._weights = b''")
    view.locator(".mha-error", has_text="could not be drawn").wait_for()
    assert lab.errors
    lab.add_and_run("view.show(weights)")
    view.locator(".mha-line", has_text='query "0"').wait_for()
    assert not view.locator(".mha-error").is_visible()
    lab.errors.clear()  # only now: a page that changes its size draws again, and fails again, as long as it is broken
