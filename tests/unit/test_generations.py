"""Generations of an engine: each install a folder of its own, however fast one follows another."""

import json
from pathlib import Path

from ds41ctl.adapters import generations

DIGEST = "d81cdf6b" * 8


def installed(engine: Path, at: str) -> Path:
    folder = generations.new(engine, DIGEST)
    (folder / "venv").mkdir()
    (folder / "manifest.json").write_text(json.dumps({"installed_at": at}))
    generations.use(engine, folder.name)
    return folder


def test_an_install_within_the_same_second_never_takes_the_folder_of_the_engine_in_use(tmp_path: Path) -> None:
    folders = [installed(tmp_path, f"2026-11-30T00:22:02.{number:03}+00:00") for number in range(20)]
    assert len(set(folders)) == 20 and all((folder / "venv").is_dir() for folder in folders)
    assert (tmp_path / "venv").resolve() == folders[-1] / "venv"


def test_the_newest_that_is_not_in_use_is_gone_back_to_also_when_one_says_whole_seconds(tmp_path: Path) -> None:
    for at in ("2026-11-30T00:22:02+00:00", "2026-11-30T00:22:02.100+00:00", "2026-11-30T00:22:02.200+00:00"):
        installed(tmp_path, at)
    found = generations.all_of(tmp_path)
    assert [item.current for item in found] == [True, False, False]
    assert generations.back(tmp_path).installed_at.endswith("02.100+00:00")


def test_what_an_interrupted_install_left_goes_with_the_next_one(tmp_path: Path) -> None:
    half = generations.new(tmp_path, DIGEST)
    whole = installed(tmp_path, "2026-11-30T00:22:03.000+00:00")
    assert generations.prune(tmp_path) == [half.name]
    assert whole.is_dir() and not half.exists()
