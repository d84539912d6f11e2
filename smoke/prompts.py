"""Prompts for load: texts of a wanted length, never twice the same, so that no prefix cache can help unasked."""

from __future__ import annotations

import random
import secrets
from dataclasses import dataclass, field

CHARS_MIN, CHARS_MAX = 1.0, 12.0  # of a token of English text, whatever the tokenizer

_SUBJECTS = ("The harbour", "A clerk", "The miller", "An engineer", "The lighthouse", "A pilot", "The archive")
_VERBS = ("recorded", "repaired", "measured", "counted", "opened", "described", "moved")
_OBJECTS = ("the northern gate", "a crate of lamps", "twelve barrels", "the old ledger", "a broken valve", "the map")
_ENDS = ("before noon.", "after the storm.", "without a word.", "as every year.", "in the third week.", "at low tide.")


@dataclass
class Prompts:
    """A source of texts. `chars_per_token` is corrected by `learn`; the first guess is that of English text."""

    seed: int
    chars_per_token: float = 4.0
    _rng: random.Random = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)  # noqa: S311 - repeatable, not a secret

    def learn(self, text: str, tokens: int) -> None:
        """Correct the length of a token by a text whose tokens a server has counted (within what is believable)."""
        if tokens > 0 and text:
            self.chars_per_token = min(CHARS_MAX, max(CHARS_MIN, len(text) / tokens))

    def nonce(self) -> str:
        """A word no earlier run can have used."""
        return f"{self._rng.getrandbits(24):06x}{secrets.token_hex(3)}"

    def filler(self, tokens: int) -> str:
        """About `tokens` tokens of plain sentences, different from the first word on."""
        wanted = tokens * self.chars_per_token
        parts = [f"Report {self.nonce()}."]
        size = len(parts[0])
        while size < wanted:
            pick = self._rng.choice
            parts.append(f"{pick(_SUBJECTS)} {self._rng.randint(2, 99)} {pick(_VERBS)} {pick(_OBJECTS)} {pick(_ENDS)}")
            size += len(parts[-1]) + 1
        return " ".join(parts)

    def fresh(self) -> str:
        """A short request of its own."""
        return f"[{self.nonce()}] Tell a short story about a {self._rng.choice(('ship', 'bridge', 'clock', 'garden'))}."

    def structured(self) -> str:
        """A request for structured text (JSON records)."""
        return f"[{self.nonce()}] Write 40 JSON records with the keys id, name, city, score and tags, one a line."

    def code(self) -> str:
        """A request for code."""
        return f"[{self.nonce()}] Write a Python module with an LRU cache, its docstrings and its unit tests."

    def prose(self) -> str:
        """A request for prose."""
        return f"[{self.nonce()}] Write a long story about a lighthouse keeper who finds a letter in a bottle."
