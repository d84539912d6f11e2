"""The real command line on a recorded box: `python -m tests.fakes.box MACHINE ARGUMENTS`.

What this machine cannot have (cards' surroundings, memory, disks, toolkits) is the recorded machine's; what the
commands make and change (pack, engine, store, running engine, port) is looked at for real, and so are the GPUs that
NVML lists.
"""

from __future__ import annotations

import sys
from typing import Any

from ds41ctl.adapters import containers, probe
from ds41ctl.cli import main
from ds41ctl.core.facts import HostFacts
from ds41ctl.core.layout import Layout
from tests.facts.replay import machine

LIVE = ("collected_at", "profile", "port", "pack", "store", "engine", "running", "api_key", "gpu_groups")
IMAGE = ("image", "image_id", "names")


def on(name: str) -> None:
    """From now on this process sees the recorded machine."""
    real = probe.probe

    def look(layout: Layout, *given: Any, **options: Any) -> HostFacts:
        live = real(layout, *given, **options)
        recorded = machine(name)
        seen = recorded.model_copy(update={field: getattr(live, field) for field in LIVE})
        if recorded.container is not None and live.container is not None:
            there = recorded.container.model_copy(update={field: getattr(live.container, field) for field in IMAGE})
            seen = seen.model_copy(update={"container": there})
        if not live.gpus:
            return seen
        nodes = {gpu.index: gpu.numa_node for gpu in recorded.gpus or ()}
        gpus = tuple(gpu.model_copy(update={"numa_node": nodes.get(gpu.index)}) for gpu in live.gpus)
        return seen.model_copy(update={"gpus": gpus, "driver": live.driver, "driver_cuda": live.driver_cuda})

    probe.probe = look
    found = machine(name).container
    containers.cdi_specs = lambda root: found.specs if found is not None else ()


if __name__ == "__main__":
    on(sys.argv[1])
    sys.exit(main(sys.argv[2:]))
