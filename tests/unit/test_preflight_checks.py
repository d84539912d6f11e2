"""Claims about single checks: one field changed on a machine on which everything is in place."""

from __future__ import annotations

import pytest

import preflight
from ds41ctl.adapters import profiles
from ds41ctl.core.facts import (
    DiskFacts,
    EngineFacts,
    GpuFacts,
    HostFacts,
    HugePagePool,
    LogindFacts,
    PackFileFacts,
    PortFacts,
    ProcessRef,
    RunningFacts,
    ToolFacts,
)
from ds41ctl.core.finding import Finding, Status
from ds41ctl.core.profile import Profile
from preflight.check import Stage
from tests.facts.replay import changed, disk_changed, machine, profile

GIB = 1 << 30
KIB = 1 << 10


@pytest.fixture
def tiny() -> Profile:
    return profile("cpu-tiny")


@pytest.fixture
def ready() -> HostFacts:
    return machine("ubuntu2404-ready")


@pytest.fixture
def v100() -> Profile:
    return profile("v100-own-store")


@pytest.fixture
def reserved() -> HostFacts:
    return machine("v100-8x-hugepages-reserved")


def ask(id: str, asked: Profile, facts: HostFacts, stage: Stage = "serve") -> Finding:
    (finding,) = preflight.run(asked, facts, stage=stage, only=(id,))
    assert finding.status != Status.CRASH, finding.evidence
    return finding


def with_tool(facts: HostFacts, name: str, path: str, version: str) -> HostFacts:
    others = tuple(tool for tool in facts.tools if tool.name != name)
    return facts.model_copy(update={"tools": (*others, ToolFacts(name=name, path=path, version=version))})


# ---- host


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ("tmux 3.2a", "ok"),
        ("tmux 3.5", "ok"),
        ("tmux next-3.6", "ok"),
        ("tmux master", "ok"),
        ("tmux openbsd-7.4", "ok"),
        ("tmux 3.2", "fail"),
        ("tmux 3.2-rc3", "fail"),
        ("tmux 2.8", "fail"),
        ("", "unknown"),
        ("something else", "unknown"),
    ],
)
def test_tmux_must_be_3_2a(tiny: Profile, ready: HostFacts, version: str, status: str) -> None:
    assert ask("host.tmux", tiny, with_tool(ready, "tmux", "/usr/bin/tmux", version)).status == status


@pytest.mark.parametrize(
    ("ids", "line"),
    [
        (("debian",), "sudo apt-get install -y tmux"),
        (("pop", "ubuntu", "debian"), "sudo apt-get install -y tmux"),
        (("rocky", "rhel", "centos", "fedora"), "sudo dnf install -y tmux"),
        (("arch",), "sudo pacman -S --noconfirm tmux"),
        (("opensuse-leap", "suse", "opensuse"), "sudo zypper install -y tmux"),
        (("nixos",), "install tmux with this distribution's package manager"),
    ],
)
def test_a_missing_tmux_is_installed_as_this_distribution_does(
    tiny: Profile, ready: HostFacts, ids: tuple[str, ...], line: str
) -> None:
    facts = with_tool(changed(ready, "system", os_ids=ids), "tmux", "", "")
    assert ask("host.tmux", tiny, facts).fix[0] == line


def test_root_needs_no_sudo_in_a_fix(tiny: Profile, ready: HostFacts) -> None:
    facts = with_tool(changed(ready, "system", root=True, uid=0), "tmux", "", "")
    assert ask("host.tmux", tiny, facts).fix[0] == "apt-get install -y tmux"


def test_memory_is_judged_by_what_is_available_not_by_what_is_free(tiny: Profile, ready: HostFacts) -> None:
    # MemFree is not even recorded: 4.3 GB free with 116 GiB available is a healthy machine with a warm page cache
    assert ask("host.ram", tiny, changed(ready, "memory", available=122_000_000 * KIB)).status == Status.OK
    assert ask("host.ram", tiny, changed(ready, "memory", available=None)).status == Status.UNKNOWN


def test_a_cgroup_limit_below_the_need_fails_however_much_the_machine_has(tiny: Profile, ready: HostFacts) -> None:
    roomy = changed(ready, "memory", cgroup_limit=8 * GIB, cgroup_used=GIB)
    tight = changed(ready, "memory", cgroup_limit=8 * GIB, cgroup_used=4 * GIB)
    assert ask("host.ram", tiny, roomy).status == Status.OK
    finding = ask("host.ram", tiny, tight)
    assert finding.status == Status.FAIL
    assert "--memory" in finding.fix[0]
    assert ask("host.ram", tiny, changed(ready, "memory", cgroup_limit=None)).status == Status.UNKNOWN


def test_tables_in_reserved_hugepages_are_not_asked_for_again(v100: Profile, reserved: HostFacts) -> None:
    # 384 GiB box, 189 GiB reserved: MemAvailable has dropped by as much and 172 GiB are plenty for the other 32
    assert ask("host.ram", v100, reserved, "up").status == Status.OK
    none = changed(reserved, "memory", hugepages=(HugePagePool(node=-1, size_kib=2048, total=0, free=0),))
    finding = ask("host.ram", v100, none, "up")
    assert finding.status == Status.FAIL
    assert "221 GiB" in finding.expected


def test_tables_already_in_the_store_are_not_asked_for_again() -> None:
    asked, facts = profile("cmp170hx-tp4"), machine("cmp170hx-4x-ready")
    facts = changed(facts, "memory", available=60 * GIB)
    assert ask("host.ram", asked, facts).status == Status.OK
    empty = changed(facts, "store", exists=False, bytes_present=0)
    assert ask("host.ram", asked, empty).status == Status.FAIL


