"""The clock lease: journalled before a GPU is touched, guarded by a process, undone when its owner is gone."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Literal

from pydantic import ValidationError

from ds41ctl.adapters import files, kernel, nvml, offset, proc
from ds41ctl.adapters.store import boot_id
from ds41ctl.core.errors import DeniedError, Ds41Error, LockedError
from ds41ctl.core.lease import TOLERANCE_W, Lease, Process, Reading, settings, to_give_back
from ds41ctl.core.profile import Clocks

SUDO_TIMEOUT_S = 10.0  # policy
SUDO_LIST_TIMEOUT_S = 5.0  # policy: one question to sudo
GUARDIAN_READY_S = 20.0  # policy: Python and NVML on a busy machine
LOCK_WAIT_S = 30.0  # policy: another ds41ctl is between two of its writes
SAMPLE_EVERY_S = 0.05
POLICIES = Path("/") / kernel.GOVERNORS


# ---- ways to reach the hardware


class SudoControl:
    """nvidia-smi through `sudo -n`, one fixed command line a GPU and value; it never prompts.

    The clock offset, which nvidia-smi cannot set, is set by this program's own Python where sudo allows everything.
    """

    def lock(self, uuid: str, mhz: int) -> str:
        """Lock to exactly `mhz`."""
        return _sudo(lock_argv(uuid, mhz))

    def reset(self, uuid: str) -> str:
        """Undo a lock."""
        return _sudo(reset_argv(uuid))

    def set_power(self, uuid: str, watts: float) -> str:
        """Set the power limit."""
        return _sudo(power_argv(uuid, watts))

    def set_offset(self, uuid: str, mhz: int) -> str:
        """Set the graphics clock offset."""
        return _sudo(offset.argv(mhz, [uuid]))


def smi_path() -> str:
    """Absolute path of nvidia-smi: sudoers compares whole paths."""
    return shutil.which("nvidia-smi") or "/usr/bin/nvidia-smi"


def lock_argv(uuid: str, mhz: int) -> list[str]:
    """The command that locks one GPU."""
    return [smi_path(), "-i", uuid, "-lgc", f"{mhz},{mhz}"]


def reset_argv(uuid: str) -> list[str]:
    """The command that undoes a lock."""
    return [smi_path(), "-i", uuid, "-rgc"]


def power_argv(uuid: str, watts: float) -> list[str]:
    """The command that sets one GPU's power limit."""
    return [smi_path(), "-i", uuid, "-pl", f"{watts:g}"]


def offset_by_hand(mhz: int, uuids: Sequence[str]) -> str:
    """The line to paste where sudo asks for a password."""
    return " ".join(["sudo", *offset.argv(mhz, uuids)])


def governor_argv(policy: str) -> list[str]:
    """The command that takes a governor's name on its standard input."""
    return [shutil.which("tee") or "/usr/bin/tee", str(POLICIES / policy / "scaling_governor")]


def _sudo(argv: list[str]) -> str:
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


