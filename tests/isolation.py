"""Isolation: no test sees this user's folders, variables, tmux or network."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# a property is judged by its truth; how long one example takes on a busy machine is no part of it
settings.register_profile("ds41ctl", deadline=None)
settings.load_profile("ds41ctl")

_DROPPED = ("DS41_", "TMUX", "HF_", "VLLM_", "CUDA_", "XDG_", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE")


@pytest.fixture(autouse=True)
def isolated(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home, state, data and runtime folder of this test alone, a fixed terminal, no inherited settings."""
    for name in list(os.environ):
        if name.startswith(_DROPPED):
            monkeypatch.delenv(name)
    home = tmp_path_factory.mktemp("home")
    for name, value in {
        "HOME": str(home),
        "XDG_DATA_HOME": str(home / "data"),
        "XDG_STATE_HOME": str(home / "state"),
        "XDG_CACHE_HOME": str(home / "cache"),
        "XDG_CONFIG_HOME": str(home / "config"),
        "NO_COLOR": "1",
        "COLUMNS": "200",
        "TERM": "dumb",
        "LC_ALL": "C.UTF-8",
    }.items():
        monkeypatch.setenv(name, value)
    yield home
