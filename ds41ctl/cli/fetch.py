"""fetch: get the pinned pack, verify it, repair it, clean up after it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ds41ctl import cli
from ds41ctl.cli import options, runs
from ds41ctl.cli.app import group
from ds41ctl.cli.session import Session, open_session
from ds41ctl.cli.up import heading
from ds41ctl.core.errors import ConfigError, IntegrityError

app = group("Get the pinned pack, verified by sha256 before it is published.")


@app.command()
def fetch(
    profile: options.ProfileOpt = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Hash every byte against the pins, check headers; change no file.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="With --verify: trust sidecars that nothing changed.")] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="Hash everything, quarantine files that are wrong, get them again.")
    ] = False,
    gc: Annotated[
        bool, typer.Option("--gc", help="Remove parts no pin wants and orphans of the hub client, nothing else.")
    ] = False,
    lock: Annotated[
        Path | None,
        typer.Option("--lock", metavar="FILE", help="Write the pinned file lists to FILE, to commit; fetch nothing."),
    ] = None,
    connections: Annotated[
        int, typer.Option("--connections", min=1, max=64, help="Streams at once over all files.")
    ] = 8,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Print the bytes by repository and disk, ask nobody; 15 when a disk has no room for them."
        ),
    ] = False,
    json: options.JsonOpt = False,
) -> None:
    """Get what is missing and verify it; files that are already right are left alone."""
    if sum((verify, repair, gc, lock is not None)) > 1:
        raise ConfigError("--verify, --repair, --gc and --lock are four different commands: choose one")
    if dry_run and (verify or gc or lock is not None):
        raise ConfigError("--dry-run goes with a fetch alone: it prints what one would bring")
    if quick and not verify:
        raise ConfigError("--quick goes with --verify")
    session = open_session(profile)
    cli.out.line(heading("fetch", session))
    if dry_run:
        _plan(session)
    elif verify:
        _verify(session, quick=quick)
    elif gc:
        _collect(session)
    elif lock is not None:
        _lock(session, lock)
    else:
        _fetch(session, repair=repair, connections=connections)


def _plan(session: Session) -> None:
    """What a fetch would bring, by repository and by filesystem; nothing is asked or touched."""
    from ds41ctl.adapters import packsize
    from ds41ctl.core.errors import NoSpaceError

    found = packsize.sources(session.layout)
    disks = packsize.disks(found)
    pinned = all(size.pinned for size in found)
    for size in found:
        if size.total is None or size.to_come is None:
            cli.out.line(f"  {size.name}  size not known before the Hub is asked, into {size.folder}")
            continue
        there = f"{size.there / 1e9:,.1f} GB there" + ("" if size.pinned else ", unproven")
        cli.out.line(
            f"  {size.name}  {size.total / 1e9:,.1f} GB: {there}, {size.to_come / 1e9:,.1f} GB to come, "
            f"into {size.folder}"
        )
    known = [size for size in found if size.total is not None]
    total, to_come = sum(size.total or 0 for size in known), sum(size.to_come or 0 for size in known)
    by = "the pins" if pinned else "the profile's figures: the Hub was not asked yet"
    cli.out.line(f"  {total / 1e9:,.1f} GB in all, {to_come / 1e9:,.1f} GB to come, by {by}" if found else "  nothing")
    for disk in disks:
        text = f"{disk.needed / 1e9:,.1f} GB needed, {disk.free / 1e9:,.1f} GB free"
        cli.out.line(f"  {disk.mount}  {text}" + ("" if disk.fits else "  DOES NOT FIT"))
    cli.out.data(
        {
            "sources": [
                {
                    "repo": size.name, "dir": str(size.folder), "bytes": size.total, "there": size.there,
                    "to_come": size.to_come, "by": "pins" if size.pinned else "profile",
                }
                for size in found
            ],
            "disks": [
                {"mount": str(disk.mount), "needed": disk.needed, "free": disk.free, "fits": disk.fits}
                for disk in disks
            ],
            "bytes": total if len(known) == len(found) else None,
            "to_come": to_come if len(known) == len(found) else None,
        }
    )  # fmt: skip
    full = [disk for disk in disks if not disk.fits]
    if full:
        raise NoSpaceError(
            f"{full[0].mount} has {full[0].free / 1e9:,.1f} GB free, the pack needs {full[0].needed / 1e9:,.1f} GB",
            hints=(f"df -h {full[0].mount}", "export DS41_DATA_DIR=/a/larger/filesystem"),
        )


def _fetch(session: Session, *, repair: bool, connections: int) -> None:
    from ds41ctl.adapters.hub import Hub
    from ds41ctl.steps.fetch import Fetch

    def hub() -> Hub:
        return Hub.of_environment(xet=session.resolved.settings.xet)

    step = Fetch(session.layout, repair=repair, connections=connections, hub=hub)
    with runs.run(session, "fetch") as runner:
        runner.step(step, always=repair)
        cli.out.data({"dir": str(session.layout.model_dir), **step.check().data})
        if session.profile.model.graft is not None and not step.check().data.get("own"):
            cli.out.hint(f"ds41ctl pack graft --profile {session.profile.name}")


def _verify(session: Session, *, quick: bool) -> None:
    from ds41ctl.steps.verify import VerifyPack

    step = VerifyPack(session.layout, quick=quick)
    with runs.run(session, "fetch --verify") as runner:
        passed = runner.judge(step)
        cli.out.data({"findings": [item.model_dump(mode="json") for item in step.findings]})
        if not passed:
            failed = [item for item in step.findings if item.failed()]
            raise IntegrityError(failed[0].summary, hints=failed[0].fix)


def _collect(session: Session) -> None:
    from ds41ctl.steps.gc import collect

    removed = collect(session.layout)
    for path, size in removed:
        cli.out.line(f"  removed    {path}  {size / 2**20:,.0f} MiB")
    freed = sum(size for _, size in removed)
    cli.out.line(f"  {len(removed)} files, {freed / 2**20:,.0f} MiB freed")
    cli.out.data({"removed": [str(path) for path, _ in removed], "bytes": freed})


def _lock(session: Session, path: Path) -> None:
    from ds41ctl.adapters import pins, tensorfile
    from ds41ctl.adapters.hub import Hub
    from ds41ctl.core.errors import UnsupportedError

    if not session.profile.model.hub_sources:
        raise UnsupportedError(
            f"the pack of {session.profile.name} does not come from the Hub: there is nothing to lock"
        )
    hub = Hub.of_environment()
    hub.note = cli.out.note
    before = pins.trees(session.layout)
    found = pins.ensure(session.layout, hub)
    tensorfile.ensure(session.layout, hub, cli.out.note)
    if before:
        pins.compare(session.layout, hub)  # what is committed must be what the Hub still lists
    pins.write(path, session.layout, found)
    count = sum(len(tree.files) for tree in found.values())
    cli.out.line(f"  {path}: {count} files of {len(found)} repositories at {hub.name}")
    cli.out.data({"lock": str(path), "files": count, "endpoint": hub.endpoint})
