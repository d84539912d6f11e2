"""NUMA nodes and page backing: which nodes have memory, where new pages go, what pages really hold a mapping."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ds41ctl.core.errors import Ds41Error

_MPOL_DEFAULT, _MPOL_BIND = 0, 2
# not in the C library (libnuma has them); numbers of the kernel's system call tables
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}


def memory_nodes(root: Path = Path("/")) -> tuple[int, ...]:
    """NUMA nodes that have memory; (0,) where the kernel does not say."""
    try:
        text = (root / "sys/devices/system/node/has_memory").read_text().strip()
    except OSError:
        return (0,)
    found: list[int] = []
    for span in filter(None, text.split(",")):
        first, _, last = span.partition("-")
        found += range(int(first), int(last or first) + 1)
    return tuple(found) or (0,)


def _set_mempolicy(mode: int, nodes: int) -> None:
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        raise Ds41Error(f"binding memory to a NUMA node is not supported on {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    mask = ctypes.c_ulong(nodes)
    # the kernel reads maxnode - 1 bits
    status = libc.syscall(number, mode, ctypes.byref(mask) if nodes else None, ctypes.c_ulong(65 if nodes else 0))
    if status:
        code = ctypes.get_errno()
        raise OSError(code, f"set_mempolicy: {os.strerror(code)}")


@contextlib.contextmanager
def pages_on(node: int | None) -> Iterator[None]:
    """Pages that this thread allocates inside the block lie on `node`; None changes nothing.

    The policy is the thread's, not the mapping's: files of tmpfs and hugetlbfs take it from whoever allocates them.
    Raises OSError when the node does not exist or has no memory.
    """
    if node is None:
        yield
        return
    if not 0 <= node < 64:
        raise OSError(errno.EINVAL, f"NUMA node {node} is not one of 0 to 63")
    _set_mempolicy(_MPOL_BIND, 1 << node)
    try:
        yield
    finally:
        _set_mempolicy(_MPOL_DEFAULT, 0)


@dataclass(frozen=True)
class Backing:
    """What holds a mapping's pages. `huge_bytes` of `bytes` lie on pages of 2 MiB or more."""

    bytes: int
    huge_bytes: int
    page_kib: int
    node_bytes: dict[int, int]

    @property
    def huge_share(self) -> float:
        """0 to 1."""
        return self.huge_bytes / self.bytes if self.bytes else 0.0


def backing(path: Path, root: Path = Path("/")) -> Backing:
    """Backing of this process's mappings of `path`, from smaps and numa_maps: touched pages only."""
    name = str(path)
    total = huge = page_kib = 0
    mine = False
    with (root / "proc/self/smaps").open(errors="replace") as smaps:
        for line in smaps:
            head, _, rest = line.partition(" ")
            if not head.endswith(":"):
                mine = line.rstrip("\n").endswith(" " + name)
                continue
            if not mine:
                continue
            kib = int(rest.split()[0]) if rest.split()[:1] and rest.split()[0].isdecimal() else 0
            if head == "KernelPageSize:":
                page_kib = max(page_kib, kib)
            elif head in ("Shared_Hugetlb:", "Private_Hugetlb:"):
                total += kib * 1024
                huge += kib * 1024
            elif head == "Rss:":
                total += kib * 1024
            elif head in ("ShmemPmdMapped:", "FilePmdMapped:"):
                huge += kib * 1024
    return Backing(total, huge, page_kib, _node_bytes(name, root))


def _node_bytes(name: str, root: Path) -> dict[int, int]:
    found: dict[int, int] = {}
    try:
        text = (root / "proc/self/numa_maps").read_text(errors="replace")
    except OSError:  # a kernel without NUMA
        return {}
    for line in text.splitlines():
        if f"file={name} " not in line + " ":
            continue
        size = re.search(r"kernelpagesize_kB=(\d+)", line)
        page = int(size.group(1)) * 1024 if size else 4096
        for node, count in re.findall(r"\bN(\d+)=(\d+)", line):
            found[int(node)] = found.get(int(node), 0) + int(count) * page
    return found
