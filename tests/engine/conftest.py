"""Fixtures of the engine tests. They run inside the engine's venv; without torch and vllm nothing here is collected."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("torch") is None or find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:  # the engines of other tests are not to run under these
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # One unbound thread: two spinning threads on a busy two-core machine take many times as long.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint in the real layout."""
    from tiny_checkpoint import write_checkpoint

    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder)
    return folder


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    """The Engram store of ``checkpoint``."""
    from tiny_checkpoint import write_store

    folder = tmp_path_factory.mktemp("store")
    write_store(folder, checkpoint)
    return folder
