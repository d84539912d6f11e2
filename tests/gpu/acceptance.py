"""The acceptance of the gpu-tiny profiles on real GPUs, part by part (see README.md). Standard library only."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
CORE, WORKER = "EngineCore", "Worker"


class Run:
    """Folders, environment and results of one acceptance."""

    def __init__(self, out: Path, site: Path | None, profile: Path) -> None:
        self.out = out
        self.out.mkdir(parents=True, exist_ok=True)
        self.work = Path("/tmp/ds41-acceptance")
        self.work.mkdir(exist_ok=True)
        self.rows: list[dict[str, Any]] = []
        self.env = {name: text for name, text in os.environ.items() if not name.startswith("DS41_")}
        self.env |= {
            "DS41_DATA_DIR": os.environ.get("DS41_DATA_DIR", str(self.work / "data")),
            "DS41_STATE_DIR": str(self.work / "state"),
            "DS41_CACHE_DIR": str(self.work / "cache"),
            "NO_COLOR": "1",
        }
        self.env["PYTHONPATH"] = os.pathsep.join(
            part for part in (str(REPOSITORY), os.environ.get("PYTHONPATH", "")) if part
        )
        if site is not None:
            self.env["DS41_PYTHON"] = str(wrapper(self.work / "engine" / "bin" / "python", site))
            plug_in(site)
        # a copy: a part may change it
        self.profile = Path(shutil.copy(profile, self.work / profile.name))
        self.gpus = tomllib.loads(self.profile.read_text())["hardware"]["gpus"]
        self.skips: list[str] = []

    def cli(self, name: str, *args: str, timeout: float = 600, **env: str) -> tuple[int, dict[str, Any]]:
        """Run a command with --json; its document is kept as NAME.json, its other output as NAME.err."""
        words = [sys.executable, "-m", "ds41ctl", *args, "--json"]
        began = time.monotonic()
        try:
            done = subprocess.run(
                words, env={**self.env, **env}, capture_output=True, text=True, timeout=timeout, check=False
            )
            code, text, err = done.returncode, done.stdout, done.stderr
        except subprocess.TimeoutExpired as error:
            code, text, err = 124, _text(error.stdout), _text(error.stderr)
        (self.out / f"{name}.json").write_text(text)
        (self.out / f"{name}.err").write_text(f"$ {' '.join(args)}   [{code}, {time.monotonic() - began:.1f} s]\n{err}")
        try:
            tree = json.loads(text)
        except ValueError:
            tree = {}
        return code, tree if isinstance(tree, dict) else {}

    def note(self, part: str, expected: str, found: Any, ok: bool, seconds: float) -> None:
        self.rows.append({"part": part, "ok": ok, "expected": expected, "found": found, "seconds": round(seconds, 1)})
        (self.out / "summary.json").write_text(json.dumps(self.rows, indent=1) + "\n")
        print(f"{'OK  ' if ok else 'FAIL'} {part}: {found}   {seconds:.1f} s", flush=True)

    def keep_logs(self, name: str) -> None:
        logs = (self.work / "state" / "logs").rglob("engine-*.log")
        for path in sorted(logs, key=lambda path: path.stat().st_mtime)[-1:]:
            shutil.copy(path, self.out / f"engine-{name}.log")

    def record(self) -> dict[str, Any]:
        return json.loads((self.work / "state" / "running" / f"{self.profile.stem}.json").read_text())  # type: ignore[no-any-return]


def _text(data: Any) -> str:
    return data.decode(errors="replace") if isinstance(data, bytes) else data or ""


def wrapper(path: Path, site: Path) -> Path:
    """An interpreter that finds its packages in `site` first, whatever environment it is started with."""
    path.parent.mkdir(parents=True, exist_ok=True)
    nccl = site / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    lines = ["#!/bin/sh", f"export PYTHONPATH='{site}'"]
    if nccl.exists():
        lines.append(f"export LD_PRELOAD='{nccl}'")
    for name in ("LD_LIBRARY_PATH", "CUDA_HOME", "PATH"):
        if os.environ.get(name):
            lines.append(f"export {name}='{os.environ[name]}'")
    lines.append(f"exec '{shutil.which('python3')}' \"$@\"")
    path.write_text("\n".join(lines) + "\n")
    path.chmod(0o755)
    return path


def plug_in(site: Path) -> None:
    """Put ds41_engine and its entry point into the folder."""
    source = REPOSITORY / "engine_patches" / "ds41_engine" / "ds41_engine"
    shutil.copytree(source, site / "ds41_engine", dirs_exist_ok=True)
    info = site / "ds41_engine-0.1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ds41-engine\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nds41_engine = ds41_engine:register\n")
    (info / "RECORD").write_text("")


def used_mib() -> list[int]:
    """Memory in use on each GPU; [] on a machine without any (where this script itself is tried)."""
    if shutil.which("nvidia-smi") is None:
        return []
    done = subprocess.run(
        ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    return [int(line) for line in done.stdout.split() if line.isdecimal()]


@contextlib.contextmanager
def part(run: Run, name: str, expected: str) -> Iterator[Callable[[Any, bool], None]]:
    """One part: whatever happens in it is a row, and the next part is run."""
    began, told = time.monotonic(), []

    def tell(found: Any, ok: bool) -> None:
        told.append(True)
        run.note(name, expected, found, ok, time.monotonic() - began)

    try:
        yield tell
        if not told:
            tell("nothing was found out", False)
    except Exception as error:  # a part that breaks must not cost the others
        tell(f"{type(error).__name__}: {error}", False)


def message(tree: dict[str, Any]) -> str:
    error = tree.get("error") or {}
    return str(error.get("message", ""))[:300]


def findings_of(tree: dict[str, Any]) -> list[dict[str, Any]]:
    return (tree.get("data") or {}).get("findings") or []


def failed_checks(tree: dict[str, Any]) -> list[str]:
    return [item["id"] for item in findings_of(tree) if item.get("status") in ("fail", "crash")]


def install(run: Run, wheels: Path) -> None:
    at = ["--profile", str(run.profile)]
    with part(run, "install", f"exit 0: the engine of the lock from {wheels}, proven to import") as tell:
        code, tree = run.cli("install", "engine", "install", *at, "--wheels", str(wheels), timeout=420)
        tell(f"exit {code} {message(tree)}", code == 0)
    with part(run, "engine verify", "exit 0: every installed file as recorded") as tell:
        code, tree = run.cli("verify", "engine", "verify", *at, timeout=120)
        tell(f"exit {code} {message(tree)}", code == 0)


def measure(run: Run) -> None:
    at = ["--profile", str(run.profile)]
    with part(run, "facts", "a record of this machine with its GPUs by UUID") as tell:
        code, tree = run.cli("facts", "facts", *at, "--redact", timeout=120)
        tell(f"exit {code}", code == 0)
    with part(run, "preflight", "no check fails") as tell:
        code, tree = run.cli("preflight", "preflight", *at, timeout=120)
        run.skips = [word for name in failed_checks(tree) for word in ("--skip-check", name)]
        tell(failed_checks(tree) or f"exit {code}", code == 0)
    if run.gpus > 1:
        with part(run, "peer copy", "a pattern copied between the GPUs comes back unchanged") as tell:
            code, tree = run.cli("peer-copy", "preflight", *at, "--level", "3", "--only", "gpu.peer-copy", timeout=120)
            found = {item["id"]: f"{item['status']}: {item['summary']}" for item in findings_of(tree)}
            tell(found, code == 0 and "ok" in str(found.get("gpu.peer-copy")))


def main_job(run: Run) -> None:
    at = ["--profile", str(run.profile)]
    idle = used_mib()
    with part(run, "up", "exit 0: smoke green, CUDA graphs as the profile says") as tell:
        code, tree = run.cli("up", "up", *at, *run.skips, timeout=560)
        run.keep_logs("up")
        if code == 16 and "CUDA graphs" in message(tree):
            run.note("graphs", "the mode of the profile", message(tree), False, 0)
            text = run.profile.read_text()
            run.profile.write_text("\n".join(x for x in text.splitlines() if not x.startswith("cudagraph_mode")))
            code, tree = run.cli("up-again", "up", *at, *run.skips, timeout=560)
            run.keep_logs("up-again")
        tell(f"exit {code} {message(tree)}", code == 0)
    with part(run, "status", "ready, no drift, memory of the GPU in use") as tell:
        code, tree = run.cli("status", "status", *at, timeout=60)
        data = tree.get("data") or {}
        tell({"state": data.get("state"), "drift": data.get("drift"), "gpus": data.get("gpus")}, code == 0)
    with part(run, "smoke", "every test passes") as tell:
        code, tree = run.cli("smoke", "smoke", *at, timeout=240)
        tell({item["id"]: item["status"] for item in findings_of(tree)}, code == 0)
    stop(run, "stop", idle)


def stop(run: Run, name: str, idle: list[int]) -> None:
    with part(run, name, f"exit 0, GPU memory back at {idle} MiB") as tell:
        code, tree = run.cli(name, "stop", "--profile", str(run.profile), timeout=150)
        now = used_mib()
        tell(
            f"exit {code}, {now} MiB {message(tree)}",
            code == 0 and all(b <= a + 64 for a, b in zip(idle, now, strict=False)),
        )


def children(root: int) -> dict[int, str]:
    """pid -> title of a process and everything below it (a title set by a program may lie over its environment)."""
    parents, titles = {}, {}
    for path in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if path.name.isdecimal():
                parents[int(path.name)] = int((path / "stat").read_text().rsplit(")", 1)[1].split()[1])
                titles[int(path.name)] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    found, grown = {root}, True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in found} - found
        found, grown = found | more, bool(more)
    return {pid: titles.get(pid, "") for pid in found}


def kills(run: Run) -> None:
    at = ["--profile", str(run.profile)]
    for who in (CORE, *([WORKER] if run.gpus > 1 else [])):
        idle = used_mib()
        with part(run, f"serve before kill of {who}", "exit 0") as tell:
            code, tree = run.cli(f"serve-{who}", "serve", *at, *run.skips, timeout=420)
            run.keep_logs(f"kill-{who}")
            tell(f"exit {code} {message(tree)}", code == 0)
        if code:
            continue  # nothing runs that could be killed
        with part(run, f"kill -9 of {who}", "named by status within 5 s") as tell:
            family = children(run.record()["pid"])
            chosen = [pid for pid, title in family.items() if who in title]
            os.kill(chosen[-1], signal.SIGKILL)
            began, state = time.monotonic(), ""
            while time.monotonic() - began < 20:
                _, tree = run.cli(f"status-{who}", "status", *at, timeout=30)
                state = str((tree.get("data") or {}).get("state"))
                if state not in ("ready", "None", ""):
                    break
            took = time.monotonic() - began
            tell(
                f"{state} after {took:.1f} s: {(tree.get('data') or {}).get('meaning', '')}",
                state != "ready" and took < 5,
            )
        run.keep_logs(f"kill-{who}")
        stop(run, f"stop-after-{who}", idle)


def without_engram(run: Run) -> None:
    """The pack without its tables: refused three times over."""
    sys.path.insert(0, str(REPOSITORY))
    from tests.fakes.packs import strip  # the same surgery as on the CPU engine

    source = Path(run.env["DS41_DATA_DIR"]) / "models" / "tiny-v41"
    target = run.work / "stripped"
    target.mkdir(exist_ok=True)
    for path in source.iterdir():
        if path.suffix == ".json" or path.name.startswith("model-00001"):
            (target / path.name).write_bytes(path.read_bytes())
    tree = json.loads((source / "model.safetensors.index.json").read_text())
    tree["weight_map"] = {key: file for key, file in tree["weight_map"].items() if "engram.embed" not in key}
    (target / "model.safetensors.index.json").write_text(json.dumps(tree))
    for name in ("model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors"):
        strip(source / name, target / name)
    text = run.profile.read_text().replace('kind = "recipe"\nrecipe = "tiny-v41"', 'kind = "local"')
    text = text.replace('dir = "models/tiny-v41"', f'dir = "{target}"').replace(
        f'name = "{run.profile.stem}"', 'name = "stripped"', 1
    )
    path = run.work / "stripped.toml"
    path.write_text(text)
    at = ["--profile", str(path)]
    with part(run, "no Engram: preflight", "exit 12, names pack.engram-tensors") as tell:
        code, tree = run.cli("stripped-preflight", "serve", *at, *run.skips, timeout=120)
        tell(f"exit {code} {message(tree)}", code == 12 and "engram-tensors" in message(tree))
    skips = [
        *run.skips,
        *("--skip-check", "pack.engram-tensors", "--skip-check", "engram.storage", "--skip-check", "env"),
    ]
    with part(run, "no Engram: the engine's plugin", "exit 16, names layers.1.engram.embed") as tell:
        code, tree = run.cli("stripped-plugin", "serve", *at, *skips, timeout=300)
        run.keep_logs("stripped-plugin")
        tell(f"exit {code} {message(tree)}", code == 16 and "engram.embed" in message(tree))
    path.write_text(text.replace("[serve.env]", '[serve.env]\nDS41_ENGRAM_UNFILLED = "1"'))
    with part(run, "no Engram: only the smoke is left", "exit 1, smoke.copy fails and names the Engram") as tell:
        code, tree = run.cli("stripped-serve", "serve", *at, *skips, timeout=300)
        run.keep_logs("stripped-served")
        code, tree = run.cli("stripped-smoke", "smoke", *at, timeout=240)
        copy = next((item for item in findings_of(tree) if item["id"] == "smoke.copy"), {})
        tell(f"exit {code}, {copy.get('status')}: {copy.get('why')}", code == 1 and "Engram" in str(copy.get("why")))
    run.cli("stripped-stop", "stop", *at, timeout=150)


def main() -> int:
    """Run the parts; exit 0 when every row is OK."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--site", type=Path, help="folder of an engine made by `pip install --target`")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install the engine from first")
    parser.add_argument("--profile", type=Path, default=REPOSITORY / "profiles" / "gpu-tiny.toml")
    parser.add_argument("--parts", default="measure,main,kills,engram")
    chosen = parser.parse_args()
    run = Run(chosen.out.resolve(), chosen.site, chosen.profile)
    parts = {
        "measure": lambda: measure(run),
        "main": lambda: main_job(run),
        "kills": lambda: kills(run),
        "engram": lambda: without_engram(run),
    }
    if chosen.wheels is not None:
        install(run, chosen.wheels)
    for name in chosen.parts.split(","):
        with part(run, f"part {name}", "runs to its end") as tell:
            parts[name]()
            tell("done", True)
    return 0 if all(row["ok"] for row in run.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
