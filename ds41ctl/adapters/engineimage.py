"""A container engine: its image by digest or built from a pinned checkout, the GPUs by CDI, all of it written down."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ds41ctl.adapters import containers, enginevenv, files, proc
from ds41ctl.core.errors import Ds41Error, IntegrityError, NetworkError, NotFoundError, UnsupportedError
from ds41ctl.core.layout import Layout

PULL_S = 6 * 3600.0  # policy: 18 GB on a slow line
Progress = Callable[[str, dict[str, Any]], None]


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
    pinned = engine.image_digest.removeprefix("sha256:")
    if pinned and found != pinned:
        return False, f"image {engine.image} is {found[:12]}, {pinned[:12]} is pinned"
    tree = enginevenv.read_manifest(layout.engine_dir)
    if tree is None or tree.get("image_id") != found:
        return False, f"image {found[:12]} is not written down"
    return True, f"{engine.image} by {tool}, image {found[:12]}"


def install(layout: Layout, environ: Mapping[str, str], progress: Progress, *, checkout: Path | None = None) -> None:
    """Have the image, by its digest or from `checkout` at the pinned commit, and write the manifest.

    Raises UnsupportedError without a runtime or a CDI device, NotFoundError with the steps when the image must be built
    first, IntegrityError when a checkout is not at its pin or has changes of its own.
    """
    engine = layout.profile.engine
    tool = containers.need_client()
    for notice in engine.notices:
        progress(notice, {"note": True})
    _require_gpus(layout)
    if checkout is not None:
        _build(layout, checkout, environ, progress)
    found = containers.image_digest(layout)
    if not found and engine.image_digest:
        progress(f"pulling {engine.image}", {})
        done = proc.run([tool, "pull", f"{engine.image}@{engine.image_digest}"], timeout=PULL_S)
        if not done.ok:
            said = (done.stderr.strip().splitlines() or ["no answer in time"])[-1]
            raise NetworkError(f"{tool} pull {engine.image}: {said[:200]}")
        found = containers.image_digest(layout)
    if not found:
        raise NotFoundError(
            f"no image {engine.image}, and it is not published: it is built from {engine.build_revision[:12]}",
            detail=(engine.build,) if engine.build else (),
            hints=(
                f"ds41ctl engine install --profile {layout.name} --checkout FOLDER   # the checkout at that commit",
            ),
        )
    pinned = engine.image_digest.removeprefix("sha256:")
    if pinned and found != pinned:
        raise IntegrityError(f"image {engine.image} is {found[:12]}, {pinned[:12]} is pinned")
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
            "made_from": {"image_digest": engine.image_digest, "build_revision": engine.build_revision},
            "notices": list(engine.notices),
            "distributions": {},
            "installed_at": datetime.now(UTC).isoformat(timespec="seconds"),
        },
    )


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


def _build(layout: Layout, checkout: Path, environ: Mapping[str, str], progress: Progress) -> None:
    """Run the checkout's own build at exactly the pinned commit."""
    engine = layout.profile.engine
    script = checkout / "docker" / "build.sh"
    head = proc.run(["git", "-C", str(checkout), "rev-parse", "HEAD"], timeout=30)
    if not head.ok:
        raise NotFoundError(f"{checkout} is no git checkout: {head.stderr.strip()[:120]}")
    if head.stdout.strip() != engine.build_revision:
        raise IntegrityError(
            f"{checkout} is at {head.stdout.strip()[:12]}, {engine.build_revision[:12]} is pinned",
            hints=(f"git -C {checkout} checkout --detach {engine.build_revision}",),
        )
    changes = proc.run(["git", "-C", str(checkout), "status", "--porcelain"], timeout=60).stdout.splitlines()
    for line in changes[:5]:
        progress(f"changed in the checkout: {line.strip()}", {"note": True})
    if not script.is_file():
        raise NotFoundError(f"{script} is not there")
    lines: list[str] = []

    def on_line(line: str) -> None:
        lines.append(line)
        progress(line.strip()[:100], {})

    env = {name: environ[name] for name in ("PATH", "HOME", "DOCKER_HOST", "XDG_RUNTIME_DIR") if name in environ}
    status = proc.stream(["sh", str(script)], env=env, on_line=on_line, cwd=checkout)
    if status:
        raise Ds41Error(f"{script} ended with {status}", detail=lines[-20:])