def test_a_running_engine_is_not_asked_to_find_its_memory_again(tiny: Profile, ready: HostFacts) -> None:
    facts = changed(ready, "memory", available=GIB)
    facts = changed(facts, running=RunningFacts(profile="cpu-tiny", pid=7, port=8011, alive=True))
    assert ask("host.ram", tiny, facts).status == Status.SKIP


def pools(zero: tuple[int, int], one: tuple[int, int], reserved: int = 0) -> tuple[HugePagePool, ...]:
    """Pools of a two-node machine; (total, free) a node."""
    return (
        HugePagePool(node=-1, size_kib=2048, total=zero[0] + one[0], free=zero[1] + one[1], reserved=reserved),
        HugePagePool(node=-1, size_kib=1048576, total=500, free=500),  # another size does not help
        HugePagePool(node=0, size_kib=2048, total=zero[0], free=zero[1]),
        HugePagePool(node=1, size_kib=2048, total=one[0], free=one[1]),
    )


ENOUGH = (
    48344,
    48344,
)  # half of both tables on each node, and a page for the border of each that only config.json knows
NOBODY, SUDO = {"sudo_passwordless": False}, {"sudo_passwordless": True}


@pytest.mark.parametrize(
    ("found", "rights", "status", "words"),
    [
        (pools(ENOUGH, ENOUGH), NOBODY, "ok", "96688 free"),
        (pools((48343, 48343), ENOUGH), NOBODY, "fail", "96687 hugepages of 2.0 MiB are reserved, 96688 needed"),
        (pools((96688, 96688), (0, 0)), NOBODY, "fail", "wrong NUMA node"),
        (pools((48344, 0), (48344, 0)), NOBODY, "fail", "no valid store holds them"),
        (pools(ENOUGH, ENOUGH, reserved=10), NOBODY, "fail", "no valid store holds them"),
        (pools((0, 0), (0, 0)), {"sudo_passwordless": None}, "unknown", "may reserve them is not known"),
        (pools((0, 0), (0, 0)), {"root": True, "can_mount": False}, "fail", "may not reserve"),
        (None, SUDO, "unknown", ""),
        ((), SUDO, "fail", "no hugepages of 2.0 MiB"),
        # the build reserves what is missing
        (pools((0, 0), (0, 0)), {"root": True, "can_mount": True}, "ok", "will reserve 96688 more"),
        (pools((40000, 40000), (0, 0)), SUDO, "ok", "will reserve 56688 more (node0 8344, node1 48344)"),
        (pools((96688, 96688), (0, 0)), SUDO, "warn", "will reserve 48344 more (node1 48344)"),
        (pools((48344, 0), (48344, 0)), SUDO, "warn", "no valid store holds them"),
    ],
)
def test_each_node_needs_the_pages_of_its_part_of_both_tables(
    v100: Profile,
    reserved: HostFacts,
    found: tuple[HugePagePool, ...] | None,
    rights: dict[str, object],
    status: str,
    words: str,
) -> None:
    facts = changed(changed(reserved, "memory", hugepages=found, available=250 * GIB), "system", **rights)
    finding = ask("host.hugepages", v100, facts, "up")
    assert finding.status == status, finding.summary
    assert words in finding.summary


@pytest.mark.parametrize(("available", "status"), [(188 * GIB, "fail"), (189 * GIB, "ok"), (None, "unknown")])
def test_the_right_to_reserve_does_not_make_memory(
    v100: Profile, reserved: HostFacts, available: int | None, status: str
) -> None:
    facts = changed(reserved, "memory", hugepages=pools((0, 0), (0, 0)), available=available)
    assert ask("host.hugepages", v100, facts, "up").status == status


def test_the_hugepage_fix_names_both_nodes_and_their_own_counts(v100: Profile, reserved: HostFacts) -> None:
    wrong = changed(reserved, "memory", hugepages=pools((96688, 96688), (0, 0)))
    fix = " ".join(ask("host.hugepages", v100, wrong, "up").fix)
    assert "echo 48344 | sudo tee /sys/devices/system/node/node0/" in fix
    assert "echo 48344 | sudo tee /sys/devices/system/node/node1/" in fix


def test_one_gib_pages_are_counted_as_such(v100: Profile, reserved: HostFacts) -> None:
    asked = v100.model_copy(update={"engram": v100.engram.model_copy(update={"page": "1G"})})
    for free, status in ((96, "ok"), (95, "warn")):
        found = tuple(HugePagePool(node=node, size_kib=1 << 20, total=free, free=free) for node in (0, 1))
        whole = HugePagePool(node=-1, size_kib=1 << 20, total=2 * free, free=2 * free)
        finding = ask("host.hugepages", asked, changed(reserved, "memory", hugepages=(whole, *found)), "up")
        assert finding.status == status
        assert "192 free pages of 1.0 GiB (node0 96, node1 96)" in finding.expected


@pytest.mark.parametrize(
    ("system", "store", "shm", "status"),
    [
        # a writable tmpfs is there
        ({}, {}, {}, "ok"),
        # a disk, but root may mount
        ({"root": True, "uid": 0, "can_mount": True}, {"fstype": "ext4"}, {"writable": False}, "ok"),
        ({"sudo_passwordless": True}, {"fstype": "ext4"}, {"writable": False}, "ok"),
        # /dev/shm will do
        ({}, {"fstype": "ext4"}, {}, "ok"),
        ({}, {"fstype": "ext4"}, {"free": 1000}, "fail"),
        ({}, {"fstype": "ext4"}, {"free": None}, "unknown"),
        # nothing at all
        ({}, {"fstype": "ext4"}, {"writable": False}, "fail"),
        ({"root": True, "uid": 0, "can_mount": False}, {"fstype": "overlay"}, {"writable": False}, "fail"),
        ({"root": True, "uid": 0, "can_mount": None}, {"fstype": "overlay"}, {"writable": False}, "unknown"),
        ({"sudo_passwordless": None}, {"fstype": "ext4"}, {"writable": False}, "unknown"),
    ],
)
def test_the_store_needs_a_tmpfs_or_the_right_to_mount_one(
    tiny: Profile,
    ready: HostFacts,
    system: dict[str, object],
    store: dict[str, object],
    shm: dict[str, object],
    status: str,
) -> None:
    facts = changed(changed(ready, "system", **system), "store", exists=False, bytes_present=0)
    facts = disk_changed(disk_changed(facts, "store", **store), "shm", **shm)
    assert ask("host.tmpfs", tiny, facts, "up").status == status


