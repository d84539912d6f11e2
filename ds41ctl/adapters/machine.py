"""Machine: the few facts of this machine that a start of the engine depends on."""

from __future__ import annotations

from collections.abc import Mapping

from ds41ctl.adapters import containers, enginevenv, nvml
from ds41ctl.core.launch import Machine, uuids
from ds41ctl.core.layout import Layout


def look(layout: Layout, environ: Mapping[str, str]) -> Machine:
    """Ask NVML (never CUDA) for the GPUs of a profile that has some, and read the engine's manifest."""
    contained = layout.profile.engine.kind == "container"
    runtime = containers.client() if contained else ""
    digest = containers.image_digest(layout) if contained else enginevenv.manifest_digest(layout.engine_dir)
    if not layout.profile.hardware.gpus:
        return Machine({}, "", digest, environ, runtime)
    found = nvml.survey()
    return Machine(uuids(found.gpus), found.driver, digest, environ, runtime)
