"""Place: where a store goes on this machine, decided once; the checks and the build ask this one function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ds41ctl.core.profile import Engram

MEMORY_FILESYSTEMS = ("tmpfs", "ramfs", "hugetlbfs")
MIB, GIB = 1 << 20, 1 << 30

# disk: asked for. there: the folder lies on a memory filesystem and is used as it is. mount: one of our own goes there.
# shm: a folder in /dev/shm. refused: nothing of these, so that no byte is written.
Way = Literal["disk", "there", "mount", "shm", "refused", "unknown"]


@dataclass(frozen=True)
class Ground:
    """What a place depends on.

    `chosen`: the user or the profile names `folder`, no other one is taken. `fstype` is that of what holds it now,
    unless that is a mount of ours, which a build gives back first (`own_mount`). `may_mount`: root with CAP_SYS_ADMIN
    or `sudo -n`; None: not known. `foreign`: what lies in the folder that ds41ctl did not put there.
    """

    folder: str
    chosen: bool
    fstype: str
    own_mount: bool
    may_mount: bool | None
    foreign: str = ""


@dataclass(frozen=True)
class Decision:
    """The way, and for a refusal why."""

    way: Way
    why: str = ""
    rights: bool = False  # it is rights that are missing: exit code 77


def decide(engram: Engram, ground: Ground) -> Decision:
    """Where the store of a profile goes. A memory storage never becomes a disk store."""
    if ground.chosen and ground.foreign and engram.format == "shards" and not ground.own_mount:
        # the copies bear the names of the pack's files: a folder with some of them may be a pack
        return Decision("refused", f"{ground.folder} holds {ground.foreign}, which ds41ctl did not put there")
    if engram.storage == "disk":
        return Decision("disk")
    if not ground.chosen:
        return Decision("mount" if ground.may_mount else "shm")
    if not ground.own_mount and ground.fstype in MEMORY_FILESYSTEMS:
        if engram.format == "shards" and ground.fstype == "hugetlbfs":
            return Decision("refused", f"{ground.folder} is a hugetlbfs, whose files are whole pages: shards are not")
        return Decision("there")
    if ground.foreign:
        return Decision(
            "refused",
            f"{ground.folder} is on {ground.fstype or 'a disk'} and holds {ground.foreign}, which a {_memory(engram)} "
            "mounted there would hide",
        )
    if ground.may_mount is None:
        return Decision("unknown", "whether a memory filesystem may be mounted is not known")
    if ground.may_mount:
        return Decision("mount")
    return Decision(
        "refused",
        f"{ground.folder} is on {ground.fstype or 'an unknown filesystem'}, and this user may not mount a "
        f"{_memory(engram)} there",
        rights=True,
    )


def _memory(engram: Engram) -> str:
    return "hugetlbfs" if engram.storage == "hugetlb" else "tmpfs"


def mounted_bytes(engram: Engram, tables: int) -> int:
    """Size of a filesystem of our own: engram.size_gib of a tmpfs, else what the tables' files take."""
    return int(engram.size_gib * GIB) if engram.size_gib and engram.storage == "tmpfs" else tables


def _sized(count: int) -> str:
    """Bytes as mount takes them: whole GiB where they are, else MiB, rounded up."""
    return f"{count // GIB}G" if count % GIB == 0 else f"{-(-count // MIB)}M"


def mount_line(engram: Engram, folder: str, size: int, uid: int) -> str:
    """The one line that prepares the folder, for somebody with the rights (its `sudo` asks for the password).

    `size`: bytes of the tables' files. The mount's source is not ours, so that `drop` leaves in
    place what it has no right to take away.
    """
    size = mounted_bytes(engram, size)
    mode = "0755" if engram.format == "shards" else "0700"
    if engram.storage == "hugetlb":
        page = "1G" if engram.page == "1G" else "2M"
        options = f"pagesize={page},size={_sized(size)},uid={uid},mode={mode}"
    else:
        huge = "never" if engram.page == "4K" else "always"
        options = f"size={_sized(size)},huge={huge},uid={uid},mode={mode}"
    fstype = _memory(engram)
    return f"sudo mkdir -p {folder} && sudo mount -t {fstype} -o {options} {fstype} {folder}"
