"""HostFacts: everything known about a machine, frozen and serialisable; the input of every check.

`None` always means "could not be measured", never "absent": an absent thing is an empty string, list, 0 or
False, as its field says.
The same JSON is written by `ds41ctl facts`, attached to bug reports and replayed by tests.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

FACTS_SCHEMA = 1


class _Facts(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ProcessRef(_Facts):
    """A process, as far as this user may see it."""

    pid: int
    name: str = ""
    user: str = ""
    command: str = ""


class SystemFacts(_Facts):
    """Operating system and this user."""

    platform: str = Field("", description="sys.platform, for example linux")
    kernel: str = ""
    machine: str = ""
    os_name: str = ""
    os_ids: tuple[str, ...] = Field((), description="ID and ID_LIKE of os-release, e.g. ubuntu, debian")
    libc: str = Field("", description="C library of the running Python, for example 'glibc 2.36'")
    boot_id: str = ""
    cpus: int = 0
    cpu_model: str = ""
    cpu_flags: tuple[str, ...] = ()
    python: str = ""
    uid: int | None = None
    root: bool = False
    sudo_passwordless: bool | None = Field(None, description="`sudo -n true` works; not asked for root")
    can_mount: bool | None = Field(None, description="CAP_SYS_ADMIN is held; a container may drop it")
    ensurepip: bool | None = Field(None, description="`python -m venv` of this Python can install pip")
    container: str = Field("", description="kind of container this runs in, '' for none")


class HugePagePool(_Facts):
    """One hugepage pool: `size_kib` pages on NUMA node `node` (-1: whole machine)."""

    node: int
    size_kib: int
    total: int
    free: int
    reserved: int = 0


class MemoryFacts(_Facts):
    """Host memory in bytes. `cgroup_limit` 0: no limit.

    `cgroup_limit` and `cgroup_used` are those of the tightest cgroup above this process; `cgroup_used` leaves
    out page cache that the kernel may drop (active and inactive file pages), but holds tmpfs pages.
    """

    total: int | None = None
    available: int | None = None
    swap_total: int | None = None
    cgroup_limit: int | None = None
    cgroup_used: int | None = None
    hugepages: tuple[HugePagePool, ...] | None = ()
    numa_nodes: tuple[int, ...] = ()
    thp: str = ""
    shmem_thp: str = ""
    overcommit: int | None = Field(None, description="vm.overcommit_memory: 0 heuristic, 1 always, 2 never")
    commit_limit: int | None = None
    committed: int | None = None


class DiskFacts(_Facts):
    """The filesystem that holds (or would hold) `path`; sizes in bytes, `free` without root's reserve.

    `inodes_free` is -1 where the filesystem makes inodes as needed (btrfs).
    """

    role: str
    path: str
    mount: str = ""
    fstype: str = ""
    device: int | None = None
    total: int | None = None
    free: int | None = None
    inodes_free: int | None = None
    writable: bool | None = None
    noexec: bool | None = None


class PortFacts(_Facts):
    """Result of a real bind() on host:port. `reason` says in one word why it is not free."""

    host: str
    port: int
    free: bool | None = None
    reason: Literal["", "in-use", "denied", "not-local", "unresolved", "out-of-range"] = ""
    error: str = ""
    holder: ProcessRef | None = None


class LogindFacts(_Facts):
    """What systemd-logind does when this user's last session ends. `present` False: no logind here."""

    present: bool = False
    kill_user_processes: bool | None = None
    remove_ipc: bool | None = None
    linger: bool | None = None


class ToolFacts(_Facts):
    """A program on PATH; `path` '' when absent, `version` '' when it printed none in time."""

    name: str
    path: str = ""
    version: str = ""


class PackFileFacts(_Facts):
    """One expected file of the pack. `verified`: sidecar matches sha256, size, mtime, inode and device."""

    name: str
    size_expected: int | None = None
    size: int | None = None
    verified: bool = False
    note: str = ""


