"""The probe against recorded file trees, real sockets, programs that misbehave, and fake NVML libraries."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from ds41ctl.adapters import host, nvml
from ds41ctl.core.facts import GpuFacts, HostFacts
from tests.facts.replay import profile

KIB = 1024


def write(root: Path, files: dict[str, str]) -> None:
    """A tree of files below `root`."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


MEMINFO = """MemTotal:       394700000 kB
MemFree:          4500000 kB
MemAvailable:   180000000 kB
SwapTotal:              0 kB
CommitLimit:    210000000 kB
Committed_AS:    60000000 kB
HugePages_Total:    96683
Hugepagesize:       2048 kB
"""
PAGES = "sys/kernel/mm/hugepages/hugepages-2048kB"
NODE = "sys/devices/system/node/node{}/hugepages/hugepages-2048kB"
LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max locked memory         {memlock}              8388608              bytes
Max open files            1024                 1048576              files
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A two-node server as its files state it."""
    tree = tmp_path / "root"
    write(
        tree,
        {
            "proc/meminfo": MEMINFO,
            "proc/sys/vm/overcommit_memory": "2\n",
            "proc/sys/kernel/osrelease": "5.15.0-122-generic\n",
            "proc/sys/kernel/hostname": "dgx\n",
            "proc/sys/kernel/random/boot_id": "3d0c3a52-7f0c-4c5e-9c1b-1f4f4f9d2a10\n",
            "proc/cpuinfo": "processor\t: 0\nmodel name\t: Xeon 6248\nflags\t\t: fpu avx2 fma\n\nprocessor\t: 1\n",
            "proc/self/status": "Name:\tpython\nCapEff:\t000001ffffffffff\n",
            "proc/self/cgroup": "0::/\n",
            "proc/self/limits": LIMITS.format(memlock="unlimited"),
            "proc/self/mountinfo": "27 1 8:1 / / rw - ext4 /dev/sda1 rw\n",
            "etc/os-release": '# a comment\nPRETTY_NAME="Ubuntu 22.04.5 LTS"\nID=ubuntu\nID_LIKE="debian"\n',
            "sys/fs/cgroup/cgroup.controllers": "memory\n",
            "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
            "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size advise [never] deny force\n",
            f"{PAGES}/nr_hugepages": "96683\n",
            f"{PAGES}/free_hugepages": "96683\n",
            f"{PAGES}/resv_hugepages": "12\n",
            f"{NODE.format(0)}/nr_hugepages": "48341\n",
            f"{NODE.format(0)}/free_hugepages": "48341\n",
            f"{NODE.format(1)}/nr_hugepages": "48342\n",
            f"{NODE.format(1)}/free_hugepages": "48342\n",
        },
    )
    return tree


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def collect(root: Path, port: int, environ: dict[str, str] | None = None, **paths: Path) -> HostFacts:
    return host.collect(
        profile("cpu-tiny"),
        paths=paths,
        host="127.0.0.1",
        port=port,
        environ={"PATH": "/nowhere"} if environ is None else environ,
        root=root,
    )


# ---- recorded trees


def test_a_recorded_tree_is_read_as_it_stands(root: Path, free_port: int) -> None:
    facts = collect(root, free_port)
    assert facts.hostname == "dgx"
    assert facts.system.os_name == "Ubuntu 22.04.5 LTS"
    assert facts.system.os_ids == ("ubuntu", "debian")
    assert facts.system.kernel == "5.15.0-122-generic"
    assert facts.system.cpu_model == "Xeon 6248"
    assert facts.system.cpu_flags == ("fpu", "avx2", "fma")
    assert facts.system.can_mount is True
    assert facts.system.boot_id.startswith("3d0c3a52")
    memory = facts.memory
    assert memory.available == 180_000_000 * KIB
    assert memory.commit_limit == 210_000_000 * KIB
    assert memory.committed == 60_000_000 * KIB
    assert memory.overcommit == 2
    assert memory.thp == "madvise"
    assert memory.shmem_thp == "never"
    assert memory.numa_nodes == (0, 1)
    assert memory.hugepages is not None
    assert [(p.node, p.total, p.free, p.reserved) for p in memory.hugepages] == [
        (-1, 96683, 96683, 12),
        (0, 48341, 48341, 0),
        (1, 48342, 48342, 0),
    ]
    assert facts.limits == {
        "source": "this process",
        "memlock": "unlimited",
        "memlock_hard": "8388608",
        "nofile": "1024",
        "nofile_hard": "1048576",
    }
    assert facts.logind is not None
    assert not facts.logind.present


def test_an_empty_tree_measures_nothing_and_raises_nothing(tmp_path: Path, free_port: int) -> None:
    facts = collect(tmp_path / "nothing", free_port)
    assert facts.memory.total is None
    assert facts.memory.available is None
    assert facts.memory.cgroup_limit is None
    assert facts.memory.overcommit is None
    assert facts.memory.thp == ""
    assert facts.system.can_mount is None
    assert facts.system.os_name == ""
    assert facts.limits == {}


def test_a_tree_of_rubbish_raises_nothing(root: Path, free_port: int) -> None:
    for path in sorted(root.rglob("*")):
        if path.is_file() and path.name != "mountinfo":
            path.write_bytes(b"\xff\x00 : junk = [\n::\n0::\nMemTotal: many kB\n")
    facts = collect(root, free_port)
    assert facts.memory.total is None
    assert facts.memory.overcommit is None
    assert facts.memory.hugepages is None, "numbers that cannot be read are not zero pages"


def test_an_old_kernel_without_memavailable_is_unmeasured(root: Path, free_port: int) -> None:
    write(root, {"proc/meminfo": "MemTotal: 100 kB\nMemFree: 90 kB\n"})
    assert collect(root, free_port).memory.available is None


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        # v2: no limit anywhere
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": "max\n"}, (0, 0)),
        # v2: the limit of the parent is the tighter one; droppable page cache does not count as use
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/memory.max": "8000\n",
                "sys/fs/cgroup/a/b/memory.current": "100\n",
                "sys/fs/cgroup/a/memory.max": "5000\n",
                "sys/fs/cgroup/a/memory.current": "4000\n",
                "sys/fs/cgroup/a/memory.stat": "anon 500\nactive_file 1000\ninactive_file 500\nshmem 2000\n",
            },
            (5000, 2500),
        ),
        # v2: the path is the host's, the mount is the container's own root
        (
            {
                "proc/self/cgroup": "0::/docker/abc\n",
                "sys/fs/cgroup/memory.max": "4294967296\n",
                "sys/fs/cgroup/memory.current": "1048576\n",
            },
            (4294967296, 1048576),
        ),
        # v1, number near 2^63: no limit
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/x\n",
                "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/memory/x/memory.usage_in_bytes": "10\n",
            },
            (0, 0),
        ),
        # v1 with a limit
        (
            {
                "proc/self/cgroup": "4:memory:/x\n0::/\n",
                "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "9000\n",
                "sys/fs/cgroup/memory/x/memory.usage_in_bytes": "7000\n",
                "sys/fs/cgroup/memory/x/memory.stat": "active_file 1\ntotal_active_file 600\ntotal_inactive_file 400\n",
            },
            (9000, 6000),
        ),
        # a limit that cannot be read, and one without its use
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "junk\n"}, (None, None)),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "9000\n"}, (None, None)),
    ],
)
def test_the_tightest_cgroup_counts(
    root: Path, free_port: int, files: dict[str, str], expected: tuple[int | None, int | None]
) -> None:
    write(root, files)
    memory = collect(root, free_port).memory
    assert (memory.cgroup_limit, memory.cgroup_used) == expected


def test_limits_are_those_of_the_engines_own_tmux_server(root: Path, free_port: int) -> None:
    for pid, name in ((812, "cpu-tiny.sock"), (90, "default")):
        write(
            root,
            {
                f"proc/{pid}/comm": "tmux: server\n",
                f"proc/{pid}/cmdline": f"tmux\0-S\0/run/user/1000/ds41ctl/{name}\0new-session\0",
                f"proc/{pid}/limits": LIMITS.format(memlock=str(pid)),
            },
        )
    limits = collect(root, free_port).limits
    assert limits["source"] == "tmux server pid 812"
    assert limits["memlock"] == "812"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        # commented lines state what the distribution built in
        ({"etc/systemd/logind.conf": "[Login]\n#KillUserProcesses=no\n#RemoveIPC=yes\n"}, (False, True)),
        (
            {
                "etc/systemd/logind.conf": "[Login]\n#KillUserProcesses=no\n#RemoveIPC=yes\n",
                "etc/systemd/logind.conf.d/10-kill.conf": "[Login]\nKillUserProcesses=yes\n",
                "usr/lib/systemd/logind.conf.d/05-ipc.conf": "[Login]\nRemoveIPC=no\n",
            },
            (True, False),
        ),
        ({"usr/lib/systemd/logind.conf": "[Login]\nKillUserProcesses=yes\n#KillUserProcesses=no\n"}, (True, None)),
        ({}, (None, None)),
    ],
)
def test_what_logind_does_at_logout(
    root: Path, free_port: int, files: dict[str, str], expected: tuple[bool | None, bool | None]
) -> None:
    (root / "run/systemd/users").mkdir(parents=True)
    write(root, files)
    logind = collect(root, free_port).logind
    assert logind is not None
    assert logind.present
    assert (logind.kill_user_processes, logind.remove_ipc) == expected
    assert logind.linger is False


@pytest.mark.parametrize(
    ("files", "environ", "kind"),
    [
        ({}, {}, ""),
        ({".dockerenv": ""}, {}, "docker"),
        ({"run/.containerenv": ""}, {}, "podman"),
        ({"run/systemd/container": "lxc\n"}, {}, "lxc"),
        ({"proc/1/cgroup": "4:memory:/kubepods/pod1/x\n"}, {}, "kubepods"),
        ({}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "kubernetes"),
    ],
)
def test_the_kind_of_container(
    root: Path, free_port: int, files: dict[str, str], environ: dict[str, str], kind: str
) -> None:
    write(root, files)
    assert collect(root, free_port, {"PATH": "/nowhere", **environ}).system.container == kind


@pytest.mark.parametrize(
    ("stated", "sysfs", "node"),
    [(None, "1\n", 1), (None, "-1\n", None), (None, None, None), (0, "1\n", 0)],
)
def test_the_numa_node_of_a_card_is_nvmls_else_sysfss(
    root: Path, stated: int | None, sysfs: str | None, node: int | None
) -> None:
    if sysfs is not None:
        write(root, {"sys/bus/pci/devices/0000:1a:00.0/numa_node": sysfs})
    card = GpuFacts(index=0, name="x", bus_id="00000000:1A:00.0", numa_node=stated)
    assert host._placed(card, root).numa_node == node


# ---- disks


def test_a_folder_that_does_not_exist_is_measured_at_its_nearest_parent(
    root: Path, tmp_path: Path, free_port: int
) -> None:
    write(
        root,
        {
            "proc/self/mountinfo": (
                "27 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
                f"28 27 8:2 / {tmp_path} rw,noexec - xfs /dev/sdb1 rw\n"
                f"29 27 8:3 / {tmp_path}x rw - btrfs /dev/sdc1 rw\n"
            )
        },
    )
    facts = collect(root, free_port, data=tmp_path / "a" / "b" / "c")
    disk = facts.disk("data")
    assert disk is not None
    assert disk.path == str(tmp_path / "a" / "b" / "c")
    assert disk.mount == str(tmp_path)
    assert disk.fstype == "xfs"
    assert disk.device == tmp_path.stat().st_dev
    assert disk.free is not None
    assert disk.total is not None
    assert 0 < disk.free <= disk.total
    assert disk.writable is True
    assert not (tmp_path / "a").exists(), "the probe writes nothing"


def test_a_parent_that_is_a_file_is_not_writable(root: Path, tmp_path: Path, free_port: int) -> None:
    (tmp_path / "file").write_text("x")
    disk = collect(root, free_port, data=tmp_path / "file").disk("data")
    assert disk is not None
    assert disk.writable is False


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_of_someone_else_is_not_writable(root: Path, tmp_path: Path, free_port: int) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    disk = collect(root, free_port, data=tmp_path / "locked").disk("data")
    assert disk is not None
    assert disk.writable is False


# ---- port


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        yield server


@pytest.mark.parametrize("bound", ["127.0.0.1", "0.0.0.0"])
def test_a_listener_is_found_and_named(listener: socket.socket, bound: str) -> None:
    listener.bind((bound, 0))
    listener.listen()
    port = listener.getsockname()[1]
    facts = host.probe_port("127.0.0.1", port)
    assert facts.free is False
    assert facts.reason == "in-use"
    assert facts.holder is not None
    assert facts.holder.pid == os.getpid()
    assert facts.holder.name == psutil.Process().name()
    assert facts.holder.user == psutil.Process().username()


def test_a_server_that_shares_its_port_is_found_all_the_same(listener: socket.socket) -> None:
    # vLLM listens with SO_REUSEPORT: a second one would share the port without an error
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    assert host.probe_port("127.0.0.1", listener.getsockname()[1]).free is False


def test_a_dual_stack_listener_takes_the_ipv4_port() -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        facts = host.probe_port("127.0.0.1", server.getsockname()[1])
    assert facts.free is False
    assert facts.holder is not None


def test_a_free_port_is_free_and_stays_free(free_port: int) -> None:
    for _ in range(3):
        assert host.probe_port("127.0.0.1", free_port).free is True


def test_a_connection_in_time_wait_does_not_count(listener: socket.socket) -> None:
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    port = listener.getsockname()[1]
    with socket.create_connection(("127.0.0.1", port)):
        accepted, _ = listener.accept()
        accepted.close()  # our side closes first and is the one that waits
    listener.close()
    assert host.probe_port("127.0.0.1", port).free is True


@pytest.mark.parametrize(
    ("address", "port", "reason"),
    [
        ("127.0.0.1", 0, "out-of-range"),
        ("127.0.0.1", 70000, "out-of-range"),
        ("192.0.2.1", 8011, "not-local"),  # TEST-NET-1, RFC 5737
        ("no such host", 8011, "unresolved"),
        ("a" * 70, 8011, "unresolved"),  # longer than a DNS label may be
    ],
)
def test_a_port_that_cannot_be_bound_says_why(address: str, port: int, reason: str) -> None:
    facts = host.probe_port(address, port)
    assert facts.free is False
    assert facts.reason == reason
    assert facts.error


def test_secrets_of_the_holder_are_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil.Process, "cmdline", lambda self: ["vllm", "serve", "--api-key", "s3cret"])
    assert host.process_ref(os.getpid()).command == "vllm serve --api-key ***"


def test_a_process_that_is_gone_is_an_empty_reference() -> None:
    assert host.process_ref(2**22 + 1).name == ""


# ---- tools and environment


def program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_versions_are_first_lines_and_silence_is_unknown(root: Path, tmp_path: Path, free_port: int) -> None:
    folder = tmp_path / "bin"
    program(folder, "tmux", "echo tmux 3.4")
    program(folder, "c++", "echo 'c++ (Ubuntu) 13.3.0'; echo 'Copyright'")
    program(folder, "nvcc", "echo 'nvcc: NVIDIA (R) Cuda compiler driver'; echo 'release 12.8, V12.8.93'")
    program(folder, "docker", "echo broken >&2; exit 1")
    facts = collect(root, free_port, {"PATH": f"{folder}:/bin:/usr/bin"})
    assert facts.tool("tmux").version == "tmux 3.4"
    assert facts.tool("c++").version == "c++ (Ubuntu) 13.3.0"
    assert facts.tool("nvcc").version == "release 12.8, V12.8.93"
    assert facts.tool("docker").path == str(folder / "docker")
    assert facts.tool("docker").version == ""


def test_nvcc_is_looked_for_where_cuda_home_points(root: Path, tmp_path: Path, free_port: int) -> None:
    program(tmp_path / "bin", "nvcc", "echo release 11.5, V11.5.119")
    (tmp_path / "cuda").mkdir()
    program(tmp_path / "cuda" / "bin", "nvcc", "echo release 12.8, V12.8.93")
    found = collect(root, free_port, {"PATH": str(tmp_path / "bin"), "CUDA_HOME": str(tmp_path / "cuda")})
    assert "12.8" in found.tool("nvcc").version
    broken = collect(root, free_port, {"PATH": str(tmp_path / "bin"), "CUDA_HOME": f":{tmp_path / 'cuda'}"})
    assert broken.tool("nvcc").path == ""


def test_a_tool_that_hangs_is_given_up(
    root: Path, tmp_path: Path, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "PROBE_TIMEOUT_S", 0.3)
    program(tmp_path / "bin", "docker", "exec sleep 30")
    started = time.monotonic()
    facts = collect(root, free_port, {"PATH": f"{tmp_path / 'bin'}:/bin:/usr/bin"})
    assert time.monotonic() - started < 10
    assert facts.tool("docker").path
    assert facts.tool("docker").version == ""


def test_only_variables_that_can_change_an_engine_are_kept_and_secrets_masked(root: Path, free_port: int) -> None:
    environ = {
        "PATH": "/nowhere",
        "HOME": "/home/u",
        "HF_TOKEN": "hf_abcdefghijklmnop",
        "HF_ENDPOINT": "https://me:pw@hub.example",
        "VLLM_API_KEY": "s3cret",
        "DSV41_ENGRAM_ZERO": "1",
        "DS41_ENGRAM_UNFILLED": "1",
        "PYTHONPATH": "/x",
        "LD_PRELOAD": "/y.so",
        "AWS_SECRET_ACCESS_KEY": "z",
    }
    facts = collect(root, free_port, environ)
    assert facts.environment == {
        "HF_TOKEN": "***",
        "HF_ENDPOINT": "https://***@hub.example",
        "VLLM_API_KEY": "***",
        "DSV41_ENGRAM_ZERO": "1",
        "DS41_ENGRAM_UNFILLED": "1",
        "PYTHONPATH": "/x",
        "LD_PRELOAD": "/y.so",
    }
    text = facts.model_dump_json()
    assert "s3cret" not in text
    assert "abcdefghijklmnop" not in text


def test_this_machine_is_measured_quickly_and_without_a_gpu_question(free_port: int, tmp_path: Path) -> None:
    started = time.monotonic()
    facts = collect(Path("/"), free_port, dict(os.environ), data=tmp_path)
    assert time.monotonic() - started < 5  # 0.13 s on an idle machine
    assert facts.memory.total == psutil.virtual_memory().total
    assert facts.system.cpu_flags
    assert facts.system.boot_id
    assert facts.gpus is None
    assert facts.gpu_reason == "not-asked"
    assert HostFacts.model_validate_json(facts.model_dump_json()) == facts


# ---- NVML


class FakeError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


class FakeLibrary:
    """NVML with `count` GPUs; `fail` maps a function (or function, index) to an error number."""

    NVMLError: type[Exception] = FakeError

    def __init__(self, count: int = 2, fail: dict[Any, int] | None = None) -> None:
        self.count = count
        self.fail = fail or {}
        self.shut_down = 0

    def _ask(self, function: str, index: int | None = None) -> None:
        for key in (function, (function, index)):
            if key in self.fail:
                raise FakeError(self.fail[key])

    def nvmlInit(self) -> None:
        self._ask("init")

    def nvmlShutdown(self) -> None:
        self.shut_down += 1

    def nvmlSystemGetDriverVersion(self) -> str | bytes:
        return "580.173.02"

    def nvmlDeviceGetCount(self) -> int:
        self._ask("count")
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index: int, /) -> Any:
        self._ask("handle", index)
        return index

    def nvmlDeviceGetName(self, handle: Any, /) -> str | bytes:
        return b"Tesla V100-SXM2-32GB"  # older bindings give bytes

    def nvmlDeviceGetUUID(self, handle: Any, /) -> str | bytes:
        return f"GPU-{handle}"

    def nvmlDeviceGetPciInfo(self, handle: Any, /) -> Any:
        return SimpleNamespace(busId=f"00000000:{handle:02X}:00.0")

    def nvmlDeviceGetMemoryInfo(self, handle: Any, /) -> Any:
        self._ask("memory", handle)
        return SimpleNamespace(total=32768 << 20)

    def nvmlDeviceGetCudaComputeCapability(self, handle: Any, /) -> tuple[int, int]:
        return (7, 0)


def test_nvml_gives_every_gpu() -> None:
    library = FakeLibrary()
    survey = nvml.survey(library)
    assert survey.driver == "580.173.02"
    assert survey.gpus is not None
    assert [(g.index, g.name, g.bus_id, g.memory_total_mib, g.compute_capability) for g in survey.gpus] == [
        (0, "Tesla V100-SXM2-32GB", "00000000:00:00.0", 32768, "7.0"),
        (1, "Tesla V100-SXM2-32GB", "00000000:01:00.0", 32768, "7.0"),
    ]
    assert library.shut_down == 1


@pytest.mark.parametrize(
    ("value", "reason", "words"),
    [
        (12, "no-library", "not installed"),
        (9, "no-driver", "not loaded"),
        (18, "mismatch", "mismatch"),
        (4, "denied", "permission"),
        (999, "other", "error 999"),
    ],
)
def test_an_nvml_that_cannot_start_is_a_note(value: int, reason: str, words: str) -> None:
    survey = nvml.survey(FakeLibrary(fail={"init": value}))
    assert survey.gpus is None
    assert survey.reason == reason
    assert words in survey.note


def test_a_lost_gpu_is_named_and_the_others_are_kept() -> None:
    survey = nvml.survey(FakeLibrary(count=3, fail={("handle", 1): 15}))
    assert survey.gpus is not None
    assert [gpu.index for gpu in survey.gpus] == [0, 2]
    assert survey.note == "GPU 1: a GPU has fallen off the bus"


def test_a_field_that_a_gpu_does_not_state_stays_unmeasured() -> None:
    survey = nvml.survey(FakeLibrary(count=1, fail={("memory", 0): 3}))
    assert survey.gpus is not None
    assert survey.gpus[0].memory_total_mib is None
    assert survey.gpus[0].uuid == "GPU-0"


def test_the_real_binding_answers_on_any_machine() -> None:
    survey = nvml.survey()
    assert (survey.gpus is None) == bool(survey.reason)
    assert survey.gpus is not None or survey.note
