# ruff: noqa: S108 - /dev/shm is named in messages, never opened
"""Checks of host memory: what is available, where the Engram store may live, what the kernel would refuse."""

from __future__ import annotations

import math

from ds41ctl.core.engram import node_pages, planned_placement
from ds41ctl.core.facts import HostFacts
from ds41ctl.core.place import Ground, decide, mount_line, mounted_bytes
from ds41ctl.core.profile import Profile
from preflight import need
from preflight.check import Check, Stage, Verdict, fail, ok, skip, unknown, warn
from preflight.text import GIB, as_root, command, size

GROUP = "HOST"
SHM_MIN = GIB  # policy: NCCL and vLLM's workers talk through /dev/shm; containers start with 64 MiB


def ram(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """MemAvailable, and the room below the cgroup's limit, against the profile's need."""
    if need.running(facts):
        return skip("an engine is running: its memory is already taken")
    memory, needed = facts.memory, need.host_memory(profile, facts)
    tables = needed - round(profile.hardware.ram_gib_min * GIB)
    whose = "that the engine keeps" if profile.engram.storage == "engine" else "not yet in memory"
    expected = f"{size(needed)} available ({profile.hardware.ram_gib_min:g} GiB" + (
        f" + {size(tables)} of Engram tables {whose})" if tables else ", Engram tables already placed)"
    )
    if memory.available is not None and memory.available < needed:
        return fail(
            f"{size(memory.available)} of memory available, {size(needed)} needed",
            expected=expected,
            found=f"{size(memory.available)} available",
            fix=("ps -eo pid,user,rss,args --sort=-rss | head   # end what is not needed", "or add memory"),
            why="the engine would be killed by the kernel while it loads, minutes into the start",
        )
    # the store in tmpfs is charged to our cgroup, hugepages are not
    limit, used = memory.cgroup_limit, memory.cgroup_used
    if limit and used is not None and limit - used < needed:
        return fail(
            f"this container or cgroup has {size(limit - used)} left, {size(needed)} needed",
            expected=expected,
            found=f"{size(limit - used)} of a limit of {size(limit)}",
            fix=(
                f"container: start it with --memory {math.ceil((used + needed) / GIB)}g",
                f"systemd: systemctl set-property UNIT MemoryMax={math.ceil((used + needed) / GIB)}G",
            ),
            why="the kernel kills the engine at the cgroup's limit even when the machine has memory left",
        )
    if memory.available is None or limit is None or (limit and used is None):
        what = "MemAvailable" if memory.available is None else "the cgroup's limit"
        return unknown(f"{what} is not known", expected=expected, fix=("free -g", "cat /proc/self/cgroup"))
    room = min(memory.available, limit - (used or 0)) if limit else memory.available
    return ok(f"{size(room)} available, {size(needed)} needed", expected=expected, found=f"{size(room)} available")


def tmpfs(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """A place in memory for the store: a tmpfs that is there, one that may be mounted, or /dev/shm."""
    ground = _ground(profile, facts)
    if profile.engram.storage != "tmpfs" and not (profile.engram.storage == "hugetlb" and ground.chosen):
        return skip(f"engram.storage is {profile.engram.storage}")
    system, store, shm = facts.system, facts.disk("store"), facts.disk("shm")
    expected = "a writable tmpfs, or the right to mount one"
    if need.store_is_valid(facts):
        return ok("the store is in place", expected=expected, found=facts.store.fstype if facts.store else "")
    if ground.chosen:
        return _chosen(profile, facts, ground)
    if store is not None and store.fstype in ("tmpfs", "ramfs") and store.writable:
        return ok(
            f"{store.mount} is a writable {store.fstype}",
            expected=expected,
            found=f"{store.fstype} {store.mount}",
        )
    if system.root and system.can_mount:
        return ok("root may mount a tmpfs", expected=expected, found="root with CAP_SYS_ADMIN")
    if system.sudo_passwordless:
        return ok("sudo mounts a tmpfs without a password", expected=expected, found="sudo -n")
    missing = need.store_bytes_missing(profile, facts)
    folder = store.path if store is not None else "/dev/shm/ds41ctl"
    if shm is not None and shm.writable and shm.fstype == "tmpfs":
        if shm.free is None:
            return unknown("the size of /dev/shm is not known", expected=expected, fix=("df -h /dev/shm",))
        if shm.free >= missing:
            return ok(f"/dev/shm has {size(shm.free)} free", expected=expected, found="/dev/shm")
        return fail(
            f"/dev/shm has {size(shm.free)} free, the Engram tables need {size(missing)}",
            expected=f"{size(missing)} in a tmpfs",
            found=f"{size(shm.free)} in /dev/shm",
            fix=_tmpfs_fix(facts, missing, folder),
        )
    if store is None or store.writable is None or (system.root and system.can_mount is None):
        return unknown(
            "whether a tmpfs can be had is not known",
            expected=expected,
            fix=_tmpfs_fix(facts, missing, folder),
        )
    if not system.root and system.sudo_passwordless is None:
        return unknown("whether sudo works is not known", expected=expected, fix=("sudo -n true; echo $?",))
    return fail(
        "there is no tmpfs for the Engram store, and this user may not mount one",
        expected=expected,
        found=f"{folder} on {store.fstype or 'an unknown filesystem'}, "
        + ("root without CAP_SYS_ADMIN" if system.root else "no sudo without a password"),
        fix=_tmpfs_fix(facts, missing, folder),
    )


def _ground(profile: Profile, facts: HostFacts) -> Ground:
    """What the place of the store depends on, from recorded facts: what the build asks this machine for."""
    system, disk, store = facts.system, facts.disk("store"), facts.store
    return Ground(
        folder=disk.path if disk is not None else profile.engram.dir,
        chosen=bool(profile.engram.dir) or (store is not None and store.chosen),
        fstype=disk.fstype if disk is not None else "",
        own_mount=store is not None and store.own_mount,
        may_mount=system.can_mount if system.root else system.sudo_passwordless,
        foreign=store.foreign if store is not None else "",
    )


def _tables(profile: Profile, facts: HostFacts) -> int:
    """Bytes of the store's files: shards hold a little more than the tables' rows."""
    wanted = facts.store.bytes_needed if facts.store is not None else None
    return max(need.table_bytes(profile), wanted or 0)


def _chosen(profile: Profile, facts: HostFacts, ground: Ground) -> Verdict:
    """A folder that the user or the profile names: nothing else is taken, and a disk least of all."""
    fstype = "hugetlbfs" if profile.engram.storage == "hugetlb" else "tmpfs"
    expected = f"{ground.folder} on a memory filesystem, or the right to mount one there"
    found, system = facts.disk("store"), facts.system
    line = mount_line(profile.engram, ground.folder, _tables(profile, facts), system.uid or 0)
    if found is None or not found.fstype:
        return unknown(
            f"what {ground.folder} lies on is not known", expected=expected, fix=(f"findmnt -T {ground.folder}",)
        )
    decision = decide(profile.engram, ground)
    if decision.way == "there":
        if found.writable is None:
            return unknown(
                f"whether {ground.folder} may be written is not known",
                expected=expected,
                fix=(f"ls -ld {ground.folder}",),
            )
        if found.writable:
            return ok(f"{found.mount} is a writable {found.fstype}", expected=expected, found=found.fstype)
        return fail(
            f"{ground.folder} is on {found.fstype}, and this user may not write there",
            expected=expected,
            found="not writable",
            fix=(as_root(f"install -d -o {system.uid or 0} {ground.folder}", system),),
        )
    if decision.way == "mount":
        planned = mounted_bytes(profile.engram, _tables(profile, facts))
        return ok(
            f"a {fstype} of {size(planned)} will be mounted at {ground.folder}",
            expected=expected,
            found="root with CAP_SYS_ADMIN" if system.root else "sudo -n",
        )
    if decision.way == "unknown":
        return unknown(decision.why, expected=expected, fix=("sudo -n true; echo $?", line))
    gib = math.ceil(mounted_bytes(profile.engram, _tables(profile, facts)) * need.PACK_HEADROOM / GIB)
    inside = (f"start the container with --tmpfs {ground.folder}:size={gib}g",) if system.container else (line,)
    other = (f"ls -la {ground.folder}", "export DS41_ENGRAM_DIR=/a/folder/of/its/own")
    return fail(
        decision.why,
        expected=expected,
        found=f"{ground.folder} on {found.fstype}",
        fix=inside if decision.rights else other,
        why="the tables belong in memory; on a disk every row would be read from the drive, which nobody has asked for",
    )


def _tmpfs_fix(facts: HostFacts, missing: int, folder: str) -> tuple[str, ...]:
    gib = max(1, math.ceil(missing * need.PACK_HEADROOM / GIB))
    if facts.system.container:
        return (f"start the container with --shm-size={gib}g, or with --tmpfs {folder}:size={gib}g",)
    mount = f"mount -t tmpfs -o size={gib}g,huge=advise,uid={facts.system.uid or 0},mode=0700 tmpfs {folder}"
    return (
        as_root(f"mkdir -p {folder}", facts.system),
        as_root(mount, facts.system),
        f"export DS41_ENGRAM_DIR={folder}",
    )


def hugepages(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """Enough free hugepages on every NUMA node, or the right and the memory to reserve them when the store is built."""
    if profile.engram.storage != "hugetlb":
        return skip(f"engram.storage is {profile.engram.storage}")
    page_kib, wanted = _pages_wanted(profile, facts)
    page = size(page_kib * 1024)
    expected = f"{sum(wanted.values())} free pages of {page} ({_by_node(wanted)})"
    if need.store_is_valid(facts):
        return ok("the store holds its hugepages", expected=expected, found="the store is in place")
    if facts.memory.hugepages is None:
        return unknown("the hugepage pools are not known", expected=expected, fix=("grep Huge /proc/meminfo",))
    pools = [pool for pool in facts.memory.hugepages if pool.size_kib == page_kib]
    if not pools:
        return fail(
            f"this kernel has no hugepages of {page}",
            expected=expected,
            found="no pool of that size",
            fix=("ls /sys/kernel/mm/hugepages", f'use engram.storage tmpfs, or page = "2M" in profile {profile.name}'),
        )
    free = _free_pages(facts, page_kib)
    total = sum(pool.total for pool in pools if pool.node < 0)
    missing = {node: count - free.get(node, 0) for node, count in wanted.items() if count > free.get(node, 0)}
    found = f"{total} reserved, free: {_by_node(free)}"
    if not missing:
        return ok(f"{sum(free.values())} free hugepages", expected=expected, found=found)
    lacking = sum(missing.values())
    if total < sum(wanted.values()):
        summary = f"{total} hugepages of {page} are reserved, {sum(wanted.values())} needed"
        fix = _hugepage_fix(facts, wanted, page_kib)
    elif sum(free.values()) < sum(wanted.values()):
        summary = f"the hugepages are there, but only {sum(free.values())} are free and no valid store holds them"
        fix = (
            as_root("grep -l hugepage /proc/*/maps   # which processes hold them", facts.system),
            command("engram drop", profile),
        )
    else:
        summary = "there are enough hugepages, but on the wrong NUMA node"
        fix = _hugepage_fix(facts, wanted, page_kib)
    may = _may_reserve(facts)
    if may is None:
        return unknown(f"{summary}; whether the build may reserve them is not known", expected=expected, fix=fix)
    if not may:
        return fail(
            f"{summary}, and this user may not reserve them",
            expected=expected,
            found=found,
            fix=fix,
            why="without its hugepages the store falls back to a tmpfs, whose rows are read more slowly",
        )
    if facts.memory.available is None:
        return unknown(f"{summary}; the available memory is not known", expected=expected, fix=("free -g",))
    if facts.memory.available < lacking * page_kib * 1024:
        return fail(
            f"{summary}, and {size(facts.memory.available)} of memory do not hold {lacking} more",
            expected=expected,
            found=found,
            fix=("ps -eo pid,user,rss,args --sort=-rss | head   # end what is not needed", *fix),
            why="the kernel gives fewer pages than asked for, without an error",
        )
    reserves = f"{command('engram build', profile)} will reserve {lacking} more ({_by_node(missing)})"
    if page_kib > 2048 or total >= sum(wanted.values()):
        return warn(f"{summary}; {reserves}", expected=expected, found=found, fix=fix)
    return ok(f"{total} hugepages are reserved; {reserves}", expected=expected, found=found)


def _pages_wanted(profile: Profile, facts: HostFacts) -> tuple[int, dict[int, int]]:
    """KiB of a page, and the pages on each NUMA node as the builder spreads the tables."""
    page_kib = 1 << 20 if profile.engram.page == "1G" else 2048
    pools = facts.memory.hugepages or ()
    empty = {node.node for node in facts.memory.nodes or () if node.total == 0}
    nodes = sorted({pool.node for pool in pools if pool.node >= 0 and pool.size_kib == page_kib} - empty)
    return page_kib, node_pages(
        (planned_placement(table.rows, nodes) for table in profile.model.engram), page_kib * 1024
    )


def _free_pages(facts: HostFacts, page_kib: int) -> dict[int, int]:
    """Free pages on each node, less what somebody has been promised; node 0 is the machine where there are no nodes."""
    pools = [pool for pool in facts.memory.hugepages or () if pool.size_kib == page_kib]
    promised = sum(pool.reserved for pool in pools if pool.node < 0)
    by_node = {pool.node: max(0, pool.free - promised) for pool in pools if pool.node >= 0}
    return by_node or {0: max(0, sum(pool.free for pool in pools) - promised)}


def _by_node(counts: dict[int, int]) -> str:
    return ", ".join(f"node{node} {count}" for node, count in sorted(counts.items()))


def _may_reserve(facts: HostFacts) -> bool | None:
    """Whether `engram build` may write nr_hugepages: root that has not lost CAP_SYS_ADMIN, or sudo -n."""
    system = facts.system
    return system.can_mount if system.root else system.sudo_passwordless


def _hugepage_fix(facts: HostFacts, wanted: dict[int, int], page_kib: int) -> tuple[str, ...]:
    tee = as_root("tee", facts.system)
    folder = f"hugepages/hugepages-{page_kib}kB/nr_hugepages"
    kind, total = "1G" if page_kib > 2048 else "2M", sum(wanted.values())
    boot = f"if the kernel gives fewer, reserve at boot: hugepagesz={kind} hugepages={total}"
    if not any(pool.node >= 0 for pool in facts.memory.hugepages or ()):
        return (f"echo {total} | {tee} /sys/kernel/mm/{folder}", boot)
    lines = [f"echo {count} | {tee} /sys/devices/system/node/node{node}/{folder}" for node, count in wanted.items()]
    return (as_root("sh -c 'echo 1 > /proc/sys/vm/compact_memory'", facts.system), *lines, boot)


def store_size(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """The store's tmpfs holds all tables: the size the profile gives, or that of the mount that is there."""
    tables = _tables(profile, facts)
    if profile.engram.storage != "tmpfs" or not tables:
        return skip(f"engram.storage is {profile.engram.storage}")
    expected = f"a tmpfs of {size(tables)} or more"
    planned = profile.engram.size_gib * GIB
    if planned and planned < tables:
        return fail(
            f"engram.size_gib {profile.engram.size_gib:g} is too small for {size(tables)} of tables",
            expected=expected,
            found=f"{profile.engram.size_gib:g} GiB",
            fix=(f"set engram.size_gib to {math.ceil(tables * need.PACK_HEADROOM / GIB)} in profile {profile.name}",),
        )
    found, ground = facts.disk("store"), _ground(profile, facts)
    if found is not None and found.fstype == "tmpfs" and not ground.own_mount:
        if found.total is None:
            return unknown(
                "the size of the store's tmpfs is not known", expected=expected, fix=(f"df -h {found.path}",)
            )
        if found.total < tables:
            half = (
                facts.memory.total is not None and abs(found.total - facts.memory.total / 2) < 0.02 * facts.memory.total
            )
            return fail(
                f"{found.mount} is a tmpfs of {size(found.total)}"
                + (" (half of the memory, the default)" if half else ""),
                expected=expected,
                found=size(found.total),
                fix=(
                    as_root(
                        f"mount -o remount,size={math.ceil(tables * need.PACK_HEADROOM / GIB)}g {found.mount}",
                        facts.system,
                    ),
                    "or set DS41_ENGRAM_DIR to a folder on a larger tmpfs",
                ),
                why=f"the default of half the memory is too small below {size(2 * tables)} of memory",
            )
        return ok(f"{found.mount}, {size(found.total)}", expected=expected, found=size(found.total))
    if need.store_is_valid(facts):
        return ok("the store is in place", expected=expected, found=found.fstype if found is not None else "")
    way = decide(profile.engram, ground).way
    if way == "mount":
        room = f"{profile.engram.size_gib:g} GiB" if planned else f"room for {size(tables)}"
        where = f" at {ground.folder}" if ground.chosen else ""
        return ok(f"will be mounted{where} with {room}", expected=expected, found=room)
    if way == "unknown" or ground.may_mount is None:
        return unknown("whether a tmpfs may be mounted is not known", expected=expected, fix=("sudo -n true; echo $?",))
    return skip("no tmpfs will be mounted: host.tmpfs says what is used")


def hugepage_room(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """Memory of each node for the pages still to be reserved, in blocks large enough to become pages."""
    if profile.engram.storage != "hugetlb":
        return skip(f"engram.storage is {profile.engram.storage}")
    page_kib, wanted = _pages_wanted(profile, facts)
    expected = f"room for {sum(wanted.values())} pages of {size(page_kib * 1024)} ({_by_node(wanted)})"
    pools = facts.memory.hugepages
    if need.store_is_valid(facts):
        return ok("the store holds its hugepages", expected=expected, found="the store is in place")
    if pools is None or facts.memory.nodes is None:
        return unknown("memory and hugepages of the nodes are not known", expected=expected, fix=("numactl -H",))
    if not any(pool.node >= 0 and pool.size_kib == page_kib for pool in pools):
        return unknown(
            "the kernel states no hugepages a node",
            expected=expected,
            fix=("ls /sys/devices/system/node/node0/hugepages",),
        )
    free = _free_pages(facts, page_kib)
    missing = {node: count - free.get(node, 0) for node, count in wanted.items() if count > free.get(node, 0)}
    if not missing:
        return ok("all pages are reserved and free", expected=expected, found="reserved")
    if page_kib > 2048:
        return warn(
            f"{sum(missing.values())} pages of 1 GiB are not reserved, and rarely can be after boot",
            expected=expected,
            found=f"{sum(missing.values())} missing",
            fix=(f"boot with: hugepagesz=1G hugepages={sum(wanted.values())}",),
        )
    known = {node.node: node for node in facts.memory.nodes}
    for number, count in missing.items():
        node, bytes_wanted = known.get(number), count * page_kib * 1024
        if node is None or node.free is None or node.free_in_blocks is None:
            return unknown(
                f"free memory of node {number} is not known",
                expected=expected,
                fix=("numactl -H", "cat /proc/buddyinfo"),
            )
        # the page cache can be dropped and is not in MemFree: only a node that is too small at all is hopeless
        if node.total is not None and node.total < bytes_wanted:
            return fail(
                f"node {number} has {size(node.total)} of memory, its table needs {size(bytes_wanted)} more",
                expected=expected,
                found=f"node {number}: {size(node.total)}",
                fix=("add memory to this node, or use engram.storage tmpfs",),
            )
        if node.free_in_blocks < bytes_wanted:
            return warn(
                f"node {number} has {size(node.free_in_blocks)} in 2 MiB blocks, {size(bytes_wanted)} wanted",
                expected=expected,
                found=f"node {number}: {size(node.free)} free, {size(node.free_in_blocks)} in large blocks",
                fix=(
                    as_root(
                        "sh -c 'echo 3 > /proc/sys/vm/drop_caches; echo 1 > /proc/sys/vm/compact_memory'", facts.system
                    ),
                    f"or reserve at boot: hugepagesz=2M hugepages={sum(wanted.values())}",
                ),
                why="the kernel gives fewer pages than asked for, without an error (field report: 13,567 of 84,000)",
            )
    return ok("enough memory in large blocks on each node", expected=expected, found="enough")


def hugetlb_limit(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """No cgroup forbids the hugepages that the machine has."""
    if profile.engram.storage != "hugetlb":
        return skip(f"engram.storage is {profile.engram.storage}")
    tables, limits = need.table_bytes(profile), facts.memory.hugetlb_limits
    name = "1GB" if profile.engram.page == "1G" else "2MB"
    expected = f"hugetlb.{name} limit of {size(tables)} or more"
    if limits is None:
        return unknown("the hugetlb limits are not known", expected=expected, fix=("cat /proc/self/cgroup",))
    limit = limits.get(name)
    if limit is not None and limit < tables:
        return fail(
            f"the cgroup allows {size(limit)} of hugepages",
            expected=expected,
            found=size(limit),
            fix=(
                "cat /proc/self/cgroup   # GROUP in the next line",
                as_root(f"sh -c 'echo max > /sys/fs/cgroup/GROUP/hugetlb.{name}.max'", facts.system),
            ),
            why="the first touch beyond the limit is a SIGBUS, not an error",
        )
    return ok(
        "no limit" if limit is None else size(limit), expected=expected, found="none" if limit is None else size(limit)
    )


def huge_tmpfs(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """The kernel lets a tmpfs use large pages."""
    if profile.engram.storage != "tmpfs":
        return skip(f"engram.storage is {profile.engram.storage}")
    policy = facts.memory.shmem_thp
    expected = "transparent_hugepage/shmem_enabled other than deny"
    if not policy:
        return unknown(
            "the policy for large pages in tmpfs is not known",
            expected=expected,
            fix=("cat /sys/kernel/mm/transparent_hugepage/shmem_enabled",),
        )
    if policy == "deny":
        return warn(
            "the kernel denies large pages to every tmpfs",
            expected=expected,
            found=policy,
            fix=(as_root("sh -c 'echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled'", facts.system),),
            why="random rows of a table of 100 GB then miss the address cache of the CPU on every read",
        )
    return ok(policy, expected=expected, found=policy)


def overcommit(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """vm.overcommit_memory=2 refuses memory that is free."""
    memory = facts.memory
    expected = "vm.overcommit_memory 0 or 1"
    fix = (as_root("sysctl vm.overcommit_memory=0", facts.system),)
    if memory.overcommit is None:
        return unknown("vm.overcommit_memory is not known", expected=expected, fix=("sysctl vm.overcommit_memory",))
    if memory.overcommit != 2:
        return ok(f"vm.overcommit_memory {memory.overcommit}", expected=expected, found=str(memory.overcommit))
    if memory.commit_limit is None or memory.committed is None:
        return unknown("the commit limit is not known", expected=expected, fix=fix, found="2, limit not readable")
    room, needed = memory.commit_limit - memory.committed, need.host_memory(profile, facts)
    if room >= needed:
        return ok(f"strict overcommit, {size(room)} left", expected=f"{size(needed)} to commit", found=size(room))
    return warn(
        f"strict overcommit leaves {size(room)} to commit, {size(needed)} needed",
        expected=expected,
        found=f"2, {size(room)} left to commit",
        fix=fix,
    )


def shared_memory(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """Room in /dev/shm for the channels between GPU workers."""
    if profile.hardware.gpus < 2 or profile.engine.kind == "container":
        return skip("one worker, or the container brings its own")
    found = facts.disk("shm")
    fix = (
        "container: start it with --shm-size=16g",
        as_root("mount -o remount,size=50% /dev/shm", facts.system),
    )
    if found is None or found.free is None:
        return unknown("the size of /dev/shm is not known", expected=f"{size(SHM_MIN)} free", fix=fix)
    if found.free < SHM_MIN:
        return fail(
            f"/dev/shm has {size(found.free)} free",
            expected=f"{size(SHM_MIN)} free",
            found=size(found.free),
            fix=fix,
        )
    return ok(f"/dev/shm has {size(found.free)} free", expected=f"{size(SHM_MIN)} free", found=size(found.free))


CHECKS = (
    Check(
        "host.ram",
        "memory that is really available, cgroup included",
        1,
        GROUP,
        "the kernel killing the engine in the middle of loading",
        ram,
    ),
    Check(
        "host.tmpfs",
        "a place in memory for the Engram store",
        1,
        GROUP,
        "an Engram store on disk, or a build that is refused at its end",
        tmpfs,
    ),
    Check(
        "host.hugepages",
        "hugepages for the Engram store, on the right NUMA nodes, or the right to reserve them",
        1,
        GROUP,
        "SIGBUS while the store is filled, and tables read across the socket link",
        hugepages,
    ),
    Check(
        "host.overcommit",
        "overcommit policy",
        1,
        GROUP,
        "`cannot allocate memory` while memory is free",
        overcommit,
    ),
    Check(
        "host.shm",
        "/dev/shm for multi-GPU workers",
        1,
        GROUP,
        "workers that die with a bus error when their shared memory is full",
        shared_memory,
    ),
    Check(
        "host.tmpfs-size",
        "the tmpfs holds all Engram tables",
        1,
        GROUP,
        "a store build that ends with ENOSPC: a tmpfs is half of the memory by default",
        store_size,
    ),
    Check(
        "host.hugepage-room",
        "memory for hugepages still to be reserved, by node and block size",
        1,
        GROUP,
        "fewer hugepages than asked for, without an error, on a fragmented node",
        hugepage_room,
    ),
    Check(
        "host.hugetlb-limit",
        "cgroup limit of hugepages",
        1,
        GROUP,
        "SIGBUS while the store is filled",
        hugetlb_limit,
    ),
    Check(
        "host.huge-tmpfs",
        "large pages in tmpfs",
        1,
        GROUP,
        "slow reads of random table rows",
        huge_tmpfs,
    ),
)
