"""Adapters of the kernel, containers, caches, the CUDA toolkit and nvidia-smi, against recorded trees and programs."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

from ds41ctl.adapters import caches, clocks, containers, cuda, deep, kernel, nvml, peercopy, proc, profiles, smi
from ds41ctl.core.facts import ToolFacts
from ds41ctl.core.layout import Dirs, layout
from ds41ctl.core.profile import Clocks
from ds41ctl.core.settings import Settings
from tests.contract.test_host import program, write
from tests.facts.replay import FACTS

XID = "4,911,5000,-;NVRM: Xid (PCI:0000:3d:00): 79, pid='<unknown>', GPU has fallen off the bus.\n"


# ---- kernel


@pytest.mark.parametrize(
    ("text", "version", "is_open"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.173.02  Tue Sep  1 00:00:00 UTC 2026\nGCC version: 13",
            "580.173.02",
            False,
        ),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n", "580.159.04", True),
        ("something else\n", None, False),
    ],
)
def test_the_loaded_modules_version_in_both_forms(
    tmp_path: Path, text: str, version: str | None, is_open: bool
) -> None:
    write(tmp_path, {"proc/driver/nvidia/version": text, "proc/sys/kernel/osrelease": "6"})
    assert kernel.driver_module(tmp_path) == (version, is_open)


def test_no_module_and_no_answer_are_told_apart(tmp_path: Path) -> None:
    write(tmp_path, {"proc/sys/kernel/osrelease": "6"})
    assert kernel.driver_module(tmp_path) == ("", None)
    assert kernel.driver_module(tmp_path / "nothing") == (None, None)


def test_xids_are_counted_by_card_and_code(tmp_path: Path) -> None:
    lines = "6,0,1,-;Linux version 6\n SUBSYSTEM=x\n" + XID + XID.replace("911", "912") + XID.replace(": 79,", ": 13,")
    write(tmp_path, {"dev/kmsg": lines})
    found = kernel.log(tmp_path)
    assert found.readable and found.whole
    assert [(x.code, x.bus_id, x.count) for x in found.xids] == [(79, "0000:3d:00", 2), (13, "0000:3d:00", 1)]
    assert "fallen off the bus" in found.xids[0].line


def test_a_ring_that_has_dropped_its_beginning_says_so(tmp_path: Path) -> None:
    write(tmp_path, {"dev/kmsg": "6,40000,1,-;late line\n"})
    found = kernel.log(tmp_path)
    assert found.readable and not found.whole and found.xids == ()


def test_a_log_that_may_not_be_read_is_not_an_empty_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: object, *args: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(kernel.os, "open", refused)
    found = kernel.log(tmp_path)
    assert found.readable is False and found.problem == "Operation not permitted"


def test_only_boot_options_about_gpus_and_memory_are_kept(tmp_path: Path) -> None:
    write(
        tmp_path,
        {"proc/cmdline": "BOOT_IMAGE=/v root=UUID=secret quiet intel_iommu=on iommu=pt hugepagesz=1G hugepages=4\n"},
    )
    assert kernel.boot_options(tmp_path) == ("intel_iommu=on", "iommu=pt", "hugepagesz=1G", "hugepages=4")
    assert kernel.boot_options(tmp_path / "nothing") is None


def test_iommu_groups_are_counted(tmp_path: Path) -> None:
    assert kernel.iommu_groups(tmp_path) is None
    (tmp_path / "sys/kernel").mkdir(parents=True)
    assert kernel.iommu_groups(tmp_path) == 0
    for number in range(3):
        (tmp_path / f"sys/kernel/iommu_groups/{number}").mkdir(parents=True)
    assert kernel.iommu_groups(tmp_path) == 3


def test_governors_of_every_policy(tmp_path: Path) -> None:
    assert kernel.governors(tmp_path) == (None, ())
    (tmp_path / "sys/devices/system/cpu").mkdir(parents=True)
    assert kernel.governors(tmp_path) == ({}, ())
    base = kernel.GOVERNORS
    for number, governor in ((0, "powersave"), (2, "performance"), (10, "powersave")):
        write(
            tmp_path,
            {
                f"{base}/policy{number}/scaling_governor": f"{governor}\n",
                f"{base}/policy{number}/scaling_available_governors": "performance powersave\n",
            },
        )
    found, offered = kernel.governors(tmp_path)
    assert found == {"policy0": "powersave", "policy2": "performance", "policy10": "powersave"}
    assert list(found) == ["policy0", "policy2", "policy10"] and offered == ("performance", "powersave")


def test_held_driver_packages(tmp_path: Path) -> None:
    assert kernel.held_packages(tmp_path) == {}
    block = "Package: {}\nStatus: {} ok {}\nVersion: 1\n\n"
    write(
        tmp_path,
        {
            "var/lib/dpkg/status": block.format("nvidia-driver-580", "hold", "installed")
            + block.format("libnvidia-compute-580", "install", "installed")
            + block.format("nvidia-driver-535", "deinstall", "config-files")
            + block.format("bash", "install", "installed")
        },
    )
    assert kernel.held_packages(tmp_path) == {"nvidia-driver-580": True, "libnvidia-compute-580": False}


def test_whether_the_clock_is_kept_is_asked_of_this_kernel() -> None:
    assert kernel.clock_synchronised() in (True, False, None)


# ---- containers


DOCKER = """case "$1" in
info) echo '{info}';;
image) {image};;
ps) echo other; echo ds41-flash;;
esac"""
SPEC = """cdiVersion: "0.5.0"
kind: nvidia.com/gpu
devices:
- containerEdits:
    deviceNodes:
    - hostPath: /dev/nvidia0
      path: /dev/nvidia0
  name: "0"
