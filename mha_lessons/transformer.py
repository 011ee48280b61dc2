"""Blocks of attention and MLP, two tiny models of tokens, and the one loop that trains everything in the lessons."""

import math
from collections.abc import Callable, Iterable

import torch
from torch import nn

from mha_lessons.attention import MultiHeadAttention
from mha_lessons.masks import causal_mask
from mha_lessons.shapes import check_shape


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): tokens meet, then each token thinks alone.

    The norms stand before attention and MLP, so that the sum from layer to layer stays untouched (pre-norm).

    Args:
        d_model: width e.
        num_heads: heads h.
        d_k: width of a head; None: d_model / num_heads.
        mlp_ratio: width of the MLP's hidden layer over d_model; 0 leaves the MLP out.
        dropout: chance to drop a weight, and an entry of what is added to x, while training.
        rotary: turn queries and keys by their position.

    Attributes:
        attention: the ``MultiHeadAttention``. mlp: Linear, GELU, Linear, or None. norm_1, norm_2: ``nn.LayerNorm``.

    Raises:
        ValueError: sizes that ``MultiHeadAttention`` refuses, or a negative mlp_ratio.

    Source: Xiong et al.: On Layer Normalization in the Transformer Architecture (2020), figure 1b.
    Oracle: ``nn.TransformerEncoderLayer(norm_first=True, activation="gelu")``.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        d_k: int | None = None,
        mlp_ratio: float = 4,
        dropout: float = 0.0,
        rotary: bool = False,
    ) -> None:
        super().__init__()
        if mlp_ratio < 0:
            raise ValueError(f"mlp_ratio is {mlp_ratio}; expected 0 (no MLP) or more")
        self.norm_1 = nn.LayerNorm(d_model)
        self.attention = MultiHeadAttention(d_model, num_heads, d_k=d_k, dropout=dropout, rotary=rotary)
        self.dropout = nn.Dropout(dropout)
        self.norm_2 = self.mlp = None
        if hidden := int(mlp_ratio * d_model):
            self.norm_2 = nn.LayerNorm(d_model)
            self.mlp = nn.Sequential(nn.Linear(d_model, hidden), nn.GELU(), nn.Linear(hidden, d_model))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Let the tokens meet, and return where each looked.

        Args:
            x: (b n e).
            mask: broadcastable to (b h n n), as in ``MultiHeadAttention.forward``.

        Returns:
            (b n e), and weights (b h n n).
        """
        seen, weights = self.attention(self.norm_1(x), mask=mask)
        x = x + self.dropout(seen)
        if self.mlp is not None:
            x = x + self.dropout(self.mlp(self.norm_2(x)))
        return x, weights


class Transformer(nn.Module):
    """Tokens in, for each position a score for every token out; every position may look at every other.

    What it knows of order is up to three arguments, any of which may be left out: ``position`` is added to the
    tokens, ``rotary`` turns queries and keys, ``score_bias`` is added to the scores.

    Token vectors start with variance 1 / d_model and are multiplied by √d_model on the way in: they are then as
    large as a sinusoidal encoding, and small enough to serve as a head's weights.

    Args:
        vocab_size: number of tokens v.
        d_model: width e.
        num_heads: heads h of each layer.
        num_layers: number of blocks.
        d_k, mlp_ratio, dropout, rotary: as in ``Block``.
        position: (b n e) -> (b n e), such as ``SinusoidalEncoding(d_model)``.
        score_bias: n -> (h n n), such as ``functools.partial(alibi_bias, num_heads)``.
        tied: the head uses the token vectors themselves as its weights.

    Attributes:
        embedding, position, blocks, norm, head.

    Raises:
        ValueError: sizes that ``Block`` refuses.

    Source: Vaswani et al.: Attention Is All You Need (2017), section 3.4 for √d_model and the tied head.
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        num_heads: int,
        num_layers: int,
        *,
        d_k: int | None = None,
        mlp_ratio: float = 4,
        dropout: float = 0.0,
        rotary: bool = False,
        position: nn.Module | None = None,
        score_bias: Callable[[int], torch.Tensor] | None = None,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, d_model)
        nn.init.normal_(self.embedding.weight, std=d_model**-0.5)
        self.position, self.score_bias = position, score_bias
        options = {"d_k": d_k, "mlp_ratio": mlp_ratio, "dropout": dropout, "rotary": rotary}
        self.blocks = nn.ModuleList(Block(d_model, num_heads, **options) for _ in range(num_layers))
        self.norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, vocab_size, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(
        self, tokens: torch.Tensor, mask: torch.Tensor | None = None, *, return_weights: bool = False
    ) -> torch.Tensor | tuple[torch.Tensor, list[torch.Tensor]]:
        """Score every token of the vocabulary at every position.

        Args:
            tokens: (b n) int64, 0 ... vocab_size - 1.
            mask: bool, broadcastable to (b h n n), True = may attend.
            return_weights: return the weights too.

        Returns:
            logits (b n v); with ``return_weights`` also a list of weights (b h n n), one for each layer.

        Raises:
            TypeError: tokens are not int64.
            ValueError: tokens do not have the axes (b n), or one lies outside the vocabulary.
        """
        self._check_tokens(tokens)
        x = self.embedding(tokens) * self.embedding.embedding_dim**0.5
        if self.position is not None:
            x = self.position(x)
        if self.score_bias is not None:
            bias = self.score_bias(tokens.shape[1]).to(x)
            mask = bias if mask is None else torch.where(mask, bias, -torch.inf)
        weights = []
        for block in self.blocks:
            x, seen = block(x, mask)
            weights.append(seen)
        logits = self.head(self.norm(x))
        return (logits, weights) if return_weights else logits

    def _check_tokens(self, tokens: torch.Tensor) -> None:
        check_shape(tokens, "b n", name="tokens")
        if tokens.dtype != torch.int64:
            raise TypeError(f"tokens are {tokens.dtype}; expected torch.int64: use tokens.long()")
        outside = tokens[(tokens < 0) | (tokens >= self.embedding.num_embeddings)]
        if outside.numel():
            raise ValueError(f"a token is {int(outside[0])}; expected 0 to {self.embedding.num_embeddings - 1}")


