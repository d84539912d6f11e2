"""Installing engines offline with the real venv and pip: pinned to the byte, proven before use, reversible."""

from __future__ import annotations

import difflib
import hashlib
import os
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds41ctl.adapters import engineinstall, enginevenv, generations, kernels, proc, profiles, series, wheels
from ds41ctl.adapters.release import wheel as release_wheel
from ds41ctl.adapters.supply import Supply
from ds41ctl.core.errors import IntegrityError, NotFoundError, UnsupportedError
from ds41ctl.core.layout import Dirs, Layout, layout
from ds41ctl.core.settings import Settings
from ds41ctl.core.udiff import PatchError, apply
from ds41ctl.steps.engine import EngineInstall, verify
from tests.fakes import wheels as fake
from tests.fakes.venvs import bare, quick_venv

__all__ = ["bare", "quick_venv"]

pytestmark = pytest.mark.timeout(180)
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


def silent(text: str, data: dict[str, Any]) -> None:
    """Nobody looks."""


def made(tmp_path: Path, *, capability: str = "", **engine: Any) -> Layout:
    """A venv engine of two fake wheels in tmp_path/wheels, pinned by tmp_path/lock."""
    profile = profiles.read(profiles.find("cpu-tiny"))
    wanted = {"name": "fake", "lock": str(tmp_path / "lock"), "torch": "", "torch_index": "", "plugin": False} | engine
    profile = profile.model_copy(
        update={
            "engine": profile.engine.model_copy(update=wanted),
            "hardware": profile.hardware.model_copy(update={"compute_capability": capability}),
        }
    )
    dirs = Dirs(tmp_path / "data", tmp_path / "state", tmp_path / "cache", tmp_path / "run", os.getuid())
    return layout(profile, Settings(), dirs, may_mount=False)


def release(tmp_path: Path, version: str = "1.0", **torch: Any) -> Path:
    """Wheels of one version, and the lock that pins them."""
    folder = tmp_path / "wheels"
    fake.lock(tmp_path / "lock", fake.torch(folder, **torch), fake.vllm(folder, version))
    return folder


def install(where: Layout, folder: Path) -> None:
    EngineInstall(where, os.environ, Supply(wheels=folder)).do(silent)


def version(where: Layout) -> str:
    code = "import vllm; print(vllm.__version__)"
    return proc.run([str(where.python), "-I", "-c", code], timeout=60).stdout.strip()


def test_an_engine_from_a_folder_of_wheels_is_installed_proven_and_whole(tmp_path: Path) -> None:
    where = made(tmp_path, cuda="12.8", capability="7.0")
    install(where, release(tmp_path))
    assert version(where) == "1.0" and EngineInstall(where, os.environ).check().reached and verify(where) == []
    tree = enginevenv.read_manifest(where.engine_dir)
    assert tree is not None and tree["probe"] == {"torch": "9.1", "cuda": "12.8", "arch_list": ["sm_70", "sm_80"]}


def test_the_engine_before_is_used_until_the_new_one_is_proven_and_can_be_gone_back_to(tmp_path: Path) -> None:
    where = made(tmp_path)
    install(where, release(tmp_path))
    first = enginevenv.manifest_digest(where.engine_dir)
    release(tmp_path, "2.0")
    assert "lock sha256" in enginevenv.inspect(where).outdated[0]
    seen: list[str] = []

    def look(text: str, data: dict[str, Any]) -> None:
        seen.append(version(where))

    EngineInstall(where, os.environ, Supply(wheels=tmp_path / "wheels")).do(look)
    assert set(seen) == {"1.0"} and version(where) == "2.0"
    names = [(item.name, item.current) for item in generations.all_of(where.engine_dir)]
    assert [current for _, current in names] == [True, False]
    assert generations.back(where.engine_dir).name == names[1][0]
    assert version(where) == "1.0" and enginevenv.manifest_digest(where.engine_dir) == first


@pytest.mark.parametrize(
    ("torch", "message"),
    [
        ({"archs": ("sm_80",)}, "no kernels for sm_70"),
        ({"cuda": "13.0"}, r"built for CUDA 13\.0, 12\.8 wanted"),
        ({"cuda": "'; raise ImportError('libcudart.so.13: cannot open'); '"}, "cannot be imported"),
    ],
)
def test_an_engine_that_is_another_one_never_takes_the_place_of_the_one_in_use(
    tmp_path: Path, torch: dict[str, Any], message: str
) -> None:
    where = made(tmp_path, cuda="12.8", capability="7.0")
    install(where, release(tmp_path))
    if "raise" in str(torch.get("cuda")):
        folder = tmp_path / "wheels"
        bad = fake.wheel(folder, "torch", "9.1", {"torch/__init__.py": "raise ImportError('libcudart.so.13')\n"})
        fake.lock(tmp_path / "lock", bad, fake.vllm(folder, "2.0"))
    else:
        release(tmp_path, "2.0", **torch)
    with pytest.raises(IntegrityError, match=message):
        install(where, tmp_path / "wheels")
    assert version(where) == "1.0" and len(list((where.engine_dir / "generations").glob("*"))) == 1


