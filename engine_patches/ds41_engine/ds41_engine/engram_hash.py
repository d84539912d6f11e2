"""The Engram n-gram hash: which table rows a token reads. numpy only, bit-identical to vLLM's own.

A position is hashed as ``max_ngram_size - 1`` n-grams (2-gram and up) times ``n_heads`` heads. Every (layer, n-gram
size, head) owns a prime-sized sub-table; the primes are drawn in order and never reused. A row id is

    ``(XOR over s of value(p - s) * multiplier[s]) % prime + offset``

where ``value`` is the compressed token id, or the pad token's from the first position on that lies before the sequence
or is dead (an image position).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .shape import BackboneShape

Int64Array = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

DEAD = -1
"""Compressed id of a position that breaks n-grams."""

_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)


def is_prime(n: int) -> bool:
    """Miller-Rabin with witnesses that make it exact below 3.3e24 (Sorenson and Webster 2015)."""
    if n < 2:
        return False
    for p in _WITNESSES:
        if n % p == 0:
            return n == p
    odd, twos = n - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for witness in _WITNESSES:
        x = pow(witness, odd, n)
        if x in (1, n - 1):
            continue
        for _ in range(twos - 1):
            x = x * x % n
            if x == n - 1:
                break
        else:
            return False
    return True


def sub_table_primes(n_layers: int, ngram_sizes: int, n_heads: int, vocab_size: int) -> Int64Array:
    """Sub-table sizes ``[n_layers, ngram_sizes, n_heads]``: unused primes from ``vocab_size`` upwards."""
    primes = np.zeros((n_layers, ngram_sizes, n_heads), dtype=np.int64)
    used: set[int] = set()
    for layer in range(n_layers):
        for size in range(ngram_sizes):
            candidate = vocab_size - 1
            for head in range(n_heads):
                candidate += 1
                while candidate in used or not is_prime(candidate):
                    candidate += 1
                used.add(candidate)
                primes[layer, size, head] = candidate
    return primes


def hash_multipliers(layer_ids: tuple[int, ...], max_ngram_size: int, compressed_vocab_size: int) -> Int64Array:
    """Odd multipliers ``[n_layers, max_ngram_size]`` from numpy's PCG64, seeded ``10007 * layer id``.

    Bounded so that ``compressed id * multiplier`` fits int64.
    """
    bound = max(1, int(np.iinfo(np.int64).max) // compressed_vocab_size // 2)
    rows = []
    for layer in layer_ids:
        draws = np.random.default_rng(10007 * layer).integers(0, bound, size=max_ngram_size, dtype=np.int64)
        rows.append(draws * 2 + 1)
    return np.stack(rows)


@dataclass(frozen=True)
class EngramHash:
    """Primes, offsets and multipliers of a model's Engram layers.

    Attributes:
        layer_ids: layers that have a table.
        primes: ``[layers, ngram sizes, heads]``.
        offsets: first row of each sub-table, ``[layers, columns]``.
        multipliers: ``[layers, max_ngram_size]``.
        pad: compressed id of the pad token.
    """

    layer_ids: tuple[int, ...]
    primes: Int64Array
    offsets: Int64Array
    multipliers: Int64Array
    pad: int

    @classmethod
    def build(cls, shape: BackboneShape, pad_compressed_id: int) -> EngramHash:
        """Hash of a model; ``pad_compressed_id`` is ``token_map[shape.engram_pad_token_id]``.

        Raises:
            ValueError: ``engram_num_embeddings`` is not the sum of the primes (one line).
        """
        sizes = shape.engram_max_ngram_size - 1
        primes = sub_table_primes(len(shape.engram_layer_ids), sizes, shape.engram_n_heads, shape.engram_vocab_size)
        flat = primes.reshape(len(shape.engram_layer_ids), -1)
        totals = tuple(int(total) for total in flat.sum(1))
        if totals != shape.engram_num_embeddings:
            raise ValueError(
                f"config field engram_num_embeddings: expected {list(totals)} (sum of the sub-table primes), "
                f"found {list(shape.engram_num_embeddings)}"
            )
        offsets = flat.cumsum(1) - flat
        multipliers = hash_multipliers(
            shape.engram_layer_ids, shape.engram_max_ngram_size, shape.engram_compressed_vocab_size
        )
        return cls(shape.engram_layer_ids, primes, offsets, multipliers, pad_compressed_id)

    def row_ids(self, compressed: Int64Array, positions: Int64Array) -> Int64Array:
        """Table rows of packed sequences.

        Args:
            compressed: compressed ids ``[T]``, :data:`DEAD` where the position breaks n-grams. Each sequence is
                contiguous, oldest token first.
            positions: position of each token in its own sequence ``[T]``; lookback never passes position 0. A chunk
                must come with its ``max_ngram_size - 1`` predecessors (drop their rows from the answer).

        Returns:
            ``[T, layers, columns]`` int64, columns ordered by n-gram size, then head.
        """
        length = compressed.shape[0]
        blocked = np.zeros(length, dtype=np.bool_)
        rolling = np.zeros((length, len(self.layer_ids)), dtype=np.int64)
        columns = []
        for shift in range(self.multipliers.shape[1]):
            value = np.full(length, DEAD, dtype=np.int64)
            value[shift:] = compressed[: length - shift]
            blocked |= (positions < shift) | (value == DEAD)
            value = np.where(blocked, self.pad, value)
            rolling ^= value[:, None] * self.multipliers[None, :, shift]
            if shift:
                columns.append(rolling[:, :, None] % self.primes[None, :, shift - 1])
        rows: Int64Array = np.concatenate(columns, axis=-1) + self.offsets[None]
        return rows
