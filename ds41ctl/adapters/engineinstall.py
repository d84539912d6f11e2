"""Installing a venv engine: a new generation beside the one in use, proven before it takes its place."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ds41ctl.adapters import deep, enginepython, enginevenv, files, generations, kernels, proc, release, series, supply
from ds41ctl.adapters.enginevenv import Progress
from ds41ctl.adapters.supply import Supply
from ds41ctl.core.errors import IntegrityError, NetworkError, NoSpaceError, UnsupportedError
from ds41ctl.core.launch import INHERITED
from ds41ctl.core.layout import Layout, default_python

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
_QUIET = ("install", "--no-deps", "--no-compile", "--only-binary=:all:", "--progress-bar=off")


@dataclass(frozen=True)
class Job:
    """One install: where from, with what environment, told to whom. `folder`: wheels instead of an index; `wheel`: the
    release's, proven."""

    layout: Layout
    env: dict[str, str]
    progress: Progress
    folder: Path | None
    wheel: Path | None = None

    @property
    def source(self) -> list[str]:
        """pip's options for where packages come from."""
        if self.folder is None:
            return []
        return ["--no-index", "--find-links", str(self.folder)]


def pip_environment(environ: Mapping[str, str], from_folder: Path | None) -> dict[str, str]:
    """What pip may see of this shell; with a folder of wheels it asks no index, whatever this machine's pip is told."""
    env = {key: value for key, value in environ.items() if key in _INSTALL_ENV or key.startswith(_INSTALL_PREFIXES)}
    if from_folder is None:
        return env
    # the folder and the lock say everything; an index or a constraint of this machine's pip has no say
    env = {key: value for key, value in env.items() if not key.startswith("PIP_")}
    return env | {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(from_folder)}


def install(layout: Layout, environ: Mapping[str, str], progress: Progress, given: Supply | None = None) -> None:
    """Install the profile's engine as a new generation, prove it, and use it; the one before stays until then.

    What a release has to be asked for comes first. Raises UnsupportedError, NotFoundError, NetworkError, IntegrityError
    or NoSpaceError, those of pip with its own last words; the engine in use is untouched then.
    """
    engine = layout.profile.engine
    _installable(layout)
    given = given or Supply()
    python = enginepython.find(layout)
    for notice in engine.notices:
        progress(notice, {"note": True})
    previous = enginevenv.read_manifest(layout.engine_dir)
    news = supply.is_news(layout, given)
    clone = previous is not None and not news and only_plugin_changed(layout, previous, enginevenv.wanted(layout))
    wheel = release.wheel(layout, given, progress) if engine.wheel and not clone else None
    env = pip_environment(environ, given.folder)
    job = Job(layout, env, progress, given.folder, wheel)
    made_from = enginevenv.wanted(layout)  # after the wheel: a checksum file may have been accepted with it
    folder = generations.new(layout.engine_dir, hashlib.sha256(repr(sorted(made_from.items())).encode()).hexdigest())
    try:
        if clone:
            progress("ds41_engine and ds41_kernels beside the engine as it is", {})
            generations.clone(layout.engine_dir, folder)
        else:
            _packages(job, folder, python)
        if engine.plugin:
            progress("ds41_engine and ds41_kernels", {})
            _plugin(job, folder)
        site = enginevenv.site_packages(folder)
        patches = series.load(series.folder(engine.name))
        if patches:
            progress(f"{len(patches)} source patches", {})
            series.apply_all(site, patches)
        progress("compiling bytecode", {})
        # bytecode halves the engine's start; a file of another Python version that does not compile is not a fault
        own = str(folder / "venv" / "bin" / "python")
        proc.stream([own, "-m", "compileall", "-q", "-j", "0", str(site)], env=env, on_line=lambda line: None)
        progress("proving that it imports", {})
        probe = _proven(layout, folder, environ)
        files.publish_json(
            folder / generations.MANIFEST,
            {
                "format": enginevenv.FORMAT,
                "engine": engine.name,
                "made_from": made_from,
                "installed_at": datetime.now(UTC).isoformat(timespec="milliseconds"),  # orders the generations
                "distributions": enginevenv.distributions(site),
                "probe": probe,
                "notices": list(engine.notices),
                "patched": [patch.file for patch in patches],
            },
        )
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    generations.use(layout.engine_dir, folder.name)
    generations.prune(layout.engine_dir)