def test_a_wheel_that_differs_from_the_lock_is_refused(tmp_path: Path) -> None:
    where = made(tmp_path)
    folder = release(tmp_path)
    fake.vllm(folder, "1.0", "changed = True\n")
    with pytest.raises(IntegrityError, match="differs from the lock's digest"):
        install(where, folder)
    assert not enginevenv.inspect(where).installed


def test_a_wheel_that_is_not_in_the_folder_is_not_looked_for_elsewhere(tmp_path: Path) -> None:
    where = made(tmp_path)
    folder = release(tmp_path)
    next(folder.glob("vllm*")).unlink()
    with pytest.raises(IntegrityError, match="was looked into"):
        install(where, folder)


def test_an_interrupted_install_leaves_the_engine_in_use_alone_and_nothing_else(tmp_path: Path) -> None:
    where = made(tmp_path)
    install(where, release(tmp_path))
    release(tmp_path, "2.0")

    def interrupted(text: str, data: dict[str, Any]) -> None:
        if text == "compiling bytecode":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engineinstall.install(where, os.environ, interrupted, Supply(wheels=tmp_path / "wheels"))
    assert version(where) == "1.0" and len(list((where.engine_dir / "generations").glob("*"))) == 1
    # what a SIGKILL leaves is no generation, and the next install removes it
    (where.engine_dir / "generations" / "half" / "venv").mkdir(parents=True)
    assert len(generations.all_of(where.engine_dir)) == 1
    install(where, tmp_path / "wheels")
    assert version(where) == "2.0" and not (where.engine_dir / "generations" / "half").exists()


def test_an_engine_of_before_is_taken_over_as_the_first_generation(tmp_path: Path) -> None:
    where = made(tmp_path)
    install(where, release(tmp_path))
    generation = generations.all_of(where.engine_dir)[0].folder
    for name in ("venv", "manifest.json", "current"):
        (where.engine_dir / name).unlink()
    for name in ("venv", "manifest.json"):
        (generation / name).rename(where.engine_dir / name)
    generation.rmdir()
    assert version(where) == "1.0" and [item.name for item in generations.all_of(where.engine_dir)] == ["first"]
    release(tmp_path, "2.0")
    install(where, tmp_path / "wheels")
    assert version(where) == "2.0"
    generations.back(where.engine_dir)
    assert version(where) == "1.0"


def test_our_plugin_is_brought_up_to_date_beside_the_engine_in_use_by_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels.compiler_module(), "compiler", lambda: "")  # that it compiles is tested elsewhere
    where = made(tmp_path, plugin=True)
    install(where, release(tmp_path))
    site = enginevenv.site_packages(where.engine_dir)
    assert (site / "ds41_engine" / "seen.py").is_file() and verify(where) == []
    entry = next(site.glob("ds41_engine-*.dist-info")) / "entry_points.txt"
    assert "ds41_engine = ds41_engine:register" in entry.read_text()
    torch = (site / "torch" / "__init__.py").stat().st_ino
    manifest = where.engine_dir / "manifest.json"
    text = manifest.read_text().replace(enginevenv.plugin_digest(), "0" * 64)
    manifest.resolve().write_text(text)
    engineinstall.install(where, os.environ, silent)  # no wheels and no index: nothing else is needed
    now = enginevenv.site_packages(where.engine_dir)
    assert now.resolve() != site.resolve() or len(generations.all_of(where.engine_dir)) == 2
    assert (now / "torch" / "__init__.py").stat().st_ino == torch and verify(where) == []


# ---- the release's wheel; where it comes from is tested in test_engine_release
def test_a_checksum_file_of_a_release_is_read_strictly(tmp_path: Path) -> None:
    digest, other = "0" * 64, "1" * 64
    assert wheels.parse_sums(f"{digest}  ./a.whl\n\n{other} *b.whl\n", "x") == {"a.whl": digest, "b.whl": other}
    with pytest.raises(IntegrityError, match="x: line 2 is no checksum: 'garbage'"):
        wheels.parse_sums(f"{digest}  a.whl\ngarbage\n", "x")
    with pytest.raises(IntegrityError, match="has two checksums"):
        wheels.parse_sums(f"{digest}  a.whl\n{other}  a.whl\n", "x")


