"""The V100 profile from a bare box to a proven engine: the shipped profile, its repositories on a loopback Hub, its
release, and an engine that behaves as the borrowed one does: tables of its own, answers of the real model."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ds41ctl.adapters import gpukernels
from tests.e2e.conftest import Answer, Cli, free_port
from tests.fakes import foreign, nvml, wheels
from tests.fakes.hub import FakeHub
from tests.fakes.release import FakeRelease, serving

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "profiles" / "v100-pp2tp4.toml"
TOOLCHAIN = ROOT / "build" / "kernel-toolchain"
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
INNER = "cpu-tiny-exl3"
FRANKEN, OFFICIAL = "philbert440/DeepSeek-V4.1-Flash-1017-EXL3-franken-v100", "deepseek-ai/DeepSeek-V4.1-Flash-1017"
TOKEN_MAP = "Built engram token map (129280 -> 129045 ids) for layers (1, 3)"
# tiny file -> the name that the real pack gives to what is in it
NAMES = {
    "model-00001-of-00003.safetensors": "model-00001-of-00048.safetensors",
    "model-00002-of-00003.safetensors": "model-00047-of-00048.safetensors",
    "model-00003-of-00003.safetensors": "model-00048-of-00048.safetensors",
}


@dataclass
class Walk:
    """The box, the Hub and the release; `cli` runs the real command line there."""

    cli: Cli
    hub: FakeHub
    release: FakeRelease
    sums: str
    profile: Path
    pack: dict[str, bytes]
    driver: nvml.Driver

    def __call__(self, *args: str, **env: str) -> Answer:
        words = [
            sys.executable,
            "-m",
            "tests.fakes.box",
            "v100-8x-serving-ready",
            *args,
            "--profile",
            str(self.profile),
        ]
        done = subprocess.run(
            words, env={**self.cli.env, **env}, capture_output=True, text=True, timeout=600, check=False
        )
        return Answer(done.returncode, done.stdout, done.stderr)


def inner(cli: Cli) -> tuple[Path, dict[str, Any]]:
    """The engine that answers, as its own profile starts it, and the pack it was trained with."""
    for words in (("fetch",), ("engram", "build")):
        answer = cli(*words, "--profile", INNER)
        assert answer.code == 0, answer.out + answer.err
    start = cli("serve", "--dry-run", "--profile", INNER, "--json").json()["data"]
    return cli.root / "data" / "models" / "tiny-v41-exl3", start


def as_real(folder: Path) -> dict[str, bytes]:
    """The tiny pack's files under the names of the real one."""
    files = {
        NAMES.get(path.name, path.name): path.read_bytes()
        for path in folder.iterdir()
        if path.is_file() and not path.name.endswith(".sha256-ok") and not path.name.startswith(".")
    }
    index = json.loads(files["model.safetensors.index.json"])
    index["weight_map"] = {name: NAMES[file] for name, file in index["weight_map"].items()}
    return files | {"model.safetensors.index.json": json.dumps(index).encode()}


def edited(folder: Path, assets: str, sizes: tuple[int, int]) -> Path:
    """The shipped profile with the tiny model's numbers in the place of the real one's, the release's address, and this
    machine's Python."""
    text = SHIPPED.read_text()
    for line, instead in {
        "218_600_000_000": str(sizes[0]),
        "203_000_000_000": str(sizes[1]),
        "https://github.com/philbert440/deepseek-v4.1-v100/releases/download/ds41-vision-20261025b": assets,
        "compressed_vocab_size = 99092": "compressed_vocab_size = 129045",
        "layer = 1\nrows = 384006168": "layer = 1\nrows = 12436",
        "layer = 14\nrows = 384016682": "layer = 3\nrows = 12672",
        "Built engram token map (129280 -> 99092 ids) for layers": TOKEN_MAP,
        'python = "3.12"': f'python = "{HERE}"',
        "cp312-cp312-linux_x86_64": "py3-none-any",
        'canaries = "random"': 'canaries = "tiny-v41"',
        "needle_tokens = 8000": "needle_tokens = 1300",
    }.items():
        assert text.count(line) >= 1, line
        text = text.replace(line, instead)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "v100-pp2tp4.toml"
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def walk(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walk]:
    root = tmp_path_factory.mktemp("v100")
    tiny, start = inner(cli)
    pack = as_real(tiny)
    shards = {name: data for name, data in pack.items() if name.startswith("model-0004")}
    rest = {name: data for name, data in pack.items() if name not in shards}
    library = nvml.build(tmp_path_factory.mktemp("nvml"))
    assert library is not None, "no C compiler"
    driver = nvml.Driver(library, root / "driver")
    driver.play(nvml.v100())
    assert TOOLCHAIN.is_dir(), "make kernel-toolchain"
    compiler = gpukernels.toolchain_dir(root / "cache")
    compiler.parent.mkdir(parents=True)
    compiler.symlink_to(TOOLCHAIN)
    with FakeHub() as hub, serving() as release:
        sizes = tuple(sum(map(len, files.values())) for files in (rest, shards))
        profile = edited(root, release.url, sizes)
        sums = publish(release, root, profile, start, {str(tiny): "{model}", str(cli.port): "{port}"})
        revisions = dict(re.findall(r'repo = "(.+)"\nrevision = "(.+)"', profile.read_text()))
        hub.add(FRANKEN, rest, revision=revisions[FRANKEN])
        hub.add(OFFICIAL, {**shards, "README.md": b"about"}, revision=revisions[OFFICIAL])
        env = {name: text for name, text in driver.environ.items() if not name.startswith(("DS41_", "TMUX", "PIP_"))}
        env |= {
            "DS41_DATA_DIR": str(root / "data"),
            "DS41_STATE_DIR": str(root / "state"),
            "DS41_CACHE_DIR": str(root / "cache"),
            "DS41_PORT": str(free_port()),
            "HF_ENDPOINT": hub.url,
            "PIP_INDEX_URL": release.index,
            "PIP_CONFIG_FILE": os.devnull,
            "NO_COLOR": "1",
        }
        made = Walk(Cli(root, env, int(env["DS41_PORT"])), hub, release, sums, profile, pack, driver)
        yield made
        made("stop")
    cli("engram", "drop", "--profile", INNER)


