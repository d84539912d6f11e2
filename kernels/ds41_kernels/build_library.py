"""Hatchling hook: compiles the library with the system's C++ compiler; without one the package falls back to numpy."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CompileLibrary(BuildHookInterface[Any]):
    """Puts ``libds41_kernels.so`` beside its sources and marks the wheel as one for this platform."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; a machine without a compiler gets the sources alone, and one line that says so."""
        package = Path(self.root) / "ds41_kernels"
        spec = importlib.util.spec_from_file_location("ds41_compile", package / "compile.py")
        if spec is None or spec.loader is None:
            raise RuntimeError(f"{package / 'compile.py'} is missing")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        problem = module.compile_library(package / module.LIBRARY)
        if problem:
            self.app.display_warning(f"ds41_kernels: not compiled ({problem}); numpy will do its work")
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{module.platform_tag()}"
