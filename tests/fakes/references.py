"""References made of nothing but numbers: distributions around given logits, with a known distance between them."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Callable, Sequence

from ds41ctl.core import reference
from ds41ctl.core.reference import Layers, Reference, Scores

VOCABULARY = 40


def logprobs(logits: Sequence[float]) -> list[float]:
    total = math.log(sum(math.exp(value) for value in logits))
    return [value - total for value in logits]


def prompt(
    name: str, tokens: int, seed: int, shift: Callable[[int, int], float] = lambda row, token: 0.0, *, k: int = 8,
    set: str = "prose",
) -> Scores:  # fmt: skip
    """A prompt of random distributions; `shift` is added to the logit of (row, token)."""
    draw = random.Random(seed)
    ids = [draw.randrange(VOCABULARY) for _ in range(tokens)]
    rows = []
    for row in range(tokens - 1):
        logits = [draw.gauss(0, 2) + shift(row, token) for token in range(VOCABULARY)]
        known = dict(enumerate(logprobs(logits)))
        best = sorted(known, key=lambda token: -known[token])[:k]
        rows.append({token: known[token] for token in (*best, ids[row + 1])})
    return reference.scores(set, name, ids, rows, k)


def made(
    *prompts: Scores, k: int = 8, kind: str = "oracle", layers: Layers | None = None, sha256: str = ""
) -> Reference:
    head = {"kind": kind, "k": k, "settings": {"activations": "fp32"}, "pieces": {str(n): f"t{n} " for n in range(9)}}
    return Reference(head, prompts, layers, sha256)


def hidden(layers: int, positions: int, width: int, seed: int, noise: float = 0.0) -> Layers:
    """Hidden states; `noise` grows with the layer."""
    draw, extra = random.Random(seed), random.Random(seed + 1)
    values = array("f")
    for layer in range(layers):
        values.extend(draw.gauss(0, 1) + noise * layer * extra.gauss(0, 1) for _ in range(positions * width))
    return Layers(layers, positions, width, values)