@pytest.mark.parametrize(
    ("limits", "status"),
    [
        ({"memlock": "unlimited", "nofile_hard": "1048576"}, "ok"),
        ({"memlock": "202758032400", "nofile_hard": "unlimited"}, "ok"),
        ({"memlock": "65536", "nofile_hard": "1048576"}, "fail"),
        ({"memlock": "unlimited", "nofile_hard": "4096"}, "warn"),
        ({"memlock": "unlimited", "nofile_hard": "512"}, "fail"),
        ({"nofile_hard": "1048576"}, "unknown"),
        ({"memlock": "junk", "nofile_hard": "1048576"}, "unknown"),
        ({}, "unknown"),
    ],
)
def test_limits_of_the_process_that_starts_a_gpu_engine(
    v100: Profile, reserved: HostFacts, limits: dict[str, str], status: str
) -> None:
    assert ask("host.limits", v100, changed(reserved, limits=limits)).status == status


def test_locked_memory_does_not_matter_without_gpus(tiny: Profile, ready: HostFacts) -> None:
    assert ready.limits["memlock"] == "8388608"
    assert ask("host.limits", tiny, ready).status == Status.OK


def test_strict_overcommit_warns_only_when_it_leaves_too_little(tiny: Profile, ready: HostFacts) -> None:
    mode2 = changed(ready, "memory", overcommit=2, commit_limit=40 * GIB, committed=10 * GIB)
    assert ask("host.overcommit", tiny, mode2).status == Status.OK
    assert ask("host.overcommit", tiny, changed(mode2, "memory", committed=38 * GIB)).status == Status.WARN
    assert ask("host.overcommit", tiny, changed(mode2, "memory", commit_limit=None)).status == Status.UNKNOWN
    assert ask("host.overcommit", tiny, changed(mode2, "memory", overcommit=None)).status == Status.UNKNOWN


@pytest.mark.parametrize(
    ("logind", "uid", "status"),
    [
        (LogindFacts(present=True, kill_user_processes=True, remove_ipc=True, linger=True), 1000, "ok"),
        (LogindFacts(present=True, kill_user_processes=True, remove_ipc=False, linger=False), 1000, "warn"),
        (LogindFacts(present=True, kill_user_processes=False, remove_ipc=True, linger=False), 1000, "warn"),
        (LogindFacts(present=True, kill_user_processes=False, remove_ipc=False, linger=False), 1000, "ok"),
        (LogindFacts(present=True, kill_user_processes=True, remove_ipc=True, linger=False), 0, "ok"),
        (LogindFacts(present=True, kill_user_processes=None, remove_ipc=False, linger=False), 1000, "unknown"),
        (LogindFacts(present=False), 1000, "skip"),
        (None, 1000, "unknown"),
    ],
)
def test_what_logout_would_end(
    tiny: Profile, ready: HostFacts, logind: LogindFacts | None, uid: int, status: str
) -> None:
    facts = changed(changed(ready, "system", uid=uid), logind=logind)
    assert ask("host.logout", tiny, facts).status == status


def test_the_engines_venv_is_made_with_the_python_its_wheels_are_for(v100: Profile, reserved: HostFacts) -> None:
    bare = changed(reserved, "engine", installed=False)
    assert ask("host.python", v100, bare, "up").status == Status.OK
    other = changed(bare, "system", python="3.11.9")
    assert ask("host.python", v100, other, "up").status == Status.UNKNOWN
    found = ask("host.python", v100, changed(other, "engine", maker="/usr/bin/python3.12"), "up")
    assert found.status == Status.OK and "/usr/bin/python3.12" in found.summary
    missing = changed(other, "engine", maker_problem="there is no python3.12 on PATH", maker_fix=("apt-get",))
    found = ask("host.python", v100, missing, "up")
    assert found.status == Status.FAIL and found.fix == ("apt-get", "uv tool install --python 3.12 ds41ctl")


@pytest.mark.parametrize(
    ("ids", "line"),
    [
        (("ubuntu", "debian"), "sudo apt-get install -y python3.12-venv"),
        (("fedora",), "sudo dnf install -y python3.12"),
        (("opensuse-leap", "suse"), "sudo zypper install -y python312"),
    ],
)
def test_what_makes_a_venv_is_a_package_of_its_own_on_debian_alone(
    v100: Profile, reserved: HostFacts, ids: tuple[str, ...], line: str
) -> None:
    bare = changed(reserved, "engine", installed=False)
    found = ask("host.python", v100, changed(bare, "system", ensurepip=False, os_ids=ids), "up")
    assert found.status == Status.FAIL and found.fix == (line,)


def test_a_python_without_wheels_fails_before_the_install(tiny: Profile, ready: HostFacts) -> None:
    bare = changed(ready, "engine", installed=False)
    assert ask("host.python", tiny, changed(bare, "system", python="3.15.0"), "up").status == Status.FAIL
    assert ask("host.python", tiny, changed(bare, "system", python="3.14.1"), "up").status == Status.OK
    assert ask("host.python", tiny, changed(bare, "system", ensurepip=None), "up").status == Status.UNKNOWN
    assert ask("host.python", tiny, changed(bare, "system", python="3.9.2"), "up").status == Status.FAIL