- name: all
containerEdits:
  mounts:
  - containerPath: /usr/lib/x86_64-linux-gnu/libcuda.so.570.86
    hostPath: /usr/lib/x86_64-linux-gnu/libcuda.so.570.86
"""


def docker(
    folder: Path, info: str = '{"CDISpecDirs": ["/etc/cdi"]}', image: str = "echo sha256:abc"
) -> tuple[ToolFacts, ...]:
    program(folder, "docker", DOCKER.replace("{info}", info).replace("{image}", image))
    return (ToolFacts(name="docker", path=str(folder / "docker"), version="Docker version 28"),)


def test_a_runtime_that_answers(tmp_path: Path) -> None:
    found = containers.inspect("img:1", docker(tmp_path / "bin"), os.environ, tmp_path)
    assert found.answers and found.cdi_enabled and found.image_id == "sha256:abc"
    assert found.names == ("other", "ds41-flash")


def test_an_image_that_is_not_there_is_not_one_that_could_not_be_asked(tmp_path: Path) -> None:
    absent = docker(tmp_path / "a", image="echo 'Error: No such image: img:1' >&2; exit 1")
    assert containers.inspect("img:1", absent, os.environ, tmp_path).image_id == ""
    broken = docker(tmp_path / "b", image="echo 'daemon error' >&2; exit 1")
    assert containers.inspect("img:1", broken, os.environ, tmp_path).image_id is None


def test_a_daemon_with_cdi_off_and_one_that_does_not_answer(tmp_path: Path) -> None:
    off = docker(tmp_path / "a", info='{"CDISpecDirs": null}')
    assert containers.inspect("", off, os.environ, tmp_path).cdi_enabled is False
    program(tmp_path / "b", "docker", "echo 'Cannot connect to the Docker daemon' >&2; exit 1")
    tools = (ToolFacts(name="docker", path=str(tmp_path / "b/docker"), version="28"),)
    found = containers.inspect("", tools, os.environ, tmp_path)
    assert found.answers is False and "Cannot connect" in found.problem


def test_a_cdi_specification_and_what_it_names_that_is_gone(tmp_path: Path) -> None:
    write(tmp_path, {"etc/cdi/nvidia.yaml": SPEC, "dev/nvidia0": ""})
    (spec,) = containers.cdi_specs(tmp_path) or ()
    assert spec.kind == "nvidia.com/gpu" and spec.devices == ("0", "all") and spec.problem == ""
    assert spec.missing == ("/usr/lib/x86_64-linux-gnu/libcuda.so.570.86",)


def test_a_cdi_specification_as_json_and_broken_ones(tmp_path: Path) -> None:
    tree = {
        "kind": "nvidia.com/gpu",
        "devices": [{"name": "all"}],
        "containerEdits": {"mounts": [{"hostPath": "/gone"}]},
    }
    write(
        tmp_path,
        {
            "etc/cdi/a.json": json.dumps(tree),
            "etc/cdi/b.json": "{",
            "var/run/cdi/c.yaml": "- just: [a, list\n",
            "etc/cdi/readme.txt": "x",
        },
    )
    found = {spec.path: spec for spec in containers.cdi_specs(tmp_path) or ()}
    assert found["/etc/cdi/a.json"].devices == ("all",) and found["/etc/cdi/a.json"].missing == ("/gone",)
    assert "not valid JSON" in found["/etc/cdi/b.json"].problem
    assert found["/var/run/cdi/c.yaml"].problem == "states no kind or no device"
    assert len(found) == 3 and containers.cdi_specs(tmp_path / "nothing") == ()


# ---- caches


def test_a_lock_without_a_holder_is_told_from_one_that_is_held(tmp_path: Path) -> None:
    base = tmp_path / "ext/py312_cu128"
    write(tmp_path, {"ext/py312_cu128/dead/lock": "", "ext/py312_cu128/alive/lock": "", "ext/a/b/c/d/e/f/g/lock": ""})
    old = time.time() - 7200
    os.utime(base / "dead/lock", (old, old))
    with (base / "alive/lock").open():
        found = caches.inspect({"HOME": str(tmp_path), "TORCH_EXTENSIONS_DIR": str(tmp_path / "ext")}, None, tmp_path)
    locks = {Path(lock.path).parent.name: lock for lock in found.locks}
    assert set(locks) == {"dead", "alive"}, "a cache is not searched to the bottom"
    assert locks["dead"].holder == 0 and locks["dead"].age_s > 7000
    assert locks["alive"].holder == os.getpid()


def test_peer_caches_of_an_earlier_boot_and_cut_off_ones(tmp_path: Path) -> None:
    boot = time.time() - 1000
    name = "cache/vllm/gpu_p2p_access_cache_for_{}.json"
    write(
        tmp_path,
        {
            "proc/stat": f"cpu 1 2\nbtime {boot:.0f}\n",
            name.format("0,1"): '{"0->1": true}',
            name.format("2,3"): '{"0->1": false',
            name.format("4,5"): '{"0->1": true}',
        },
    )
    os.utime(tmp_path / name.format("4,5"), (boot - 5, boot - 5))
    found = caches.inspect({"HOME": "/x", "VLLM_CACHE_ROOT": str(tmp_path / "cache/vllm")}, None, tmp_path).p2p
    assert [(item.valid, item.older_than_boot) for item in found] == [(True, False), (False, False), (True, True)]


# ---- toolkit


def test_nvrtc_is_found_beside_nvcc_and_its_version_is_in_its_name(tmp_path: Path) -> None:
    write(tmp_path, {"cuda/bin/nvcc": "", "cuda/lib64/libnvrtc.so.12.8.93": "", "cuda/lib64/libnvrtc.so.12": ""})
    found = cuda.toolkit(str(tmp_path / "cuda/bin/nvcc"), {})
    assert found.nvrtc_version == "12.8.93" and found.home == str(tmp_path / "cuda")


def test_a_toolkit_without_nvrtc_gives_way_to_one_that_has_it(tmp_path: Path) -> None:
    write(tmp_path, {"usr/bin/nvcc": "", "cuda/targets/x86_64-linux/lib/libnvrtc.so.12.8.61": ""})
    found = cuda.toolkit(str(tmp_path / "usr/bin/nvcc"), {"CUDA_HOME": str(tmp_path / "cuda")})
    assert found.nvrtc_version == "12.8.61"
    bare = cuda.toolkit(str(tmp_path / "usr/bin/nvcc"), {"CUDA_HOME": str(tmp_path / "nothing")})
    assert bare.nvrtc_version != "12.8.61"


# ---- nvidia-smi


def test_three_tables_of_nvidia_smi_are_one_topology(tmp_path: Path) -> None:
    topo = FACTS / "topo"
    program(
        tmp_path / "bin",
        "nvidia-smi",
        f'case "$1$2" in\ntopo-m) cat {topo}/v100-sxm2-32gb-8x_r580_nic0_ansi.txt;;\n'
        f"topo-p2p) cat {topo}/pcie-4x_phb_p2p-ok.topo-p2p-rw.txt;;\n"
        f"nvlink-s) cat {topo}/v100-sxm2-32gb-8x.nvlink-s.txt;;\nesac",
    )
    found = smi.topology(str(tmp_path / "bin/nvidia-smi"), os.environ)
    assert len(found.links) == 8 and found.nvlinks_up == (6,) * 8 and len(found.p2p_read) == 4
    assert found.problem == ""


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18", "version mismatch"),
        ('echo "NVIDIA-SMI has failed because it couldn\'t communicate with the NVIDIA driver"; exit 9', "communicate"),
        ("exit 3", "exit status 3"),
        ("echo; exit 0", "no matrix"),
        ("exec sleep 30", "in time"),
    ],
)
def test_an_nvidia_smi_that_fails_is_a_problem_not_a_topology(
    tmp_path: Path, body: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smi, "TIMEOUT_S", 0.5 if "sleep" in body else 5.0)
    program(tmp_path / "bin", "nvidia-smi", body)
    found = smi.topology(str(tmp_path / "bin/nvidia-smi"), os.environ)
    assert words in found.problem and found.links == ()


# ---- the deeper looks


@pytest.mark.parametrize(
    ("body", "ok", "words"),
    [
        ('echo noise; echo \'ds41-abi {"torch": "2.10", "torch_cuda": "12.8", "vllm_file": "/v"}\'', True, ""),
        ("echo 'ImportError: libcudart.so.13: cannot open shared object file' >&2; exit 1", False, "libcudart.so.13"),
        ("kill -SEGV $$", False, "signal 11"),
        ("exit 0", False, "exit status 0"),
    ],
)
def test_the_engines_import_is_asked_in_a_process_of_its_own(tmp_path: Path, body: str, ok: bool, words: str) -> None:
    program(tmp_path / "bin", "python", body)
    found = deep.abi(tmp_path / "bin/python", os.environ)
    assert found.ok is ok and words in found.problem


def test_the_copy_program_runs_alone_and_says_what_it_lacks() -> None:
    """No torch here: the program must end with Python's own words, which become the reason."""
    done = proc.run([sys.executable, "-I", str(Path(peercopy.__file__)), "1", "0,1"], timeout=30)
    assert done.returncode != 0 and "torch" in done.stderr


