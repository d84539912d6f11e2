"""A tmpfs at the folder that a profile names: mounted for real, given back, or refused by a kernel that says no."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds41ctl.adapters import pack, profiles
from tests.fakes.shardreader import Table

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.getuid() != 0, reason="needs root to mount"),
    pytest.mark.timeout(180),
]
WITHOUT_MOUNT = ("setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin")  # as a container's root


class Here:
    """cpu-tiny's pack, a profile that names a folder for its store, and the command line as a process."""

    def __init__(self, root: Path) -> None:
        self.root, self.folder = root, root / "opt" / "engram-ram" / "tables"
        text = (profiles.builtin_folder() / "cpu-tiny.toml").read_text()
        named = f'storage = "tmpfs"\nformat = "shards"\ndir = "{self.folder}"\nsize_gib = 0.0625'
        assert 'storage = "tmpfs"' in text
        text = text.replace('storage = "tmpfs"', named).replace('name = "cpu-tiny"', 'name = "named"')
        self.profile = root / "named.toml"
        self.profile.write_text(text + '"engram.size_gib" = "test"\n')
        self.env = {**os.environ, "DS41_DATA_DIR": str(root / "data"), "DS41_STATE_DIR": str(root / "state")}

    def __call__(self, *words: str, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        argv = [*before, sys.executable, "-m", "ds41ctl", *words, "--profile", str(self.profile)]
        return subprocess.run(argv, env=self.env, capture_output=True, text=True, timeout=120, check=False)

    def mount(self) -> list[str]:
        """Type, source, size and mode of what is mounted at the folder."""
        words = ["findmnt", "-rn", "-o", "FSTYPE,SOURCE,SIZE,OPTIONS", "--mountpoint", str(self.folder)]
        return subprocess.run(words, capture_output=True, text=True, check=False).stdout.split()


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Here]:
    made = Here(tmp_path)
    assert made("fetch").returncode == 0
    yield made
    while made.mount():
        subprocess.run(["umount", str(made.folder)], check=True)


def test_the_tmpfs_of_the_profile_is_mounted_at_its_folder_filled_and_given_back(here: Here) -> None:
    told = here("up", "--dry-run", "--json")
    step = next(item for item in json.loads(told.stdout)["data"]["steps"] if item["step"] == "engram")
    assert step["commands"][0] == ["mkdir", "-p", str(here.folder)] and step["writes"] == [str(here.folder)]
    assert "size=67108864" in step["commands"][1][4] and step["commands"][1][-1] == str(here.folder)
    for command in (("engram", "build", "--dry-run"), ("serve", "--dry-run")):
        assert f"ds41ctl {here.folder}" in here(*command).stdout, command
    assert not here.folder.parent.exists(), "a plan touches nothing"
    done = here("engram", "build")
    assert done.returncode == 0, done.stdout + done.stderr
    fstype, source, size, options = here.mount()
    assert (fstype, source, size) == ("tmpfs", "ds41ctl", "64M") and "mode=755" in options
    config = json.loads((here.root / "data" / "models" / "tiny-v41" / "config.json").read_text())
    for layer in config.get("text_config", config)["engram_layer_ids"]:
        shard, weight, scale = pack.engram_tensors(here.root / "data" / "models" / "tiny-v41", layer)
        read, data = Table(here.folder, layer), shard.read_bytes()
        for row in (0, 77, read.rows - 1):
            at = weight.begin + row * 256, scale.begin + row * 8
            assert read.row(row) == data[at[0] : at[0] + 256] + data[at[1] : at[1] + 8]
        read.close()
    assert "already" in here("engram", "build").stdout
    assert f"shards in {here.folder}" in here("engram", "status").stdout
    for words in (("engram", "verify"), ("engram", "verify", "--full")):
        assert here(*words).returncode == 0
    assert f"{here.folder}" in here("serve", "--dry-run").stdout
    assert here("engram", "drop").returncode == 0
    assert here.mount() == [] and not (here.root / "opt").exists()


def test_a_second_build_mounts_afresh_and_once(here: Here) -> None:
    assert here("engram", "build").returncode == 0
    manifest = here.root / "state" / "engram" / "named" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "boot_id": "of another boot"}))
    done = here("engram", "build")
    assert done.returncode == 0 and "already" not in done.stdout
    assert len(here.mount()) == 4, "one mount, not one on top of another"


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv to drop a capability")
@pytest.mark.parametrize("command", [("engram", "build"), ("up",)])
def test_without_the_right_to_mount_one_line_helps_and_no_byte_reaches_the_disk(
    here: Here, command: tuple[str, ...]
) -> None:
    done = here(*command, before=WITHOUT_MOUNT)
    said = done.stdout + done.stderr
    assert done.returncode == 77, said
    line = f"sudo mkdir -p {here.folder} && sudo mount -t tmpfs -o size=64M,huge=always,uid=0,mode=0755"
    if command == ("engram", "build"):
        assert line in said and "may not mount a tmpfs there" in said
    assert not (here.root / "opt").exists()


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv to drop a capability")
def test_a_tmpfs_that_somebody_with_the_right_mounted_is_used_and_left_where_it_is(here: Here) -> None:
    here.folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64M,mode=0755,uid=0", "tmpfs", str(here.folder)], check=True)
    done = here("engram", "build", before=WITHOUT_MOUNT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(here.folder.iterdir())) == 3
    assert here("engram", "drop", before=WITHOUT_MOUNT).returncode == 0
    assert here.mount()[:2] == ["tmpfs", "tmpfs"] and not list(here.folder.iterdir())


def test_one_that_is_too_small_is_refused_before_the_first_byte(here: Here) -> None:
    here.folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(here.folder)], check=True)
    done = here("engram", "build")
    assert done.returncode == 15 and "are free" in done.stdout + done.stderr
    assert not list(here.folder.iterdir())
