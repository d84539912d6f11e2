"""Which Python an engine's venv is made with: of the version its wheels are for, and one that can."""

from __future__ import annotations

import os
import shutil
import sys

from ds41ctl.adapters import distro, proc
from ds41ctl.core.errors import UnsupportedError
from ds41ctl.core.layout import Layout, default_python
from ds41ctl.core.packages import venv_names

TIMEOUT_S = 60
_LOOK = (
    "import importlib.util as u, sys; "
    "print(*sys.version_info[:2], *(u.find_spec(name) is not None for name in ('ensurepip', 'torch')))"
)


def find(layout: Layout) -> str:
    """Its path. The CLI's own where that will do, else the first on PATH; an engine that sees the machine's packages
    takes the first that holds torch, so not the CLI's empty venv.

    Raises UnsupportedError with what was looked at and what to install.
    """
    engine = layout.profile.engine
    version = engine.python or default_python()
    if version == default_python() and not engine.system_packages:
        return sys.executable
    found = _candidates(version)
    fit = [path for path in found if not engine.system_packages or found[path][1]]
    able = [path for path in fit if found[path][0]]
    if able:
        return able[0]
    package = distro.install_line(f"python{version}-venv", venv_names(version))
    if fit:
        raise UnsupportedError(f"{fit[0]} cannot make a venv: ensurepip is missing", hints=(package,))
    if found:
        raise UnsupportedError(
            f"the engine of {layout.name} takes CUDA libraries from a Python {version} that holds torch; "
            f"none of these does: {', '.join(found)}",
            hints=("put the machine's own Python with torch first in PATH",),
        )
    raise UnsupportedError(
        f"the engine of {layout.name} needs Python {version}; there is no python{version} on PATH", hints=(package,)
    )


def _candidates(version: str) -> dict[str, tuple[bool, bool]]:
    """Pythons of that version in order: path -> (can make a venv, holds torch)."""
    names = (f"python{version}", "python3")
    on_path = [shutil.which(name, path=part) for part in os.get_exec_path() for name in names]
    found = {}
    for path in dict.fromkeys([sys.executable, *(path for path in on_path if path)]):
        # -I: what lies in PYTHONPATH here is not there when the engine starts
        words = proc.run([path, "-I", "-c", _LOOK], timeout=TIMEOUT_S).stdout.split()
        if len(words) == 4 and words[:2] == version.split("."):
            found[path] = (words[2] == "True", words[3] == "True")
    return found
