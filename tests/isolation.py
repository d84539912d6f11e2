"""Isolation: no test sees this user's folders, variables, tmux or network."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from pytest_socket import socket_allow_hosts

# a property is judged by its truth; how long one example takes on a busy machine is no part of it
settings.register_profile("ds41ctl", deadline=None)
settings.load_profile("ds41ctl")

_DROPPED = ("DS41_", "TMUX", "HF_", "VLLM_", "CUDA_", "PIP_", "XDG_", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE")


@pytest.fixture(scope="session")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Names of folders that do not exist yet. The factory itself reads its whole folder for every new number."""
    base = tmp_path_factory.mktemp("homes")
    return (base / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def isolated(homes: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home, state, data and runtime folder of this test alone, a fixed terminal, no inherited settings."""
    for name in list(os.environ):
        if name.startswith(_DROPPED):
            monkeypatch.delenv(name)
    home = next(homes)
    home.mkdir()
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
        "PIP_CONFIG_FILE": os.devnull,  # a constraint of this machine's would decide what a test installs
    }.items():
        monkeypatch.setenv(name, value)
    return home


@pytest.fixture(autouse=True)
def loopback_only() -> None:
    """Anything but loopback raises."""
    socket_allow_hosts(["127.0.0.1", "::1"], allow_unix_socket=True)  # a name would be resolved for every test