@pytest.mark.parametrize(
    ("values", "status"),
    [
        ({"libc": "glibc 2.27"}, "fail"),
        ({"libc": "glibc 2.28"}, "ok"),
        ({"libc": ""}, "unknown"),
        ({"machine": ""}, "unknown"),
        ({"platform": "darwin"}, "fail"),
        ({"platform": ""}, "unknown"),
    ],
)
def test_wheels_need_linux_x86_64_and_glibc_2_28(
    tiny: Profile, ready: HostFacts, values: dict[str, str], status: str
) -> None:
    assert ask("host.os", tiny, changed(ready, "system", **values)).status == status


# ---- disks


def test_needs_of_roles_on_one_filesystem_are_summed_and_told_once(tiny: Profile, ready: HostFacts) -> None:
    facts = changed(changed(ready, "engine", installed=False), "pack", exists=False, bytes_missing=12 * GIB)
    findings = preflight.run(tiny, facts, stage="up", only=("disk",))
    judged = [f for f in findings if f.status == Status.OK and "/dev/shm" not in f.summary]
    # 12 GiB x 1.02 + 1 GiB of pack, 3 GiB of engine, 1 GiB of temporary files, 0.25 GiB of logs
    assert [f.id for f in judged] == ["disk.data"]
    assert "17.5 GiB needed" in judged[0].summary
    short = facts
    for role in ("data", "model", "state", "engine", "tmp"):
        short = disk_changed(short, role, free=17 * GIB)
    assert [f.id for f in preflight.run(tiny, short, stage="up", only=("disk",)) if f.failed()] == ["disk.data"]


def test_roles_on_filesystems_of_their_own_are_judged_alone(tiny: Profile, ready: HostFacts) -> None:
    facts = changed(ready, "engine", installed=False)
    facts = disk_changed(facts, "engine", device=77, mount="/small", free=2 * GIB)
    found = {f.id: f.status for f in preflight.run(tiny, facts, stage="up", only=("disk",))}
    assert found["disk.engine"] == Status.FAIL
    assert found["disk.tmp"] == Status.OK


def test_a_pack_in_a_folder_of_its_own_is_judged_there(tiny: Profile, ready: HostFacts) -> None:
    facts = changed(ready, "pack", exists=False, bytes_missing=20 * GIB)
    facts = disk_changed(facts, "model", device=88, mount="/models", path="/models/x", free=GIB)
    finding = ask("disk.data", tiny, facts, "up")
    assert finding.status == Status.FAIL
    assert "/models" in finding.summary


def test_a_noexec_filesystem_cannot_hold_the_engine(tiny: Profile, ready: HostFacts) -> None:
    facts = disk_changed(changed(ready, "engine", installed=False), "engine", noexec=True)
    assert "noexec" in ask("disk.engine", tiny, facts, "up").summary


def test_too_few_inodes_for_the_engine(tiny: Profile, ready: HostFacts) -> None:
    bare = changed(ready, "engine", installed=False)
    alone = disk_changed(bare, "engine", device=5, inodes_free=40_000)
    assert ask("disk.engine", tiny, alone, "up").status == Status.FAIL
    btrfs = disk_changed(bare, "engine", device=5, inodes_free=-1)
    assert ask("disk.engine", tiny, btrfs, "up").status == Status.OK


@pytest.mark.parametrize(
    ("values", "status"),
    [({"free": None}, "unknown"), ({"writable": None}, "unknown"), ({"writable": False}, "fail")],
)
def test_an_unmeasured_or_read_only_filesystem(
    tiny: Profile, ready: HostFacts, values: dict[str, object], status: str
) -> None:
    facts = disk_changed(changed(ready, "engine", installed=False), "engine", device=5, **values)
    assert ask("disk.engine", tiny, facts, "up").status == status


def shipped(name: str) -> Profile:
    return profiles.read(profiles.find(name))


def bare(facts: HostFacts, free: int) -> HostFacts:
    """A machine on which nothing of this pack was ever fetched, with so many bytes free where it goes."""
    nothing = facts.pack.model_copy(
        update={"exists": False, "files": (), "bytes_missing": None, "sources": (), "engram_tensors": ()}
    )
    facts = facts.model_copy(update={"pack": nothing})
    return disk_changed(disk_changed(facts, "model", free=free), "data", free=free)


@pytest.mark.parametrize(
    ("name", "recorded", "gb"),
    [("v100-pp2tp4", "v100-8x-serving-ready", 421.6), ("cmp170hx-tp4", "cmp170hx-4x-ready", 459.6)],
)
def test_a_bare_machine_is_judged_by_the_profiles_sizes_before_the_hub_is_asked(
    name: str, recorded: str, gb: float
) -> None:
    asked, known = shipped(name), machine(recorded)
    finding = ask("disk.data", asked, bare(known, 230 * 10**9), "up")
    assert finding.status == Status.FAIL and "needed" in finding.summary
    assert f"{gb} GB of pack by the profile; the Hub was not asked yet" in finding.summary
    finding = ask("disk.data", asked, bare(known, 500 * 10**9), "up")
    assert finding.status == Status.OK and f"{gb} GB" in finding.summary
    assert ask("pack.files", asked, bare(known, 500 * 10**9), "up").status == Status.SKIP
    assert ask("pack.sizes", asked, bare(known, 500 * 10**9), "up").status == Status.SKIP
    half = changed(bare(known, 230 * 10**9), "pack", bytes_there=round((gb - 200) * 1e9))
    assert ask("disk.data", asked, half, "up").status == Status.OK, "what lies there need not come again"
    pinned = changed(bare(known, 230 * 10**9), "pack", bytes_missing=100 * GIB)
    finding = ask("disk.data", asked, pinned, "up")
    assert finding.status == Status.OK and "by the profile" not in finding.summary, "the pins count once there are any"


