"""Mounts: which filesystem holds a path, and the tmpfs mounts this tool makes."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

OWN_SOURCE = "ds41ctl"  # how our own mounts are told from anybody else's


@dataclass(frozen=True)
class Mount:
    """One line of mountinfo. `options` are the super-block's (where tmpfs states size= and huge=)."""

    point: Path
    fstype: str
    source: str
    options: str

    @property
    def memory_backed(self) -> bool:
        """True when the content is gone after a reboot."""
        return self.fstype in ("tmpfs", "ramfs", "hugetlbfs")

    @property
    def page_kind(self) -> str:
        """What the mount promises about pages, for example `tmpfs huge=always` (a promise, not a measurement)."""
        huge = re.search(r"\bhuge=\w+", self.options)
        size = re.search(r"\bpagesize=\w+", self.options)
        extra = huge or size
        return f"{self.fstype} {extra.group()}" if extra else self.fstype


def mounts(root: Path = Path("/")) -> list[Mount]:
    """All mounts of this process, in mount order (a later one hides an earlier one at the same point)."""
    found = []
    text = (root / "proc/self/mountinfo").read_text(errors="replace")
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        point = _unescape(left.split(" ")[4])
        fields = right.split(" ")
        found.append(Mount(Path(point), fields[0], fields[1], fields[2] if len(fields) > 2 else ""))
    return found


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), text)


def mount_of(path: Path, root: Path = Path("/")) -> Mount:
    """The mount that holds `path` (or its nearest existing parent)."""
    real = existing_parent(path).resolve()
    best: Mount | None = None
    for mount in mounts(root):
        inside = real.is_relative_to(mount.point)
        if inside and (best is None or len(mount.point.parts) >= len(best.point.parts)):
            best = mount
    if best is None:
        return Mount(Path("/"), "unknown", "", "")
    return best


def is_mount_point(path: Path) -> bool:
    """True when something is mounted exactly there."""
    return any(mount.point == path.resolve() for mount in mounts())


def is_own(path: Path) -> bool:
    """True when a filesystem of our own is mounted exactly there."""
    mount = mount_of(path)
    return mount.source == OWN_SOURCE and path.exists() and mount.point == path.resolve()


def existing_parent(path: Path) -> Path:
    """`path` itself or its nearest parent that exists."""
    current = path.absolute()
    while not current.exists() and current != current.parent:
        current = current.parent
    return current


def free_bytes(path: Path) -> int:
    """Bytes this user may still write on the filesystem of `path`."""
    stat = os.statvfs(existing_parent(path))
    return stat.f_bavail * stat.f_frsize


def page_bytes(path: Path) -> int:
    """Page size of the hugetlbfs that holds `path` (its statfs block size)."""
    return os.statvfs(existing_parent(path)).f_bsize
