"""Exercises on positions: the sinusoid, one turning pair of rotary, ALiBi's bias, and the offsets in a grid."""

import math
from collections.abc import Callable

import torch

from mha_lessons.checks.engine import exercise
from mha_lessons.masks import causal_mask
from mha_lessons.positions import alibi_bias, alibi_slopes, relative_position_index, sinusoidal_encoding


def _waves(
    n: int, d_model: int, offset: int, exponent: Callable, *, first: int = 0, swapped: bool = False
) -> torch.Tensor:
    """Sines in even and cosines in odd columns, of position · 10000^exponent(column)."""
    column = torch.arange(d_model)
    position = torch.arange(offset + first, offset + first + n, dtype=torch.float64)
    angle = position[:, None] * 10_000.0 ** exponent(column).double()
    return torch.where((column % 2 == 1) != swapped, angle.cos(), angle.sin())


def _even(column: torch.Tensor) -> torch.Tensor:
    return column - column % 2


def _halves(n: int, d_model: int, offset: int) -> torch.Tensor:
    table = sinusoidal_encoding(n, d_model, offset=offset)
    return torch.cat([table[:, 0::2], table[:, 1::2]], dim=1)


@exercise(
    axes="n, e, _ -> n e",
    inputs=lambda normal: [(5, 6, 0), (3, 8, 4), (4, 5, 2), (6, 6, 7), (2, 1, 3), (3, 2, 5001)],
    mistakes=[
        (
            _halves,
            "Your sines stand in the left half and your cosines in the right: some libraries do so, and a model "
            "trained with one order cannot be run with the other. Here a sine and its cosine stand side by side: even "
            "columns are sines, odd ones cosines.",
        ),
        (
            lambda n, d_model, offset: _waves(n, d_model, offset, lambda c: -_even(c) / d_model, swapped=True),
            "You swapped sine and cosine: even columns are sines, odd columns cosines, so position 0 reads 0, 1, 0, 1.",
        ),
        (
            lambda n, d_model, offset: _waves(n, d_model, offset, lambda c: -c / d_model),
            "Each of your columns has a frequency of its own, so a sine and its cosine do not turn together and a "
            "shift is no rotation. The two columns of pair m share the frequency base^(-2m/d_model): round an odd "
            "column down to the even one before it.",
        ),
        (
            lambda n, d_model, offset: _waves(n, d_model, offset, lambda c: -(c // 2) / d_model),
            "Your waves are too fast, the slowest by the most, nearly 100 times in a wide table: the exponent is "
            "-m / d_model, where it should be -2m / d_model.",
        ),
        (
            lambda n, d_model, offset: _waves(n, d_model, offset, lambda c: -2 * _even(c) / d_model),
            "Your waves slow down twice too soon: you doubled a number that is 2m already. The even columns 0, 2, 4 "
            "... are 2m themselves.",
        ),
        (
            lambda n, d_model, offset: _waves(n, d_model, offset, lambda c: _even(c) / d_model),
            "Your frequencies grow with the column up to 10000: neighbours far to the right have nothing in common. "
            "Divide the position by base^(2m/d_model), do not multiply.",
        ),
        (
            lambda n, d_model, offset: _waves(n, d_model, offset, lambda c: -_even(c) / d_model, first=1),
            "Your positions count from 1. They count from 0: with offset 0 the first row is 0, 1, 0, 1, ...",
        ),
        (
            lambda n, d_model, offset: sinusoidal_encoding(n, d_model),
            "You left the offset out: with a cache, each new token would stand at position 0 again. The first row "
            "belongs to position `offset`.",
        ),
        (
            lambda n, d_model, offset: sinusoidal_encoding(n + offset, d_model)[offset:][:, : d_model // 2 * 2],
            "Your table lacks the last column of an odd width. There it ends with a sine that has no cosine.",
        ),
        (
            lambda n, d_model, offset: sinusoidal_encoding(n, d_model + d_model % 2, offset=offset),
            "Your table is one column too wide where d_model is odd. There it ends with a sine that has no cosine.",
        ),
    ],
)
def sinusoid(n, d_model, offset):
    """A clock for positions: write ``sinusoid(n, d_model, offset)``.

    Column 2m holds sin(position / 10000^(2m/d_model)), column 2m + 1 the cosine of the same angle.

    Args:
        n: number of positions, a whole number.
        d_model: width e, a whole number, odd too: an odd width ends with a sine.
        offset: position of the first row, a whole number.

    Returns:
        The table (n e).
    """
    return sinusoidal_encoding(n, d_model, offset=offset)


def _positions(x: torch.Tensor, axis: int = -2) -> torch.Tensor:
    """0, 1, 2 ... along an axis of x, shaped to multiply one channel (... n)."""
    shape = [1] * (x.ndim - 1)
    shape[axis if axis >= 0 else axis + 1] = x.shape[axis]
    return torch.arange(x.shape[axis], dtype=x.dtype).reshape(shape)


def _turned(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    first, second = x.unbind(-1)
    return torch.stack([first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos()], -1)


def _turned_in_place(x: torch.Tensor, theta: float) -> torch.Tensor:
    angle, second = _positions(x) * theta, x[..., 1]
    first = x[..., 0] * angle.cos() - second * angle.sin()
    return torch.stack([first, first * angle.sin() + second * angle.cos()], -1)


@exercise(
    axes="... n d, _ -> ... n d",
    inputs=lambda normal: [
        (normal(4, 2), 0.5),
        (normal(2, 3, 5, 2), 0.1),
        (normal(3, 3, 2), 2.0),
        (0.1 * normal(300, 2), 1 / 64),
    ],
    mistakes=[
        (
            lambda x, theta: _turned(x, -_positions(x) * theta),
            "You turned the other way. Scores would still depend on the distance alone, but a model trained with one "
            "direction cannot be run with the other: the new pair is (a cos - b sin, a sin + b cos).",
        ),
        (
            lambda x, theta: _turned(x, (_positions(x) + 1) * theta),
            "Your positions count from 1: the first token must stay as it is.",
        ),
        (
            lambda x, theta: _turned(x, torch.tensor(theta, dtype=x.dtype)),
            "You turned every position by the same angle, so the dot products of queries and keys stay as they were. "
            "The angle is position · theta.",
        ),
        (
            lambda x, theta: _turned(x, _positions(x, 0) * theta),
            "You counted positions along the first axis. With a batch in front, all tokens of an item turn by the same "
            "angle. The positions are axis -2: `x.shape[-2]`.",
        ),
        (
            lambda x, theta: torch.stack(
                [
                    x[..., 0] * (_positions(x) * theta).cos() + x[..., 1] * (_positions(x) * theta).sin(),
                    x[..., 0] * (_positions(x) * theta).sin() + x[..., 1] * (_positions(x) * theta).cos(),
                ],
                dim=-1,
            ),
            "Both of your sines have a plus, which is no rotation: the vectors change their length. One of them takes "
            "a minus: (a cos - b sin, a sin + b cos).",
        ),
        (
            lambda x, theta: torch.stack(
                [x[..., 0] * (_positions(x) * theta).cos(), x[..., 1] * (_positions(x) * theta).sin()], dim=-1
            ),
            "You multiplied one channel by the cosine and the other by the sine: vectors shrink, and nothing turns. "
            "Each new channel needs both old ones: (a cos - b sin, a sin + b cos).",
        ),
        (
            _turned_in_place,
            "You used the new first channel to make the second one. Both come from the old pair: compute both before "
            "you replace either.",
        ),
        (
            lambda x, theta: _turned(x, _positions(x) * theta).flip(-1),
            "Your two channels are swapped: (a cos - b sin) comes first.",
        ),
        (
            lambda x, theta: x + torch.stack([(_positions(x) * theta).cos(), (_positions(x) * theta).sin()], -1),
            "You added the position's vector to the pair. Rotary adds nothing: it turns the pair, and its length "
            "stays.",
        ),
        (
            lambda x, theta: _turned(x, torch.deg2rad(_positions(x) * theta)),
            "You took the angle for degrees. It is in radians: no conversion is needed.",
        ),
    ],
)
def rotary_pair(x, theta):
    """Turn one pair of channels by position: write ``rotary_pair(x, theta)``.

    The pair (a, b) at position p, counted from 0, becomes (a cos - b sin, a sin + b cos) of the angle p · theta.

    Args:
        x: queries or keys (... n d) with d = 2; other axes (batch, heads) may lead.
        theta: the angle from one position to the next, in radians.

    Returns:
        The turned pairs (... n d).
    """
    return _turned(x, _positions(x) * theta)


def _offsets(height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and columns from each key to each query, each (n n)."""
    cell = torch.arange(height * width)
    row, column = cell // width, cell % width
    return row[:, None] - row, column[:, None] - column


def _indexed(number: Callable) -> Callable:
    """A wrong index: a function of the offsets (both shifted to 0 or more) and of height and width."""

    def index(height, width):
        rows, columns = _offsets(height, width)
        return number(rows + height - 1, columns + width - 1, height, width)

    return index


@exercise(
    axes="_, _ -> n n",
    inputs=lambda normal: [(3, 3), (2, 3), (3, 2), (1, 4), (4, 1)],
    mistakes=[
        (
            _indexed(lambda rows, columns, height, width: rows * (2 * height - 1) + columns),
            "You multiplied the rows by 2 height - 1: right for a square, but in a flat window different offsets share "
            "a number, and in a tall one the numbers run past the table. The columns have 2 width - 1 values: multiply "
            "by that.",
        ),
        (
            _indexed(lambda rows, columns, height, width: rows * (2 * width - 2) + columns),
            "Your multiplier 2 width - 2 is one too small: the last column of a row and the first of the next share a "
            "number. There are 2 width - 1 columns.",
        ),
        (
            _indexed(lambda rows, columns, height, width: rows * 2 * width + columns),
            "Your multiplier 2 width is one too large: the numbers have gaps, and the largest runs past a table of "
            "(2 height - 1)(2 width - 1) rows. There are 2 width - 1 columns.",
        ),
        (
            _indexed(lambda rows, columns, height, width: rows * width + columns),
            "You subtracted the cells' own numbers, or multiplied the rows by the width: the end of a row is then next "
            "to the start of the next row. A row of offsets runs from -(width - 1) to width - 1: multiply by 2 width - "
            "1.",
        ),
        (
            _indexed(lambda rows, columns, height, width: rows),
            "You numbered the rows of the offset alone: left and right of a cell look the same. Use both axes: "
            "rows · (2 width - 1) + columns.",
        ),
        (
            _indexed(lambda rows, columns, height, width: columns),
            "You numbered the columns of the offset alone: above and below look the same. Use both axes: "
            "rows · (2 width - 1) + columns.",
        ),
        (
            _indexed(lambda rows, columns, height, width: rows + columns),
            "You added rows and columns: one step down and one step right share a number. Multiply the rows by "
            "2 width - 1 first.",
        ),
        (
            _indexed(lambda rows, columns, height, width: (rows * (2 * width - 1) + columns).mT),
            "Your offsets are key minus query. A row belongs to a query, and the offset is query minus key.",
        ),
        (
            lambda height, width: _offsets(height, width)[0] * (2 * width - 1) + _offsets(height, width)[1],
            "Some of your numbers are negative: they would be read from the end of the table. Shift the rows by "
            "height - 1 and the columns by width - 1, so that both begin at 0.",
        ),
        (
            lambda height, width: (
                relative_position_index(height, width)
                .unflatten(0, (height, width))
                .unflatten(2, (height, width))
                .permute(1, 0, 3, 2)
                .flatten(2)
                .flatten(0, 1)
            ),
            "You counted the cells column by column. They are counted row by row, as `flatten` does: cell = row · "
            "width + column.",
        ),
    ],
)
def relative_index(height, width):
    """Number the offsets in a grid: write ``relative_index(height, width)``.

    The n = height · width cells are counted row by row. The offset from key to query is (rows, columns), query minus
    key; its number is (rows + height - 1) · (2 width - 1) + columns + width - 1.

    Args:
        height: rows of the grid, a whole number.
        width: columns of the grid, a whole number.

    Returns:
        The numbers (n n), int64, a row for each query.
    """
    return relative_position_index(height, width)


def _away(n_queries: int, n_keys: int) -> torch.Tensor:
    """Query position minus key position, (i j); the last query stands at the last key."""
    return torch.arange(n_queries)[:, None] + (n_keys - n_queries) - torch.arange(n_keys)


def _sloped(slopes: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
    return slopes[:, None, None] * -distance


def _numbers(num_heads: int) -> torch.Tensor:
    return torch.arange(1, num_heads + 1)


@exercise(
    axes="h, i, j -> h i j",
    inputs=lambda normal: [(8, 4, 4), (4, 2, 5), (2, 1, 6), (16, 3, 3), (2, 2, 300)],
    mistakes=[
        (
            lambda num_heads, n_queries, n_keys: -alibi_bias(num_heads, n_queries, n_keys),
            "Your bias grows with the distance, so far keys are rewarded. It is taken off: put a minus before it.",
        ),
        (
            lambda num_heads, n_queries, n_keys: _sloped(alibi_slopes(num_heads), _away(n_queries, n_keys)),
            "You left out the absolute value: a key behind the query is rewarded for being far. Take `abs()` of the "
            "distance.",
        ),
        (
            lambda num_heads, n_queries, n_keys: _sloped(
                alibi_slopes(num_heads), _away(n_queries, n_keys).clamp(min=0)
            ),
            "Your bias is 0 for all keys after the query, as if they were all near. Causal code may do so, since a "
            "mask hides them; here the distance counts on both sides: `abs()`.",
        ),
        (
            lambda num_heads, n_queries, n_keys: _sloped(
                alibi_slopes(num_heads), (_away(n_queries, n_keys) - (n_keys - n_queries)).abs()
            ),
            "Your distances are aligned to the upper left: right when there are as many queries as keys, but with a "
            "cache the new query would stand at position 0. The last query stands at the last key: add n_keys - "
            "n_queries to the query's position.",
        ),
        (
            lambda num_heads, n_queries, n_keys: _sloped(
                0.5 ** _numbers(num_heads).double(), _away(n_queries, n_keys).abs()
            ),
            "Your slopes 1/2, 1/4, 1/8 ... do not know how many heads there are: right for 8 alone. They run from "
            "2^(-8/h) to 2^-8, whatever h is.",
        ),
        (
            lambda num_heads, n_queries, n_keys: _sloped(
                2.0 ** (-8 * (_numbers(num_heads) - 1).double() / num_heads), _away(n_queries, n_keys).abs()
            ),
            "You numbered the heads from 0, so the first slope is 1 and the last is no longer 2^-8. Number them 1 to "
            "h.",
        ),
        (
            lambda num_heads, n_queries, n_keys: _sloped(
                _numbers(num_heads).double() / num_heads, _away(n_queries, n_keys).abs()
            ),
            "Your slopes rise evenly. They fall by the same factor from head to head: 2^(-8 · 1/h), 2^(-8 · 2/h), ...",
        ),
        (
            lambda num_heads, n_queries, n_keys: alibi_bias(num_heads, n_queries, n_keys).permute(1, 2, 0),
            "Your heads stand last, (i j h). Beside scores (b h i j) they come first: (h i j).",
        ),
        (
            lambda num_heads, n_queries, n_keys: alibi_bias(num_heads, n_queries, n_keys).masked_fill(
                ~causal_mask(n_queries, n_keys), -math.inf
            ),
            "You hid the future with -inf. That is the causal mask's work: the bias itself hides nothing.",
        ),
        (
            lambda num_heads, n_queries, n_keys: alibi_bias(num_heads, n_queries, n_keys)[0],
            "You made one bias, (i j). Each head has a slope of its own: (h i j).",
        ),
    ],
)
def alibi(num_heads, n_queries, n_keys):
    """A bias by distance: write ``alibi(num_heads, n_queries, n_keys)``, which is -slope · |distance|.

    Head m = 1 ... h has the slope 2^(-8m/h). The queries are the last ``n_queries`` of ``n_keys`` positions: the
    last query stands at the last key.

    Args:
        num_heads: h, a power of two.
        n_queries: number of queries i, a whole number.
        n_keys: number of keys j, a whole number.

    Returns:
        The bias (h i j), to be added to the scores.
    """
    return alibi_bias(num_heads, n_queries, n_keys)