@pytest.mark.parametrize(
    "name", ["1cat_vllm-1.5.2+ds41-cp310-cp310-linux_x86_64.whl", "vllm.whl", "../vllm-1-py3-none-any.whl"]
)
def test_a_wheel_of_another_python_or_a_strange_name_is_refused(tmp_path: Path, name: str) -> None:
    where = made(tmp_path, lock="", wheel=name, wheel_sha256="0" * 64, python="3.12")
    with pytest.raises(IntegrityError, match=r"is for cp310|no wheel's name"):
        release_wheel(where, Supply(wheels=tmp_path), silent)


def test_a_release_wheel_is_installed_with_ninja_and_what_lies_beside_it(tmp_path: Path) -> None:
    folder = tmp_path / "release"
    wheel = fake.vllm(folder, "1.5")
    fake.torch(folder)
    fake.wheel(folder, "ninja", "1.13", {"ninja.py": ""})
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    where = made(tmp_path, lock="", wheel=wheel.name, wheel_sha256=digest)
    with pytest.raises(NotFoundError, match="does not say where"):
        EngineInstall(where, os.environ).do(silent)
    # its torch is named by nothing here, so it must come with the wheel
    with pytest.raises(IntegrityError, match="cannot be imported"):
        install(where, folder)
    where = made(tmp_path, lock="", wheel=wheel.name, wheel_sha256=digest, torch="torch==9.1")
    install(where, folder)
    assert version(where) == "1.5" and "ninja" in (enginevenv.read_manifest(where.engine_dir) or {})["distributions"]


def test_a_python_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"there is no python3\.99 on PATH"):
        install(made(tmp_path, python="3.99"), release(tmp_path))


def test_an_engine_that_sees_a_machines_packages_is_made_with_the_python_that_holds_torch(
    tmp_path: Path, bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in an image with CUDA, whose Python is itself a venv; this test's own Python holds no torch."""
    where = made(tmp_path, system_packages=True)
    folder = release(tmp_path)
    fake.lock(tmp_path / "lock", folder / "vllm-1.0-py3-none-any.whl")  # torch is the machine's
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        UnsupportedError, match=rf"Python {HERE} that holds torch; none of these does: .*{sys.executable}"
    ):
        install(where, folder)
    image = tmp_path / "image"
    shutil.copytree(bare, image, symlinks=True)
    site = next((image / "lib").glob("python3*/site-packages"))
    with zipfile.ZipFile(folder / "torch-9.1-py3-none-any.whl") as archive:
        archive.extractall(site)
    monkeypatch.setenv("PATH", f"{image}/bin")
    install(where, folder)
    code = "import torch, vllm; print(torch.__file__)"
    assert proc.run([str(where.python), "-I", "-c", code], timeout=60).stdout.strip() == f"{site}/torch/__init__.py"
    assert verify(where) == []


def test_a_file_that_two_distributions_bring_is_whole_as_either_and_changed_as_neither(tmp_path: Path) -> None:
    """pip keeps the later one's file and both records, as for build_backend.py of the GPU lock."""
    where, folder = made(tmp_path), tmp_path / "wheels"
    ours = [fake.torch(folder), fake.vllm(folder)]
    for name, text in (("first", "x = 1\n"), ("second", "xyz = 22\n")):
        ours.append(fake.wheel(folder, name, "1.0", {"build_backend.py": text}))
    fake.lock(tmp_path / "lock", *ours)
    install(where, folder)
    shared = enginevenv.site_packages(where.engine_dir) / "build_backend.py"
    for text, found in (
        ("x = 1\n", []),
        ("xyz = 22\n", []),
        ("x = 2\n", ["build_backend.py was changed"]),
        ("", ["build_backend.py has 0 bytes, expected 6 or 9"]),
    ):
        shared.write_text(text)
        assert verify(where) == found


# ---- source patches
def test_every_committed_patch_is_one_diff_of_its_file_bound_to_two_digests() -> None:
    found = [root.name for root in series.folder("").iterdir() if (root / "series.toml").is_file()]
    assert "vllm-0.33.0" in found and set(found) <= {
        profiles.read(profiles.find(n)).engine.name for n in profiles.names()
    }
    for patch in (patch for name in found for patch in series.load(series.folder(name))):
        text = patch.diff.read_text()
        assert text.startswith(f"--- a/{patch.file}\n+++ b/{patch.file}\n@@ ") and text.count("\n--- ") == 0
        assert patch.before != patch.after and all(len(digest) == 64 for digest in (patch.before, patch.after))


