"""Hugepage pools: what a node has, reserving more, giving back exactly what was added."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ds41ctl.adapters import proc
from ds41ctl.core.errors import DeniedError, NoSpaceError

TRIES = 4  # the kernel compacts memory between tries; a pool that does not grow any more ends them
Write = Callable[[Path, str], None]


@dataclass(frozen=True)
class Reservation:
    """`pages` of `page_kib` are asked for on `node`, whose pool held `before`; `granted` once the kernel gave them."""

    node: int
    page_kib: int
    before: int
    pages: int
    granted: bool = False


def write(path: Path, text: str) -> None:
    """Write a kernel setting as root, or with `sudo -n tee` and fixed arguments. Raises DeniedError."""
    if os.access(path, os.W_OK):
        try:
            path.write_text(text)
        except OSError as error:
            raise DeniedError(f"writing {path}: {error.strerror}") from None
        return
    done = proc.run(["sudo", "-n", "tee", str(path)], timeout=120, input=text)
    if not done.ok:
        raise DeniedError(
            f"writing {path} needs root or sudo without a password",
            hints=(f"echo {text} | sudo tee {path}",),
        )


def folder(node: int, page_kib: int, root: Path = Path("/")) -> Path:
    """Pool of a node; the whole machine's where the kernel has no NUMA nodes."""
    of_node = root / f"sys/devices/system/node/node{node}/hugepages/hugepages-{page_kib}kB"
    return of_node if of_node.is_dir() else root / f"sys/kernel/mm/hugepages/hugepages-{page_kib}kB"


def count(node: int, page_kib: int, root: Path = Path("/")) -> tuple[int, int]:
    """(total, free) pages of a node's pool; (0, 0) where the kernel has no pages of that size.

    Pages that others have reserved and not touched yet count as taken.
    """
    where = folder(node, page_kib, root)
    try:
        total = int((where / "nr_hugepages").read_text())
        free = int((where / "free_hugepages").read_text())
        whole = root / f"sys/kernel/mm/hugepages/hugepages-{page_kib}kB/resv_hugepages"
        promised = int(whole.read_text())
    except (OSError, ValueError):
        return 0, 0
    return total, max(0, free - promised)


def plan(node: int, page_kib: int, pages: int, root: Path = Path("/")) -> Reservation | None:
    """What must be reserved so that `pages` are free on `node`; None when they are. Touches nothing."""
    total, free = count(node, page_kib, root)
    return Reservation(node, page_kib, total, pages - free) if free < pages else None


def reserve(wanted: Reservation, root: Path = Path("/"), write: Write = write) -> None:
    """Grow a pool. Raises NoSpaceError, the pool back as it was, when the kernel gives fewer pages than asked."""
    path = folder(wanted.node, wanted.page_kib, root) / "nr_hugepages"
    target = wanted.before + wanted.pages
    before = -1
    for attempt in range(TRIES):
        write(path, str(target))
        got = count(wanted.node, wanted.page_kib, root)[0]
        if got >= target:
            return
        if got == before:
            break
        before = got
        compact = root / "proc/sys/vm/compact_memory"
        if attempt + 1 < TRIES and compact.exists():
            write(compact, "1")
            time.sleep(0.2)
    got = count(wanted.node, wanted.page_kib, root)[0]
    write(path, str(wanted.before))
    kind = "1G" if wanted.page_kib > 2048 else "2M"
    raise NoSpaceError(
        f"the kernel gave {max(0, got - wanted.before)} of {wanted.pages} hugepages of {kind} on NUMA node "
        f"{wanted.node}: free memory is too small or too scattered",
        hints=(f"reserve at boot: kernel parameters hugepagesz={kind} hugepages={target}",),
    )


def give_back(reserved: Reservation, root: Path = Path("/"), write: Write = write) -> int:
    """Shrink a pool by what was added; returns the pages given back.

    Of a reservation whose end nobody saw (its build was killed) only what the pool holds above `before` is ours.
    Pages that are still in use leave the pool when they are freed.
    """
    total, _ = count(reserved.node, reserved.page_kib, root)
    ours = reserved.pages if reserved.granted else min(total - reserved.before, reserved.pages)
    given = min(ours, total)
    if given <= 0:
        return 0
    write(folder(reserved.node, reserved.page_kib, root) / "nr_hugepages", str(total - given))
    return given
