"""The wheel, installed in a venv of its own, carries everything that an engine is made from, byte for byte."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from ds41ctl.adapters import enginevenv, kernels

REPOSITORY = Path(__file__).resolve().parents[2]
ASK = """
import json
from ds41ctl.adapters import enginevenv, kernels, pack, profiles
print(json.dumps({
    "kernels": str(kernels.source()),
    "library": kernels.compiler_module().source_digest(),
    "digests": [enginevenv.kernels_digest(), enginevenv.plugin_digest()],
    "files": [path.is_file() for path in (
        enginevenv.plugin_source() / "pyproject.toml",
        profiles.find("cpu-tiny"),
        pack.recipe_folder("tiny-v41") / "pack.json",
    )],
}))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """site-packages of a venv in which the wheel, and nothing of this checkout, is installed."""
    root = tmp_path_factory.mktemp("wheel")

    def run(*argv: str) -> None:
        done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(root))
    (wheel,) = root.glob("*.whl")
    venv.create(root / "venv", with_pip=False)
    (site,) = (root / "venv" / "lib").glob("python3*/site-packages")
    # the dependencies are this Python's own: a line in a .pth file without this checkout's
    ours = next(Path(name) for name in sys.path if name.endswith("site-packages"))
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(root / "venv"),
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        str(wheel),
    )
    (site / "dependencies.pth").write_text(f"{ours}\n")
    return site


def test_sources_of_the_engine_are_found_in_an_installed_wheel(installed: Path, tmp_path: Path) -> None:
    python = installed.parents[2] / "bin" / "python"
    done = subprocess.run(
        [python, "-I", "-c", ASK], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert Path(found["kernels"]) == installed / "engine_patches" / "ds41_kernels"
    assert found["library"] == kernels.compiler_module().source_digest()
    assert found["digests"] == [enginevenv.kernels_digest(), enginevenv.plugin_digest()]
    assert all(found["files"])


def test_no_package_of_the_engine_is_importable_where_the_cli_is_installed(installed: Path) -> None:
    """`kernels` is another project's name; ds41_engine and ds41_kernels belong into the engine's venv alone."""
    packages = {path.name for path in installed.iterdir() if path.is_dir() and not path.name.endswith(".dist-info")}
    assert packages - {"__pycache__"} == {"ds41ctl", "preflight", "smoke", "profiles", "engine_patches"}


def test_nothing_built_and_no_trainer_travels(installed: Path) -> None:
    names = {path.relative_to(installed).as_posix() for path in installed.rglob("*") if "__pycache__" not in path.parts}
    assert not [name for name in names if name.endswith((".so", ".o")) or "tiny_pack" in name]
