"""The clock lease: journalled before a GPU is touched, guarded by a process, undone when its owner is gone."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Literal

from pydantic import ValidationError

from ds41ctl.adapters import files, kernel, nvml, proc
from ds41ctl.adapters.store import boot_id
from ds41ctl.core.errors import DeniedError, Ds41Error, LockedError
from ds41ctl.core.lease import Lease, Process, Reading

SUDO_TIMEOUT_S = 10.0  # policy
GUARDIAN_READY_S = 20.0  # policy: Python and NVML on a busy machine
LOCK_WAIT_S = 30.0  # policy: another ds41ctl is between two of its writes
SAMPLE_EVERY_S = 0.05
POLICIES = Path("/") / kernel.GOVERNORS


# ---- ways to reach the hardware


class SudoControl:
    """nvidia-smi through `sudo -n`, one fixed command line a GPU and direction; it never prompts."""

    def lock(self, uuid: str, mhz: int) -> str:
        """Lock to exactly `mhz`."""
        return _sudo_smi(lock_argv(uuid, mhz))

    def reset(self, uuid: str) -> str:
        """Undo a lock."""
        return _sudo_smi(reset_argv(uuid))


def smi_path() -> str:
    """Absolute path of nvidia-smi: sudoers compares whole paths."""
    return shutil.which("nvidia-smi") or "/usr/bin/nvidia-smi"


def lock_argv(uuid: str, mhz: int) -> list[str]:
    """The command that locks one GPU."""
    return [smi_path(), "-i", uuid, "-lgc", f"{mhz},{mhz}"]


def reset_argv(uuid: str) -> list[str]:
    """The command that undoes a lock."""
    return [smi_path(), "-i", uuid, "-rgc"]


def governor_argv(policy: str) -> list[str]:
    """The command that takes a governor's name on its standard input."""
    return [shutil.which("tee") or "/usr/bin/tee", str(POLICIES / policy / "scaling_governor")]


def _sudo_smi(argv: list[str]) -> str:
    done = proc.run(["sudo", "-n", *argv], timeout=SUDO_TIMEOUT_S)
    said = f"{done.stdout}\n{done.stderr}".strip()
    if done.timed_out:
        return f"no answer in {SUDO_TIMEOUT_S:.0f} s"
    # nvidia-smi says `not supported` or `Insufficient Permissions` for a GPU, then `All done.`, and may exit with 0
    refused = [line for line in said.splitlines() if "not supported" in line.lower() or "insufficient" in line.lower()]
    if refused:
        return refused[0].strip()[:200]
    if done.returncode:
        return (said.splitlines() or [f"exit status {done.returncode}"])[0][:200]
    return ""


def control(way: str) -> nvml.ClockControl:
    """How locks of a lease are made and undone: as root through NVML, else through sudo."""
    return nvml.Nvml() if way == "root" or os.geteuid() == 0 else SudoControl()


def way_of_this_user() -> Literal["root", "sudo"]:
    """NVML itself for root, sudo for others."""
    return "root" if os.geteuid() == 0 else "sudo"


def set_governor(policy: str, governor: str, way: str) -> str:
    """'' or what went wrong."""
    path = POLICIES / policy / "scaling_governor"
    if way == "root" or os.geteuid() == 0:
        try:
            path.write_text(governor + "\n")
        except OSError as error:
            return f"{policy}: {error.strerror}"
        return ""
    done = proc.run(["sudo", "-n", *governor_argv(policy)], timeout=SUDO_TIMEOUT_S, input=governor + "\n")
    return "" if done.ok else f"{policy}: {(done.stderr.strip().splitlines() or ['sudo refused'])[0]}"


def _governor_now(policy: str) -> str:
    try:
        return (POLICIES / policy / "scaling_governor").read_text().strip()
    except OSError:
        return ""


# ---- the journal


def journal(state: Path, profile: str) -> Path:
    """Path of a profile's lease."""
    return state / "clocks" / f"{profile}.json"


def read(path: Path) -> Lease | None:
    """A lease, None when there is none. Raises Ds41Error for one that cannot be understood."""
    try:
        tree = files.read_json(path)
        return None if tree is None else Lease.model_validate(tree)
    except (ValueError, ValidationError, OSError) as error:
        raise Ds41Error(
            f"the clock lease {path} cannot be read: {str(error).splitlines()[0]}",
            hints=(f"rm {path}", "sudo nvidia-smi -rgc   # resets the clocks of every GPU"),
        ) from None


