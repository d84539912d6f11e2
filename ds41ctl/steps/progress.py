"""Progress of a start: judged by what moves, never by the clock on the wall alone."""

from __future__ import annotations

from dataclasses import dataclass, field

from ds41ctl.adapters import nvml, proc

RSS_STEP = 16 << 20  # bytes: a process that loads or allocates moves by more within a second
CPU_STEP_S = 0.05
# CPU time alone is believed for this many times the limit: a compiler thinks without a word, but so does a rank that
# spins in a collective which the others never enter
SPIN = 2.0


@dataclass
class Stall:
    """Neither a new log line, nor memory, nor disk reads, nor processes: a start that hangs."""

    limit_s: float
    gpus: bool = False
    moved_at: float = 0.0
    cpu_at: float = 0.0
    _lines: int = 0
    _wrote: bool = False
    _cpu_s: float = -1.0
    _seen: proc.Usage | None = None
    _vram: tuple[int, ...] = field(default=())

    def read(self, lines: int) -> None:
        """How many lines the log has by now that say something new."""
        self._wrote = self._wrote or lines > self._lines
        self._lines = lines

    def look(self, family: list[int], elapsed: float) -> None:
        """Compare the engine's processes with the last look."""
        now = proc.usage(family)
        before, self._seen = self._seen, now
        moved = self._wrote or before is None
        if before is not None:
            moved = moved or now.pids != before.pids
            moved = moved or abs(now.rss - before.rss) > RSS_STEP or now.read_bytes > before.read_bytes + RSS_STEP
        vram = nvml.used_mib() if self.gpus else ()
        moved = moved or vram != self._vram
        self._vram = vram
        self._wrote = False
        if moved:
            self.moved_at = elapsed
        if now.cpu_s > self._cpu_s + CPU_STEP_S:
            self._cpu_s, self.cpu_at = now.cpu_s, elapsed

    def stalled(self, elapsed: float) -> bool:
        """True when it stands still, or only burns CPU, for too long."""
        return bool(self.why(elapsed))

    def why(self, elapsed: float) -> str:
        """'' or what the start does instead of going on."""
        still = elapsed - self.moved_at
        if still > SPIN * self.limit_s:
            return f"used CPU without a word, memory or reads for {still:.0f} s"
        if still > self.limit_s and elapsed - self.cpu_at > self.limit_s:
            return f"stood still for {still:.0f} s"
        return ""
