"""An engine from a release, over real sockets into a real venv: asked once, resumed, kept, and refused when changed."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds41ctl.adapters import enginevenv, proc, profiles, release, supply
from ds41ctl.adapters.download import Limits
from ds41ctl.adapters.supply import Supply
from ds41ctl.core.errors import ConfigError, IntegrityError, NetworkError, NoSpaceError, NotFoundError
from ds41ctl.core.layout import Dirs, Layout, layout
from ds41ctl.core.settings import Settings
from ds41ctl.steps.engine import EngineInstall
from tests.fakes import wheels as fake
from tests.fakes.hub import REVISION, FakeHub
from tests.fakes.release import FakeRelease, serving
from tests.fakes.v41 import ENGRAM_LAYERS, ROWS, files_of, official
from tests.fakes.venvs import bare, quick_venv

__all__ = ["bare", "quick_venv"]

pytestmark = pytest.mark.timeout(180)
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
TAG = f"cp{HERE.replace('.', '')}-cp{HERE.replace('.', '')}-linux_x86_64"
VERSION = "1.5.2.dev1+ds41"
WHEEL = f"vllm-{VERSION}-{TAG}.whl"
PAGE = "https://host.example/owner/engine/releases/tag/tag-1"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRelease]:
    """The release of one engine, and an index with what its wheel depends on."""
    monkeypatch.setattr(release, "LIMITS", Limits(backoff_s=0.01))
    with serving() as made:
        publish(made, tmp_path / "release")
        fake.torch(tmp_path / "packages")
        fake.wheel(tmp_path / "packages", "ninja", "1.13", {"ninja.py": ""})
        made.add_packages(*(tmp_path / "packages").iterdir())
        for name, value in {"PIP_INDEX_URL": made.index, "PIP_NO_CACHE_DIR": "1"}.items():
            monkeypatch.setenv(name, value)
        yield made


def publish(server: FakeRelease, folder: Path, model: str = fake.MODEL) -> str:
    """Wheel and SHA256SUMS; the latter's sha256."""
    # as large as several pieces of a socket, so that a stream can break in the middle
    files = {"vllm/__init__.py": f'__version__ = "{VERSION}"\n', "vllm/platforms.py": fake.PLATFORMS}
    files |= {"vllm/model.py": model, "vllm/weights.txt": "0123456789abcdef" * 20_000}
    wheel = fake.wheel(folder, "vllm", VERSION, files, TAG, requires=("torch==9.1",))
    digest = fake.sums(folder, wheel)
    server.add(wheel, folder / "SHA256SUMS")
    return digest


@pytest.fixture
def where(tmp_path: Path, server: FakeRelease) -> Layout:
    """The V100 profile's kind of engine on this machine."""
    profile = profiles.read(profiles.find("v100-pp2tp4"))
    wanted = {"name": "fake", "python": HERE, "wheel": WHEEL, "wheel_assets": server.url, "wheel_url": PAGE}
    engine = profile.engine.model_copy(update=wanted | {"gpu_kernels": None, "torch_index": "", "notices": ()})
    profile = profile.model_copy(update={"engine": engine})
    dirs = Dirs(tmp_path / "data", tmp_path / "state", tmp_path / "cache", tmp_path / "run", os.getuid())
    return layout(profile, Settings(), dirs, may_mount=False)


def silent(text: str, data: dict[str, Any]) -> None:
    """Nobody looks."""


def sums_of(server: FakeRelease) -> str:
    return hashlib.sha256(server.assets["SHA256SUMS"]).hexdigest()


def pinned(where: Layout, **engine: str) -> Layout:
    profile = where.profile
    return replace(where, profile=profile.model_copy(update={"engine": profile.engine.model_copy(update=engine)}))


def version(where: Layout) -> str:
    code = "import vllm; print(vllm.__version__)"
    return proc.run([str(where.python), "-I", "-c", code], timeout=60).stdout.strip()


