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
    boot_options: tuple[str, ...] | None = Field(None, description="kernel options about IOMMU, hugepages, nvidia")
    iommu_groups: int | None = Field(None, description="IOMMU groups the kernel made; 0: translation is off")
    governors: dict[str, str] | None = Field(None, description="cpufreq policy -> governor; {}: no cpufreq here")
    governors_available: tuple[str, ...] = ()
    clock_synchronised: bool | None = Field(None, description="the kernel says an NTP daemon keeps its clock")
    held_packages: dict[str, bool] | None = Field(
        None, description="installed NVIDIA driver packages of dpkg -> on hold; {}: none, or no dpkg here"
    )
    user: str = Field("", description="login name, for the sudoers line")


class HugePagePool(_Facts):
    """One hugepage pool: `size_kib` pages on NUMA node `node` (-1: whole machine)."""

    node: int
    size_kib: int
    total: int
    free: int
    reserved: int = 0


class NumaNode(_Facts):
    """One NUMA node's memory. `free_in_blocks`: bytes free in blocks of at least 2 MiB (/proc/buddyinfo)."""

    node: int
    total: int | None = None
    free: int | None = None
    free_in_blocks: int | None = None


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
    nodes: tuple[NumaNode, ...] | None = None
    hugetlb_limits: dict[str, int] | None = Field(
        None, description="page size (2MB, 1GB) -> bytes the tightest cgroup allows; {}: no limit"
    )
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


class MountFacts(_Facts):
    """One mount. `options` are the super-block's, where tmpfs states size= and huge=."""

    point: str
    fstype: str
    options: str = ""
    total: int | None = None
    free: int | None = None


class NetworkFacts(_Facts):
    """Names and interfaces that collective libraries pick from."""

    hostname_addresses: tuple[str, ...] | None = Field(None, description="what the host name resolves to; (): nothing")
    interfaces: tuple[str, ...] | None = None


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


class CudaFacts(_Facts):
    """The CUDA toolkit an engine would compile with. `home` '' when none was found."""

    home: str = ""
    nvrtc: str = Field("", description="path of libnvrtc, '' when there is none")
    nvrtc_version: str = Field("", description="from the library's file name, for example 12.8.93")


class CdiSpec(_Facts):
    """One CDI specification file. `missing` are host paths it names that do not exist (a driver update)."""

    path: str
    kind: str = ""
    devices: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    problem: str = ""


class ContainerFacts(_Facts):
    """The container runtime. `answers` None: not asked."""

    runtime: str = Field("", description="docker or podman, '' when neither is installed")
    answers: bool | None = None
    problem: str = ""
    cdi_enabled: bool | None = Field(None, description="docker only: the daemon has CDI spec folders")
    specs: tuple[CdiSpec, ...] | None = None
    image: str = ""
    image_id: str | None = Field(None, description="'' when the image is not there")
    storage: str = Field("", description="where the runtime keeps images, '' when it does not say")
    storage_free: int | None = Field(None, description="bytes free there; None: not on this machine, or not allowed")
    names: tuple[str, ...] | None = Field(None, description="containers that exist, running or not")


class StaleLock(_Facts):
    """A lock file of a just-in-time compiler. `holder` 0: no process of this user has it open."""

    path: str
    age_s: float
    holder: int = 0


class P2pCache(_Facts):
    """A vLLM peer-access cache. `older_than_boot`: written before this boot, so before any driver change in it."""

    path: str
    valid: bool
    older_than_boot: bool


class CacheFacts(_Facts):
    """What earlier runs left that can hang or mislead a start."""

    locks: tuple[StaleLock, ...] = ()
    p2p: tuple[P2pCache, ...] = ()


class XidFacts(_Facts):
    """One kind of NVIDIA kernel error since boot. https://docs.nvidia.com/deploy/xid-errors lists the codes."""

    code: int
    bus_id: str = ""
    count: int = 1
    line: str = Field("", description="the last such line")


class KernelLogFacts(_Facts):
    """NVIDIA errors in the kernel log. `readable` False: not permitted, which is unknown and never `no error`."""

    readable: bool | None = None
    source: str = ""
    problem: str = ""
    whole: bool = Field(True, description="False: the ring buffer has dropped lines of this boot")
    xids: tuple[XidFacts, ...] = ()


class AbiFacts(_Facts):
    """The engine's own Python importing its compiled parts, in a process of its own (level 2)."""

    ok: bool
    torch: str = ""
    torch_cuda: str = ""
    arch_list: tuple[str, ...] = ()
    vllm_file: str = ""
    problem: str = ""


