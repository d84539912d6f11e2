"""Checks of filesystems: one a role, with the needs of all roles on the same device summed."""

from __future__ import annotations

import math
from functools import partial

from ds41ctl.core.facts import DiskFacts, HostFacts
from ds41ctl.core.place import MEMORY_FILESYSTEMS
from ds41ctl.core.profile import IMAGE_ROOM, Profile
from preflight import need
from preflight.check import Check, Stage, Verdict, fail, ok, skip, unknown, warn
from preflight.text import GIB, as_root, size

GROUP = "DISK"
# which setting moves a role elsewhere
VARIABLE = {
    "data": "DS41_DATA_DIR",
    "model": "DS41_DATA_DIR",
    "engine": "DS41_DATA_DIR",
    "state": "DS41_STATE_DIR",
    "store": "DS41_ENGRAM_DIR",
    "tmp": "TMPDIR",
}
NAME = {"model": "data"}  # role -> the check that judges it, where they differ
FAT = ("vfat", "msdos", "exfat")  # no file over 4 GiB (vfat), no symlinks, no modes


def _judge(role: str, profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    if role == "data":
        role = need.pack_role(profile, facts)
    found, needed = facts.disk(role), need.disk(profile, facts, role)
    wanted = "a known need" if needed is None else f"{size(needed)} free, writable"
    if needed == 0 and (found is not None or role != "store"):
        return skip(f"nothing more is needed in {found.path if found else f'the {role} folder'}")
    if found is None:
        return unknown(f"the {role} folder was not looked at", expected=wanted, fix=("ds41ctl facts --json",))
    unusable = _unusable(role, found, facts, wanted)
    if unusable is not None:
        return unusable
    roles = need.same_filesystem(facts, found)
    needs = {disk.role: need.disk(profile, facts, disk.role) for disk in roles}
    known = {name: count for name, count in needs.items() if count}
    # the role that needs most speaks for all on that filesystem; an unknown need may be the largest
    judge = max(needs, key=lambda name: math.inf if needs[name] is None else needs[name] or 0)
    if judge != role and needed is not None:
        return skip(f"{size(needed)} needed; same filesystem as disk.{NAME.get(judge, judge)}, counted there")
    total = sum(known.values())
    unfetched = role in need.PACK_ROLES and needed is None and not (facts.pack and facts.pack.exists)
    least = max(total, need.table_bytes(profile)) if unfetched else total  # the tables alone are a lower bound
    expected = f"{size(least)} on {found.mount} (" + ", ".join(f"{n} {size(c)}" for n, c in known.items()) + ")"
    if not known:
        expected = f"{size(least)} on {found.mount}"
    if found.free is not None and found.free < least:
        return fail(
            f"{found.mount} has {size(found.free)} free, {size(least)} needed" + _pack_text(role, profile, facts),
            expected=expected,
            found=f"{size(found.free)} free on {found.mount} ({found.fstype})",
            fix=_room_fix(role, found, facts, least),
        )
    if found.free is None or None in needs.values():
        what = "free space" if found.free is None else "what is still to be fetched or installed"
        return unknown(f"{what} is not known", expected=expected, fix=(f"df -h {found.path}",))
    if role == "engine" and found.inodes_free is not None and 0 <= found.inodes_free < need.ENGINE_FILES:
        return fail(
            f"{found.mount} has {found.inodes_free} inodes left, the engine is {need.ENGINE_FILES} files",
            expected=f"{need.ENGINE_FILES} inodes",
            found=f"{found.inodes_free} inodes",
            fix=(f"df -i {found.mount}", f"export {VARIABLE[role]}=/another/filesystem"),
        )
    if role in need.PACK_ROLES and found.fstype in MEMORY_FILESYSTEMS:
        return warn(
            f"{found.path} is in memory ({found.fstype})",
            expected="a disk",
            found=found.fstype,
            fix=(f"export {VARIABLE[role]}=/a/folder/on/a/disk",),
            why="the pack takes memory from the engine and is gone after a reboot",
        )
    return ok(
        f"{size(found.free)} free on {found.mount}, {size(total)} needed" + _pack_text(role, profile, facts),
        expected=expected,
        found=size(found.free),
    )


def _pack_text(role: str, profile: Profile, facts: HostFacts) -> str:
    """Where the figure comes from while the Hub was not asked; in GB, as packs are spoken of."""
    missing = need.pack_bytes_missing(profile, facts)
    if role not in need.PACK_ROLES or not missing or facts.pack is None or facts.pack.bytes_missing is not None:
        return ""
    return f" ({missing / 1e9:.1f} GB of pack by the profile; the Hub was not asked yet)"


def _room_fix(role: str, found: DiskFacts, facts: HostFacts, least: int) -> tuple[str, ...]:
    if role == "store":
        gib = max(1, math.ceil(((found.total or 0) - (found.free or 0) + least) * need.PACK_HEADROOM / GIB))
        grow = as_root(f"mount -o remount,size={gib}g {found.mount}", facts.system)
        return (grow, f"export {VARIABLE[role]}=/another/tmpfs")
    return (
        f"du -xsh {found.mount.rstrip('/')}/* | sort -h | tail   # what takes the space",
        f"export {VARIABLE[role]}=/a/larger/filesystem",
    )


def _unusable(role: str, found: DiskFacts, facts: HostFacts, wanted: str) -> Verdict | None:
    """What makes a filesystem unusable whatever its size."""
    if found.writable is None:
        return unknown(
            f"whether {found.path} may be written is not known",
            expected=wanted,
            fix=(f"ls -ld {found.path}",),
        )
    variable = VARIABLE[role]
    if not found.writable:
        return fail(
            f"{found.path} cannot be made or written by this user",
            expected=wanted,
            found="not writable",
            fix=(
                as_root(f"install -d -o {facts.system.uid or 0} {found.path}", facts.system),
                f"export {variable}=/another/folder",
            ),
        )
    if role in ("data", "model", "engine") and found.fstype in FAT:
        return fail(
            f"{found.mount} is {found.fstype}: no links, and vfat holds no file over 4 GiB",
            expected="ext4, xfs, btrfs or zfs",
            found=found.fstype,
            fix=(f"export {variable}=/a/folder/on/ext4",),
        )
    if role == "engine" and found.noexec:
        return fail(
            f"{found.mount} is mounted noexec: the engine's libraries cannot be loaded from it",
            expected="a mount without noexec",
            found="noexec",
            fix=(
                as_root(f"mount -o remount,exec {found.mount}", facts.system),
                f"export {variable}=/another/folder",
            ),
        )
    return None


def _check(role: str, title: str, prevents: str) -> Check:
    return Check(f"disk.{role}", title, 1, GROUP, prevents, partial(_judge, role))


def image(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """Room in the container runtime's own storage for an image that is still to be pulled or built."""
    engine, found = profile.engine, facts.container
    if engine.kind != "container" or not engine.image_bytes:
        return skip("no image, or none of a known size")
    if facts.engine is not None and facts.engine.installed:
        return skip("the image is there")
    factor = IMAGE_ROOM if engine.build_revision else 1.0
    need = round(engine.image_bytes * factor)
    expected = f"{size(need)} free where the runtime keeps images"
    if found is None or not found.answers:
        return skip("the runtime does not answer: see toolchain.container")
    if found.storage_free is None:
        return unknown(
            f"room in {found.storage or 'the storage of ' + found.runtime} is not known",
            expected=expected,
            fix=(f"{found.runtime} system df", f"df -h {found.storage}" if found.storage else f"{found.runtime} info"),
        )
    if found.storage_free < need:
        return fail(
            f"{found.storage} has {size(found.storage_free)} free, {size(need)} needed",
            expected=expected,
            found=f"{size(found.storage_free)} free",
            fix=(f"{found.runtime} system df   # what images and build caches take", f"{found.runtime} builder prune"),
        )
    return ok(f"{size(found.storage_free)} free in {found.storage}", expected=expected, found=size(found.storage_free))


CHECKS = (
    _check("data", "room for the pack", "a download of hours that ends with a full disk"),
    _check("engine", "room for the engine's venv", "an engine install that stops half way, or cannot be loaded"),
    _check("state", "room for logs and records", "an engine whose log stops, and runs that leave no record"),
    _check("store", "room in the memory filesystem of the Engram store", "a store build that ends with ENOSPC"),
    _check("tmp", "room for temporary files of the install", "pip failing in the middle of a wheel"),
    Check(
        "disk.image",
        "room for a container's image",
        1,
        GROUP,
        "an image build of 20 minutes that ends with a full disk",
        image,
    ),
)
