"""A container engine: its image by digest or built from a pinned commit, the GPUs by CDI, all of it written down."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ds41ctl.adapters import containers, enginevenv, files, imagesource, proc
from ds41ctl.adapters.supply import Supply
from ds41ctl.core.errors import (
    IntegrityError,
    NetworkError,
    NoSpaceError,
    NotFoundError,
    UnsupportedError,
)
from ds41ctl.core.layout import Layout
from ds41ctl.core.profile import IMAGE_ROOM, Engine

PULL_S = 6 * 3600.0  # policy: 18 GB on a slow line
Progress = Callable[[str, dict[str, Any]], None]
_SCRIPT = Path("docker") / "build.sh"
_REFERENCE = re.compile(r"[a-z0-9][a-z0-9._/-]*:[A-Za-z0-9_][A-Za-z0-9_.-]*")


def state(layout: Layout) -> tuple[bool, str]:
    """(installed as wanted, in words)."""
    engine = layout.profile.engine
    try:
        tool = containers.need_client()
    except UnsupportedError as error:
        return False, error.message
    found = containers.image_digest(layout)
    if not found:
        return False, f"no image {engine.image}"
    wrong = drift(layout, found)
    if wrong:
        return False, wrong
    tree = enginevenv.read_manifest(layout.engine_dir)
    if tree is None:
        return False, f"image {found[:12]} is not written down"
    if not _made_as_wanted(engine, tree):
        return False, f"image {found[:12]} was made from another commit or other patches than the profile's"
    return True, f"{engine.image} by {tool}, image {found[:12]}"


def drift(layout: Layout, found: str) -> str:
    """How image `found` (an id without `sha256:`) differs from the pinned or the recorded one, '' when it does not."""
    engine = layout.profile.engine
    pinned = engine.image_digest.removeprefix("sha256:")
    if pinned:
        return "" if found == pinned else f"image {engine.image} is {found[:12]}, {pinned[:12]} is pinned"
    tree = enginevenv.read_manifest(layout.engine_dir)
    recorded = str(tree.get("image_id")) if tree is not None and _made_as_wanted(engine, tree) else found
    return "" if found == recorded else f"image {engine.image} is {found[:12]}, {recorded[:12]} was installed"


def made_from(engine: Engine) -> dict[str, str]:
    """What the image must have been made from."""
    return {
        "image_digest": engine.image_digest,
        "build_revision": engine.build_revision,
        "build_patches": imagesource.wanted_patches(engine),
    }


def _made_as_wanted(engine: Engine, tree: dict[str, Any]) -> bool:
    before = tree.get("made_from") or {}
    return all(before.get(key, "") == value for key, value in made_from(engine).items())


def install(
    layout: Layout,
    environ: Mapping[str, str],
    progress: Progress,
    given: Supply | None = None,
    *,
    force: bool = False,
) -> None:
    """Have the image, by its digest or built at the pinned commit, and write the manifest.

    An image that is there already under the profile's name is taken, unless another one is recorded (that raises
    IntegrityError), `force` or a `checkout` is given, or it was made from another commit. Raises UnsupportedError
    without a runtime or a CDI device and for a build that fails, NotFoundError when nothing says where the source is,
    IntegrityError for another image, commit or patch than the pinned one, NoSpaceError, NetworkError.
    """
    engine, given = layout.profile.engine, given or Supply()
    tool = containers.need_client()
    for notice in engine.notices:
        progress(notice, {"note": True})
    _require_gpus(layout)
    found = containers.image_digest(layout)
    repo = str(given.checkout or engine.build_repo)
    before = enginevenv.read_manifest(layout.engine_dir)
    again = not found or force or given.checkout is not None
    again = again or (before is not None and not _made_as_wanted(engine, before))
    if again:
        pulled = engine.image_digest != ""
        found = _pull(layout, tool, progress) if pulled else _build(layout, tool, repo, environ, progress)
    # two builds of one commit have two ids: what was just built is the one to record
    wrong = "" if again and not engine.image_digest else drift(layout, found)
    if wrong:
        raise IntegrityError(
            wrong, hints=(f"ds41ctl engine install --profile {layout.name} --force   # makes it again",)
        )
    layout.engine_dir.mkdir(parents=True, exist_ok=True)
    files.publish_json(
        layout.engine_dir / enginevenv.MANIFEST,
        {
            "format": enginevenv.FORMAT,
            "engine": engine.name,
            "kind": "container",
            "runtime": tool,
            "image": engine.image,
            "image_id": found,
            "made_from": made_from(engine),
            "notices": list(engine.notices),
            "distributions": {},
            "installed_at": datetime.now(UTC).isoformat(timespec="seconds"),
        },
    )


def _pull(layout: Layout, tool: str, progress: Progress) -> str:
    engine = layout.profile.engine
    progress(f"pulling {engine.image}", {})
    done = proc.run([tool, "pull", f"{engine.image}@{engine.image_digest}"], timeout=PULL_S)
    if not done.ok:
        said = (done.stderr.strip().splitlines() or ["no answer in time"])[-1]
        raise NetworkError(f"{tool} pull {engine.image}: {said[:200]}")
    return containers.image_digest(layout)


def _require_gpus(layout: Layout) -> None:
    """The device that the command line asks for is in a CDI specification whose files all exist."""
    wanted = [word for word in layout.profile.serve.argv if word.startswith("nvidia.com/gpu=")]
    if not wanted:
        return
    specs = containers.cdi_specs(Path("/"))
    regenerate = ("sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml",)
    for device in wanted:
        kind, _, name = device.partition("=")
        holding = [spec for spec in specs or () if spec.kind == kind and name in spec.devices]
        if not holding:
            raise UnsupportedError(f"no CDI specification names {device}", hints=regenerate)
        stale = next((spec for spec in holding if spec.missing), None)
        if stale is not None:
            raise UnsupportedError(
                f"{stale.path} is of another driver: {stale.missing[0]} does not exist", hints=regenerate
            )


def _build(layout: Layout, tool: str, repo: str, environ: Mapping[str, str], progress: Progress) -> str:
    """Run the source's own build at exactly the pinned commit; the id of the image, under the profile's name."""
    engine = layout.profile.engine
    if not repo:
        raise NotFoundError(
            f"image {engine.image} is not published: it is built from {engine.build_revision[:12]}, and nothing says "
            "which repository has that",
            detail=(engine.build,) if engine.build else (),
            hints=(f"ds41ctl engine install --profile {layout.name} --checkout FOLDER|URL   # that holds the commit",),
        )
    folder, free = containers.storage_free(tool)
    need = round(engine.image_bytes * IMAGE_ROOM)
    if free is not None and free < need:
        raise NoSpaceError(
            f"the image and its build need {need} bytes in {folder}, {free} are free",
            hints=(f"df -h {folder}", f"{tool} system df"),
        )
    cache = layout.dirs.cache
    source = cache / "builds" / engine.name / "source"
    imagesource.tree(engine, repo, cache / "sources", source, environ, progress)
    script = source / _SCRIPT
    if not script.is_file():
        raise NotFoundError(f"{repo} has no {_SCRIPT} at {engine.build_revision[:12]}")
    before = containers.images(tool)
    lines: list[str] = []

    def on_line(line: str) -> None:
        lines.append(line)
        progress(line.strip()[:100], {})

    env = imagesource.build_environment(environ, engine.image)
    argv = imagesource.build_argv(script)
    try:
        status = proc.stream(argv, env=env, on_line=on_line, cwd=source)
    except OSError as error:
        raise UnsupportedError(f"{_SCRIPT} cannot be run: {error.strerror}: {error.filename}") from None
    if status:
        text = "\n".join(lines)
        kind = NoSpaceError if "no space left" in text.lower() else UnsupportedError
        by_hand = f"cd {source} && {shlex.join([f'IMAGE={engine.image}', *argv])}   # what was run"
        raise kind(f"{_SCRIPT} ended with {status}", detail=lines[-20:], hints=(by_hand,))
    _name(engine, tool, before, script.read_text(encoding="utf-8", errors="replace"), progress)
    shutil.rmtree(source.parent, ignore_errors=True)
    return containers.image_digest(layout)


def _name(engine: Engine, tool: str, before: dict[str, str], script: str, progress: Progress) -> None:
    """Have the image that was just built under the profile's name, whatever name its build gives it.

    Raises NotFoundError when the build left several images and its script names none of them, or none at all.
    """
    now = containers.images(tool)
    fresh = {name: id for name, id in now.items() if before.get(name) != id}
    if engine.image in fresh:
        return
    if not fresh and engine.image in now:  # every layer was in the runtime's cache, and the name was kept
        return
    named = {name: id for name, id in (fresh or now).items() if name in _REFERENCE.findall(script)}
    found = named or fresh
    if len(set(found.values())) != 1:
        what = f"left {len(fresh)} images ({', '.join(sorted(fresh)[:4])})" if fresh else "left no new image"
        raise NotFoundError(
            f"{_SCRIPT} {what}, none of them {engine.image}",
            hints=(f"{tool} tag THE-ONE-IT-BUILT {engine.image}", "ds41ctl engine install   # then takes that image"),
        )
    name, id = sorted(found.items())[0]
    progress(f"{name} is {engine.image} from now on", {"note": True})
    containers.tag(tool, id, engine.image)
