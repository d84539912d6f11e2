"""Checks of the pack: every pinned file, and the Engram tensors whose absence raises no error."""

from __future__ import annotations

from ds41ctl.core.facts import HostFacts, TensorFacts
from ds41ctl.core.profile import EngramTable, Profile, RecipeSource
from preflight import need
from preflight.check import Check, Stage, Verdict, fail, ok, skip, unknown, warn
from preflight.text import command, size

GROUP = "PACK"
# one row of an Engram table: (tensor, columns, safetensors dtype)
TABLE_TENSORS = (("weight", 256, "F8_E4M3"), ("scale", 8, "F8_E8M0"))
SHOWN = 4  # policy: how many names a finding lists


def _listed(names: list[str]) -> str:
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _verb(profile: Profile) -> str:
    return "generated" if all(isinstance(s, RecipeSource) for s in profile.model.sources) else "fetched"


def _absent(profile: Profile, facts: HostFacts, stage: Stage, expected: str) -> Verdict | None:
    """The verdict when there is no pack at all."""
    pack = facts.pack
    if pack is None:
        return unknown("the pack was not looked at", expected=expected, fix=(command("fetch --verify", profile),))
    if pack.exists:
        return None
    if stage == "up":
        missing = need.pack_bytes_missing(profile, facts)
        amount = f" ({size(missing)})" if missing else ""
        return skip(f"not there yet: will be {_verb(profile)}{amount}")
    return fail(
        f"the pack is not in {pack.dir}",
        expected=expected,
        found="no such folder",
        fix=(command("fetch", profile),),
        why="serve never downloads: a start must not turn into a download of hours",
    )


