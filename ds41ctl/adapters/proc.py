"""Processes: the only importer of subprocess. argv lists, time-outs, identities that survive pid reuse."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class Completed:
    """A finished command. `returncode` is negative for a signal, 127 when the program does not exist."""

    returncode: int
    stdout: str
    stderr: str
    timed_out: bool = False

    @property
    def ok(self) -> bool:
        """Exit status 0 within the time limit."""
        return self.returncode == 0 and not self.timed_out


def run(
    argv: Sequence[str],
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    input: str | None = None,
    cwd: Path | None = None,
) -> Completed:
    """Run a command to its end. Never raises for a missing program, a time-out or a bad status."""
    try:
        done = subprocess.run(
            list(argv),
            timeout=timeout,
            env=None if env is None else dict(env),
            input=input,
            stdin=subprocess.DEVNULL if input is None else None,
            capture_output=True,
            text=True,
            errors="replace",
            cwd=cwd,
            check=False,
        )
    except FileNotFoundError:
        return Completed(127, "", f"{argv[0]}: not found")
    except PermissionError as error:
        return Completed(126, "", f"{argv[0]}: {error.strerror}")
    except subprocess.TimeoutExpired as error:
        return Completed(124, _text(error.stdout), _text(error.stderr), timed_out=True)
    return Completed(done.returncode, done.stdout, done.stderr)


def _text(data: bytes | str | None) -> str:
    return data.decode(errors="replace") if isinstance(data, bytes) else data or ""


def stream(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    on_line: Callable[[str], None],
    cwd: Path | None = None,
) -> int:
    """Run a long command, giving each output line (stdout and stderr together) to `on_line`; returns the status.

    The child dies with us: it is killed when this call is left by an exception, and by the kernel when we are killed
    (a pip that goes on writing would spoil the next install).
    """
    libc = ctypes.CDLL(None)

    def die_with_parent() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    with subprocess.Popen(
        list(argv),
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        cwd=cwd,
        preexec_fn=die_with_parent,
    ) as child:
        try:
            assert child.stdout is not None  # noqa: S101 - PIPE above
            for line in child.stdout:
                on_line(line.rstrip("\n"))
            return child.wait()
        except BaseException:
            child.kill()
            raise


def spawn_attached(argv: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a child in a session of its own that shares our terminal output (serve --foreground)."""
    return subprocess.Popen(list(argv), stdin=subprocess.DEVNULL, start_new_session=True)


def spawn_detached(argv: Sequence[str], *, pass_fd: int, environ: Mapping[str, str]) -> int:
    """Start a process that outlives us, in a session of its own and without our terminal; returns its pid.

    `pass_fd` stays open in it under the same number.
    """
    child = subprocess.Popen(
        list(argv),
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,
        pass_fds=(pass_fd,),
    )
    pid = child.pid
    child.returncode = 0  # it is not waited for: without this the interpreter warns when it forgets the object
    return pid


@dataclass(frozen=True)
class Identity:
    """A process for certain: pid and start time in clock ticks since boot (field 22 of /proc/pid/stat)."""

    pid: int
    start_ticks: int

    def alive(self) -> bool:
        """True while this very process exists and is not a zombie."""
        found = _stat(self.pid)
        return found is not None and found[1] == self.start_ticks and found[0] != "Z"


def identify(pid: int) -> Identity | None:
    """Identity of a live pid, None when there is none."""
    found = _stat(pid)
    return None if found is None or found[0] == "Z" else Identity(pid, found[1])


def _stat(pid: int) -> tuple[str, int] | None:
    """(state letter, start ticks)."""
    fields = _stat_fields(pid)
    return None if fields is None else (fields[0], int(fields[19]))


