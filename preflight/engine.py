"""Checks of the engine: installed, unchanged, and not running already."""

from __future__ import annotations

from ds41ctl.core.facts import HostFacts
from ds41ctl.core.profile import Profile
from preflight.check import Check, Stage, Verdict, fail, ok, skip, unknown, warn
from preflight.text import command

GROUP = "ENGINE"


def _look(profile: Profile) -> tuple[str, ...]:
    if profile.engine.kind == "container":
        return (f"docker image inspect {profile.engine.image}",)
    return (command("engine verify", profile),)


def installed(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """The pinned engine is there and answers for itself."""
    expected = f"engine {profile.engine.name} installed"
    install = command("engine install", profile)
    engine = facts.engine
    if engine is None:
        return unknown("the engine was not looked at", expected=expected, fix=_look(profile))
    if engine.installed and not engine.problem:
        versions = ", ".join(f"{name} {version}" for name, version in sorted(engine.versions.items()))
        return ok(versions or f"{engine.kind} in {engine.dir}", expected=expected, found="installed")
    if not engine.installed and stage == "up" and "DS41_PYTHON" not in engine.problem:
        return skip(f"{engine.problem or 'not there yet'}: will be installed in {engine.dir}")
    if engine.problem:
        fix = ("unset DS41_PYTHON", install) if "DS41_PYTHON" in engine.problem else (install,)
        return fail(
            f"the engine in {engine.dir} does not work: {engine.problem}",
            expected=expected,
            found=engine.problem,
            fix=fix,
        )
    return fail(f"the engine is not in {engine.dir}", expected=expected, found="not installed", fix=(install,))


def drift(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """What is installed is what the manifest says was installed."""
    expected = "the files and versions of the engine's manifest"
    engine = facts.engine
    if engine is None:
        return unknown("the engine was not looked at", expected=expected, fix=_look(profile))
    if not engine.installed:
        return skip("the engine is not installed")
    if engine.drift:
        return fail(
            f"the engine differs from its manifest: {engine.drift[0]}"
            + (f" and {len(engine.drift) - 1} more" if engine.drift[1:] else ""),
            expected=expected,
            found=f"{len(engine.drift)} difference(s)",
            fix=(command("engine install --force", profile),),
            why="numbers and answers of a changed engine are not those of the pinned one",
            evidence=engine.drift,
        )
    if engine.outdated and stage == "up":
        return skip(f"will be brought up to date: {engine.outdated[0]}")
    if engine.outdated:
        return fail(
            f"the engine is not the one this profile pins: {engine.outdated[0]}",
            expected=expected,
            found=f"{len(engine.outdated)} difference(s)",
            fix=(command("engine install", profile),),
            why="numbers and answers of another engine are not those of the pinned one",
            evidence=engine.outdated,
        )
    if not engine.manifest_digest:
        return unknown(
            "the engine has no manifest, so nothing can be compared",
            expected=expected,
            fix=("unset DS41_PYTHON   # to use the pinned engine", command("engine install", profile)),
        )
    return ok(f"manifest {engine.manifest_digest[:12]}", expected=expected, found="equal")


def running(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """No engine of this user is alive (for `up`, this profile's own one may be)."""
    found = facts.running
    expected = "no engine running"
    if found is None:
        return ok("none", expected=expected, found="none")
    where = f"pid {found.pid}, port {found.port}, profile {found.profile}"
    if not found.alive:
        return warn(
            f"an engine died and left its record ({where})",
            expected=expected,
            found=where,
            fix=(f"ds41ctl stop --profile {found.profile}",),
            why="its workers may still hold memory and the port",
        )
    if stage == "up" and found.profile == profile.name:
        return skip(f"already running ({where})")
    return fail(
        f"an engine is already running ({where})",
        expected=expected,
        found=where,
        fix=(f"ds41ctl stop --profile {found.profile}", command("serve --replace", profile)),
        why="two engines share memory, port and store",
    )


CHECKS = (
    Check(
        "engine.installed",
        "the pinned engine is installed and loads",
        1,
        GROUP,
        "a launch of an engine that is not there or cannot be imported",
        installed,
    ),
    Check(
        "engine.drift",
        "the engine is what its manifest says",
        1,
        GROUP,
        "an engine changed by hand or by pip, whose numbers are compared with the pinned one's",
        drift,
    ),
    Check(
        "engine.running",
        "no other engine is running",
        1,
        GROUP,
        "two engines fighting for memory, or a second start that a supervisor repeats for ever",
        running,
    ),
)
