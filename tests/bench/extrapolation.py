"""Which encoding reaches beyond the trained length? `python -m tests.bench.extrapolation` prints a JSON table.

Every row is one layer of causal attention, trained at n = 32 with three seeds and tested at 32, 64 and 128, on two
tasks: say the latest letter ("recency"), and say the token three places back ("distance"). Lesson 5 trains one live.
"""

import json
import sys
from collections.abc import Iterator
from functools import partial

import torch

from mha_lessons.positions import LearnedEncoding, SinusoidalEncoding, alibi_bias
from mha_lessons.transformer import CausalLM, token_loss, train

SEEDS = (0, 1, 2)
TRAINED_AT, TESTED_AT = 32, (32, 64, 128)
LETTERS, D_MODEL, NUM_HEADS, STEPS = 8, 64, 4, 1000
KINDS = {
    "none": lambda: {},
    "sinusoidal": lambda: {"position": SinusoidalEncoding(D_MODEL)},
    "learned": lambda: {"position": LearnedEncoding(max(TESTED_AT), D_MODEL)},
    "rotary": lambda: {"rotary": True},
    "rotary, d_k 8": lambda: {"rotary": True, "d_k": 8},
    "rotary, d_k 32": lambda: {"rotary": True, "d_k": 32},
    "ALiBi": lambda: {"score_bias": partial(alibi_bias, NUM_HEADS)},
}

Batch = tuple[torch.Tensor, torch.Tensor]


def latest_letter(generator: torch.Generator, n: int, b: int = 32) -> Batch:
    """Letters 1 to 8 among dots (0), a quarter of the places; at each dot, say the last letter before it."""
    letters = torch.randint(1, LETTERS + 1, (b, n), generator=generator)
    tokens = torch.where(torch.rand(b, n, generator=generator) < 0.25, letters, 0)
    last = torch.where(tokens > 0, torch.arange(n), -1).cummax(dim=1).values
    is_asked = (tokens == 0) & (last >= 0)
    return tokens, torch.where(is_asked, tokens.gather(1, last.clamp(min=0)), -100)


def three_back(generator: torch.Generator, n: int, b: int = 32) -> Batch:
    """Eight tokens at random; at each place, say the token three places before it."""
    tokens = torch.randint(LETTERS, (b, n), generator=generator)
    return tokens, torch.cat([torch.full((b, 3), -100), tokens[:, :-3]], dim=1)


TASKS = {"recency": latest_letter, "distance": three_back}


@torch.no_grad()
def accuracy(model: CausalLM, draw: partial[Batch], n: int) -> float:
    tokens, targets = draw(torch.Generator().manual_seed(100), n, b=128)
    is_asked = targets >= 0
    return round((model(tokens).argmax(-1) == targets)[is_asked].float().mean().item(), 4)


def measure(task: str, kind: str, seed: int) -> list[float]:
    """The accuracies at ``TESTED_AT``."""
    torch.manual_seed(seed)
    model = CausalLM(LETTERS + 1, D_MODEL, NUM_HEADS, 1, **KINDS[kind]())
    train(model, partial(TASKS[task], n=TRAINED_AT), token_loss, steps=STEPS, lr=5e-3, seed=seed)
    return [accuracy(model, TASKS[task], n) for n in TESTED_AT]


def rows(tasks: list[str]) -> Iterator[dict]:
    for task in tasks:
        for kind in KINDS:
            yield {"task": task, "kind": kind, "accuracy": [measure(task, kind, seed) for seed in SEEDS]}


def main(tasks: list[str]) -> None:
    torch.set_num_threads(1)
    table = ",\n".join(json.dumps(row) for row in rows(tasks or list(TASKS)))
    print(f'{{"tested_at": {json.dumps(TESTED_AT)}, "rows": [\n{table}\n]}}')


if __name__ == "__main__":
    main(sys.argv[1:])