class TensorFacts(_Facts):
    """One tensor as its shard's header states it."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]


class PackFacts(_Facts):
    """The pack folder against what the profile expects; `engram_tensors` are all `*.engram.embed.*` found."""

    dir: str
    exists: bool = False
    files: tuple[PackFileFacts, ...] = ()
    bytes_missing: int | None = None
    index_names: int | None = None
    engram_tensors: tuple[TensorFacts, ...] = ()
    problems: tuple[str, ...] = ()


class StoreFacts(_Facts):
    """The Engram store as its manifest and files state it. `problem` is '' when it is valid.

    `data_dir` holds the records (`dir` the manifest), `huge_share` is the part of their bytes on huge pages and
    `node_bytes` their bytes by NUMA node, both measured by the build.
    """

    dir: str
    data_dir: str = ""
    huge_share: float | None = None
    node_bytes: dict[int, int] = Field(default_factory=dict)
    notes: tuple[str, ...] = Field((), description="why the build did not get a better place, in its own words")
    exists: bool = False
    storage: str = ""
    fstype: str = ""
    page_kind: str = ""
    layers: tuple[int, ...] = ()
    bytes_needed: int | None = None
    bytes_present: int = 0
    problem: str = ""


class EngineFacts(_Facts):
    """The installed engine. `drift` lists what differs from its manifest (somebody changed it), `outdated` how what it
    was made from differs from what the profile wants now (an upgrade)."""

    dir: str
    kind: str = ""
    installed: bool = False
    manifest_digest: str = ""
    versions: dict[str, str] = Field(default_factory=dict)
    distributions: int = 0
    drift: tuple[str, ...] = ()
    outdated: tuple[str, ...] = ()
    problem: str = ""


class RunningFacts(_Facts):
    """The engine this user already runs, if any."""

    profile: str
    pid: int
    port: int
    alive: bool


class GpuFacts(_Facts):
    """One GPU, from NVML only (never a CUDA context)."""

    index: int
    name: str
    uuid: str = ""
    bus_id: str = ""
    memory_total_mib: int | None = None
    compute_capability: str = Field("", description="for example 7.0")


class HostFacts(_Facts):
    """One machine at one moment, seen for one profile."""

    schema_version: int = FACTS_SCHEMA
    collected_at: str
    profile: str
    hostname: str = ""
    system: SystemFacts
    memory: MemoryFacts
    disks: tuple[DiskFacts, ...] = ()
    port: PortFacts | None = None
    tools: tuple[ToolFacts, ...] = ()
    gpus: tuple[GpuFacts, ...] | None = Field(None, description="None: NVML could not be asked")
    gpu_note: str = ""
    gpu_reason: Literal["", "not-asked", "no-library", "no-driver", "mismatch", "denied", "other"] = Field(
        "", description="why `gpus` is None, in one word"
    )
    driver: str = Field("", description="NVIDIA driver version as NVML states it")
    environment: dict[str, str] = Field(
        default_factory=dict, description="inherited variables that can change an engine, secrets masked"
    )
    limits: dict[str, str] = Field(
        default_factory=dict,
        description="memlock, nofile (soft) and *_hard, of the process `source`: the tmux server or this one",
    )
    logind: LogindFacts | None = None
    pack: PackFacts | None = None
    store: StoreFacts | None = None
    engine: EngineFacts | None = None
    running: RunningFacts | None = None

    def tool(self, name: str) -> ToolFacts:
        """The named tool, with an empty path when it was not found or not looked for."""
        return next((tool for tool in self.tools if tool.name == name), ToolFacts(name=name))

    def disk(self, role: str) -> DiskFacts | None:
        """The filesystem behind a role (`data`, `model`, `state`, `engine`, `store`, `tmp`, `shm`)."""
        return next((disk for disk in self.disks if disk.role == role), None)