@pytest.mark.parametrize(
    ("name", "pairs"),
    [
        ("gpu-tiny-tp2", "0,1"),
        ("gpu-tiny-pp2", "0,1"),
        ("v100-pp2tp4", "0,1 0,2 0,3 1,2 1,3 2,3 4,5 4,6 4,7 5,6 5,7 6,7 0,4 1,5 2,6 3,7"),
    ],
)
def test_copies_run_inside_each_group_and_from_stage_to_stage(tmp_path: Path, name: str, pairs: str) -> None:
    program(tmp_path / "bin", "python", f'shift 3; echo "$*" > {tmp_path}/asked; echo "[]"')
    dirs = Dirs(tmp_path / "data", tmp_path / "state", tmp_path / "cache", tmp_path / "run", os.getuid())
    settings = Settings(python=tmp_path / "bin/python")
    where = layout(profiles.read(profiles.find(name)), settings, dirs, may_mount=False)
    assert deep.peer_copies(where, os.environ).problem == ""
    assert (tmp_path / "asked").read_text().strip() == pairs


# ---- sudo


def test_sudo_runs_one_fixed_command_a_card_and_never_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    program(tmp_path / "bin", "sudo", f'printf "%s\\n" "$*" >> {log}; shift; exec "$@"')
    program(tmp_path / "bin", "nvidia-smi", "echo 'GPU clocks set'; echo 'All done.'")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin:/usr/bin")
    control = clocks.SudoControl()
    assert control.lock("GPU-a", 1530) == "" and control.reset("GPU-a") == ""
    assert control.set_power("GPU-a", 200.0) == ""
    smi_path = str(tmp_path / "bin/nvidia-smi")
    assert log.read_text().splitlines() == [
        f"-n {smi_path} -i GPU-a -lgc 1530,1530",
        f"-n {smi_path} -i GPU-a -rgc",
        f"-n {smi_path} -i GPU-a -pl 200",
    ]


