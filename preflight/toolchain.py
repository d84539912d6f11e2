"""Checks of programs a GPU engine needs while it runs: compilers, ninja, a container runtime."""

from __future__ import annotations

import re

from ds41ctl.core.facts import HostFacts
from ds41ctl.core.launch import passed_on
from ds41ctl.core.profile import Profile
from preflight.check import Check, Stage, Verdict, fail, ok, skip, unknown, warn
from preflight.text import GIB, as_root, command, install, size, version

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
    asked = facts.container
    if asked is not None and asked.answers is False:
        return fail(
            f"{asked.runtime} is installed and does not answer: {asked.problem}",
            expected="a container runtime that this user may ask",
            found=asked.problem,
            fix=(
                as_root("systemctl start docker", facts.system),
                as_root("usermod -aG docker $USER   # and log in again", facts.system),
            ),
        )
    if not found.version or asked is None or asked.answers is None:
        return unknown(
            f"{found.name} does not answer",
            expected="docker or podman that answers",
            fix=(f"{found.path} --version", command("preflight", profile)),
        )
    return ok(found.version, expected="docker or podman on PATH", found=found.path)


def nvrtc(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """The run-time compiler that makes the kernels."""
    if not _compiles(profile):
        return skip("nothing is compiled for GPUs on this host")
    wanted = profile.engine.cuda
    expected = f"libnvrtc {wanted}" if wanted else "libnvrtc"
    fix = (
        f"install the CUDA {wanted or 'toolkit'} toolkit, with NVRTC",
        f"export CUDA_HOME=/usr/local/cuda-{wanted or '12.8'}",
    )
    found = facts.cuda
    if found is None:
        return unknown("the CUDA toolkit was not looked for", expected=expected, fix=("ls $CUDA_HOME/lib64/libnvrtc*",))
    if not found.nvrtc:
        return fail(
            f"there is no libnvrtc below {found.home or 'CUDA_HOME'}",
            expected=expected,
            found="none",
            fix=fix,
        )
    if wanted and version(found.nvrtc_version)[:2] != version(wanted)[:2]:
        return fail(
            f"libnvrtc {found.nvrtc_version} does not fit the engine's CUDA {wanted}",
            expected=expected,
            found=f"{found.nvrtc_version} ({found.nvrtc})",
            fix=fix,
            why="CUDA 13 compiles nothing for Volta",
        )
    return ok(found.nvrtc_version, expected=expected, found=found.nvrtc)


COMPILER_BYTES = 4 * GIB  # policy: what one C++ or CUDA compiler may take while it builds a kernel file


def max_jobs(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """As many compilers at once as the memory holds: ninja starts one a CPU and two more."""
    if not _compiles(profile):
        return skip("nothing is compiled on this host")
    text = passed_on(profile).get("MAX_JOBS", "")
    jobs = int(text) if text.isdecimal() and int(text) else facts.system.cpus + 2
    available = facts.memory.available
    expected = "MAX_JOBS compilers of 4 GiB within the available memory"
    if available is None or not facts.system.cpus:
        return unknown("CPUs or memory are not known", expected=expected, fix=("nproc; free -g",))
    if jobs * COMPILER_BYTES > available:
        fitting = max(1, int(available // COMPILER_BYTES))
        return warn(
            f"{jobs} compilers at once may take {size(jobs * COMPILER_BYTES)}, {size(available)} is available",
            expected=expected,
            found=f"{jobs} ({'MAX_JOBS' if text else 'one a CPU and two more'})",
            fix=(f'set MAX_JOBS = "{fitting}" in [serve.env] of profile {profile.name}',),
            why="the kernel would end a compiler, and the engine with it, in the middle of the first start",
        )
    return ok(f"{jobs} at once", expected=expected, found=str(jobs))


CDI_DEVICE = "nvidia.com/gpu"


def _cdi_name(profile: Profile) -> str:
    """The CDI device the command line asks for, '' when it asks for none."""
    found = [word for word in profile.serve.argv if word.startswith(CDI_DEVICE + "=")]
    return found[0] if found else ""


def cdi(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """The CDI device of the command line can be resolved."""
    wanted = _cdi_name(profile)
    if profile.engine.kind != "container" or not wanted:
        return skip("no CDI device is asked for")
    expected = f"{wanted} in a CDI specification"
    generate = as_root("nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml", facts.system)
    found = facts.container
    if found is None or found.specs is None:
        return unknown("the CDI specifications are not known", expected=expected, fix=("nvidia-ctk cdi list",))
    kind, _, name = wanted.partition("=")
    if not any(spec.kind == kind and name in spec.devices for spec in found.specs if not spec.problem):
        return fail(
            f"no CDI specification names {wanted}",
            expected=expected,
            found=", ".join(spec.path for spec in found.specs) or "no specification",
            fix=(generate, "nvidia-ctk cdi list"),
            why="the container would not start: unresolvable CDI devices",
        )
    if found.cdi_enabled is False:
        return fail(
            f"{found.runtime} has CDI switched off",
            expected=expected,
            found="feature cdi is off",
            fix=(
                'add "features": {"cdi": true} to /etc/docker/daemon.json',
                as_root("systemctl restart docker", facts.system),
            ),
        )
    if found.cdi_enabled is None:
        return unknown(
            f"whether {found.runtime or 'the runtime'} reads CDI specifications is not known",
            expected=expected,
            fix=("docker info | grep -i cdi",),
        )
    return ok(wanted, expected=expected, found=wanted)


def cdi_paths(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """Every host file a CDI specification names is there: a driver update leaves them behind."""
    if profile.engine.kind != "container" or not _cdi_name(profile):
        return skip("no CDI device is asked for")
    expected = "every host path of every CDI specification"
    specs = facts.container.specs if facts.container is not None else None
    if specs is None:
        return unknown("the CDI specifications are not known", expected=expected, fix=("nvidia-ctk cdi list",))
    if not specs:
        return skip("there is no CDI specification: see toolchain.cdi")
    stale = [spec for spec in specs if spec.missing or spec.problem]
    if stale:
        first = stale[0]
        what = first.problem or f"{first.missing[0]} is gone"
        return fail(
            f"{first.path}: {what}" + (f" and {len(first.missing) - 1} more" if first.missing[1:] else ""),
            expected=expected,
            found=f"{len(stale)} of {len(specs)} specifications are stale",
            fix=(as_root(f"nvidia-ctk cdi generate --output={first.path}", facts.system),),
            why="the container does not start, or starts with the libraries of the old driver",
            evidence=tuple(f"{spec.path}: {path}" for spec in stale for path in spec.missing[:8]),
        )
    return ok(f"{len(specs)} specification(s)", expected=expected, found="all there")


LOCK_AGE_S = 60.0  # policy: a younger lock may belong to a compiler that is just being started


def jit_locks(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """No lock file of a compiler that died: the next start would wait for it for ever."""
    expected = "no compiler lock without a process that holds it"
    if facts.caches is None:
        return unknown(
            "the caches were not looked at", expected=expected, fix=("ls ~/.cache/torch_extensions/*/*/lock",)
        )
    stale = [lock for lock in facts.caches.locks if not lock.holder and lock.age_s > LOCK_AGE_S]
    if stale:
        return warn(
            f"{stale[0].path}, {stale[0].age_s / 3600:.1f} h old, held by nobody"
            + (f" and {len(stale) - 1} more" if stale[1:] else ""),
            expected=expected,
            found=f"{len(stale)} stale lock(s)",
            fix=tuple(f"rm {lock.path}" for lock in stale[:4]),
            why="torch waits for such a lock without a time limit and without a word",
        )
    return ok("none", expected=expected, found=f"{len(facts.caches.locks)} held" if facts.caches.locks else "none")


def peer_cache(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """No peer-access cache from before this boot, or cut off while it was written."""
    if profile.hardware.gpus < 2:
        return skip("fewer than two GPUs in this profile")
    expected = "no peer-access cache older than this boot"
    if facts.caches is None:
        return unknown("the caches were not looked at", expected=expected, fix=("ls ~/.cache/vllm",))
    bad = [item for item in facts.caches.p2p if not item.valid or item.older_than_boot]
    if bad:
        what = "older than this boot" if bad[0].valid else "cut off"
        return warn(
            f"{bad[0].path} is {what}" + (f" and {len(bad) - 1} more" if bad[1:] else ""),
            expected=expected,
            found=f"{len(bad)} stale cache(s)",
            fix=tuple(f"mv {item.path} {item.path}.old" for item in bad[:4]),
            why="it is kept across driver and card changes: a start hangs, or copies between cards that cannot",
        )
    return ok("none" if not facts.caches.p2p else "of this boot", expected=expected, found="none stale")


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
    Check(
        "toolchain.nvrtc",
        "run-time compiler of the right version",
        1,
        GROUP,
        "kernels that cannot be made for the card, found minutes into the start",
        nvrtc,
    ),
    Check(
        "toolchain.max-jobs",
        "number of compilers at once against memory",
        1,
        GROUP,
        "the kernel ending the first start while it compiles",
        max_jobs,
    ),
    Check(
        "toolchain.cdi",
        "the container runtime can resolve the GPU device",
        1,
        GROUP,
        "a container that does not start: unresolvable CDI devices",
        cdi,
    ),
    Check(
        "toolchain.cdi-paths",
        "host files that CDI specifications name",
        1,
        GROUP,
        "a container that gets the libraries of the driver before the update",
        cdi_paths,
    ),
    Check(
        "toolchain.jit-locks",
        "stale locks of just-in-time compilers",
        1,
        GROUP,
        "a start that waits for ever for a compiler that died",
        jit_locks,
    ),
    Check(
        "toolchain.peer-cache",
        "stale peer-access caches",
        1,
        GROUP,
        "a start that hangs, or peer copies decided by another driver",
        peer_cache,
    ),
)
