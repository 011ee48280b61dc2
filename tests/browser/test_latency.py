"""How long a slider takes from a key press to changed pixels, beside the usual `interact` with new subplots."""

import statistics

from playwright.sync_api import Locator

from tests.browser.lab_page import LabPage

VIEW = """
import ipywidgets
import numpy as np
from mha_lessons.attention_view import AttentionView

def weights(seed):
    return np.random.default_rng(seed).dirichlet(np.ones(32), size=(8, 32))

slider = ipywidgets.IntSlider(0, 0, 20)
view = AttentionView(weights(0))
slider.observe(lambda change: view.show(weights(change.new)), names="value")
ipywidgets.VBox([slider, view])
"""
INTERACT = """
%matplotlib inline
import matplotlib.pyplot as plt

@ipywidgets.interact(seed=ipywidgets.IntSlider(0, 0, 20))
def draw(seed):
    fig, axes = plt.subplots(2, 4, figsize=(10, 5))
    for ax, head in zip(axes.flat, weights(seed)):
        ax.imshow(head)
    plt.show()
"""
# Resolves to the milliseconds from the next key press to the first frame whose picture differs from the present one.
ARM = """output => {
    const picture = () => {
        const canvas = output.querySelector("canvas");
        if (!canvas) return output.querySelector("img")?.src ?? "";
        const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        return new Uint32Array(pixels.buffer).reduce((sum, pixel) => (31 * sum + pixel) | 0, 0);
    };
    const before = picture();
    window.latency = new Promise(resolve => window.addEventListener("keydown", event => {
        const look = () => {
            const now = picture();
            if (now !== "" && now !== before) resolve(performance.now() - event.timeStamp);
            else requestAnimationFrame(look);
        };
        requestAnimationFrame(look);
    }, {capture: true, once: true}));
}"""


def latency(lab: LabPage, output: Locator, moves: int) -> float:
    """The median over some moves of the output's slider, in milliseconds."""
    times = []
    for _ in range(moves):
        lab.wait_until_idle()
        lab.page.wait_for_timeout(200)
        output.evaluate(ARM)
        lab.move(output.locator(".noUi-handle"))
        times.append(lab.page.evaluate("window.latency"))
    return statistics.median(times)


def test_a_slider_is_at_least_twice_as_fast_as_interact(lab: LabPage, capsys):
    lab.write("latency.ipynb", VIEW, INTERACT)
    lab.open("latency.ipynb")
    lab.run([0, 1])
    view, plots = lab.widgets(0)[0], lab.widgets(1)[0]
    view.locator(".mha-line", has_text="query").wait_for()
    plots.locator("img").wait_for()
    canvas, interact = latency(lab, view, 7), latency(lab, plots, 3)
    with capsys.disabled():
        print(f"\nslider to pixels: {canvas:.0f} ms, interact {interact:.0f} ms, 1/{interact / canvas:.0f}")
    assert canvas < interact / 2
