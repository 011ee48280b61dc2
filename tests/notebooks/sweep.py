"""Move every control of an explorer to its ends, alone and together, and require a change and no error.

nbval sees a widget's first state only, and Jupyter swallows what a callback raises.
"""

import warnings
from typing import Any

import ipywidgets as widgets

from mha_lessons.attention_view import AttentionView
from mha_lessons.explore.explorer import Explorer


def ends(control: widgets.ValueWidget) -> tuple[Any, Any]:
    """The two outermost values of a control."""
    if isinstance(control, widgets.Checkbox | widgets.ToggleButton):
        return False, True
    if hasattr(control, "options"):
        values = [value for _, value in control._options_full]
        return values[0], values[-1]
    if isinstance(control, widgets.FloatLogSlider):
        return control.base**control.min, control.base**control.max
    return control.min, control.max


def shown(explorer: Explorer) -> list[Any]:
    """All that the browser is told of the panels and the message."""
    states = [panel.widget.get_state() for panel in explorer.panels]
    return [explorer.message.value, *[{k: v for k, v in state.items() if k != "layout"} for state in states]]


def sweep(explorer: Explorer) -> int:
    """Move everything; return the number of moves.

    Raises:
        AssertionError: a control moved from one end to the other and nothing on the screen changed.
        Exception: whatever a callback raises, a warning included.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return _moved(explorer)


def _moved(explorer: Explorer) -> int:
    controls = list(explorer.controls.items())
    moves = 0
    for name, control in controls:
        first, (low, high) = control.value, ends(control)
        pictures = []
        for value in (low, high):
            control.value = value
            pictures.append(shown(explorer))
            moves += 1
        assert pictures[0] != pictures[1], f"moving {name} from {low} to {high} changed nothing"
        control.value = first
    for number in range(2 ** len(controls)):
        corner = number ^ (number >> 1)  # Gray code: one control moves at a time, and every corner is met
        for bit, (_, control) in enumerate(controls):
            control.value = ends(control)[corner >> bit & 1]
        for view in (panel.widget for panel in explorer.panels if isinstance(panel.widget, AttentionView)):
            # The last head and query of one corner must not lead outside the weights of the next.
            view.head, view.query, view.key = (size - 1 for size in view.weights.shape[1:])
        moves += 1
    return moves