def test_no_check_of_a_bare_v100_box_is_unknown_for_want_of_the_packs_size() -> None:
    findings = preflight.run(shipped("v100-pp2tp4"), bare(machine("v100-8x-serving-ready"), 500 * 10**9), stage="up")
    odd = [f.id for f in findings if f.id.startswith(("disk.", "pack.")) and f.status not in (Status.OK, Status.SKIP)]
    assert odd == []


def test_a_hybrid_elsewhere_does_not_take_its_sources_disk() -> None:
    """DS41_MODEL moves the links; what is downloaded for them stays below the data folder."""
    asked, facts = shipped("cmp170hx-tp4"), bare(machine("cmp170hx-4x-ready"), 500 * 10**9)
    facts = disk_changed(facts, "model", device=999, free=GIB, mount="/links")
    assert ask("disk.data", asked, facts, "up").status == Status.OK


@pytest.mark.parametrize(("share", "status"), [(1.04, "ok"), (0.96, "ok"), (1.06, "warn"), (0.5, "warn")])
def test_a_profiles_size_that_the_pins_do_not_bear_out_is_a_finding(share: float, status: str) -> None:
    asked, facts = shipped("v100-pp2tp4"), machine("v100-8x-serving-ready")
    sources = tuple(s.model_copy(update={"bytes": round(s.bytes * share)}) for s in facts.pack.sources)
    finding = ask("pack.sizes", asked, changed(facts, "pack", sources=sources))
    assert finding.status == status
    assert status == "ok" or "the profile says 421.6 GB" in finding.summary


def test_an_unknown_pack_size_still_counts_the_tables(v100: Profile, reserved: HostFacts) -> None:
    sources = tuple(s.model_copy(update={"size_bytes": 0}) for s in v100.model.hub_sources)
    v100 = v100.model_copy(update={"model": v100.model.model_copy(update={"sources": sources})})
    facts = changed(reserved, "pack", exists=False, bytes_missing=None)
    assert ask("disk.data", v100, facts, "up").status == Status.UNKNOWN
    small = disk_changed(facts, "model", free=100 * GIB)
    finding = ask("disk.data", v100, small, "up")
    assert finding.status == Status.FAIL
    assert "189 GiB" in finding.summary


def test_a_pack_in_memory_warns(tiny: Profile, ready: HostFacts) -> None:
    facts = changed(ready, "pack", exists=False, bytes_missing=GIB)
    facts = disk_changed(facts, "model", device=9, fstype="tmpfs", mount="/ramdisk")
    assert ask("disk.data", tiny, facts, "up").status == Status.WARN


# ---- port


@pytest.mark.parametrize(
    ("port", "status", "words"),
    [
        (PortFacts(host="127.0.0.1", port=8011, free=True), "ok", "free"),
        (PortFacts(host="127.0.0.1", port=8011, free=None, error="strange"), "unknown", "strange"),
        (None, "unknown", ""),
        (PortFacts(host="127.0.0.1", port=80, free=False, reason="denied", error="x"), "fail", "root"),
        (PortFacts(host="10.9.9.9", port=8011, free=False, reason="not-local", error="x"), "fail", "not an address"),
        (PortFacts(host="nope.invalid", port=8011, free=False, reason="unresolved", error="x"), "fail", "resolve"),
        (PortFacts(host="127.0.0.1", port=70000, free=False, reason="out-of-range", error="x"), "fail", "65535"),
        (PortFacts(host="127.0.0.1", port=8011, free=False, reason="in-use"), "fail", "may not see"),
    ],
)
def test_the_port(tiny: Profile, ready: HostFacts, port: PortFacts | None, status: str, words: str) -> None:
    finding = ask("net.port", tiny, changed(ready, port=port))
    assert finding.status == status
    assert words in finding.summary


def test_a_taken_port_names_its_holder_and_the_next_port(tiny: Profile) -> None:
    finding = ask("net.port", tiny, machine("port-taken"), "up")
    assert "pid 3120 (python3 -m http.server 8011, user user)" in finding.summary
    assert "DS41_PORT=8012 ds41ctl up --profile cpu-tiny" in finding.fix


def test_our_own_engine_on_the_port_is_no_conflict(tiny: Profile, ready: HostFacts) -> None:
    taken = PortFacts(host="127.0.0.1", port=8011, free=False, reason="in-use", holder=ProcessRef(pid=5))
    ours = changed(ready, port=taken, running=RunningFacts(profile="cpu-tiny", pid=5, port=8011, alive=True))
    dead = changed(ready, port=taken, running=RunningFacts(profile="cpu-tiny", pid=5, port=8011, alive=False))
    assert ask("net.port", tiny, ours).status == Status.SKIP
    assert ask("net.port", tiny, dead).status == Status.FAIL


