"""The probe: one quick look at this machine, as HostFacts. All I/O that preflight needs happens here."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import pwd
import re
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import psutil

from ds41ctl.adapters import caches, clocks, containers, cuda, distro, kernel, mounts, nvml, proc, smi
from ds41ctl.adapters.textfile import integer as _integer
from ds41ctl.adapters.textfile import line as _line
from ds41ctl.adapters.textfile import numbered as _numbered
from ds41ctl.adapters.textfile import text as _text
from ds41ctl.core.facts import (
    DiskFacts,
    GpuFacts,
    GpuProcess,
    HostFacts,
    HugePagePool,
    LogindFacts,
    MemoryFacts,
    MountFacts,
    NetworkFacts,
    NumaNode,
    PortFacts,
    ProcessRef,
    SystemFacts,
    ToolFacts,
)
from ds41ctl.core.launch import RUN_MARKER
from ds41ctl.core.masking import mask_argv, mask_value
from ds41ctl.core.profile import Profile
from ds41ctl.core.topology import bus_key

PROBE_TIMEOUT_S = 3.0  # policy: a tool that cannot print its version in this time counts as "version unknown"
NO_CGROUP_LIMIT = 1 << 60  # cgroup v1 states "no limit" as a number near 2^63
SHM = Path("/dev/shm")  # noqa: S108 - looked at, never written here
CAP_SYS_ADMIN = 21  # bit number, linux/capability.h
ENVIRONMENT_PREFIXES = (
    *(
        "VLLM_",
        "DSV41_",
        "DS41_",
        "CUDA_",
        "NCCL_",
        "GLOO_",
        "PYTORCH_",
        "PYTHON",
        "LD_",
        "HF_",
        "TORCH",
        "TRITON_",
    ),
    *("OMP_", "MKL_", "NVIDIA_", "FLASHINFER_"),
)
ENVIRONMENT_NAMES = ("MAX_JOBS", "XDG_CACHE_HOME", "CC", "CXX")
# command lines of vLLM's API servers, and the titles its workers give themselves
ENGINE_MARKS = ("vllm.entrypoints", "vllm serve", "VLLM::")
_VERSION_ARGUMENT = {
    "tmux": "-V",
    "c++": "--version",
    "ninja": "--version",
    "nvcc": "--version",
    "docker": "--version",
    "podman": "--version",
    "sudo": "-V",
    "nvidia-smi": "--version",
}


def collect(
    profile: Profile,
    *,
    paths: Mapping[str, Path],
    host: str,
    port: int,
    environ: Mapping[str, str],
    root: Path = Path("/"),
    cache_dir: Path | None = None,
) -> HostFacts:
    """Look at this machine once (well under a second) for `profile`.

    `paths`: role -> folder that may not exist yet (data, model, state, engine, store, tmp); `shm` is added. Files
    of /proc, /sys, /etc, /run, /dev and /var are read below `root`, so that a recorded tree can be replayed; tools,
    port, filesystem sizes and NVML are always this machine's. Pack, store, engine and running are the
    caller's to add. What only matters to GPU or container profiles is not asked for others.
    Never raises for what cannot be read: that is None.
    """
    on_gpus = profile.hardware.gpus > 0
    with ThreadPoolExecutor(max_workers=10) as pool:
        # programs are started first and answer while files are read
        tools_asked = pool.submit(lambda: tuple(pool.map(lambda name: _tool(name, environ), _VERSION_ARGUMENT)))
        sudo = pool.submit(_sudo, environ)
        smi_path = _find_tool("nvidia-smi", environ) if on_gpus else ""
        topology = pool.submit(smi.topology, smi_path, environ) if smi_path else None
        log = pool.submit(kernel.log, root) if on_gpus else None
        survey = nvml.survey() if on_gpus else nvml.NOT_ASKED
        system = _system(root, environ)
        memory = _memory(root)
        tools = tools_asked.result()
        module, is_open = kernel.driver_module(root) if on_gpus else (None, None)
        passwordless = sudo.result()
        return HostFacts(
            collected_at=datetime.now(UTC).isoformat(timespec="seconds"),
            profile=profile.name,
            hostname=_line(root / "proc/sys/kernel/hostname"),
            memory=memory,
            disks=tuple(_disk(role, path, root) for role, path in {"shm": SHM, **paths}.items()),
            mounts=_memory_mounts(root),
            network=_network(root),
            port=probe_port(host, port),
            gpus=None if survey.gpus is None else tuple(_placed(gpu, root) for gpu in survey.gpus),
            gpu_note=survey.note,
            gpu_reason=survey.reason,
            driver=survey.driver,
            driver_cuda=survey.cuda,
            driver_module=module,
            driver_open=is_open,
            p2p=survey.p2p,
            topology=topology.result() if topology is not None else None,
            clock_permission=_clock_permission(profile, survey, passwordless),
            environment={
                name: mask_value(name, value)
                for name, value in sorted(environ.items())
                if name.startswith(ENVIRONMENT_PREFIXES) or name in ENVIRONMENT_NAMES
            },
            limits=_limits(root, profile.name),
            logind=_logind(root),
            cuda=cuda.toolkit(next(t.path for t in tools if t.name == "nvcc"), environ) if on_gpus else None,
            container=containers.inspect(profile.engine.image, tools, environ, root)
            if profile.engine.kind == "container"
            else None,
            caches=caches.inspect(environ, cache_dir, root),
            kernel_log=log.result() if log is not None else None,
            others=_other_engines(),
            tools=tools,
            system=system.model_copy(update={"sudo_passwordless": passwordless}),
        )


def _clock_permission(
    profile: Profile, survey: nvml.Survey, passwordless: bool | None
) -> Literal["", "root", "sudo", "none"]:
    """How this user may set what the profile's [clocks] name. Sudoers lines may allow nvidia-smi's commands alone."""
    if not profile.clocks.touched or not survey.gpus:
        return ""
    if os.geteuid() == 0:
        return "root"
    if passwordless:
        return "sudo"
    return "sudo" if clocks.sudo_allows(profile.clocks, survey.gpus[0].uuid) else "none"


# ---- GPUs and engines


def _placed(gpu: GpuFacts, root: Path) -> GpuFacts:
    """The GPU with its NUMA node from sysfs where NVML states none, and its processes with names."""
    node = gpu.numa_node
    if node is None and gpu.bus_id:
        domain, _, rest = bus_key(gpu.bus_id).partition(":")
        found = _integer(root / f"sys/bus/pci/devices/{domain.zfill(4)}:{rest}/numa_node")
        node = found if found is not None and found >= 0 else None  # -1: the firmware states none
    processes = gpu.processes
    if processes is not None:
        processes = tuple(_named(item) for item in processes)
    return gpu.model_copy(update={"numa_node": node, "processes": processes})


def _named(item: GpuProcess) -> GpuProcess:
    reference = process_ref(item.pid)
    return item.model_copy(
        update={
            "name": reference.name,
            "user": reference.user,
            "command": reference.command,
            "ours": proc.carries(item.pid, RUN_MARKER),
        }
    )


def _other_engines() -> tuple[ProcessRef, ...]:
    """Processes that serve vLLM and were not started by this tool."""
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        joined = " ".join(words)
        if not any(mark in joined for mark in ENGINE_MARKS) or proc.carries(process.pid, RUN_MARKER):
            continue
        found.append(process_ref(process.pid))
    return tuple(found)


# ---- system


def _system(root: Path, environ: Mapping[str, str]) -> SystemFacts:
    release = distro.os_release(root)
    model, flags = _cpu(root)
    uid = os.geteuid()
    governors, available = kernel.governors(root)
    capabilities = re.search(r"^CapEff:\s*([0-9a-f]+)$", _text(root / "proc/self/status") or "", re.MULTILINE)
    return SystemFacts(
        platform=sys.platform,
        kernel=_line(root / "proc/sys/kernel/osrelease"),
        machine=os.uname().machine,
        os_name=release.get("PRETTY_NAME", ""),
        os_ids=distro.os_ids(release),
        libc=_libc(root),
        boot_id=_line(root / "proc/sys/kernel/random/boot_id"),
        cpus=len(os.sched_getaffinity(0)),
        cpu_model=model,
        cpu_flags=flags,
        python=".".join(str(part) for part in sys.version_info[:3]),
        uid=uid,
        root=uid == 0,
        can_mount=bool(int(capabilities.group(1), 16) >> CAP_SYS_ADMIN & 1) if capabilities else None,
        ensurepip=importlib.util.find_spec("ensurepip") is not None,
        container=_container(root, environ),
        boot_options=kernel.boot_options(root),
        iommu_groups=kernel.iommu_groups(root),
        governors=governors,
        governors_available=available,
        clock_synchronised=kernel.clock_synchronised(),
        held_packages=kernel.held_packages(root),
        user=_user(),
    )


def _user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return ""


def _libc(root: Path) -> str:
    try:
        stated = os.confstr("CS_GNU_LIBC_VERSION")
    except (ValueError, OSError):
        stated = None
    if stated:
        return stated
    return "musl" if any((root / "lib").glob("ld-musl-*")) else ""


def _cpu(root: Path) -> tuple[str, tuple[str, ...]]:
    """(model name, flags) of the first processor."""
    text = _text(root / "proc/cpuinfo") or ""
    model = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    return (model.group(1).strip() if model else "", tuple(flags.group(1).split()) if flags else ())


def _container(root: Path, environ: Mapping[str, str]) -> str:
    stated = _line(root / "run/systemd/container")
    if stated:
        return stated
    for mark, kind in ((".dockerenv", "docker"), ("run/.containerenv", "podman")):
        if (root / mark).exists():
            return kind
    if environ.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    groups = _text(root / "proc/1/cgroup") or ""
    found = re.search(r"/(docker|kubepods|lxc|libpod)\b", groups)
    return found.group(1) if found else ""


def _sudo(environ: Mapping[str, str]) -> bool | None:
    if os.geteuid() == 0:
        return None
    if shutil.which("sudo", path=environ.get("PATH")) is None:
        return False
    done = proc.run(["sudo", "-n", "true"], timeout=PROBE_TIMEOUT_S)
    return None if done.timed_out else done.returncode == 0


def _tool(name: str, environ: Mapping[str, str]) -> ToolFacts:
    path = _find_tool(name, environ)
    if not path:
        return ToolFacts(name=name)
    argument = _VERSION_ARGUMENT[name]
    done = proc.run([path, argument], timeout=PROBE_TIMEOUT_S)
    lines = [line.strip() for line in (done.stdout or done.stderr).splitlines() if line.strip()]
    if name == "nvcc":  # the first line is a banner
        lines = [line for line in lines if "release" in line] or lines
    return ToolFacts(name=name, path=path, version=lines[0][:200] if lines and done.ok else "")


def _find_tool(name: str, environ: Mapping[str, str]) -> str:
    if name == "nvcc":
        # the order in which torch's extension builder looks: CUDA_HOME, CUDA_PATH, PATH, the usual folder
        for variable in ("CUDA_HOME", "CUDA_PATH"):
            found = environ.get(variable)
            if found:
                return shutil.which(str(Path(found) / "bin" / "nvcc")) or ""
    found = shutil.which(name, path=environ.get("PATH", os.defpath))
    if found is None and name == "nvcc":
        found = shutil.which("/usr/local/cuda/bin/nvcc")
    return found or ""


# ---- memory


def memory(root: Path = Path("/")) -> MemoryFacts:
    """Host memory alone, for those who need nothing else."""
    return _memory(root)


def _memory(root: Path) -> MemoryFacts:
    info = {
        name: int(kib) * 1024
        for name, kib in re.findall(r"^(\w+):\s+(\d+) kB$", _text(root / "proc/meminfo") or "", re.MULTILINE)
    }
    limit, used = _cgroup(root)
    nodes = _numbered(root / "sys/devices/system/node", "node")
    return MemoryFacts(
        total=info.get("MemTotal"),
        available=info.get("MemAvailable"),
        swap_total=info.get("SwapTotal"),
        cgroup_limit=limit,
        cgroup_used=used,
        hugepages=_hugepages(root),
        numa_nodes=tuple(nodes or ()),
        nodes=None if nodes is None else tuple(_node(root, number) for number in nodes),
        hugetlb_limits=_hugetlb_limits(root),
        thp=_selected(root / "sys/kernel/mm/transparent_hugepage/enabled"),
        shmem_thp=_selected(root / "sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        overcommit=_integer(root / "proc/sys/vm/overcommit_memory"),
        commit_limit=info.get("CommitLimit"),
        committed=info.get("Committed_AS"),
    )


def _node(root: Path, number: int) -> NumaNode:
    """Memory of one NUMA node, and how much of what is free lies in blocks that hold a 2 MiB page."""
    info = dict(
        re.findall(
            r"Node \d+ (MemTotal|MemFree):\s+(\d+) kB",
            _text(root / f"sys/devices/system/node/node{number}/meminfo") or "",
        )
    )
    blocks: int | None = None
    for fields in re.findall(
        rf"^Node {number}, zone\s+\S+\s+(.*)$", _text(root / "proc/buddyinfo") or "", re.MULTILINE
    ):
        # column k counts free blocks of 2^k pages of 4 KiB; from order 9 a block holds a 2 MiB page
        counts = [int(word) for word in fields.split() if word.isdecimal()]
        blocks = (blocks or 0) + sum(count << (order + 12) for order, count in enumerate(counts) if order >= 9)
    return NumaNode(
        node=number,
        total=int(info["MemTotal"]) * 1024 if "MemTotal" in info else None,
        free=int(info["MemFree"]) * 1024 if "MemFree" in info else None,
        free_in_blocks=blocks,
    )


def _hugetlb_limits(root: Path) -> dict[str, int] | None:
    """Page size -> bytes of the tightest hugetlb cgroup above us; {} where none limits them."""
    membership = _text(root / "proc/self/cgroup")
    if membership is None:
        return None
    limits: dict[str, int] = {}
    for folder, version in _cgroup_folders(membership, root / "sys/fs/cgroup", "hugetlb"):
        suffix = "max" if version == 2 else "limit_in_bytes"
        for path in folder.glob(f"hugetlb.*.{suffix}"):
            value = _integer(path)
            if value is None or value >= NO_CGROUP_LIMIT:
                continue
            size = path.name.split(".")[1]
            limits[size] = min(value, limits.get(size, value))
    return limits


def _selected(path: Path) -> str:
    """The word in brackets of `always [madvise] never`."""
    found = re.search(r"\[(\w+)\]", _text(path) or "")
    return found.group(1) if found else ""


def _hugepages(root: Path) -> tuple[HugePagePool, ...] | None:
    """Whole-machine pools first (node -1, with reservations), then one a node and size."""
    pools = _pools(root / "sys/kernel/mm/hugepages", -1)
    if pools is None:
        return None
    for node in _numbered(root / "sys/devices/system/node", "node") or []:
        pools += _pools(root / f"sys/devices/system/node/node{node}/hugepages", node) or []
    return tuple(pools)


def _pools(folder: Path, node: int) -> list[HugePagePool] | None:
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except FileNotFoundError:
        return []  # a kernel without hugetlb
    except OSError:
        return None
    pools = []
    for name in names:
        match = re.fullmatch(r"hugepages-(\d+)kB", name)
        total, free = _integer(folder / name / "nr_hugepages"), _integer(folder / name / "free_hugepages")
        if match is None:
            continue
        if total is None or free is None:
            return None
        reserved = _integer(folder / name / "resv_hugepages") or 0
        pools.append(HugePagePool(node=node, size_kib=int(match.group(1)), total=total, free=free, reserved=reserved))
    return pools


def _cgroup(root: Path) -> tuple[int | None, int | None]:
    """(limit, use without droppable page cache) of the tightest memory cgroup above us; (0, 0): no limit."""
    membership = _text(root / "proc/self/cgroup")
    base = root / "sys/fs/cgroup"
    if membership is None or not base.is_dir():
        return None, None
    tightest: tuple[int, int] | None = None
    for folder, version in _cgroup_folders(membership, base):
        path = folder / ("memory.max" if version == 2 else "memory.limit_in_bytes")
        if not path.exists() or _line(path) == "max":  # the root cgroup of v2 has no limit file
            continue
        limit = _integer(path)
        if limit is None:
            return None, None
        if limit >= NO_CGROUP_LIMIT:
            continue
        used = _integer(folder / ("memory.current" if version == 2 else "memory.usage_in_bytes"))
        if used is None:
            return None, None
        used = max(0, used - _droppable(folder, version))
        if tightest is None or limit - used < tightest[0] - tightest[1]:
            tightest = (limit, used)
    return tightest or (0, 0)


def _cgroup_folders(membership: str, base: Path, controller: str = "memory") -> Iterator[tuple[Path, Literal[1, 2]]]:
    """(folder, cgroup version) of our cgroup of a controller and of all above it that are mounted here."""
    for line in membership.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(","):
            mount, version = base / controller, 1
        elif number == "0" and not controllers:
            mount, version = (base if (base / "cgroup.controllers").exists() else base / "unified"), 2
        else:
            continue
        parts = [part for part in path.split("/") if part and part != ".."]
        for depth in range(len(parts), -1, -1):
            folder = mount.joinpath(*parts[:depth])
            if folder.is_dir():
                yield folder, (1 if version == 1 else 2)


def _droppable(folder: Path, version: int) -> int:
    prefix = "" if version == 2 else "total_"
    stat = dict(re.findall(r"^(\w+) (\d+)$", _text(folder / "memory.stat") or "", re.MULTILINE))
    return sum(int(stat.get(f"{prefix}{name}", 0)) for name in ("active_file", "inactive_file"))


# ---- disks


def _disk(role: str, path: Path, root: Path) -> DiskFacts:
    parent = mounts.existing_parent(path)
    try:
        space, device = os.statvfs(parent), parent.stat().st_dev
        mount = mounts.mount_of(path, root)
    except OSError:
        return DiskFacts(role=role, path=str(path))
    return DiskFacts(
        role=role,
        path=str(path),
        mount=str(mount.point),
        fstype=mount.fstype,
        device=device,
        total=space.f_blocks * space.f_frsize,
        free=space.f_bavail * space.f_frsize,
        inodes_free=space.f_favail if space.f_files else -1,
        writable=parent.is_dir() and os.access(parent, os.W_OK | os.X_OK, effective_ids=True),
        noexec=bool(space.f_flag & os.ST_NOEXEC),
    )


def _memory_mounts(root: Path) -> tuple[MountFacts, ...] | None:
    """tmpfs of a GiB or more and every hugetlbfs: where a store may lie or memory may hide."""
    try:
        found = [mount for mount in mounts.mounts(root) if mount.memory_backed]
    except OSError:
        return None
    kept = []
    for mount in found:
        try:
            space = os.statvfs(mount.point)
        except OSError:
            continue
        total, free = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
        if total >= 1 << 30 or mount.fstype == "hugetlbfs" or mount.point == SHM:
            kept.append(
                MountFacts(point=str(mount.point), fstype=mount.fstype, options=mount.options, total=total, free=free)
            )
    return tuple(kept)


# ---- network


def _network(root: Path) -> NetworkFacts:
    """The host name in /etc/hosts (a name server is not asked) and the interfaces."""
    name, hosts = _line(root / "proc/sys/kernel/hostname"), _text(root / "etc/hosts")
    addresses: list[str] | None = None
    if name and hosts is not None:
        rows = [row.split("#")[0].split() for row in hosts.splitlines()]
        addresses = [row[0] for row in rows if name in row[1:]]
    try:
        interfaces = tuple(sorted(entry.name for entry in (root / "sys/class/net").iterdir()))
    except OSError:
        interfaces = None
    return NetworkFacts(
        hostname_addresses=None if addresses is None else tuple(addresses),
        interfaces=interfaces,
    )


# ---- port


def probe_port(host: str, port: int) -> PortFacts:
    """Bind `host`:`port` for real, on every address the host name stands for, and let go at once.

    SO_REUSEADDR keeps connections in TIME_WAIT from counting; SO_REUSEPORT is left off on purpose: with it
    (and vLLM sets it) a second server of the same user would share the port without an error.
    """
    if not 0 < port < 65536:
        return PortFacts(host=host, port=port, free=False, reason="out-of-range", error=f"{port} is not a port")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        text = str(getattr(error, "strerror", None) or error)
        return PortFacts(host=host, port=port, free=False, reason="unresolved", error=text)
    errors: list[OSError] = []
    bound = False
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(address)
                bound = True
        except OSError as error:
            errors.append(error)
    taken = next((item for item in errors if item.errno == errno.EADDRINUSE), None)
    if taken is not None:
        addresses = {str(address[0]) for *_, address in found}
        return PortFacts(
            host=host,
            port=port,
            free=False,
            reason="in-use",
            error=taken.strerror or "",
            holder=_holder(addresses, port),
        )
    if bound:  # a name that stands for an address family this machine lacks is no obstacle
        return PortFacts(host=host, port=port, free=True)
    first = errors[0]
    reason: Literal["denied", "not-local"] | None = None
    if first.errno in (errno.EACCES, errno.EPERM):
        reason = "denied"
    elif first.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
        reason = "not-local"
    return PortFacts(
        host=host,
        port=port,
        free=False if reason else None,
        reason=reason or "",
        error=first.strerror or str(first),
    )


def _holder(addresses: set[str], port: int) -> ProcessRef | None:
    """Who listens there, as far as this user may see; None when that cannot be seen."""
    wildcard = {"0.0.0.0", "::"}  # noqa: S104 - compared with, not bound
    try:
        connections = psutil.net_connections(kind="tcp")
    except (psutil.Error, OSError):
        return None
    for connection in connections:
        if connection.status != psutil.CONN_LISTEN or not connection.laddr or connection.laddr.port != port:
            continue
        address = connection.laddr.ip.removeprefix("::ffff:")
        if address not in addresses | wildcard and not addresses & wildcard:
            continue
        if connection.pid is not None:
            return process_ref(connection.pid)
    return None


def process_ref(pid: int) -> ProcessRef:
    """The process with its command line, secrets masked; what this user may not see stays ''."""
    name = user = command = ""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        name = process.name()
        user = process.username()
        command = " ".join(mask_argv(process.cmdline()))[:200].strip()
    return ProcessRef(pid=pid, name=name, user=user, command=command)


# ---- limits and logins


def _limits(root: Path, profile_name: str) -> dict[str, str]:
    server = _tmux_server(root, profile_name)
    text = _text(root / f"proc/{server or 'self'}/limits")
    if text is None:
        return {}
    found = {"source": f"tmux server pid {server}" if server else "this process"}
    for key, title in (("memlock", "Max locked memory"), ("nofile", "Max open files")):
        match = re.search(rf"^{title}\s+(\S+)\s+(\S+)", text, re.MULTILINE)
        if match:
            found[key], found[f"{key}_hard"] = match.groups()
    return found


def _tmux_server(root: Path, profile_name: str) -> int | None:
    """The private tmux server of this profile, if it runs: an engine started later inherits ITS limits.

    Other tmux servers do not matter, because the engine's server has a socket of its own; when it does not
    run yet, it is started by us and inherits our limits.
    """
    socket_name = f"{profile_name}.sock".encode()
    for pid in _numbered(root / "proc", "") or []:
        if _line(root / f"proc/{pid}/comm").startswith("tmux: server"):
            try:
                command = (root / f"proc/{pid}/cmdline").read_bytes()
            except OSError:
                continue
            if socket_name in command:
                return pid
    return None


def _logind(root: Path) -> LogindFacts:
    if not (root / "run/systemd/users").is_dir():
        return LogindFacts(present=False)
    user = _user()
    values: dict[str, bool] = {}
    for text in _logind_files(root):
        # a commented line states the built-in default of this distribution
        for comment, name, value in re.findall(
            r"^(#?)\s*(KillUserProcesses|RemoveIPC)\s*=\s*(\w+)", text, re.MULTILINE
        ):
            if not comment or name not in values:
                values[name] = value.lower() in ("yes", "true", "on", "1")
    return LogindFacts(
        present=True,
        kill_user_processes=values.get("KillUserProcesses"),
        remove_ipc=values.get("RemoveIPC"),
        linger=(root / "var/lib/systemd/linger" / user).exists() if user else None,
    )


def _logind_files(root: Path) -> Iterator[str]:
    """Texts of logind.conf and its drop-ins in the order systemd applies them (later ones win)."""
    main = _text(root / "etc/systemd/logind.conf") or _text(root / "usr/lib/systemd/logind.conf")
    if main is not None:
        yield main
    drop_ins: dict[str, Path] = {}
    for base in ("usr/lib", "run", "etc"):  # same name: /etc hides /run hides /usr/lib
        drop_ins |= {path.name: path for path in (root / base / "systemd/logind.conf.d").glob("*.conf")}
    for name in sorted(drop_ins):
        yield _text(drop_ins[name]) or ""