def publish(release: FakeRelease, root: Path, profile: Path, start: dict[str, Any], told: dict[str, str]) -> str:
    """The engine's release, and an index with what it depends on; the sha256 of its SHA256SUMS."""
    name = re.search(r'^wheel = "(.+)"$', profile.read_text(), re.MULTILINE)
    assert name is not None
    wheel = foreign.release(
        root / "release",
        name[1],
        argv=[told.get(word, "{host}" if word == "127.0.0.1" else word) for word in start["argv"]],
        env=start["env"],
        layers=(1, 3),
        log=[f"(Worker_PP0_TP{rank} pid=1) INFO 12-07 10:00:00 [engram.py:473] {TOKEN_MAP}" for rank in range(4)],
    )
    sums = wheels.sums(root / "release", wheel)
    release.add(wheel, root / "release" / "SHA256SUMS")
    ninja = wheels.wheel(root / "packages", "ninja", "1.13", {"ninja.py": ""})
    release.add_packages(ninja, wheels.torch(root / "packages"))
    return sums


def test_a_bare_box_is_told_what_is_missing_before_a_byte_is_fetched(walk: Walk) -> None:
    answer = walk("up")
    assert answer.code == 10 and "--accept-sums" in answer.err, answer.out + answer.err
    assert walk.hub.log == [] and walk.release.log == []
    answer = walk("engine", "install")
    assert answer.code == 12 and walk.sums in answer.err, answer.out + answer.err
    assert [Path(path).name for path in walk.release.asked("asset")] == ["SHA256SUMS"] and walk.hub.log == []


def test_the_v100_profile_walks_from_a_bare_box_to_ready(walk: Walk) -> None:
    answer = walk("up", "--accept-sums", walk.sums)
    assert answer.code == 0, answer.out + answer.err
    steps = [line.split()[0] for line in answer.out.splitlines() if re.match(r"  \w+ +OK ", line)]
    assert steps[:6] == ["preflight", "engine", "fetch", "serve", "clocks", "smoke"], answer.out
    model = walk.cli.root / "data" / "models" / "ds41-franken-v100"
    for name, data in walk.pack.items():
        assert hashlib.sha256((model / name).read_bytes()).digest() == hashlib.sha256(data).digest(), name
    record = json.loads((walk.cli.root / "state" / "running" / "v100-pp2tp4.json").read_text())
    log = Path(record["log"]).read_text(errors="replace")
    argv = json.loads(log.split("foreign: argv ", 1)[1].splitlines()[0])
    assert argv[argv.index("--model") + 1] == str(model)
    assert argv[argv.index("--speculative-config") + 1] == '{"method": "dspark", "num_speculative_tokens": 5}'
    env = json.loads(log.split("foreign: env ", 1)[1].splitlines()[0])
    assert env["VLLM_PP_LAYER_PARTITION"] == "20,20" and env["CUDA_VISIBLE_DEVICES"].count("GPU-") == 8
    tables = dict(re.findall(r"foreign: (layers\S+) sha256 (\w+)", log))
    assert tables == {name: tensor_digest(walk.pack, name) for name in tables} and len(tables) == 4
    assert walk.driver.locks() == dict.fromkeys(range(8), 1530)
    assert re.search(r"^  clocks-kept UNKNOWN not proven", answer.out, re.MULTILINE), "no card worked here"
    again = walk("serve")
    assert again.code == 17 and "already running" in again.err, again.out + again.err


def test_stopping_it_gives_everything_back(walk: Walk) -> None:
    answer = walk("stop")
    assert answer.code == 0, answer.out + answer.err
    assert walk.driver.locks() == {} and walk.cli.processes() == []


def tensor_digest(pack: dict[str, bytes], name: str) -> str:
    """sha256 of a tensor's bytes, read by its shard's header."""
    raw = pack[json.loads(pack["model.safetensors.index.json"])["weight_map"][name]]
    length = int.from_bytes(raw[:8], "little")
    begin, end = json.loads(raw[8 : 8 + length])[name]["data_offsets"]
    return hashlib.sha256(raw[8 + length + begin : 8 + length + end]).hexdigest()
