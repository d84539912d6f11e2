"""Reference of a mixture-of-experts layer with EXL3 experts, in double precision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .codebook import Codebook
from .linear import DoubleArray, Exl3Linear, random_linear
from .tile import FormatError, Rate

SWIGLU_LIMIT = 10.0  # config.json swiglu_limit of DeepSeek-V4.1


@dataclass(frozen=True, eq=False)
class Exl3Expert:
    """Gate ``w1`` and up ``w3`` (hidden -> inner), down ``w2`` (inner -> hidden)."""

    w1: Exl3Linear
    w3: Exl3Linear
    w2: Exl3Linear

    def __post_init__(self) -> None:
        hidden, inner = self.w1.in_features, self.w1.out_features
        for name, layer, wanted in (("w3", self.w3, (hidden, inner)), ("w2", self.w2, (inner, hidden))):
            if (layer.in_features, layer.out_features) != wanted:
                found = (layer.in_features, layer.out_features)
                raise FormatError(f"expert: expected {name} {wanted}, as w1 has {(hidden, inner)}, found {found}")
        if len({layer.codebook for layer in (self.w1, self.w3, self.w2)}) != 1:
            raise FormatError("expert: expected one codebook for w1, w3 and w2, found several")

    @classmethod
    def from_tensors(cls, key: str, tensors: Mapping[str, NDArray[Any]]) -> Exl3Expert:
        """The expert ``key``, for example ``layers.3.ffn.experts.17``. Raises FormatError."""
        w1, w3, w2 = (Exl3Linear.from_tensors(f"{key}.{name}", tensors) for name in ("w1", "w3", "w2"))
        return cls(w1, w3, w2)

    def slice(self, begin: int, end: int) -> Exl3Expert:
        """The expert of inner channels ``[begin, end)``: slices of a partition sum to the whole expert."""
        return Exl3Expert(
            self.w1.slice_outputs(begin, end), self.w3.slice_outputs(begin, end), self.w2.slice_inputs(begin, end)
        )

    def forward(self, x: NDArray[Any], limit: float = SWIGLU_LIMIT, *, rounded: bool = True) -> DoubleArray:
        """``x [T, hidden]`` -> ``[T, hidden]``.

        Args:
            x: activations.
            limit: the gate is at most this, the up projection within plus and minus it.
            rounded: with the rounding points of the GPU kernels; False rounds nothing.
        """
        if rounded:
            inner = swiglu(self.w1.kernel_product(x), self.w3.kernel_product(x), limit)
            return self.w2.kernel_product(inner)
        return self.w2.product(swiglu(self.w1.product(x), self.w3.product(x), limit))


def swiglu(gate: DoubleArray, up: DoubleArray, limit: float) -> DoubleArray:
    """``silu(min(gate, limit)) * clip(up, -limit, limit)``."""
    gate = np.minimum(gate, limit)
    return gate / (1.0 + np.exp(np.minimum(-gate, 700.0))) * np.clip(up, -limit, limit)


def layer_forward(
    experts: Sequence[Exl3Expert | None],
    x: NDArray[Any],
    chosen: NDArray[Any],
    weights: NDArray[Any],
    limit: float = SWIGLU_LIMIT,
    *,
    rounded: bool = True,
) -> DoubleArray:
    """Sum of the chosen experts' outputs.

    Args:
        experts: all experts by number; None for those that another rank holds, which add nothing.
        x: ``[T, hidden]``.
        chosen: expert numbers ``[T, k]``.
        weights: their weights ``[T, k]``, with the model's routed scale in them.
        limit: see :meth:`Exl3Expert.forward`.
        rounded: see :meth:`Exl3Expert.forward`.
    """
    x = np.asarray(x)
    parts = np.zeros((*chosen.shape, x.shape[-1]))
    for number in np.unique(chosen):
        expert = experts[int(number)]
        if expert is not None:
            token, slot = np.nonzero(chosen == number)
            parts[token, slot] = expert.forward(x[token], limit, rounded=rounded)
    return np.asarray((parts * np.asarray(weights, np.float64)[..., None]).sum(1))


def random_expert(
    random: np.random.Generator,
    hidden: int,
    inner: int,
    rates: tuple[Rate, Rate, Rate],
    codebook: Codebook = Codebook.MUL1,
) -> Exl3Expert:
    """An expert of random valid tiles, for tests; ``rates`` are those of w1, w3 and w2."""
    return Exl3Expert(
        random_linear(random, hidden, inner, rates[0], codebook),
        random_linear(random, hidden, inner, rates[1], codebook),
        random_linear(random, inner, hidden, rates[2], codebook),
    )
