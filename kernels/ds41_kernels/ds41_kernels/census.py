"""Which kernel served which layer. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class Census:
    """Routes seen so far: layer -> route (``decode``, ``prefill``) -> kernel -> calls.

    A call captured into a graph counts once, when it is captured.
    """

    seen: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)

    def note(self, layer: str, route: str, kernel: str) -> None:
        """Count one call."""
        kernels = self.seen.setdefault(layer, {}).setdefault(route, {})
        kernels[kernel] = kernels.get(kernel, 0) + 1

    def missing(self, layers: Iterable[str], routes: Iterable[str] = ("decode",)) -> list[str]:
        """``layer: route`` for each that no kernel of ours has served: another path did, or none."""
        wanted = tuple(routes)
        return [f"{layer}: {route}" for layer in layers for route in wanted if not self.seen.get(layer, {}).get(route)]

    def lines(self) -> list[str]:
        """One line for each route and kernel: how many layers it served and how often."""
        totals: dict[tuple[str, str], list[int]] = {}
        for routes in self.seen.values():
            for route, kernels in routes.items():
                for kernel, calls in kernels.items():
                    total = totals.setdefault((route, kernel), [0, 0])
                    total[0] += 1
                    total[1] += calls
        return [
            f"{route}: {kernel} in {layers} layers, {calls} calls"
            for (route, kernel), (layers, calls) in sorted(totals.items())
        ]