def leases(state: Path) -> list[tuple[Path, Lease]]:
    """All leases of this user."""
    folder = state / "clocks"
    found = [(path, read(path)) for path in sorted(folder.glob("*.json"))] if folder.is_dir() else []
    return [(path, lease) for path, lease in found if lease is not None]


def _write(path: Path, lease: Lease) -> None:
    files.publish(path, [lease.model_dump_json(indent=1).encode()], mode=0o600)


def _forget(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
        files.fsync_dir(path.parent)


@contextlib.contextmanager
def exclusive(state: Path) -> Iterator[None]:
    """One change of leases at a time; waits for another one to end. Raises LockedError when it does not."""
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            stack = contextlib.ExitStack()
            stack.enter_context(files.locked(state / "locks" / "clocks.lock", "the clock lease"))
            break
        except LockedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
    with stack:
        yield


def alive(process: Process | None) -> bool:
    """True while that very process runs."""
    return process is not None and proc.Identity(process.pid, process.start_ticks).alive()


# ---- taking and giving back


def acquire(
    state: Path,
    *,
    profile: str,
    uuids: Sequence[str],
    mhz: int,
    governor: str = "",
    owner: Process | None = None,
) -> tuple[Lease, list[str]]:
    """Lock `uuids` at `mhz` for `owner`; returns the lease and what could not be had beside the lock (governors).

    Journal (durable), guardian (watching), lock: in that order, so that no death leaves a lock nobody knows of.
    Raises DeniedError or Ds41Error, with nothing locked, when a GPU refuses; LockedError when another lease holds
    one of the GPUs.
    """
    path = journal(state, profile)
    with exclusive(state):
        _recover(state)
        for other_path, other in leases(state):
            if other_path == path:
                _give_back(path, other)
            elif set(other.uuids) & set(uuids):
                raise LockedError(
                    f"the clocks of these GPUs are leased to {other.profile}",
                    hints=(f"ds41ctl clocks unlock --profile {other.profile}",),
                )
        if (left := read(path)) is not None:
            raise Ds41Error(f"an earlier lock of {len(left.uuids)} GPUs could not be undone", hints=(_BY_HAND,))
        taken = {policy for _, other in leases(state) for policy in other.governors_before}
        now, _ = kernel.governors(Path("/"))
        before = (
            {policy: name for policy, name in (now or {}).items() if governor and name != governor} if not taken else {}
        )
        lease = Lease(
            profile=profile,
            boot_id=boot_id(),
            mhz=mhz,
            uuids=tuple(uuids),
            governor=governor,
            governors_before=before,
            owner=owner,
            way=way_of_this_user(),
            created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        _write(path, lease)
        if owner is not None:
            try:
                lease = _guard(path, lease)
            except Ds41Error:
                _forget(path)
                raise
        driver = control(lease.way)
        faults = [f"{uuid}: {text}" for uuid in uuids if (text := driver.lock(uuid, mhz))]
        if faults:
            _give_back(path, lease)
            raise _refused(faults, mhz, profile)
        notes = [text for policy in before if (text := set_governor(policy, governor, lease.way))]
        lease = lease.model_copy(update={"locked": True})
        _write(path, lease)
        return lease, notes


_BY_HAND = "sudo nvidia-smi -rgc   # resets the clocks of every GPU"


def _refused(faults: list[str], mhz: int, profile: str) -> Ds41Error:
    denied = any(word in fault.lower() for fault in faults for word in ("permission", "password", "sudo", "not found"))
    kind = DeniedError if denied else Ds41Error
    return kind(
        f"{mhz} MHz cannot be locked: {faults[0]}" + (f" and {len(faults) - 1} more GPUs" if faults[1:] else ""),
        detail=faults if faults[1:] else (),
        hints=(f"ds41ctl clocks sudoers --profile {profile}   # the lines for sudo visudo -f /etc/sudoers.d/ds41ctl",),
    )


def release(state: Path, profile: str, *, of: Process | None = None) -> list[str]:
    """Undo a profile's lease (with `of`: only if it is that owner's); returns what could not be undone."""
    path = journal(state, profile)
    if not path.exists():
        return []
    with exclusive(state):
        lease = read(path)
        if lease is None or (of is not None and lease.owner != of):
            return []
        return _give_back(path, lease)


def _give_back(path: Path, lease: Lease) -> list[str]:
    """Reset what the journal names, forget it, end its guardian. What refuses stays in the journal."""
    faults = restore(path, lease)
    guardian = lease.guardian
    if guardian is not None and guardian.pid != os.getpid() and alive(guardian):
        proc.terminate([proc.Identity(guardian.pid, guardian.start_ticks)], grace=2.0, poll=0.01)
    return faults


def restore(path: Path, lease: Lease) -> list[str]:
    """Reset clocks and governors of a lease of this boot and drop its journal; returns what refused."""
    if lease.boot_id != boot_id():
        _forget(path)  # the driver forgot every lock when the machine went down
        return []
    driver = control(lease.way)
    stuck = {uuid: text for uuid in lease.uuids if (text := driver.reset(uuid))}
    kept: dict[str, str] = {}
    for policy, governor in lease.governors_before.items():
        # somebody who has chosen another governor meanwhile keeps it
        if _governor_now(policy) == lease.governor and (text := set_governor(policy, governor, lease.way)):
            kept[policy] = text
    if not stuck and not kept:
        _forget(path)
        return []
    left = {policy: lease.governors_before[policy] for policy in kept}
    _write(path, lease.model_copy(update={"uuids": tuple(stuck), "governors_before": left, "guardian": None}))
    return [*(f"{uuid}: {text}" for uuid, text in stuck.items()), *kept.values()]


def recover(state: Path) -> list[str]:
    """Put right what earlier runs left; returns a line for each thing done.

    Another boot: the journal is dropped. A dead owner: its locks are undone. A live owner whose guardian was
    killed gets a new one.
    """
    if not leases(state):
        return []
    with exclusive(state):
        return _recover(state)


def _recover(state: Path) -> list[str]:
    done: list[str] = []
    for path, lease in leases(state):
        if lease.boot_id != boot_id():
            _forget(path)
            done.append(f"{lease.profile}: a clock lease of an earlier boot was dropped")
        elif lease.owner is None:
            continue
        elif not alive(lease.owner):
            faults = _give_back(path, lease)
            done.append(
                f"{lease.profile}: clocks of {len(lease.uuids)} GPUs reset, their owner (pid {lease.owner.pid}) is gone"
                if not faults
                else f"{lease.profile}: clocks could not be reset: {faults[0]}"
            )
        elif not alive(lease.guardian):
            _guard(path, lease)
            done.append(f"{lease.profile}: the clock lease has a new guardian")
    return done


def _guard(path: Path, lease: Lease) -> Lease:
    """Start the guardian and wait until it watches; the journal names it. Raises Ds41Error when it does not come up."""
    reader, writer = os.pipe()
    try:
        pid = proc.spawn_detached(
            [sys.executable, "-P", "-m", "ds41ctl.adapters.guardian", str(path.absolute()), str(writer)],
            pass_fd=writer,
            environ=os.environ,
        )
    finally:
        os.close(writer)
    try:
        ready, _, _ = select.select([reader], [], [], GUARDIAN_READY_S)
        said = os.read(reader, 1) if ready else b""
    finally:
        os.close(reader)
    identity = proc.identify(pid)
    if said != b"1" or identity is None:
        raise Ds41Error("the guardian of the clock lease did not start; nothing was locked", hints=("DS41_DEBUG=1",))
    lease = lease.model_copy(update={"guardian": Process(pid=pid, start_ticks=identity.start_ticks)})
    _write(path, lease)
    return lease


# ---- proof


class Sampler:
    """Reads SM clocks and load in the background, about 20 times a second, until it is left."""

    def __init__(self, uuids: Sequence[str], reader: nvml.GpuReader | None = None) -> None:
        self._uuids = tuple(uuids)
        self._reader = reader or nvml.Nvml()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="clock samples", daemon=True)
        self.samples: dict[str, list[Reading]] = {uuid: [] for uuid in self._uuids}

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while not self._stop.is_set():
            for uuid, found in self._reader.samples(self._uuids).items():
                self.samples[uuid].append(Reading(found.mhz, found.busy_percent))
            self._stop.wait(SAMPLE_EVERY_S)


def sudoers(user: str, uuids: Sequence[str], mhz: int, policies: Sequence[str]) -> list[str]:
    """The sudoers lines that allow exactly these commands. No wildcard: `*` would match blanks and further paths."""
    commands = [argv for uuid in uuids for argv in (lock_argv(uuid, mhz), reset_argv(uuid))]
    commands += [governor_argv(policy) for policy in policies]
    escaped = [
        " ".join(word.replace("\\", "\\\\").replace(",", "\\,").replace(":", "\\:") for word in argv)
        for argv in commands
    ]
    return [
        "Cmnd_Alias DS41_CLOCKS = " + ", \\\n    ".join(escaped),
        f"{user} ALL=(root) NOPASSWD: DS41_CLOCKS",
    ]
