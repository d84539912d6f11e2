"""Checks of programs a GPU engine needs while it runs: compilers, ninja, a container runtime."""

from __future__ import annotations

import re

from ds41ctl.core.facts import HostFacts
from ds41ctl.core.profile import Profile
from preflight.check import Check, Stage, Verdict, fail, ok, skip, unknown
from preflight.text import command, install

GROUP = "TOOLCHAIN"
CUDA_FOR_VOLTA = (12, 8)  # CUDA 13 dropped compute capability 7.0 (seed recipe: the stack stays on 12.8)


def _compiles(profile: Profile) -> bool:
    return profile.engine.kind == "venv" and profile.hardware.gpus > 0


def nvcc(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """The CUDA compiler, where torch's extension builder will look for it."""
    if not _compiles(profile):
        return skip("nothing is compiled for GPUs on this host")
    volta = profile.hardware.compute_capability == "7.0"
    expected = "nvcc 12.8" if volta else "nvcc"
    home = facts.environment.get("CUDA_HOME", "")
    if home and (home.startswith(":") or ":" in home):
        return fail(
            f"CUDA_HOME is not a folder: {home}",
            expected="one folder",
            found=home,
            fix=(f"export CUDA_HOME={home.strip(':').split(':')[0]}",),
        )
    tool = facts.tool("nvcc")
    fix = ("install the CUDA 12.8 toolkit", "export CUDA_HOME=/usr/local/cuda-12.8")
    if not tool.path:
        where = f"not below CUDA_HOME={home}" if home else "not on PATH"
        return fail("nvcc is not there", expected=expected, found=where, fix=fix)
    match = re.search(r"release (\d+)\.(\d+)", tool.version)
    if match is None:
        return unknown("nvcc does not state its version", expected=expected, fix=(f"{tool.path} --version", *fix))
    found = f"{match[1]}.{match[2]}"
    if volta and (int(match[1]), int(match[2])) != CUDA_FOR_VOLTA:
        return fail(
            f"nvcc {found} does not fit the engine's CUDA 12.8",
            expected=expected,
            found=f"{found} ({tool.path})",
            fix=fix,
            why="CUDA 13 cannot compile for Volta, and an older one lacks what the kernels use",
        )
    return ok(f"nvcc {found}", expected=expected, found=f"{found} ({tool.path})")


def cxx(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """C++ compiler and ninja: the Engram reader and some kernels compile at the first start."""
    if not _compiles(profile):
        return skip("nothing is compiled on this host")
    names = {"c++": "g++", "ninja": "ninja-build"}
    missing = [name for name in names if not facts.tool(name).path]
    if missing:
        return fail(
            f"{' and '.join(missing)} not installed",
            expected="c++ and ninja on PATH",
            found=f"no {', no '.join(missing)}",
            fix=tuple(install(names[name], facts.system, {"arch": "gcc"} if name == "c++" else {}) for name in missing),
        )
    return ok(facts.tool("c++").version or facts.tool("c++").path, expected="c++ and ninja on PATH", found="both")


def container(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """docker or podman for a container engine."""
    if profile.engine.kind != "container":
        return skip("the engine is a venv")
    found = next((facts.tool(name) for name in ("docker", "podman") if facts.tool(name).path), None)
    if found is None:
        return fail(
            "neither docker nor podman is installed",
            expected="docker or podman on PATH",
            found="neither",
            fix=(install("docker.io", facts.system, {"fedora": "moby-engine", "arch": "docker"}),),
        )
    if not found.version:
        return unknown(
            f"{found.name} does not answer",
            expected="docker or podman that answers",
            fix=(f"{found.path} --version", command("preflight", profile)),
        )
    return ok(found.version, expected="docker or podman on PATH", found=found.path)


CHECKS = (
    Check(
        "toolchain.nvcc",
        "CUDA compiler of the right version",
        1,
        GROUP,
        "an engine that fails at its first kernel build, or builds nothing for Volta",
        nvcc,
    ),
    Check(
        "toolchain.cxx",
        "C++ compiler and ninja",
        1,
        GROUP,
        "an Engram reader that cannot be compiled, found minutes into the start",
        cxx,
    ),
    Check(
        "toolchain.container",
        "docker or podman",
        1,
        GROUP,
        "a container engine without a container runtime",
        container,
    ),
)