def _installable(layout: Layout) -> None:
    """Raises UnsupportedError for an engine that nothing here says how to install."""
    engine = layout.profile.engine
    if engine.kind != "venv" or not (engine.lock or engine.wheel):
        raise UnsupportedError(
            f"this version cannot install the engine of {layout.name} ({engine.kind}); "
            "it installs venv engines with a committed lock or a pinned wheel",
            hints=(
                *layout.profile.lacks,
                "DS41_PYTHON=/path/to/venv/bin/python uses an engine you installed yourself",
            ),
        )


def only_plugin_changed(layout: Layout, previous: dict[str, Any], made_from: dict[str, str]) -> bool:
    """True when the venv is as its manifest says and differs from what is wanted by our own sources alone."""
    before = previous["made_from"]
    changed = {key for key in made_from if before.get(key, "") != made_from[key]}
    if not changed or not changed <= {"plugin_sha256", "kernels_sha256"}:
        return False
    return not enginevenv.drift(layout, previous, every_file=False)


def _packages(job: Job, folder: Path, python: str) -> None:
    """The venv and everything that is not ours."""
    engine = job.layout.profile.engine
    venv = folder / "venv"
    job.progress(f"venv with Python {engine.python or default_python()}", {})
    options = ["--system-site-packages"] if engine.system_packages else []
    _pip([python, "-m", "venv", *options, str(venv)], job, "making the venv")
    if engine.system_packages:
        _see_venv(python, folder)
    pip = _pip_argv(folder)
    if job.folder is None and engine.lock:
        job.progress("pip with support for the lock's digests", {})
        _pip([*pip, "install", "--progress-bar=off", "pip>=25"], job, "updating pip")
    if engine.torch:
        job.progress(engine.torch, {})
        torch = [*pip, *_QUIET, *job.source, engine.torch]
        try:
            _pip(torch, job, engine.torch)
        except (IntegrityError, NetworkError):
            if not engine.torch_index or job.folder is not None:
                raise
            job.progress(f"{engine.torch} from {engine.torch_index}", {})
            _pip([*torch, "--index-url", engine.torch_index], job, engine.torch)
    if engine.lock:
        job.progress("packages of the lock", {})
        lock = ["--require-hashes", "-r", str(enginevenv.lock_path(job.layout))]
        _pip([*pip, *_QUIET, *job.source, *lock], job, "the engine's packages")
    if engine.wheel:
        _engine_wheel(job, pip)


def _see_venv(python: str, folder: Path) -> None:
    """--system-site-packages shows what lies beside the interpreter itself; when that one is a venv's (as in images
    with CUDA), the venv's own packages are shown by a path file."""
    ask = "import json, site, sys; print(json.dumps(site.getsitepackages() if sys.prefix != sys.base_prefix else []))"
    paths = json.loads(proc.run([python, "-I", "-c", ask], timeout=60).stdout or "[]")
    if paths:
        lines = [f"import site; site.addsitedir({path!r})" for path in paths]
        (enginevenv.site_packages(folder) / "ds41_system_packages.pth").write_text("\n".join(lines) + "\n")


def _engine_wheel(job: Job, pip: list[str]) -> None:
    """The release's wheel with what it depends on, and ninja: such an engine compiles at its first start."""
    engine, wheel = job.layout.profile.engine, job.wheel
    assert wheel is not None  # noqa: S101 - got before the venv was made
    job.progress(wheel.name, {})
    here = job.folder is not None and any(path.name.startswith("torch-") for path in job.folder.glob("*.whl"))
    # a folder that holds torch too is meant to hold everything; else the index and torch's own are asked
    source = job.source if here else (["--extra-index-url", engine.torch_index] if engine.torch_index else [])
    _pip([*pip, "install", "--no-compile", "--progress-bar=off", *source, str(wheel), "ninja"], job, engine.wheel)


