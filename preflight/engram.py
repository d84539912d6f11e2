"""Checks of the Engram store: where the tables live, and whether what lives there is valid now."""

from __future__ import annotations

from ds41ctl.core.facts import HostFacts
from ds41ctl.core.launch import passed_on
from ds41ctl.core.profile import Profile
from preflight.check import Check, Stage, Verdict, fail, ok, skip, unknown, warn
from preflight.text import command, size

GROUP = "ENGRAM"


def storage(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """The profile states a storage that fills the tables."""
    expected = "engram.storage tmpfs or hugetlb"
    why = "the engine reserves room for the tables, never fills it, and raises no error (15 of 20 copies right)"
    if not profile.model.engram:
        return skip("this model has no Engram layers")
    if profile.engram.storage == "none":
        return fail(
            "engram.storage is none: the tables would stay empty",
            expected=expected,
            found="none",
            fix=(f'set storage = "tmpfs" in [engram] of profile {profile.name}',),
            why=why,
        )
    if profile.engram.storage == "engine":
        return _kept(profile, why)
    unread = _unread(profile)
    if unread is not None:
        return unread
    if profile.engine.kind == "container":
        passed = passed_on(profile).get("DSV41_ENGRAM_STORAGE", "")
        if passed != "ssd":
            return fail(
                f"DSV41_ENGRAM_STORAGE is {passed or 'not set'}: the tables would stay empty",
                expected="DSV41_ENGRAM_STORAGE=ssd in the container's environment",
                found=passed or "unset (host mode)",
                fix=(f'add "-e", "DSV41_ENGRAM_STORAGE=ssd" to serve.argv of profile {profile.name}',),
                why=why,
            )
    return ok(f"engram.storage {profile.engram.storage}", expected=expected, found=profile.engram.storage)


def _kept(profile: Profile, why: str) -> Verdict:
    """An engine that keeps the tables itself: our plugin counts what it loads, of any other three things together are
    the proof. The third, exact copies, every profile has (smoke.copies)."""
    proof = "ds41: every tensor the pack must have was loaded"
    markers = profile.serve.required_markers
    if profile.engine.plugin:
        if any(proof in marker.text for marker in markers):
            return ok("kept by the engine, whose plugin proves them loaded", expected=proof, found="engine")
        return fail(
            "the engine keeps the tables itself, and nothing proves that it fills them",
            expected=f"plugin = true in [engine] and the required marker {proof!r}",
            found="no proof",
            fix=(f"add the marker to profile {profile.name}",),
            why=why,
        )
    expected = "a required marker about the Engram tables, engram.host_copies, and exact copies in the smoke test"
    lacking = []
    if not any("engram" in marker.text.lower() for marker in markers):
        lacking.append("a [[serve.required_markers]] about the Engram tables")
    if not profile.engram.host_copies:
        lacking.append("host_copies in [engram] (whole copies of the tables in host memory)")
    if lacking:
        return fail(
            f"the engine keeps the tables itself, and the profile lacks {' and '.join(lacking)}",
            expected=expected,
            found="no " + ", no ".join(lacking),
            fix=(f"add {' and '.join(lacking)} to profile {profile.name}",),
            why=why,
        )
    copies = f"{profile.engram.host_copies} in host memory"
    return ok(
        f"kept by the engine ({copies}), proven by markers, memory growth and {profile.smoke.copies} exact copies",
        expected=expected,
        found="engine",
    )


def _unread(profile: Profile) -> Verdict | None:
    """A store that nobody would read: of a form that is not this engine's, or of which nothing tells it."""
    engram, plugin = profile.engram, profile.engine.plugin and profile.engine.kind == "venv"
    why = "it would take the memory of the tables, and the engine would start without them or load its own"
    expected = "a store that the engine reads"
    if engram.format == "records" and not plugin:
        return fail(
            "the store holds records, which only ds41_engine reads, and this engine has no such plugin",
            expected=expected,
            found="records, plugin = false",
            fix=(
                f'an engine that reads safetensors: format = "shards" in [engram] of profile {profile.name}',
                f'an engine that loads its own tables: storage = "engine" in [engram] of profile {profile.name}',
            ),
            why=why,
        )
    if engram.format == "shards" and plugin:
        return fail(
            "the store holds shards, and ds41_engine reads records",
            expected=expected,
            found="shards, plugin = true",
            fix=(f'format = "records" in [engram] of profile {profile.name}',),
            why=why,
        )
    told = (*profile.serve.argv, *profile.serve.dspark_argv, *profile.serve.env.values())
    if not any("${engram}" in word for word in told):
        return fail(
            "nothing tells the engine of the store: ${engram} is neither in serve.argv nor in serve.env",
            expected=expected,
            found="no ${engram}",
            fix=(f"name ${{engram}} where the engine of profile {profile.name} is told of its tables",),
            why=why,
        )
    return None


def store(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """The store of this boot, with every layer and all bytes."""
    expected = f"layers {', '.join(map(str, profile.model.engram_layers))}, whole, of this boot"
    build = command("engram build", profile)
    if not profile.model.engram or profile.engram.storage in ("none", "engine"):
        return skip("the profile has no store")
    found = facts.store
    if found is None:
        return unknown("the store was not looked at", expected=expected, fix=(command("engram status", profile),))
    if not found.exists:
        if stage == "up":
            return skip(f"not there yet: will be built in {found.dir}")
        return fail(f"there is no store in {found.dir}", expected=expected, found="not built", fix=(build,))
    rebuild = (command("engram drop", profile), build)
    why = "the engine would refuse to start, or read rows that are not the pack's"
    if found.problem and stage == "up":
        return skip(f"will be built again in {found.dir}: {found.problem}")
    if found.problem:
        return fail(
            f"the store in {found.dir} is not valid: {found.problem}",
            expected=expected,
            found=found.problem,
            fix=rebuild,
            why=why,
        )
    lacking = sorted(set(profile.model.engram_layers) - set(found.layers))
    if lacking:
        return fail(
            f"the store lacks layer {', '.join(map(str, lacking))}",
            expected=expected,
            found=f"layers {', '.join(map(str, found.layers)) or 'none'}",
            fix=rebuild,
            why=why,
        )
    if found.bytes_needed is None:
        return unknown("the size the store must have is not known", expected=expected, fix=(f"{build} --verify",))
    if found.bytes_present < found.bytes_needed:
        return fail(
            f"the store is short: {size(found.bytes_present)} of {size(found.bytes_needed)}",
            expected=size(found.bytes_needed),
            found=size(found.bytes_present),
            fix=rebuild,
            why=why,
        )
    if found.storage and found.storage != profile.engram.storage:
        return warn(
            f"the store is in {found.storage}, the profile says {profile.engram.storage}",
            expected=profile.engram.storage,
            found=found.storage,
            fix=rebuild,
            why="valid, but not the kind of memory the profile's numbers were measured with",
        )
    kind = found.page_kind or found.fstype or found.storage
    return ok(f"{len(found.layers)} tables, {size(found.bytes_present)}, {kind}", expected=expected, found="valid")


CHECKS = (
    Check(
        "engram.storage",
        "the profile fills the Engram tables",
        1,
        GROUP,
        "tables that are reserved and never filled, without an error",
        storage,
    ),
    Check(
        "engram.store",
        "the Engram store is whole and of this boot",
        1,
        GROUP,
        "a stale, short or foreign store, read as if it were the pack's",
        store,
    ),
)
