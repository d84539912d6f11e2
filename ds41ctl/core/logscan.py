"""Engine log reading: which phase a start is in and how far, which markers were seen, what the engine resolved."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ds41ctl.core.faults import Fault, fingerprint
from ds41ctl.core.profile import Marker

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")

# (phase, what in the log starts it), in the order of a start; texts are vLLM 0.32/0.33's own
PHASES: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("importing", re.compile(r"")),
    ("configuring", re.compile(r"non-default args|Resolved architecture")),
    ("starting workers", re.compile(r"Initializing a V1 LLM engine|EngineCore|world_size=")),
    ("building the model", re.compile(r"Starting to load model")),
    ("Engram", re.compile(r"Built engram token map|Engram store layer|Engram table offloaded|Engram layer .* served")),
    ("loading weights", re.compile(r"Loading safetensors|Loading weights")),
    ("KV profile", re.compile(r"Model loading took|KV cache size|Available KV cache memory")),
    ("compiling", re.compile(r"torch\.compile takes|Compiling a graph|Start compiling|TileLang begins to compile")),
    ("capturing graphs", re.compile(r"Capturing CUDA graph|Graph capturing")),
    ("warming up", re.compile(r"Warming up|init engine \(profile")),
    ("starting API", re.compile(r"Starting vLLM (?:API )?server|Started server process")),
    ("answering", re.compile(r"Application startup complete")),
)
_COUNTED = ("loading weights", "capturing graphs")  # phases whose percent the log states
_PERCENT = re.compile(r"(?:safetensors checkpoint shards|Capturing CUDA graphs?)[^|]{0,80}?(\d{1,3})%")
_KV_POOL = re.compile(r"(?:GPU|CPU) KV cache size: ([\d,]+) tokens")
_MODE = re.compile(r"'cudagraph_mode': <CUDAGraphMode\.(\w+)|[Ss]etting cudagraph_mode=(?:CUDAGraphMode\.)?(\w+)")
_CAPTURED = re.compile(r"Graph capturing finished")
# lines an engine repeats while it waits: they are no progress
_WAITING = re.compile(r"No available shared memory broadcast block|still waiting|Waiting for \d+ (?:local|remote)")
# the engine has given up and ends, which it takes its time for (9 s of grace for workers that are alive)
_GIVEN_UP = re.compile(
    r"\[shutdown\] Executor: waiting for worker exit|Worker proc \S+ died unexpectedly"
    r"|EngineCore failed to start|Engine core initialization failed"
)
_WINDOW = 400  # log lines a fingerprint is looked for in


class LogScan:
    """Reads a growing log piece by piece. `moved` counts the lines that say something new; `given_up`: the engine says
    that it ends."""

    def __init__(self, required: Iterable[Marker], forbidden: Iterable[Marker]) -> None:
        self._required = tuple(required)
        self._forbidden = tuple(forbidden)
        self._counts: dict[str, int] = {}
        self._partial = ""
        self._phase = 0
        self.kv_pool_tokens: int | None = None
        self.cudagraph_mode = ""
        self.graphs_captured = False
        self.given_up = False
        self.percent: int | None = None
        self.moved = 0
        self.lines: list[str] = []

    def feed(self, text: str) -> None:
        """Take the next piece of the log, cut anywhere. A progress bar redraws its line with carriage returns."""
        pieces = (self._partial + text).split("\n")
        self._partial = pieces.pop()
        for piece in pieces:
            for drawn in piece.rstrip("\r").split("\r"):
                self._line(_ANSI.sub("", drawn))

    def _line(self, line: str) -> None:
        self.lines.append(line)
        del self.lines[:-_WINDOW]
        self.moved += not _WAITING.search(line)
        for index in range(len(PHASES) - 1, self._phase, -1):
            if PHASES[index][1].search(line):
                self._phase, self.percent = index, None
                break
        percent = _PERCENT.search(line)
        if percent:
            self.percent = min(100, int(percent[1]))
        pool = _KV_POOL.search(line)
        if pool:
            self.kv_pool_tokens = int(pool[1].replace(",", ""))
        for mode in _MODE.finditer(line):
            self.cudagraph_mode = mode[1] or mode[2]
        self.graphs_captured = self.graphs_captured or _CAPTURED.search(line) is not None
        self.given_up = self.given_up or _GIVEN_UP.search(line) is not None
        for marker in (*self._required, *self._forbidden):
            if marker.text in line:
                self._counts[marker.text] = self._counts.get(marker.text, 0) + 1

    @property
    def phase(self) -> str:
        """The furthest phase seen."""
        return PHASES[self._phase][0]

    @property
    def percent_text(self) -> str:
        """` 45 %` in a phase that counts, else ''."""
        return f" {self.percent} %" if self.percent is not None and self.phase in _COUNTED else ""

    def missing(self) -> list[Marker]:
        """Required markers not seen often enough."""
        return [marker for marker in self._required if self._counts.get(marker.text, 0) < marker.count]

    def kv_pool_fault(self, expected: int | None, tolerance: float) -> str:
        """'' when the KV pool is the expected one or none is expected, else what is wrong with it."""
        if expected is None:
            return ""
        if self.kv_pool_tokens is None:
            return f"its log states no KV cache size, {expected:,} tokens expected"
        if abs(self.kv_pool_tokens - expected) > tolerance * expected:
            return f"its KV cache holds {self.kv_pool_tokens:,} tokens, {expected:,} (within {tolerance:.0%}) expected"
        return ""

    def graphs_fault(self, expected: str) -> str:
        """'' when the engine resolved the expected CUDA-graph mode and captured its graphs, else what is wrong."""
        if not expected:
            return ""
        if not self.cudagraph_mode:
            return f"its log states no CUDA-graph mode, {expected} expected: unproven"
        if self.cudagraph_mode != expected:
            return f"its CUDA graphs are {self.cudagraph_mode}, {expected} expected"
        if expected != "NONE" and not self.graphs_captured:
            return f"its log does not say that the graphs of {expected} were captured"
        return ""

    def seen_forbidden(self) -> list[Marker]:
        """Forbidden markers that were seen."""
        return [marker for marker in self._forbidden if marker.text in self._counts]

    def markers_seen(self) -> tuple[int, int]:
        """(required markers satisfied, required markers)."""
        return len(self._required) - len(self.missing()), len(self._required)

    def fingerprint(self, ending: str = "") -> Fault | None:
        """What the last lines, and how the process ended, say about a death; None when nothing is known of it."""
        return fingerprint([*self.lines, self._partial], ending)
