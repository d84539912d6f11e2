"""A restart: a real process in a real tmux pane is ended and started again, and serves whatever happens in between."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds41ctl.adapters import proc, running
from ds41ctl.adapters.running import Running
from ds41ctl.core.errors import ConfigError, EngineDiedError, NotFoundError, UnsupportedError
from ds41ctl.core.layout import Dirs, Layout, layout
from ds41ctl.core.settings import Settings
from ds41ctl.steps import restart, stop
from ds41ctl.steps.restart import Restart
from ds41ctl.steps.serve import Serve
from tests.fakes.profiles import least_profile

# answers /health and one token; while the file STOP_HERE exists it ends at once
ENGINE = """
import json, pathlib, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
broken = pathlib.Path(sys.argv[1])
if broken.exists():
    count = int(broken.read_text())
    broken.write_text(str(count - 1)) if count > 1 else broken.unlink()
    sys.exit(3)
class Handler(BaseHTTPRequestHandler):
    def say(self, body):
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        self.say(b"")
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.say(json.dumps({"usage": {"completion_tokens": 1}}).encode())
    def log_message(self, *args):
        pass
HTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
"""


@pytest.fixture
def where(tmp_path: Path) -> Iterator[Layout]:
    base = least_profile(gpus=0)
    argv = ("${python}", "-c", ENGINE, str(tmp_path / "broken"), "${port}")
    serve = base.serve.model_copy(update={"argv": argv, "stall_timeout_s": 60.0, "ready_timeout_s": 60.0})
    profile = base.model_copy(update={"serve": serve})
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    dirs = Dirs(tmp_path / "data", tmp_path / "state", tmp_path / "cache", tmp_path / "run", os.getuid())
    (tmp_path / "pack").mkdir()
    settings = Settings.model_validate({"port": port, "python": sys.executable, "model": str(tmp_path / "pack")})
    made = layout(profile, settings, dirs, may_mount=False)
    yield made
    record = running.read(made.record_path)
    if record is not None:
        stop.end(made, record)


def silent(text: str, data: dict[str, Any]) -> None:
    """No progress."""


def started(where: Layout) -> Running:
    Serve(where, Path("fake.toml"), os.environ).do(silent)
    return now(where)


def now(where: Layout) -> Running:
    record = running.read(where.record_path)
    assert record is not None
    return record


def step(where: Layout) -> Restart:
    return Restart(where, Path("fake.toml"), os.environ)


def serves(where: Layout) -> bool:
    return Serve(where, Path("fake.toml"), os.environ).check().reached


def test_the_same_engine_serves_again_as_another_process(where: Layout) -> None:
    before = started(where)
    again = step(where)
    assert not again.check().reached
    again.do(silent)
    after = now(where)
    assert again.check().reached and serves(where) and again.differs == ""
    assert after.argv == before.argv and after.pid != before.pid and not before.identity.alive()


def test_an_engine_that_does_not_come_back_at_once_is_started_a_second_time(where: Layout, tmp_path: Path) -> None:
    started(where)
    (tmp_path / "broken").write_text("1")
    said: list[str] = []
    step(where).do(lambda text, data: said.append(text))
    assert serves(where) and any("did not come back" in text for text in said)


def test_one_that_never_comes_back_is_named_stopped_with_the_way_on(where: Layout, tmp_path: Path) -> None:
    started(where)
    (tmp_path / "broken").write_text("2")
    with pytest.raises(EngineDiedError, match="did not come back after the restart and is stopped") as caught:
        step(where).do(silent)
    assert "ds41ctl serve --profile fake" in caught.value.hints and running.read(where.record_path) is None
    started(where)


def test_an_interrupt_while_it_ends_is_heard_once_it_serves_again(
    where: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, real, calls = started(where), stop.end, []

    def interrupted(place: Layout, record: Running, **more: Any) -> stop.Stopped:
        calls.append(record)
        if len(calls) == 1:  # as Ctrl-C in the middle of it: some processes are gone already
            proc.terminate([record.identity], grace=5.0)
            raise KeyboardInterrupt
        return real(place, record, **more)

    monkeypatch.setattr(restart.stop, "end", interrupted)
    with pytest.raises(KeyboardInterrupt):
        step(where).do(silent)
    monkeypatch.undo()
    assert serves(where) and now(where).pid != before.pid


def test_what_cannot_be_restarted_as_it_was_is_refused_and_left_alone(where: Layout, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="not started by this ds41ctl"):
        step(where).refuse()
    before = started(where)
    (tmp_path / "other").mkdir()
    serve = where.profile.serve
    other = where.profile.model_copy(update={"serve": serve.model_copy(update={"argv": (*serve.argv, "--more")})})
    env = where.profile.model_copy(update={"serve": serve.model_copy(update={"env": {"VLLM_X": "1"}})})
    for changed, what in ((other, "another command line"), (env, "other values of VLLM_X")):
        with pytest.raises(ConfigError, match=what):
            step(replace(where, profile=changed)).do(silent)
    assert now(where) == before and before.alive()


def test_an_engine_that_a_terminal_holds_is_not_taken_from_it(where: Layout) -> None:
    holder = Serve(where, Path("fake.toml"), os.environ, foreground=True)
    holder.do(silent)
    with pytest.raises(UnsupportedError, match="held by a terminal"):
        step(where).refuse()
    assert now(where).alive()
    stop.end(where, now(where))
