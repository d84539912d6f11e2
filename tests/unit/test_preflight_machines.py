"""What preflight says about every recorded machine, and what holds for all of its checks."""

from __future__ import annotations

import builtins
import io
import os
import re
import socket
import subprocess
from typing import Any

import pytest

import preflight
from ds41ctl.adapters import profiles
from ds41ctl.core import launcher, recipe
from ds41ctl.core.finding import Status
from ds41ctl.core.profile import Profile, parse_profile
from preflight.check import Stage
from tests.facts.replay import FACTS, MACHINES, SHIPPED, changed, machine, profile, statuses

# machine -> stage -> every verdict that is neither OK nor SKIP
EXPECTED: dict[str, dict[Stage, dict[str, str]]] = {
    "debian12-container-24gb": {
        "up": {},
        "serve": {
            "pack.files": "fail",
            "pack.engram-tensors": "fail",
            "engram.store": "fail",
            "engine.installed": "fail",
        },
    },
    "ubuntu2404-ready": {
        "up": {},
        "serve": {},
    },
    "debian12-laptop-8gb": {
        "up": {
            "host.python": "fail",
            "host.tmux": "fail",
            "host.logout": "warn",
            "host.ram": "fail",
            "disk.engine": "fail",
        },
    },
    "container-cgroup-4gb": {
        "up": {
            "host.limits": "warn",
            "host.ram": "fail",
            "host.tmpfs": "fail",
            "host.huge-tmpfs": "warn",
            "disk.state": "fail",
        },
    },
    "port-taken": {
        "serve": {
            "net.port": "fail",
            "engine.running": "fail",
            "engine.others": "warn",
        },
    },
    "ivybridge-stale-store": {
        "serve": {
            "host.cpu": "fail",
            "host.overcommit": "warn",
            "toolchain.jit-locks": "warn",
            "engram.store": "fail",
            "engine.drift": "fail",
            "engine.running": "warn",
        },
        "up": {
            "host.cpu": "fail",
            "host.overcommit": "warn",
            "toolchain.jit-locks": "warn",
            "engine.drift": "fail",
            "engine.running": "warn",
        },
    },
    "alpine-aarch64": {
        "serve": {
            "host.os": "fail",
            "host.cpu": "fail",
            "host.tmux": "fail",
            "host.clock": "fail",
        },
    },
    "half-fetched-usb": {
        "up": {
            "disk.data": "fail",
            "disk.engine": "fail",
            "disk.store": "fail",
            "disk.tmp": "fail",
            "pack.files": "fail",
            "engram.store": "fail",
        },
    },
    "pack-without-table": {
        "up": {
            "env.inherited": "warn",
            "pack.engram-tensors": "fail",
            "engram.store": "fail",
        },
    },
    "profile-unfilled": {
        "up": {
            "env.inherited": "fail",
            "engram.storage": "fail",
        },
    },
    "v100-8x-hugepages-reserved": {
        "up": {},
        "serve": {
            "engram.store": "fail",
        },
    },
    "v100-8x-fetching": {
        "up": {"engine.installed": "fail"},  # nothing pins the release yet: found before a byte of the pack
        "serve": {
            "pack.files": "fail",
            "pack.engram-tensors": "fail",
            "engram.store": "fail",
            "engine.installed": "fail",
        },
    },
    "v100-8x-serving-ready": {
        "serve": {"serve.source": "warn", "serve.knobs": "warn"},
    },
    "v100-8x-driver-mismatch": {
        "up": {
            "gpu.driver": "fail",
            "gpu.count": "unknown",
            "gpu.name": "unknown",
            "gpu.memory": "unknown",
            "gpu.capability": "unknown",
            "gpu.weights": "unknown",
            "gpu.free-memory": "unknown",
            "gpu.processes": "unknown",
            "gpu.driver-module": "fail",
            "gpu.driver-hold": "warn",
            "gpu.mode": "unknown",
            "gpu.ecc": "unknown",
            "gpu.persistence": "unknown",
            "gpu.throttle": "unknown",
            "gpu.nvlink-quads": "unknown",
            "gpu.nvlink-ports": "unknown",
            "gpu.topology-agrees": "warn",
            "gpu.numa": "unknown",
            "gpu.clock-target": "unknown",
            "gpu.clock-permission": "unknown",
            "host.limits": "fail",
            "host.hugepages": "warn",
            "host.shm": "fail",
            "host.hugepage-room": "warn",
            "host.hugetlb-limit": "fail",
            "toolchain.nvcc": "fail",
            "toolchain.cxx": "fail",
            "toolchain.nvrtc": "fail",
        },
    },
    "v100-7x-16gb": {
        "up": {
            "gpu.count": "fail",
            "gpu.name": "fail",
            "gpu.memory": "fail",
            "gpu.weights": "fail",
            "gpu.nvlink-quads": "fail",
            "gpu.topology-agrees": "warn",
            "gpu.numa": "unknown",
            "host.logout": "warn",
            "host.xid": "fail",
            "host.ram": "fail",
            "host.hugepages": "fail",
            "host.hugepage-room": "fail",
            "toolchain.nvcc": "fail",
            "toolchain.max-jobs": "warn",
        },
    },
    "cmp170hx-4x-ready": {
        "up": {},
        "serve": {},
    },
    "cmp170hx-4x-one-locked": {
        "serve": {
            "gpu.memory": "fail",
            "toolchain.container": "fail",
            "toolchain.cdi": "fail",
        },
    },
    "v100-8x-crossed-quads": {
        "up": {
            "gpu.nvlink-quads": "fail",
            "gpu.numa": "warn",
            "serve.source": "warn",
        },
    },
    "v100-8x-link-down": {
        "up": {
            "gpu.nvlink-quads": "fail",
            "gpu.nvlink-ports": "fail",
            "gpu.topology-agrees": "warn",
            "serve.source": "warn",
        },
    },
    "v100-8x-neglected": {
        "serve": {
            "gpu.free-memory": "fail",
            "gpu.processes": "fail",
            "gpu.driver-version": "fail",
            "gpu.driver-hold": "warn",
            "gpu.mode": "fail",
            "gpu.ecc": "fail",
            "gpu.persistence": "warn",
            "gpu.throttle": "fail",
            "gpu.numa": "warn",
            "gpu.clock-target": "fail",
            "gpu.clock-permission": "warn",
            "host.governor": "warn",
            "host.xid": "fail",
            "host.clock": "warn",
            "toolchain.peer-cache": "warn",
        },
    },
    "v100-8x-careless-profile": {
        "serve": {
            "gpu.nvlink-quads": "fail",
            "gpu.numa": "warn",
            "gpu.order": "fail",
            "toolchain.max-jobs": "warn",
            "serve.source": "warn",
            "serve.knobs": "warn",
            "serve.spec-tokens": "fail",
            "serve.context-room": "fail",
            "serve.ready-timeout": "fail",
            "serve.workers": "fail",
            "serve.offline": "fail",
            "pack.sizes": "warn",
            "net.exposed": "fail",
            "net.gloo": "warn",
        },
    },
    "cmp170hx-4x-careless-profile": {
        "up": {
            "host.tmpfs-size": "fail",
            "serve.utilisation": "fail",
            "serve.kv-pool": "fail",
            "serve.container-flags": "fail",
            "net.exposed": "fail",
            "engine.licence": "warn",
            "disk.image": "fail",
            "engine.installed": "fail",
        },
    },
    "cmp170hx-4x-no-image": {
        "up": {},
        "serve": {"engine.installed": "fail"},
    },
    "cmp170hx-4x-stock-driver": {
        "serve": {
            "gpu.power-limit": "warn",
            "gpu.clock-offset": "warn",
            "gpu.clock-permission": "warn",
            "gpu.pcie": "warn",
            "gpu.peer-access": "fail",
            "gpu.peer-route": "warn",
            "toolchain.cdi": "fail",
            "toolchain.cdi-paths": "fail",
        },
    },
    "h200-1x": {
        "up": {
            "gpu.count": "fail",
            "gpu.name": "fail",
            "gpu.memory": "unknown",
            "gpu.capability": "fail",
            "gpu.weights": "unknown",
            "gpu.nvlink-quads": "fail",
            "gpu.nvlink-ports": "fail",
            "host.limits": "warn",
            "host.ram": "fail",
            "disk.data": "fail",
            "env.inherited": "warn",
            "toolchain.nvcc": "fail",
            "toolchain.nvrtc": "fail",
            "serve.source": "warn",
            "engine.installed": "unknown",  # recorded before anybody looked where it would come from
        },
    },
    "h200-2x-nvlink": {
        "up": {
            "gpu.count": "fail",
            "gpu.name": "fail",
            "gpu.memory": "unknown",
            "gpu.capability": "fail",
            "gpu.weights": "unknown",
            "gpu.nvlink-quads": "fail",
            "host.limits": "warn",
            "disk.data": "fail",
            "env.inherited": "warn",
            "toolchain.nvcc": "fail",
            "toolchain.nvrtc": "fail",
            "serve.source": "warn",
            "engine.installed": "unknown",  # recorded before anybody looked where it would come from
        },
    },
    "h200-2x-gpu-tiny-tp2": {
        "up": {
            "host.limits": "warn",
            "env.inherited": "warn",
        },
    },
    "h200-2x-gpu-tiny-pp2": {
        "up": {
            "host.limits": "warn",
            "env.inherited": "warn",
        },
    },
}
CASES = [(name, stage) for name, stages in EXPECTED.items() for stage in stages]


