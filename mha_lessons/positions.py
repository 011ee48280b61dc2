"""How attention learns about order: encodings that are added, turned in, or added to the scores."""

import torch

from mha_lessons.shapes import check_shape

ROTARY_LAYOUTS = ("interleaved", "half")


def rotary(x: torch.Tensor, *, offset: int = 0, base: float = 10_000.0, layout: str = "interleaved") -> torch.Tensor:
    """Turn each pair of channels by an angle that grows with the position: θ = position · base^(-2m/d).

    Queries and keys turned this way have a dot product that depends on their distance alone. The angles are
    made in float64: half precision cannot hold a large position.

    Args:
        x: (... n d), d even.
        offset: position of the first row, such as the number of keys in a cache.
        base: the wavelengths run from 2π to 2π · base.
        layout: which channels form pair m: ``"interleaved"`` 2m and 2m+1, ``"half"`` m and m + d/2.

    Returns:
        Like ``x``: same shape and dtype.

    Raises:
        TypeError: ``x`` is not a floating-point tensor.
        ValueError: d is odd, the layout is unknown, or the base is not positive.

    Source: Su et al.: RoFormer (2021), equation 15.
    """
    size = check_shape(x, "... n d", name="x")
    if not x.dtype.is_floating_point:
        raise TypeError(f"x is {x.dtype}; expected floating-point queries or keys")
    if size["d"] % 2:
        raise ValueError(f"d is {size['d']}; rotary turns pairs of channels, so expected an even width")
    if layout not in ROTARY_LAYOUTS:
        raise ValueError(f"layout is {layout!r}; expected one of {', '.join(map(repr, ROTARY_LAYOUTS))}")
    if not base > 0:
        raise ValueError(f"base is {base}; expected a positive number")
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
