"""The API's key reaches the engine from every command that asks it, and no other machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ds41ctl.adapters import proc, running, store
from ds41ctl.adapters.pack import recipe_folder
from ds41ctl.cli import live
from ds41ctl.cli.session import Session, open_session
from smoke import bench, canaries
from tests.fakes.profiles import without_speed
from tests.fakes.sse_server import FakeEngine, Request, Script, ScriptedServer, whole

KEY, OTHER = "k" * 40, "o" * 40
ROOT = Path(__file__).parents[2]


class Locked(FakeEngine):
    """An engine started with --api-key: without it everything below /v1 is 401, as vLLM answers."""

    def __call__(self, request: Request) -> Script:
        if request.path.startswith("/v1") and request.headers.get("authorization") != f"Bearer {KEY}":
            return [whole(b'{"error":"Unauthorized"}', status=401)]
        return super().__call__(request)


def key_file(folder: Path, key: str) -> Path:
    path = folder / f"key-{key[0]}"
    path.write_text(key + "\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {
        "DS41_STATE_DIR": str(tmp_path / "state"),
        "DS41_DATA_DIR": str(tmp_path / "data"),
        "DS41_PROFILE": str(without_speed(tmp_path)),
        "DS41_API_KEY_FILE": str(key_file(tmp_path, KEY)),
    }


@pytest.fixture
def session(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Session:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return open_session(None)


def test_a_key_goes_to_this_machine_only(session: Session) -> None:
    assert live.look(session, None).key == KEY
    assert live.look(session, "http://127.0.0.1:9999").key == KEY
    assert live.look(session, "http://192.0.2.1:8011").key is None
    assert KEY not in repr(live.look(session, None)) and KEY not in repr(live.client(session))


def test_the_key_an_engine_was_started_with_outranks_that_of_this_shell(session: Session, tmp_path: Path) -> None:
    started_with = key_file(tmp_path, OTHER)
    identity = proc.identify(os.getpid())
    assert identity is not None
    record = running.Running(
        profile="cpu-tiny", profile_path="x", profile_digest="", engine_digest="", boot_id=store.boot_id(),
        pid=identity.pid, start_ticks=identity.start_ticks, marker="NO=match", host="127.0.0.1",
        port=session.layout.port, served_name="x", argv=(), environment_sha256="", log="", socket="",
        spec="", started_at="", api_key_file=str(started_with),
    )  # fmt: skip
    running.write(session.layout.record_path, record)
    assert live.look(session, None).key == OTHER and live.client(session).key == OTHER


def test_a_soak_and_a_bench_pass_an_engine_that_asks_for_its_key(
    tmp_path: Path, environment: dict[str, str], session: Session
) -> None:
    with ScriptedServer(Locked(canaries.load(recipe_folder("tiny-v41")), token_s=0.005)) as server:
        argv = [sys.executable, "-m", "ds41ctl", "soak", "run", "--minutes", "0.1", "--target", server.url]
        said = subprocess.run(argv, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
        assert "soak.errors" not in said.stdout and said.returncode in (0, 3), said
        target = bench.Target(url=server.url, profile=session.profile, key=live.look(session, server.url).key)
        rows = bench.run(target, parts=("decode",), suites=("structured",))
        assert rows and all(row.value is not None for row in rows), rows
        asked = [item for item in server.requests if item.path.startswith("/v1")]
        assert asked and all(item.headers.get("authorization") == f"Bearer {KEY}" for item in asked)
