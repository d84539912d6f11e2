"""Supply: where an engine that is not installed would come from, and who vouches for it; looks at files alone."""

from __future__ import annotations

import shlex
import shutil
import urllib.parse
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from ds41ctl.adapters import distro, files
from ds41ctl.core.errors import ConfigError, IntegrityError
from ds41ctl.core.layout import Layout
from ds41ctl.core.profile import Engine

FORMAT = 1


@dataclass(frozen=True)
class Supply:
    """What the user gave instead of the profile's own places.

    `wheels`: a folder of packages, or the address of a mirror of the release's files. `checkout`: a repository that
    holds the commit an image is built from, as a folder or an address. `accept_sums`: sha256 of the release's checksum
    file, from now on taken for the release's.
    """

    wheels: Path | str | None = None
    checkout: Path | str | None = None
    accept_sums: str = ""

    @property
    def folder(self) -> Path | None:
        """The folder of packages; no index is asked then."""
        return self.wheels if isinstance(self.wheels, Path) else None

    @property
    def words(self) -> str:
        """These options as they are typed, without `--accept-sums`, each with a blank before it."""
        given = (("--wheels", self.wheels), ("--checkout", self.checkout))
        return "".join(f" {option} {shlex.quote(str(value))}" for option, value in given if value is not None)


def demand_fit(layout: Layout, given: Supply) -> None:
    """Raise ConfigError for an option that the profile's engine has no use for."""
    engine, name = layout.profile.engine, layout.name
    if given.wheels is not None and engine.kind != "venv":
        raise ConfigError(f"--wheels: the engine of {name} is a container", hints=("--checkout FOLDER|URL",))
    if isinstance(given.wheels, str) and not engine.wheel:
        raise ConfigError(
            f"--wheels {given.wheels}: the packages of {name} come from an index, not from a release",
            hints=("export PIP_INDEX_URL=...   # a mirror of the index", "--wheels FOLDER"),
        )
    if given.checkout is not None and not engine.build_revision:
        raise ConfigError(f"--checkout: the engine of {name} is not built from a repository")
    stated = engine.wheel_sums_sha256 not in ("", given.accept_sums)
    if given.accept_sums and (not engine.wheel_sums or engine.wheel_sha256 or stated):
        raise ConfigError(f"--accept-sums: the engine of {name} is pinned by its profile, there is nothing to accept")


# ---- the release's checksum file, and whether it is the release's


def release_dir(layout: Layout) -> Path:
    """Where what was downloaded of the engine's release is kept: an install after that needs no network."""
    return layout.dirs.cache / "releases" / layout.profile.engine.name


def base_url(engine: Engine, given: Supply) -> str:
    """Address below which the release's files lie, '' for a profile that names none."""
    return (given.wheels if isinstance(given.wheels, str) else engine.wheel_assets).rstrip("/")


def file_url(base: str, name: str) -> str:
    """Address of one file of the release; `+`, usual in versions of wheels, is encoded."""
    return f"{base}/{urllib.parse.quote(name)}"


def accepted_path(layout: Layout) -> Path:
    """Where it is remembered which checksum file the user has accepted for this engine."""
    return layout.dirs.state / "accepted" / f"{layout.profile.engine.name}.json"


def accepted(layout: Layout) -> tuple[str, str]:
    """(sha256, when) of the checksum file accepted for this engine and release, ('', '') for none."""
    engine = layout.profile.engine
    try:
        tree = files.read_json(accepted_path(layout))
    except (ValueError, OSError):
        return "", ""
    if not isinstance(tree, dict) or tree.get("format") != FORMAT:
        return "", ""
    if (tree.get("engine"), tree.get("release")) != (engine.name, _release(engine)):
        return "", ""
    return str(tree.get("sums_sha256", "")), str(tree.get("accepted_at", ""))


def pin(layout: Layout) -> str:
    """Digest the installed engine's wheel is held to: its own, or its checksum file's; '' while nobody gave one."""
    engine = layout.profile.engine
    return engine.wheel_sha256 or engine.wheel_sums_sha256 or (accepted(layout)[0] if engine.wheel_sums else "")


def is_news(layout: Layout, given: Supply) -> bool:
    """True when `--accept-sums` says something that was not accepted before."""
    return given.accept_sums not in ("", layout.profile.engine.wheel_sums_sha256, accepted(layout)[0])


