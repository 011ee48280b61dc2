"""Every lesson in a real browser: readers without a kernel see pictures, and with one the sliders move them."""

import pytest
from playwright.sync_api import Locator

from tests.browser.lab_page import NOTEBOOKS, LabPage

FAILURES = ("This explorer failed", "could not be drawn", "Error displaying widget", "Loading widget")

every_lesson = pytest.mark.parametrize("name", sorted(path.name for path in NOTEBOOKS.glob("*.ipynb")))


@every_lesson
def test_unrun_and_untrusted_each_widget_shows_its_stored_picture(lab: LabPage, name: str):
    lab.open(name)
    assert not lab.is_trusted()
    for index in lab.tagged("widget"):
        cell = lab.cell(index)
        cell.scroll_into_view_if_needed()
        pictures = cell.locator(".jp-OutputArea-output img")
        assert pictures.count(), f"cell {index} shows no picture"
        lab.page.wait_for_function("image => image.complete", arg=pictures.first.element_handle())
        assert all(lab.pixels(cell)), f"cell {index} has a picture that cannot be read"
        text = cell.inner_text()
        assert "model not found" not in text
        assert "VBox(children" not in text


@every_lesson
def test_widgets_move(lab: LabPage, name: str):
    lab.open(name)
    lab.run(lab.tagged("setup", "widget"))
    for index in lab.tagged("widget"):
        outputs = lab.widgets(index)
        assert outputs, f"cell {index} shows no live widget"
        for output in outputs:
            output.scroll_into_view_if_needed()
            output.locator("canvas, img").first.wait_for()
            move_a_slider(lab, output)
            for view in output.locator(".mha-view").all():
                choose_with_mouse_and_keys(lab, view)
            assert not [words for words in FAILURES if words in output.inner_text()]


def move_a_slider(lab: LabPage, output: Locator) -> None:
    sliders = output.locator(".noUi-handle")
    if sliders.count() == 0:
        return
    for _ in range(3):  # a first step may lead to a combination that cannot be, which keeps the picture
        before = lab.pixels(output)
        lab.move(sliders.first)
        if lab.changed(output, before):
            return
    raise AssertionError(f"moving the slider changed no picture; the widget says: {output.inner_text()}")


def choose_with_mouse_and_keys(lab: LabPage, view: Locator) -> None:
    line, canvas = view.locator(".mha-line"), view.locator("canvas")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    hovered, pressed = set(), set()
    for step in range(1, 10):  # a line across the heads at the left
        lab.page.mouse.move(box["x"] + box["width"] * step / 20, box["y"] + box["height"] * step / 10)
        lab.page.wait_for_timeout(50)
        hovered.add(line.inner_text())
    canvas.focus()
    for key in ("ArrowUp", "ArrowLeft", "ArrowDown", "ArrowRight"):
        lab.page.keyboard.press(key)
        lab.page.wait_for_timeout(50)
        pressed.add(line.inner_text())
    assert len(hovered) > 1, f"the mouse changed nothing in {hovered}"
    assert len(pressed) > 1, f"the keys changed nothing in {pressed}"
