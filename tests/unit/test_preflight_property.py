"""Whatever the facts are, `run` gives one finding a check, never crashes, and never calls the unmeasured ok."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

import preflight
from ds41ctl.core.facts import HostFacts
from ds41ctl.core.finding import Status
from preflight.check import Stage
from tests.facts.replay import MACHINES, machine, profile

PROFILES = {name: profile(name) for name in ("cpu-tiny", "v100-pp2tp4", "cmp170hx-tp4", "cpu-tiny-unfilled")}
STAGES: tuple[Stage, Stage] = ("up", "serve")
facts_strategy = st.builds(HostFacts, collected_at=st.just("2026-11-12T09:30:00+00:00"))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(facts=facts_strategy, name=st.sampled_from(sorted(PROFILES)), stage=st.sampled_from(STAGES))
def test_random_facts_never_crash_a_check(facts: HostFacts, name: str, stage: Stage) -> None:
    findings = preflight.run(PROFILES[name], facts, stage=stage)
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
    "memory.hugepages": {"host.hugepages"},
    "system.cpu_flags": {"host.cpu"},
    "system.libc": {"host.os"},
    "system.platform": {"host.os"},
    "system.python": {"host.python"},
    "limits": {"host.limits"},
    "port": {"net.port"},
    "port.free": {"net.port"},
    "gpus": {"gpu.driver", "gpu.count", "gpu.name", "gpu.memory"},
    "pack": {"pack.files", "pack.engram-tensors", "disk.data"},
    "pack.bytes_missing": {"disk.data"},
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
# where the answer does not rest on that field after all, and why
EXEMPT = {
    ("cmp170hx-4x-ready", "system.libc"): "the container brings its own C library",
    ("cmp170hx-4x-one-locked", "system.libc"): "the container brings its own C library",
    ("v100-8x-serving-ready", "memory.hugepages"): "a valid store proves that its pages are there",
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
    optional = path[0] in ("hugepages", "gpus", "port", "pack", "store", "engine", "logind")
    new = _without(value, path[1:]) if path[1:] else None if optional else _emptied(value)
    return model.model_copy(update={path[0]: new})


@pytest.mark.parametrize("field", sorted(RESTS_ON))
@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("stage", STAGES)
def test_without_its_measurement_a_check_is_not_ok(name: str, field: str, stage: Stage) -> None:
    if (name, field) in EXEMPT:
        pytest.skip(EXEMPT[name, field])
    facts = _without(machine(name), field.split("."))
    asked = PROFILES[facts.profile]
    for finding in preflight.run(asked, facts, stage=stage):
        if finding.id in RESTS_ON[field]:
            assert finding.status != Status.OK, (finding.id, finding.summary)