def _stat_fields(pid: int) -> list[str] | None:
    """Fields 3 and following of /proc/pid/stat (proc(5) counts from 1)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return text[text.rindex(")") + 2 :].split()


def zombie_ending(pid: int) -> tuple[int | None, int | None] | None:
    """(exit status, signal) of a process that has ended and that nobody has waited for yet; None for any other.

    Field 52 of /proc/pid/stat is the wait status; the kernel shows it to the process's own user.
    """
    fields = _stat_fields(pid)
    if fields is None or fields[0] != "Z":
        return None
    status = int(fields[49])
    signal_number = status & 0x7F
    return (None, signal_number) if signal_number else (status >> 8, None)


def pids() -> list[int]:
    """Every process id of this moment."""
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]


def cpu_seconds(of: Iterable[int]) -> float:
    """CPU time (user + system) the processes have used so far, in seconds; the dead count 0."""
    total = 0.0
    for pid in of:
        try:
            times = psutil.Process(pid).cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system
    return total


@dataclass(frozen=True)
class Usage:
    """What some processes hold and have done: CPU seconds, resident bytes, bytes read from storage."""

    pids: frozenset[int]
    cpu_s: float
    rss: int
    read_bytes: int


def usage(of: Iterable[int]) -> Usage:
    """Sums over the processes that are still there; what may not be read counts 0."""
    alive, cpu, rss, read = set(), 0.0, 0, 0
    for pid in of:
        try:
            process = psutil.Process(pid)
            times = process.cpu_times()
            cpu += times.user + times.system
            rss += process.memory_info().rss
            alive.add(pid)
            read += process.io_counters().read_bytes
        except psutil.Error:
            continue
    return Usage(frozenset(alive), cpu, rss, read)


def family(root: int, marker: str, *, session: Identity | None = None) -> list[Identity]:
    """The process, its descendants, every process of ours whose environment holds `marker` (NAME=value), and those of
    the session that `session` led: the kernel gives its number to nobody else while one of them lives, so only another
    process with that number says that it was given away.

    The marker also finds workers that were re-parented or left the session when their parent was killed; the session
    those that have written a title over their environment, as vLLM's engine core and workers do.
    """
    found: dict[int, Identity] = {}
    wanted = marker.encode()
    leader = _stat(session.pid) if session is not None and session.pid else None
    recycled = leader is not None and session is not None and leader[1] != session.start_ticks
    number = session.pid if session is not None and not recycled else 0
    for pid in pids():
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        fields = _stat_fields(pid) if number else None
        if wanted in environ.split(b"\0") or (fields is not None and int(fields[3]) == number):
            identity = identify(pid)
            if identity is not None:
                found[identity.pid] = identity
    try:
        tree = [psutil.Process(root), *psutil.Process(root).children(recursive=True)]
    except psutil.Error:
        tree = []
    for process in tree:
        identity = identify(process.pid)
        if identity is not None:
            found.setdefault(identity.pid, identity)
    return list(found.values())


def carries(pid: int, name: str) -> bool:
    """True when the process has the environment variable; False also for a process this user may not look at."""
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return environ.startswith(f"{name}=".encode()) or f"\0{name}=".encode() in environ


# what Python's multiprocessing, torch and vLLM name their segments; an engine that was killed does not unlink them
_SHARED = Path("/dev/shm")  # noqa: S108 - where the kernel keeps POSIX shared memory, not a place for temporary files
_SEGMENT = re.compile(r"(?:psm_|sem\.mp-|torch_|vllm_dist_)[^\s/]+")
_MAPPED = re.compile(r"^\S+ \S+ \S+ ([0-9a-f]+):([0-9a-f]+) (\d+) +/dev/shm/", re.MULTILINE)


def segments(of: Iterable[int]) -> set[str]:
    """Shared-memory files that the processes map, by path.

    Found by device and inode: the C library makes a semaphore under another name and links it, so that its mapping
    names a file that is gone.
    """
    mapped: set[tuple[int, int]] = set()
    for pid in of:
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/maps").read_text(errors="replace")
            mapped |= {(os.makedev(int(a, 16), int(b, 16)), int(inode)) for a, b, inode in _MAPPED.findall(text)}
    found = set()
    for path in _SHARED.glob("*") if mapped else ():
        if not _SEGMENT.fullmatch(path.name):
            continue
        with contextlib.suppress(OSError):
            status = path.lstat()
            if (status.st_dev, status.st_ino) in mapped:
                found.add(str(path))
    return found


def unlink_segments(paths: Iterable[str]) -> None:
    """Remove those files that are ours and that no process maps any more."""
    given = {Path(path) for path in paths}
    wanted = {str(path) for path in given if path.parent == _SHARED and _SEGMENT.fullmatch(path.name) and path.exists()}
    if not wanted:
        return
    wanted -= segments(pids())
    for path in wanted:
        with contextlib.suppress(OSError):
            if Path(path).lstat().st_uid == os.getuid():
                Path(path).unlink()


def title(pid: int) -> str:
    """What a process calls itself: its command line, at most 80 characters; '' when it is gone."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return raw.replace(b"\0", b" ").decode(errors="replace").strip()[:80]


def describe(pid: int) -> str:
    """`pid 12 (command, user name)` for a message."""
    try:
        process = psutil.Process(pid)
        command = " ".join(process.cmdline())[:80] or process.name()
        return f"pid {pid} ({command}, user {process.username()})"
    except psutil.Error:
        return f"pid {pid}"


def terminate(
    identities: Sequence[Identity], *, grace: float, poll: float = 0.1, look: Callable[[], None] = lambda: None
) -> list[Identity]:
    """SIGTERM, wait up to `grace` seconds, SIGKILL; returns who is still alive 5 s after that.

    `look` is called before the first signal and every `poll` seconds from then on.
    """
    look()
    _signal(identities, signal.SIGTERM)
    alive = _wait_gone(identities, grace, poll, look)
    if not alive:
        return []
    _signal(alive, signal.SIGKILL)
    return _wait_gone(alive, 5.0, poll, look)


def _signal(identities: Sequence[Identity], number: signal.Signals) -> None:
    for identity in identities:
        if identity.alive():  # never signal a recycled pid
            try:
                os.kill(identity.pid, number)
            except ProcessLookupError:
                continue
            except PermissionError:
                continue


def _wait_gone(identities: Sequence[Identity], seconds: float, poll: float, look: Callable[[], None]) -> list[Identity]:
    deadline = time.monotonic() + seconds
    alive = [identity for identity in identities if identity.alive()]
    while alive and time.monotonic() < deadline:
        time.sleep(poll)
        look()
        alive = [identity for identity in alive if identity.alive()]
    return alive


_CAP_SYS_ADMIN = 21  # bit number, linux/capability.h


def may_mount() -> bool:
    """True when this process may mount: root with CAP_SYS_ADMIN (a container's root lacks it), or `sudo -n`."""
    if os.geteuid():
        return sudo_passwordless()
    with contextlib.suppress(OSError):
        found = re.search(r"^CapEff:\s*([0-9a-f]+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
        return found is None or bool(int(found.group(1), 16) >> _CAP_SYS_ADMIN & 1)
    return True


def sudo_passwordless() -> bool:
    """True when `sudo -n true` works (never prompts)."""
    return run(["sudo", "-n", "true"], timeout=5).ok