class DigestFacts(_Facts):
    """Every byte of one pack file against its pinned sha256 (level 2); `problem` '' when equal."""

    name: str
    problem: str = ""


class PeerCopyFacts(_Facts):
    """A pattern copied between two GPUs and back, compared (level 3). Rates are unidirectional."""

    a: int
    b: int
    equal: bool
    gib_per_s: float = 0.0


class LoadFacts(_Facts):
    """Work run on the cards in the engine's Python (level 3)."""

    copies: tuple[PeerCopyFacts, ...] = ()
    problem: str = ""


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


class PackSourceFacts(_Facts):
    """What the pins of one repository take in one folder, bytes."""

    repo: str
    dir: str
    bytes: int


class PackFacts(_Facts):
    """The pack folder against what the profile expects; `engram_tensors` are all `*.engram.embed.*` found.

    `own`: a hybrid of the user's own, whose digests are those first seen at `recorded_at` ('' for not yet).
    `bytes_missing` counts against the pins; `bytes_there` is what lies in the sources' folders while there are none.
    """

    dir: str
    exists: bool = False
    files: tuple[PackFileFacts, ...] = ()
    bytes_missing: int | None = None
    bytes_there: int | None = None
    sources: tuple[PackSourceFacts, ...] = ()
    index_names: int | None = None
    engram_tensors: tuple[TensorFacts, ...] = ()
    problems: tuple[str, ...] = ()
    own: bool = False
    recorded_at: str = ""


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
    format: str = "records"
    chosen: bool = Field(False, description="the user or the profile names the folder: no other one is taken")
    own_mount: bool = Field(False, description="what is mounted there is ours: a build mounts it afresh")
    foreign: str = Field("", description="what lies in the folder that ds41ctl did not put there, '' when nothing does")
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
    was made from differs from what the profile wants now (an upgrade).

    `knobs` are the VLLM_DS41_* names in its vllm/envs.py.
    `maker` is the Python that its venv would be made with, asked while there is none; else `maker_problem` and its fix.
    `origin` is where it would come from, asked while there is none; else `origin_problem` and its fix.
    """

    dir: str
    kind: str = ""
    installed: bool = False
    manifest_digest: str = ""
    versions: dict[str, str] = Field(default_factory=dict)
    distributions: int = 0
    drift: tuple[str, ...] = ()
    outdated: tuple[str, ...] = ()
    knobs: tuple[str, ...] = ()
    problem: str = ""
    maker: str = ""
    maker_problem: str = ""
    maker_fix: tuple[str, ...] = ()
    origin: str = ""
    origin_problem: str = ""
    origin_fix: tuple[str, ...] = ()


class RunningFacts(_Facts):
    """The engine this user already runs, if any."""

    profile: str
    pid: int
    port: int
    alive: bool


class GpuProcess(_Facts):
    """A process with a compute context on a GPU. A pid of another namespace has no name here."""

    pid: int
    used_mib: int | None = None
    name: str = ""
    user: str = ""
    command: str = ""
    ours: bool = Field(False, description="it carries the marker of an engine that this tool started")


class NvLink(_Facts):
    """One NVLink port. `remote_type` switch: `remote_bus_id` is not a GPU's (an NVSwitch in a VM gives FFFFFFFF)."""

    link: int
    up: bool | None = None
    remote_type: Literal["gpu", "npu", "switch", "unknown", ""] = ""
    remote_bus_id: str = ""


class GpuFacts(_Facts):
    """One GPU, from NVML only (never a CUDA context). Clocks in MHz, power in W, bus ids as NVML writes them."""

    index: int
    name: str
    uuid: str = ""
    bus_id: str = ""
    memory_total_mib: int | None = None
    memory_free_mib: int | None = None
    compute_capability: str = Field("", description="for example 7.0")
    processes: tuple[GpuProcess, ...] | None = None
    sm_mhz: int | None = None
    sm_max_mhz: int | None = None
    sm_supported_mhz: tuple[int, ...] | None = Field(None, description="(): the card does not list them")
    memory_mhz: int | None = None
    throttle: int | None = Field(None, description="NVML's bit mask of current clock event reasons")
    power_limit_w: float | None = None
    power_default_w: float | None = None
    power_min_w: float | None = Field(None, description="the card takes no limit below this")
    power_max_w: float | None = Field(None, description="the card takes no limit above this")
    offset_mhz: int | None = Field(None, description="graphics clock offset in performance state 0")
    offset_min_mhz: int | None = None
    offset_max_mhz: int | None = None
    offset_note: str = Field("", description="why the offset is not known")
    temperature_c: int | None = None
    persistence: bool | None = None
    ecc: bool | None = Field(None, description="False also for a card without ECC")
    ecc_uncorrected: int | None = Field(None, description="uncorrected errors since the driver was loaded")
    mig: bool | None = Field(None, description="False also for cards without MIG")
    compute_mode: Literal["default", "exclusive-thread", "prohibited", "exclusive-process", ""] = ""
    display_active: bool | None = None
    pcie_gen: int | None = Field(None, description="now: an idle card saves power with a lower one")
    pcie_gen_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    nvlinks: tuple[NvLink, ...] | None = Field(None, description="(): a card without NVLink")
    numa_node: int | None = Field(None, description="from NVML, else sysfs; None: neither states one")


