"""GPU kernels of ds41_kernels for a card: compiled with NVRTC from PyPI wheels, checked on the card itself.

The compiler lives beside the compiled images in the cache, not in the engine's venv: it is needed once.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ds41ctl.adapters import kernels, proc
from ds41ctl.core.errors import IntegrityError, NetworkError, UnsupportedError

PIP_TIMEOUT_S = 1800.0
CHECK_TIMEOUT_S = 600.0
Progress = Callable[[str, dict[str, Any]], None]


def builder() -> ModuleType:
    """ds41_kernels/build.py, loaded by path: it needs the standard library only."""
    name = "ds41_kernels_build"
    if name not in sys.modules:
        path = kernels.source() / "ds41_kernels" / "build.py"
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise UnsupportedError(f"{path} is missing", hints=("install ds41ctl again",))
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # its dataclasses look their module up
        spec.loader.exec_module(module)
    return sys.modules[name]


def image_dir(cache_dir: Path) -> Path:
    """Where compiled images are kept."""
    return cache_dir / "kernels" / "gpu"


def toolchain_dir(cache_dir: Path) -> Path:
    """Where the compiler's wheels are installed; the name changes with the pins."""
    return cache_dir / "kernels" / "nvrtc-{}".format(builder().PINS[0].rpartition("==")[2])


def install_toolchain(cache_dir: Path, python: Path, env: Mapping[str, str], progress: Progress) -> Path:
    """The compiler's wheels (130 MB), installed by the pip of ``python`` when they are not there yet.

    Raises NetworkError with pip's last line.
    """
    folder = toolchain_dir(cache_dir)
    if folder.is_dir():
        return folder
    part = folder.with_name(f"{folder.name}.{os.getpid()}.part")
    progress("compiler of the GPU kernels (NVRTC 12.8)", {})
    argv = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target", str(part)]
    try:
        done = proc.run([*argv, *builder().PINS], timeout=PIP_TIMEOUT_S, env=env)
        if not done.ok:
            last = (done.stderr.strip() or done.stdout.strip() or "pip said nothing").splitlines()[-1]
            offline = (f"the folder of wheels needs {' '.join(builder().PINS)} too",) if env.get("PIP_NO_INDEX") else ()
            raise NetworkError(f"installing the compiler of the GPU kernels: {last}", hints=offline)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


def build(
    cache_dir: Path,
    capability: str,
    python: Path,
    env: Mapping[str, str],
    progress: Progress,
    *,
    bits: Sequence[int] = (1, 2, 3, 4, 5, 6, 7, 8),
    codebooks: Sequence[str] = ("3inst", "mcg", "mul1"),
) -> list[Path]:
    """The images for a card, from the cache where the same sources were compiled before.

    Args:
        cache_dir: DS41_CACHE_DIR.
        capability: compute capability, for example ``7.0``.
        python: an interpreter with pip, the engine's.
        env: environment of pip.
        progress: told what is being done.
        bits: bits per weight of the pack's experts; fewer build faster.
        codebooks: codebooks of the pack.

    Raises:
        NetworkError: the compiler cannot be fetched.
        UnsupportedError: an older card, or sources that do not compile or break their limits.
    """
    module = builder()
    folder = install_toolchain(cache_dir, python, env, progress)
    try:
        major, _, minor = capability.partition(".")
        target = module.target_for(int(major), int(minor or 0))
        progress(f"GPU kernels for {target}", {})
        variant = module.Variant(tuple(bits), tuple(codebooks))
        images = module.build(target, image_dir(cache_dir), variant, module.find_toolchain([folder]))
    except module.BuildError as error:
        raise UnsupportedError(f"GPU kernels: {error}") from None
    return [image.path for image in images]


def compiled(cache_dir: Path, capability: str, *, bits: Sequence[int], codebooks: Sequence[str]) -> bool:
    """True when `build` with these arguments has nothing to do."""
    module, folder = builder(), toolchain_dir(cache_dir)
    if not folder.is_dir():
        return False
    try:
        major, _, minor = capability.partition(".")
        target = module.target_for(int(major), int(minor or 0))
        variant = module.Variant(tuple(bits), tuple(codebooks))
        return bool(module.cached(target, image_dir(cache_dir), variant, module.find_toolchain([folder])))
    except module.BuildError:
        return False


def selfcheck(
    cache_dir: Path, python: Path, env: Mapping[str, str], *, bits: Sequence[int], codebooks: Sequence[str]
) -> list[dict[str, Any]]:
    """Every kernel against the reference on the card that serves; the checks, all of them passed.

    Raises:
        IntegrityError: a kernel differs; the engine must not serve.
        UnsupportedError: it cannot run at all: no card, no driver, no image.
    """
    argv = [str(python), "-m", "ds41_kernels.selfcheck", "--cache", str(image_dir(cache_dir))]
    argv += ["--bits", ",".join(map(str, bits)), "--codebooks", ",".join(codebooks)]
    done = proc.run(argv, timeout=CHECK_TIMEOUT_S, env={**env, "DS41_NVRTC_PATH": str(toolchain_dir(cache_dir))})
    checks: list[dict[str, Any]] = []
    for line in done.stdout.splitlines():
        try:
            checks.append(json.loads(line))
        except ValueError:
            continue  # a library's own chatter
    wrong = [f"{check['check']}: {check['found']}" for check in checks if not check.get("ok")]
    if wrong:
        raise IntegrityError(
            f"a GPU kernel differs from the reference: {wrong[0]}",
            detail=wrong[1:],
            hints=(f"rm -r {image_dir(cache_dir)}   # and install again",),
        )
    if not done.ok or not checks:
        said = "no answer in time" if done.timed_out else (done.stderr.strip().splitlines() or ["no check ran"])[-1]
        raise UnsupportedError(f"the GPU kernels cannot be checked: {said}")
    return checks
