"""Checks of the engine: installed, unchanged, and not running already."""

from __future__ import annotations

from ds41ctl.core.facts import EngineFacts, HostFacts
from ds41ctl.core.profile import Profile
from preflight.check import Check, Stage, Verdict, fail, ok, skip, unknown, warn
from preflight.text import command, version

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
        return _obtainable(profile, engine, expected)
    if engine.problem:
        fix = ("unset DS41_PYTHON", install) if "DS41_PYTHON" in engine.problem else (install,)
        return fail(
            f"the engine in {engine.dir} does not work: {engine.problem}",
            expected=expected,
            found=engine.problem,
            fix=fix,
        )
    return fail(f"the engine is not in {engine.dir}", expected=expected, found="not installed", fix=(install,))


def _obtainable(profile: Profile, engine: EngineFacts, expected: str) -> Verdict:
    """An engine that cannot be had is found before the pack is downloaded for it."""
    what = engine.problem or "not there yet"
    if engine.origin_problem:
        return fail(
            f"the engine cannot be had: {engine.origin_problem}",
            expected=expected,
            found="not installed",
            fix=engine.origin_fix,
            why="the pack would be downloaded for hours for an engine that then cannot be installed",
        )
    if engine.origin:
        return skip(f"{what}: will be installed from {engine.origin}")
    pinned = profile.engine
    if pinned.lock or pinned.image_digest:  # the profile alone says where everything comes from
        return skip(f"{what}: will be installed in {engine.dir}")
    return unknown(
        "where the engine would come from was not looked at",
        expected=expected,
        fix=(command("engine install", profile),),
    )


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


def others(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """No engine that ds41ctl did not start."""
    expected = "no other vLLM server on this machine"
    if facts.others is None:
        return unknown("the processes were not looked at", expected=expected, fix=("ps -eo pid,user,args | grep vllm",))
    if facts.others:
        first = facts.others[0]
        return warn(
            f"pid {first.pid} ({(first.command or first.name)[:60]}) serves vLLM too"
            + (f" and {len(facts.others) - 1} more" if facts.others[1:] else ""),
            expected=expected,
            found=f"{len(facts.others)} process(es)",
            fix=(f"kill {first.pid}   # if it is not needed",),
            why="it takes memory, cores and perhaps the GPUs; numbers measured beside it are not comparable",
        )
    return ok("none", expected=expected, found="none")


def abi(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """The engine's own Python imports torch and vLLM's compiled parts, of the right CUDA and for the right card."""
    if profile.engine.kind != "venv":
        return skip("the container brings its own Python")
    cuda, card = profile.engine.cuda, profile.hardware.compute_capability
    expected = "torch and vllm import" + (f", CUDA {cuda}" if cuda else "")
    again = (command("preflight --level 2 --only engine.abi", profile),)
    found = facts.abi
    if facts.engine is not None and not facts.engine.installed:
        return skip("the engine is not installed")
    if found is None:
        return unknown("the engine's Python was not asked", expected=expected, fix=again)
    if not found.ok:
        return fail(
            f"the engine cannot be imported: {found.problem}",
            expected=expected,
            found=found.problem,
            fix=(command("engine install", profile),),
            why="the wheel was built for another torch, CUDA or C library",
        )
    if cuda and version(found.torch_cuda)[:2] != version(cuda)[:2]:
        return fail(
            f"torch {found.torch} is built for CUDA {found.torch_cuda or 'none'}",
            expected=f"CUDA {cuda}",
            found=found.torch_cuda or "none",
            fix=(command("engine install", profile),),
            why="CUDA 13 has no kernels for Volta",
        )
    arch = "sm_" + card.replace(".", "")
    if card and arch not in found.arch_list:
        return fail(
            f"torch {found.torch} has no kernels for {arch}",
            expected=arch,
            found=", ".join(found.arch_list) or "none",
            fix=(command("engine install", profile),),
        )
    if "site-packages" not in found.vllm_file:
        return fail(
            f"vllm is imported from {found.vllm_file}",
            expected="the installed wheel (site-packages)",
            found=found.vllm_file,
            fix=("unset PYTHONPATH", command("engine install", profile)),
            why="a source folder hides the pinned wheel",
        )
    return ok(f"torch {found.torch}, CUDA {found.torch_cuda or 'none'}", expected=expected, found="imports")


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
    Check(
        "engine.others",
        "no vLLM server of anybody else",
        1,
        GROUP,
        "two engines on the same cards, or numbers measured beside another load",
        others,
    ),
    Check(
        "engine.abi",
        "the engine imports, for the right CUDA and card",
        2,
        GROUP,
        "a wheel that fails at its first import, or has no kernels for the card",
        abi,
    ),
)