def test_the_clock_offset_is_set_by_our_own_python_where_sudo_allows_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    program(tmp_path / "bin", "sudo", f'printf "%s\\n" "$*" >> {log}')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin:/usr/bin")
    assert clocks.SudoControl().set_offset("GPU-a", -50) == ""
    assert log.read_text().strip() == f"-n {sys.executable} -P -m ds41ctl.adapters.offset -50 GPU-a"


@pytest.mark.parametrize(
    ("want", "refused", "allowed"),
    [
        (Clocks(power_limit_w=200), "-pl 250", False),  # what is set could not be given back
        (Clocks(power_limit_w=200), "-pl 200", False),
        (Clocks(power_limit_w=200), "-lgc", True),
        (Clocks(sm_mhz=1530), "-rgc", False),
        (Clocks(offset_mhz=200), "nothing", False),  # no line of ours can allow it
    ],
)
def test_sudo_must_allow_every_command_of_the_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, want: Clocks, refused: str, allowed: bool
) -> None:
    program(tmp_path / "bin", "sudo", f'case "$*" in *"{refused}"*) exit 1;; esac; [ "$2" = -l ]')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin:/usr/bin")
    known = {"GPU-a": nvml.Values(power_w=250.0, power_default_w=250.0)}
    monkeypatch.setattr(nvml.Nvml, "values", lambda self, uuids: known)
    assert clocks.sudo_allows(want, "GPU-a") is allowed


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("echo 'sudo: a password is required' >&2; exit 1", "password"),
        ("echo 'sudo: sorry, you must have a tty to run sudo' >&2; exit 1", "tty"),
        (
            "echo 'Setting locked GPU clocks is not supported for GPU 0000:1A'; echo 'All done.'; exit 0",
            "not supported",
        ),
        ("echo 'Insufficient Permissions'; exit 4", "Insufficient"),
    ],
)
def test_what_sudo_or_nvidia_smi_answers_is_read_not_only_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, words: str
) -> None:
    program(tmp_path / "bin", "sudo", body)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin:/usr/bin")
    assert words in clocks.SudoControl().lock("GPU-a", 1530)