def test_a_release_is_asked_for_once_and_installed_from_its_address_with_what_it_depends_on(
    where: Layout, server: FakeRelease
) -> None:
    with pytest.raises(IntegrityError) as asked:
        EngineInstall(where, os.environ).do(silent)
    digest = sums_of(server)
    assert digest in asked.value.message and "\n" not in asked.value.message
    assert f"ds41ctl engine install --profile v100-pp2tp4 --accept-sums {digest}" in asked.value.hints
    assert (
        f"ds41ctl up --profile v100-pp2tp4 --accept-sums {digest}" in asked.value.hints and PAGE in asked.value.hints[0]
    )
    assert len(server.log) == 2, "the checksum file and its redirect: nothing large before the answer"
    step = EngineInstall(where, os.environ, Supply(accept_sums=digest))
    step.do(silent)
    assert step.check().reached and version(where) == VERSION
    assert {"vllm", "torch", "ninja"} <= set((enginevenv.read_manifest(where.engine_dir) or {})["distributions"])
    wheel = [path for path in server.asked("asset") if path.endswith(".whl")]
    assert wheel and all("%2Bds41" in path and "+" not in path for path in wheel)
    # accepted once: no flag, and from what was kept, no request to the release either
    before = [entry for entry in server.log if entry[0] != "index"]
    again = EngineInstall(where, os.environ, force=True)
    again.do(silent)
    assert again.check().reached and [entry for entry in server.log if entry[0] != "index"] == before


def test_what_was_accepted_is_bound_to_engine_and_release(where: Layout, server: FakeRelease) -> None:
    release.wheel(where, Supply(accept_sums=sums_of(server)), silent)
    assert supply.accepted(where)[0] == sums_of(server)
    assert supply.accepted(pinned(where, wheel_url=PAGE + "2"))[0] == ""
    assert supply.accepted(pinned(where, name="other"))[0] == ""
    assert json.loads(supply.accepted_path(where).read_text())["sums_sha256"] == sums_of(server)
    supply.accepted_path(where).write_text("cut o")
    assert supply.accepted(where) == ("", "")


