"""A canvas that shows attention weights in JupyterLab: all heads at once, one colour scale, tokens at the axes."""

import pathlib
from collections.abc import Sequence

import anywidget
import numpy as np
import traitlets

AXES = ("frame", "head", "query", "key")


class AttentionView(anywidget.AnyWidget):
    """Attention weights of every head as a grid of heatmaps, with one chosen query and key.

    The mouse or the arrow keys choose a query and a key; the widget says their weight in words, and shades the
    keys' tokens by the chosen query's weights. The weights travel as raw float32 bytes and the browser draws
    them, so a slider can redraw them at once; several frames can be sent ahead and chosen with no kernel
    (``ipywidgets.jslink`` of a slider's ``value`` with ``frame``).

    Args:
        weights: (h i j) or (frames h i j), at least 0 everywhere; an array, a tensor or nested lists.
        queries: i tokens; None: "0", "1", ...
        keys: j tokens; None: "0", "1", ...
        hidden: bool, broadcastable to (h i j), True = hidden from the query (so ``~mask`` of a mask whose True means
            may attend). Such cells are hatched, which tells them from a weight of 0.
        head_names: h titles; None: "head 0", "head 1", ...

    Raises:
        TypeError: ``hidden`` is not boolean.
        ValueError: a wrong number of axes or labels, an empty axis, or a weight that is negative, infinite or NaN.
    """

    _esm = pathlib.Path(__file__).with_suffix(".js")

    _shape = traitlets.List(traitlets.Int()).tag(sync=True)
    _weights = traitlets.Bytes().tag(sync=True)
    _hidden = traitlets.Bytes().tag(sync=True)
    query_tokens = traitlets.List(traitlets.Unicode()).tag(sync=True)
    key_tokens = traitlets.List(traitlets.Unicode()).tag(sync=True)
    head_names = traitlets.List(traitlets.Unicode()).tag(sync=True)

    frame = traitlets.Int(0).tag(sync=True)
    head = traitlets.Int(0).tag(sync=True)
    query = traitlets.Int(0).tag(sync=True)
    key = traitlets.Int(0).tag(sync=True)
    enlarged = traitlets.Bool(False).tag(sync=True)

    def __init__(
        self,
        weights,
        queries: Sequence[str] | None = None,
        keys: Sequence[str] | None = None,
        *,
        hidden=None,
        head_names: Sequence[str] | None = None,
    ):
        super().__init__(**_state(weights, queries, keys, hidden, head_names), layout={"width": "100%"})

    def show(
        self,
        weights,
        queries: Sequence[str] | None = None,
        keys: Sequence[str] | None = None,
        hidden=None,
        head_names: Sequence[str] | None = None,
    ) -> None:
        """Replace everything shown, in one message to the browser; the arguments are those of the class.

        The chosen frame, head, query and key stay, moved to the last one where there are fewer now. If an
        argument is refused, nothing changes.
        """
        state = _state(weights, queries, keys, hidden, head_names)
        chosen = {name: min(getattr(self, name), size - 1) for name, size in zip(AXES, state["_shape"], strict=True)}
        # Whoever observes one of them sees all of them changed, and none that points outside the new weights.
        with self.hold_sync(), self.hold_trait_notifications():
            for name, value in (state | chosen).items():
                setattr(self, name, value)

    @property
    def weights(self) -> np.ndarray:
        """What is shown: (frames h i j), float32, read-only."""
        return np.frombuffer(self._weights, "<f4").reshape(self._shape)

    @traitlets.validate(*AXES)
    def _clamp(self, proposal) -> int:
        last = self._shape[AXES.index(proposal.trait.name)] - 1
        return min(max(proposal.value, 0), last)

    def __repr__(self) -> str:
        frames, heads, queries, keys = self._shape
        parts = [_count(frames, "frame")] if frames > 1 else []
        parts += [_count(heads, "head"), f"{_count(queries, 'query')} x {_count(keys, 'key')}"]
        if self._hidden:
            parts.append(f"{sum(self._hidden)} hidden")
        return f"AttentionView({', '.join(parts)}, largest weight {self.weights.max():.2f})"


def _count(number: int, noun: str) -> str:
    plural = {"query": "queries"}.get(noun, noun + "s")
    return f"{number} {noun if number == 1 else plural}"


def _state(weights, queries, keys, hidden, head_names) -> dict:
    """The arguments, checked, as the traits that the browser reads."""
    weights = _checked_weights(weights)
    _, h, i, j = weights.shape
    return {
        "_shape": list(weights.shape),
        "_weights": weights.tobytes(),
        "_hidden": b"" if hidden is None else _checked_hidden(hidden, (h, i, j)).tobytes(),
        "query_tokens": _checked_labels(queries, i, "queries"),
        "key_tokens": _checked_labels(keys, j, "keys"),
        "head_names": _checked_labels(head_names, h, "head_names", prefix="head "),
    }


def _checked_weights(weights) -> np.ndarray:
    if hasattr(weights, "detach"):  # numpy refuses tensors that want gradients, lie on a GPU or are bfloat16
        weights = weights.detach().cpu().float()
    with np.errstate(over="ignore"):  # too large for float32 becomes inf, which is refused below
        array = np.asarray(weights).astype("<f4")
    array += 0  # -0.0 becomes 0.0, so that no reader sees "-0.00"
    if array.ndim not in (3, 4):
        raise ValueError(
            f"weights has shape {array.shape}, {array.ndim} axes; expected 3 (h i j) or 4 (frames h i j):"
            " add a head axis with weights[None], or choose one batch with weights[0]"
        )
    if 0 in array.shape:
        raise ValueError(f"weights has shape {array.shape}; every axis needs at least one entry")
    if not np.isfinite(array).all():
        raise ValueError(
            f"weights holds NaN or infinite values, {(~np.isfinite(array)).sum()} of {array.size}; expected finite"
            " weights: a row with every key hidden is the usual cause"
        )
    if array.min() < 0:
        raise ValueError(
            f"weights holds negative values, the smallest {array.min():.3g}; expected weights of at least 0:"
            " scores need a softmax first"
        )
    return array.reshape((1,) * (4 - array.ndim) + array.shape)


def _checked_hidden(hidden, shape: tuple[int, int, int]) -> np.ndarray:
    if hasattr(hidden, "detach"):
        hidden = hidden.detach().cpu()
    hidden = np.asarray(hidden)
    if hidden.dtype != bool:
        raise TypeError(f"hidden has dtype {hidden.dtype}; expected bool, True = hidden")
    try:
        return np.broadcast_to(hidden, shape)
    except ValueError:
        raise ValueError(
            f"hidden has shape {hidden.shape}; expected one that broadcasts to (h i j) = {shape}"
        ) from None


def _checked_labels(labels: Sequence[str] | None, count: int, name: str, prefix: str = "") -> list[str]:
    if labels is None:
        return [f"{prefix}{n}" for n in range(count)]
    labels = [str(label) for label in labels]
    if len(labels) != count:
        raise ValueError(f"{name} has {_count(len(labels), 'label')}; weights needs {count}")
    return labels
