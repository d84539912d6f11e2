"""Every row of the silent-fault matrix: injected, seen by its check, named; and a healthy engine trips none."""

from __future__ import annotations

import pytest

import smoke
from ds41ctl.adapters.http import EngineClient
from ds41ctl.core.finding import Status
from smoke.soak_judge import judge
from tests.fakes.profiles import least_profile
from tests.fakes.soak_traces import Script, trace
from tests.fakes.sse_server import FakeEngine, ScriptedServer
from tests.silent_faults import CANARIES, MATRIX, SOAK, Drafts, SilentFault


@pytest.mark.parametrize("row", MATRIX, ids=[row.fault for row in MATRIX])
def test_the_fault_is_seen_and_named(row: SilentFault) -> None:
    finding = row.find()
    assert finding.id == row.detected
    assert finding.status in (Status.FAIL, Status.WARN, Status.UNKNOWN), finding
    said = " ".join((finding.summary, finding.found, finding.why))
    assert row.says in said, said
    assert finding.fix


def test_without_a_fault_none_of_these_checks_says_anything() -> None:
    profile = least_profile(drafter=True, soak=SOAK, image_tokens_max=1024)
    with ScriptedServer(FakeEngine(CANARIES)) as server:
        findings = smoke.run(EngineClient(server.url), CANARIES, profile, level="full", deadline_s=60)
    with ScriptedServer(FakeEngine(CANARIES, quirks={"metrics": Drafts(200, 180)})) as server:
        findings += smoke.run(EngineClient(server.url), CANARIES, profile, only=("drafter",))
    findings += judge(trace(Script(gpus=2, drafter=0.8, first=0.9)), profile).findings
    checks = {row.detected for row in MATRIX}
    told = {item.id: item.status for item in findings}
    assert checks <= set(told)
    assert {told[name] for name in checks} == {Status.OK}, told


def test_the_matrix_has_its_size_and_each_row_is_another_fault() -> None:
    assert len(MATRIX) >= 24
    assert len({row.fault for row in MATRIX}) == len(MATRIX)
