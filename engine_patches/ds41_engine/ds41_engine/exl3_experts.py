"""Routed experts that stay in EXL3: their tensors are kept as stored and multiplied straight from the trellis."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import ds41_kernels
import numpy as np
import torch
from ds41_kernels import exl3
from ds41_kernels.exl3 import cpu
from torch import Tensor, nn

from .checkpoint import CheckpointError
from .shape import BackboneShape

_TENSOR = re.compile(r"layers\.(\d+)\.ffn\.experts\.(\d+\.w[123]\.(?:trellis|suh|svh|su|sv|mcg|mul1|bias))")


class Exl3Experts(nn.Module):
    """The routed experts of one layer, in the place of :class:`ds41_engine.backbone.MoE`'s own.

    Fill it with :func:`divert`, then call :meth:`finish`.
    """

    def __init__(self, shape: BackboneShape, layer_id: int) -> None:
        super().__init__()
        self.shape = shape
        self.layer_id = layer_id
        self.experts: list[exl3.Exl3Expert] = []
        self._tensors: dict[str, np.ndarray] = {}
        self._compute: cpu.CpuExperts | None = None

    def add(self, name: str, tensor: Tensor) -> None:
        """Keep one tensor; ``name`` begins with the expert's number."""
        self._tensors[name] = tensor.detach().contiguous().clone().numpy()

    def finish(self) -> None:
        """Build the experts from the tensors added. Raises CheckpointError, one line, when something does not fit."""
        shape, tensors = self.shape, self._tensors
        self._tensors = {}
        wanted = (shape.hidden_size, shape.moe_intermediate_size)
        for number in range(shape.n_routed_experts):
            try:
                expert = exl3.Exl3Expert.from_tensors(str(number), tensors)
            except exl3.FormatError as error:
                raise CheckpointError(
                    f"checkpoint tensors layers.{self.layer_id}.ffn.experts.{error}; run: ds41ctl fetch --verify"
                ) from None
            found = (expert.w1.in_features, expert.w1.out_features)
            if found != wanted:
                raise CheckpointError(
                    f"checkpoint tensors layers.{self.layer_id}.ffn.experts.{number}: expected hidden and inner size "
                    f"{wanted}, found {found}; config.json and the shards are not of one checkpoint, run: ds41ctl "
                    "fetch --verify"
                )
            self.experts.append(expert)

    def kinds(self) -> Counter[tuple[exl3.Rate, exl3.Codebook]]:
        """How many matrices there are of each rate and codebook."""
        return Counter((w.rate, w.codebook) for e in self.experts for w in (e.w1, e.w3, e.w2))

    def use(self, kernel: Kernel) -> None:
        """Compute with this kernel from now on."""
        self._compute = cpu.CpuExperts(kernel.library, self.experts, self.shape.swiglu_limit, kernel.pool)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """``x [T, hidden]``, chosen experts and their weights ``[T, k]`` -> ``[T, hidden]``, fp32."""
        if self._compute is None:
            raise RuntimeError("Exl3Experts.use was not called")
        return torch.from_numpy(self._compute(x.numpy(), chosen.numpy(), weights.numpy()))

    def reconstructed(self) -> tuple[Tensor, Tensor, Tensor]:
        """``w1 [E, I, hidden]``, ``w3 [E, I, hidden]`` and ``w2 [E, hidden, I]`` as plain fp32 matrices."""
        w1, w3, w2 = (
            torch.stack([torch.from_numpy(getattr(e, name).reconstruct().T.astype(np.float32)) for e in self.experts])
            for name in ("w1", "w3", "w2")
        )
        return w1, w3, w2


class Kernel:
    """The compiled kernel of ds41_kernels, or numpy where it was not compiled.

    Attributes:
        library: the compiled library, or None.
        how: what computes, for the log.
        problem: one line why the compiled kernel is not used, '' when it is.
    """

    def __init__(self, threads: int) -> None:
        self.library = None
        self.pool = None
        self.how, self.problem = "numpy", ""
        try:
            self.library = ds41_kernels.load()
        except ds41_kernels.Unavailable as error:
            self.problem = str(error)
            return
        self.pool = ds41_kernels.Pool(self.library, [None] * threads) if threads > 1 else None
        self.how = f"compiled loops ({cpu.loops(self.library)}), {threads} thread{'s' * (threads > 1)}"

    def check(self, kinds: Iterable[tuple[exl3.Rate, exl3.Codebook]]) -> None:
        """Compare it with the reference for each rate and codebook. Raises CheckpointError, one line."""
        if self.library is None:
            return
        try:
            cpu.self_check(self.library, sorted(kinds, key=lambda kind: (kind[0], kind[1].value)))
        except exl3.FormatError as error:
            raise CheckpointError(f"{error}; install the engine again: ds41ctl engine install --force") from None


def divert(layers: Mapping[int, Exl3Experts], weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Hand tensors of EXL3 experts to their layers and yield all others."""
    for name, tensor in weights:
        match = _TENSOR.fullmatch(name)
        layer = layers.get(int(match[1])) if match else None
        if match and layer is not None:
            layer.add(match[2], tensor)
        else:
            yield name, tensor


def census(layers: Iterable[Exl3Experts]) -> str:
    """For example ``144 matrices in 6 layers: K2 x 48, K3 x 72, K5 x 24 (mul1)``."""
    found: Counter[tuple[exl3.Rate, exl3.Codebook]] = Counter()
    count = 0
    for layer in layers:
        found += layer.kinds()
        count += 1
    books = sorted({codebook.name.lower() for _, codebook in found})
    rates = Counter[exl3.Rate]()
    for (rate, _), number in found.items():
        rates[rate] += number
    parts = ", ".join(f"K{rate.bits:g} x {rates[rate]}" for rate in sorted(rates))
    return f"{sum(found.values())} matrices in {count} layers: {parts} ({', '.join(books)})"