def _plugin(job: Job, folder: Path) -> None:
    """Our own two distributions, built where the venv can build them, else placed file by file."""
    scratch = Path(job.env.get("TMPDIR", "/tmp")) / f"ds41-engine-{os.getpid()}"  # noqa: S108 - removed below
    sources = (enginevenv.plugin_source(), kernels.source())
    pip = _pip_argv(folder)
    own = str(folder / "venv" / "bin" / "python")
    can_build = proc.run([own, "-c", "import hatchling"], timeout=60).ok
    try:
        # a copy: the source may be read-only, and a build must not leave files beside it
        for source in sources:
            ignored = shutil.ignore_patterns("__pycache__", "*.pyc", "*.so")
            shutil.copytree(source, scratch / source.name, ignore=ignored)
        if can_build:
            options = ["--no-deps", "--no-compile", "--no-build-isolation", "--force-reinstall", "--progress-bar=off"]
            folders = [str(scratch / source.name) for source in sources]
            # the hook of ds41_kernels compiles it; without a compiler it installs the sources and numpy is used
            _pip([*pip, "install", "--no-index", *options, *folders], job, "ds41_engine and ds41_kernels")
            return
        site = enginevenv.site_packages(folder)
        module = kernels.compiler_module()
        module.compile_library(scratch / sources[1].name / "ds41_kernels" / module.LIBRARY)
        for source in sources:
            _place(scratch / source.name, site)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _place(source: Path, site: Path) -> None:
    """What `pip install` of one of our pure distributions does: package, metadata, entry points, RECORD."""
    project = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    package = project["name"].replace("-", "_")
    shutil.rmtree(site / package, ignore_errors=True)
    shutil.copytree(source / package, site / package)
    info = site / f"{package}-{project['version']}.dist-info"
    shutil.rmtree(info, ignore_errors=True)
    info.mkdir()
    text = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(text)
    (info / "INSTALLER").write_text("ds41ctl\n")
    lines = []
    for group, entries in project.get("entry-points", {}).items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    rows = []
    for path in sorted([*(site / package).rglob("*"), *info.iterdir()]):
        if path.is_file():
            data = path.read_bytes()
            encoded = files.record_digest(hashlib.sha256(data).hexdigest())
            rows.append(f"{path.relative_to(site)},sha256={encoded},{len(data)}")
    (info / "RECORD").write_text("\n".join([*rows, f"{info.name}/RECORD,,"]) + "\n")


def _proven(layout: Layout, folder: Path, environ: Mapping[str, str]) -> dict[str, Any]:
    """Import torch and vLLM in a process of its own; what it says of itself. Raises IntegrityError when it is another
    engine than the profile's."""
    engine, card = layout.profile.engine, layout.profile.hardware.compute_capability
    clean = {name: environ[name] for name in INHERITED if name in environ}
    found = deep.abi(folder / "venv" / "bin" / "python", clean)
    hint = ("ds41ctl engine list   # the one before is still in use",)
    if not found.ok:
        raise IntegrityError(f"the engine was installed and cannot be imported: {found.problem}", hints=hint)
    if not Path(found.vllm_file).is_relative_to(enginevenv.site_packages(folder)):
        raise IntegrityError(f"vllm is imported from {found.vllm_file}, not from the engine", hints=hint)
    if engine.cuda and found.torch_cuda.split(".")[:2] != engine.cuda.split(".")[:2]:
        raise IntegrityError(
            f"torch {found.torch} is built for CUDA {found.torch_cuda or 'none'}, {engine.cuda} wanted", hints=hint
        )
    arch = "sm_" + card.replace(".", "")
    if card and found.arch_list and arch not in found.arch_list:
        raise IntegrityError(
            f"torch {found.torch} has no kernels for {arch} ({', '.join(found.arch_list)})", hints=hint
        )
    return {"torch": found.torch, "cuda": found.torch_cuda, "arch_list": list(found.arch_list)}


def _pip_argv(folder: Path) -> list[str]:
    return [str(folder / "venv" / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input"]


def _pip(argv: list[str], job: Job, what: str) -> None:
    lines: list[str] = []

    def on_line(line: str) -> None:
        lines.append(line)
        if line.startswith(("Downloading", "Collecting", "Installing", "Processing")):
            job.progress(line.strip()[:100], {})

    status = proc.stream(argv, env=job.env, on_line=on_line)
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
    first = errors[0].strip() if errors else f"pip ended with {status}"
    where = f" (only {job.folder} was looked into)" if job.folder is not None else ""
    raise IntegrityError(f"installing {what}: {first}{where}", detail=tail)