# ---- environment


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("DSV41_ENGRAM_ZERO", "1", "warn"),
        ("DSV41_ENGRAM_ZERO", "0", "ok"),
        ("DS41_ENGRAM_UNFILLED", "true", "warn"),
        ("PYTHONPATH", "/home/u/1Cat-vLLM", "warn"),
        ("PYTHONPATH", "", "ok"),
        ("LD_PRELOAD", "/usr/lib/libjemalloc.so", "warn"),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:64", "warn"),
        ("PYTORCH_ALLOC_CONF", "max_split_size_mb:64, expandable_segments : true", "warn"),
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64", "ok"),
        ("VLLM_PLUGINS", "lora_filesystem_resolver", "warn"),
        ("VLLM_PLUGINS", "lora_filesystem_resolver, ds41_engine", "ok"),
        ("VLLM_LOGGING_LEVEL", "ERROR", "warn"),
        ("VLLM_LOGGING_LEVEL", "DEBUG", "ok"),
        ("CUDA_VISIBLE_DEVICES", "0,1", "ok"),  # means nothing to a profile without GPUs
        ("PYTHONDONTWRITEBYTECODE", "1", "ok"),  # not passed on
    ],
)
def test_a_switch_in_this_shell(tiny: Profile, ready: HostFacts, name: str, value: str, status: str) -> None:
    finding = ask("env.inherited", tiny, changed(ready, environment={name: value}))
    assert finding.status == status
    if status == "warn":
        assert finding.fix == (f"unset {name}",)
        assert name in finding.found


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("CUDA_DEVICE_ORDER", "FASTEST_FIRST", "fail"),
        ("VLLM_WORKER_MULTIPROC_METHOD", "fork", "fail"),
        ("DSV41_ENGRAM_STORAGE", "host", "fail"),
        ("PYTHONDONTWRITEBYTECODE", "1", "fail"),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", "fail"),
        ("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7", "ok"),
    ],
)
def test_a_switch_that_the_profile_passes_on(
    v100: Profile, reserved: HostFacts, name: str, value: str, status: str
) -> None:
    env = {**v100.serve.env, name: value}
    asked = v100.model_copy(update={"serve": v100.serve.model_copy(update={"env": env})})
    assert ask("env.inherited", asked, reserved).status == status


# ---- toolchain


@pytest.mark.parametrize(
    ("version", "home", "status"),
    [
        ("Cuda compilation tools, release 12.8, V12.8.93", "/usr/local/cuda-12.8", "ok"),
        ("Cuda compilation tools, release 13.0, V13.0.48", "/usr/local/cuda", "fail"),
        ("Cuda compilation tools, release 11.5, V11.5.119", "", "fail"),
        ("", "", "unknown"),
        ("Cuda compilation tools, release 12.8, V12.8.93", ":/usr/local/cuda", "fail"),
    ],
)
def test_volta_needs_nvcc_12_8(v100: Profile, reserved: HostFacts, version: str, home: str, status: str) -> None:
    facts = with_tool(changed(reserved, environment={"CUDA_HOME": home}), "nvcc", "/usr/local/cuda/bin/nvcc", version)
    assert ask("toolchain.nvcc", v100, facts).status == status


def test_no_compiler_is_asked_for_on_cpu(tiny: Profile, ready: HostFacts) -> None:
    assert ask("toolchain.nvcc", tiny, ready).status == Status.SKIP
    assert ask("toolchain.cxx", tiny, with_tool(ready, "c++", "", "")).status == Status.SKIP


def test_podman_will_do_for_a_container_engine() -> None:
    facts = with_tool(machine("cmp170hx-4x-one-locked"), "podman", "/usr/bin/podman", "podman version 5.2.3")
    assert ask("toolchain.container", profile("cmp170hx-tp4"), facts).status == Status.UNKNOWN, "it was not asked"
    facts = changed(facts, "container", runtime="podman", answers=True)
    assert ask("toolchain.container", profile("cmp170hx-tp4"), facts).status == Status.OK


# ---- pack


def test_a_missing_pack_is_made_by_up_and_missed_by_serve(tiny: Profile) -> None:
    facts = machine("debian12-container-24gb")
    coming = ask("pack.files", tiny, facts, "up")
    assert coming.status == Status.SKIP
    assert "will be generated" in coming.summary
    missing = ask("pack.files", tiny, facts, "serve")
    assert missing.status == Status.FAIL
    assert missing.fix == ("ds41ctl fetch --profile cpu-tiny",)


def pack_file(facts: HostFacts, index: int, **values: object) -> HostFacts:
    assert facts.pack is not None
    files = [f.model_copy(update=values) if i == index else f for i, f in enumerate(facts.pack.files)]
    return changed(facts, "pack", files=tuple(files))


@pytest.mark.parametrize(
    ("values", "up", "serve"),
    [
        ({"size": None, "verified": False, "note": "missing"}, "skip", "fail"),
        ({"size": None, "verified": False, "note": "not a regular file"}, "fail", "fail"),
        ({"size": 0, "verified": False, "note": "0 bytes, expected 3120"}, "fail", "fail"),
        ({"size": 3121, "verified": False, "note": "3121 bytes, expected 3120"}, "fail", "fail"),
        ({"verified": False, "note": "never verified"}, "skip", "fail"),
        ({"verified": False, "note": "changed since it was verified (mtime_ns)"}, "fail", "fail"),
        ({"size_expected": None}, "unknown", "unknown"),
    ],
)
def test_one_file_of_the_pack(tiny: Profile, ready: HostFacts, values: dict[str, object], up: str, serve: str) -> None:
    facts = pack_file(ready, 0, **values)
    assert ask("pack.files", tiny, facts, "up").status == up
    assert ask("pack.files", tiny, facts, "serve").status == serve


def test_headers_that_disagree_with_the_index_fail(tiny: Profile, ready: HostFacts) -> None:
    facts = changed(ready, "pack", problems=("model-00001-of-00003.safetensors lacks embed.weight and 3 more",))
    finding = ask("pack.files", tiny, facts, "up")
    assert finding.status == Status.FAIL
    assert finding.evidence


def tensor(facts: HostFacts, wanted: str, /, **values: object) -> HostFacts:
    assert facts.pack is not None
    tensors = [t.model_copy(update=values) if t.name == wanted else t for t in facts.pack.engram_tensors]
    return changed(facts, "pack", engram_tensors=tuple(tensors))


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("layers.1.engram.embed.scale", {"name": "layers.1.engram.embed.scales"}, "in no shard that will be read"),
        ("layers.1.engram.embed.weight", {"shape": (12435, 256)}, "[12435, 256]"),
        ("layers.3.engram.embed.weight", {"dtype": "BF16"}, "BF16"),
        ("layers.3.engram.embed.scale", {"dtype": "U8"}, "U8"),
        ("layers.3.engram.embed.scale", {"file": "model-00002-of-00003.safetensors"}, "model-00002"),
    ],
)
def test_a_pack_without_its_engram_tables_is_refused(
    tiny: Profile, ready: HostFacts, name: str, values: dict[str, object], words: str
) -> None:
    for stage in ("up", "serve"):
        finding = ask("pack.engram-tensors", tiny, tensor(ready, name, **values), stage)
        assert finding.status == Status.FAIL
        assert words in finding.summary
        assert "391" in finding.why


