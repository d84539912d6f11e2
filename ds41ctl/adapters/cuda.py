"""The CUDA toolkit on disk: where it is and which NVRTC it has. Nothing is loaded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from ds41ctl.core.facts import CudaFacts

_LIBRARY = re.compile(r"libnvrtc\.so\.(\d+(?:\.\d+)+)")
_FOLDERS = ("lib64", "targets/x86_64-linux/lib", "lib")


def toolkit(nvcc: str, environ: Mapping[str, str]) -> CudaFacts:
    """The toolkit that holds `nvcc` (its path, '' for none), else the one CUDA_HOME names, else the usual folder."""
    homes = [Path(nvcc).resolve().parents[1]] if nvcc else []
    homes += [Path(environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if environ.get(name)]
    homes.append(Path("/usr/local/cuda"))
    there = [path for path in homes if path.is_dir()]
    for home in there:
        found = _nvrtc(home)
        if found is not None:
            return found
    return CudaFacts(home=str(there[0])) if there else CudaFacts()


def _nvrtc(home: Path) -> CudaFacts | None:
    for folder in _FOLDERS:
        try:
            names = sorted(entry.name for entry in (home / folder).iterdir())
        except OSError:
            continue
        for name in reversed(names):
            match = _LIBRARY.fullmatch(name)
            if match:
                return CudaFacts(home=str(home), nvrtc=str(home / folder / name), nvrtc_version=match[1])
    return None