@pytest.mark.parametrize(("name", "stage"), CASES, ids=[f"{name}-{stage}" for name, stage in CASES])
def test_the_verdict_on_this_machine_is(name: str, stage: Stage) -> None:
    facts = machine(name)
    findings = preflight.run(profile(facts.profile), facts, stage=stage)
    found = {f.id: str(f.status) for f in findings if f.status not in (Status.OK, Status.SKIP)}
    assert found == EXPECTED[name][stage]


READY = {
    "ubuntu2404-ready": "cpu-tiny",
    "v100-8x-serving-ready": "v100-pp2tp4",
    "cmp170hx-4x-ready": "cmp170hx-tp4",
    "h200-2x-gpu-tiny-tp2": "gpu-tiny-tp2",
    "h200-2x-gpu-tiny-pp2": "gpu-tiny-pp2",
}


def imported(recorded: str) -> Profile:
    """A recipe or a launcher that was recorded, as `profile import` takes it over."""
    if recorded.endswith(".json"):
        return parse_profile(
            recipe.read(recipe.load((FACTS / "recipes" / recorded).read_bytes(), recorded), "mine").text, ""
        )
    folder, base = FACTS / "launchers", profiles.tree(profiles.find("v100-pp2tp4"))
    script, example = ((folder / name).read_text() for name in (recorded, "ds41.env.example"))
    told = launcher.of_launcher((script, recorded), (example, "ds41.env.example"), f"/v100/{recorded}", base, "mine")
    return parse_profile(told.text, "")


