"""Preflight: everything that can be known before the long step, as findings with a fix each."""

from __future__ import annotations

from collections.abc import Iterable

from ds41ctl.core.errors import ConfigError
from ds41ctl.core.facts import HostFacts
from ds41ctl.core.finding import Finding
from ds41ctl.core.nearest import nearest
from ds41ctl.core.profile import Profile
from preflight import disk, engine, engram, env, gpu, host, memory, net, pack, toolchain
from preflight.check import Check, Stage, Verdict

__all__ = ["ALL", "Check", "Stage", "Verdict", "groups", "not_checked", "run", "select", "table"]

ALL: tuple[Check, ...] = (
    *gpu.CHECKS,
    *host.CHECKS,
    *memory.CHECKS,
    *disk.CHECKS,
    *net.CHECKS,
    *env.CHECKS,
    *toolchain.CHECKS,
    *pack.CHECKS,
    *engram.CHECKS,
    *engine.CHECKS,
)
"""Every check, in the order it is run and shown."""


def select(only: Iterable[str] = (), skip: Iterable[str] = (), *, level: int = 1) -> list[Check]:
    """Checks up to `level` that `only` names (all when empty) and `skip` does not.

    A name is an id (`net.port`) or a domain (`disk`). Raises ConfigError for any other, with the near name.
    """
    wanted, unwanted = _resolve(only), _resolve(skip)
    return [
        check
        for check in ALL
        if check.level <= level and (not wanted or check.id in wanted) and check.id not in unwanted
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
    Raises ConfigError for an unknown id in `only` or `skip`.
    """
    return [check.run(profile, facts, stage) for check in select(only, skip, level=level)]


def not_checked(profile: Profile, facts: HostFacts, level: int = 1) -> list[str]:
    """What nobody looked at, one sentence each, so that a green result is not read as more than it is."""
    left = []
    if level < 2:
        left.append(f"contents of the pack's files (level 2: ds41ctl fetch --verify --profile {profile.name})")
    if profile.hardware.gpus:
        left.append("GPU topology, driver, kernel log, clocks, power limits (this version reads count, name, memory)")
        if level < 3:
            left.append("GPU memory and link bandwidth (level 3)")
    if profile.engine.kind == "container":
        left.append("room for the container image in the container runtime's own storage")
    if facts.memory.cgroup_limit == 0 and facts.system.container:
        left.append("limits that this container's host sets outside what the container can see")
    return left


def table() -> list[tuple[str, int, str, str]]:
    """(id, level, title, what it prevents) of every check, for the README."""
    return [(check.id, check.level, check.title, check.prevents) for check in ALL]


def groups() -> dict[str, str]:
    """Id -> heading under which the terminal shows it."""
    return {check.id: check.group for check in ALL}
