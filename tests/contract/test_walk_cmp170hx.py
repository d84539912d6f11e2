"""The CMP 170HX profile from a bare box to ready: the shipped profile, three repositories on a loopback Hub, the
image's source in a repository of its own, a tmpfs, and a container stand-in whose engine reads what is mounted."""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ds41ctl.core.tensors import ROUTED
from tests.fakes import missions, nvml
from tests.fakes.containers import FakeRuntime
from tests.fakes.hub import FakeHub
from tests.fakes.nvml.fixtures import nvml_library
from tests.fakes.shardreader import Table
from tests.fakes.v41 import ENGRAM_LAYERS, EXPERTS, ROWS

__all__ = ["nvml_library"]
pytestmark = [
    pytest.mark.root,
    pytest.mark.timeout(300),
    pytest.mark.skipif(os.getuid() != 0, reason="mounts a tmpfs"),
]
ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "profiles" / "cmp170hx-tp4.toml"
BUILD = "#!/bin/bash\nset -eu\ndocker build -t dsv41-cmp170hx:1.2.0 docker\n"  # upstream's name, not the profile's


@dataclass
class Walk:
    """The box with its runtime, its cards and the Hub."""

    root: Path
    env: dict[str, str]
    profile: Path
    runtime: FakeRuntime
    hub: FakeHub
    driver: nvml.Driver
    said: str = ""

    def __call__(self, *args: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", "tests.fakes.box", "cmp170hx-4x-no-image", *args, "--profile", str(self.profile)]
        return subprocess.run(words, env=self.env, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)

    def state(self, uuid: int, what: str) -> str:
        """What the driver holds for one card."""
        return (self.driver.folder / f"gpu{uuid}.{what}").read_text().strip()


def repository(folder: Path) -> tuple[Path, str]:
    """The image's source and its commit."""
    (folder / "docker").mkdir(parents=True)
    (folder / "docker" / "Dockerfile").write_text("FROM scratch\n")
    (folder / "docker" / "build.sh").write_text(BUILD)
    (folder / "docker" / "build.sh").chmod(0o755)
    who = ("-c", "user.name=t", "-c", "user.email=t@localhost")
    for words in (("init", "-q"), ("add", "."), (*who, "commit", "-qm", "1.2.0")):
        subprocess.run(["git", "-C", str(folder), *words], check=True, timeout=30)
    done = subprocess.run(["git", "-C", str(folder), "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    return folder, done.stdout.strip()


def edited(root: Path, source: Path, commit: str) -> Path:
    """The shipped profile at the width of the small packs, with its source, tables and canaries here."""
    sizes = {repo: sum(map(len, files.values())) for repo, files in small_repos().items()}
    text = SHIPPED.read_text()
    for repo, size in sizes.items():
        text = re.sub(rf'(repo = "{re.escape(repo)}"\n(?:.*\n)*?size_bytes = )[\d_]+', rf"\g<1>{size}", text, count=1)
    edits = {
        "tensors = 188241": f"tensors = {missions.TENSORS}",
        "grafted = 23040": f"grafted = {len(missions.GRAFTED) * EXPERTS * 3 * 4}",
        "rows = 384006168": f"rows = {ROWS[0]}",
        "rows = 384016682": f"rows = {ROWS[1]}",
        "https://github.com/GNmac-lab/deepseek-v41-flash-1017-cmp170hx": str(source),
        "2ad5741ab1a278d64f33b842706a41717dfbf181": commit,
        "/opt/engram-ram/DeepSeek-V4.1-Flash-1017-engram": str(root / "engram-ram" / "engram"),
        "size_gib = 200": "size_gib = 0.03125",
        'canaries = "random"': 'canaries = "tiny-v41"',
        "needle_tokens = 8000": "needle_tokens = 1300",
    }
    for line, instead in edits.items():
        assert line in text, line
        text = text.replace(line, instead)
    path = root / "cmp170hx-tp4.toml"
    path.write_text(text)
    return path


def small_repos() -> dict[str, dict[str, bytes]]:
    return missions.mission_repos(missions.small("cmp170hx-tp4"))


@pytest.fixture(scope="module")
def walk(nvml_library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walk]:
    root = tmp_path_factory.mktemp("cmp")
    runtime = FakeRuntime(root / "runtime").install("docker")
    answers = {"path": str(ROOT), "recipe": "tiny-v41"}
    runtime.play(images={}, engram="ssd", layers=list(ENGRAM_LAYERS), answers=answers)
    driver = nvml.Driver(nvml_library, root / "driver")
    driver.play(nvml.cmp())
    with FakeHub() as hub:
        missions.serve(hub, missions.small("cmp170hx-tp4"))
        env = {name: text for name, text in driver.environ.items() if not name.startswith(("DS41_", "TMUX", "HF_"))}
        env |= {
            "PATH": f"{runtime.bin}:{env['PATH']}",
            "DS41_DATA_DIR": str(root / "data"),
            "DS41_STATE_DIR": str(root / "state"),
            "DS41_CACHE_DIR": str(root / "cache"),
            "DS41_PORT": str(free_port()),
            "HF_ENDPOINT": hub.url,
            "NO_COLOR": "1",
        }
        made = Walk(root, env, edited(root, *repository(root / "source")), runtime, hub, driver)
        yield made
        made("stop")
        made("engram", "drop")
    runtime.end()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def mounted(folder: Path) -> list[str]:
    """Type and size of what is mounted exactly there."""
    done = subprocess.run(
        ["findmnt", "-bno", "FSTYPE,SIZE", "-M", str(folder)], capture_output=True, text=True, timeout=10, check=False
    )
    return done.stdout.split()


def test_nothing_speaks_against_the_box_by_the_strict_rules(walk: Walk) -> None:
    asked = len(walk.hub.log)
    done = walk("preflight", "--strict")
    assert done.returncode == 0 and len(walk.hub.log) == asked, done.stdout


def test_the_plan_names_the_image_the_bytes_and_the_mount_and_touches_nothing(walk: Walk) -> None:
    before = len(walk.hub.log), mounted(walk.root / "engram-ram" / "engram"), (walk.root / "data").exists()
    done = walk("up", "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    steps = {step["step"]: step for step in json.loads(done.stdout)["data"]["steps"]}
    assert list(steps)[:5] == ["preflight", "engine", "fetch", "graft", "engram"]
    assert any("size=33554432" in " ".join(c) for c in steps["engram"]["commands"])
    assert before == (len(walk.hub.log), mounted(walk.root / "engram-ram" / "engram"), (walk.root / "data").exists())


@pytest.fixture
def served(walk: Walk) -> Walk:
    """The box with its engine up: brought there by the first test that asks, as tests may be dealt out in any order."""
    if not walk.runtime.held:
        done = walk("up")
        assert done.returncode == 0, done.stdout + done.stderr
        walk.said = done.stdout
    return walk


def test_the_cmp170hx_profile_walks_from_a_bare_box_to_ready(served: Walk) -> None:
    steps = [line.split()[0] for line in served.said.splitlines() if re.match(r"  \w+ +OK ", line)]
    assert steps[:8] == ["preflight", "engine", "fetch", "graft", "engram", "serve", "clocks", "smoke"], served.said
    assert "ds41-cmp170hx:1.2.0-fidelity" in served.runtime.images


def test_the_trunk_on_disk_holds_every_official_tensor_but_the_routed_experts(served: Walk) -> None:
    official = small_repos()[missions.OFFICIAL]
    wanted = set(json.loads(official["model.safetensors.index.json"])["weight_map"])
    found: set[str] = set()
    for path in (served.root / "data" / "models" / "DeepSeek-V4.1-Flash-1017").glob("*.safetensors"):
        with path.open("rb") as file:
            found |= set(json.loads(file.read(int.from_bytes(file.read(8), "little")))) - {"__metadata__"}
    assert {name for name in wanted if not ROUTED.fullmatch(name)} <= found
    assert not any(ROUTED.fullmatch(name) and name.startswith("layers.") for name in found)


def test_the_engine_was_given_the_graft_and_the_mounted_shards(served: Walk) -> None:
    folder = served.root / "engram-ram" / "engram"
    assert mounted(folder) == ["tmpfs", str(33554432)]
    run = next(call for call in served.runtime.calls if call[1] == "run")
    assert f"{folder}:/engram:ro" in run and f"{served.root}/data/models:/models:ro" in run
    for number, layer in enumerate(ENGRAM_LAYERS):
        name = f"model-000{47 + number}-of-00048.safetensors"
        data = small_repos()[missions.OFFICIAL][name]
        assert hashlib.sha256((folder / name).read_bytes()).digest() == hashlib.sha256(data).digest()
        table = Table(folder, layer)
        assert table.rows == ROWS[number] and any(table.row(0))
        table.close()
    hybrid = served.root / "data/models/DeepSeek-V4.1-Flash-1017-hybrid"
    assert len(json.loads((hybrid / "model.safetensors.index.json").read_text())["weight_map"]) == missions.TENSORS


def test_limit_and_offset_are_held_while_it_runs_and_given_back_when_it_stops(served: Walk) -> None:
    status = clocks(served)
    assert {gpu["power_limit_w"] for gpu in status} == {200.0} and {gpu["offset_mhz"] for gpu in status} == {200}
    done = served("stop")
    assert done.returncode == 0 and served.runtime.held == [], done.stdout + done.stderr
    status = clocks(served)
    assert {gpu["power_limit_w"] for gpu in status} == {250.0} and {gpu["offset_mhz"] for gpu in status} == {0}


def clocks(walk: Walk) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(walk("clocks", "status", "--json").stdout)["data"]["gpus"]
    return found


def test_an_engine_that_never_fills_its_tables_is_caught_by_its_copies(served: Walk) -> None:
    walk = served
    assert walk("stop").returncode == 0
    walk.runtime.play(engram="mute")
    try:
        done = walk("up")
        assert done.returncode == 1 and re.search(r"FAIL +smoke.copy", done.stdout), done.stdout + done.stderr
        assert re.search(r"smoke +FAIL", done.stdout) and "Engram" in done.stdout
    finally:
        walk.runtime.play(engram="ssd")
        walk("stop")


def test_without_the_mounted_shards_its_start_is_refused(served: Walk) -> None:
    walk = served
    assert walk("stop").returncode == 0
    (walk.root / "engram-ram" / "engram" / "model-00048-of-00048.safetensors").unlink()
    runs = sum(call[1] == "run" for call in walk.runtime.calls)
    done = walk("serve")
    assert done.returncode == 12 and "engram" in done.stderr.lower(), done.stdout + done.stderr
    assert sum(call[1] == "run" for call in walk.runtime.calls) == runs
    assert walk("engram", "build").returncode == 0
