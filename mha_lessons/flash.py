"""Flash attention: exact attention, a tile of the scores at a time, in memory that grows with n and not with n².

A softmax seems to need its whole row before it can give the first weight. It does not: a running maximum and a
running sum, rescaled whenever the maximum grows, end at the same numbers. So a tile of scores is made, used and
forgotten, in the forward pass and, made once more, in the backward pass.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import flop_registry, register_flop_formula

from mha_lessons.masks import causal_mask, check_mask, without_unseen
from mha_lessons.shapes import check_count, check_qkv, check_shape

# exp2 is several times faster than exp, and 2^(x log2 e) = e^x.
LOG2_E = math.log2(math.e)

# PyTorch on x86 brings two libraries that multiply matrices. ``@`` calls MKL, which on an AMD EPYC reached half
# the speed of oneDNN in float32. This operator, which compiled linear layers call, is the way to oneDNN.
_onednn_linear = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
if _onednn_linear is not None and _onednn_linear not in flop_registry:

    @register_flop_formula(_onednn_linear)
    def _linear_flops(x_shape: torch.Size, weight_shape: torch.Size, *_, **__) -> int:
        """So that torch's FlopCounterMode counts it."""
        return 2 * math.prod(x_shape) * weight_shape[0]


def online_softmax(scores: torch.Tensor, block: int) -> torch.Tensor:
    """The softmax of each row, its maximum and sum found in one pass, a block at a time.

    When a block raises the maximum from m to m', what was summed so far is multiplied by exp(m - m').

    Args:
        scores: (... j); -inf hides a key.
        block: keys per block, 1 or more.

    Returns:
        Like ``scores``: the softmax over the last axis; a row of -inf alone gives 0.

    Raises:
        TypeError: scores are not floating point, or block is no int.
        ValueError: block is less than 1.

    Source: Milakov and Gimelshein: Online normalizer calculation for softmax (2018), algorithm 3.
    Oracle: ``torch.softmax``.
    """
    check_shape(scores, "... j", name="scores")
    check_count(block, "block", least=1)
    if not scores.dtype.is_floating_point:
        raise TypeError(f"scores are {scores.dtype}; expected floating point: use scores.float()")
    blocks = _exact(scores).split(block, dim=-1) if scores.shape[-1] else ()
    maximum = _exact(scores).new_full((*scores.shape[:-1], 1), -torch.inf)
    shift = total = torch.zeros_like(maximum)
    for x in blocks:
        new_maximum = torch.maximum(maximum, x.detach().amax(dim=-1, keepdim=True))
        shift = _finite(new_maximum)
        total = total * (maximum - shift).exp() + (x - shift).exp().sum(dim=-1, keepdim=True)
        maximum = new_maximum
    weights = [(x - shift).exp() / _at_least_1(total) for x in blocks]
    return torch.cat(weights, dim=-1).to(scores.dtype) if weights else scores.clone()