def test_names_with_a_model_prefix_are_the_same_tensors(tiny: Profile, ready: HostFacts) -> None:
    assert ready.pack is not None
    renamed = tuple(t.model_copy(update={"name": f"model.{t.name}"}) for t in ready.pack.engram_tensors)
    assert ask("pack.engram-tensors", tiny, changed(ready, "pack", engram_tensors=renamed)).status == Status.OK


def test_a_shard_still_to_come_is_waited_for_only_by_up(tiny: Profile, ready: HostFacts) -> None:
    assert ready.pack is not None
    index = next(i for i, f in enumerate(ready.pack.files) if f.name.startswith("model-00003"))
    facts = pack_file(ready, index, size=None, verified=False, note="missing")
    kept = tuple(t for t in ready.pack.engram_tensors if not t.file.startswith("model-00003"))
    facts = changed(facts, "pack", engram_tensors=kept)
    assert ask("pack.engram-tensors", tiny, facts, "up").status == Status.SKIP
    assert ask("pack.engram-tensors", tiny, facts, "serve").status == Status.FAIL
    # a fault in the shard that IS there is not hidden by the one that is not
    broken = tensor(facts, "layers.1.engram.embed.weight", dtype="BF16")
    assert ask("pack.engram-tensors", tiny, broken, "up").status == Status.FAIL


def test_a_pack_that_nothing_pins_is_unknown(tiny: Profile, ready: HostFacts) -> None:
    assert ask("pack.files", tiny, changed(ready, "pack", files=())).status == Status.UNKNOWN


# ---- engram


@pytest.mark.parametrize(
    ("env", "argv", "status"),
    [
        ({}, (), "fail"),
        ({"DSV41_ENGRAM_STORAGE": "host"}, (), "fail"),
        ({"DSV41_ENGRAM_STORAGE": "ssd"}, (), "ok"),
        ({}, ("docker", "run", "-e", "DSV41_ENGRAM_STORAGE=ssd", "image"), "ok"),
        ({}, ("docker", "run", "--env=DSV41_ENGRAM_STORAGE=ssd", "image"), "ok"),
        ({}, ("docker", "run", "-e", "DSV41_ENGRAM_STORAGE=host", "image"), "fail"),
        ({}, ("docker", "run", "-e", "DSV41_ENGRAM_STORAGE", "image"), "fail"),  # whatever this shell has
    ],
)
def test_a_container_without_ssd_storage_would_leave_the_tables_empty(
    env: dict[str, str], argv: tuple[str, ...], status: str
) -> None:
    asked, facts = profile("cmp170hx-tp4"), machine("cmp170hx-4x-ready")
    argv = (*argv, "-v", "${engram}:/engram:ro")
    asked = asked.model_copy(update={"serve": asked.serve.model_copy(update={"env": env, "argv": argv})})
    assert ask("engram.storage", asked, facts).status == status


def test_a_switch_on_a_containers_command_line_counts_as_passed_on() -> None:
    asked, facts = profile("cmp170hx-tp4"), machine("cmp170hx-4x-ready")
    argv = ("docker", "run", "-e", "DSV41_ENGRAM_ZERO=1", "image")
    asked = asked.model_copy(update={"serve": asked.serve.model_copy(update={"argv": argv})})
    assert ask("env.inherited", asked, facts).status == Status.FAIL


@pytest.mark.parametrize(
    ("values", "up", "serve"),
    [
        ({"exists": False, "bytes_present": 0}, "skip", "fail"),
        ({"problem": "layer 1: row 17 differs from the shard"}, "skip", "fail"),
        ({"layers": (1,)}, "fail", "fail"),
        ({"bytes_present": 264}, "fail", "fail"),
        ({"bytes_needed": None}, "unknown", "unknown"),
        ({"storage": "hugetlb"}, "warn", "warn"),
    ],
)
def test_the_store(tiny: Profile, ready: HostFacts, values: dict[str, object], up: str, serve: str) -> None:
    facts = changed(ready, "store", **values)
    assert ask("engram.store", tiny, facts, "up").status == up
    assert ask("engram.store", tiny, facts, "serve").status == serve


# ---- engine


def test_an_interrupted_install_is_repeated_by_up(tiny: Profile, ready: HostFacts) -> None:
    facts = changed(ready, "engine", installed=False, problem="an install was interrupted")
    assert ask("engine.installed", tiny, facts, "up").status == Status.SKIP
    assert ask("engine.installed", tiny, facts, "serve").status == Status.FAIL


@pytest.mark.parametrize(
    ("name", "engine", "up"),
    [
        ("cpu-tiny", {}, "skip"),  # the lock says everything
        ("v100-pp2tp4", {}, "unknown"),  # nobody looked whether a release was accepted
        ("v100-pp2tp4", {"origin": "https://host/x.whl"}, "skip"),
        ("v100-pp2tp4", {"origin_problem": "needs --accept-sums", "origin_fix": ("ds41ctl engine install",)}, "fail"),
        ("cmp170hx-tp4", {"origin_problem": "git is not installed", "origin_fix": ("apt-get install -y git",)}, "fail"),
    ],
)
def test_an_engine_that_cannot_be_had_fails_before_the_pack_is_downloaded(
    name: str, engine: dict[str, object], up: str
) -> None:
    facts = changed(machine("v100-8x-fetching"), engine=EngineFacts(dir="/engines/x").model_copy(update=engine))
    finding = ask("engine.installed", profile(name), facts, "up")
    assert finding.status == up
    if up == "fail":
        assert str(engine["origin_problem"]) in finding.summary and finding.fix == engine["origin_fix"]
    if "origin" in engine:
        assert "https://host/x.whl" in finding.summary
    assert ask("engine.installed", profile(name), facts, "serve").status == Status.FAIL