def sudo_allows(want: Clocks, uuid: str) -> bool:
    """Whether sudoers lines allow this user every nvidia-smi command of a lease on that GPU. Runs none of them."""
    commands = commands_of(want, nvml.Nvml().values([uuid]))
    return bool(commands) and all(
        proc.run(["sudo", "-n", "-l", *argv], timeout=SUDO_LIST_TIMEOUT_S).ok for argv in commands
    )


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
            hints=(f"rm {path}", *BY_HAND),
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
    want: Clocks,
    owner: Process | None = None,
) -> tuple[Lease, list[str]]:
    """Set on `uuids` for `owner` what `want` names; returns the lease and what could not be had beside (governors,
    the clock offset).

    Journal (durable), guardian (watching), power limits, locks, offsets: in that order, so that no death leaves a
    value nobody knows of, and no card gets a higher clock before its power is bounded.
    Raises DeniedError or Ds41Error, with nothing set, when a GPU refuses its limit or its lock; LockedError when
    another lease holds one of the GPUs.
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
            raise Ds41Error(f"an earlier lock of {len(left.uuids)} GPUs could not be undone", hints=BY_HAND)
        found = nvml.Nvml().values(uuids)
        power_before, offset_before, missed = _before(want, found)
        taken = {policy for _, other in leases(state) for policy in other.governors_before}
        now, _ = kernel.governors(Path("/"))
        governor = want.governor
        before = (
            {policy: name for policy, name in (now or {}).items() if governor and name != governor} if not taken else {}
        )
        lease = Lease(
            profile=profile,
            boot_id=boot_id(),
            module=kernel.module_load(Path("/")),
            uuids=tuple(uuids),
            mhz=want.sm_mhz,
            power_limit_w=want.power_limit_w,
            power_before_w=power_before,
            offset_mhz=None if missed else want.offset_mhz,
            offset_before_mhz=offset_before,
            missed=missed,
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
        faults = _limited(driver, lease)
        if not faults and lease.mhz is not None:
            faults = [f"{uuid}: {text}" for uuid in uuids if (text := driver.lock(uuid, lease.mhz))]
        if faults:
            _give_back(path, lease, ours=True)
            raise _refused(faults, settings(want.sm_mhz, want.power_limit_w, None), profile)
        lease = _shifted(driver, lease)
        notes = [
            f"governor not set: {text}" for policy in before if (text := set_governor(policy, governor, lease.way))
        ]
        lease = lease.model_copy(update={"locked": True})
        _write(path, lease)
        return lease, [*lease.missed, *notes]


def _before(want: Clocks, found: Mapping[str, nvml.Values]) -> tuple[dict[str, float], dict[str, int], tuple[str, ...]]:
    """(limits and offsets that will change, why the offset cannot be had). Raises Ds41Error for a limit that cannot be
    given back, or that a card does not take: nothing has been touched then."""
    power: dict[str, float] = {}
    offsets: dict[str, int] = {}
    missed: list[str] = []
    for uuid, values in found.items():
        if want.power_limit_w is not None:
            power |= _power_before(uuid, want.power_limit_w, values)
        if want.offset_mhz is None:
            continue
        at = values.offset
        if at.mhz is None:
            missed.append(f"{uuid}: {at.note}")
        elif not (at.low is None or at.high is None or at.low <= want.offset_mhz <= at.high):
            missed.append(f"{uuid}: it takes {at.low:+d} to {at.high:+d} MHz")
        elif at.mhz != want.offset_mhz:
            offsets[uuid] = at.mhz
    if missed:
        return power, {}, (_missed(want.offset_mhz or 0, missed),)
    return power, offsets, ()


def _power_before(uuid: str, wanted: float, values: nvml.Values) -> dict[str, float]:
    limit, low, high = values.power_w, values.power_min_w, values.power_max_w
    if limit is None:
        raise Ds41Error(
            f"{uuid}: its power limit cannot be read, so it could not be given back; nothing was set",
            hints=("nvidia-smi -q -d POWER", "leave power_limit_w out of [clocks] in a profile of your own"),
        )
    if not (low is None or high is None or low - TOLERANCE_W <= wanted <= high + TOLERANCE_W):
        raise Ds41Error(
            f"{uuid}: a power limit of {wanted:g} W is outside {low:g} to {high:g} W, which the card takes",
            hints=(f"set power_limit_w between {low:g} and {high:g} in [clocks] of a profile of your own",),
        )
    return {uuid: limit} if abs(limit - wanted) > TOLERANCE_W else {}


def _missed(mhz: int, faults: Sequence[str]) -> str:
    """Why the offset is not set. One card without it would leave the others waiting, so it is none or all."""
    return f"clock offset {mhz:+d} MHz not set, {faults[0]}" + (f" and {len(faults) - 1} more" if faults[1:] else "")


def _limited(driver: nvml.ClockControl, lease: Lease) -> list[str]:
    """Set the power limits; returns what went wrong."""
    wanted = lease.power_limit_w
    if wanted is None:
        return []
    return [f"{uuid}: {text}" for uuid in lease.power_before_w if (text := _limit(driver, uuid, wanted))]


def _limit(driver: nvml.ClockControl, uuid: str, watts: float) -> str:
    """Set one power limit, and see that it is there."""
    if text := driver.set_power(uuid, watts):
        return text
    now = nvml.Nvml().values([uuid])[uuid].power_w
    if now is None or abs(now - watts) <= TOLERANCE_W:
        return ""
    return f"the driver took {watts:g} W and states {now:g} W"


def _shifted(driver: nvml.ClockControl, lease: Lease) -> Lease:
    """Set the offsets; the lease without them, and why, when one GPU refuses."""
    wanted = lease.offset_mhz
    if wanted is None:
        return lease
    faults: list[str] = []
    for uuid in lease.offset_before_mhz:
        if text := driver.set_offset(uuid, wanted):
            faults.append(f"{uuid}: {text}")
            break
    if not faults:
        return lease
    stuck, _ = _offsets_back(driver, lease, ours=True)
    left = {uuid: lease.offset_before_mhz[uuid] for uuid in stuck}
    missed = (*lease.missed, _missed(wanted, faults))
    return lease.model_copy(update={"offset_mhz": None, "offset_before_mhz": left, "missed": missed})


BY_HAND = (
    "sudo nvidia-smi -rgc   # resets the clocks of every GPU",
    "nvidia-smi -q -d POWER   # shows each GPU's default limit, for: sudo nvidia-smi -i GPU -pl WATTS",
)


def denied(faults: Sequence[str]) -> bool:
    """Whether a right is what is missing."""
    return any(word in fault.lower() for fault in faults for word in ("permission", "password", "sudo", "not found"))


def _refused(faults: list[str], what: str, profile: str) -> Ds41Error:
    kind = DeniedError if denied(faults) else Ds41Error
    return kind(
        f"{what} cannot be set: {faults[0]}" + (f" and {len(faults) - 1} more GPUs" if faults[1:] else ""),
        detail=faults if faults[1:] else (),
        hints=(f"ds41ctl clocks sudoers --profile {profile}   # the lines for sudo visudo -f /etc/sudoers.d/ds41ctl",),
    )


@dataclass(frozen=True)
class Restored:
    """What giving back came to: `stuck` could not be undone and stays in the journal, `kept` was left as it is."""

    stuck: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


def release(state: Path, profile: str, *, of: Process | None = None) -> Restored:
    """Undo a profile's lease (with `of`: only if it is that owner's)."""
    path = journal(state, profile)
    if not path.exists():
        return Restored()
    with exclusive(state):
        lease = read(path)
        if lease is None or (of is not None and lease.owner != of):
            return Restored()
        return _give_back(path, lease)


def void(lease: Lease) -> str:
    """Why the driver has forgotten what was set, '' when it has not."""
    return lease.void(boot_id(), kernel.module_load(Path("/")))


def _give_back(path: Path, lease: Lease, *, ours: bool = False) -> Restored:
    """Reset what the journal names, forget it, end its guardian. What refuses stays in the journal."""
    done = restore(path, lease, ours=ours)
    guardian = lease.guardian
    if guardian is not None and guardian.pid != os.getpid() and alive(guardian):
        proc.terminate([proc.Identity(guardian.pid, guardian.start_ticks)], grace=2.0, poll=0.01)
    return done


def restore(path: Path, lease: Lease, *, ours: bool = False) -> Restored:
    """Give back what a lease set and drop its journal. `ours`: nobody else can have changed anything since.

    What a reboot or a new load of the driver module has undone already is not set again: the numbers of before are
    nobody's wish any more. A power limit, an offset or a governor that somebody has changed meanwhile stays.
    """
    gone = void(lease)
    if lease.boot_id != boot_id():
        _forget(path)
        return Restored(kept=(f"nothing to give back: a lease {gone}",))
    driver = control(lease.way)
    notes = [f"clocks and limits not given back: the lease is {gone}, which has reset them"] if gone else []
    offsets: dict[str, str] = {}
    limits: dict[str, str] = {}
    locks: dict[str, str] = {}
    if not gone:
        offsets, shifted = _offsets_back(driver, lease, ours=ours)
        if lease.mhz is not None:
            locks = {uuid: text for uuid in lease.uuids if (text := driver.reset(uuid))}
        limits, raised = _limits_back(driver, lease, ours=ours)
        notes += shifted + raised
    stuck = {**limits, **offsets, **locks}
    kept: dict[str, str] = {}
    for policy, governor in lease.governors_before.items():
        # somebody who has chosen another governor meanwhile keeps it
        if _governor_now(policy) == lease.governor and (text := set_governor(policy, governor, lease.way)):
            kept[policy] = text
    if not stuck and not kept:
        _forget(path)
        return Restored(kept=tuple(notes))
    left = {
        "uuids": tuple(stuck),
        "mhz": lease.mhz if locks else None,
        "power_before_w": {uuid: lease.power_before_w[uuid] for uuid in limits},
        "offset_before_mhz": {uuid: lease.offset_before_mhz[uuid] for uuid in offsets},
        "governors_before": {policy: lease.governors_before[policy] for policy in kept},
        "guardian": None,
    }
    _write(path, lease.model_copy(update=left))
    return Restored((*(f"{uuid}: {text}" for uuid, text in stuck.items()), *kept.values()), tuple(notes))


def _limits_back(driver: nvml.ClockControl, lease: Lease, *, ours: bool) -> tuple[dict[str, str], list[str]]:
    """(uuid -> what refused, what somebody else has set since). A GPU that is gone holds no limit."""
    now = {uuid: item for uuid, item in nvml.Nvml().values(list(lease.power_before_w)).items() if not item.gone}
    known = {uuid: watts for uuid, watts in lease.power_before_w.items() if uuid in now}
    back, foreign = to_give_back(
        lease.power_limit_w, known, {uuid: item.power_w for uuid, item in now.items()}, ours=ours
    )
    stuck = {uuid: f"power limit: {text}" for uuid, watts in back.items() if (text := _limit(driver, uuid, watts))}
    return stuck, [f"{uuid}: power limit {watts:g} W is somebody else's, left" for uuid, watts in foreign.items()]


def _offsets_back(driver: nvml.ClockControl, lease: Lease, *, ours: bool) -> tuple[dict[str, str], list[str]]:
    """The same for clock offsets."""
    now = {uuid: item for uuid, item in nvml.Nvml().values(list(lease.offset_before_mhz)).items() if not item.gone}
    known = {uuid: mhz for uuid, mhz in lease.offset_before_mhz.items() if uuid in now}
    back, foreign = to_give_back(
        lease.offset_mhz, known, {uuid: item.offset.mhz for uuid, item in now.items()}, ours=ours
    )
    stuck = {uuid: f"clock offset: {text}" for uuid, mhz in back.items() if (text := driver.set_offset(uuid, mhz))}
    return stuck, [f"{uuid}: clock offset {mhz:+d} MHz is somebody else's, left" for uuid, mhz in foreign.items()]


def recover(state: Path) -> list[str]:
    """Put right what earlier runs left; returns a line for each thing done.

    Another boot or another load of the driver module: the journal is dropped (governors outlast a module and are given
    back). A dead owner: what it had is undone. A live owner whose guardian was killed gets a new one.
    """
    if not leases(state):
        return []
    with exclusive(state):
        return _recover(state)


def _recover(state: Path) -> list[str]:
    done: list[str] = []
    for path, lease in leases(state):
        if gone := void(lease):
            stuck = _give_back(path, lease).stuck
            done.append(f"{lease.profile}: a clock lease {gone} was dropped, its values are not set again")
            done += [f"{lease.profile}: could not be reset: {text}" for text in stuck]
        elif lease.owner is None:
            continue
        elif not alive(lease.owner):
            found = _give_back(path, lease)
            done.append(
                f"{lease.profile}: clocks of {len(lease.uuids)} GPUs reset, their owner (pid {lease.owner.pid}) is gone"
                if not found.stuck
                else f"{lease.profile}: clocks could not be reset: {found.stuck[0]}"
            )
            done += [f"{lease.profile}: {text}" for text in found.kept]
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


def commands_of(want: Clocks, now: Mapping[str, nvml.Values]) -> list[list[str]]:
    """Every nvidia-smi command that a lease of `want` runs; a limit to give back is that of now or the default."""
    found: list[list[str]] = []
    for uuid, values in now.items():
        if want.sm_mhz is not None:
            found += [lock_argv(uuid, want.sm_mhz), reset_argv(uuid)]
        if want.power_limit_w is not None:
            limits = dict.fromkeys((want.power_limit_w, values.power_w, values.power_default_w))
            found += [power_argv(uuid, watts) for watts in limits if watts is not None]
    return found


def sudoers(user: str, want: Clocks, now: Mapping[str, nvml.Values], policies: Sequence[str]) -> list[str]:
    """The sudoers lines that allow exactly the commands of a lease, none when it has none.

    No wildcard: `*` would match blanks and further paths.
    """
    commands = commands_of(want, now)
    commands += [governor_argv(policy) for policy in policies]
    if not commands:
        return []
    escaped = [
        " ".join(word.replace("\\", "\\\\").replace(",", "\\,").replace(":", "\\:") for word in argv)
        for argv in commands
    ]
    return [
        "Cmnd_Alias DS41_CLOCKS = " + ", \\\n    ".join(escaped),
        f"{user} ALL=(root) NOPASSWD: DS41_CLOCKS",
    ]
