"""The fp32 oracle as a process of the engine's Python; its events are JSON lines."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds41ctl.adapters import enginevenv, files, kernels, proc
from ds41ctl.core.errors import ConfigError, Ds41Error, IntegrityError, NoSpaceError, NotFoundError
from ds41ctl.core.exits import Exit
from ds41ctl.core.layout import Layout

Event = Mapping[str, Any]
_ERRORS: dict[str, type[Ds41Error]] = {"integrity": IntegrityError, "memory": NoSpaceError}
_KEPT = ("PATH", "HOME", "LANG", "TMPDIR", "OMP_NUM_THREADS", "LD_LIBRARY_PATH")


class OracleDied(Ds41Error):
    """The oracle's process ended before it was done."""

    code = Exit.ENGINE_DIED


@dataclass(frozen=True)
class OracleRun:
    """What to run. `threads` 0 leaves it to the oracle (OMP_NUM_THREADS, else every core)."""

    pack: Path
    prompts: Path
    out: Path
    work: Path
    top_k: int = 128
    activations: str = "fp32"
    keys: str = "fp32"
    layer_positions: int = 64
    read_ahead_gib: float = 2.0
    checkpoint_every: int = 1
    threads: int = 0
    store: Path | None = None

    def argv(self, python: Path) -> list[str]:
        """The command line."""
        words = [
            str(python), "-m", "ds41_engine.oracle",
            "--pack", str(self.pack), "--prompts", str(self.prompts), "--out", str(self.out), "--work", str(self.work),
            "--top-k", str(self.top_k), "--activations", self.activations, "--keys", self.keys,
            "--layer-positions", str(self.layer_positions), "--read-ahead-gib", str(self.read_ahead_gib),
            "--checkpoint-every", str(self.checkpoint_every), "--threads", str(self.threads),
        ]  # fmt: skip
        return words + (["--store", str(self.store)] if self.store is not None else [])


def run(layout: Layout, wanted: OracleRun, on_event: Callable[[Event], None]) -> Event:
    """Run the oracle to its end; returns its last event. A run that was killed before goes on where it was.

    Raises NotFoundError without an engine, IntegrityError or NoSpaceError as the oracle says, ConfigError for what it
    was given, OracleDied otherwise.
    """
    if not os.access(layout.python, os.X_OK):
        raise NotFoundError(
            f"the oracle needs the engine's Python (torch, numpy, tokenizers): no {layout.python}",
            hints=("ds41ctl engine install", "DS41_PYTHON=/path/to/venv/bin/python uses an engine of your own"),
        )
    if not wanted.pack.is_dir():
        raise NotFoundError(f"no pack in {wanted.pack}", hints=("ds41ctl fetch",))
    for folder in (wanted.out.parent, wanted.work):
        folder.mkdir(parents=True, exist_ok=True)
    # our own sources, not the ones installed in the engine: the oracle is of this version whatever the engine is
    sources = (enginevenv.plugin_source(), kernels.source())
    env = {name: value for name, value in os.environ.items() if name in _KEPT}
    env |= {
        "PYTHONPATH": os.pathsep.join(str(path) for path in sources),
        "PYTHONPYCACHEPREFIX": str(layout.cache_dir / "pycache"),
        "HF_HUB_OFFLINE": "1",
    }
    library, problem = kernels.compiled(layout.dirs.cache)
    argv = wanted.argv(layout.python)
    if problem:
        on_event({"event": "note", "text": f"experts are multiplied by torch, which is slower: {problem}"})
    else:
        argv += ["--kernels", str(library)]
    last: dict[str, Any] = {}
    other: list[str] = []

    def on_line(line: str) -> None:
        nonlocal last
        try:
            event = json.loads(line)
            kind = event["event"]
        except (ValueError, TypeError, KeyError):
            other.append(line)
            return
        if kind in ("done", "error"):
            last = event
        on_event(event)

    with files.locked(wanted.work / ".lock", "running the oracle"):
        status = proc.stream(argv, env=env, on_line=on_line)
    if last.get("event") == "error":
        kind = str(last.get("code"))
        message = f"oracle: {last.get('message')}"
        raise _ERRORS[kind](message) if kind in _ERRORS else ConfigError(message)
    if status or last.get("event") != "done":
        hints = ("run the same command again: it goes on from the last finished layer",)
        raise OracleDied(f"the oracle ended with {status} before it was done", detail=tuple(other[-8:]), hints=hints)
    return last