def test_room_for_an_image_is_judged_where_the_runtime_keeps_it() -> None:
    asked, facts = profile("cmp170hx-tp4"), machine("cmp170hx-4x-no-image")
    assert ask("disk.image", asked, facts).status == Status.OK
    need = 2 * 17_800_000_000
    finding = ask("disk.image", asked, changed(facts, "container", storage_free=need - 1))
    assert finding.status == Status.FAIL and "/var/lib/docker" in finding.summary
    assert ask("disk.image", asked, changed(facts, "container", storage_free=need)).status == Status.OK
    assert ask("disk.image", asked, changed(facts, "container", storage_free=None)).status == Status.UNKNOWN
    assert ask("disk.image", asked, changed(facts, "engine", installed=True)).status == Status.SKIP
    told = preflight.not_checked(asked, facts), preflight.not_checked(asked, changed(facts, container=None))
    assert ["image" in " ".join(lines) for lines in told] == [False, True]


def test_an_interpreter_of_ones_own_that_is_not_there_fails_at_once(tiny: Profile, ready: HostFacts) -> None:
    facts = changed(ready, "engine", installed=False, problem="DS41_PYTHON does not exist")
    finding = ask("engine.installed", tiny, facts, "up")
    assert finding.status == Status.FAIL
    assert "unset DS41_PYTHON" in finding.fix


def test_an_engine_without_a_manifest_is_unknown_not_equal(tiny: Profile, ready: HostFacts) -> None:
    assert ask("engine.drift", tiny, changed(ready, "engine", manifest_digest="")).status == Status.UNKNOWN


@pytest.mark.parametrize(
    ("running", "up", "serve"),
    [
        (None, "ok", "ok"),
        (RunningFacts(profile="cpu-tiny", pid=5, port=8011, alive=True), "skip", "fail"),
        (RunningFacts(profile="other", pid=5, port=8011, alive=True), "fail", "fail"),
        (RunningFacts(profile="cpu-tiny", pid=5, port=8011, alive=False), "warn", "warn"),
    ],
)
def test_an_engine_that_runs_already(
    tiny: Profile, ready: HostFacts, running: RunningFacts | None, up: str, serve: str
) -> None:
    facts = changed(ready, running=running)
    assert ask("engine.running", tiny, facts, "up").status == up
    assert ask("engine.running", tiny, facts, "serve").status == serve


# ---- GPUs


@pytest.mark.parametrize(
    ("reason", "status"),
    [("no-library", "fail"), ("no-driver", "fail"), ("mismatch", "fail"), ("denied", "unknown"), ("other", "unknown")],
)
def test_a_driver_that_cannot_answer(v100: Profile, reserved: HostFacts, reason: str, status: str) -> None:
    facts = changed(reserved, gpus=None, gpu_note="why", gpu_reason=reason)
    assert ask("gpu.driver", v100, facts).status == status
    for id in ("gpu.count", "gpu.name", "gpu.memory"):
        assert ask(id, v100, facts).status == Status.UNKNOWN


def gpu_changed(facts: HostFacts, number: int, /, **values: object) -> HostFacts:
    assert facts.gpus is not None
    return changed(facts, gpus=tuple(g.model_copy(update=values) if g.index == number else g for g in facts.gpus))


def test_one_small_card_among_large_ones_is_named(v100: Profile, reserved: HostFacts) -> None:
    finding = ask("gpu.memory", v100, gpu_changed(reserved, 5, memory_total_mib=16384))
    assert finding.status == Status.FAIL
    assert "GPU 5 16384 MiB" in finding.summary
    assert ask("gpu.memory", v100, gpu_changed(reserved, 5, memory_total_mib=None)).status == Status.UNKNOWN


def test_vendor_prefixes_of_a_gpu_name_do_not_matter(v100: Profile, reserved: HostFacts) -> None:
    assert ask("gpu.name", v100, gpu_changed(reserved, 0, name="NVIDIA V100-SXM2-32GB")).status == Status.OK
    assert ask("gpu.name", v100, gpu_changed(reserved, 0, name="Tesla V100-PCIE-32GB")).status == Status.FAIL


def test_a_group_that_names_a_silent_gpu_fails_although_the_count_is_right(v100: Profile, reserved: HostFacts) -> None:
    # nine cards, number 3 lost: eight answer, but not the eight that the groups name
    facts = gpu_changed(reserved, 3, index=8)
    finding = ask("gpu.count", v100, facts)
    assert finding.status == Status.FAIL
    assert "GPU 3" in finding.summary


def test_a_profile_without_gpus_asks_nothing_of_them(tiny: Profile, ready: HostFacts) -> None:
    facts = changed(ready, gpus=(GpuFacts(index=0, name="anything"),))
    for check in preflight.ALL:
        if check.id.startswith("gpu."):
            assert ask(check.id, tiny, facts).status == Status.SKIP


def test_a_pack_file_and_a_disk_of_an_unknown_role_are_no_crash(tiny: Profile, ready: HostFacts) -> None:
    facts = changed(ready, disks=(*ready.disks, DiskFacts(role="other", path="/x", device=2050)))
    facts = changed(facts, "pack", files=(PackFileFacts(name="x"),))
    assert all(f.status != Status.CRASH for f in preflight.run(tiny, facts))