def test_without_sudo_it_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "not found" in clocks.SudoControl().reset("GPU-a")


def test_sudoers_lines_name_whole_commands_without_wildcards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program(tmp_path / "bin", "nvidia-smi", "true")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin:/usr/bin")
    want = Clocks(sm_mhz=1530, power_limit_w=200)
    now = {uuid: nvml.Values(power_w=230.5, power_default_w=250.0) for uuid in ("GPU-a", "GPU-b")}
    alias, rule = clocks.sudoers("alice", want, now, ["policy0"])
    assert rule == "alice ALL=(root) NOPASSWD: DS41_CLOCKS"
    assert alias.count("-lgc 1530\\,1530") == 2 and alias.count("-rgc") == 2
    assert [alias.count(f"-pl {watts}") for watts in ("200", "230.5", "250")] == [2, 2, 2], "set, and both ways back"
    assert "tee /sys/devices/system/cpu/cpufreq/policy0/scaling_governor" in alias
    assert "*" not in alias


# ---- governors


def test_governors_are_saved_and_restored_per_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ds41ctl.adapters.store import boot_id
    from ds41ctl.core.lease import Lease

    base = tmp_path / "cpufreq"
    for policy, governor in (("policy0", "performance"), ("policy1", "performance"), ("policy2", "ondemand")):
        write(base, {f"{policy}/scaling_governor": governor})
    monkeypatch.setattr(clocks, "POLICIES", base)
    lease = Lease(
        profile="p",
        boot_id=boot_id(),
        mhz=1530,
        uuids=(),
        governor="performance",
        governors_before={"policy0": "schedutil", "policy1": "powersave", "policy2": "schedutil"},
        created_at="now",
    )
    path = tmp_path / "lease.json"
    path.write_text(lease.model_dump_json())
    assert clocks.restore(path, lease).stuck == () and not path.exists()
    found = {policy.name: (policy / "scaling_governor").read_text().strip() for policy in base.iterdir()}
    assert found == {"policy0": "schedutil", "policy1": "powersave", "policy2": "ondemand"}, (
        "a policy that somebody has changed meanwhile is left alone"
    )


