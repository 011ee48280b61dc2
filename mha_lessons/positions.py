"""How attention learns about order: encodings that are added, turned in, or added to the scores."""

import torch
from torch import nn

from mha_lessons.shapes import check_count, check_shape

ROTARY_LAYOUTS = ("interleaved", "half")


def _check_base(base: float) -> None:
    if not base > 0:
        raise ValueError(f"base is {base}; expected a positive number")


def check_grid(grid: tuple[int, int], name: str) -> tuple[int, int]:
    """Refuse what is no pair of sizes.

    Args:
        grid: two counts of 1 or more, such as (rows, columns) or (H, W).
        name: what the caller calls it, for the error's text.

    Returns:
        The two.

    Raises:
        TypeError: ``grid`` has no sides, or a side is no int.
        ValueError: not two sides, or one is less than 1.
    """
    try:
        sides = tuple(grid)
    except TypeError:
        sides = None
    if sides is None or len(sides) != 2:
        error = TypeError if sides is None else ValueError
        raise error(f"{name} is {grid!r}; expected two ints, the height before the width")
    for side in sides:
        check_count(side, f"a side of {name}", least=1)
    return int(sides[0]), int(sides[1])


def _check_floating(x: torch.Tensor, wanted: str) -> None:
    if not x.dtype.is_floating_point:
        raise TypeError(f"x is {x.dtype}; expected floating-point {wanted}")


