"""What the hot loops of a cubin are made of, read from nvdisasm's listing.

Standard library only. sm_70 needs a disassembler of CUDA 12, as the Triton 3.3 wheel carries it; later ones refuse.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

DISASSEMBLER_PIN = "triton==3.3.1"
TIMEOUT_S = 120

_SECTION = re.compile(r"\n\t?\.section\t\.text\.")
_LABEL = re.compile(r"\s*(\.L_[^:\s]*):")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[T\d]\s+)?(\S+)(.*)")
_TARGET = re.compile(r"`\((\.L_\S*)\)")


class NoDisassembler(Exception):
    """nvdisasm is not there or does not know the architecture. The text is one line."""


def find_disassembler(places: Sequence[Path] | None = None) -> Path:
    """``DS41_NVDISASM``, the one in a Triton 3.3 wheel, or the one on PATH.

    Raises:
        NoDisassembler: none of them exists.
    """
    named = os.environ.get("DS41_NVDISASM", "")
    if named and Path(named).is_file():
        return Path(named)
    if places is None:
        lent = os.environ.get("DS41_NVRTC_PATH", "")
        places = [Path(p) for p in [*(lent.split(os.pathsep) if lent else []), *sys.path] if p]
    for place in places:
        found = place / "triton" / "backends" / "nvidia" / "bin" / "nvdisasm"
        if found.is_file():
            return found
    on_path = shutil.which("nvdisasm")
    if on_path:
        return Path(on_path)
    raise NoDisassembler(f"nvdisasm of CUDA 12 is not installed: pip install --no-deps {DISASSEMBLER_PIN}")


@dataclass(frozen=True)
class Loop:
    """An innermost loop with tensor-core instructions. ``operations`` counts opcodes without their modifiers."""

    kernel: str
    instructions: int
    operations: Counter[str]

    @property
    def mma(self) -> int:
        """HMMA and IMMA instructions."""
        return self.operations["HMMA"] + self.operations["IMMA"]

    @property
    def local_memory(self) -> int:
        """Loads and stores of local memory, that is spills."""
        return self.operations["LDL"] + self.operations["STL"]


def hot_loops(cubin: Path, disassembler: Path | None = None) -> list[Loop]:
    """The innermost loops that hold tensor-core instructions, of every kernel.

    Raises:
        NoDisassembler: none, or it refuses the cubin.
    """
    program = disassembler or find_disassembler()
    try:
        done = subprocess.run(
            [str(program), "-c", str(cubin)], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoDisassembler(f"{program}: {error}") from None
    if done.returncode:
        raise NoDisassembler(f"{program} refuses {cubin.name}: {(done.stderr.strip() or 'no message').splitlines()[0]}")
    return parse(done.stdout)


def parse(listing: str) -> list[Loop]:
    """:func:`hot_loops` of a listing."""
    loops = []
    for section in _SECTION.split(listing)[1:]:
        kernel = re.split(r"[,\n]", section, maxsplit=1)[0].strip()
        code: list[tuple[str, str]] = []
        labels: dict[str, int] = {}
        for line in section.splitlines():
            if label := _LABEL.match(line):
                labels[label[1]] = len(code)
            if instruction := _INSTRUCTION.search(line):
                code.append((instruction[1].rstrip(";"), instruction[2]))
        spans = []
        for at, (operation, rest) in enumerate(code):
            target = _TARGET.search(rest) if operation.startswith("BRA") else None
            if target and labels.get(target[1], len(code)) <= at:
                spans.append((labels[target[1]], at))
        for begin, end in spans:
            if any(other != (begin, end) and begin <= other[0] and other[1] <= end for other in spans):
                continue
            counted = Counter(operation.split(".")[0] for operation, _ in code[begin : end + 1])
            loop = Loop(kernel, end + 1 - begin, counted)
            # what the compiler places behind a kernel for diverged warps branches back too, over the kernel's end
            if loop.mma and not counted["EXIT"]:
                loops.append(loop)
    return loops
