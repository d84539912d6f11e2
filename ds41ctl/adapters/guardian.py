"""The guardian of a clock lease: a process of its own that undoes the lock when the lease's owner is gone.

usage: python -m ds41ctl.adapters.guardian JOURNAL READY_FD
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from pathlib import Path
from types import FrameType

from ds41ctl.adapters import clocks, nvml, proc
from ds41ctl.core.errors import Ds41Error
from ds41ctl.core.lease import Lease

LOOK_EVERY_MS = 500  # policy: how often it looks whether its lease still exists
POLL_WITHOUT_PIDFD_MS = 100  # kernels before 5.3


def main(argv: list[str]) -> int:
    """Watch one lease to its end. Interrupts and hang-ups are not for us; SIGTERM means: undo it now."""
    path, ready = Path(argv[0]), int(argv[1])
    asked_to_end, wake = os.pipe()
    os.set_blocking(wake, False)

    def on_term(number: int, frame: FrameType | None) -> None:
        os.write(wake, b"t")

    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, on_term)
    lease = clocks.read(path)
    if lease is None or lease.owner is None:
        return 1
    # held open for as long as the lease: a driver without persistence forgets a lock with its last client, and the
    # reset must not wait for a library to load
    with nvml.Nvml().held() if lease.way == "root" else contextlib.nullcontext():
        watched = _watch(lease)
        os.write(ready, b"1")
        os.close(ready)
        _wait(path, lease, watched, asked_to_end)
        if _current(path, lease) is None:
            return 0
        # whoever is locking right now ends first; it holds the same lock
        with clocks.exclusive(path.parent.parent):
            current = _current(path, lease)
            if current is not None:
                clocks.restore(path, current)
    return 0


def _current(path: Path, known: Lease) -> Lease | None:
    """The lease as it stands, None when it is gone or another guardian's; `known` when the journal is damaged."""
    try:
        found = clocks.read(path)
    except Ds41Error:
        return known
    # a lease that names no guardian yet is being made, by the process that started us
    return found if found is not None and (found.guardian is None or found.guardian.pid == os.getpid()) else None


def _watch(lease: Lease) -> int | None:
    """A file descriptor that is readable when the owner has ended; None where the kernel has none."""
    assert lease.owner is not None  # noqa: S101 - main asked
    try:
        return os.pidfd_open(lease.owner.pid)
    except OSError:
        return None


def _wait(path: Path, lease: Lease, watched: int | None, asked_to_end: int) -> None:
    """Until the owner is gone, somebody asks us to end, or the lease is no longer ours."""
    assert lease.owner is not None  # noqa: S101 - main asked
    owner = proc.Identity(lease.owner.pid, lease.owner.start_ticks)
    poll = select.poll()
    poll.register(asked_to_end, select.POLLIN)
    if watched is not None:
        poll.register(watched, select.POLLIN)
    while owner.alive():  # also tells a pid that was given to somebody else before we looked
        if poll.poll(POLL_WITHOUT_PIDFD_MS if watched is None else LOOK_EVERY_MS):
            return
        if _current(path, lease) is None:
            return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
