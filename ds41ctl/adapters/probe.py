"""Probe: the whole HostFacts of this machine for one profile."""

from __future__ import annotations

import os
from pathlib import Path

from ds41ctl.adapters import deep, engineimage, enginevenv, host, packsize, running, storeplace, supply
from ds41ctl.adapters.supply import Supply
from ds41ctl.core.facts import EngineFacts, HostFacts, RunningFacts
from ds41ctl.core.layout import Layout


def probe(layout: Layout, given: Supply | None = None, *, level: int = 1) -> HostFacts:
    """Look once at everything the checks need; no network, no writing, about a second at level 1.

    `given`: where the user lets an engine that is missing come from.

    Level 2 also reads every byte of the pack and imports the engine, level 3 also runs work on the GPUs.
    """
    found = storeplace.look(layout)
    # a store of shards keeps its manifest elsewhere: what counts is the filesystem of its files
    folder = Path(found.data_dir if found.format == "shards" else found.dir)
    paths = {**layout.dirs.roles(), "engine": layout.engine_dir, "store": folder, "model": layout.model_dir}
    facts = host.collect(
        layout.profile, paths=paths, host=layout.host, port=layout.port, environ=os.environ, cache_dir=layout.cache_dir
    )
    record = running.read(layout.record_path)
    facts = facts.model_copy(
        update={
            "pack": packsize.inspect(layout),
            "store": found,
            "gpu_groups": dict(layout.gpu_groups),
            "api_key": layout.api_key_file is not None,
            "engine": _with_origin(
                layout,
                enginevenv.inspect(layout) if layout.profile.engine.kind == "venv" else _image(layout, facts),
                given or Supply(),
            ),
            "running": None
            if record is None
            else RunningFacts(profile=record.profile, pid=record.pid, port=record.port, alive=record.alive()),
        }
    )
    return facts if level < 2 else deep.deepen(facts, layout, level, os.environ)


def _with_origin(layout: Layout, engine: EngineFacts | None, given: Supply) -> EngineFacts | None:
    """The engine's facts, with where it would come from while it is not there."""
    if engine is None or engine.installed or layout.own_python:
        return engine
    origin = supply.look(layout, given)
    return engine.model_copy(update={"origin": origin.text, "origin_problem": origin.problem, "origin_fix": origin.fix})


def _image(layout: Layout, facts: HostFacts) -> EngineFacts | None:
    """A container engine is installed when its image is there; its id is its manifest, judged by the recorded one."""
    found, wanted = facts.container, layout.profile.engine
    if found is None or found.image_id is None:
        return None
    id = found.image_id.removeprefix("sha256:")
    wrong = engineimage.drift(layout, id) if id else ""
    return EngineFacts(
        dir=wanted.image, kind="container", installed=bool(id), manifest_digest=id, drift=(wrong,) if wrong else ()
    )
