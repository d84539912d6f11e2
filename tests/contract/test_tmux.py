"""tmux for real: a private server that keeps how its command ended, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds41ctl.adapters import distro, proc, tmux
from ds41ctl.core.errors import UnsupportedError


@pytest.fixture
def socket(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "run" / "x.sock"
    yield path
    tmux.kill(path)


def ended(socket: Path) -> tmux.Pane:
    for _ in range(100):
        pane = tmux.read(socket)
        assert pane is not None
        if pane.dead:
            return pane
        time.sleep(0.05)
    raise AssertionError("the pane did not end in 5 s")


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_the_exit_status_is_kept(socket: Path) -> None:
    tmux.start(socket, "s", python("raise SystemExit(7)"))
    pane = ended(socket)
    assert (pane.status, pane.signal, pane.ending()) == (7, None, "exit status 7")


def test_the_killing_signal_is_kept(socket: Path) -> None:
    pane = tmux.start(socket, "s", python("import time; time.sleep(60)"))
    os.kill(pane.pid, signal.SIGKILL)
    assert ended(socket).ending() == "signal 9"


def test_arguments_with_blanks_quotes_and_dollars_arrive_whole(socket: Path, tmp_path: Path) -> None:
    out, odd = tmp_path / "out", "a b'c\"$HOME;`id`\\"
    tmux.start(socket, "s", [*python("import sys; open(sys.argv[1], 'w').write(sys.argv[2])"), str(out), odd])
    ended(socket)
    assert out.read_text() == odd


def test_the_socket_lies_in_a_private_folder(socket: Path) -> None:
    tmux.start(socket, "s", python("import time; time.sleep(60)"))
    assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700


def test_kill_leaves_no_socket_config_server_or_command(socket: Path) -> None:
    pane = tmux.start(socket, "s", python("import time; time.sleep(60)"))
    identity = proc.identify(pane.pid)
    assert identity is not None
    tmux.kill(socket)
    for _ in range(100):
        if not identity.alive():
            break
        time.sleep(0.05)
    assert not identity.alive() and list(socket.parent.iterdir()) == [] and tmux.read(socket) is None


def test_reading_without_a_server_is_none(socket: Path) -> None:
    assert tmux.read(socket) is None
    socket.parent.mkdir()
    socket.touch()  # left by a crash
    assert tmux.read(socket) is None


def test_a_callers_own_tmux_session_is_left_alone(socket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMUX", "/nowhere,1,0")
    assert not tmux.start(socket, "s", python("import time; time.sleep(60)")).dead


def test_without_tmux_the_fix_is_the_line_of_this_distribution(socket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distro, "os_ids", lambda release: ("rocky", "rhel"))
    monkeypatch.setenv("PATH", str(socket.parent))
    with pytest.raises(UnsupportedError, match="tmux is not installed") as caught:
        tmux.start(socket, "s", ["true"])
    assert caught.value.hints[0].endswith("dnf install -y tmux")
