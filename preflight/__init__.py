"""Preflight: everything that can be known before the long step, as findings with a fix each."""

from __future__ import annotations

from collections.abc import Iterable

from ds41ctl.core.errors import ConfigError
from ds41ctl.core.facts import HostFacts
from ds41ctl.core.finding import Finding
from ds41ctl.core.launch import as_told
from ds41ctl.core.nearest import nearest
from ds41ctl.core.profile import Profile
from preflight import (
    clocks,
    disk,
    engine,
    engram,
    env,
    gpu,
    host,
    kernel,
    links,
    memory,
    net,
    pack,
    serving,
    toolchain,
)
from preflight.check import Check, Stage, Verdict

__all__ = ["ALL", "Check", "Stage", "Verdict", "groups", "not_checked", "run", "select", "table"]

ALL: tuple[Check, ...] = (
    *gpu.CHECKS,
    *links.CHECKS,
    *clocks.CHECKS,
    *host.CHECKS,
    *kernel.CHECKS,
    *memory.CHECKS,
    *disk.CHECKS,
    *net.CHECKS,
    *env.CHECKS,
    *toolchain.CHECKS,
    *pack.CHECKS,
    *engram.CHECKS,
    *engine.CHECKS,
    *serving.CHECKS,
)
"""Every check, in the order it is run and shown."""


def select(only: Iterable[str] = (), skip: Iterable[str] = (), *, level: int = 1) -> list[Check]:
    """Checks up to `level` that `only` names (all when empty) and `skip` does not.

    A name is an id (`net.port`) or a domain (`disk`). An id in `only` is asked for by name, so its level does not
    matter. Raises ConfigError for any other name, with the near one.
    """
    only = tuple(only)
    wanted, unwanted = _resolve(only), _resolve(skip)
    return [
        check
        for check in ALL
        if (check.level <= level or check.id in only)
        and (not wanted or check.id in wanted)
        and check.id not in unwanted
    ]


def _resolve(names: Iterable[str]) -> set[str]:
    known = {check.id: {check.id} for check in ALL}
    for check in ALL:
        known.setdefault(check.id.split(".")[0], set()).add(check.id)
    found: set[str] = set()
    for name in names:
        if name not in known:
            near = nearest(name, known)
            raise ConfigError(
                f"there is no check {name!r}" + (f"; did you mean {near}?" if near else ""),
                hints=("ds41ctl preflight --list",),
            )
        found |= known[name]
    return found


def run(
    profile: Profile,
    facts: HostFacts,
    *,
    stage: Stage = "up",
    level: int = 1,
    only: Iterable[str] = (),
    skip: Iterable[str] = (),
) -> list[Finding]:
    """One finding a check, in ALL's order. Pure: asks nothing but its arguments.

    `stage` up: what is not there yet is a SKIP that says which step makes it. serve: it is a FAIL with the
    command that makes it. A check that raises becomes a CRASH finding and the others go on.
    The checks judge what will run: command line and environment with the host and the port that facts were taken for.
    Raises ConfigError for an unknown id in `only` or `skip`.
    """
    where = facts.port
    host, port = (where.host, where.port) if where is not None else (profile.serve.host, profile.serve.port)
    told = as_told(profile, host, port)
    return [check.run(told, facts, stage) for check in select(only, skip, level=level)]


def not_checked(profile: Profile, facts: HostFacts, level: int = 1) -> list[str]:
    """What nobody looked at and why, one sentence each, so that a green result is not read as more than it is."""
    left = []
    deeper = [check for check in ALL if check.level > level]
    for number, what in ((2, "reads data"), (3, "loads the cards")):
        ids = [check.id for check in deeper if check.level == number and (number < 3 or profile.hardware.gpus > 1)]
        if ids:
            left.append(f"{', '.join(ids)} (level {number} {what}: ds41ctl preflight --level {number})")
    if profile.hardware.gpus:
        if profile.clocks.sm_mhz is not None:
            left.append("whether a locked clock is kept under load (needs load: ds41ctl clocks status --sample 10)")
        if facts.topology is None:
            left.append("NVML's topology against nvidia-smi's (nvidia-smi is not installed)")
        if profile.clocks.sm_mhz is None or facts.clock_permission == "":
            left.append("locks that somebody else set on the GPUs' clocks (the driver does not tell)")
    if profile.engine.kind == "container" and (facts.container is None or facts.container.storage_free is None):
        left.append("room for the container image in the container runtime's own storage")
    if facts.memory.cgroup_limit == 0 and facts.system.container:
        left.append("limits that this container's host sets outside what the container can see")
    if profile.state != "measured":
        left.append("the profile's numbers on this card: they are its authors', nothing was run here on the real card")
    return left


def table() -> list[tuple[str, int, str, str]]:
    """(id, level, title, what it prevents) of every check, for the README."""
    return [(check.id, check.level, check.title, check.prevents) for check in ALL]


def groups() -> dict[str, str]:
    """Id -> heading under which the terminal shows it."""
    return {check.id: check.group for check in ALL}
