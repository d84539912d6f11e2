"""Compiling the library. Standard library only: it also runs where the package is not installed."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = ("gather.cpp", "disk.cpp", "exl3_encode.cpp", "exl3_moe.cpp", "mxfp4.cpp")
STORE_SOURCES = ("gather.cpp",)  # what the builder and the verifier of the store need: a third of the compile time
HEADERS = ("loops.h", "pool.h", "gather_loop.inc", "exl3_loops.inc")
LIBRARY = "libds41_kernels.so"
# no -march: the library must run on every processor of the platform, and chooses its loops when it is loaded;
# no contraction: products and sums are fused where the source says so, so that all loops give the same bits
FLAGS = (
    *("-std=c++17", "-O3", "-ffp-contract=off", "-fPIC", "-shared", "-pthread"),
    *("-fvisibility=hidden", "-Wall", "-Wextra"),
)
COMPILERS = ("c++", "g++", "clang++")
TIMEOUT_S = 300


def compiler() -> str:
    """Path of the C++ compiler: ``CXX``, else the first of :data:`COMPILERS` on PATH; '' when there is none."""
    for name in (os.environ.get("CXX", ""), *COMPILERS):
        found = shutil.which(name) if name else None
        if found:
            return found
    return ""


def source_digest(sources: Sequence[str] = SOURCES) -> str:
    """sha256 over names and bytes of everything that goes into a library of these sources, and the flags."""
    digest = hashlib.sha256(repr(FLAGS).encode())
    for name in (*sources, *HEADERS):
        digest.update(name.encode() + b"\0" + (HERE / name).read_bytes() + b"\0")
    return digest.hexdigest()


def compile_library(target: Path, sources: Sequence[str] = SOURCES) -> str:
    """Compile these sources into ``target`` (published by rename); '' when done, else one line why not."""
    program = compiler()
    if not program:
        return f"no C++ compiler ({', '.join(COMPILERS)})"
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    argv = [program, *FLAGS, "-o", str(part), *(str(HERE / name) for name in sources)]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
            return f"{program} ended with {done.returncode}: {errors[0].strip()[:200]}"
        part.replace(target)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{program}: {error}"
    finally:
        part.unlink(missing_ok=True)
    return ""


def platform_tag() -> str:
    """Platform tag of a wheel with this library, for example ``linux_x86_64``."""
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")