@pytest.mark.parametrize(
    ("name", "recorded"), [("cmp170hx-4x-ready", "4x-cmp-170hx.json"), ("v100-8x-serving-ready", "serve_ds41.sh")]
)
def test_an_imported_recipe_has_no_fault_on_its_ready_machine(name: str, recorded: str) -> None:
    findings = preflight.run(imported(recorded), machine(name), stage="up")
    assert [f for f in findings if f.failed(strict=True)] == []


# what a profile is judged by whatever the machine: its own command line and environment
OWN_WORDS = ("serve.", "net.exposed", "engine.licence", "env.inherited", "engram.storage")


@pytest.mark.parametrize("asked", SHIPPED)
@pytest.mark.parametrize("name", READY)
def test_a_shipped_profile_has_no_fault_of_its_own_on_any_ready_machine(name: str, asked: str) -> None:
    facts = changed(machine(name), environment={}, engine=None)
    findings = preflight.run(profile(asked), facts, stage="up")
    # a command line that was never read from its engine's own launcher is warned of wherever it is to run
    known = {"v100-pp2tp4": {"serve.source": Status.WARN}}.get(asked, {})
    faults = {f.id: f.status for f in findings if f.status not in (Status.OK, Status.SKIP)}
    assert {id: status for id, status in faults.items() if id.startswith(OWN_WORDS)} == known
    shown = " ".join(" ".join((f.summary, f.expected, f.found, *f.fix)) for f in findings)
    assert "${" not in shown, "a check judged a template"


