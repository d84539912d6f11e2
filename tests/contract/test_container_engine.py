"""A container engine from start to stop, against a runtime that plays every state a daemon can be in."""

from __future__ import annotations

import difflib
import hashlib
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import preflight
import smoke
from ds41ctl.adapters import containers, enginevenv, probe, proc, profiles, running, storeplace, supply
from ds41ctl.adapters.http import EngineClient
from ds41ctl.adapters.supply import Supply
from ds41ctl.core import watch
from ds41ctl.core.errors import (
    AlreadyRunningError,
    ConfigError,
    EngineDiedError,
    FindingsError,
    IntegrityError,
    NetworkError,
    NoSpaceError,
    NotFoundError,
    UnsupportedError,
)
from ds41ctl.core.facts import CdiSpec, ContainerFacts
from ds41ctl.core.finding import Status
from ds41ctl.core.launch import Machine, launch
from ds41ctl.core.layout import Dirs, Layout, layout
from ds41ctl.core.profile import BuildPatch
from ds41ctl.core.settings import Settings
from ds41ctl.steps import engram, live, stop
from ds41ctl.steps import serve as serving
from ds41ctl.steps.engine import EngineInstall, verify
from ds41ctl.steps.engram import EngramBuild
from ds41ctl.steps.serve import Serve
from ds41ctl.steps.watchdog import Watchdog
from smoke.canaries import generate
from tests.facts.replay import machine
from tests.fakes.containers import GOOD_LOG, FakeRuntime
from tests.fakes.packs import local_profile, write_pack
from tests.fakes.profiles import least_profile

pytestmark = pytest.mark.timeout(120)


def silent(text: str, data: dict[str, Any]) -> None:
    """Nobody looks."""


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRuntime]:
    made = FakeRuntime(tmp_path / "runtime").install()
    monkeypatch.setenv("PATH", f"{made.bin}:{os.environ['PATH']}")
    yield made
    made.end()