def test_a_stream_that_breaks_goes_on_where_it_broke(where: Layout, server: FakeRelease) -> None:
    size = len(server.assets[WHEEL])
    server.cuts = [size // 3, 10_000]
    wheel = release.wheel(where, Supply(accept_sums=sums_of(server)), silent)
    assert wheel.read_bytes() == server.assets[WHEEL]
    assert server.sent < size * 1.5, "a broken stream costs what was lost on the way, not the file again"


def test_a_run_that_ended_in_the_middle_is_gone_on_from(
    where: Layout, server: FakeRelease, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = len(server.assets[WHEEL])
    server.cuts = [size // 2]
    monkeypatch.setattr(release, "LIMITS", Limits(attempts=1))
    with pytest.raises(NetworkError):
        release.wheel(where, Supply(accept_sums=sums_of(server)), silent)
    assert not (supply.release_dir(where) / WHEEL).exists(), "what is not whole has no name"
    wheel = release.wheel(where, Supply(), silent)
    assert wheel.read_bytes() == server.assets[WHEEL]
    starts = [int(wanted.split("=")[1].split("-")[0]) for kind, _, wanted in server.log if kind == "storage" and wanted]
    assert max(starts) > 0


def test_a_storage_without_ranges_serves_as_well(where: Layout, server: FakeRelease) -> None:
    server.ranges = False
    wheel = release.wheel(where, Supply(accept_sums=sums_of(server)), silent)
    assert wheel.read_bytes() == server.assets[WHEEL]


@pytest.mark.parametrize("change", [lambda data: data[:-1] + b"x", lambda data: data + b"x"], ids=["bytes", "size"])
def test_a_changed_wheel_is_refused_and_never_has_its_name(where: Layout, server: FakeRelease, change: Any) -> None:
    server.assets[WHEEL] = change(server.assets[WHEEL])
    with pytest.raises(IntegrityError, match="nothing was published"):
        EngineInstall(where, os.environ, Supply(accept_sums=sums_of(server))).do(silent)
    assert not (supply.release_dir(where) / WHEEL).exists() and not enginevenv.inspect(where).installed


def test_a_checksum_file_that_changed_after_it_was_accepted_names_both_digests(
    where: Layout, server: FakeRelease, tmp_path: Path
) -> None:
    first = sums_of(server)
    kept = release.wheel(where, Supply(accept_sums=first), silent)
    second = publish(server, tmp_path / "later", fake.MODEL + "changed = True\n")
    assert release.wheel(where, Supply(), silent) == kept, "what is there is the accepted one"
    for path in supply.release_dir(where).iterdir():
        path.unlink()
    with pytest.raises(IntegrityError) as refused:
        release.wheel(where, Supply(), silent)
    assert first in refused.value.message and second in refused.value.message
    assert supply.accepted(where)[0] == first and not list(supply.release_dir(where).glob("*.whl"))
    # accepted on purpose, the new one is another engine
    release.wheel(where, Supply(accept_sums=second), silent)
    assert supply.accepted(where)[0] == second


def test_accepting_another_checksum_file_installs_that_release(
    where: Layout, server: FakeRelease, tmp_path: Path
) -> None:
    EngineInstall(where, os.environ, Supply(accept_sums=sums_of(server))).do(silent)
    second = publish(server, tmp_path / "later", "def answer(): return 2\n")
    step = EngineInstall(where, os.environ, Supply(accept_sums=second))
    assert not step.check().reached
    step.do(silent)
    assert step.check().reached
    assert "return 2" in (enginevenv.site_packages(where.engine_dir) / "vllm" / "model.py").read_text()
    # a state folder that was cleared forgets the word, not the engine
    supply.accepted_path(where).unlink()
    assert EngineInstall(where, os.environ).check().reached


@pytest.mark.parametrize("given", ["0" * 64, "f" * 64])
def test_a_digest_that_is_not_the_releases_is_refused_and_not_remembered(
    where: Layout, server: FakeRelease, given: str
) -> None:
    with pytest.raises(IntegrityError) as refused:
        release.wheel(where, Supply(accept_sums=given), silent)
    assert given in refused.value.message and sums_of(server) in refused.value.message
    assert supply.accepted(where) == ("", "")


def test_a_digest_in_the_profile_needs_no_word_and_is_never_overruled(where: Layout, server: FakeRelease) -> None:
    told = pinned(where, wheel_sums_sha256=sums_of(server))
    assert release.wheel(told, Supply(), silent).name == WHEEL and supply.accepted(told) == ("", "")
    other = pinned(where, wheel_sums_sha256="0" * 64, name="other")
    with pytest.raises(IntegrityError, match="the profile pins 0000"):
        release.wheel(other, Supply(accept_sums=sums_of(server)), silent)
    with pytest.raises(ConfigError, match="nothing to accept"):
        EngineInstall(told, os.environ, Supply(accept_sums="0" * 64)).check()
    digest = hashlib.sha256(server.assets[WHEEL]).hexdigest()
    single = pinned(where, wheel_sha256=digest, name="single")
    server.assets.pop("SHA256SUMS")
    assert release.wheel(single, Supply(), silent).name == WHEEL
    with pytest.raises(ConfigError, match="nothing to accept"):
        EngineInstall(single, os.environ, Supply(accept_sums=digest)).check()


def test_what_is_no_checksum_file_of_this_wheel_is_not_offered_for_acceptance(
    where: Layout, server: FakeRelease
) -> None:
    server.assets["SHA256SUMS"] = b"<html>please log in</html>"
    with pytest.raises(IntegrityError, match="line 1 is no checksum"):
        release.wheel(where, Supply(), silent)
    server.assets["SHA256SUMS"] = b"0" * 64 + b"  other.whl\n"
    with pytest.raises(IntegrityError, match="names no vllm-"):
        release.wheel(where, Supply(), silent)
    server.assets.pop("SHA256SUMS")
    with pytest.raises(NotFoundError, match="not found"):
        release.wheel(where, Supply(), silent)


def test_a_full_cache_is_said_before_the_wheel_is_fetched(
    where: Layout, server: FakeRelease, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release.mounts, "free_bytes", lambda path: 1000)
    with pytest.raises(NoSpaceError, match="1000 are free"):
        release.wheel(where, Supply(accept_sums=sums_of(server)), silent)
    assert server.sent < 10_000


def test_a_mirror_stands_in_for_the_release_and_is_held_to_the_same_digest(
    where: Layout, server: FakeRelease, tmp_path: Path
) -> None:
    digest = sums_of(server)
    far = pinned(where, wheel_assets="http://127.0.0.1:9/gone")
    with pytest.raises(NetworkError) as down:
        release.wheel(far, Supply(accept_sums=digest), silent)
    assert any("--wheels" in hint for hint in down.value.hints) and not any("HF_" in hint for hint in down.value.hints)
    assert release.wheel(far, Supply(wheels=server.url + "/", accept_sums=digest), silent).name == WHEEL
    publish(server, tmp_path / "later", "changed = True\n")
    for path in supply.release_dir(far).iterdir():
        path.unlink()
    with pytest.raises(IntegrityError, match=digest):
        release.wheel(far, Supply(wheels=server.url), silent)


def test_a_folder_is_asked_about_in_the_same_way_and_needs_no_network(
    where: Layout, server: FakeRelease, tmp_path: Path
) -> None:
    folder, digest = tmp_path / "release", sums_of(server)
    with pytest.raises(IntegrityError) as asked:
        release.wheel(where, Supply(wheels=folder), silent)
    assert f"ds41ctl up --profile v100-pp2tp4 --wheels {folder} --accept-sums {digest}" in asked.value.hints
    release.wheel(where, Supply(wheels=folder, accept_sums=digest), silent)
    assert release.wheel(where, Supply(wheels=folder), silent) == folder / WHEEL and server.log == []
    (folder / WHEEL).write_bytes(b"changed")
    with pytest.raises(IntegrityError, match="not the pinned wheel"):
        release.wheel(where, Supply(wheels=folder), silent)
    fake.sums(folder, folder / WHEEL)
    with pytest.raises(IntegrityError, match=digest):
        release.wheel(where, Supply(wheels=folder), silent)
    (folder / "SHA256SUMS").unlink()
    with pytest.raises(NotFoundError, match="no SHA256SUMS"):
        release.wheel(where, Supply(wheels=folder), silent)


# ---- what preflight is told
def test_where_the_engine_would_come_from_is_known_without_a_network(
    where: Layout, server: FakeRelease, tmp_path: Path
) -> None:
    bare = supply.look(where, Supply())
    assert "needs --accept-sums" in bare.problem and bare.fix[0].startswith("ds41ctl engine install")
    with pytest.raises(IntegrityError):
        release.wheel(where, Supply(), silent)  # keeps the small file, so that its digest can be named
    digest, asked = sums_of(server), len(server.log)
    (accept, *_) = supply.look(where, Supply()).fix
    assert accept.startswith(
        f"ds41ctl up --profile v100-pp2tp4 --accept-sums {digest}   # after comparing it with {PAGE}"
    )
    assert supply.look(where, Supply(accept_sums=digest)).text.endswith(".whl")
    folder = tmp_path / "release"
    assert digest in supply.look(where, Supply(wheels=folder)).problem
    assert supply.look(where, Supply(wheels=folder, accept_sums=digest)).text == str(folder)
    assert "no vllm-" in supply.look(where, Supply(wheels=tmp_path)).problem
    assert "does not say where" in supply.look(pinned(where, wheel_assets=""), Supply()).problem
    assert len(server.log) == asked
    release.wheel(where, Supply(accept_sums=digest), silent)
    assert supply.look(where, Supply()).text.endswith("(already downloaded)")


# ---- as a user runs it
@pytest.fixture
def cli(tmp_path: Path, server: FakeRelease) -> Iterator[Any]:
    """`ds41ctl` with a profile whose engine is the release and whose pack is on a loopback Hub."""
    text = profiles.find("cpu-tiny").read_text()
    head, rest = text.split("[[model.sources]]", 1)
    tail = rest[rest.index("[serve]") :]
    head = head.replace('name = "cpu-tiny"', 'name = "small"').replace("models/tiny-v41", "models/small")
    source = f'[[model.sources]]\nkind = "hub"\nrepo = "owner/small"\nrevision = "{REVISION}"\n'
    tables = "".join(
        f'[[model.engram]]\nlayer = {layer}\nrows = {rows}\nshard = "model-000{47 + n}-of-00048.safetensors"\n'
        for n, (layer, rows) in enumerate(zip(ENGRAM_LAYERS, ROWS, strict=True))
    )
    engine = (
        f'[engine]\nkind = "venv"\nname = "fake"\npython = "{HERE}"\nwheel = "{WHEEL}"\nwheel_sums = "SHA256SUMS"\n'
        f'wheel_assets = "{server.url}"\nwheel_url = "{PAGE}"\n'
    )
    # an engine of another's keeps its tables itself: nothing of ours is built for it
    tail = tail.replace('storage = "tmpfs"', 'storage = "engine"\nhost_copies = 1')
    tail = tail.replace("[provenance]\n", '[provenance]\n"engram.host_copies" = "test"\n')
    (tmp_path / "small.toml").write_text(head + source + tables + engine + tail)
    with FakeHub() as hub:
        hub.add("owner/small", files_of(official()))

        def run(*args: str) -> tuple[int, str, str]:
            # how busy this machine is has no say in what these tests are about
            skipped = [word for name in ("host", "disk", "net") for word in ("--skip-check", name)]
            done = subprocess.run(
                [sys.executable, "-m", "ds41ctl", *args, "--profile", str(tmp_path / "small.toml")]
                + (skipped if args[0] == "up" else []),
                env={**os.environ, "HF_ENDPOINT": hub.url},
                capture_output=True, text=True, timeout=150, check=False,
            )  # fmt: skip
            assert "Traceback" not in done.stderr
            return done.returncode, done.stdout, done.stderr

        yield run, hub


def test_up_stops_before_a_byte_of_the_pack_while_nothing_says_where_the_engine_comes_from(
    cli: Any, server: FakeRelease
) -> None:
    run, hub = cli
    code, _, err = run("up")
    assert code == 10 and "engine.installed: the engine cannot be had: needs --accept-sums" in err
    assert hub.log == [] and server.log == []
    code, _, err = run("engine", "install")
    assert code == 12 and f"ds41ctl engine install --profile small --accept-sums {sums_of(server)}" in err
    code, _, err = run("up")  # the digest is known now, and still nobody has said that it is right
    assert code == 10 and f"ds41ctl up --profile small --accept-sums {sums_of(server)}" in err and hub.log == []
    code, _, err = run("up", "--wheels", str(Path(supply.__file__).parent))
    assert code == 10 and f"no {WHEEL} in" in err and hub.log == []
    code, _, err = run("up", "--accept-sums", "12ab")
    assert code == 2 and "64 digits" in err
    code, _, err = run("up", "--checkout", "https://host.example/x")
    assert code == 2 and "not built from a repository" in err


def test_up_installs_the_engine_from_its_release_before_it_fetches_the_pack(cli: Any, server: FakeRelease) -> None:
    run, hub = cli
    hub.repos.clear()  # the pack cannot be had: what came before it is what was done before it
    code, out, err = run("up", "--accept-sums", sums_of(server))
    assert code == 10 and "owner/small" in err, out + err
    steps = [
        line.split()[0] for line in out.splitlines() if line.split()[:1] and line.split()[0] in ("engine", "fetch")
    ]
    assert steps.index("engine") < steps.index("fetch")
    code, out, err = run("engine", "install")
    assert code == 0 and "already (vllm" in out
    code, out, err = run("up")  # accepted once
    assert code == 10 and "engine" in out and "already (vllm" in out


def test_a_changed_wheel_ends_up_with_12_before_a_byte_of_the_pack(cli: Any, server: FakeRelease) -> None:
    run, hub = cli
    server.assets[WHEEL] = server.assets[WHEEL][:-1] + b"x"
    code, _, err = run("up", "--accept-sums", sums_of(server))
    assert code == 12 and WHEEL in err and hub.log == []
    code, out, _ = run("up", "--dry-run")
    assert code == 0 and out.index("  engine ") < out.index("  fetch ") and server.url in out
