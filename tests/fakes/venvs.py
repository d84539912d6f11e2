"""A venv by hard links: fixtures for tests that install many small engines with the real pip."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ds41ctl.adapters import engineinstall, proc


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One real venv with pip and its bytecode: making it is most of the time of a small install."""
    target = tmp_path_factory.mktemp("bare") / "venv"
    assert proc.run([sys.executable, "-m", "venv", str(target)], timeout=120).ok
    site = next((target / "lib").glob("python3*/site-packages"))
    proc.run([str(target / "bin" / "python"), "-m", "compileall", "-q", str(site)], timeout=120)
    return target


@pytest.fixture(autouse=True)
def quick_venv(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m venv` gives a copy of the bare one by hard links; everything else is as it is."""
    if "installed_proven_and_whole" in request.node.name:
        return  # that one test makes its venv as a user's install does
    real = proc.stream

    def stream(argv: Sequence[str], **options: Any) -> int:
        if list(argv[1:3]) != ["-m", "venv"]:
            return real(argv, **options)
        source: Path = request.getfixturevalue("bare")
        shutil.copytree(source, argv[-1], symlinks=True, copy_function=os.link)
        return 0

    monkeypatch.setattr(engineinstall.proc, "stream", stream)
