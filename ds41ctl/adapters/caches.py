"""Leftovers of earlier runs that hang or mislead a start: compiler locks and vLLM's peer-access caches."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from ds41ctl.adapters.textfile import text
from ds41ctl.core.facts import CacheFacts, P2pCache, StaleLock

DEPTH = 5  # policy: <engine and driver>/torch_extensions/<python>_<cuda>/<extension>/lock


def inspect(environ: Mapping[str, str], cache_dir: Path | None, root: Path) -> CacheFacts:
    """Look in torch's extension folder, the engine's own cache and vLLM's."""
    home = Path(environ.get("HOME", "/"))
    xdg = Path(environ.get("XDG_CACHE_HOME") or home / ".cache")
    folders = [Path(environ.get("TORCH_EXTENSIONS_DIR") or xdg / "torch_extensions")]
    if cache_dir is not None:
        folders.append(cache_dir)
    vllm = Path(environ.get("VLLM_CACHE_ROOT") or xdg / "vllm")
    paths = [path for folder in folders for path in _locks(folder, DEPTH)]
    holders = _holders(paths)
    now = time.time()
    found = []
    for path in paths:
        try:
            age = now - path.stat().st_mtime
        except OSError:
            continue  # gone meanwhile
        found.append(StaleLock(path=str(path), age_s=round(age, 1), holder=holders.get(str(path), 0)))
    return CacheFacts(locks=tuple(found), p2p=tuple(_peer_caches(vllm, _boot_time(root))))


def _locks(folder: Path, depth: int) -> list[Path]:
    """Files named `lock` or `*.lock`, at most `depth` folders down. A cache may be large: nothing else is opened."""
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return []
    found = []
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            found += _locks(Path(entry.path), depth - 1) if depth > 0 else []
        elif entry.name == "lock" or entry.name.endswith(".lock"):
            found.append(Path(entry.path))
    return found


def _holders(paths: Iterable[Path]) -> dict[str, int]:
    """Path -> pid of a process of ours that has it open."""
    wanted = {str(path) for path in paths}
    found: dict[str, int] = {}
    if not wanted:
        return found
    for folder in Path("/proc").glob("[0-9]*/fd"):
        try:
            for entry in os.scandir(folder):
                target = str(Path(entry.path).readlink())
                if target in wanted:
                    found[target] = int(folder.parent.name)
        except OSError:
            continue  # another user's process, or one that has ended
    return found


def _boot_time(root: Path) -> float | None:
    match = re.search(r"^btime (\d+)$", text(root / "proc/stat") or "", re.MULTILINE)
    return float(match[1]) if match else None


def _peer_caches(folder: Path, boot: float | None) -> list[P2pCache]:
    found = []
    for path in sorted(folder.glob("gpu_p2p_access_cache_for_*.json")):
        content = text(path)
        try:
            valid = content is not None and isinstance(json.loads(content), dict)
            older = boot is not None and path.stat().st_mtime < boot
        except ValueError:
            valid, older = False, False
        except OSError:
            continue
        found.append(P2pCache(path=str(path), valid=valid, older_than_boot=older))
    return found
