"""Masking: secrets are hidden before anything is stored, printed or attached to a report."""

from __future__ import annotations

import re
from collections.abc import Sequence

MASK = "***"

_WORDS = frozenset(
    {"key", "keys", "apikey", "token", "tokens", "secret", "secrets", "pass", "passwd", "password"}
    | {"passphrase", "auth", "credential", "credentials", "cookie"}
)
_URL_LOGIN = re.compile(r"(?<=://)[^/\s@]+(?=@)")
# token shapes that are secret wherever they stand: Hugging Face, OpenAI style, GitHub, bearer headers
_SECRET_SHAPE = re.compile(r"\b(?:hf_|sk-|gh[pousr]_)[A-Za-z0-9_-]{8,}|(?i:(?<=\bbearer ))\S+")


def secret_name(name: str) -> bool:
    """True when a variable or option of this name usually holds a secret (`HF_TOKEN`, `--api-key`)."""
    return any(word in _WORDS for word in re.split(r"[^a-z0-9]+", name.lower()))


def _hides(name: str, value: str) -> bool:
    """A number under a name such as `max_num_batched_tokens` is an amount, not a secret."""
    return secret_name(name) and not (value.isdecimal() and "tokens" in re.split(r"[^a-z0-9]+", name.lower()))


def mask_text(text: str) -> str:
    """`text` with logins in URLs and well-known token shapes masked."""
    return _SECRET_SHAPE.sub(MASK, _URL_LOGIN.sub(MASK, text))


def mask_value(name: str, value: str) -> str:
    """Value of an environment variable, masked when its name smells of a secret."""
    return MASK if value and _hides(name, value) else mask_text(value)


def mask_argv(argv: Sequence[str]) -> list[str]:
    """A command line with the values of `--api-key X`, `--api-key=X` and `TOKEN=X` masked."""
    shown: list[str] = []
    before = ""
    for word in argv:
        name, equals, value = word.partition("=")
        if before and _hides(before, word) and not word.startswith("-"):
            shown.append(MASK)
        elif equals and _hides(name, value):
            shown.append(f"{name}={MASK}")
        else:
            shown.append(mask_text(word))
        before = word if not equals and word.startswith("-") else ""
    return shown
