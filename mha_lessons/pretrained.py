"""A language model that was really trained, small enough to look into: all-MiniLM-L6-v2."""

import functools
import unicodedata
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mha_lessons.attention import MultiHeadAttention
from mha_lessons.data import load_minilm

D_MODEL, NUM_HEADS, NUM_LAYERS, MAX_TOKENS = 384, 12, 6, 64


class EncoderLayer(nn.Module):
    """One layer of BERT: attention, then a network for each position; after each, add and normalise (post-norm)."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(D_MODEL, NUM_HEADS)
        self.attention_norm = nn.LayerNorm(D_MODEL, eps=1e-12)
        self.mlp = nn.Sequential(nn.Linear(D_MODEL, 4 * D_MODEL), nn.GELU(), nn.Linear(4 * D_MODEL, D_MODEL))
        self.mlp_norm = nn.LayerNorm(D_MODEL, eps=1e-12)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(b n e) -> the layer's output (b n e) and its weights (b h i j)."""
        out, weights = self.attention(x)
        x = self.attention_norm(x + out)
        return self.mlp_norm(x + self.mlp(x)), weights


class MiniLM(nn.Module):
    """An encoder of 6 layers, 12 heads and d_model 384, trained to give sentences of like meaning like vectors.

    ``MiniLM.load()`` makes it with its trained weights, frozen. ``layers[3].attention`` is a ``MultiHeadAttention``;
    applied to ``layer_inputs(tokens)[3]`` it gives that layer's weights. Layers and heads count from 0.

    Source: Devlin et al.: BERT (2019); Wang et al.: MiniLM (2020); Reimers and Gurevych: Sentence-BERT (2019).
    Oracle: ``torch.nn.TransformerEncoderLayer`` for a layer.
    """

    def __init__(self, vocabulary: Sequence[str]) -> None:
        super().__init__()
        self.ids = {piece: i for i, piece in enumerate(vocabulary)}
        self.words = nn.Embedding(len(vocabulary), D_MODEL)
        self.positions = nn.Embedding(MAX_TOKENS, D_MODEL)
        self.segments = nn.Embedding(2, D_MODEL)  # BERT reads sentence pairs; a lone sentence is segment 0
        self.norm = nn.LayerNorm(D_MODEL, eps=1e-12)
        self.layers = nn.ModuleList(EncoderLayer() for _ in range(NUM_LAYERS))

    @classmethod
    @functools.cache
    def load(cls) -> "MiniLM":
        """Return the trained model, read once and then shared.

        Raises:
            FileNotFoundError, ValueError: its files under data/ are missing or damaged.
        """
        weights, vocabulary = load_minilm()
        with torch.random.fork_rng(devices=[]):  # a new module draws; a lesson's seed must not notice
            model = cls(vocabulary)
        model.load_state_dict({_our_name(name): weight for name, weight in weights.items()}, assign=True)
        return model.eval().requires_grad_(False)

    def tokenize(self, sentence: str) -> list[str]:
        """Cut a sentence into pieces of the vocabulary, as BERT does: lower case, no accents, longest piece first.

        A piece that continues a word begins with ##. Text never becomes a special token: "[MASK]" is three pieces.
        The vocabulary holds BERT's first 8000 pieces, so a rare word falls into more pieces than in the full model.

        Args:
            sentence: any text.

        Returns:
            the pieces between [CLS] and [SEP]; a word that no pieces can spell is [UNK].

        Raises:
            TypeError: no string.
            ValueError: more than 64 pieces come out.
        """
        if not isinstance(sentence, str):
            raise TypeError(f"sentence is a {type(sentence).__name__}; expected a str")
        tokens = ["[CLS]", *(p for word in _split_words(sentence) for p in self._pieces(word)), "[SEP]"]
        if len(tokens) > MAX_TOKENS:
            raise ValueError(
                f"the sentence has {len(tokens)} pieces with [CLS] and [SEP]; expected at most {MAX_TOKENS}: shorten it"
            )
        return tokens

    def embed(self, tokens: Sequence[str]) -> Tensor:
        """Look up what each token means by itself, without its position: the same token, the same vector.

        The vectors have passed the model's own first LayerNorm, as they do inside it. The raw rows are so short,
        about 1.1, that untrained projections would give nearly uniform weights.

        Args:
            tokens: n pieces of the vocabulary.

        Returns:
            (n e) float32.

        Raises:
            TypeError: a sentence came in place of tokens.
            ValueError: a token is not in the vocabulary.
        """
        return self.norm(self._look_up(tokens))

    def layer_inputs(self, tokens: Sequence[str]) -> list[Tensor]:
        """Return what each layer receives: 6 tensors (1 n e). Args and Raises as for ``forward``."""
        return self._run(tokens)[0][:-1]

    def forward(self, tokens: Sequence[str]) -> tuple[Tensor, list[Tensor]]:
        """Run the whole model on one sentence.

        Args:
            tokens: 1 to 64 pieces of the vocabulary, as ``tokenize`` gives them.

        Returns:
            the last layer's output (1 n e), and the weights (1 h i j) of each of the 6 layers.

        Raises:
            TypeError: a sentence came in place of tokens.
            ValueError: a token is not in the vocabulary, or there are none or more than 64.
        """
        states, weights = self._run(tokens)
        return states[-1], weights

    def _run(self, tokens: Sequence[str]) -> tuple[list[Tensor], list[Tensor]]:
        """Every state from the first layer's input to the last one's output, and every layer's weights."""
        content = self._look_up(tokens)
        if not 1 <= len(tokens) <= MAX_TOKENS:
            raise ValueError(f"{len(tokens)} tokens came; expected 1 to {MAX_TOKENS}")
        states, all_weights = [self.norm(content + self.positions.weight[: len(tokens)])[None]], []
        for layer in self.layers:
            x, weights = layer(states[-1])
            states.append(x)
            all_weights.append(weights)
        return states, all_weights

    def _look_up(self, tokens: Sequence[str]) -> Tensor:
        """(n e): each token's row, plus that of segment 0."""
        if isinstance(tokens, str):
            raise TypeError(f"tokens is the str {tokens!r}; expected a list of pieces: use tokenize(sentence)")
        unknown = [token for token in tokens if token not in self.ids]
        if unknown:
            raise ValueError(f"not in the vocabulary: {unknown}; expected pieces that tokenize(sentence) gives")
        ids = torch.tensor([self.ids[token] for token in tokens], dtype=torch.int64)
        return self.words(ids) + self.segments.weight[0]

    def _pieces(self, word: str) -> list[str]:
        """Spell a word with the longest pieces that fit, from the left; [UNK] if that fails (WordPiece)."""
        if len(word) > 100:  # as in BERT: such a word is a web address or noise
            return ["[UNK]"]
        pieces, start = [], 0
        while start < len(word):
            mark = "##" if start else ""
            ends = range(len(word), start, -1)
            end = next((end for end in ends if mark + word[start:end] in self.ids), None)
            if end is None:
                return ["[UNK]"]
            pieces.append(mark + word[start:end])
            start = end
        return pieces


