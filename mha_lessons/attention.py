"""Attention from the formula up: scaled dot product, splitting into heads, the whole layer, and its cache."""

from numbers import Real

import einops
import torch
from torch import nn

from mha_lessons.masks import check_mask, without_unseen
from mha_lessons.positions import rotary
from mha_lessons.shapes import check_count, check_qkv, check_shape


def scaled_dot_product_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    dropout_p: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(q kᵀ / √d_k) v: each query asks every key, and takes the average of the values by the answers.

    A query with no key to attend to gets output 0 and weights 0, and every gradient stays finite. With a bool
    mask, what stands in k and v at positions hidden from every query, NaN included, reaches neither the output
    nor a gradient. Half precision is computed in float32 inside.

    Args:
        q: (... i d) queries.
        k: (... j d) keys.
        v: (... j dv) values.
        mask: broadcastable to (... i j). bool: True = may attend. Floating point: added to the scores.
        scale: factor on q kᵀ; None: 1/√d.
        dropout_p: chance that a weight is dropped, 0 to 1; applied whenever it is above 0.

    Returns:
        out (... i dv) and weights (... i j), the weights before dropout, both in the dtype of q.

    Raises:
        TypeError: not floating point, dtypes differ, a mask is neither bool nor floating point, or dropout_p is no
            number.
        ValueError: shapes do not fit, dropout_p lies outside 0 to 1, or a float mask holds only 0 and 1 (a keep mask
            in disguise: added, it would hide nothing).

    Source: Vaswani et al.: Attention Is All You Need (2017), equation 1.
    Oracle: ``torch.nn.functional.scaled_dot_product_attention``.
    """
    check_qkv(q, k, v)
    _check_chance(dropout_p, "dropout_p")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    exact = torch.promote_types(q.dtype, torch.float32)
    if mask is not None:
        mask = check_mask(mask, q, k)
        if mask.dtype == torch.bool:
            q, k, v = without_unseen(q, k, v, sees=mask.any(dim=-1), seen=mask.any(dim=-2))
    # The scale goes on q: the product alone can overflow, and q is smaller than the scores.
    scores = (q.to(exact) * scale) @ k.to(exact).transpose(-2, -1)
    weights = scores.softmax(dim=-1) if mask is None else _masked_softmax(scores, mask)
    dropped = nn.functional.dropout(weights, dropout_p) if dropout_p else weights
    return (dropped @ v.to(exact)).to(q.dtype), weights.to(q.dtype)


def _masked_softmax(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """softmax over the keys that may be seen; a row that sees nothing is 0 and passes no gradient.

    Such a row is made finite before the softmax. To mend it afterwards (nan_to_num) would mend the forward pass
    only: the gradient of the softmax would still be NaN (pytorch/pytorch#41508).
    """
    is_bool = mask.dtype == torch.bool
    scores = scores.masked_fill(~mask, -torch.inf) if is_bool else scores + mask.to(scores.dtype)
    sees_nothing = (scores == -torch.inf).all(dim=-1, keepdim=True)
    return scores.masked_fill(sees_nothing, 0.0).softmax(dim=-1).masked_fill(sees_nothing, 0.0)


def split_heads(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Cut the width into heads and move the heads before the positions.

    Args:
        x: (... n (h d)); usually (b n (h d)).
        num_heads: h; must divide the width.

    Returns:
        (... h n d).

    Raises:
        TypeError: num_heads is no int.
        ValueError: the heads do not divide the width.
    """
    width = check_shape(x, "... n e", name="x")["e"]
    _check_divides(num_heads, width, "num_heads", "the width of x")
    return einops.rearrange(x, "... n (h d) -> ... h n d", h=num_heads)


def merge_heads(x: torch.Tensor) -> torch.Tensor:
    """Put the heads back side by side: the inverse of ``split_heads``.

    Args:
        x: (... h n d).

    Returns:
        (... n (h d)).

    Raises:
        ValueError: fewer than three axes.
    """
    check_shape(x, "... h n d", name="x")
    return einops.rearrange(x, "... h n d -> ... n (h d)")


def _check_divides(part: int, whole: int, part_name: str, whole_name: str) -> None:
    check_count(part, part_name, least=1)
    check_count(whole, whole_name, least=1)
    if whole % part:
        raise ValueError(f"{part_name} is {part} and {whole_name} is {whole}; expected the first to divide the second")


def _check_chance(value: float, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is {value!r}, a {type(value).__name__}; expected a number from 0 to 1")
    if not 0 <= value <= 1:
        raise ValueError(f"{name} is {value}; expected a chance from 0 to 1")


class KVCache:
    """The keys and values of all positions so far, so that decoding computes each of them once.

    It is the one argument that ``MultiHeadAttention.forward`` fills. A call that raises leaves it as it was.

    Attributes:
        k, v: (... h n d) for the key/value heads, or None while the cache is empty.
    """

    def __init__(self) -> None:
        self.k: torch.Tensor | None = None
        self.v: torch.Tensor | None = None

    def __len__(self) -> int:
        """How many positions are held."""
        return 0 if self.k is None else self.k.shape[-2]

    def __repr__(self) -> str:
        return f"KVCache({len(self)} positions)"

    def joined(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The cached keys and values with the new ones behind them; the cache itself does not change.

        Args:
            k, v: (... h n d), the new positions.

        Returns:
            k and v over all positions.

        Raises:
            TypeError: the dtype differs from that of the cached ones.
            ValueError: other axes than the positions differ.
        """
        if self.k is None:
            return k, v
        if self.k.dtype != k.dtype:
            raise TypeError(f"the cache holds {self.k.dtype} and the new keys are {k.dtype}; start a new KVCache")
        if (*self.k.shape[:-2], self.k.shape[-1]) != (*k.shape[:-2], k.shape[-1]):
            raise ValueError(
                f"the cache holds keys of shape {tuple(self.k.shape)} and the new ones are {tuple(k.shape)}; "
                "expected the same batch, heads and width (... h n d): start a new KVCache for another batch or layer"
            )
        return torch.cat([self.k, k], dim=-2), torch.cat([self.v, v], dim=-2)


def _autocast_joins(x: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether autocast is on and brings both to one dtype, as it does with all of floating point but float64."""
    device = x.device.type
    is_on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return is_on and x.dtype.is_floating_point and torch.float64 not in (x.dtype, dtype)


class MultiHeadAttention(nn.Module):
    """Several attentions side by side, each in its own slice of the width, mixed by one last matrix.

    headₕ = attention(x W_Qʰ, x W_Kʰ, x W_Vʰ);  out = concat(head₁ ... head_H) W_O

    Args:
        d_model: width e of inputs and outputs.
        num_heads: query heads h.
        d_k: width of a head, for keys and values alike; None: d_model / num_heads, which must divide.
        num_kv_heads: heads of keys and values, which must divide num_heads; query head h uses key/value head
            h // (num_heads / num_kv_heads). None: as many as query heads. 1 is multi-query attention.
        bias: whether the four projections have one.
        dropout: chance that a weight is dropped while training.
        rotary: turn queries and keys by their position; d_k must be even. Both are counted from 0, the new ones of a
            cache from its length: so in cross-attention the first query stands at the first key, while ``causal_mask``
            lets the last query stand at the last key.

    Attributes:
        q_proj, k_proj, v_proj, out_proj: ``nn.Linear``.

    Raises:
        TypeError: a size is no int, or dropout no number.
        ValueError: sizes are not positive, do not divide, or dropout lies outside 0 to 1.

    Source: Vaswani et al.: Attention Is All You Need (2017), section 3.2.2; Ainslie et al.: GQA (2023).
    Oracle: ``torch.nn.MultiheadAttention`` with ``average_attn_weights=False``.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        d_k: int | None = None,
        num_kv_heads: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        rotary: bool = False,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if d_k is None:
            _check_divides(num_heads, d_model, "num_heads", "d_model")
            d_k = d_model // num_heads
        check_count(d_model, "d_model", least=1)
        check_count(d_k, "d_k", least=1)
        _check_divides(num_kv_heads, num_heads, "num_kv_heads", "num_heads")
        _check_chance(dropout, "dropout")
        if rotary and d_k % 2:
            raise ValueError(f"d_k is {d_k}; rotary turns pairs of channels, so expected an even width of a head")
        self.d_model, self.num_heads, self.num_kv_heads, self.d_k = d_model, num_heads, num_kv_heads, d_k
        self.dropout, self.rotary = dropout, rotary
        self.q_proj = nn.Linear(d_model, num_heads * d_k, bias)
        self.k_proj = nn.Linear(d_model, num_kv_heads * d_k, bias)
        self.v_proj = nn.Linear(d_model, num_kv_heads * d_k, bias)
        self.out_proj = nn.Linear(num_heads * d_k, d_model, bias)
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            # Xavier keeps the variance: unit-variance inputs give queries and keys of about unit variance.
            nn.init.xavier_uniform_(projection.weight)
            if bias:
                nn.init.zeros_(projection.bias)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
        value: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        *,
        cache: KVCache | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend, and return what was read and from where.

        Args:
            query: (... i e); usually (b i e).
            key: (... j e); None: the query, which is self-attention.
            value: (... j e); None: the key.
            mask: broadcastable to (... h i j): bool with True = may attend, or floating point, which is added. Hidden
                content reaches no output; NaN in padding still reaches the gradients of the projections, which read
                every position (0 · NaN is NaN): fill padding with 0.
                With a cache it spans the cached and the new keys. No mask is made for you: decode one token at a
                time without one, or several with ``causal_mask(n_new, n_all)``.
            cache: filled with the new keys and values.

        Returns:
            out (... i e) and weights (... h i j), before dropout.

        Raises:
            TypeError: inputs are not tensors, or not of the layer's dtype (autocast may convert them), or the cache is
                no ``KVCache`` or of another dtype.
            ValueError: shapes do not fit. The cache is then unchanged.
        """
        key = query if key is None else key
        value = key if value is None else value
        check_shape(query, "... i e", name="query", e=self.d_model)
        keys = check_shape(key, "... j e", name="key", e=self.d_model)
        check_shape(value, "... j e", name="value", j=keys["j"], e=self.d_model)
        self._check_dtypes(query=query, key=key, value=value)
        if not isinstance(cache, KVCache | None):
            raise TypeError(f"cache is a {type(cache).__name__}; expected a KVCache, made once for each layer")
        q = split_heads(self.q_proj(query), self.num_heads)
        k = split_heads(self.k_proj(key), self.num_kv_heads)
        v = split_heads(self.v_proj(value), self.num_kv_heads)
        if self.rotary:
            offset = 0 if cache is None else len(cache)
            q, k = rotary(q, offset=offset), rotary(k, offset=offset)
        if cache is not None:
            k, v = cache.joined(k, v)
        out, weights = scaled_dot_product_attention(
            q,
            self._for_each_query_head(k),
            self._for_each_query_head(v),
            mask,
            dropout_p=self.dropout if self.training else 0.0,
        )
        out = self.out_proj(merge_heads(out))
        if cache is not None:  # nothing can fail any more
            cache.k, cache.v = k, v
        return out, weights

    def _check_dtypes(self, **inputs: torch.Tensor) -> None:
        expected = self.q_proj.weight.dtype
        for name, x in inputs.items():
            if x.dtype != expected and not _autocast_joins(x, expected):
                raise TypeError(f"{name} is {x.dtype} and the layer is {expected}; convert one: x.to({expected})")

    def _for_each_query_head(self, x: torch.Tensor) -> torch.Tensor:
        """(... kv_heads n d) -> (... h n d): neighbours share a key/value head."""
        group = self.num_heads // self.num_kv_heads
        return x if group == 1 else x.repeat_interleave(group, dim=-3)

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention) -> "MultiHeadAttention":
        """A layer with a copy of PyTorch's weights; given (b n e) inputs, the two then agree.

        Args:
            module: any ``nn.MultiheadAttention`` with one width for queries, keys and values. Its
                ``batch_first`` says how it reads its inputs; ours always reads (b n e).

        Returns:
            A layer of the same dtype, device and training mode; what was frozen stays frozen.

        Raises:
            TypeError: not an ``nn.MultiheadAttention``.
            ValueError: it has kdim, vdim, add_bias_kv or add_zero_attn, which this layer does not.
        """
        if not isinstance(module, nn.MultiheadAttention):
            raise TypeError(f"module is a {type(module).__name__}; expected an nn.MultiheadAttention")
        if module.kdim != module.embed_dim or module.vdim != module.embed_dim:
            raise ValueError(
                f"module has kdim {module.kdim} and vdim {module.vdim} beside embed_dim {module.embed_dim}; this layer "
                "projects keys and values from d_model alone: project them to d_model first"
            )
        if module.bias_k is not None or module.bias_v is not None or module.add_zero_attn:
            option = "add_zero_attn" if module.add_zero_attn else "add_bias_kv"
            raise ValueError(
                f"module was made with {option}, which appends a key that no token has; this layer has none"
            )
        weight, bias = module.in_proj_weight, module.in_proj_bias
        ours = cls(module.embed_dim, module.num_heads, bias=bias is not None, dropout=module.dropout)
        ours = ours.to(weight).train(module.training)
        with torch.no_grad():
            for i, projection in enumerate((ours.q_proj, ours.k_proj, ours.v_proj)):
                projection.weight.copy_(weight.chunk(3)[i]).requires_grad_(weight.requires_grad)
                if bias is not None:
                    projection.bias.copy_(bias.chunk(3)[i]).requires_grad_(bias.requires_grad)
            ours.out_proj.load_state_dict(module.out_proj.state_dict())
            for name, parameter in module.out_proj.named_parameters():
                ours.out_proj.get_parameter(name).requires_grad_(parameter.requires_grad)
        return ours