class P2pMatrix(_Facts):
    """Peer status of every pair, one row of codes a GPU: X OK CNS GNS TNS DR NS U, as `nvidia-smi topo -p2p`."""

    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    nvlink: tuple[str, ...] = ()
    atomics: tuple[str, ...] = ()
    pcie: tuple[str, ...] = ()

    def code(self, kind: Literal["read", "write", "nvlink", "atomics", "pcie"], a: int, b: int) -> str:
        """Status of the pair (row `a`, column `b`), '' when it was not measured."""
        rows: tuple[str, ...] = getattr(self, kind)
        cells = rows[a].split() if a < len(rows) else []
        return cells[b] if b < len(cells) else ""


class SmiTopology(_Facts):
    """What nvidia-smi prints: the fallback without NVML, and the cross-check beside it. Rows as in P2pMatrix."""

    links: tuple[str, ...] = Field((), description="X NV# PIX PXB PHB NODE SYS, one row a GPU")
    numa: tuple[int | None, ...] = ()
    p2p_read: tuple[str, ...] = ()
    nvlinks_up: tuple[int | None, ...] = Field((), description="active links a GPU, None: not stated")
    odd: tuple[str, ...] = Field((), description="codes that are not known")
    problem: str = ""

    def code(self, a: int, b: int) -> str:
        """How the pair is linked, '' when it was not stated."""
        cells = self.links[a].split() if a < len(self.links) else []
        return cells[b] if b < len(cells) else ""


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
    driver_cuda: str = Field("", description="newest CUDA the driver runs, for example 13.0")
    driver_module: str | None = Field(None, description="version of the loaded kernel module, '' when none is loaded")
    driver_open: bool | None = Field(None, description="the open kernel module")
    p2p: P2pMatrix | None = None
    topology: SmiTopology | None = Field(None, description="None: nvidia-smi was not asked")
    gpu_groups: dict[str, tuple[int, ...]] | None = Field(
        None, description="the groups in force (DS41_GPUS_A and _C over the profile's); None: the profile's"
    )
    api_key: bool | None = Field(None, description="the engine will be given a key from a file; None: not looked")
    clock_permission: Literal["", "root", "sudo", "none"] = Field("", description="how this user may lock clocks")
    environment: dict[str, str] = Field(
        default_factory=dict, description="inherited variables that can change an engine, secrets masked"
    )
    limits: dict[str, str] = Field(
        default_factory=dict,
        description="memlock, nofile (soft) and *_hard, of the process `source`: the tmux server or this one",
    )
    logind: LogindFacts | None = None
    mounts: tuple[MountFacts, ...] | None = Field(None, description="memory-backed mounts")
    network: NetworkFacts | None = None
    cuda: CudaFacts | None = None
    container: ContainerFacts | None = None
    caches: CacheFacts | None = None
    kernel_log: KernelLogFacts | None = None
    others: tuple[ProcessRef, ...] | None = Field(None, description="engines of others: processes that serve vLLM")
    pack: PackFacts | None = None
    store: StoreFacts | None = None
    engine: EngineFacts | None = None
    running: RunningFacts | None = None
    abi: AbiFacts | None = Field(None, description="None: not looked at (level 2)")
    digests: tuple[DigestFacts, ...] | None = Field(None, description="None: not read (level 2)")
    load: LoadFacts | None = Field(None, description="None: not run (level 3)")

    def tool(self, name: str) -> ToolFacts:
        """The named tool, with an empty path when it was not found or not looked for."""
        return next((tool for tool in self.tools if tool.name == name), ToolFacts(name=name))

    def disk(self, role: str) -> DiskFacts | None:
        """The filesystem behind a role (`data`, `model`, `state`, `engine`, `store`, `tmp`, `shm`)."""
        return next((disk for disk in self.disks if disk.role == role), None)
