"""Probe: the whole HostFacts of this machine for one profile."""

from __future__ import annotations

import os

from ds41ctl.adapters import enginevenv, host, pack, running, store
from ds41ctl.core.facts import HostFacts, RunningFacts
from ds41ctl.core.layout import Layout


def probe(layout: Layout) -> HostFacts:
    """Look once at everything the checks need; no network, no writing, about a second."""
    folder = store.locate(layout)
    paths = {**layout.dirs.roles(), "engine": layout.engine_dir, "store": folder, "model": layout.model_dir}
    facts = host.collect(layout.profile, paths=paths, host=layout.host, port=layout.port, environ=os.environ)
    record = running.read(layout.record_path)
    return facts.model_copy(
        update={
            "pack": pack.inspect(layout),
            "store": store.inspect(layout),
            "engine": enginevenv.inspect(layout) if layout.profile.engine.kind == "venv" else None,
            "running": None
            if record is None
            else RunningFacts(profile=record.profile, pid=record.pid, port=record.port, alive=record.alive()),
        }
    )