class CausalLM(Transformer):
    """A ``Transformer`` in which a position sees itself and what stands before it, so that it can learn to predict."""

    def forward(
        self, tokens: torch.Tensor, *, return_weights: bool = False
    ) -> torch.Tensor | tuple[torch.Tensor, list[torch.Tensor]]:
        """As ``Transformer.forward`` with a causal mask."""
        check_shape(tokens, "b n", name="tokens")
        mask = causal_mask(tokens.shape[1]).to(tokens.device)
        return super().forward(tokens, mask, return_weights=return_weights)


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats over all positions but those whose target is -100.

    Args:
        logits: (... v).
        targets: (...) int64; -100 leaves a position out.

    Returns:
        a scalar.

    Raises:
        ValueError: targets do not have the axes of logits without the last one.

    Oracle: ``F.cross_entropy``, which wants the classes on axis 1.
    """
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"targets have shape {tuple(targets.shape)} and logits {tuple(logits.shape)}; "
            f"expected targets of shape {tuple(logits.shape[:-1])}, one class for each position"
        )
    return nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def train(
    model: nn.Module,
    draw: Callable[[torch.Generator], tuple[torch.Tensor, torch.Tensor]],
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    *,
    steps: int,
    lr: float,
    weight_decay: float = 0.01,
    betas: tuple[float, float] = (0.9, 0.98),
    warmup: float = 0.1,
    clip: float = 1.0,
    seed: int = 0,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> list[float]:
    """Fit a model with AdamW: the loop behind everything that is trained in the lessons.

    Weight decay pulls on the weights of ``nn.Linear`` alone, as usual: biases, norms, embeddings and positions are
    left free. On one machine the same seed gives the same numbers, dropout included.

    Args:
        model: changed in place, and left in evaluation mode.
        draw: makes one batch (inputs, targets) with the random numbers of the generator it is given.
        loss_fn: (model(inputs), targets) -> scalar.
        steps: number of batches.
        lr: the highest learning rate, see ``warmup_cosine``.
        weight_decay, betas: of ``torch.optim.AdamW``.
        warmup: share of the steps over which the learning rate rises, 0 or more and less than 1.
        clip: longest gradient, over all parameters together; a longer one is scaled down to it.
        seed: of the generator for batches, and of dropout; PyTorch's own random state stays as it was.
        progress: wraps the range of steps, such as ``functools.partial(mha_lessons.progress.progress,
            description="training")``.

    Returns:
        the loss of each step, before the step was taken.

    Raises:
        ValueError: steps is less than 1, warmup is no such share, or the loss is not finite.
    """
    if steps < 1 or not 0 <= warmup < 1:
        raise ValueError(f"steps is {steps} and warmup is {warmup}; expected 1 or more, and 0 <= share < 1")
    optimizer = torch.optim.AdamW(_parameter_groups(model, weight_decay), betas=betas)
    generator = torch.Generator().manual_seed(seed)
    losses = []
    model.train()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for step in progress(range(steps)):
            for group in optimizer.param_groups:
                group["lr"] = lr * warmup_cosine((step + 0.5) / steps, warmup)
            inputs, targets = draw(generator)
            loss = loss_fn(model(inputs), targets)
            losses.append(loss.item())
            if not math.isfinite(losses[-1]):
                raise ValueError(f"the loss is {losses[-1]} at step {step}: lower lr = {lr}, or check the batch")
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    model.eval()
    return losses


def _parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    decayed = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    return [
        {"params": [p for p in model.parameters() if id(p) in decayed], "weight_decay": weight_decay},
        {"params": [p for p in model.parameters() if id(p) not in decayed], "weight_decay": 0.0},
    ]


def warmup_cosine(done: float, warmup: float) -> float:
    """The learning rate's factor: up in a straight line, then down along half a cosine wave.

    Args:
        done: share of all steps that are done, 0 to 1.
        warmup: share of all steps that the rise takes, 0 or more and less than 1.

    Returns:
        0 to 1.

    Source: Loshchilov and Hutter: SGDR (2017), equation 5, for the cosine.
    """
    if done < warmup:
        return done / warmup
    return 0.5 * (1 + math.cos(math.pi * (done - warmup) / (1 - warmup)))