@pytest.fixture
def where(tmp_path: Path) -> Iterator[Layout]:
    """The recipe's profile, less what this machine has not: its store, its tables."""
    profile = profiles.read(profiles.find("cmp170hx-tp4"))
    profile = profile.model_copy(
        update={
            "engram": profile.engram.model_copy(update={"storage": "none"}),
            "serve": profile.serve.model_copy(update={"stall_timeout_s": 4.0}),
        }
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    dirs = Dirs(tmp_path / "data", tmp_path / "state", tmp_path / "cache", tmp_path / "run", os.getuid())
    made = layout(profile, Settings.model_validate({"port": port}), dirs, may_mount=False)
    made.model_dir.mkdir(parents=True)
    yield made
    record = running.read(made.record_path)
    if record is not None:
        stop.end(made, record)


def started(where: Layout) -> tuple[Serve, running.Running]:
    step = Serve(where, Path("cmp.toml"), os.environ)
    step.do(silent)
    record = running.read(where.record_path)
    assert record is not None
    return step, record


def test_the_container_is_started_with_the_plans_words_proven_ready_and_removed(
    runtime: FakeRuntime, where: Layout
) -> None:
    step, record = started(where)
    run = next(call for call in runtime.calls if call[1] == "run")
    planned = launch(where, Machine(engine_digest="1" * 64, runtime="docker"), run[run.index("-v") + 3].split(":")[0])
    assert tuple(run) == planned.argv == record.argv
    assert record.ready_at and record.container == runtime.held[0]["Id"] and record.pid == runtime.held[0]["pid"]
    assert step.check().reached
    assert "Built engram token map" in Path(record.log).read_text()
    done = stop.end(where, record)
    assert done.was_alive and runtime.held == [] and running.read(where.record_path) is None
    assert not where.socket_path.exists()


def test_a_key_reaches_the_container_by_a_private_file(runtime: FakeRuntime, where: Layout, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("s" * 40)
    key.chmod(0o600)
    keyed = Layout(**{**where.__dict__, "api_key_file": key})
    started(keyed)
    file = keyed.dirs.runtime / "cmp170hx-tp4.env"
    assert file.read_text() == f"VLLM_API_KEY={'s' * 40}\n" and file.stat().st_mode & 0o077 == 0
    assert not any("s" * 40 in word for call in runtime.calls for word in call)


RUN_ERRORS = {
    "cdi": "docker: Error response from daemon: failed to inject CDI devices: unresolvable CDI devices "
    "nvidia.com/gpu=all: unknown",
    "container-gpu": "docker: Error response from daemon: could not select device driver with capabilities: [[gpu]].",
    "container-port": "docker: Error response from daemon: driver failed programming external connectivity: "
    "Bind for 127.0.0.1:8011 failed: port is already allocated.",
    "container-image": "Unable to find image 'ds41:1' locally\ndocker: Error response from daemon: pull access denied",
    "container-permission": "permission denied while trying to connect to the Docker daemon socket at unix:///x",
}


@pytest.mark.parametrize("name", RUN_ERRORS)
def test_a_container_that_is_not_started_is_named_with_its_fix_and_leaves_nothing(
    runtime: FakeRuntime, where: Layout, name: str
) -> None:
    runtime.play(run_error=RUN_ERRORS[name], leaves_created=True)
    with pytest.raises(EngineDiedError, match="docker did not start the container") as failed:
        started(where)
    assert failed.value.hints and failed.value.detail
    assert runtime.held == [] and running.read(where.record_path) is None


def test_a_missing_cdi_device_gives_the_command_that_makes_the_specification(
    runtime: FakeRuntime, where: Layout
) -> None:
    runtime.play(run_error=RUN_ERRORS["cdi"])
    with pytest.raises(EngineDiedError, match=r"knows no device nvidia\.com/gpu=all") as failed:
        started(where)
    assert failed.value.hints == ("sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml",)


@pytest.mark.parametrize(
    ("scene", "message"),
    [
        ({"dies_with": 1, "state": {"ExitCode": 137, "OOMKilled": True}}, "reached its memory limit"),
        ({"dies_with": 1, "state": {"ExitCode": 3}}, r"exit status 3\): a fault that ds41ctl does not know"),
        ({"restarts": 2, "policy": "always"}, "starts it again and again .restart policy always"),
        ({"state": {"Status": "paused"}, "state_while_running": True}, "state 'paused'"),
        ({"log": [], "silent": True}, "stood still for"),
        ({"log": [*GOOD_LOG[:4], *GOOD_LOG[5:]]}, r"lacks 'Built engram token map .* \(4 times\)"),
        ({"log": [*GOOD_LOG, "Engram table offloaded to pinned host memory"]}, "offloaded to pinned"),
        ({"log": [line.replace("2,717,420", "2,417,392") for line in GOOD_LOG]}, "holds 2,417,392 tokens"),
        ({"log": [*GOOD_LOG, "x; setting cudagraph_mode=NONE"]}, "CUDA graphs are NONE, FULL_AND_PIECEWISE expected"),
        ({"log": [*GOOD_LOG[:-1]]}, "does not say that the graphs of FULL_AND_PIECEWISE were captured"),
    ],
)
def test_a_container_that_dies_or_is_not_what_the_profile_says_is_named_and_removed(
    runtime: FakeRuntime, where: Layout, scene: dict[str, Any], message: str
) -> None:
    runtime.play(**scene)
    with pytest.raises(EngineDiedError, match=message):
        started(where)
    assert runtime.held == [] and running.read(where.record_path) is None


def test_a_container_removed_behind_our_back_is_named(runtime: FakeRuntime, where: Layout) -> None:
    runtime.play(log=["INFO 11-29 10:00:00 loading"], silent=True)
    failures: list[Exception] = []

    def start() -> None:
        try:
            Serve(where, Path("cmp.toml"), os.environ).do(silent)
        except EngineDiedError as error:
            failures.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    while not (runtime.held and (record := running.read(where.record_path)) and record.pid):
        time.sleep(0.05)
    began, pid = time.monotonic(), runtime.held[0]["pid"]
    runtime.remove_all()
    thread.join(30)
    os.kill(pid, 9)
    assert time.monotonic() - began < 5
    assert failures and "its container was removed" in str(failures[0])


def test_somebody_elses_container_of_that_name_is_refused_and_never_touched(
    runtime: FakeRuntime, where: Layout
) -> None:
    runtime.add("ds41-flash", datetime.now(UTC).isoformat())
    with pytest.raises(AlreadyRunningError, match="ds41ctl did not start it"):
        started(where)
    assert len(runtime.held) == 1


def cut_off(where: Layout, started_at: datetime) -> running.Running:
    """The record of a start that was killed between asking for the container and learning its id."""
    step = Serve(where, Path("cmp.toml"), os.environ)
    planned = launch(where, Machine(runtime="docker"), "/engram")
    record, _ = step._prepare(planned)
    record = record.model_copy(
        update={"container": "ds41-flash", "runtime": "docker", "started_at": started_at.isoformat()}
    )
    running.write(where.record_path, record)
    return record


def test_a_start_cut_off_before_it_knew_its_container_is_cleared_by_stop(runtime: FakeRuntime, where: Layout) -> None:
    record = cut_off(where, datetime.now(UTC) - timedelta(seconds=5))
    runtime.add("ds41-flash", datetime.now(UTC).isoformat())
    stop.end(where, record)
    assert runtime.held == [] and running.read(where.record_path) is None


def test_an_older_container_of_that_name_is_not_taken_for_it(runtime: FakeRuntime, where: Layout) -> None:
    record = cut_off(where, datetime.now(UTC))
    runtime.add("ds41-flash", (datetime.now(UTC) - timedelta(hours=1)).isoformat())
    stop.end(where, record)
    assert len(runtime.held) == 1


def test_a_container_that_cannot_be_removed_is_what_stop_says_is_left(runtime: FakeRuntime, where: Layout) -> None:
    _, record = started(where)
    runtime.play(rm_fails=True)
    with pytest.raises(FindingsError) as failed:
        stop.end(where, record)
    assert any("cannot be removed" in text for text in failed.value.detail)
    assert running.read(where.record_path) is not None
    runtime.play(rm_fails=False)
    stop.end(where, record)


def test_a_daemon_that_is_down_is_said_to_be_down(runtime: FakeRuntime, where: Layout) -> None:
    runtime.play(down="Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the daemon running?")
    with pytest.raises((UnsupportedError, NotFoundError)):
        started(where)
    with pytest.raises(UnsupportedError, match="docker does not answer: Cannot connect"):
        containers.state("docker", "ds41-flash")


def test_podman_is_used_where_there_is_no_docker(
    runtime: FakeRuntime, where: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    (runtime.bin / "docker").unlink()
    runtime.install("podman")
    monkeypatch.setattr(containers, "CLIENTS", ("podman",))
    _, record = started(where)
    assert record.argv[0] == record.runtime == "podman" and runtime.calls[-1][0] == "podman"


def test_a_restart_policy_is_refused_before_anything_is_started(runtime: FakeRuntime, where: Layout) -> None:
    serve = where.profile.serve.model_copy(update={"argv": ("docker", "run", "--restart", "always")})
    careless = Layout(**{**where.__dict__, "profile": where.profile.model_copy(update={"serve": serve})})
    with pytest.raises(ConfigError, match="--restart always"):
        started(careless)
    assert not any(call[1] == "run" for call in runtime.calls)


def test_the_foreground_is_refused_for_a_container(runtime: FakeRuntime, where: Layout) -> None:
    with pytest.raises(UnsupportedError, match="no foreground"):
        Serve(where, Path("cmp.toml"), os.environ, foreground=True).do(silent)


def test_an_image_that_is_not_there_is_not_pulled_by_a_start(runtime: FakeRuntime, where: Layout) -> None:
    runtime.play(images={})
    with pytest.raises(NotFoundError, match="no image ds41-cmp170hx") as failed:
        started(where)
    assert failed.value.hints == ("ds41ctl engine install",)
    assert not any(call[1] in ("run", "pull") for call in runtime.calls)


def test_the_engine_is_held_by_its_container(runtime: FakeRuntime, where: Layout) -> None:
    _, record = started(where)
    holder = serving.holder_of(where, record)
    assert holder.ending() is None and record.alive()
    os.kill(record.pid, 9)
    for _ in range(100):
        if holder.ending() is not None:
            break
        time.sleep(0.05)
    assert holder.ending() == "exit status 1" and not record.alive()


# ---- the tables reach the engine that is launched
def with_tables(where: Layout, root: Path, runtime: FakeRuntime, form: str = "shards", **scene: Any) -> Layout:
    """The recipe's profile with its own [engram], on small tables, in a memory filesystem that is there."""
    shipped = profiles.read(profiles.find("cmp170hx-tp4"))
    found = write_pack(where.model_dir)
    folder = Path(f"/dev/shm/ds41ctl-test-{os.getpid()}-{root.name}")
    engram = shipped.engram.model_copy(update={"dir": str(folder), "size_gib": 0, "format": form})
    profile = local_profile(where.profile, found, engram=engram)
    runtime.play(layers=list(found.layers), **scene)
    return Layout(**{**where.__dict__, "profile": profile, "store_dirs": (folder,), "own_store_dir": True})


@pytest.fixture
def tables(where: Layout, runtime: FakeRuntime, tmp_path: Path) -> Iterator[Layout]:
    made = with_tables(where, tmp_path, runtime, engram="ssd")
    yield made
    record = running.read(made.record_path)
    if record is not None:
        stop.end(made, record)
    storeplace.release(made)
    shutil.rmtree(made.store_dirs[0], ignore_errors=True)


def test_a_store_of_shards_is_what_the_engine_reads(runtime: FakeRuntime, tables: Layout) -> None:
    EngramBuild(tables).do(silent)
    _, record = started(tables)
    run = next(call for call in runtime.calls if call[1] == "run")
    assert f"{tables.store_dirs[0]}:/engram:ro" in run and record.ready_at
    assert live.collect(tables)["engram"] == f"{tables.store_dirs[0]}, mounted into the container"
    assert copies(record)
    for taken in (EngramBuild(tables).do, lambda silent: engram.drop(tables)):
        with pytest.raises(AlreadyRunningError, match="reads the Engram store"):
            taken(silent)
    stop.end(tables, record)
    assert engram.drop(tables) and not list(tables.store_dirs[0].iterdir())


def copies(record: running.Running) -> bool:
    """The smoke test of copies, asked of the engine that runs."""
    asked = generate(5, copies=8, needle_tokens=300, images=0)
    found = smoke.run(EngineClient(record.url), asked, least_profile(copies=8), only=("copy",), deadline_s=30)
    return found[0].status is Status.OK


def test_the_records_of_our_own_engine_are_no_start_for_it(runtime: FakeRuntime, tables: Layout) -> None:
    form = tables.profile.engram.model_copy(update={"format": "records"})
    records = Layout(**{**tables.__dict__, "profile": tables.profile.model_copy(update={"engram": form})})
    EngramBuild(records).do(silent)
    with pytest.raises(EngineDiedError, match="the engine died") as failed:
        started(records)
    assert any("model.safetensors.index.json" in line for line in failed.value.detail)
    check = next(item for item in preflight.ALL if item.id == "engram.storage")
    found = check.run(records.profile, machine("cmp170hx-4x-ready"), "serve")
    assert found.status is Status.FAIL and 'format = "shards"' in found.fix[0]
    storeplace.release(records)


def test_without_a_store_nothing_is_started(runtime: FakeRuntime, tables: Layout) -> None:
    with pytest.raises(IntegrityError, match="no Engram store"):
        started(tables)
    assert not any(call[1] == "run" for call in runtime.calls)


def test_a_shard_gone_from_the_mounted_folder_is_refused_before_the_container(
    runtime: FakeRuntime, tables: Layout
) -> None:
    EngramBuild(tables).do(silent)
    (tables.store_dirs[0] / tables.profile.model.engram[1].shard).unlink()
    with pytest.raises(IntegrityError, match="is missing or has not the"):
        started(tables)
    assert not any(call[1] == "run" for call in runtime.calls)


def test_an_engine_that_reserves_its_tables_and_goes_on_is_caught_by_the_marker(
    runtime: FakeRuntime, tables: Layout
) -> None:
    EngramBuild(tables).do(silent)
    runtime.play(engram="host")
    with pytest.raises(EngineDiedError, match="offloaded to pinned"):
        started(tables)


def test_one_that_says_nothing_of_it_is_caught_by_its_copies(runtime: FakeRuntime, tables: Layout) -> None:
    EngramBuild(tables).do(silent)
    runtime.play(engram="mute")
    _, record = started(tables)
    assert record.ready_at and not copies(record)


# ---- the watchdog on such an engine
def test_a_death_is_named_at_once_and_the_engine_started_again_within_its_bound(
    runtime: FakeRuntime, where: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "BACKOFF_S", (0.1,))
    _, record = started(where)
    told: list[str] = []
    dog = Watchdog(where, Path("cmp.toml"), most=1, every_s=0.1)
    states, kills = [], 0
    for state, _ in dog.states(told.append):
        if not states or states[-1] != state:
            states.append(state)
        now = running.read(where.record_path)
        if state == "ready" and now is not None and kills < 2:
            os.kill(now.pid, 9)
            kills, killed = kills + 1, time.monotonic()
        elif state == "dead":
            assert time.monotonic() - killed < 5
    assert states == ["ready", "dead", "ready", "dead"]
    assert "restarted, and proven ready again" in told and "the bound" in told[-1]
    now = running.read(where.record_path)
    assert now is not None and now.container != record.container and len(runtime.held) == 1


def test_without_a_policy_a_dead_engine_ends_the_watch_and_a_stopped_one_too(
    runtime: FakeRuntime, where: Layout
) -> None:
    _, record = started(where)
    os.kill(record.pid, 9)
    time.sleep(0.2)
    told: list[str] = []
    assert [state for state, _ in Watchdog(where, Path("cmp.toml"), every_s=0.1).states(told.append)] == ["dead"]
    stop.end(where, record)
    assert list(Watchdog(where, Path("cmp.toml")).states(told.append)) == [] and "was stopped" in told[-1]


def test_status_of_a_container_engine_says_what_it_is_and_how_it_died(runtime: FakeRuntime, where: Layout) -> None:
    assert live.collect(where)["state"] == "stopped"
    _, record = started(where)
    tree = live.collect(where)
    assert tree["state"] == "ready" and tree["drift"] == [] and tree["container"] == record.container
    runtime.play(restarts=2, policy="always")
    assert live.collect(where)["drift"] == ["the container was restarted 2 times"]
    runtime.play(restarts=0, policy="no", state={"ExitCode": 137, "OOMKilled": True})
    os.kill(record.pid, 9)
    time.sleep(0.2)
    tree = live.collect(where)
    assert tree["state"] == "died" and "killed for memory" in tree["ending"] and "memory limit" in tree["meaning"]
    changed = where.profile.model_copy(update={"title": "another"})
    assert "the profile changed since the start" in live.drift(Layout(**{**where.__dict__, "profile": changed}), record)


# ---- installing such an engine
GPUS = CdiSpec(path="/etc/cdi/nvidia.yaml", kind="nvidia.com/gpu", devices=("0", "all"))


def installed(
    where: Layout,
    monkeypatch: pytest.MonkeyPatch,
    *specs: CdiSpec,
    checkout: Path | str | None = None,
    force: bool = False,
) -> list[str]:
    """Install; what it said on the way."""
    monkeypatch.setattr(containers, "cdi_specs", lambda root: specs)
    said: list[str] = []
    EngineInstall(where, os.environ, Supply(checkout=checkout), force=force).do(lambda text, data: said.append(text))
    return said


def test_an_image_that_is_there_is_written_down_with_its_licence_notice(
    runtime: FakeRuntime, where: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = EngineInstall(where, os.environ)
    assert not step.check().reached
    assert any("AGPL" in text for text in installed(where, monkeypatch, GPUS))
    assert step.check().reached
    tree = enginevenv.read_manifest(where.engine_dir)
    assert tree is not None and tree["image_id"] == "1" * 64 and "AGPL" in tree["notices"][0]
    runtime.play(images={"ds41-cmp170hx:1.2.0-fidelity": "sha256:" + "2" * 64})
    assert not step.check().reached  # another image under the same tag
    with pytest.raises(IntegrityError, match="222222222222, 111111111111 was installed"):
        installed(where, monkeypatch, GPUS)


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ((), r"no CDI specification names nvidia\.com/gpu=all"),
        ((GPUS.model_copy(update={"devices": ("0",)}),), "no CDI specification names"),
        ((GPUS.model_copy(update={"missing": ("/usr/lib/libcuda.so.570.1",)}),), "is of another driver"),
    ],
)
def test_a_missing_or_stale_cdi_specification_ends_the_install(
    runtime: FakeRuntime, where: Layout, monkeypatch: pytest.MonkeyPatch, specs: tuple[CdiSpec, ...], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message) as failed:
        installed(where, monkeypatch, *specs)
    assert "nvidia-ctk cdi generate" in failed.value.hints[0]


def git(folder: Path, *words: str) -> str:
    done = proc.run(
        ["git", "-C", str(folder), "-c", "user.name=x", "-c", "user.email=x@example.com", *words], timeout=30
    )
    assert done.ok, done.stderr
    return done.stdout.strip()


DOCKERFILE = "FROM base\nRUN first\nRUN second\nRUN third\n"
UPSTREAM = "dsv41-cmp170hx:1.2.0"
# as recipes do: a name of their own unless IMAGE says another
BUILDS = {
    "keeps IMAGE": f'#!/usr/bin/env bash\nset -euo pipefail\ndocker build -t "${{IMAGE:-{UPSTREAM}}}" docker\n',
    "names it itself": f"#!/bin/bash\nparts=(docker build)\n${{parts[@]}} -t {UPSTREAM} docker\n",
    "a name made up": '#!/bin/sh\nname=dsv41\ndocker build -t "$name-x:1" docker\n',
}


@pytest.fixture
def upstream(tmp_path: Path) -> Path:
    """The image's source: a bare repository whose tip is already past the commit that a profile would pin."""
    work, bare = tmp_path / "upstream", tmp_path / "upstream.git"
    (work / "docker").mkdir(parents=True)
    git(work, "init", "-q", "-b", "main")
    (work / "docker" / "Dockerfile").write_text(DOCKERFILE)
    (work / "docker" / "build.sh").write_text(BUILDS["names it itself"])
    git(work, "add", ".")
    git(work, "commit", "-qm", "1.2.0")
    git(work, "commit", "-q", "--allow-empty", "-m", "later")
    git(tmp_path, "clone", "-q", "--bare", str(work), str(bare))
    return bare


def built_from(
    where: Layout, repo: Path | str, revision: str = "", *, profile_repo: bool = True, **engine: Any
) -> Layout:
    """The recipe's profile with another source; `revision` '' is the commit before the tip."""
    pin = revision or git(Path(repo), "rev-parse", "main~1")
    update = {"build_repo": str(repo) if profile_repo else "", "build_revision": pin, "image_bytes": 1, **engine}
    profile = where.profile.model_copy(update={"engine": where.profile.engine.model_copy(update=update)})
    return Layout(**{**where.__dict__, "profile": profile})


@pytest.mark.parametrize("script", BUILDS)
def test_an_image_is_built_from_the_pinned_commit_and_ends_under_the_profiles_name_whatever_its_build_calls_it(
    runtime: FakeRuntime, where: Layout, monkeypatch: pytest.MonkeyPatch, upstream: Path, tmp_path: Path, script: str
) -> None:
    runtime.play(images={"other:1": "sha256:" + "7" * 64})
    work = tmp_path / "upstream"
    (work / "docker" / "build.sh").write_text(BUILDS[script])
    git(work, "commit", "-q", "--allow-empty", "-am", "script")
    git(work, "commit", "-q", "--allow-empty", "-m", "tip")
    git(work, "push", "-q", str(upstream), "main")
    pinned = built_from(where, upstream)
    installed(pinned, monkeypatch, GPUS)
    image = where.profile.engine.image
    tree = enginevenv.read_manifest(pinned.engine_dir)
    assert tree is not None and runtime.images[image] == "sha256:" + tree["image_id"] != "sha256:" + "7" * 64
    assert EngineInstall(pinned, os.environ).check().reached
    assert verify(pinned) == []
    # recorded, and judged from then on: another image under that name is no engine of ours
    runtime.play(images={**runtime.images, image: "sha256:" + "9" * 64})
    with pytest.raises(IntegrityError, match=r"is 999999999999, \w+ was installed"):
        installed(pinned, monkeypatch, GPUS)
    facts = ContainerFacts(runtime="docker", answers=True, image=image, image_id="sha256:" + "9" * 64)
    engine = probe._image(pinned, machine("cmp170hx-4x-ready").model_copy(update={"container": facts}))
    assert engine is not None and engine.drift
    assert "was installed" in verify(pinned)[0]
    # removed and built again it has another id, as images do, and that one is recorded
    runtime.play(images={}, salt="later")
    installed(pinned, monkeypatch, GPUS)
    assert EngineInstall(pinned, os.environ).check().reached
    assert enginevenv.read_manifest(pinned.engine_dir) != tree
    # made again, and without the repository: the commit was kept
    upstream.rename(upstream.with_name("gone"))
    installed(pinned, monkeypatch, GPUS, force=True)
    assert EngineInstall(pinned, os.environ).check().reached


def test_a_build_that_leaves_several_images_is_not_guessed_about(
    runtime: FakeRuntime, where: Layout, monkeypatch: pytest.MonkeyPatch, upstream: Path, tmp_path: Path
) -> None:
    runtime.play(images={})
    script = 'a=one\ndocker build -t "$a:1" docker\necho >> docker/Dockerfile\ndocker build -t "$a:2" docker\n'
    work = tmp_path / "upstream"
    (work / "docker" / "build.sh").write_text(script)
    git(work, "commit", "-qam", "script")
    git(work, "push", "-q", str(upstream), "main")
    pinned = built_from(where, upstream, git(work, "rev-parse", "HEAD"))
    with pytest.raises(NotFoundError, match=r"left 2 images \(one:1, one:2\)") as failed:
        installed(pinned, monkeypatch, GPUS)
    assert "docker tag" in failed.value.hints[0]
    image = where.profile.engine.image
    assert proc.run(["docker", "tag", "one:1", image], timeout=30).ok
    installed(pinned, monkeypatch, GPUS)
    assert EngineInstall(pinned, os.environ).check().reached


def test_a_profile_without_a_repository_is_built_from_a_checkout_that_holds_the_commit(
    runtime: FakeRuntime, where: Layout, monkeypatch: pytest.MonkeyPatch, upstream: Path, tmp_path: Path
) -> None:
    runtime.play(images={})
    pinned = built_from(where, upstream, profile_repo=False)
    with pytest.raises(NotFoundError, match="which repository") as failed:
        installed(pinned, monkeypatch, GPUS)
    assert "--checkout FOLDER" in failed.value.hints[0]
    assert "names no repository" in supply.look(pinned, Supply()).problem
    checkout = tmp_path / "upstream"
    (checkout / "docker" / "Dockerfile").write_text("FROM elsewhere\n")  # not the pinned tree: not what is built
    installed(pinned, monkeypatch, GPUS, checkout=checkout)
    assert EngineInstall(pinned, os.environ).check().reached
    assert next(iter(runtime.images.values())) == "sha256:" + hashlib.sha256(DOCKERFILE.encode()).hexdigest()
    assert (checkout / "docker" / "Dockerfile").read_text() == "FROM elsewhere\n"


@pytest.mark.parametrize(
    ("repo", "kind", "message"),
    [
        ("{bare}", NotFoundError, "0123456789ab cannot be fetched: .*not our ref"),
        ("{bare}-not-there", NotFoundError, "does not appear to be a git repository|does not exist"),
        ("http://127.0.0.1:9/owner/engine", NetworkError, "cannot be fetched"),
    ],
)
def test_a_commit_that_cannot_be_had_is_said_in_gits_words_and_leaves_nothing(
    runtime: FakeRuntime,
    where: Layout,
    monkeypatch: pytest.MonkeyPatch,
    upstream: Path,
    repo: str,
    kind: type[Exception],
    message: str,
) -> None:
    runtime.play(images={})
    pinned = built_from(where, repo.format(bare=upstream), "0123456789abcdef0123456789abcdef01234567")
    with pytest.raises(kind, match=message):
        installed(pinned, monkeypatch, GPUS)
    assert not any(call[1] == "build" for call in runtime.calls) and runtime.images == {}
    assert not list((where.dirs.cache / "sources").glob("*.git"))


def test_no_hook_and_no_habit_of_this_users_git_has_a_say(
    runtime: FakeRuntime, where: Layout, monkeypatch: pytest.MonkeyPatch, upstream: Path, tmp_path: Path, isolated: Path
) -> None:
    runtime.play(images={})
    hooks, marker = tmp_path / "hooks", tmp_path / "ran"
    hooks.mkdir()
    for name in ("post-checkout", "reference-transaction"):
        (hooks / name).write_text(f"#!/bin/sh\ntouch {marker}\n")
        (hooks / name).chmod(0o755)
    (isolated / ".gitconfig").write_text(f"[core]\n hooksPath = {hooks}\n autocrlf = true\n")
    installed(built_from(where, upstream), monkeypatch, GPUS)
    digest = hashlib.sha256(DOCKERFILE.encode()).hexdigest()
    assert runtime.images[where.profile.engine.image] == f"sha256:{digest}" and not marker.exists()


def test_submodules_come_at_the_commits_that_the_tree_names(
    runtime: FakeRuntime, where: Layout, monkeypatch: pytest.MonkeyPatch, upstream: Path, tmp_path: Path
) -> None:
    runtime.play(images={})
    work = tmp_path / "upstream"
    (work / "docker" / "build.sh").write_text("docker build -t sub:1 parts/docker\n")
    git(work, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(upstream), "parts")
    git(work, "commit", "-qam", "with a submodule")
    bare = tmp_path / "with-submodule.git"
    git(tmp_path, "clone", "-q", "--bare", str(work), str(bare))
    installed(built_from(where, bare, git(work, "rev-parse", "HEAD")), monkeypatch, GPUS)
    digest = hashlib.sha256(DOCKERFILE.encode()).hexdigest()
    assert runtime.images[where.profile.engine.image] == f"sha256:{digest}"


@pytest.fixture
def recipe(tmp_path: Path, upstream: Path) -> dict[str, Any]:
    """Two patches of another repository at one of its commits."""
    work, bare = tmp_path / "recipe", tmp_path / "recipe.git"
    (work / "recipe").mkdir(parents=True)
    git(work, "init", "-q", "-b", "main")
    lines = DOCKERFILE.splitlines(True)
    for number in (1, 2):
        after = [line.replace("RUN", "RUN patched") if at <= number else line for at, line in enumerate(lines)]
        before = [line.replace("RUN", "RUN patched") if at < number else line for at, line in enumerate(lines)]
        diff = difflib.unified_diff(before, after, "a/docker/Dockerfile", "b/docker/Dockerfile")
        (work / "recipe" / f"000{number}.patch").write_text("".join(diff))
    (work / "recipe" / "README").write_text("no patch\n")
    git(work, "add", ".")
    git(work, "commit", "-qm", "recipe")
    git(tmp_path, "clone", "-q", "--bare", str(work), str(bare))
    return {"repo": str(bare), "revision": git(work, "rev-parse", "HEAD"), "path": "recipe/*.patch"}


def test_patches_are_put_on_the_pinned_source_in_their_order_and_other_patches_mean_another_image(
    runtime: FakeRuntime, where: Layout, monkeypatch: pytest.MonkeyPatch, upstream: Path, recipe: dict[str, Any]
) -> None:
    runtime.play(images={})
    plain = built_from(where, upstream)
    installed(plain, monkeypatch, GPUS)
    first = enginevenv.read_manifest(plain.engine_dir)
    patched = built_from(where, upstream, build_patches=(BuildPatch.model_validate(recipe),))
    goal = EngineInstall(patched, os.environ).check()
    assert not goal.reached and "other patches" in goal.text
    said = installed(patched, monkeypatch, GPUS)
    assert [text for text in said if text.startswith("patch ")] == [
        "patch recipe/0001.patch",
        "patch recipe/0002.patch",
    ]
    assert EngineInstall(patched, os.environ).check().reached
    second = enginevenv.read_manifest(patched.engine_dir)
    assert first is not None and second is not None and first["image_id"] != second["image_id"]
    after = DOCKERFILE.replace("RUN first", "RUN patched first").replace("RUN second", "RUN patched second")
    assert second["image_id"] == hashlib.sha256(after.encode()).hexdigest()


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"path": "recipe/0002.patch"}, IntegrityError, r"recipe/0002\.patch does not apply"),
        ({"path": "recipe/README"}, IntegrityError, "recipe/README does not apply"),
        ({"path": "recipe/0001.patch", "sha256": "0" * 64}, IntegrityError, "000000000000 is pinned"),
        ({"path": "recipe/0009.patch"}, NotFoundError, r"no recipe/0009\.patch in"),
        ({"revision": "0" * 40}, NotFoundError, "cannot be fetched"),
    ],
)
def test_a_patch_that_is_another_one_or_does_not_apply_ends_before_the_build(
    runtime: FakeRuntime,
    where: Layout,
    monkeypatch: pytest.MonkeyPatch,
    upstream: Path,
    recipe: dict[str, Any],
    change: dict[str, str],
    kind: type[Exception],
    message: str,
) -> None:
    runtime.play(images={})
    patch = BuildPatch.model_validate({**recipe, **change})
    with pytest.raises(kind, match=message):
        installed(built_from(where, upstream, build_patches=(patch,)), monkeypatch, GPUS)
    assert not any(call[1] == "build" for call in runtime.calls)


