"""pytest fixtures of the fake driver: compiled once a session, one state folder a test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes import nvml


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled stub."""
    library = nvml.build(tmp_path_factory.mktemp("nvml"))
    if library is None:
        pytest.skip("no C compiler")
    return library


@pytest.fixture
def driver(nvml_library: Path, tmp_path: Path) -> nvml.Driver:
    """A driver that plays the 8x V100 until told otherwise."""
    found = nvml.Driver(nvml_library, tmp_path / "driver")
    found.play(nvml.v100())
    return found
