"""Pins: what a Hub repository holds at one commit, kept so that no later answer of a server can change it."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from ds41ctl.core.errors import ConfigError, IntegrityError
from ds41ctl.core.profile import HubSource, Revision, Sha256

LOCK_SCHEMA = 1
# weights that run code when they are loaded: never fetched, whatever the patterns say
PICKLED = frozenset({".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".npy", ".h5"})

GitOid = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{40}$")]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PinnedFile(_Model):
    """One file of a tree. `oid` is the git blob's id: of the content, or of the LFS pointer when `sha256` is set.

    `size` is the content's, bytes; `xet` is the Xet hash, '' when the file is not in Xet storage.
    """

    path: str
    size: int = Field(ge=0)
    oid: GitOid
    sha256: Sha256 | Literal[""] = ""
    xet: Sha256 | Literal[""] = ""

    @property
    def digest(self) -> str:
        """What pins its bytes: the sha256, or git's id where the Hub states none."""
        return self.sha256 or self.oid


class PinnedTree(_Model):
    """Every file of one repository at one commit."""

    repo: str
    revision: Revision
    files: tuple[PinnedFile, ...]


class SubsetFile(_Model):
    """A shard of which not every tensor may be wanted: `kept` of `tensors` are.

    `head_sha256` is of its length word and header as the Hub's file has them, `plan` of everything the new file is
    made from (core/subset.py), `size` the new file's bytes. `sha256` is the new file's, '' until it arrived once:
    the Hub states none for a part of a file.
    """

    path: str
    head_sha256: Sha256
    tensors: int = Field(ge=0)
    kept: int = Field(ge=0)
    size: int = Field(ge=0)
    plan: Sha256
    sha256: Sha256 | Literal[""] = ""

    @property
    def whole(self) -> bool:
        """Every tensor is wanted: the file is fetched as it is."""
        return self.kept == self.tensors


class Subset(_Model):
    """What `leave_out` leaves of the shards of one repository at one commit."""

    repo: str
    revision: Revision
    leave_out: tuple[str, ...]
    files: tuple[SubsetFile, ...]

    @property
    def key(self) -> SubsetKey:
        """What it is the subset of."""
        return self.repo, self.revision, self.leave_out


SubsetKey = tuple[str, str, tuple[str, ...]]


class PackLock(_Model):
    """The pins of one profile: one tree a source repository, one subset a source that leaves tensors out."""

    schema_version: int = Field(LOCK_SCHEMA, alias="schema")
    profile: str
    trees: tuple[PinnedTree, ...]
    subsets: tuple[Subset, ...] = ()

    def tree(self, repo: str, revision: str) -> PinnedTree | None:
        """The tree of a repository at a commit, None when it is not pinned."""
        return next((tree for tree in self.trees if (tree.repo, tree.revision) == (repo, revision)), None)

    def subset(self, key: SubsetKey) -> Subset | None:
        """The subset of a source, None when its headers were not read yet."""
        return next((item for item in self.subsets if item.key == key), None)


class SeenFile(_Model):
    """A file that nothing pins, as it was first seen."""

    size: int = Field(ge=0)
    sha256: Sha256


class SeenPack(_Model):
    """A folder that nothing pins, as it was first seen: name -> file."""

    schema_version: int = Field(LOCK_SCHEMA, alias="schema")
    folder: str
    recorded_at: str
    files: dict[str, SeenFile] = Field(min_length=1)


def parse_lock(text: str, origin: str) -> PackLock:
    """Parse a lock file. Raises IntegrityError naming `origin` and the first problem."""
    try:
        lock = PackLock.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise IntegrityError(f"{origin}: not a lock file: {where or 'document'}: {first['msg']}") from None
    if lock.schema_version != LOCK_SCHEMA:
        raise IntegrityError(f"{origin}: lock schema {lock.schema_version}, this version reads {LOCK_SCHEMA}")
    for tree in lock.trees:
        check_paths(tree)
    return lock