def judge(layout: Layout, given: Supply, now: str, where: str) -> None:
    """Is the checksum file of sha256 `now`, found at `where`, the release's? Remembers it when it is accepted here.

    Raises IntegrityError when nobody has vouched for one yet, or for another one.
    """
    engine = layout.profile.engine
    known, when = accepted(layout)
    trusted = engine.wheel_sums_sha256 or given.accept_sums or known
    if now == trusted:
        if given.accept_sums and now not in (known, engine.wheel_sums_sha256):
            tree = {"format": FORMAT, "engine": engine.name, "release": _release(engine), "sums_sha256": now}
            files.publish_json(
                accepted_path(layout), {**tree, "accepted_at": datetime.now(UTC).isoformat(timespec="seconds")}
            )
        return
    what = f"{engine.wheel_sums} of {where} has sha256 {now}"
    compare = f"compare it with {_release(engine)}, then one of:"
    if not trusted:
        raise IntegrityError(
            f"{what}, and nobody has said yet that it is the release's",
            hints=(compare, *accept_lines(layout, given, now)),
        )
    who = "the profile pins" if engine.wheel_sums_sha256 else "--accept-sums says" if given.accept_sums else "accepted"
    since = f" ({when})" if trusted == known and who == "accepted" else ""
    again = () if engine.wheel_sums_sha256 else (compare, *accept_lines(layout, given, now))
    raise IntegrityError(f"{what}, {who} {trusted}{since}: it is not that release's, or it was changed", hints=again)


def accept_lines(layout: Layout, given: Supply, digest: str) -> tuple[str, str]:
    """The commands that accept a checksum file and go on."""
    rest = f"--profile {layout.name}{given.words} --accept-sums {digest}"
    return f"ds41ctl up {rest}", f"ds41ctl engine install {rest}"


def _after_comparing(layout: Layout, given: Supply, digest: str) -> str:
    return f"{accept_lines(layout, given, digest)[0]}   # after comparing it with {_release(layout.profile.engine)}"


def _release(engine: Engine) -> str:
    return engine.wheel_url or engine.wheel_assets


# ---- what preflight is told


@dataclass(frozen=True)
class Origin:
    """Where an engine would come from, in words; `problem` and `fix` when it cannot be had."""

    text: str = ""
    problem: str = ""
    fix: tuple[str, ...] = ()


def look(layout: Layout, given: Supply) -> Origin:
    """Where the engine would come from. No network: whether a server answers shows when the engine is installed."""
    engine = layout.profile.engine
    if engine.kind == "container":
        return _look_at_image(layout, given)
    if not engine.wheel:
        return Origin(str(given.folder or "the package index"))
    if given.folder is not None:
        return _look_into_folder(layout, given, given.folder)
    base = base_url(engine, given)
    folder_hint = f"ds41ctl up --profile {layout.name} --wheels FOLDER   # with {engine.wheel}"
    if not base:
        return Origin(problem=f"profile {layout.name} does not say where {engine.wheel} lies", fix=(folder_hint,))
    seen = release_dir(layout) / engine.wheel_sums
    if not (pin(layout) or given.accept_sums):
        fix = (
            (_after_comparing(layout, given, files.file_sha256(seen)),)
            if seen.is_file()
            else (f"ds41ctl engine install --profile {layout.name}{given.words}   # shows the digest to accept",)
        )
        return Origin(
            problem=f"needs --accept-sums SHA256 once (of {file_url(base, engine.wheel_sums)}), "
            "or --wheels FOLDER: nothing pins the release",
            fix=(*fix, folder_hint),
        )
    there = " (already downloaded)" if (release_dir(layout) / engine.wheel).is_file() else ""
    return Origin(f"{file_url(base, engine.wheel)}{there}")


def _look_into_folder(layout: Layout, given: Supply, folder: Path) -> Origin:
    engine = layout.profile.engine
    for name in (engine.wheel, "" if engine.wheel_sha256 else engine.wheel_sums):
        if name and not (folder / name).is_file():
            return Origin(problem=f"no {name} in {folder}", fix=(f"get it from {_release(engine)}",))
    if not engine.wheel_sha256:
        now = files.file_sha256(folder / engine.wheel_sums)
        if now != (engine.wheel_sums_sha256 or given.accept_sums or accepted(layout)[0]):
            return Origin(
                problem=f"nothing says that {folder / engine.wheel_sums} (sha256 {now}) is the release's",
                fix=(_after_comparing(layout, given, now),),
            )
    return Origin(str(folder))


def _look_at_image(layout: Layout, given: Supply) -> Origin:
    engine = layout.profile.engine
    if engine.image_digest:
        return Origin(f"{engine.image}@{engine.image_digest}")
    repo = given.checkout or engine.build_repo
    if not repo:
        return Origin(
            problem=f"image {engine.image} is not published, and profile {layout.name} names no repository",
            fix=(f"ds41ctl up --profile {layout.name} --checkout FOLDER|URL   # that holds {engine.build_revision}",),
        )
    if shutil.which("git") is None:
        return Origin(
            problem=f"image {engine.image} is built from a commit, and git is not installed",
            fix=(distro.install_line("git"),),
        )
    return Origin(f"docker/build.sh of {repo} at {engine.build_revision[:12]}")
