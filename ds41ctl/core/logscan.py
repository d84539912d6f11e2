"""Engine log reading: which phase a start is in, which markers were seen, and what a death means."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ds41ctl.core.profile import Marker

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")

# (phase, what in the log starts it), in the order of a start; texts are vLLM 0.32/0.33's own
PHASES: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("importing", re.compile(r"")),
    ("configuring", re.compile(r"non-default args|Resolved architecture")),
    ("starting workers", re.compile(r"Initializing a V1 LLM engine|EngineCore|world_size=")),
    ("loading weights", re.compile(r"Starting to load model|Loading safetensors|Loading weights")),
    ("Engram", re.compile(r"Built engram token map|Engram store layer|Engram table offloaded")),
    ("KV cache", re.compile(r"KV cache size|Available KV cache memory")),
    ("capturing graphs", re.compile(r"Capturing CUDA graph|Graph capturing")),
    ("starting API", re.compile(r"Starting vLLM (?:API )?server|Started server process")),
    ("answering", re.compile(r"Application startup complete")),
)


@dataclass(frozen=True)
class Fingerprint:
    """A known way to die: what it is and what helps."""

    name: str
    meaning: str
    fix: str


# pattern -> fingerprint; the first match in the last lines wins. Sources: vLLM's own messages and field reports.
FINGERPRINTS: tuple[tuple[re.Pattern[str], Fingerprint], ...] = (
    (
        re.compile(r"ds41: (?P<line>.+)"),
        Fingerprint("plugin", "{line}", ""),
    ),
    (
        re.compile(r"Address already in use|Errno 98"),
        Fingerprint("port", "the port was taken while the engine loaded", "DS41_PORT=<another> ds41ctl serve"),
    ),
    (
        re.compile(r"weights were not initialized from checkpoint: (?P<line>.{0,160})"),
        Fingerprint("weights", "tensors are missing from the pack: {line}", "ds41ctl fetch --verify"),
    ),
    (
        re.compile(r"Compressed vocab size mismatch: (?P<line>.{0,120})"),
        Fingerprint(
            "tokenizer",
            "the tokenizer is not the one the Engram tables were hashed with: {line}",
            "ds41ctl fetch --verify",
        ),
    ),
    (
        re.compile(r"num_heads == 32 or num_heads == 64"),
        Fingerprint(
            "indexer",
            "DeepGEMM's indexer kernel takes 32 or 64 index heads",
            "use a pack with index_n_heads 32",
        ),
    ),
    (
        re.compile(r"operator torchvision::nms does not exist"),
        Fingerprint("torchvision", "a torchvision of another build shadows torch", "ds41ctl engine install --force"),
    ),
    (
        re.compile(r"libcudart\.so\.13"),
        Fingerprint(
            "cuda-13",
            "this wheel is a CUDA 13 build; Volta needs 12.8",
            "install the engine the profile pins",
        ),
    ),
    (
        re.compile(r"undefined symbol: (?P<line>\S{0,80})"),
        Fingerprint("abi", "the wheel was built for another torch or CUDA ({line})", "ds41ctl engine install --force"),
    ),
    (
        re.compile(r"LLVM ERROR: Cannot select: intrinsic"),
        Fingerprint("triton", "this triton cannot compile for the GPU", "install the triton the engine pins"),
    ),
    (
        re.compile(r"CUDA out of memory|OutOfMemoryError|No available memory for the cache blocks"),
        Fingerprint(
            "memory",
            "not enough memory for weights and KV cache",
            "free the GPUs, or lower the profile's utilisation",
        ),
    ),
    (
        re.compile(r"Cannot allocate memory|MemoryError|bad_alloc"),
        Fingerprint("host-memory", "the host ran out of memory", "ds41ctl preflight --only host.ram"),
    ),
    (
        re.compile(r"No module named '?(?P<line>[\w.]+)"),
        Fingerprint("module", "the engine's venv lacks {line}", "ds41ctl engine verify"),
    ),
    (
        re.compile(r"Worker proc .* died unexpectedly \(exit code: (?P<line>[^)]*)"),
        Fingerprint("worker", "a worker process died (exit code {line})", "look further up in the log: ds41ctl logs"),
    ),
)
_LEVEL = re.compile(r"\b(?:INFO|WARNING|DEBUG) \d\d-\d\d ")  # vLLM's line prefix
_KV_POOL = re.compile(r"GPU KV cache size: ([\d,]+) tokens")
_WINDOW = 400  # log lines a fingerprint is looked for in


class LogScan:
    """Reads a growing log piece by piece."""

    def __init__(self, required: Iterable[Marker], forbidden: Iterable[Marker]) -> None:
        self._required = tuple(required)
        self._forbidden = tuple(forbidden)
        self._counts: dict[str, int] = {}
        self._partial = ""
        self._phase = 0
        self.kv_pool_tokens: int | None = None
        self.lines: list[str] = []

    def feed(self, text: str) -> None:
        """Take the next piece of the log, cut anywhere."""
        pieces = (self._partial + text).split("\n")
        self._partial = pieces.pop()
        for piece in pieces:
            self._line(_ANSI.sub("", piece.rstrip("\r")))

    def _line(self, line: str) -> None:
        self.lines.append(line)
        del self.lines[:-_WINDOW]
        for index in range(len(PHASES) - 1, self._phase, -1):
            if PHASES[index][1].search(line):
                self._phase = index
                break
        pool = _KV_POOL.search(line)
        if pool:
            self.kv_pool_tokens = int(pool[1].replace(",", ""))
        for marker in (*self._required, *self._forbidden):
            if marker.text in line:
                self._counts[marker.text] = self._counts.get(marker.text, 0) + 1

    @property
    def phase(self) -> str:
        """The furthest phase seen."""
        return PHASES[self._phase][0]

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

    def seen_forbidden(self) -> list[Marker]:
        """Forbidden markers that were seen."""
        return [marker for marker in self._forbidden if marker.text in self._counts]

    def markers_seen(self) -> tuple[int, int]:
        """(required markers satisfied, required markers)."""
        return len(self._required) - len(self.missing()), len(self._required)

    def fingerprint(self) -> Fingerprint | None:
        """What the last lines say about a death, None when nothing is known of it."""
        return fingerprint([*self.lines, self._partial])


def fingerprint(lines: list[str]) -> Fingerprint | None:
    """The first known fingerprint, most specific first, in the last lines of a log."""
    window = lines[-_WINDOW:]
    for pattern, found in FINGERPRINTS:
        for line in reversed(window):
            match = pattern.search(line)
            if match and not _harmless(line):
                detail = match.groupdict().get("line") or ""
                return Fingerprint(found.name, found.meaning.format(line=detail.strip()), found.fix)
    return None


def _harmless(line: str) -> bool:
    """Our plugin logs information with the same prefix as its refusals."""
    return _LEVEL.search(line) is not None
