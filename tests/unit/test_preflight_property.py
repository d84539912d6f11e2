"""Whatever the facts are, `run` gives one finding a check, never crashes, and never calls the unmeasured ok."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

import preflight
from ds41ctl.core.facts import HostFacts
from ds41ctl.core.finding import Status
from preflight.check import Stage
from tests.facts.replay import EDITED, MACHINES, SHIPPED, machine, profile

PROFILES = {name: profile(name) for name in (*SHIPPED, *EDITED)}
STAGES: tuple[Stage, Stage] = ("up", "serve")
facts_strategy = st.builds(HostFacts, collected_at=st.just("2026-11-12T09:30:00+00:00"))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(facts=facts_strategy, name=st.sampled_from(sorted(PROFILES)), stage=st.sampled_from(STAGES))
def test_random_facts_never_crash_a_check(facts: HostFacts, name: str, stage: Stage) -> None:
    findings = preflight.run(PROFILES[name], facts, stage=stage, level=3)
    assert [finding.id for finding in findings] == [check.id for check in preflight.ALL]
    for finding in findings:
        assert finding.status != Status.CRASH, (finding.id, finding.evidence)
        if finding.failed(strict=True):
            assert finding.expected
            assert finding.found
            assert finding.fix


# which measured values a check rests on: (field path -> the checks that must not be OK without it)
RESTS_ON = {
    "memory.available": {"host.ram"},
    "memory.cgroup_limit": {"host.ram"},
    "memory.overcommit": {"host.overcommit"},
    "memory.hugepages": {"host.hugepages", "host.hugepage-room"},
    "system.cpu_flags": {"host.cpu"},
    "system.libc": {"host.os"},
    "system.platform": {"host.os"},
    "system.python": {"host.python"},
    "limits": {"host.limits"},
    "port": {"net.port"},
    "port.free": {"net.port"},
    "gpus": {
        *("gpu.driver", "gpu.count", "gpu.name", "gpu.memory", "gpu.capability", "gpu.weights", "gpu.free-memory"),
        *("gpu.processes", "gpu.mode", "gpu.ecc", "gpu.persistence", "gpu.power-limit", "gpu.throttle", "gpu.pcie"),
        *("gpu.clock-target", "gpu.clock-offset", "gpu.topology-agrees"),
    },
    "gpus.*.compute_capability": {"gpu.capability"},
    "gpus.*.memory_free_mib": {"gpu.free-memory"},
    "gpus.*.processes": {"gpu.processes"},
    "gpus.*.throttle": {"gpu.throttle"},
    "gpus.*.power_limit_w": {"gpu.power-limit"},
    "gpus.*.offset_mhz": {"gpu.clock-offset"},
    "gpus.*.persistence": {"gpu.persistence"},
    "gpus.*.compute_mode": {"gpu.mode"},
    "gpus.*.mig": {"gpu.mode"},
    "gpus.*.ecc": {"gpu.ecc"},
    "gpus.*.ecc_uncorrected": {"gpu.ecc"},
    "gpus.*.pcie_gen_max": {"gpu.pcie"},
    "gpus.*.pcie_width": {"gpu.pcie"},
    "gpus.*.sm_max_mhz": {"gpu.clock-target"},
    "gpus.*.numa_node": {"gpu.numa"},
    "gpus.*.nvlinks": {"gpu.nvlink-ports"},
    "driver_module": {"gpu.driver-module"},
    "clock_permission": {"gpu.clock-permission"},
    "kernel_log": {"host.xid"},
    "kernel_log.readable": {"host.xid"},
    "system.clock_synchronised": {"host.clock"},
    "system.governors": {"host.governor"},
    "system.held_packages": {"gpu.driver-hold"},
    "system.iommu_groups": {"gpu.peer-route"},
    "memory.nodes": {"host.hugepage-room"},
    "memory.hugetlb_limits": {"host.hugetlb-limit"},
    "memory.shmem_thp": {"host.huge-tmpfs"},
    "container": {"toolchain.container", "toolchain.cdi", "toolchain.cdi-paths"},
    "container.storage_free": {"disk.image"},
    "container.specs": {"toolchain.cdi", "toolchain.cdi-paths"},
    "caches": {"toolchain.jit-locks", "toolchain.peer-cache"},
    "others": {"engine.others"},
    "cuda": {"toolchain.nvrtc"},
    "abi": {"engine.abi"},
    "digests": {"pack.digests"},
    "load": {"gpu.peer-copy"},
    "pack": {"pack.files", "pack.engram-tensors", "disk.data"},
    "pack.bytes_missing": {"disk.data"},
    "pack.sources": {"pack.sizes"},
    "store": {"engram.store"},
    "store.bytes_needed": {"engram.store"},
    "engine": {"engine.installed", "engine.drift", "disk.engine", "disk.tmp"},
    "engine.manifest_digest": {"engine.drift"},
    "disks": {"disk.data", "disk.engine", "disk.state", "disk.store", "disk.tmp"},
    "disks.*.free": {"disk.data", "disk.engine", "disk.state", "disk.store", "disk.tmp", "host.shm"},
    "disks.*.writable": {"disk.data", "disk.engine", "disk.state", "disk.store", "disk.tmp"},
    "gpus.*.memory_total_mib": {"gpu.memory"},
    "tools.*.version": {"host.tmux", "toolchain.nvcc", "toolchain.container"},
    "tools.*.path": {"host.tmux", "toolchain.nvcc", "toolchain.cxx", "toolchain.container"},
    "logind": {"host.logout"},
}
# where the answer does not rest on that field after all: (machine's beginning, field) -> why
EXEMPT = {
    ("cmp170hx-4x", "system.libc"): "the container brings its own C library",
    ("cmp170hx-4x", "gpus.*.numa_node"): "the machine has one NUMA node",
    ("h200", "gpus.*.numa_node"): "the machine has one NUMA node",
    ("v100-8x-serving-ready", "memory.hugepages"): "a valid store proves that its pages are there",
    ("v100-8x-careless-profile", "memory.hugepages"): "a valid store proves that its pages are there",
    ("v100-8x-neglected", "memory.hugepages"): "a valid store proves that its pages are there",
    ("v100-8x-serving-ready", "memory.nodes"): "a valid store proves that its pages are there",
    ("v100-8x-careless-profile", "memory.nodes"): "a valid store proves that its pages are there",
    ("v100-8x-neglected", "memory.nodes"): "a valid store proves that its pages are there",
}


def _emptied(value: Any) -> Any:
    """The way a field says `not measured`."""
    if isinstance(value, str):
        return ""
    if isinstance(value, dict):
        return {}
    return () if isinstance(value, tuple) else None


def _without(model: Any, path: list[str]) -> Any:
    if path[0] == "*":
        return tuple(_without(item, path[1:]) for item in model or ())
    if model is None:
        return None
    assert isinstance(model, BaseModel)
    value = getattr(model, path[0])
    optional = type(None) in get_args(type(model).model_fields[path[0]].annotation)
    new = _without(value, path[1:]) if path[1:] else None if optional else _emptied(value)
    return model.model_copy(update={path[0]: new})


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("stage", STAGES)
def test_without_its_measurement_a_check_is_not_ok(name: str, stage: Stage) -> None:
    known = machine(name)
    wrong = []
    for field, resting in RESTS_ON.items():
        if any(name.startswith(machine_name) and field == other for machine_name, other in EXEMPT):
            continue
        facts = _without(known, field.split("."))
        findings = preflight.run(PROFILES[known.profile], facts, stage=stage, level=3, only=resting)
        assert {finding.id for finding in findings} == resting
        wrong += [(field, finding.id, finding.summary) for finding in findings if finding.status == Status.OK]
    assert not wrong
