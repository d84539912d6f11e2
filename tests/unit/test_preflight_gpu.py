"""Claims about checks of GPUs, clocks, kernel, store size, serving values: one thing changed on a good machine."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

import preflight
from ds41ctl.core.facts import (
    CdiSpec,
    GpuFacts,
    GpuProcess,
    HostFacts,
    HugePagePool,
    KernelLogFacts,
    NetworkFacts,
    NumaNode,
    P2pCache,
    RunningFacts,
    StaleLock,
    XidFacts,
)
from ds41ctl.core.finding import Finding, Status
from ds41ctl.core.profile import Profile
from tests.facts.replay import changed, disk_changed, machine, profile

GIB = 1 << 30
V100, CMP, TINY = "v100-8x-hugepages-reserved", "cmp170hx-4x-ready", "ubuntu2404-ready"
Change = Callable[[HostFacts], HostFacts]


def ask(id: str, facts: HostFacts, asked: Profile | None = None) -> Finding:
    (finding,) = preflight.run(asked or profile(facts.profile), facts, only=(id,))
    assert finding.status != Status.CRASH, finding.evidence
    if finding.failed(strict=True):
        assert finding.expected and finding.found and finding.why and finding.fix
    return finding


def cards(**values: object) -> Change:
    """Every card changed."""
    return lambda facts: changed(facts, gpus=tuple(gpu.model_copy(update=values) for gpu in facts.gpus or ()))


def card(index: int, **values: object) -> Change:
    """One card changed."""

    def change(facts: HostFacts) -> HostFacts:
        gpus = tuple(g.model_copy(update=values) if g.index == index else g for g in facts.gpus or ())
        return changed(facts, gpus=gpus)

    return change


def part(name: str, **values: object) -> Change:
    return lambda facts: changed(facts, name, **values)


def whole(**values: object) -> Change:
    return lambda facts: changed(facts, **values)


def both(first: Change, second: Change) -> Change:
    return lambda facts: second(first(facts))


def may_nothing(facts: HostFacts) -> HostFacts:
    """Neither root nor sudo."""
    return changed(changed(facts, "system", sudo_passwordless=False), clock_permission="none")


NOBODY: Change = may_nothing

# (check, machine, change, status, words of the summary)
ROWS: list[tuple[str, str, Change, str, str]] = [
    ("gpu.capability", V100, card(5, compute_capability="8.0"), "fail", "GPU 5 8.0"),
    ("gpu.capability", V100, card(5, compute_capability=""), "unknown", ""),
    ("gpu.weights", V100, card(2, memory_total_mib=28672), "fail", "GPU 2 (stage a): 27.77 GiB"),
    ("gpu.weights", V100, card(6, memory_total_mib=28672), "ok", ""),  # 26.4 GiB usable hold stage 2's 25.29
    ("gpu.weights", V100, card(6, memory_total_mib=None), "unknown", "GPU 6"),
    ("gpu.free-memory", V100, card(1, memory_free_mib=30000), "fail", "GPU 1 30000 of 32768 MiB"),
    ("gpu.free-memory", V100, card(1, memory_free_mib=None), "unknown", ""),
    ("gpu.processes", V100, card(0, processes=(GpuProcess(pid=7),)), "fail", "pid 7 (not visible)"),
    (
        "gpu.processes",
        V100,
        card(0, processes=(GpuProcess(pid=7, name="python", user="u", used_mib=5, ours=True),)),
        "fail",
        "left over from an engine of ds41ctl",
    ),
    ("gpu.processes", V100, cards(processes=None), "unknown", ""),
    ("gpu.processes", V100, whole(running=RunningFacts(profile="v100-pp2tp4", pid=1, port=1, alive=True)), "skip", ""),
    ("gpu.driver-version", V100, whole(driver="560.35.03"), "fail", "too old for CUDA 12.8"),
    ("gpu.driver-version", V100, whole(driver="570.26"), "ok", ""),
    ("gpu.driver-version", V100, whole(driver="590.44.01"), "fail", "no longer supports"),
    ("gpu.driver-version", V100, whole(driver_cuda="12.4"), "fail", "runs CUDA 12.4"),
    ("gpu.driver-version", V100, whole(driver="", driver_module=None), "unknown", ""),
    ("gpu.driver-version", CMP, whole(), "ok", "610.43.02"),
    ("gpu.driver-version", CMP, whole(driver="580.173.02"), "warn", "measured with 610.43.02, open kernel module"),
    ("gpu.driver-version", CMP, whole(driver_open=False), "warn", "proprietary"),
    ("gpu.driver-version", CMP, whole(driver_open=None), "unknown", ""),
    ("gpu.driver-module", V100, whole(driver_module="580.159.04"), "fail", "580.159.04"),
    ("gpu.driver-module", V100, whole(driver_module=""), "fail", "not loaded"),
    ("gpu.driver-module", V100, whole(driver_module=None), "unknown", ""),
    ("gpu.driver-hold", V100, part("system", held_packages={}), "skip", ""),
    ("gpu.driver-hold", V100, part("system", held_packages={"nvidia-driver-580": False}), "warn", "nvidia-driver-580"),
    ("gpu.mode", V100, card(1, mig=True), "fail", "MIG"),
    ("gpu.mode", V100, card(1, compute_mode="prohibited"), "fail", "GPU 1 prohibited"),
    ("gpu.ecc", V100, card(1, ecc_uncorrected=2), "fail", "GPU 1 2 uncorrected"),
    ("gpu.ecc", V100, cards(ecc=False, ecc_uncorrected=None), "skip", ""),
    ("gpu.ecc", V100, card(1, ecc=None), "unknown", ""),
    ("gpu.persistence", V100, card(3, persistence=False), "warn", "GPU 3"),
    ("gpu.power-limit", CMP, whole(), "ok", "200 W"),
    ("gpu.power-limit", CMP, card(3, power_limit_w=250.0), "ok", "GPU 3 250 W now, will be set to 200 W"),
    (
        "gpu.power-limit",
        CMP,
        both(card(3, power_limit_w=250.0), NOBODY),
        "warn",
        "power limit above 200 W: GPU 3 250 W",
    ),
    ("gpu.power-limit", CMP, both(cards(power_limit_w=180.0), NOBODY), "ok", "below 200 W"),
    ("gpu.power-limit", CMP, cards(power_limit_w=180.0), "ok", "180 W now, will be set to 200 W"),
    ("gpu.power-limit", CMP, card(1, power_max_w=180.0), "fail", "GPU 1 takes 100 to 180 W"),
    ("gpu.power-limit", CMP, cards(power_min_w=220.0), "fail", "200 W is outside what the cards take"),
    ("gpu.power-limit", CMP, card(1, power_limit_w=None), "unknown", ""),
    ("gpu.clock-offset", CMP, whole(), "ok", "+0 MHz now, +200 MHz while the engine runs"),
    ("gpu.clock-offset", CMP, cards(offset_mhz=200), "ok", "+200 MHz"),
    ("gpu.clock-offset", CMP, both(cards(offset_mhz=200), NOBODY), "ok", "+200 MHz"),
    ("gpu.clock-offset", CMP, NOBODY, "warn", "may not change it"),
    ("gpu.clock-offset", CMP, card(2, offset_mhz=None, offset_note="no such"), "warn", "NVML cannot set"),
    ("gpu.clock-offset", CMP, card(2, offset_mhz=None), "unknown", ""),
    ("gpu.clock-offset", CMP, card(2, offset_max_mhz=150), "warn", "GPU 2 takes -500 to +150 MHz"),
    ("gpu.clock-offset", V100, whole(), "skip", ""),
    ("gpu.power-limit", V100, cards(power_limit_w=250.0), "skip", ""),
    ("gpu.throttle", V100, card(3, throttle=0x80), "fail", "GPU 3 hardware power brake"),
    ("gpu.throttle", V100, card(3, throttle=0x48), "fail", "hardware slowdown and hardware thermal slowdown"),
    (
        "gpu.throttle",
        V100,
        cards(throttle=0x1 | 0x2 | 0x4 | 0x10 | 0x100),
        "ok",
        "",
    ),  # idle, power cap, requested clock
    ("gpu.throttle", V100, card(3, throttle=None), "unknown", ""),
    ("gpu.pcie", CMP, card(2, pcie_width=4), "warn", "GPU 2 generation 2, 4 lanes"),
    ("gpu.pcie", CMP, cards(pcie_gen=1), "ok", ""),  # an idle card falls back to generation 1
    ("gpu.pcie", CMP, card(2, pcie_gen_max=1), "warn", "generation 1"),
    ("gpu.nvlink-ports", CMP, whole(), "skip", ""),
    (
        "gpu.peer-access",
        CMP,
        part("p2p", write=("X OK OK OK", "OK X OK DR", "OK OK X OK", "OK DR OK X")),
        "fail",
        "1-3 DR",
    ),
    ("gpu.peer-access", CMP, part("p2p", read=()), "unknown", ""),
    ("gpu.peer-route", CMP, part("system", iommu_groups=12, boot_options=("intel_iommu=on",)), "warn", "12 groups"),
    ("gpu.peer-route", CMP, part("system", iommu_groups=12, boot_options=("iommu=pt",)), "ok", "passthrough"),
    ("gpu.topology-agrees", V100, whole(topology=None), "skip", "not installed"),
    ("gpu.numa", V100, cards(numa_node=0), "warn", "one of 2 NUMA nodes"),
    ("gpu.numa", V100, card(2, numa_node=1), "warn", "spans"),
    ("gpu.numa", V100, card(2, numa_node=None), "unknown", ""),
    ("gpu.clock-target", V100, card(2, sm_max_mhz=1380), "fail", "at most 1380 MHz"),
    ("gpu.clock-target", V100, card(2, sm_supported_mhz=(1507, 1537), sm_max_mhz=1537), "fail", "not a clock of GPU 2"),
    ("gpu.clock-target", V100, card(2, sm_max_mhz=None, sm_supported_mhz=None), "unknown", ""),
    ("gpu.clock-target", CMP, whole(), "skip", ""),
    ("gpu.clock-permission", V100, whole(clock_permission="none"), "warn", "cannot be set"),
    ("gpu.clock-permission", V100, whole(clock_permission="root"), "ok", ""),
    ("gpu.clock-permission", CMP, NOBODY, "warn", "200 W, offset +200 MHz cannot be set"),
    ("gpu.clock-permission", CMP, whole(clock_permission=""), "unknown", ""),
    ("host.governor", V100, part("system", governors={}), "skip", ""),
    (
        "host.governor",
        V100,
        part("system", governors_available=("powersave",)),
        "warn",
        "offers no governor performance",
    ),
    ("host.governor", V100, part("system", governors={"policy0": "performance"}), "ok", "performance"),
    ("host.governor", V100, whole(clock_permission="none"), "warn", "may not change it"),
    ("host.xid", V100, whole(kernel_log=KernelLogFacts(readable=True, whole=False)), "unknown", "reaches back"),
    ("host.xid", V100, whole(kernel_log=KernelLogFacts(readable=False, problem="EPERM")), "unknown", "EPERM"),
    (
        "host.xid",
        V100,
        whole(kernel_log=KernelLogFacts(readable=True, whole=False, xids=(XidFacts(code=79, bus_id="0000:3d:00"),))),
        "fail",
        "Xid 79 on 0000:3d:00: the GPU has fallen off the bus",
    ),
    ("host.xid", V100, whole(kernel_log=KernelLogFacts(readable=True, xids=(XidFacts(code=13),))), "warn", "Xid 13"),
    ("host.clock", V100, whole(collected_at="2026-10-24T00:00:00+00:00"), "fail", "2026-10-24"),
    ("host.clock", V100, part("system", clock_synchronised=False), "warn", "no time daemon"),
    ("host.clock", TINY, part("system", clock_synchronised=False), "ok", "not kept"),
    ("host.hugetlb-limit", V100, part("memory", hugetlb_limits={"2MB": 100 * GIB}), "fail", "100 GiB"),
    ("host.hugetlb-limit", V100, part("memory", hugetlb_limits={"2MB": 200 * GIB, "1GB": 0}), "ok", ""),
    ("host.huge-tmpfs", TINY, part("memory", shmem_thp="deny"), "warn", "denies"),
    ("net.gloo", TINY, whole(network=None), "ok", "lo"),
    ("toolchain.nvrtc", V100, part("cuda", nvrtc_version="13.0.48"), "fail", "does not fit"),
    ("toolchain.nvrtc", V100, part("cuda", nvrtc="", nvrtc_version=""), "fail", "no libnvrtc"),
    ("toolchain.max-jobs", V100, part("memory", available=60 * GIB), "warn", "16 compilers"),
    ("toolchain.cdi", CMP, part("container", specs=()), "fail", "no CDI specification"),
    ("toolchain.cdi", CMP, part("container", cdi_enabled=False), "fail", "switched off"),
    ("toolchain.cdi", CMP, part("container", cdi_enabled=None), "unknown", ""),
    (
        "toolchain.cdi-paths",
        CMP,
        part("container", specs=(CdiSpec(path="/etc/cdi/x.yaml", problem="cannot be read"),)),
        "fail",
        "cannot be read",
    ),
    (
        "toolchain.container",
        CMP,
        part("container", answers=False, problem="permission denied"),
        "fail",
        "permission denied",
    ),
    ("toolchain.jit-locks", V100, part("caches", locks=(StaleLock(path="/l", age_s=7200),)), "warn", "/l, 2.0 h old"),
    ("toolchain.jit-locks", V100, part("caches", locks=(StaleLock(path="/l", age_s=7200, holder=5),)), "ok", ""),
    ("toolchain.jit-locks", V100, part("caches", locks=(StaleLock(path="/l", age_s=5),)), "ok", ""),
    (
        "toolchain.peer-cache",
        V100,
        part("caches", p2p=(P2pCache(path="/c", valid=True, older_than_boot=True),)),
        "warn",
        "older than this boot",
    ),
    (
        "toolchain.peer-cache",
        V100,
        part("caches", p2p=(P2pCache(path="/c", valid=True, older_than_boot=False),)),
        "ok",
        "",
    ),
]


@pytest.mark.parametrize(
    ("id", "name", "change", "status", "words"), ROWS, ids=[f"{r[0]}-{i}" for i, r in enumerate(ROWS)]
)
def test_one_thing_changed_on_a_good_machine(id: str, name: str, change: Change, status: str, words: str) -> None:
    finding = ask(id, change(machine(name)))
    assert finding.status == status, finding.summary
    assert words in finding.summary


@pytest.mark.parametrize("name", [V100, CMP, TINY])
def test_the_good_machines_are_good(name: str) -> None:
    facts = machine(name)
    assert not [f.id for f in preflight.run(profile(facts.profile), facts) if f.failed(strict=True)]


# ---- hugepages still to be reserved


def reserved(zero: int, one: int) -> tuple[HugePagePool, ...]:
    return (
        HugePagePool(node=-1, size_kib=2048, total=zero + one, free=zero + one),
        HugePagePool(node=0, size_kib=2048, total=zero, free=zero),
        HugePagePool(node=1, size_kib=2048, total=one, free=one),
    )


def nodes(*rows: tuple[int, int, int]) -> tuple[NumaNode, ...]:
    """(total, free, free in large blocks) of each node, GiB."""
    return tuple(
        NumaNode(node=k, total=t * GIB, free=f * GIB, free_in_blocks=b * GIB) for k, (t, f, b) in enumerate(rows)
    )


@pytest.mark.parametrize(
    ("pools", "memory", "status", "words"),
    [
        (reserved(48344, 48344), nodes((188, 50, 50), (188, 50, 50)), "ok", "all pages are reserved and free"),
        (reserved(0, 0), nodes((188, 150, 140), (188, 150, 140)), "ok", "large blocks"),
        (reserved(0, 0), nodes((188, 150, 140), (188, 150, 13)), "warn", "node 1 has 13.0 GiB in 2 MiB blocks"),
        (reserved(0, 0), nodes((188, 150, 140), (64, 60, 60)), "fail", "node 1 has 64.0 GiB of memory"),
        (reserved(48344, 40000), nodes((188, 5, 5), (188, 40, 30)), "ok", "large blocks"),
        (reserved(0, 0), None, "unknown", ""),
        (None, nodes((188, 150, 140)), "unknown", ""),
    ],
)
def test_memory_of_each_node_for_pages_still_to_come(
    pools: tuple[HugePagePool, ...] | None, memory: tuple[NumaNode, ...] | None, status: str, words: str
) -> None:
    finding = ask("host.hugepage-room", changed(machine(V100), "memory", hugepages=pools, nodes=memory))
    assert finding.status == status and words in finding.summary, finding.summary


def test_pages_of_one_gib_are_for_the_boot_loader() -> None:
    asked = profile("v100-own-store")
    asked = asked.model_copy(update={"engram": asked.engram.model_copy(update={"page": "1G"})})
    pools = tuple(HugePagePool(node=node, size_kib=1 << 20, total=0, free=0) for node in (-1, 0, 1))
    finding = ask("host.hugepage-room", changed(machine(V100), "memory", hugepages=pools), asked)
    assert finding.status == Status.WARN and finding.fix == ("boot with: hugepagesz=1G hugepages=192",)


# ---- the store's tmpfs


@pytest.mark.parametrize(
    ("ram_gib", "status"),
    # two tables are 188.83 GiB: half of the memory holds them from 377.66 GiB on
    [(256, "fail"), (377, "fail"), (378, "ok"), (512, "ok")],
)
def test_half_of_the_memory_is_too_small_a_tmpfs_below_377_7_gib(ram_gib: int, status: str) -> None:
    facts = changed(machine(CMP), "memory", total=ram_gib * GIB)
    facts = disk_changed(facts, "store", fstype="tmpfs", total=ram_gib * GIB // 2)
    finding = ask("host.tmpfs-size", facts)
    assert finding.status == status
    if status == "fail":
        assert "half of the memory, the default" in finding.summary and "378 GiB" in finding.why
        assert "size=193g" in finding.fix[0]


def test_a_tmpfs_of_unknown_size_is_unknown() -> None:
    assert ask("host.tmpfs-size", disk_changed(machine(CMP), "store", fstype="tmpfs", total=None)).status == "unknown"
    unmounted = changed(disk_changed(machine(CMP), "store", fstype="ext4"), "store", exists=False, bytes_present=0)
    assert "will be mounted at /opt/engram-ram with 200 GiB" in ask("host.tmpfs-size", unmounted).summary


# ---- serving values


def serving(
    name: str, argv: tuple[tuple[str, str], ...] = (), env: dict[str, str | None] | None = None, **values: Any
) -> Profile:
    """A profile with words of its command line, variables and fields replaced."""
    asked = profile(name)
    words = asked.serve.argv
    for old, new in argv:
        words = tuple(word.replace(old, new) for word in words if not (word == old and not new))
    given = {k: v for k, v in {**asked.serve.env, **(env or {})}.items() if v is not None}
    return asked.model_copy(update={"serve": asked.serve.model_copy(update={"argv": words, "env": given, **values})})


@pytest.mark.parametrize(
    ("tokens", "status"), [(0, "ok"), (5, "ok"), (10, "ok"), (4, "fail"), (7, "fail"), (None, "skip")]
)
def test_draft_tokens_are_none_or_a_multiple_of_five(tokens: int | None, status: str) -> None:
    config = re.sub(r"\d+", str(tokens or 0), profile("v100-pp2tp4").serve.dspark_argv[1])
    asked = serving("v100-pp2tp4", spec_tokens=tokens, dspark_argv=("--speculative-config", config) if tokens else ())
    assert ask("serve.spec-tokens", machine(V100), asked).status == status


def test_draft_tokens_of_the_command_line_must_be_the_stated_ones() -> None:
    finding = ask("serve.spec-tokens", machine(V100), serving("v100-pp2tp4", spec_tokens=10))
    assert finding.status == Status.FAIL and "the command line asks for 5" in finding.summary


@pytest.mark.parametrize(
    ("share", "logprobs", "status"),
    [(0.98, False, "ok"), (0.98, True, "fail"), (0.97, True, "ok"), (None, True, "skip")],
)
def test_prompt_logprobs_need_room(share: float | None, logprobs: bool, status: str) -> None:
    asked = serving("cmp170hx-tp4", gpu_memory_utilization=share, prompt_logprobs=logprobs)
    assert ask("serve.utilisation", machine(CMP), asked).status == status


@pytest.mark.parametrize(
    ("mapping", "key", "status"),
    [
        ("${host}:${port}:${port}", None, "ok"),
        ("[::1]:${port}:${port}", None, "ok"),
        ("${port}:${port}", None, "fail"),
        ("0.0.0.0:${port}:${port}", None, "fail"),
        ("192.168.1.5:${port}:${port}", None, "fail"),
        ("192.168.1.5:${port}:${port}", "secret", "ok"),
    ],
)
def test_an_api_others_can_reach_needs_a_key(mapping: str, key: str | None, status: str) -> None:
    asked = serving("cmp170hx-tp4", argv=(("${host}:${port}:${port}", mapping),), env={"VLLM_API_KEY": key})
    assert ask("net.exposed", machine(CMP), asked).status == status
    local = mapping.startswith(("${host}", "[::1]"))
    notice = ask("engine.licence", machine(CMP), asked)
    assert notice.status == ("ok" if local else "warn") and "AGPL" in notice.summary


@pytest.mark.parametrize(
    ("chunk", "length", "status"),
    [
        (1024, 1_048_576, "ok"),
        (2048, 1_048_576, "fail"),
        (4096, 792_000, "fail"),
        (2048, 791_000, "ok"),
        (None, 1, "skip"),
    ],
)
def test_a_context_fits_beside_the_steps_it_was_measured_with(chunk: int | None, length: int, status: str) -> None:
    asked = serving("v100-pp2tp4", max_num_batched_tokens=chunk, max_model_len=length)
    assert ask("serve.context-room", machine(V100), asked).status == status


@pytest.mark.parametrize("flags", [("-p8011:8011",), ("--publish=8011:8011",), ("--publish", "8011:8011")])
def test_every_way_to_publish_a_port_is_seen(flags: tuple[str, ...]) -> None:
    asked = profile("cmp170hx-tp4")
    argv = (*asked.serve.argv[:3], *flags, *asked.serve.argv[3:])
    asked = asked.model_copy(update={"serve": asked.serve.model_copy(update={"argv": argv})})
    finding = ask("net.exposed", machine(CMP), asked)
    assert finding.status == "fail" and "0.0.0.0" in finding.summary


@pytest.mark.parametrize("name", ["v100-pp2tp4", "cmp170hx-tp4"])
def test_the_host_that_was_chosen_is_judged_and_a_key_file_counts(name: str) -> None:
    facts = changed(machine(V100 if name.startswith("v100") else CMP), "port", host="10.0.0.7")
    finding = ask("net.exposed", facts, profile(name))
    assert finding.status == "fail" and "10.0.0.7" in finding.summary and "${" not in finding.summary
    assert ask("net.exposed", changed(facts, api_key=True), profile(name)).status == "ok"


@pytest.mark.parametrize(
    ("host", "key", "status"), [("0.0.0.0", None, "fail"), ("0.0.0.0", "k", "ok"), ("::1", None, "ok")]
)
def test_a_venv_engine_is_judged_by_its_bind_address(host: str, key: str | None, status: str) -> None:
    asked = serving("v100-pp2tp4", env={"VLLM_API_KEY": key})
    assert ask("net.exposed", changed(machine(V100), "port", host=host), asked).status == status


@pytest.mark.parametrize(
    ("interface", "addresses", "status"),
    [
        ("lo", ("172.17.0.1",), "ok"),
        ("docker0", ("127.0.1.1",), "warn"),
        (None, ("127.0.1.1",), "ok"),
        (None, ("172.17.0.1",), "warn"),
        (None, (), "warn"),
        (None, None, "unknown"),
    ],
)
def test_local_workers_talk_over_loopback(
    interface: str | None, addresses: tuple[str, ...] | None, status: str
) -> None:
    asked = serving("v100-pp2tp4", env={"GLOO_SOCKET_IFNAME": interface})
    facts = changed(machine(V100), network=NetworkFacts(hostname_addresses=addresses))
    assert ask("net.gloo", facts, asked).status == status


@pytest.mark.parametrize(
    ("value", "status"), [("3600", "ok"), ("7200", "ok"), ("600", "fail"), (None, "fail"), ("1h", "fail")]
)
def test_the_engines_own_start_limit_is_not_shorter_than_ours(value: str | None, status: str) -> None:
    asked = serving("v100-pp2tp4", env={"VLLM_ENGINE_READY_TIMEOUT_S": value})
    assert ask("serve.ready-timeout", machine(V100), asked).status == status


@pytest.mark.parametrize(
    ("env", "status"),
    [
        ({"CUDA_DEVICE_ORDER": None}, "fail"),
        ({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, "fail"),
        ({"CUDA_DEVICE_ORDER": None, "CUDA_VISIBLE_DEVICES": "GPU-1a,GPU-2b"}, "ok"),
    ],
)
def test_indices_mean_the_same_cards_to_nvml_and_to_cuda(env: dict[str, str | None], status: str) -> None:
    assert ask("gpu.order", machine(V100), serving("v100-pp2tp4", env=env)).status == status


def test_a_container_needs_shared_and_locked_memory() -> None:
    asked = serving("cmp170hx-tp4", argv=(("--ipc=host", "--shm-size=64g"),))
    assert ask("serve.container-flags", machine(CMP), asked).status == Status.OK
    asked = serving("cmp170hx-tp4", argv=(("memlock=-1", "nofile=65535"),))
    finding = ask("serve.container-flags", machine(CMP), asked)
    assert finding.status == Status.FAIL and "--ulimit memlock=-1" in finding.summary


def test_a_card_that_only_the_text_knows_is_judged_by_the_text() -> None:
    facts = changed(machine(V100), gpus=None, gpu_note="NVML not there", gpu_reason="no-library")
    assert ask("gpu.nvlink-quads", facts).status == Status.OK
    assert ask("gpu.nvlink-quads", changed(facts, topology=None)).status == Status.UNKNOWN
    assert ask("gpu.memory", changed(facts, gpus=(GpuFacts(index=0, name="x"),))).status == Status.UNKNOWN
