"""What every explorer is made of: controls, a pure draw function, panels that show what it returns, and a message.

To write an explorer: a function ``draw(**values)`` that takes the controls' values by name and returns a state (any
object with a ``summary``, one line of numbers, and a ``note``, words for the reader or ""), and panels that show
such a state. A combination that cannot be raises ``CannotBeError`` with the reason.
"""

import base64
import html
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import ipywidgets as widgets
from matplotlib.figure import Figure
from matplotlib.text import Text

from mha_lessons import plots
from mha_lessons.attention_view import AttentionView

# A picture beside a heatmap is shown about 500 px wide: drawn larger, it and its type are made smaller by the browser.
BESIDE = {"width": 5.2, "height": 4.2}
BESIDE_TYPE = 11  # points
BESIDE_FLEX = "1 1 420px"
LINE_HEIGHT = 1.4  # of the message, in em


def small_type(fig: Figure) -> None:
    """Set all words of a figure in the type of a picture beside a heatmap; ticks to come take it from the first."""
    for text in fig.findobj(Text):
        text.set_fontsize(BESIDE_TYPE)


def share_width(*panels: "Panel") -> None:
    """Let panels that stand side by side be equally wide."""
    for panel in panels:
        panel.widget.layout.flex = BESIDE_FLEX


def counted(number: int, word: str) -> str:
    """A number and its word: 1 key, 2 keys."""
    return f"{number} {word}{'s' * (number != 1)}"


def end_at_last_step(controls: dict[str, widgets.ValueWidget], count: Callable[..., int]) -> None:
    """Let the slider of steps end at the last step, whatever the sizes.

    To be called before the explorer is made, so that it hears of a new size after the slider.

    Args:
        controls: those of the explorer; the one called "step" is fitted.
        count: the number of steps for the values of all other controls by name.
    """
    sizes = {name: control for name, control in controls.items() if name != "step"}

    def fit(_: Any = None) -> None:
        controls["step"].max = count(**{name: control.value for name, control in sizes.items()})

    for control in sizes.values():
        control.observe(fit, names="value")
    fit()


class CannotBeError(ValueError):
    """The controls stand at a combination that does not exist; the text tells the reader why and what to change."""


class Panel(Protocol):
    """A part of an explorer that shows a state."""

    widget: widgets.DOMWidget

    def update(self, state: Any) -> None:
        """Show the state in the widget."""

    def picture(self, state: Any) -> bytes:
        """The same as a PNG, for readers without a kernel."""


class WeightsPanel:
    """Shows ``state.weights`` (h i j) with ``state.queries`` and ``state.keys`` in an ``AttentionView``.

    A state may also have ``hidden``, bool and broadcastable to (h i j): these cells are hatched.
    """

    def __init__(self, head_names: Sequence[str] | None = None) -> None:
        self.head_names = head_names
        self.widget = AttentionView([[[0.0]]])  # until the first update
        self.widget.layout.flex = "3 1 480px"

    def update(self, state: Any) -> None:
        hidden = getattr(state, "hidden", None)
        self.widget.show(state.weights, state.queries, state.keys, hidden, head_names=self.head_names)

    def picture(self, state: Any) -> bytes:
        hidden = getattr(state, "hidden", None)
        grid = plots.attention_grid(state.weights, state.queries, state.keys, hidden=hidden, head_names=self.head_names)
        return plots.png(grid)


class FigurePanel:
    """Shows one matplotlib Figure that lives as long as the explorer; ``redraw(state)`` moves its artists."""

    def __init__(self, fig: Figure, redraw: Callable[[Any], None]) -> None:
        self.figure, self.redraw = fig, redraw
        self.widget = widgets.Image(format="png", layout={"flex": "2 1 340px", "min_width": "0", "max_width": "720px"})

    def update(self, state: Any) -> None:
        self.widget.value = self.picture(state)

    def picture(self, state: Any) -> bytes:
        self.redraw(state)
        return plots.png(self.figure)


class Explorer(widgets.VBox):
    """Controls above the panels that they redraw.

    Args:
        name: what it is called in one or two words, for its text form.
        controls: ipywidgets controls by the name of ``draw``'s parameter.
        draw: a pure function of the controls' values; returns the state that the panels show.
        panels: what shows it, from left to right.
        alt: a sentence on what the picture of the first state shows.

    Attributes:
        controls: the controls by name, so that a test can move them.
        state: what ``draw`` returned last.
    """

    def __init__(
        self,
        name: str,
        controls: dict[str, widgets.ValueWidget],
        draw: Callable[..., Any],
        panels: Sequence[Panel],
        *,
        alt: str,
    ) -> None:
        self.name, self.controls, self.draw, self.panels, self.alt = name, controls, draw, panels, alt
        self.state: Any = None
        # JupyterLab may serve each control in a thread of its own, and a Figure drawn by two at once stays blank.
        self._drawing = threading.RLock()
        # Room for two lines, so that the picture below stays where it is when the words grow.
        self.message = widgets.HTML(layout={"min_height": f"{2 * LINE_HEIGHT + 0.3:.1f}em"})
        for control in controls.values():
            control.style.description_width = "initial"
            control.observe(lambda _: self.refresh(), names="value")
        control_row = widgets.HBox(list(controls.values()), layout={"flex_flow": "row wrap"})
        side_by_side = {"flex_flow": "row wrap", "align_items": "flex-start"}  # where the page is wide enough
        picture_row = widgets.HBox([panel.widget for panel in panels], layout=side_by_side)
        super().__init__([control_row, self.message, picture_row])
        self.refresh()

    def refresh(self) -> None:
        """Draw what the controls say and show it; a failure is shown in words, and raised for whoever listens.

        Jupyter swallows what a callback raises, so without the words a reader would see a picture that stands still.
        """
        with self._told():
            self.state = self.draw(**{name: control.value for name, control in self.controls.items()})
            for panel in self.panels:
                panel.update(self.state)
            self._say(self.state.note)

    def follow(self, view: AttentionView, panel: Panel, *, names: Sequence[str] = ("head", "query")) -> None:
        """Update ``panel`` whenever the reader chooses another head or query in ``view``.

        The words stay: a combination that cannot be is still what the controls say.
        """

        def update(_: Any) -> None:
            with self._told():
                panel.update(self.state)

        view.observe(update, names=list(names))

    @contextmanager
    def _told(self) -> Iterator[None]:
        """One drawing at a time, and what goes wrong in it in words."""
        with self._drawing:
            try:
                yield
            except CannotBeError as reason:
                if self.state is None:  # there is no picture to keep
                    raise
                self._say(f"Cannot be: {reason} The picture is the last one that could be.")
            except Exception as error:
                self._say(f"This explorer failed, and shows an old picture: {type(error).__name__}: {error}")
                raise

    def _say(self, words: str) -> None:
        self.message.value = f'<div role="status" style="line-height: {LINE_HEIGHT}">{html.escape(words)}</div>'

    def __repr__(self) -> str:
        # A widget's text form is cut at 110 characters; strict nbval compares it.
        return f"{self.name}: {self.state.summary}"[:110]

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        data = super()._repr_mimebundle_(**kwargs)
        picture = plots.stacked([panel.picture(self.state) for panel in self.panels])
        data["image/png"] = base64.b64encode(picture).decode("ascii")
        return data, {"image/png": {"alt": self.alt}}
