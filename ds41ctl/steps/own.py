"""own: a hybrid that the user built and DS41_MODEL names: looked through as ours is, and its bytes remembered.

Nothing pins such bytes. What is proven is that they are a whole hybrid of this profile, and that they are still those
that were hashed first. Its folder may be read-only: what is kept lies in the state folder.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

from ds41ctl.adapters import files, pack
from ds41ctl.core.errors import IntegrityError, NotFoundError
from ds41ctl.core.graft import Located, prove
from ds41ctl.core.layout import Layout
from ds41ctl.core.pins import SeenFile
from ds41ctl.core.tensors import TABLE
from ds41ctl.steps.hashing import Meter, hash_all
from ds41ctl.steps.runner import Goal, Progress

NOT_PINNED = "its digests are your own, nothing pins them"


def check(layout: Layout) -> Goal:
    """It was looked through, and nothing changed since."""
    held, seen = pack.holdings(layout), pack.own_record(layout)
    if held is None or seen is None:
        return Goal(False, f"the hybrid of your own in {layout.model_dir} was not looked through yet")
    bad = pack.quick(held)
    if bad:
        return Goal(False, f"{bad[0][1].name}: {bad[0][2]}")
    total, count = sum(item.size for item in held[0].items), len(held[0].items)
    when = seen.recorded_at
    text = f"hybrid of your own: {count} files, {total / 2**20:,.0f} MiB, as first hashed {when}; {NOT_PINNED}"
    return Goal(True, text, {"bytes": total, "files": count, "own": True, "recorded_at": when})


def look_through(layout: Layout, progress: Progress) -> None:
    """Prove headers, index, counts and bits; hash every byte; remember, or compare with what is remembered.

    Raises IntegrityError naming the tensor or the file.
    """
    folder = layout.model_dir
    if not any((folder / name).exists() for name in ("config.json", pack.INDEX)):
        raise NotFoundError(
            f"DS41_MODEL={folder} holds no pack and is not empty",
            hints=("DS41_MODEL=FOLDER   # of a hybrid you built, or an empty one", "unset DS41_MODEL"),
        )
    with files.locked(layout.own_pins_dir / pack.LOCK_FILE, f"looking through {folder}"):
        progress(f"headers of {folder}", {})
        _prove(layout)
        held, seen = pack.holdings(layout), pack.own_record(layout)
        if held is None or seen is None:
            pack.write_own_record(layout, _hashed(layout, progress))
            return
        changed = [(folder, item) for folder, item, _ in pack.quick(held)]
        wrong = [(folder / item.name, reason) for folder, item, reason in hash_all(changed, progress) if reason]
        if wrong:
            path, reason = wrong[0]
            raise IntegrityError(
                f"{path}: {reason}, as first hashed {seen.recorded_at}"
                + (f" (and {len(wrong) - 1} more)" if wrong[1:] else ""),
                hints=(
                    "bring the file back from where you have it; nothing pins it, so nothing can be fetched",
                    f"rm {layout.own_pins_dir / pack.OWN_RECORD}   # when you changed it on purpose",
                ),
            )


def _prove(layout: Layout) -> None:
    spec, folder = layout.profile.model.graft, layout.model_dir
    assert spec is not None  # noqa: S101 - own_hybrid said so
    config, found = pack.config(folder), pack.contents(folder)
    if found.problems:
        raise IntegrityError(found.problems[0], detail=found.problems[1:])
    tensors = {name: tensor for name, tensor in found.indexed.items() if not TABLE.fullmatch(name)}
    beside: Located = {
        tensor.name: (found.shards[tensor.name], tensor)
        for tensor in (*found.indexed.values(), *found.outside.values())
        if TABLE.fullmatch(tensor.name)
    }
    prove(config, spec, layout.profile.model.engram, tensors, beside, drafter=layout.dspark)


def _hashed(layout: Layout, progress: Progress) -> dict[str, SeenFile]:
    """Size and sha256 of every file that counts, on all cores, the big ones first."""
    folder = layout.model_dir
    sizes = {name: (folder / name).stat().st_size for name in pack.own_names(folder)}
    meter = Meter(sum(sizes.values()), progress)

    def digest(name: str) -> str:
        try:
            return files.file_digest(folder / name, on_bytes=lambda number: meter(number, name)).sha256
        except OSError as error:
            raise IntegrityError(f"{folder / name}: cannot be read: {error.strerror}") from None

    ordered = sorted(sizes, key=lambda name: -sizes[name])
    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        digests = pool.map(digest, ordered)
        return {name: SeenFile(size=sizes[name], sha256=found) for name, found in zip(ordered, digests, strict=True)}
