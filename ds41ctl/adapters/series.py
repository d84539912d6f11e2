"""Source patches of an engine: engine_patches/series/<pin>/, each bound to the bytes before and after it.

`series.toml` holds a row a patch: `file` below site-packages, `patch` (a one-file unified diff beside it), `before` and
`after` (sha256). They are applied to an engine that is being installed, never to one in use.
"""

from __future__ import annotations

import csv
import hashlib
import importlib.resources
import io
import tomllib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ds41ctl.adapters import files
from ds41ctl.core.errors import IntegrityError
from ds41ctl.core.udiff import PatchError, apply


@dataclass(frozen=True)
class Patch:
    """One patch: the file below site-packages, its diff, and the sha256 of the file before and after."""

    file: str
    diff: Path
    before: str
    after: str


def folder(pin: str) -> Path:
    """Where the patches of a pin lie (the engine's name in the profile)."""
    return Path(str(importlib.resources.files("engine_patches").joinpath("series", pin)))


def load(root: Path) -> tuple[Patch, ...]:
    """The patches of a folder in their order; () without a series. Raises IntegrityError for a bad series."""
    path = root / "series.toml"
    if not path.is_file():
        return ()
    try:
        rows = tomllib.loads(path.read_text(encoding="utf-8"))["patch"]
        found = tuple(Patch(row["file"], root / row["patch"], row["before"], row["after"]) for row in rows)
    except (tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise IntegrityError(f"{path}: not a series: {error}") from None
    for patch in found:
        parts = PurePosixPath(patch.file).parts
        if not parts or parts[0] == "/" or ".." in parts:
            raise IntegrityError(f"{path}: {patch.file!r} is no path below site-packages")
    return found


def digest(root: Path) -> str:
    """sha256 over the series and its diffs, '' without one."""
    patches = load(root)
    if not patches:
        return ""
    total = hashlib.sha256((root / "series.toml").read_bytes())
    for patch in patches:
        total.update(patch.diff.read_bytes())
    return total.hexdigest()


def apply_all(site: Path, patches: tuple[Patch, ...]) -> None:
    """Patch installed files. A file that is the result already is left; any other than `before` is refused.

    The file is replaced, never written in place: another engine may share its bytes by a hard link. Its row in the
    distribution's RECORD follows, so that `verify` proves the patched tree.
    """
    for patch in patches:
        target = site / patch.file
        if not target.is_file():
            raise IntegrityError(f"{patch.diff.name}: the engine has no {patch.file}")
        now = files.file_sha256(target)
        if now == patch.after:
            continue
        if now != patch.before:
            raise IntegrityError(
                f"{patch.diff.name}: {patch.file} is {now[:12]}, the patch is for {patch.before[:12]}",
                hints=("ds41ctl engine install --force",),
            )
        try:
            text = apply(target.read_text(encoding="utf-8"), patch.diff.read_text(encoding="utf-8"))
        except (PatchError, UnicodeDecodeError) as error:
            raise IntegrityError(f"{patch.diff.name}: {error}") from None
        data = text.encode()
        if hashlib.sha256(data).hexdigest() != patch.after:
            raise IntegrityError(f"{patch.diff.name}: gives another {patch.file} than it promises")
        files.publish(target, [data])
        _record(site, patch.file, data)


def problems(site: Path, patches: tuple[Patch, ...]) -> list[str]:
    """Patched files that are not what their patch gives."""
    found = []
    for patch in patches:
        target = site / patch.file
        if not target.is_file() or files.file_sha256(target) != patch.after:
            found.append(f"{patch.file} is not as {patch.diff.name} leaves it")
    return found


def _record(site: Path, name: str, data: bytes) -> None:
    """Give the file's row in its distribution's RECORD the new digest and size."""
    for record in sorted(site.glob("*.dist-info/RECORD")):
        rows = list(csv.reader(io.StringIO(record.read_text(encoding="utf-8"))))
        if not any(row and row[0] == name for row in rows):
            continue
        encoded = files.record_digest(hashlib.sha256(data).hexdigest())
        changed = [[name, f"sha256={encoded}", str(len(data))] if row and row[0] == name else row for row in rows]
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(changed)
        files.publish(record, [text.getvalue().encode()])
        return