def sinusoidal_encoding(
    n: int, d_model: int, *, base: float = 10_000.0, offset: int = 0, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """A clock of many hands: column 2m holds sin(position · base^(-2m/e)), column 2m+1 the cosine.

    Two rows have a dot product that depends on their distance alone, and a shift turns each pair of columns
    by a fixed angle. An odd width ends with a sine that has no cosine. The angles are made in float64.

    Args:
        n: number of positions.
        d_model: width e, 1 or more, even or odd.
        base: the wavelengths run from 2π to almost 2π · base.
        offset: position of the first row.
        dtype: None: PyTorch's default.

    Returns:
        (n e).

    Raises:
        TypeError: a size is no int.
        ValueError: n is negative, d_model is less than 1, or the base is not positive.

    Source: Vaswani et al.: Attention Is All You Need (2017), section 3.5.
    """
    check_count(n, "n")
    check_count(d_model, "d_model", least=1)
    _check_base(base)
    position = torch.arange(offset, offset + n, dtype=torch.float64)
    column = torch.arange(d_model)
    is_cosine = column % 2 == 1
    angle = position[:, None] * base ** (-(column - column % 2).double() / d_model)
    return torch.where(is_cosine, angle.cos(), angle.sin()).to(dtype or torch.get_default_dtype())


class SinusoidalEncoding(nn.Module):
    """Add ``sinusoidal_encoding`` to every item of a batch. It has no table, so any length will do.

    Args:
        d_model: width e, 1 or more, even or odd.

    Raises:
        TypeError: d_model is no int.
        ValueError: d_model is less than 1.
    """

    def __init__(self, d_model: int) -> None:
        super().__init__()
        check_count(d_model, "d_model", least=1)
        self.d_model = d_model

    def forward(self, x: torch.Tensor, *, offset: int = 0) -> torch.Tensor:
        """Add the encoding.

        Args:
            x: (... n e).
            offset: position of the first token, such as the number of keys in a cache.

        Returns:
            (... n e), in the dtype of x.

        Raises:
            TypeError: x is not a floating-point tensor.
            ValueError: x is not of width d_model.
        """
        n = check_shape(x, "... n e", name="x", e=self.d_model)["n"]
        _check_floating(x, "vectors: embed the tokens first")
        return x + sinusoidal_encoding(n, self.d_model, offset=offset, dtype=x.dtype).to(x.device)


class LearnedEncoding(nn.Module):
    """Add a learned vector for each position. Positions end at ``max_len``: later ones were never learned.

    Args:
        max_len: number of positions.
        d_model: width e.

    Attributes:
        table: (max_len e).

    Raises:
        TypeError: a size is no int.
        ValueError: a size is less than 1.
    """

    def __init__(self, max_len: int, d_model: int) -> None:
        super().__init__()
        check_count(max_len, "max_len", least=1)
        check_count(d_model, "d_model", least=1)
        self.table = nn.Parameter(torch.empty(max_len, d_model))
        nn.init.normal_(self.table, std=0.02)

    def forward(self, x: torch.Tensor, *, offset: int = 0) -> torch.Tensor:
        """Add the table's rows.

        Args:
            x: (... n e).
            offset: position of the first token, such as the number of keys in a cache.

        Returns:
            (... n e), in the dtype of x.

        Raises:
            TypeError: x is not a floating-point tensor.
            ValueError: x is not of width d_model, or a position lies outside the table.
        """
        max_len, d_model = self.table.shape
        n = check_shape(x, "... n e", name="x", e=d_model)["n"]
        _check_floating(x, "vectors: embed the tokens first")
        if offset < 0 or offset + n > max_len:
            raise ValueError(
                f"x needs positions {offset} to {offset + n - 1} and the table ends at {max_len - 1}: "
                "give LearnedEncoding a larger max_len and train it, or cut the sequence"
            )
        return x + self.table[offset : offset + n].to(x.dtype)


def rotary(x: torch.Tensor, *, offset: int = 0, base: float = 10_000.0, layout: str = "interleaved") -> torch.Tensor:
    """Turn each pair of channels by an angle that grows with the position: θ = position · base^(-2m/d).

    Queries and keys turned this way have a dot product that depends on their distance alone. The angles are
    made in float64: half precision cannot hold a large position.

    Args:
        x: (... n d), d even.
        offset: position of the first row, such as the number of keys in a cache.
        base: the wavelengths run from 2π to almost 2π · base.
        layout: which channels form pair m: ``"interleaved"`` 2m and 2m+1, ``"half"`` m and m + d/2.

    Returns:
        Like ``x``: same shape and dtype.

    Raises:
        TypeError: ``x`` is not a floating-point tensor.
        ValueError: d is odd, the layout is unknown, or the base is not positive.

    Source: Su et al.: RoFormer (2021), equation 15.
    """
    size = check_shape(x, "... n d", name="x")
    _check_floating(x, "queries or keys")
    if size["d"] % 2:
        raise ValueError(f"d is {size['d']}; rotary turns pairs of channels, so expected an even width")
    if layout not in ROTARY_LAYOUTS:
        raise ValueError(f"layout is {layout!r}; expected one of {', '.join(map(repr, ROTARY_LAYOUTS))}")
    _check_base(base)
    pair = torch.arange(0, size["d"], 2, dtype=torch.float64, device=x.device)
    position = torch.arange(offset, offset + size["n"], dtype=torch.float64, device=x.device)
    angle = position[:, None] * base ** (-pair / size["d"])
    exact = torch.promote_types(x.dtype, torch.float32)
    cos, sin = angle.cos().to(exact), angle.sin().to(exact)
    pairs_apart = layout == "half"
    wide = x.to(exact)
    first, second = wide.chunk(2, dim=-1) if pairs_apart else (wide[..., 0::2], wide[..., 1::2])
    turned = first * cos - second * sin, first * sin + second * cos
    out = torch.cat(turned, dim=-1) if pairs_apart else torch.stack(turned, dim=-1).flatten(-2)
    return out.to(x.dtype)


def alibi_slopes(num_heads: int) -> torch.Tensor:
    """How steeply each head discounts distance: 2^(-8/h), 2^(-16/h), ... 2^-8 where h is a power of two.

    Another h takes the slopes of the next lower power of two, then every other slope of the next higher one.

    Args:
        num_heads: h.

    Returns:
        (h), all different, between 0 and 1.

    Raises:
        TypeError: num_heads is no int.
        ValueError: num_heads is less than 1.

    Source: Press, Smith, Lewis: Train Short, Test Long (2022), section 3 and its published code.
    """
    check_count(num_heads, "num_heads", least=1)
    lower = 2 ** (int(num_heads).bit_length() - 1)
    exponents = [8 * i / lower for i in range(1, lower + 1)]
    between = [4 * i / lower for i in range(1, 2 * lower, 2)]  # what 2 · lower heads would have besides
    return torch.tensor([2.0**-exponent for exponent in (exponents + between)[:num_heads]])


def alibi_bias(num_heads: int, n_queries: int, n_keys: int | None = None) -> torch.Tensor:
    """-slope · |distance|, to be added to the scores: near keys count more, and each head has its own reach.

    It hides nothing. To hide the future as well: ``bias.masked_fill(~causal_mask(n), -torch.inf)``.

    Args:
        num_heads: h.
        n_queries: number of queries i.
        n_keys: number of keys j; None: as many as queries. The last query stands at the last key.

    Returns:
        (h i j).

    Raises:
        TypeError: a size is no int.
        ValueError: num_heads is less than 1, or a length is negative.

    Source: Press, Smith, Lewis: Train Short, Test Long (2022), section 3.
    """
    n_keys = n_queries if n_keys is None else n_keys
    check_count(n_queries, "n_queries")
    check_count(n_keys, "n_keys")
    query_position = torch.arange(n_queries)[:, None] + (n_keys - n_queries)
    distance = (query_position - torch.arange(n_keys)).abs()
    return alibi_slopes(num_heads)[:, None, None] * -distance


def relative_position_index(height: int, width: int) -> torch.Tensor:
    """Number the offsets between the cells of a grid: equal offsets share a number, different ones never do.

    The offset (rows, columns) from key to query becomes
    (rows + height - 1) · (2 width - 1) + columns + width - 1: a cell, counted row by row, of a larger grid
    whose rows are 2 width - 1 long.

    Args:
        height, width: of the grid; its cells are counted row by row.

    Returns:
        (n n) int64 with n = height · width; rows are queries; values 0 ... (2 height - 1)(2 width - 1) - 1.

    Raises:
        TypeError: a size is no int.
        ValueError: a size is less than 1.

    Source: Liu et al.: Swin Transformer (2021), section 3.2.
    """
    check_count(height, "height", least=1)
    check_count(width, "width", least=1)
    cell = torch.arange(height * width)
    row, column = cell // width, cell % width
    rows = row[:, None] - row + height - 1
    columns = column[:, None] - column + width - 1
    return rows * (2 * width - 1) + columns


class RelativePositionBias(nn.Module):
    """A learned number for each head and each offset in a grid, to be added to the scores.

    Args:
        num_heads: h.
        height, width: of the grid.

    Attributes:
        table: ((2 height - 1)(2 width - 1) h).

    Raises:
        TypeError: a size is no int.
        ValueError: a size is less than 1.

    Source: Liu et al.: Swin Transformer (2021), equation 4.
    """

    def __init__(self, num_heads: int, height: int, width: int) -> None:
        super().__init__()
        check_count(num_heads, "num_heads", least=1)
        self.register_buffer("index", relative_position_index(height, width), persistent=False)
        self.table = nn.Parameter(torch.empty((2 * height - 1) * (2 * width - 1), num_heads))
        nn.init.normal_(self.table, std=0.02)

    def forward(self) -> torch.Tensor:
        """Returns: (h n n), n = height · width; rows are queries."""
        return self.table[self.index].permute(2, 0, 1)


def resize_positions(
    table: torch.Tensor, old_grid: tuple[int, int], new_grid: tuple[int, int], *, num_prefix: int = 1
) -> torch.Tensor:
    """Carry a picture's learned positions over to another grid of patches, by bicubic interpolation.

    Args:
        table: (n e), the prefix rows and then the grid, row by row.
        old_grid: (rows, columns) of the table.
        new_grid: (rows, columns) wanted.
        num_prefix: rows at the front that belong to no patch, such as CLS; they stay as they are.

    Returns:
        (n' e) with n' = num_prefix + rows · columns of the new grid, in the table's dtype.

    Raises:
        TypeError: a grid is no pair, or a size no int.
        ValueError: a size is less than 1, or the table does not have num_prefix + rows · columns rows.

    Source: Dosovitskiy et al.: An Image is Worth 16x16 Words (2021), section 3.2.
    Oracle: ``F.interpolate(mode="bicubic", align_corners=False, antialias=False)``.
    """
    check_count(num_prefix, "num_prefix")
    (rows, columns), new_grid = check_grid(old_grid, "old_grid"), check_grid(new_grid, "new_grid")
    n = check_shape(table, "n e", name="table")["n"]
    if n != num_prefix + rows * columns:
        raise ValueError(
            f"table has {n} rows; expected num_prefix + rows · columns = {num_prefix} + {rows} · {columns} = "
            f"{num_prefix + rows * columns}: check old_grid and num_prefix"
        )
    prefix, patches = table[:num_prefix], table[num_prefix:]
    exact = patches.to(torch.promote_types(table.dtype, torch.float32))
    picture = exact.unflatten(0, (rows, columns)).permute(2, 0, 1)  # channels first, as interpolate reads it
    resized = nn.functional.interpolate(picture[None], size=new_grid, mode="bicubic", align_corners=False)[0]
    return torch.cat([prefix, resized.flatten(1).T.to(table.dtype)])