def files(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """Each pinned file is there, has its size, and its sidecar vouches for these very bytes."""
    expected = "every file present, with its pinned size and a verified sidecar"
    absent = _absent(profile, facts, stage, expected)
    if absent is not None or facts.pack is None:
        return absent or unknown("the pack was not looked at", expected=expected, fix=(command("fetch", profile),))
    pack = facts.pack
    repair = command("fetch" if pack.own else "fetch --repair", profile)  # nothing can be fetched for one's own
    if pack.own and not pack.files and not pack.problems:
        if stage == "up":
            return skip("a hybrid of your own: will be looked through and hashed")
        return fail(
            f"the hybrid of your own in {pack.dir} was never looked through",
            expected=expected,
            found="no digests of it",
            fix=(command("fetch", profile),),
            why="a shard that is cut or foreign loads without an error and answers wrongly",
        )
    if not pack.files:
        return unknown(
            "nothing pins the files of this pack",
            expected=expected,
            fix=(command("fetch --verify", profile),),
        )
    missing = [item.name for item in pack.files if item.size is None and item.note in ("", "missing")]
    odd = [f"{item.name} ({item.note})" for item in pack.files if item.size is None and item.name not in missing]
    wrong = [
        f"{item.name} ({item.size} bytes, expected {item.size_expected})"
        for item in pack.files
        if item.size is not None and item.size_expected is not None and item.size != item.size_expected
    ]
    unpinned = [item.name for item in pack.files if item.size is not None and item.size_expected is None]
    unverified = [
        f"{item.name} ({item.note or 'not verified'})"
        for item in pack.files
        if item.size is not None and item.size == item.size_expected and not item.verified
    ]
    wrong += odd
    if wrong:
        return fail(
            _listed(wrong),
            expected=expected,
            found=f"{len(wrong)} of {len(pack.files)} files are wrong",
            fix=(repair,),
            why="a truncated or foreign shard loads without an error and answers wrongly",
        )
    faults = [text for text in pack.problems if not any(text.startswith(f"{name} ") for name in missing)]
    if faults:
        return fail(
            faults[0],
            expected="headers and index that agree",
            found=f"{len(faults)} problem(s)",
            fix=(repair,),
            evidence=tuple(faults),
        )
    if missing and stage == "serve":
        return fail(
            f"missing: {_listed(missing)}",
            expected=expected,
            found=f"{len(pack.files) - len(missing)} of {len(pack.files)} files",
            fix=(command("fetch", profile),),
        )
    changed = [text for text in unverified if "never verified" not in text]
    if unverified and (stage == "serve" or changed):
        return fail(
            f"not verified: {_listed(changed or unverified)}",
            expected=expected,
            found=f"{len(unverified)} of {len(pack.files)} files without a valid sidecar",
            fix=(command("fetch --verify", profile),),
            why="a swapped or damaged shard of the right size is only found by its sha256",
        )
    if missing:
        amount = f" ({size(pack.bytes_missing)})" if pack.bytes_missing else ""
        return skip(f"{len(missing)} of {len(pack.files)} files will be {_verb(profile)}{amount}")
    if unverified:
        return skip(f"{len(unverified)} of {len(pack.files)} files will be verified")
    if unpinned:
        return unknown(
            f"no size is pinned for {_listed(unpinned)}",
            expected=expected,
            fix=(command("fetch --verify", profile),),
        )
    total = sum(item.size or 0 for item in pack.files)
    if pack.own:
        return warn(
            f"a hybrid of your own, {len(pack.files)} files, {size(total)}: nothing pins its bytes",
            expected="digests that the profile's sources pin",
            found=f"as first hashed {pack.recorded_at}",
            fix=("unset DS41_MODEL   # the pinned packs are fetched and grafted",),
            why="a file that was wrong when it was first hashed stays wrong",
        )
    return ok(f"{len(pack.files)} files, {size(total)}, verified", expected=expected, found="all verified")


def _table_fault(table: EngramTable, tensors: dict[str, TensorFacts]) -> tuple[str, str] | None:
    """(what is wrong, what was expected) of one layer's table, None when both tensors are as they must be."""
    for part, columns, dtype in TABLE_TENSORS:
        name = f"layers.{table.layer}.engram.embed.{part}"
        found = tensors.get(name)
        wanted = f"{name} {dtype} [{table.rows}, {columns}] in {table.shard}"
        if found is None:
            return f"{name} is in no shard that will be read", wanted
        if found.dtype != dtype:
            return f"{name} is {found.dtype}", wanted
        if found.shape != (table.rows, columns):
            return f"{name} has shape {list(found.shape)}", wanted
        if found.file != table.shard:
            return f"{name} is in {found.file}", wanted
    return None


def engram_tensors(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """For every table: weight and scale, with the right rows and dtypes, in a shard that the index names."""
    tables = profile.model.engram
    expected = f"{2 * len(tables)} tensors layers.{{{','.join(str(t.layer) for t in tables)}}}.engram.embed.*"
    if not tables:
        return skip("this model has no Engram layers")
    absent = _absent(profile, facts, stage, expected)
    if absent is not None or facts.pack is None:
        return absent or unknown("the pack was not looked at", expected=expected, fix=(command("fetch", profile),))
    tensors = {item.name.removeprefix("model."): item for item in facts.pack.engram_tensors}
    present = {item.name for item in facts.pack.files if item.size is not None}
    waiting = [table.shard for table in tables if facts.pack.files and table.shard not in present]
    faults = {
        table.layer: fault for table in tables if table.shard not in waiting if (fault := _table_fault(table, tensors))
    }
    unread = facts.pack.index_names is None and any(item.size is None for item in facts.pack.files)
    if unread and stage == "up":
        return skip(f"the pack is not whole yet: will be {_verb(profile)} first")
    if faults:
        layer, (found, wanted) = next(iter(faults.items()))
        return fail(
            f"Engram layer {layer}: {found}",
            expected=wanted,
            found=found,
            fix=(command("fetch --repair", profile),),
            why=(
                "a pack without its Engram tables boots, answers 391 at full speed and silently loses "
                "copies: the loader's missing-weight check is off for quantised models"
            ),
            evidence=tuple(f"layer {number}: {text}" for number, (text, _) in faults.items()),
        )
    if waiting:
        if stage == "up":
            return skip(f"{_listed(sorted(set(waiting)))} will be {_verb(profile)} first")
        return fail(
            f"missing: {_listed(sorted(set(waiting)))}",
            expected=expected,
            found=f"{len(tables) - len(waiting)} of {len(tables)} tables",
            fix=(command("fetch", profile),),
            why="without its Engram tables the model answers and silently loses copies",
        )
    rows = ", ".join(f"layer {table.layer}: {table.rows} rows" for table in tables)
    return ok(rows, expected=expected, found="all there")


def digests(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """Every byte of every pinned file, read now."""
    expected = "every file's sha256 equal to its pin"
    absent = _absent(profile, facts, stage, expected)
    if absent is not None:
        return absent
    if facts.digests is None or not facts.digests:
        what = "the bytes were not read" if facts.digests is None else "nothing pins the files of this pack"
        return unknown(what, expected=expected, fix=(command("preflight --level 2 --only pack.digests", profile),))
    wrong = [f"{item.name}: {item.problem}" for item in facts.digests if item.problem]
    if wrong:
        return fail(
            _listed(wrong),
            expected=expected,
            found=f"{len(wrong)} of {len(facts.digests)} files",
            fix=(command("fetch --repair", profile),),
            why="a damaged shard of the right size loads without an error and answers wrongly",
            evidence=tuple(wrong),
        )
    return ok(f"{len(facts.digests)} files read", expected=expected, found="equal")


def sizes(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """What the sources state together is what the pins take: the disk was judged by it before the Hub was asked."""
    stated, pinned = profile.model.size_bytes, sum(item.bytes for item in facts.pack.sources) if facts.pack else 0
    if not stated or not pinned or facts.pack is None:
        return skip("no size to compare: nothing is stated, or the Hub was not asked yet")
    expected = f"within {need.SIZE_TOLERANCE:.0%} of {stated / 1e9:.1f} GB (size_bytes of the profile's sources)"
    if abs(pinned - stated) <= need.SIZE_TOLERANCE * stated:
        return ok(f"{pinned / 1e9:.1f} GB pinned", expected=expected, found=f"{pinned / 1e9:.1f} GB")
    by_repo = ", ".join(f"{item.repo} {item.bytes / 1e9:.1f} GB" for item in facts.pack.sources)
    return warn(
        f"the pins take {pinned / 1e9:.1f} GB, the profile says {stated / 1e9:.1f} GB",
        expected=expected,
        found=by_repo,
        fix=(f"ds41ctl profile show {profile.name}   # copy it and correct size_bytes",),
        why="on a machine without pins the disk is judged by that figure",
    )


CHECKS = (
    Check(
        "pack.files",
        "every pinned file: present, right size, verified",
        1,
        GROUP,
        "a swapped, truncated or stale shard that loads without an error",
        files,
    ),
    Check(
        "pack.engram-tensors",
        "the Engram tables are in shards that will be read",
        1,
        GROUP,
        "Engram layers left empty: 391 is right, speed is right, copies are silently wrong",
        engram_tensors,
    ),
    Check(
        "pack.sizes",
        "the profile's figures are what the pins take",
        1,
        GROUP,
        "a disk judged by a wrong figure before the Hub was asked",
        sizes,
    ),
    Check(
        "pack.digests",
        "every byte of every pinned file",
        2,
        GROUP,
        "a file damaged on disk since it was verified",
        digests,
    ),
)
