"""The Engram's smaller id space: tokens that normalise alike share an id. Equal to vLLM's own map, without vLLM."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, normalizers

_ONE_SPACE = "\ue000"
"""Stands for a token that is exactly one space, which Strip would make empty."""


def compressed_token_map(tokenizer: Tokenizer) -> tuple[list[int], int]:
    """Compressed id of every token id, and how many compressed ids there are.

    Ids are given in the order of first sight. A token that is part of a UTF-8 sequence is its own raw form.
    """
    normalise = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _ONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_ONE_SPACE, " "),
        ]
    )
    seen: dict[str, int] = {}
    found = []
    for token in range(tokenizer.get_vocab_size(with_added_tokens=True)):
        text = tokenizer.decode([token], skip_special_tokens=False)
        key = tokenizer.id_to_token(token) if "\ufffd" in text else normalise.normalize_str(text) or text
        found.append(seen.setdefault(key, len(seen)))
    return found, len(seen)
