"""Exercises on flash attention: one step of the online softmax, causal tiles, joining parts, the whole forward pass."""

import math
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mha_lessons.checks.engine import call, exercise
from mha_lessons.flash import flash_attention, merge_attention

HIDDEN = -torch.inf
AND_HIDDEN = " And a row that has seen hidden keys alone becomes NaN: subtract 0 there, not its maximum -inf."


def _finite(maximum: torch.Tensor) -> torch.Tensor:
    return maximum.masked_fill(maximum == HIDDEN, 0.0)


def _as_it_is(maximum: torch.Tensor) -> torch.Tensor:
    return maximum


def _kept(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    return (old - new).exp()


def _inverted(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    return (new - old).exp()


def _all(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(new)


def _step(of_total: Callable = _kept, of_mix: Callable = _kept, shift: Callable = _finite) -> Callable:
    """The step with any factor on the old sum and on the old mix, and any shift of the scores."""

    def step(maximum, total, mix, scores, v):
        new = torch.maximum(maximum, scores.amax(-1))
        at = shift(new)
        weights = (scores - at[..., None]).exp()
        total = total * of_total(maximum, at) + weights.sum(-1)
        return new, total, mix * of_mix(maximum, at)[..., None] + weights @ v

    return step


RIGHT_STEP = _step()


def _shift_for_maximum(maximum, total, mix, scores, v):
    new, *sums = RIGHT_STEP(maximum, total, mix, scores, v)
    return _finite(new), *sums


def _maximum_of_the_tile(maximum, total, mix, scores, v):
    new = scores.amax(-1)
    kept = (maximum - _finite(new)).exp()
    weights = (scores - _finite(new)[..., None]).exp()
    return new, total * kept + weights.sum(-1), mix * kept[..., None] + weights @ v


def _divided(maximum, total, mix, scores, v):
    new, total, mix = RIGHT_STEP(maximum, total, mix, scores, v)
    return new, total, mix / total[..., None]


def _seen_before(normal: Callable, *lead: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """maximum, total and mix (width 4) of rows that have seen keys."""
    return normal(*lead), 1 + normal(*lead).abs(), normal(*lead, 4)


def _first_tile(normal: Callable) -> tuple:
    return normal(2, 3) + HIDDEN, 0 * normal(2, 3), 0 * normal(2, 3, 4), 3 * normal(2, 3, 5), normal(2, 5, 4)


def _low_first_tile(normal: Callable) -> tuple:
    """Whoever shifts these scores by 0 or by a fixed low number sees them vanish."""
    maximum, total, mix, scores, v = _first_tile(normal)
    return maximum, total, mix, scores - 2e9, v


def _hidden_tile(normal: Callable) -> tuple:
    """Row 0 has seen nothing and sees nothing now; row 1 has seen keys; row 2 sees two of the four."""
    maximum, total, mix = _seen_before(normal, 3)
    scores, sees_nothing = normal(3, 4), torch.tensor([True, False, False])
    scores[:2], scores[2, :2] = HIDDEN, HIDDEN
    state = maximum.masked_fill(sees_nothing, HIDDEN), total.masked_fill(sees_nothing, 0)
    return *state, mix.masked_fill(sees_nothing[:, None], 0), scores, normal(4, 4)


@exercise(
    axes="... i, ... i, ... i d, ... i j, ... j d -> ... i, ... i, ... i d",
    inputs=lambda normal: [
        (*_seen_before(normal, 3), 3 * normal(3, 5), normal(5, 4)),
        (*_seen_before(normal, 2, 3, 5), 3 * normal(2, 3, 5, 4), normal(2, 3, 4, 4)),
        _first_tile(normal),
        _hidden_tile(normal),
        _low_first_tile(normal),
    ],
    mistakes=[
        (
            _step(_inverted, _inverted),
            "Your factor is upside down, exp(new - old): what was summed grows where it should shrink, and the first "
            "tile, whose old maximum is -inf, makes NaN. Multiply by exp(old - new), which is at most 1.",
        ),
        (
            _step(_all, _all),
            "You did not rescale what was there: the old sum and mix stand in units of exp(old maximum), the new ones "
            "in units of exp(new maximum). Multiply both by exp(old - new) before you add.",
        ),
        (
            _step(_all, _all, _as_it_is),
            "You did not rescale what was there: multiply the old sum and mix by exp(old - new)." + AND_HIDDEN,
        ),
        (
            _step(of_total=_all),
            "You rescaled the mix, but not the sum: the weights no longer sum to 1. Multiply both by exp(old - new).",
        ),
        (
            _step(of_total=_all, shift=_as_it_is),
            "You rescaled the mix, but not the sum: multiply both by exp(old - new)." + AND_HIDDEN,
        ),
        (
            _step(of_mix=_all),
            "You rescaled the sum, but not the mix: old values weigh too much. Multiply both by exp(old - new).",
        ),
        (
            _step(of_mix=_all, shift=_as_it_is),
            "You rescaled the sum, but not the mix: multiply both by exp(old - new)." + AND_HIDDEN,
        ),
        (
            _step(shift=_as_it_is),
            "Right while something is seen. Where a row has seen hidden keys alone its maximum is -inf, and -inf - "
            "(-inf) is NaN, which stays for good. Subtract 0 in such rows, as in `masked_fill(new == -inf, 0)`.",
        ),
        (
            _shift_for_maximum,
            "You returned the shift as the maximum: 0 where nothing was seen yet. If the next scores are far below 0 "
            "they vanish beside it. Make only the shift finite, and return the maximum -inf as it is.",
        ),
        (
            lambda maximum, total, mix, scores, v: RIGHT_STEP(maximum, total, mix, scores.clamp(min=-1e9), v),
            "You hid keys by a finite number, -1e9. In a row that sees nothing it is itself the maximum, so each "
            "hidden key adds exp(0) = 1. Keep -inf, and make only the shift finite.",
        ),
        (
            _maximum_of_the_tile,
            "Your new maximum is that of this tile alone: where an older one is larger, exp(old - new) overflows one "
            "day. Take the larger of the two: `torch.maximum(maximum, scores.amax(-1))`.",
        ),
        (
            _divided,
            "You divided the mix by the sum. The next step would rescale what is divided already, so divide once, "
            "after the last tile, and return the mix as it is.",
        ),
    ],
)
def online_step(maximum, total, mix, scores, v):
    """Add a tile: write ``online_step(maximum, total, mix, scores, v)``, which brings a row's three numbers up to date.

    With the new maximum m', the old sum and mix are multiplied by exp(m - m') before the tile's own exp(scores - m')
    are added. A row that has seen nothing yet has maximum -inf, sum 0 and mix 0, and so it stays under hidden keys.

    Args:
        maximum: of each row so far (... i), -inf where nothing was seen.
        total: sum of exp(score - maximum) so far (... i).
        mix: sum of exp(score - maximum) times value so far (... i d), not divided by anything.
        scores: of this tile (... i j), -inf where a key is hidden.
        v: values of this tile (... j d).

    Returns:
        The new maximum (... i), total (... i) and mix (... i d).
    """
    return RIGHT_STEP(maximum, total, mix, scores, v)


def _starts(n_queries: int, block_q: int) -> torch.Tensor:
    return torch.arange(0, n_queries, block_q)


def _ends(n_queries: int, block_q: int) -> torch.Tensor:
    """One past the last query of each block."""
    return (_starts(n_queries, block_q) + block_q).clamp(max=n_queries)


def _tiles(keys: torch.Tensor, block_k: int) -> torch.Tensor:
    """How many blocks hold so many keys: rounded up."""
    return -(-keys.clamp(min=0) // block_k)


@exercise(
    axes="i, j, _, _ -> _",
    inputs=lambda normal: [(12, 12, 4, 2), (12, 12, 5, 3), (5, 13, 2, 4), (9, 3, 2, 2), (8, 8, 4, 4), (5, 12, 2, 4)],
    mistakes=[
        (
            lambda n_queries, n_keys, block_q, block_k: _tiles(
                _starts(n_queries, block_q) + 1 + n_keys - n_queries, block_k
            ),
            "You took the bound from the first query of each block, so its later queries lose keys that they may see. "
            "It does not show when the blocks are square. Take the last query of the block.",
        ),
        (
            lambda n_queries, n_keys, block_q, block_k: _tiles(_ends(n_queries, block_q).clamp(max=n_keys), block_k),
            "Your diagonal starts at the upper left. The last query stands at the last key, so shift by "
            "n_keys - n_queries, as in lesson 4.",
        ),
        (
            lambda n_queries, n_keys, block_q, block_k: _tiles(_ends(n_queries, block_q), block_k),
            "Your diagonal starts at the upper left, and where there are more queries than keys you read past the last "
            "key. The last query stands at the last key: shift by n_keys - n_queries.",
        ),
        (
            lambda n_queries, n_keys, block_q, block_k: _tiles(
                _ends(n_queries, block_q) - 1 + n_keys - n_queries, block_k
            ),
            "Your bound is one key short: a query at position p sees the keys 0 to p, which are p + 1.",
        ),
        (
            lambda n_queries, n_keys, block_q, block_k: (
                (_ends(n_queries, block_q) + n_keys - n_queries).clamp(min=0) // block_k
            ),
            "You rounded down, so the last tile of a block is left out unless it is full. Round up: `-(-keys // "
            "block_k)`.",
        ),
        (
            lambda n_queries, n_keys, block_q, block_k: _tiles(
                _starts(n_queries, block_q) + block_q + n_keys - n_queries, block_k
            ),
            "Your last block of queries is ragged, and you count as if it were full: you read past the last key. It "
            "ends at n_queries: `min(start + block_q, n_queries)`.",
        ),
        (
            lambda n_queries, n_keys, block_q, block_k: -(-(_ends(n_queries, block_q) + n_keys - n_queries) // block_k),
            "Your counts are negative where there are more queries than keys: queries before the first key see "
            "nothing. Use `max(0, ...)`.",
        ),
        (
            lambda n_queries, n_keys, block_q, block_k: torch.full_like(
                _starts(n_queries, block_q), -(-n_keys // block_k)
            ),
            "You visit every tile. Right numbers would come out, and about half of the work would be for tiles that a "
            "causal mask hides whole. Stop at the key of the block's last query.",
        ),
        (
            lambda n_queries, n_keys, block_q, block_k: (_ends(n_queries, block_q) + n_keys - n_queries).clamp(min=0),
            "You counted keys. How many tiles of block_k keys hold them? Divide and round up.",
        ),
    ],
)
def tile_bounds(n_queries, n_keys, block_q, block_k):
    """Skip what is hidden: write ``tile_bounds(n_queries, n_keys, block_q, block_k)``, causal attention's tile counts.

    Queries are taken ``block_q`` at a time, keys ``block_k`` at a time, from the first on; the last block of either may
    be smaller. The last query stands at the last key. A tile is visited if any of its queries sees any of its keys.

    Args:
        n_queries: number of queries i, a whole number.
        n_keys: number of keys j, a whole number.
        block_q: queries a block, a whole number.
        block_k: keys a block, a whole number.

    Returns:
        For each block of queries how many blocks of keys it visits: a tensor of whole numbers, (number of blocks).
    """
    return _tiles(_ends(n_queries, block_q) + n_keys - n_queries, block_k)


def _joined(share: Callable = lambda part, lse: (part - lse).exp(), shift: Callable = _finite) -> Callable:
    """The joining with any share of a part."""

    def join(out_a, lse_a, out_b, lse_b):
        lse = torch.logaddexp(lse_a, lse_b)
        shares = [share(part, shift(lse))[..., None] for part in (lse_a, lse_b)]
        return out_a * shares[0] + out_b * shares[1], lse

    return join


def _with_lse(lse_of: Callable) -> Callable:
    """The joining with another lse of both parts."""

    def join(out_a, lse_a, out_b, lse_b):
        lse = lse_of(lse_a, lse_b)
        return out_a * (lse_a - lse).exp()[..., None] + out_b * (lse_b - lse).exp()[..., None], lse

    return join


def _overflowing(out_a, lse_a, out_b, lse_b):
    sum_a, sum_b = lse_a.exp(), lse_b.exp()
    total = sum_a + sum_b
    return (out_a * sum_a[..., None] + out_b * sum_b[..., None]) / total[..., None], total.log()


def _far_apart(normal: Callable) -> tuple:
    """In each row one part outweighs the other by far, and the last row is far below the others."""
    gaps = torch.tensor([1000.0, -1000, -2000], dtype=torch.float64)
    return normal(3, 2), normal(3) + gaps, normal(3, 2), normal(3) + gaps[[1, 0, 2]]


def _unseen_rows(normal: Callable) -> tuple:
    """Row 0 sees keys of both parts, row 1 of the second alone, row 2 of none."""
    out_a, out_b, lse_a, lse_b = normal(3, 2), normal(3, 2), normal(3), normal(3)
    out_a[1:], lse_a[1:], out_b[2], lse_b[2] = 0, HIDDEN, 0, HIDDEN
    return out_a, lse_a, out_b, lse_b


@exercise(
    axes="... i d, ... i, ... i d, ... i -> ... i d, ... i",
    inputs=lambda normal: [
        (normal(3, 4), 2 * normal(3), normal(3, 4), 2 * normal(3)),
        (normal(2, 3, 5, 4), 2 * normal(2, 3, 5), normal(2, 3, 5, 4), 2 * normal(2, 3, 5)),
        (normal(3, 3), 1000 + normal(3), normal(3, 3), 1000 + normal(3)),
        _unseen_rows(normal),
        _far_apart(normal),
    ],
    mistakes=[
        (
            lambda out_a, lse_a, out_b, lse_b: (
                (out_a * lse_a[..., None] + out_b * lse_b[..., None]) / (lse_a + lse_b)[..., None],
                torch.logaddexp(lse_a, lse_b),
            ),
            "You weighed the parts by their lse. It is a logarithm: the shares are exp(lse_a - lse) and "
            "exp(lse_b - lse).",
        ),
        (
            _with_lse(lambda a, b: a + b),
            "You added the two lse. They are logarithms of sums, so it is the sums that add: "
            "`torch.logaddexp(lse_a, lse_b)`.",
        ),
        (
            lambda out_a, lse_a, out_b, lse_b: ((out_a + out_b) / 2, torch.logaddexp(lse_a, lse_b)),
            "You averaged the two outputs as if both parts weighed the same. A part whose keys fit better weighs more: "
            "its share is exp(its lse - lse of both).",
        ),
        (
            lambda out_a, lse_a, out_b, lse_b: (out_a + out_b, torch.logaddexp(lse_a, lse_b)),
            "You added the two outputs. Each is divided by its own sum already, so weigh them: the share of a part is "
            "exp(its lse - lse of both).",
        ),
        (
            _joined(lambda part, lse: (part - lse).exp2()),
            "You took powers of 2 of natural logarithms, so the shares do not sum to 1: a small error, easily taken "
            "for rounding. Use `exp`.",
        ),
        (
            _joined(lambda part, lse: (part - lse).exp2(), _as_it_is),
            "You took powers of 2 of natural logarithms, so the shares do not sum to 1: use `exp`." + AND_HIDDEN,
        ),
        (
            _with_lse(torch.maximum),
            "Your lse is the larger of the two, so the shares sum to more than 1. Both parts count: "
            "`torch.logaddexp(lse_a, lse_b)`.",
        ),
        (
            lambda out_a, lse_a, out_b, lse_b: _joined()(out_b, lse_a, out_a, lse_b),
            "You swapped the shares: each part is weighed by how well the other one's keys fit.",
        ),
        (
            _overflowing,
            "Right for small numbers, but exp(lse) overflows near 1000, and rows that see nothing are 0/0. Take off "
            "before you exponentiate: exp(lse_a - lse), with lse = `torch.logaddexp(lse_a, lse_b)`.",
        ),
        (
            _joined(shift=_as_it_is),
            "Right while a row sees something. Where both parts are hidden, -inf - (-inf) is NaN, and PyTorch's answer "
            "is 0: subtract 0 where lse is -inf.",
        ),
    ],
)
def merge_parts(out_a, lse_a, out_b, lse_b):
    """Join two results: write ``merge_parts(out_a, lse_a, out_b, lse_b)``, exact for both sets of keys together.

    The same queries have read two sets of keys. lse is the natural log of the sum of exp(score) over a set, and -inf
    where a query sees no key of it; such a query has output 0 there.

    Args:
        out_a: what the queries read from the first set (... i d).
        lse_a: the log of the sum over the first set (... i).
        out_b: what they read from the second set (... i d).
        lse_b: the log of the sum over the second set (... i).

    Returns:
        The output (... i d) and lse (... i) over both sets.
    """
    return merge_attention(out_a, lse_a, out_b, lse_b)


def _forward(
    step: Callable = RIGHT_STEP,
    start: float = HIDDEN,
    keys: Callable = lambda x, block: x,
    lse: Callable = lambda maximum, total: maximum + total.log(),
    scale: Callable = lambda d: d**-0.5,
) -> Callable:
    """The forward pass with any step, first maximum, treatment of the ragged tail, lse and scale."""

    def forward(q, k, v, block):
        maximum, total, mix = torch.full_like(q[..., 0], start), torch.zeros_like(q[..., 0]), torch.zeros_like(q)
        k, v = keys(k, block), keys(v, block)
        for at in range(0, k.shape[-2], block):
            scores = q @ k[..., at : at + block, :].mT * scale(q.shape[-1])
            maximum, total, mix = step(maximum, total, mix, scores, v[..., at : at + block, :])
        return mix / total[..., None], lse(maximum, total)

    return forward


def _unlike_rows(normal: Callable) -> tuple:
    """Rows of scores that are very large, small and very low, and differ much from tile to tile."""
    signs = torch.tensor([[1.0], [0.0], [-1.0]], dtype=torch.float64)
    return signs * (100 + normal(3, 4)), 100 + 50 * normal(6, 4), normal(6, 4), 2


def _padded(x: torch.Tensor, block: int) -> torch.Tensor:
    return torch.nn.functional.pad(x, (0, 0, 0, -x.shape[-2] % block))


def _full_blocks(x: torch.Tensor, block: int) -> torch.Tensor:
    return x[..., : x.shape[-2] // block * block, :]


def _first_axis_split(q, k, v, block):
    out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], HIDDEN)
    for part in zip(k.split(block), v.split(block), strict=True):
        out, lse = merge_attention(out, lse, *flash_attention(q, *part, return_lse=True))
    return out, lse


def _no_maximum(q, k, v, block):
    weights = (q @ k.mT * q.shape[-1] ** -0.5).exp()
    total = weights.sum(-1)
    return weights @ v / total[..., None], total.log()


def _averaged(q, k, v, block):
    parts = [flash_attention(q, *part) for part in zip(k.split(block, -2), v.split(block, -2), strict=True)]
    return torch.stack(parts).mean(0), flash_attention(q, k, v, return_lse=True)[1]


def _undivided(q, k, v, block):
    out, lse = flash_attention(q, k, v, return_lse=True)
    return out * (lse - (q @ k.mT * q.shape[-1] ** -0.5).amax(-1)).exp()[..., None], lse


class _Shapes(TorchDispatchMode):
    """The shapes of all results of floating point."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        results = result if isinstance(result, tuple | list) else [result]
        self.seen += [tuple(x.shape) for x in results if isinstance(x, torch.Tensor) and x.is_floating_point()]
        return result


def _holds_more_than_a_block(candidate: Callable) -> str | None:
    """Whether scores of more than three blocks of keys are held at once; what has an axis of size d is no score."""
    queries, keys, d, block = 20, 101, 3, 7
    x = torch.linspace(-1, 1, keys * d, dtype=torch.float64).view(keys, d)
    with _Shapes() as shapes:
        call(candidate, (x[:queries], x, x, block))
    for shape in shapes.seen:
        if math.prod(shape) >= queries * keys or (max(shape, default=0) > 3 * block and d not in shape):
            return (
                f"Your numbers are right, but with {queries} queries, {keys} keys and blocks of {block} you made a "
                f"tensor of shape {shape}: scores of more keys than a block has. Hold those of one block of keys, use "
                "them, and go on to the next."
            )
    return None


@exercise(
    axes="... i d, ... j d, ... j d, _ -> ... i d, ... i",
    also=_holds_more_than_a_block,
    inputs=lambda normal: [
        (normal(5, 4), normal(6, 4), normal(6, 4), 2),
        (normal(2, 3, 5, 8), normal(2, 3, 7, 8), normal(2, 3, 7, 8), 3),
        (normal(3, 5, 2), normal(3, 6, 2), normal(3, 6, 2), 1),
        (normal(3, 3), normal(5, 3), normal(5, 3), 8),
        (30 + normal(3, 4), normal(6, 4) - 40, normal(6, 4), 4),
        (30 + normal(3, 4), normal(6, 4) + 40, normal(6, 4), 4),
        _unlike_rows(normal),
    ],
    mistakes=[
        (
            _forward(keys=_padded),
            "You filled the last tile up with zeros. A key of zeros scores 0, and exp(0) takes weight. Cut the last "
            "tile short, or hide the pads with -inf.",
        ),
        (
            _forward(keys=_full_blocks),
            "You left out the last tile when it is not full, so the last keys are never read. Round the number of "
            "tiles up; a slice may end early.",
        ),
        (
            _forward(_step(_inverted, _inverted)),
            "Your factor is upside down, exp(new - old): at the first tile the old maximum is -inf, so it is infinite, "
            "and infinity times 0 is NaN. Multiply by exp(old - new).",
        ),
        (
            _forward(_step(_all, _all)),
            "You did not rescale what the earlier tiles gave. It passes when the largest score comes first. Multiply "
            "the old sum and mix by exp(old - new).",
        ),
        (
            _forward(_step(of_total=_all)),
            "You rescaled the mix, but not the sum, so the output is too small where the maximum grew. Multiply both "
            "by exp(old - new).",
        ),
        (
            _forward(_step(of_mix=_all)),
            "You rescaled the sum, but not the mix, so values of earlier tiles weigh too much. Multiply both by "
            "exp(old - new).",
        ),
        (
            _forward(start=0.0),
            "Your maximum starts at 0, or is taken of `abs()`. When all scores are far below, every exp(score - 0) is "
            "0 and the output is 0/0. Start at -inf.",
        ),
        (
            _first_axis_split,
            "You split the first axis: in one table those are the keys, with a batch in front they are not. Count from "
            "the end: `k.split(block, dim=-2)`.",
        ),
        (
            _no_maximum,
            "You took no maximum off: exp(score) overflows when scores are near 1000, and is 0 when they are near "
            "-1000. Take the running maximum off first.",
        ),
        (
            _averaged,
            "You averaged the tiles' own outputs. Each has a softmax of its own, so a tile of bad keys weighs as much "
            "as a tile of good ones. Divide once, by the sum over all tiles.",
        ),
        (
            _undivided,
            "You did not divide by the sum in the end, so a row's weights do not sum to 1: out = mix / total.",
        ),
        (
            _forward(scale=lambda d: 1.0),
            "You did not scale the scores. Divide q kᵀ by √d, the root of the width of a query.",
        ),
        (
            _forward(lse=lambda maximum, total: total.log()),
            "Your out is right, your lse lacks the maximum: it was taken off each score, so put it back: "
            "maximum + log(total).",
        ),
        (
            _forward(lse=lambda maximum, total: (maximum + total.log()) / math.log(2)),
            "Your out is right, your lse is to base 2. Whoever joins parts with `exp` would get a small error: return "
            "the natural logarithm.",
        ),
        (
            _forward(lse=lambda maximum, total: maximum + total),
            "Your out is right, your lse lacks a logarithm: maximum + log(total).",
        ),
    ],
)
def flash_forward(q, k, v, block):
    """The whole of it: write ``flash_forward(q, k, v, block)``: attention that reads the keys a block at a time.

    Go over the keys ``block`` at a time, and call ``online_step`` for each tile of scores q kᵀ / √d. No tensor may have
    an entry for every query and every key.

    Args:
        q: queries (... i d).
        k: keys (... j d).
        v: values (... j d).
        block: keys at a time, a whole number; it need not divide j.

    Returns:
        The output (... i d), and the natural log of the sum of exp(score) of each row, lse (... i).
    """
    return flash_attention(q, k, v, block_k=block, return_lse=True)
