"""Pictures beside a heatmap: no larger than they are shown, large type, and no words cut off or over each other."""

import itertools

import pytest
from matplotlib.text import Text

from mha_lessons.explore import scaling, sentence_attention, tiles
from mha_lessons.explore.explorer import FigurePanel, WeightsPanel

SHOWN = (5.2, 4.2)  # inches, at 100 dots an inch: the share of a picture in a window 1440 px wide
CASES = [
    (tiles, {}),
    (tiles, {"length": 2, "block_q": 4, "block_k": 4}),
    (tiles, {"length": 2, "block_q": 32, "block_k": 32, "causal": True}),
    (tiles, {"length": 32, "block_q": 4, "block_k": 4, "step": 64}),
    (tiles, {"length": 32, "block_q": 4, "block_k": 4, "causal": True, "step": 60}),
    (tiles, {"length": 32, "block_q": 32, "block_k": 32, "causal": True, "step": 4}),
    (tiles, {"length": 25, "block_q": 8, "block_k": 8, "causal": True}),
    (tiles, {"length": 29, "block_q": 4, "block_k": 16, "causal": True}),
    (scaling, {}),
    (scaling, {"d_k": 2, "length": 2, "num_heads": 1, "divisor": "d_k"}),
    (scaling, {"d_k": 512, "length": 32, "num_heads": 8, "divisor": "none"}),
    (sentence_attention, {}),
    (sentence_attention, {"num_heads": 1, "d_k": 2, "length": 2, "temperature": 0.1}),
    (sentence_attention, {"num_heads": 12, "d_k": 64, "temperature": 0.1}),
    (sentence_attention, {"num_heads": 12, "pretrained": True, "temperature": 10.0}),
]


def drawn_words(fig):
    """The Text artists that the reader sees: those of ticks off the axis and empty ones are left out."""
    axes_of = [axis for ax in fig.axes for axis in (ax.xaxis, ax.yaxis)]
    ticks = [tick for axis in axes_of for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]]
    off = {id(label) for tick in ticks for label in (tick.label1, tick.label2)}
    for axis in axes_of:
        low, high = sorted(axis.get_view_interval())
        for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
            if low <= tick.get_loc() <= high:
                off -= {id(label) for label in (tick.label1, tick.label2)}
    hidden = {
        id(text) for ax in fig.axes if not ax.axison for axis in (ax.xaxis, ax.yaxis) for text in axis.findobj(Text)
    }
    texts = [text for text in fig.findobj(Text) if text.get_visible() and text.get_text().strip()]
    return [text for text in texts if id(text) not in off | hidden]


@pytest.mark.parametrize(("make", "values"), CASES)
def test_a_picture_beside_a_heatmap_can_be_read(make, values):
    explorer = make()
    for name, value in values.items():
        explorer.controls[name].value = value
    (view,) = (panel.widget for panel in explorer.panels if isinstance(panel, WeightsPanel))
    (fig,) = (panel.figure for panel in explorer.panels if isinstance(panel, FigurePanel))
    view.head = len(view.head_names) - 1
    view.query = max(range(len(view.query_tokens)), key=lambda query: len(view.query_tokens[query]))
    assert "Cannot be" not in explorer.message.value
    assert (fig.get_size_inches() <= SHOWN).all()
    boxes = {}
    for text in drawn_words(fig):
        assert text.get_fontsize() == 11, text
        boxes[text] = box = text.get_window_extent()
        assert box.x0 >= 0, text
        assert box.y0 >= 0, text
        assert box.x1 <= fig.bbox.width, text
        assert box.y1 <= fig.bbox.height, text
    assert len(boxes) > 5
    over = [pair for pair in itertools.combinations(boxes, 2) if boxes[pair[0]].padded(-1).overlaps(boxes[pair[1]])]
    assert over == []


@pytest.mark.parametrize("make", [tiles, scaling, sentence_attention])
def test_picture_and_heatmap_share_the_width(make):
    assert {panel.widget.layout.flex for panel in make().panels} == {"1 1 420px"}


def test_a_number_stays_inside_its_tile():
    explorer = tiles()
    panel = explorer.panels[0]
    for block_k, length in itertools.product([4, 8, 16], range(2, 33)):
        for name, value in (("block_q", 4), ("block_k", block_k), ("causal", True), ("length", length)):
            explorer.controls[name].value = value
        for text in panel.numbers:
            if text.get_text():
                rows, columns = explorer.state.tiles[int(text.get_text()) - 1]
                corners = [(columns.start / length, rows.stop / length), (columns.stop / length, rows.start / length)]
                (left, bottom), (right, top) = panel.ax.transData.transform(corners)
                box = text.get_window_extent()
                assert left <= box.x0 <= box.x1 <= right, (block_k, length, text)
                assert bottom <= box.y0 <= box.y1 <= top, (block_k, length, text)