def test_every_recorded_machine_has_a_stated_verdict() -> None:
    assert set(MACHINES) == {*EXPECTED, "nothing-readable"}


def test_what_could_not_be_measured_is_never_ok() -> None:
    facts = machine("nothing-readable")
    found = statuses(preflight.run(profile("cpu-tiny"), facts, stage="serve"))
    # these ask only the profile, or a record that is absent when no engine runs
    asks_no_measurement = {"engram.storage", "engine.running", "env.inherited"}
    asks_no_measurement |= {"serve.source", "serve.offline", "net.exposed", "net.gloo"}
    ok = {id for id, status in found.items() if status == Status.OK}
    assert ok == asks_no_measurement
    assert sum(status == Status.UNKNOWN for status in found.values()) >= 20


def _all_findings() -> list[tuple[str, Any]]:
    stages: tuple[Stage, Stage] = ("up", "serve")
    return [
        (name, finding)
        for name in MACHINES
        for stage in stages
        for finding in preflight.run(profile(machine(name).profile), machine(name), stage=stage, level=3)
    ]


def test_each_check_passes_on_one_recorded_machine_and_fails_on_another() -> None:
    passed, failed = set(), set()
    for _, finding in _all_findings():
        if finding.status == Status.OK:
            passed.add(finding.id)
        elif finding.status in (Status.FAIL, Status.WARN):
            failed.add(finding.id)
    ids = {check.id for check in preflight.ALL}
    assert ids - passed == set()
    assert ids - failed == set()


def test_ids_are_dotted_lower_case_unique_and_in_the_table() -> None:
    ids = [check.id for check in preflight.ALL]
    assert len(ids) == len(set(ids))
    for id in ids:
        assert re.fullmatch(r"[a-z]+\.[a-z]+(-[a-z]+)*", id), id
    assert [row[0] for row in preflight.table()] == ids
    for id, level, title, prevents in preflight.table():
        assert level in (1, 2, 3), id
        assert title, id
        assert prevents, id
        assert "|" not in title + prevents, "would break the README's table"
    assert set(preflight.groups()) == set(ids)


def test_what_is_not_ok_says_expected_found_why_and_fix() -> None:
    seen = 0
    for name, finding in _all_findings():
        assert "\n" not in finding.summary, (name, finding.id)
        assert finding.summary, (name, finding.id)
        assert finding.status != Status.CRASH, (name, finding.id, finding.evidence)
        if finding.status in (Status.OK, Status.SKIP):
            continue
        seen += 1
        assert finding.expected, (name, finding.id)
        assert finding.found, (name, finding.id)
        assert finding.why, (name, finding.id)
        assert finding.fix, (name, finding.id)
        assert all(line.strip() and "\n" not in line for line in finding.fix), (name, finding.id)
    assert seen > 50


def test_a_replay_touches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = [(machine(name), profile(machine(name).profile)) for name in MACHINES]

    def refused(*args: object, **kwargs: object) -> Any:
        raise AssertionError(f"a check touched the world: {args}")

    with monkeypatch.context() as patch:
        for module, name in (
            (builtins, "open"),
            (io, "open"),
            (os, "open"),
            (os, "stat"),
            (os, "listdir"),
            (os, "access"),
            (os, "statvfs"),
            (os, "getenv"),
            (socket, "socket"),
            (subprocess, "Popen"),
        ):
            patch.setattr(module, name, refused)
        results = [preflight.run(asked, facts) for facts, asked in recorded]
    assert all(finding.status != Status.CRASH for findings in results for finding in findings)


@pytest.mark.parametrize("name", MACHINES)
def test_a_replay_gives_the_same_findings_twice(name: str) -> None:
    facts, asked = machine(name), profile(machine(name).profile)
    first, second = (
        [finding.model_copy(update={"seconds": None}) for finding in preflight.run(asked, facts)] for _ in range(2)
    )
    assert first == second


def test_a_recorded_machine_survives_being_written_and_read() -> None:
    for name in MACHINES:
        facts = machine(name)
        assert type(facts).model_validate_json(facts.model_dump_json()) == facts
