"""A progress bar whose trace in a stored notebook never changes."""

import time
from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

import ipywidgets
from IPython import get_ipython
from IPython.display import display

Item = TypeVar("Item")

SECONDS_BETWEEN_UPDATES = 0.1


def progress(iterable: Iterable[Item], description: str, total: int | None = None) -> Iterator[Item]:
    """Hand on each item and, in a notebook, show how many are done.

    The bar is displayed once; afterwards only the widget's own state changes. So the cell's stored output is the same
    after every run. In a plain script nothing is shown.

    Args:
        iterable: what to loop over.
        description: what is going on, in a few words.
        total: number of items; None: the iterable's length where it has one.

    Returns:
        the items, one by one. When the loop is left early or raises, the bar says where it stopped.
    """
    if getattr(get_ipython(), "kernel", None) is None:
        yield from iterable
        return
    if total is None and isinstance(iterable, Sized):
        total = len(iterable)
    bar = _Bar(description, total)
    display(bar)
    done, shown_at, is_whole = 0, time.monotonic(), False
    try:
        for item in iterable:
            yield item
            done += 1
            if time.monotonic() - shown_at > SECONDS_BETWEEN_UPDATES:
                bar.show(done)
                shown_at = time.monotonic()
        is_whole = True
    finally:  # a loop that breaks or raises drops this generator, and Python then closes it: we come here
        bar.finish(done, is_whole)


class _Bar(ipywidgets.HBox):
    """The description, the bar, and a count."""

    def __init__(self, description: str, total: int | None) -> None:
        self.description, self.total = description, total
        self.bar = ipywidgets.IntProgress(max=total or 1)
        self.words = ipywidgets.Label()
        super().__init__([ipywidgets.Label(description), self.bar, self.words])
        self.show(0)

    def __repr__(self) -> str:
        """What a notebook stores beside the widget: the same at the start, at the end and after a failure."""
        return f"[progress bar: {self.description}]"

    def show(self, done: int) -> None:
        self.bar.value = done if self.total else 0
        self.words.value = f"{done} of {self.total}" if self.total else f"{done}"

    def finish(self, done: int, is_whole: bool) -> None:
        self.show(done)
        if is_whole:
            self.bar.value = self.bar.max
        else:
            self.bar.bar_style = "warning"
        self.words.value = ("done: " if is_whole else "stopped: ") + self.words.value