def test_governors_outlast_a_driver_module_and_are_given_back_when_it_was_loaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ds41ctl.adapters.store import boot_id
    from ds41ctl.core.lease import Lease

    base = tmp_path / "cpufreq"
    write(base, {"policy0/scaling_governor": "performance"})
    monkeypatch.setattr(clocks, "POLICIES", base)
    monkeypatch.setattr(kernel, "module_load", lambda root: "inode 8")
    lease = Lease(
        profile="p",
        boot_id=boot_id(),
        module="inode 7",
        mhz=1530,
        uuids=("GPU-a",),
        power_limit_w=200,
        power_before_w={"GPU-a": 250},
        governor="performance",
        governors_before={"policy0": "schedutil"},
        created_at="now",
    )
    path = tmp_path / "lease.json"
    path.write_text(lease.model_dump_json())
    done = clocks.restore(path, lease)
    assert done.stuck == () and "loaded again" in done.kept[0], "no GPU was asked: here is none, and it would refuse"
    assert (base / "policy0/scaling_governor").read_text().strip() == "schedutil" and not path.exists()


# ---- which load of the driver module


def test_a_module_that_was_loaded_again_is_another_load(tmp_path: Path) -> None:
    module = tmp_path / "sys/module/nvidia"
    module.mkdir(parents=True)
    first = kernel.module_load(tmp_path)
    os.utime(module, (1, 1))
    assert kernel.module_load(tmp_path) == first, "times of sysfs say nothing"
    other = tmp_path / "sys/module/new"  # exists at the same time, so it has another inode on any file system
    other.mkdir()
    module.rmdir()
    other.rename(module)
    assert kernel.module_load(tmp_path) not in (first, "", "not loaded")
    module.rmdir()
    assert kernel.module_load(tmp_path) == "not loaded"
    module.parent.rmdir()
    assert kernel.module_load(tmp_path) == "", "no sysfs here: not known, which is not the same as none"


def test_the_kernel_never_gives_a_new_entry_the_inode_of_one_that_is_gone() -> None:
    """What `module_load` rests on, on this kernel, by folders that any root may make: cgroups are of the same make."""
    folder = Path(f"/sys/fs/cgroup/ds41ctl-test-{os.getpid()}")
    seen = []
    for _ in range(3):
        try:
            folder.mkdir()
        except OSError as error:
            pytest.skip(f"no cgroup may be made here: {error}")
        seen.append(folder.stat().st_ino)
        folder.rmdir()
    assert len(set(seen)) == 3