def _exact(x: torch.Tensor) -> torch.Tensor:
    """Half precision is computed in float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _finite(maximum: torch.Tensor) -> torch.Tensor:
    """What to subtract. While a row has seen hidden keys alone its maximum is -inf, and -inf - -inf is NaN."""
    return maximum.clamp(min=torch.finfo(maximum.dtype).min)


def _at_least_1(total: torch.Tensor) -> torch.Tensor:
    """What to divide by. The largest score adds exp(0) = 1, so only a row that sees nothing has less: its sum is 0."""
    return total.clamp(min=1)


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    block_q: int = 512,
    block_k: int = 512,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(q kᵀ / √d_k) v, exact, without ever holding the (i j) scores.

    Memory grows with the number of positions, forwards and backwards; a causal tile above the diagonal is never
    computed. A query with no key to attend to gets output 0 and gradient 0. Half precision is computed in
    float32 inside.

    Args:
        q: (... i d) queries.
        k: (... j d) keys.
        v: (... j dv) values.
        mask: broadcastable to (... i j), and never expanded. bool: True = may attend. Floating point: added to the
            scores; hide with -inf, as a row of large negative numbers keeps no digit of its scores. With a bool
            mask, what stands in k and v where neither mask nor ``causal`` lets a query look, NaN included, reaches
            neither the output nor a gradient.
        causal: each query sees the keys up to its own position; the last query sees every key.
        scale: factor on q kᵀ; None: 1/√d.
        block_q: queries per tile. The defaults were the fastest when measured: one head's tile fits the cache.
        block_k: keys per tile.
        return_lse: also return the log of each row's sum, from which ``merge_attention`` joins partial results.

    Returns:
        out (... i dv) in the dtype of q, differentiable in q, k and v. With ``return_lse`` also lse (... i), float32
        or wider: the natural logsumexp of the scaled scores, -inf where nothing is seen. It carries no gradient.

    Raises:
        TypeError: not floating point, dtypes differ, a mask is neither bool nor floating point, or a block no int.
        ValueError: shapes do not fit, a block is less than 1, a float mask holds only 0 and 1, or it requires grad.

    Source: Dao et al.: FlashAttention (2022), algorithms 1 and 4; Dao: FlashAttention-2 (2023), for the order of
        the loops.
    Oracle: ``torch.nn.functional.scaled_dot_product_attention``.
    """
    heads = check_qkv(q, k, v)
    check_count(block_q, "block_q", least=1)
    check_count(block_k, "block_k", least=1)
    tiling = Tiling(q.shape[-2], k.shape[-2], block_q, block_k, causal)
    if mask is not None:
        mask = check_mask(mask, q, k)
        if mask.requires_grad:
            raise ValueError(
                "mask requires grad, and flash_attention gives a mask none (it would have n² numbers): use "
                "mask.detach(), or attention.scaled_dot_product_attention to learn a bias"
            )
        if mask.dtype == torch.bool:
            q, k, v = without_unseen(q, k, v, *_sees_and_seen(mask, tiling))
        mask = mask.expand(*heads, *mask.shape[-2:])
    q, k, v = (x.expand(*heads, *x.shape[-2:]) for x in (q, k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, maximum, total = _FlashAttention.apply(q, k, v, mask, scale, tiling)
    return (out, (maximum / _unit(mask) + total.log()).squeeze(-1)) if return_lse else out


@dataclass(frozen=True)
class Tiling:
    """How the (i j) scores are cut into tiles. Iterating gives (rows, columns) of each tile, in the order of visits.

    A block of queries after the other visits its keys, a block at a time. With ``causal`` the last query stands at
    the last key, and only tiles that hold a visible score are visited. Those on the diagonal are the only ones that
    need a mask. Half of each is wasted, so they are a quarter as wide, and begin at the first query that sees them.

    Attributes:
        n_queries, n_keys: the axes i and j.
        block_q, block_k: the largest tile.
        causal: leave out what lies above the diagonal.
    """

    n_queries: int
    n_keys: int
    block_q: int
    block_k: int
    causal: bool = False

    @property
    def offset(self) -> int:
        """The key at which the first query stands, if causal; negative where there are more queries than keys."""
        return self.n_keys - self.n_queries

    def __iter__(self) -> Iterator[tuple[slice, slice]]:
        first = max(0, -self.offset) if self.causal else 0  # queries before the first key see nothing
        for rows in _blocks(first, self.n_queries, self.block_q):
            seen_by_all = rows.start + self.offset if self.causal else self.n_keys
            seen_by_last = rows.stop + self.offset if self.causal else self.n_keys
            for columns in _blocks(0, seen_by_all, self.block_k):
                yield rows, columns
            for columns in _blocks(seen_by_all, seen_by_last, max(1, self.block_k // 4)):
                yield slice(columns.start - self.offset, rows.stop), columns

    def is_diagonal(self, rows: slice, columns: slice) -> bool:
        """Whether part of this tile lies above the diagonal: its first query then stands at its first key."""
        return self.causal and columns.start == rows.start + self.offset


def _blocks(start: int, stop: int, size: int) -> Iterator[slice]:
    return (slice(at, min(at + size, stop)) for at in range(start, stop, size))


def _sees_and_seen(mask: torch.Tensor, tiling: Tiling) -> tuple[torch.Tensor, torch.Tensor]:
    """Which queries see a key (... i), and which keys a query sees (... j), by mask and diagonal together."""
    sees = mask.new_zeros(*mask.shape[:-2], tiling.n_queries)
    seen = mask.new_zeros(*mask.shape[:-2], tiling.n_keys)
    for rows, columns in tiling:
        tile = _of_tile(mask, rows, columns)
        if tiling.is_diagonal(rows, columns):
            tile = tile & mask.new_ones(rows.stop - rows.start, columns.stop - columns.start).tril()
        sees[..., rows] |= tile.any(dim=-1)
        seen[..., columns] |= tile.any(dim=-2)
    return sees, seen


def _of_tile(mask: torch.Tensor, rows: slice, columns: slice) -> torch.Tensor:
    """The part of a mask (... i j) that belongs to a tile; an axis of size 1 stands for all."""
    height, width = mask.shape[-2:]
    return mask[..., rows if height > 1 else slice(None), columns if width > 1 else slice(None)]


def _matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a (i c) times b (c j). Autocast, which would halve the precision, reaches neither of the two ways."""
    if _suits_onednn(a, b):
        return _onednn_linear(a, b.T, None, "none", [], "")
    return torch.mm(a, b, out=a.new_empty(len(a), b.shape[1]))


def _suits_onednn(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Large products, as a call costs more, of sizes that come again, as it keeps about 1 MB for each new shape."""
    sizes = (*a.shape, b.shape[1])
    return (
        _onednn_linear is not None
        and a.device.type == "cpu"
        and a.dtype == torch.float32
        and math.prod(sizes) >= 2**21
        and not any(size % 32 for size in sizes)
        and torch.backends.mkldnn.enabled
        and not torch.compiler.is_compiling()  # the compiler would not accept it
    )


def _unit(mask: torch.Tensor | None) -> float:
    """Scores are kept in units of log 2, ready for exp2.

    Not so beside a float mask, whose lowest numbers would overflow in that unit: there only differences of scores are
    brought to it.
    """
    return 1.0 if mask is not None and mask.dtype.is_floating_point else LOG2_E


class _Scores:
    """The scores of one head in their unit, a tile at a time, -inf where hidden."""

    def __init__(
        self, q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, scale: float, tiling: Tiling
    ) -> None:
        self.unit = _unit(mask)
        self.q, self.k, self.mask, self.tiling = q * (scale * self.unit), k, mask, tiling
        side = min(tiling.block_q, tiling.n_queries, tiling.block_k, tiling.n_keys)
        self.future = ~causal_mask(side).to(q.device) if tiling.causal else None

    def __call__(self, rows: slice, columns: slice) -> torch.Tensor:
        scores = _matmul(self.q[rows], self.k[columns].T)
        if self.mask is not None:
            self._apply_mask(scores, rows, columns)
        if self.tiling.is_diagonal(rows, columns):
            square = scores[: scores.shape[1]]
            square.masked_fill_(self.future[: len(square), : scores.shape[1]], -torch.inf)
        return scores

    def _apply_mask(self, scores: torch.Tensor, rows: slice, columns: slice) -> None:
        tile = _of_tile(self.mask, rows, columns)
        if tile.dtype == torch.bool:
            scores.masked_fill_(~tile, -torch.inf)
        else:
            scores.add_(tile.to(scores.dtype))

    def exp_(self, difference: torch.Tensor) -> torch.Tensor:
        """exp of a difference of two scores, in place."""
        return (difference if self.unit == LOG2_E else difference.mul_(LOG2_E)).exp2_()


class _FlashAttention(torch.autograd.Function):
    """Head by head, so that a tile and what it needs stay in the cache."""

    @staticmethod
    def forward(q, k, v, mask, scale, tiling):
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        maximum = q.new_empty(*q.shape[:-1], 1, dtype=torch.promote_types(q.dtype, torch.float32))
        total = torch.empty_like(maximum)
        for head in product(*map(range, q.shape[:-2])):
            inputs = (_exact(x[head]).contiguous() for x in (q, k, v))  # oneDNN takes no overlapping rows
            of_head = _attend(*inputs, None if mask is None else mask[head], scale, tiling)
            for result, part in zip((out, maximum, total), of_head, strict=True):
                result[head] = part
        return out, maximum, total

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, v, mask, ctx.scale, ctx.tiling = inputs
        ctx.save_for_backward(q, k, v, mask, *output)
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out, *_):
        q, k, v, mask, out, maximum, total = ctx.saved_tensors
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for head in product(*map(range, q.shape[:-2])):
            inputs = (_exact(x[head]).contiguous() for x in (q, k, v, grad_out, out, maximum, total))
            of_head = _gradients(*inputs, None if mask is None else mask[head], ctx.scale, ctx.tiling)
            for grad, part in zip(grads, of_head, strict=True):
                grad[head] = part
        return *grads, None, None, None


def _attend(q, k, v, mask, scale, tiling) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One head: each row's mix of values so far (i dv), maximum and sum (i 1), rescaled as they grow.

    The maximum stays in the scores' unit: a rounding of it would be a factor on every weight that is made again.
    """
    maximum, total = q.new_full((len(q), 1), -torch.inf), q.new_zeros(len(q), 1)
    mix = q.new_zeros(len(q), v.shape[1])
    scores = _Scores(q, k, mask, scale, tiling)
    for rows, columns in tiling:
        tile = scores(rows, columns)
        new_maximum = torch.maximum(maximum[rows], tile.amax(dim=-1, keepdim=True))
        shift = _finite(new_maximum)
        weights = scores.exp_(tile.sub_(shift))
        kept = scores.exp_(maximum[rows] - shift)
        total[rows] = total[rows] * kept + weights.sum(dim=-1, keepdim=True)
        mix[rows].mul_(kept).add_(_matmul(weights, v[columns]))
        maximum[rows] = new_maximum
    return mix.div_(_at_least_1(total)), maximum, total


def _gradients(
    q, k, v, grad_out, out, maximum, total, mask, scale, tiling
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of one head's q (i d), k (j d) and v (j dv).

    With P = exp(S - maximum) / total made once more from the scores S, dV = Pᵀ dO and dP = dO Vᵀ. Through the softmax,
    dSᵢⱼ = Pᵢⱼ (dPᵢⱼ - Σⱼ Pᵢⱼ dPᵢⱼ), and the sum over the whole row needs no row: it is dOᵢ · Oᵢ. All of it is linear in
    dO, so dO is divided by the total, not P. (S - lse would lose the log of the total beside a large maximum.)
    """
    sees_nothing = maximum == -torch.inf
    q, grad_out = q.masked_fill(sees_nothing, 0), grad_out / _at_least_1(total)
    scores = _Scores(q, k, mask, scale, tiling)
    maximum = maximum.masked_fill(sees_nothing, torch.inf)  # exp(-inf - inf) = 0, and no NaN
    delta = (grad_out * out).sum(dim=-1, keepdim=True)
    grad_q, grad_k, grad_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows, columns in tiling:
        weights = scores.exp_(scores(rows, columns).sub_(maximum[rows]))
        grad_v[columns].add_(_matmul(weights.T, grad_out[rows]))
        grad_weights = _matmul(grad_out[rows], v[columns].T)
        grad_scores = grad_weights.sub_(delta[rows]).mul_(weights)
        grad_q[rows].add_(_matmul(grad_scores, k[columns]))
        grad_k[columns].add_(_matmul(grad_scores.T, q[rows]))
    return grad_q.mul_(scale), grad_k.mul_(scale), grad_v


def merge_attention(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Join what the same queries read from two sets of keys, as if they had read from both at once.

    lse = log(exp(lse_a) + exp(lse_b));  out = out_a exp(lse_a - lse) + out_b exp(lse_b - lse)

    Args:
        out_a, out_b: (... i dv).
        lse_a, lse_b: (... i), natural logsumexp, as ``flash_attention`` returns it with ``return_lse=True``.

    Returns:
        out (... i dv), in the dtype of the parts, and lse (... i), over the two key sets together.

    Raises:
        TypeError: a part is not a floating-point tensor, or the outputs' dtypes differ.
        ValueError: shapes do not fit, or an output requires grad while its lse carries none: the gradient would
            silently lack the share that runs through lse.

    Source: Milakov and Gimelshein: Online normalizer calculation for softmax (2018), section 3.1.
    """
    for name, out, lse in (("a", out_a, lse_a), ("b", out_b, lse_b)):
        queries = check_shape(out, "... i dv", name=f"out_{name}")["i"]
        check_shape(lse, "... i", name=f"lse_{name}", i=queries)
        if out.shape != out_a.shape or lse.shape != out_a.shape[:-1]:
            raise ValueError(
                f"out_{name} has shape {tuple(out.shape)} and lse_{name} {tuple(lse.shape)}; expected out_a's shape "
                f"{tuple(out_a.shape)} and the same without its last axis"
            )
        if out.dtype != out_a.dtype or not out.dtype.is_floating_point or not lse.dtype.is_floating_point:
            raise TypeError(
                f"out_{name} is {out.dtype} and lse_{name} {lse.dtype}; expected floating point, and both outputs alike"
            )
        if torch.is_grad_enabled() and out.requires_grad and not lse.requires_grad:
            raise ValueError(
                f"out_{name} requires grad and lse_{name} carries none, so the gradient of what is joined would be "
                "wrong: join under torch.no_grad(), or attend to all keys in one call"
            )
    lse = torch.logaddexp(lse_a, lse_b)
    shift = _finite(lse)
    share_a, share_b = ((part - shift).exp()[..., None] for part in (lse_a, lse_b))
    return (out_a * share_a + out_b * share_b).to(out_a.dtype), lse


@dataclass(frozen=True)
class Cost:
    """What the forward pass of one head costs.

    Attributes:
        flops: multiplications and additions of the two matrix products.
        bytes_held: memory beyond inputs and output.
        bytes_moved: read from and written to slow memory (a GPU's HBM).
    """

    flops: int
    bytes_held: int
    bytes_moved: int

    @property
    def intensity(self) -> float:
        """FLOPs per byte moved: a roofline's horizontal axis."""
        return self.flops / self.bytes_moved


def plain_cost(n: int, d: int, *, bytes_per_number: int = 4) -> Cost:
    """Attention that writes its scores and its weights to slow memory and reads both again.

    flops = 4 n² d;  held = 2 n² numbers;  moved = 4 n d + 4 n² numbers: q, k, v read and out written; scores and
    weights written and read.

    Args:
        n: queries, and as many keys.
        d: width of the head.
        bytes_per_number: 4 for float32, 2 for half precision.

    Raises:
        TypeError: an argument is no int.
        ValueError: an argument is less than 1.

    Source: FlashAttention (2022), algorithm 0 and theorem 2: Θ(n d + n²).
    """
    _check_sizes(n=n, d=d, bytes_per_number=bytes_per_number)
    return Cost(4 * n * n * d, 2 * n * n * bytes_per_number, (4 * n * d + 4 * n * n) * bytes_per_number)


def tiled_cost(n: int, d: int, fast_memory: int, *, bytes_per_number: int = 4) -> Cost:
    """Attention a tile at a time, the tiles as large as fast memory allows.

    Of M numbers in fast memory a block of keys takes a quarter: ⌈M / 4d⌉ keys, so T = ⌈n / ⌈M / 4d⌉⌉ blocks.
    flops = 4 n² d;  held = 2 n numbers: each row's maximum and sum;  moved = 3 n d + 2 n + T (3 n d + 4 n) numbers:
    k and v read once, the output and the two statistics begun; then, for each block of keys, every query read, and
    output and statistics read and written. With T ≈ 4 n d / M that is Θ(n² d² / M).

    Args:
        n: queries, and as many keys.
        d: width of the head.
        fast_memory: bytes (a GPU's SRAM, 192 KB for each multiprocessor of an A100).
        bytes_per_number: 4 for float32, 2 for half precision.

    Raises:
        TypeError: an argument is no int.
        ValueError: an argument is less than 1, or fast memory does not hold four rows of d numbers.

    Source: FlashAttention (2022), algorithm 1 and theorems 1 and 2.
    """
    _check_sizes(n=n, d=d, fast_memory=fast_memory, bytes_per_number=bytes_per_number)
    numbers = fast_memory // bytes_per_number
    if numbers < 4 * d:
        raise ValueError(
            f"fast_memory is {fast_memory} bytes, {numbers} numbers; expected at least 4 d = {4 * d}: a row each of "
            "q, k, v and the output"
        )
    visits = -(-n // -(-numbers // (4 * d)))
    moved = 3 * n * d + 2 * n + visits * (3 * n * d + 4 * n)
    return Cost(4 * n * n * d, 2 * n * bytes_per_number, moved * bytes_per_number)


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        check_count(size, name, least=1)