def one_patch(root: Path, before: str, after: str, target: str = "vllm/model.py") -> None:
    """A series of one patch."""
    root.mkdir(parents=True, exist_ok=True)
    diff = difflib.unified_diff(before.splitlines(True), after.splitlines(True), f"a/{target}", f"b/{target}")
    (root / "0001-second.patch").write_text("".join(diff))
    sha = [hashlib.sha256(text.encode()).hexdigest() for text in (before, after)]
    (root / "series.toml").write_text(
        f'[[patch]]\nfile = "{target}"\npatch = "0001-second.patch"\nbefore = "{sha[0]}"\nafter = "{sha[1]}"\n'
    )


def test_source_patches_are_applied_to_the_new_engine_alone_and_verify_proves_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = made(tmp_path)
    install(where, release(tmp_path))
    old = enginevenv.site_packages(where.engine_dir).resolve()
    monkeypatch.setattr(series, "folder", lambda pin: tmp_path / "series" / pin)
    after = fake.MODEL.replace("return first", "return second")
    one_patch(tmp_path / "series" / "fake", fake.MODEL, after)
    assert any("series sha256" in text for text in enginevenv.inspect(where).outdated)
    install(where, tmp_path / "wheels")
    site = enginevenv.site_packages(where.engine_dir).resolve()
    assert (site / "vllm" / "model.py").read_text() == after and verify(where) == []
    assert (old / "vllm" / "model.py").read_text() == fake.MODEL
    (site / "vllm" / "model.py").write_text(fake.MODEL)
    assert any("0001-second.patch" in text for text in verify(where))


def test_a_patch_for_other_bytes_or_with_another_result_is_refused(tmp_path: Path) -> None:
    root, site = tmp_path / "series", tmp_path / "site"
    (site / "vllm").mkdir(parents=True)
    (site / "vllm" / "model.py").write_text("other\n")
    one_patch(root, fake.MODEL, fake.MODEL + "x = 1\n")
    with pytest.raises(IntegrityError, match=r"vllm/model.py is \w+, the patch is for"):
        series.apply_all(site, series.load(root))
    (site / "vllm" / "model.py").write_text(fake.MODEL)
    text = (root / "series.toml").read_text()
    (root / "series.toml").write_text(text.replace('after = "', 'after = "0'))
    with pytest.raises(IntegrityError, match=r"another vllm/model\.py than it promises"):
        series.apply_all(site, series.load(root))
    assert (site / "vllm" / "model.py").read_text() == fake.MODEL
    (root / "series.toml").write_text(text.replace("vllm/model.py", "../../etc/passwd"))
    with pytest.raises(IntegrityError, match="no path below site-packages"):
        series.load(root)


def test_a_patch_that_is_applied_already_is_left_and_a_folder_without_a_series_has_none(tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "vllm").mkdir(parents=True)
    after = fake.MODEL + "x = 1\n"
    (site / "vllm" / "model.py").write_text(after)
    one_patch(tmp_path / "series", fake.MODEL, after)
    series.apply_all(site, series.load(tmp_path / "series"))
    assert series.problems(site, series.load(tmp_path / "series")) == []
    assert series.load(tmp_path / "nothing") == () and series.digest(tmp_path / "nothing") == ""


lines = st.lists(st.sampled_from(["a", "b", "c", "d"]), max_size=14)


@given(lines, lines)
def test_any_diff_of_two_texts_gives_the_second_from_the_first(before: list[str], after: list[str]) -> None:
    first, second = ("".join(f"{line}\n" for line in text) for text in (before, after))
    diff = "".join(difflib.unified_diff(first.splitlines(True), second.splitlines(True), "a", "b"))
    if diff:
        assert apply(first, diff) == second


@given(lines, lines)
def test_a_diff_never_fits_another_text_by_searching(before: list[str], after: list[str]) -> None:
    first, second = ("".join(f"{line}\n" for line in text) for text in (before, after))
    diff = "".join(difflib.unified_diff(first.splitlines(True), second.splitlines(True), "a", "b"))
    if diff and before:
        with pytest.raises(PatchError):
            apply("other\n" + first.replace("a", "z").replace("b", "z").replace("c", "z").replace("d", "z"), diff)


@pytest.mark.parametrize(
    "diff", ["", "no diff at all\n", "@@ -1,2 +1,2 @@\n a\n", "@@ -9 +9 @@\n-a\n+b\n", "@@ -1 +1 @@\n?a\n"]
)
def test_a_broken_diff_is_refused_in_one_line(diff: str) -> None:
    with pytest.raises(PatchError):
        apply("a\nb\n", diff)
