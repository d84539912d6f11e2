"""Report and journal: what a run amounts to comes from its events alone, and survives half a line."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds41ctl.adapters.journal import KEEP, Journal, read_events
from ds41ctl.core.errors import IntegrityError
from ds41ctl.core.event import Event
from ds41ctl.core.finding import Finding, Status
from ds41ctl.core.report import fold
from ds41ctl.steps.runner import Goal, Progress, Runner


class Scripted:
    """A step that reaches its goal when done, unless told otherwise."""

    name = "thing"

    def __init__(self, *, reached: bool = False, works: bool = True, error: Exception | None = None) -> None:
        self.reached, self.works, self.error, self.done = reached, works, error, 0

    def check(self) -> Goal:
        return Goal(self.reached, "there" if self.reached else "not there")

    def do(self, progress: Progress) -> None:
        self.done += 1
        progress("half way", {"bytes": 1, "total": 2})
        if self.error:
            raise self.error
        self.reached = self.works


def run_one(folder: Path, step: Scripted, code: int = 0) -> list[Event]:
    journal = Journal(folder)
    runner = Runner(journal, lambda event: None, command="up", profile="p", digest="d")
    try:
        runner.step(step)
    finally:
        runner.close(code)
    return read_events(journal.folder / "events.jsonl")[0]


def test_a_step_whose_goal_is_reached_does_nothing_and_says_already(tmp_path: Path) -> None:
    step = Scripted(reached=True)
    report = fold(run_one(tmp_path, step))
    assert step.done == 0 and report.steps[0].state == "already" and report.verdict == "ok"


def test_a_step_is_verified_after_it_was_done(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="its goal is not reached: not there"):
        run_one(tmp_path, Scripted(works=False), code=70)
    events, broken = read_events(tmp_path / "latest" / "events.jsonl")
    report = fold(events)
    assert broken == 0 and report.steps[0].state == "fail" and report.verdict == "failed" and report.exit_code == 70


def test_a_steps_own_error_is_journalled_with_its_message(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError):
        run_one(tmp_path, Scripted(error=IntegrityError("bad bytes")), code=12)
    report = fold(read_events(tmp_path / "latest" / "events.jsonl")[0])
    assert report.steps[0].text == "bad bytes" and report.exit_code == 12


def test_a_run_that_was_killed_is_interrupted_and_its_open_step_has_no_state(tmp_path: Path) -> None:
    events = run_one(tmp_path, Scripted())
    report = fold(event for event in events if event.type not in ("run.done", "step.done"))
    assert report.verdict == "interrupted" and report.steps[0].state is None


def test_a_line_cut_by_a_full_disk_is_skipped_and_counted(tmp_path: Path) -> None:
    run_one(tmp_path, Scripted())
    path = (tmp_path / "latest").resolve() / "events.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:-1], lines[-1][: len(lines[-1]) // 2]]))
    events, broken = read_events(path)
    assert broken == 1 and len(events) == len(lines) - 1


def test_the_newest_run_is_linked_and_old_ones_are_removed(tmp_path: Path) -> None:
    for _ in range(KEEP + 3):
        Journal(tmp_path).close(0)
    folders = [path for path in tmp_path.iterdir() if path.is_dir() and not path.is_symlink()]
    assert len(folders) == KEEP
    assert (tmp_path / "latest" / "events.jsonl").is_file()


def test_findings_reach_the_report(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    finding = Finding(id="a.b", status=Status.UNKNOWN, summary="s", expected="e", found="f", fix=("x",))
    journal.emit("run.start", data={"command": "preflight", "profile": "p"})
    journal.emit("finding", finding=finding)
    journal.close(1)
    assert fold(read_events(journal.folder / "events.jsonl")[0]).findings == (finding,)


def test_events_that_are_no_run_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no run\.start"):
        fold([])


@pytest.mark.parametrize(
    ("status", "normal", "strict"),
    [
        (Status.OK, False, False),
        (Status.SKIP, False, False),
        (Status.WARN, False, True),
        (Status.UNKNOWN, False, True),
        (Status.FAIL, True, True),
        (Status.CRASH, True, True),
    ],
)
def test_strict_makes_warnings_and_the_unknown_fail(status: Status, normal: bool, strict: bool) -> None:
    finding = Finding(id="a.b", status=status, summary="s")
    assert finding.failed() is normal and finding.failed(strict=True) is strict
