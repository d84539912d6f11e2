"""What the kernel knows: its command line, IOMMU, CPU governors, clock, NVIDIA module, and the errors it logged."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

from ds41ctl.adapters import proc
from ds41ctl.adapters.textfile import line, text
from ds41ctl.core.facts import KernelLogFacts, XidFacts

GOVERNORS = "sys/devices/system/cpu/cpufreq"
JOURNAL_TIMEOUT_S = 3.0  # policy: a journal that takes longer counts as not readable
STA_UNSYNC = 0x0040  # linux/timex.h
_OPTION = re.compile(r"iommu|hugepage|hugepagesz|nvidia", re.IGNORECASE)
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)[^)]*\): (\d+)")


def boot_options(root: Path) -> tuple[str, ...] | None:
    """The options this kernel was booted with that matter to GPUs and memory; the rest is nobody's business."""
    found = text(root / "proc/cmdline")
    return None if found is None else tuple(word for word in found.split() if _OPTION.search(word))


def iommu_groups(root: Path) -> int | None:
    """Number of IOMMU groups; 0 where the kernel translates nothing."""
    if not (root / "sys/kernel").is_dir():
        return None
    try:
        return sum(1 for _ in (root / "sys/kernel/iommu_groups").iterdir())
    except FileNotFoundError:
        return 0
    except OSError:
        return None


def governors(root: Path) -> tuple[dict[str, str] | None, tuple[str, ...]]:
    """({policy: governor}, governors every policy offers); ({}, ()) without cpufreq, as in most virtual machines."""
    base = root / GOVERNORS
    if not (root / "sys/devices/system/cpu").is_dir():
        return None, ()
    found: dict[str, str] = {}
    offered: list[set[str]] = []
    for folder in sorted(base.glob("policy*"), key=lambda path: int(path.name[6:] or 0)):
        governor = line(folder / "scaling_governor")
        if not governor:
            return None, ()
        found[folder.name] = governor
        offered.append(set(line(folder / "scaling_available_governors").split()))
    return found, tuple(sorted(set.intersection(*offered))) if offered else ()


def driver_module(root: Path) -> tuple[str | None, bool | None]:
    """(version of the loaded NVIDIA module, whether it is the open one); ('', None) when none is loaded."""
    if not (root / "proc/sys/kernel").is_dir():
        return None, None
    found = text(root / "proc/driver/nvidia/version")
    if found is None:
        return "", None
    version = re.search(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)", found)
    return (version[1] if version else None), "Open Kernel Module" in found


def module_load(root: Path) -> str:
    """Which load of the nvidia module this is, to be compared within one boot; '' when it cannot be known.

    The kernel numbers the inodes of sysfs upwards, so a module that is loaded again has another one. Its times say
    nothing: sysfs makes them up when a file is first looked at, and anew after it was dropped from the cache.
    """
    modules = root / "sys/module"
    try:
        return f"inode {(modules / 'nvidia').stat().st_ino}"
    except FileNotFoundError:
        return "not loaded" if modules.is_dir() else ""
    except OSError:
        return ""


def held_packages(root: Path) -> dict[str, bool] | None:
    """Installed NVIDIA driver packages of dpkg and whether an upgrade is held back."""
    status = root / "var/lib/dpkg/status"
    if not status.exists():
        return {}
    found = text(status)
    if found is None:
        return None
    packages: dict[str, bool] = {}
    for block in found.split("\n\n"):
        name = re.search(
            r"^Package: ((?:nvidia-(?:driver|dkms|kernel|utils)|libnvidia-compute)\S*)$", block, re.MULTILINE
        )
        state = re.search(r"^Status: (\S+) \S+ installed$", block, re.MULTILINE)
        if name and state:
            packages[name[1]] = state[1] == "hold"
    return packages


def clock_synchronised() -> bool | None:
    """Whether the kernel's clock is kept by a time daemon (adjtimex(2), read only)."""
    buffer = ctypes.create_string_buffer(512)  # struct timex; modes 0 asks and sets nothing
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(buffer)
    except (OSError, AttributeError):
        return None
    if state < 0:
        return None
    word = ctypes.sizeof(ctypes.c_long)
    # modes, offset, freq, maxerror, esterror, status: an int padded to a long, four longs, an int
    status = ctypes.c_int.from_buffer(buffer, word * 5).value
    return not status & STA_UNSYNC


def log(root: Path) -> KernelLogFacts:
    """NVIDIA errors since boot: the kernel's ring buffer, else the journal. Not permitted is not `no error`."""
    try:
        lines, whole = _ring(root / "dev/kmsg")
    except OSError as error:
        problem = error.strerror or str(error)
    else:
        ring = KernelLogFacts(readable=True, source="/dev/kmsg", whole=whole, xids=xids(lines))
        if whole:
            return ring
        problem = ""
    if root == Path("/"):
        found = proc.run(["journalctl", "-k", "-b", "-q", "--no-pager", "-o", "cat"], timeout=JOURNAL_TIMEOUT_S)
        if found.ok and found.stdout.strip():
            return KernelLogFacts(readable=True, source="journalctl -k -b", xids=xids(found.stdout.splitlines()))
    return KernelLogFacts(readable=False, problem=problem) if problem else ring


def _ring(path: Path) -> tuple[list[str], bool]:
    """(messages, whether the first message of this boot is still there). Raises OSError."""
    lines: list[str] = []
    first: int | None = None
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        while True:
            try:
                record = os.read(handle, 8192)
            except BlockingIOError:
                break
            except BrokenPipeError:  # overwritten while we read; the next read goes on behind the gap
                continue
            if not record:
                break
            for entry in record.decode(errors="replace").splitlines():
                head, semicolon, message = entry.partition(";")
                if not semicolon:
                    continue
                number = head.split(",")[1:2]
                if first is None and number and number[0].isdecimal():
                    first = int(number[0])
                lines.append(message)
    finally:
        os.close(handle)
    return lines, not first


def xids(lines: list[str]) -> tuple[XidFacts, ...]:
    """Xid errors, one entry a code and GPU, in order of first appearance."""
    found: dict[tuple[int, str], XidFacts] = {}
    for entry in lines:
        match = _XID.search(entry)
        if match is None:
            continue
        key = (int(match[2]), match[1])
        count = found[key].count + 1 if key in found else 1
        found[key] = XidFacts(code=key[0], bus_id=key[1], count=count, line=entry.strip()[:200])
    return tuple(found.values())
