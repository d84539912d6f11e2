"""Selecting checks, levels, crashes, and what preflight admits it did not look at."""

from __future__ import annotations

import pytest

import preflight
from ds41ctl.core.errors import ConfigError
from ds41ctl.core.facts import HostFacts
from ds41ctl.core.finding import Status
from ds41ctl.core.profile import Profile
from preflight.check import Check, Stage, Verdict
from tests.facts.replay import changed, machine, profile


def _ids(**options: object) -> list[str]:
    return [f.id for f in preflight.run(profile("cpu-tiny"), machine("ubuntu2404-ready"), **options)]  # type: ignore[arg-type]


def test_only_takes_an_id_or_a_domain() -> None:
    assert _ids(only=("net.port",)) == ["net.port"]
    assert _ids(only=("disk", "net.port")) == [
        "disk.data",
        "disk.engine",
        "disk.state",
        "disk.store",
        "disk.tmp",
        "disk.image",
        "net.port",
    ]


def test_skip_leaves_out_an_id_or_a_domain() -> None:
    everything = _ids()
    left = _ids(skip=("gpu", "host.tmux"))
    assert "host.tmux" not in left and "host.os" in left
    assert [id for id in everything if id.startswith("gpu.")] and not [id for id in left if id.startswith("gpu.")]
    assert {id for id in everything if id not in left} == {
        "host.tmux",
        *(id for id in everything if id.startswith("gpu.")),
    }


@pytest.mark.parametrize(("wrong", "near"), [("net.prot", "net.port"), ("engramm", "engram"), ("HOST.RAM", "host.ram")])
def test_an_unknown_id_is_an_error_with_the_near_name(wrong: str, near: str) -> None:
    for option in ("only", "skip"):
        with pytest.raises(ConfigError, match=f"did you mean {near}") as caught:
            _ids(**{option: (wrong,)})
        assert caught.value.hints


def test_a_check_that_crashes_is_a_finding_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
        raise ZeroDivisionError("nobody thought of this")

    crashing = Check("test.broken", "title", 1, "TEST", "prevents", broken)
    monkeypatch.setattr(preflight, "ALL", (crashing, *preflight.ALL))
    findings = preflight.run(profile("cpu-tiny"), machine("ubuntu2404-ready"))
    assert findings[0].status == Status.CRASH
    assert findings[0].failed()
    assert "ZeroDivisionError" in findings[0].summary
    assert any("nobody thought of this" in line for line in findings[0].evidence)
    assert any("broken" in line for line in findings[0].evidence), "the evidence names the line"
    assert findings[0].fix
    assert len(findings) == len([check for check in preflight.ALL if check.level == 1])


def test_a_higher_level_contains_those_below(monkeypatch: pytest.MonkeyPatch) -> None:
    deep = Check("test.deep", "title", 2, "TEST", "prevents", lambda p, f, s: Verdict(Status.OK, "read"))
    monkeypatch.setattr(preflight, "ALL", (*preflight.ALL, deep))
    assert "test.deep" not in _ids(level=1)
    assert set(_ids(level=1)) < set(_ids(level=2)) < set(_ids(level=3))
    assert "test.deep" in _ids(level=2)
    assert _ids(level=1, only=("test.deep",)) == ["test.deep"], "a check asked for by its id is run"
    assert _ids(level=1, only=("test",)) == [], "a domain is run as far as the level goes"


def test_what_was_not_checked_is_said() -> None:
    cpu = preflight.not_checked(profile("cpu-tiny"), machine("ubuntu2404-ready"), 1)
    assert any("pack.digests" in line and "--level 2" in line for line in cpu)
    assert not any("GPU" in line or "clock" in line for line in cpu)
    gpu = preflight.not_checked(profile("v100-pp2tp4"), machine("v100-8x-serving-ready"), 1)
    assert any("gpu.peer-copy" in line and "--level 3" in line for line in gpu)
    assert any("under load" in line for line in gpu)
    assert any("nothing was run here on the real card" in line for line in gpu)
    deep = preflight.not_checked(profile("v100-pp2tp4"), machine("v100-8x-serving-ready"), 3)
    assert not any("--level" in line for line in deep)
    blind = changed(machine("v100-8x-serving-ready"), topology=None)
    assert any("nvidia-smi is not installed" in line for line in preflight.not_checked(profile("v100-pp2tp4"), blind))
    boxed = preflight.not_checked(profile("cpu-tiny"), changed(machine("ubuntu2404-ready"), "system", container="lxc"))
    assert any("container" in line for line in boxed)
    assert all("\n" not in line for line in (*cpu, *gpu, *boxed))


def test_every_finding_says_how_long_it_took() -> None:
    findings = preflight.run(profile("v100-pp2tp4"), machine("v100-8x-serving-ready"))
    assert all(finding.seconds is not None and finding.seconds < 1 for finding in findings)