def _split_words(sentence: str) -> list[str]:
    """Lower the case, take off the accents, and cut at spaces and around every punctuation sign and ideograph."""
    plain = unicodedata.normalize("NFD", sentence.lower())
    return "".join(map(_spaced, plain)).split()


def _spaced(char: str) -> str:
    """A character as the word splitter should see it: itself, apart from its neighbours, a space, or nothing."""
    category = unicodedata.category(char)
    if char in "\t\n\r" or category.startswith("Z"):
        return " "
    if category.startswith("C") or category == "Mn" or char == "\ufffd":
        return ""
    is_sign = category.startswith("P") or char in "$+<=>^`|~"  # BERT counts all of ASCII's signs as punctuation
    is_ideograph = unicodedata.name(char, "").startswith(("CJK UNIFIED", "CJK COMPAT"))
    return f" {char} " if is_sign or is_ideograph else char


def _our_name(name: str) -> str:
    """Turn a parameter's name in the published model into its name here."""
    renamed = {
        "encoder.layer": "layers",
        "attention.self.query": "attention.q_proj",
        "attention.self.key": "attention.k_proj",
        "attention.self.value": "attention.v_proj",
        "attention.output.dense": "attention.out_proj",
        "attention.output.LayerNorm": "attention_norm",
        "intermediate.dense": "mlp.0",
        "output.dense": "mlp.2",
        "output.LayerNorm": "mlp_norm",
        "embeddings.word_embeddings": "words",
        "embeddings.position_embeddings": "positions",
        "embeddings.token_type_embeddings": "segments",
        "embeddings.LayerNorm": "norm",
    }
    for theirs, ours in renamed.items():  # in this order: "output.dense" is also the end of a longer name
        name = name.replace(theirs, ours)
    return name