def test_room_and_git_are_asked_for_before_the_source(
    runtime: FakeRuntime, where: Layout, monkeypatch: pytest.MonkeyPatch, upstream: Path
) -> None:
    runtime.play(images={})
    pinned = built_from(where, upstream, image_bytes=1 << 60)
    with pytest.raises(NoSpaceError, match=f"bytes in {runtime.root}"):
        installed(pinned, monkeypatch, GPUS)
    runtime.play(storage="/not/on/this/machine")  # a daemon elsewhere: not known is not refused here
    monkeypatch.setenv("PATH", str(runtime.bin))
    assert "git is not installed" in supply.look(pinned, Supply()).problem
    assert "git" in supply.look(pinned, Supply()).fix[0]
    with pytest.raises(UnsupportedError, match="git is not installed"):
        installed(pinned, monkeypatch, GPUS)


def test_a_build_that_fails_shows_its_last_words(
    runtime: FakeRuntime, where: Layout, monkeypatch: pytest.MonkeyPatch, upstream: Path, tmp_path: Path
) -> None:
    runtime.play(images={})
    work = tmp_path / "upstream"
    (work / "docker" / "build.sh").write_text("echo layer 7 of 9\necho write: no space left on device\nexit 3\n")
    git(work, "commit", "-qam", "broken")
    git(work, "push", "-q", str(upstream), "main")
    with pytest.raises(NoSpaceError, match=r"build\.sh ended with 3") as failed:
        installed(built_from(where, upstream, git(work, "rev-parse", "HEAD")), monkeypatch, GPUS)
    assert "layer 7 of 9" in failed.value.detail


def test_a_published_image_is_pulled_by_its_digest(
    runtime: FakeRuntime, where: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime.play(images={})
    digest = "sha256:" + "1" * 64
    engine = where.profile.engine.model_copy(update={"image_digest": digest})
    pinned = Layout(**{**where.__dict__, "profile": where.profile.model_copy(update={"engine": engine})})
    installed(pinned, monkeypatch, GPUS)
    assert ["docker", "pull", f"{engine.image}@{digest}"] in runtime.calls
    assert EngineInstall(pinned, os.environ).check().reached