def check_paths(tree: PinnedTree) -> None:
    """Raise IntegrityError when a path of the tree could leave its folder, or two could not lie in one folder."""
    seen: dict[str, str] = {}
    if len({item.path for item in tree.files}) != len(tree.files):
        raise IntegrityError(f"{tree.repo}@{tree.revision[:12]} lists a path twice")
    for item in tree.files:
        path = PurePosixPath(item.path)
        plain = item.path.isprintable() and "\\" not in item.path and str(path) == item.path
        if not plain or path.is_absolute() or ".." in path.parts or ":" in path.parts[0]:
            raise IntegrityError(f"{tree.repo}@{tree.revision[:12]} lists the unsafe path {item.path!r}")
        for part in (item.path, *(str(parent) for parent in path.parents)):
            other = seen.setdefault(part.casefold(), part)
            if other != part:
                raise IntegrityError(f"{tree.repo}@{tree.revision[:12]}: {other!r} and {part!r} differ only in case")


def chosen(tree: PinnedTree, patterns: Sequence[str]) -> tuple[PinnedFile, ...]:
    """Files of a tree that a source's patterns name, pickled weights left out.

    Raises ConfigError for a pattern that matches nothing: it is misspelt, or the pin is of another pack.
    """
    found: dict[str, PinnedFile] = {}
    for pattern in patterns:
        matching = [item for item in tree.files if fnmatch.fnmatchcase(item.path, pattern)]
        if not matching:
            raise ConfigError(f"pattern {pattern!r} matches no file of {tree.repo}@{tree.revision[:12]}")
        found |= {item.path: item for item in matching}
    return tuple(item for item in found.values() if PurePosixPath(item.path).suffix.lower() not in PICKLED)


def merged(
    parts: Iterable[tuple[HubSource, tuple[PinnedFile, ...]]],
) -> tuple[tuple[HubSource, PinnedFile], ...]:
    """All files of one folder, by path. Raises ConfigError when two repositories bring different bytes to one path."""
    found: dict[str, tuple[HubSource, PinnedFile]] = {}
    for source, files in parts:
        for item in files:
            other = found.setdefault(item.path.casefold(), (source, item))
            same = (other[1].path, other[1].oid, other[1].sha256) == (item.path, item.oid, item.sha256)
            same = same and other[0].leave_out == source.leave_out
            if not same:
                raise ConfigError(
                    f"{item.path} comes from {other[0].repo} and from {source.repo} with other bytes",
                    hints=("narrow `patterns` of one of the two sources in the profile",),
                )
    return tuple(found.values())


def drift(pinned: PinnedTree, now: PinnedTree) -> str:
    """'' when a server still lists what was pinned, else the first difference."""
    theirs = {item.path: item for item in now.files}
    for item in pinned.files:
        other = theirs.get(item.path)
        if other is None:
            return f"{item.path} is gone"
        for name in ("size", "sha256", "oid"):
            was, found = getattr(item, name), getattr(other, name)
            if was != found:
                return f"{item.path}: {name} {found}, pinned {was}"
    extra = sorted(theirs.keys() - {item.path for item in pinned.files})
    return f"{extra[0]} is new" if extra else ""


def united(first: Subset, second: Subset) -> Subset:
    """One subset of two records of it: a digest that only one of them knows counts.

    Raises IntegrityError when they say different things of a file.
    """
    theirs = {item.path: item for item in second.files}
    found = []
    for item in first.files:
        other = theirs.get(item.path)
        sha256 = item.sha256 or (other.sha256 if other else "")
        if other is None or item.model_copy(update={"sha256": sha256}) != other.model_copy(
            update={"sha256": other.sha256 or sha256}
        ):
            raise IntegrityError(f"{first.repo}: {item.path} has tensors or bytes that differ between two lock files")
        found.append(item.model_copy(update={"sha256": sha256}))
    if len(theirs) != len(found):
        raise IntegrityError(f"{first.repo}: two lock files list different shards")
    return first.model_copy(update={"files": tuple(found)})
