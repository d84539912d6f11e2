"""End to end: the real CLI as a process, a real tmux, a real tmpfs, the real engine on CPU.

The engine's venv is the user's own (installing it again would be most of the run); everything else is this run's.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs
import pytest


@dataclass
class Answer:
    """What a command said."""

    code: int
    out: str
    err: str

    def json(self) -> dict[str, Any]:
        """The one document of --json."""
        tree: dict[str, Any] = json.loads(self.out)
        return tree


@dataclass
class Cli:
    """Runs ds41ctl with folders and port of its own."""

    root: Path
    env: dict[str, str]
    port: int

    def argv(self, *args: str) -> list[str]:
        return [sys.executable, "-m", "ds41ctl", *args]

    def __call__(self, *args: str, timeout: float = 600, **env: str) -> Answer:
        done = subprocess.run(
            self.argv(*args), env={**self.env, **env}, capture_output=True, text=True, timeout=timeout, check=False
        )
        return Answer(done.returncode, done.stdout, done.stderr)

    def start(self, *args: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.argv(*args), env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def record(self, profile: str = "cpu-tiny") -> dict[str, Any]:
        tree: dict[str, Any] = json.loads((self.root / "state" / "running" / f"{profile}.json").read_text())
        return tree

    def processes(self) -> list[int]:
        """Pids that carry the marker of an engine started from this folder."""
        found = []
        for path in Path("/proc").iterdir():
            try:
                environ = (path / "environ").read_bytes()
            except OSError:
                continue
            if b"DS41_ENGINE_RUN=" in environ and str(self.root).encode() in environ:
                found.append(int(path.name))
        return found


def gate_prompts(folder: Path) -> Path:
    """A few of the gate's built-in prompts, a picture among them: seconds of work for the oracle."""
    from ds41ctl.steps.gate import builtin_prompts

    wanted = {"arithmetic", "tides", "order_item_42", "user_account_id", "kv_cache_dtype", "harbour", "red_7"}
    lines = builtin_prompts().read_text().splitlines(keepends=True)
    path = folder / "gate.jsonl"
    path.write_text("".join(line for line in lines if json.loads(line)["name"] in wanted))
    return path


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture(scope="session")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    """A command line with fresh folders for the whole run; everything it started is ended afterwards."""
    root = tmp_path_factory.mktemp("e2e")
    engines = Path(os.environ.get("DS41_DATA_DIR") or platformdirs.user_data_dir("ds41ctl")) / "engines"
    if not engines.is_dir():
        pytest.fail("no engine is installed: make test installs it (ds41ctl engine install)")
    (root / "data").mkdir()
    (root / "data" / "engines").symlink_to(engines)
    port = free_port()
    env = {name: value for name, value in os.environ.items() if not name.startswith(("DS41_", "TMUX"))}
    env |= {
        "DS41_DATA_DIR": str(root / "data"),
        "DS41_STATE_DIR": str(root / "state"),
        "DS41_CACHE_DIR": str(root / "cache"),
        "DS41_PORT": str(port),
        "NO_COLOR": "1",
    }
    made = Cli(root, env, port)
    yield made
    for path in (root / "state" / "running").glob("*.json"):
        made("stop", "--profile", json.loads(path.read_text())["profile_path"])
    for path in {root / "local.toml", Path("cpu-tiny"), Path("cpu-tiny-tp2")}:
        if path.suffix != ".toml" or path.exists():
            made("engram", "drop", "--profile", str(path))
