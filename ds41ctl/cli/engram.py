"""engram: build, show, verify or drop the Engram store."""

from __future__ import annotations

from typing import Annotated

import typer

from ds41ctl import cli
from ds41ctl.cli import options, runs
from ds41ctl.cli.app import group
from ds41ctl.cli.session import open_session
from ds41ctl.core.errors import ConfigError, IntegrityError, NotFoundError
from ds41ctl.core.exits import Exit

app = group("Build, show, verify or drop the Engram store.")


@app.command()
def build(
    profile: options.ProfileOpt = None, dry_run: options.DryRunOpt = False, json: options.JsonOpt = False
) -> None:
    """Put every table into memory, rows checked against the shards, unless a proven store is there."""
    from ds41ctl.adapters import store
    from ds41ctl.cli.planning import plan_of_build, print_plan
    from ds41ctl.steps.engram import EngramBuild

    session = open_session(profile)
    if not session.profile.engram.own_store:
        raise ConfigError(
            f"{session.profile.name} has no store to build: engram.storage is {session.profile.engram.storage}",
            hints=(f"ds41ctl serve --profile {session.profile.name}",),
        )
    if dry_run:
        print_plan(plan_of_build(session))
        return
    with runs.run(session, "engram build") as runner:
        runner.step(EngramBuild(session.layout))
    cli.out.data({"dir": str(store.locate(session.layout))})


@app.command()
def status(profile: options.ProfileOpt = None, json: options.JsonOpt = False) -> None:
    """Where the store is, on which pages, and who maps it. Exit 10 when there is none, 12 when it is not valid."""
    from pathlib import Path

    from ds41ctl.adapters import proc, running, store, storeplace
    from ds41ctl.steps.engram import counters

    session = open_session(profile)
    facts = store.inspect(session.layout)
    users = store.used_by(Path(facts.dir)) if facts.exists else []
    left = storeplace.leftovers(session.layout)
    record = running.read(session.layout.record_path)
    gathered = counters(Path(record.log)) if record is not None and record.alive() else []
    cli.out.data({**facts.model_dump(mode="json"), "mapped_by": users, "in_use": left, "counters": gathered})
    taken = [f"mount {point}" for point in left["mounts"]]
    taken += [
        f"{item['pages']} hugepages of {item['page_kib']} KiB reserved on node {item['node']}"
        for item in left["hugepages"]
    ]
    if not facts.exists:
        if taken or left["files"]:
            cli.out.line("left by a build that did not end: " + ", ".join([*taken, f"{left['files']} files"]))
            cli.out.hint("ds41ctl engram drop")
        raise NotFoundError(
            f"no Engram store of {session.profile.name} in {facts.data_dir or facts.dir}",
            hints=("ds41ctl engram build",),
        )
    mark = "FAIL" if facts.problem else "OK"
    cli.out.line(
        f"{facts.dir}   {len(facts.layers)} tables, {facts.bytes_present / 2**20:.1f} MiB, {facts.page_kind}",
        mark=mark,
    )
    if facts.data_dir != facts.dir:
        cli.out.line(f"  {facts.format} in {facts.data_dir}")
    if facts.node_bytes:
        balance = ", ".join(f"node {node} {size / 2**20:.1f} MiB" for node, size in facts.node_bytes.items())
        cli.out.line(f"  memory on {balance}")
    for text in (*facts.notes, *taken):
        cli.out.line(f"  {text}")
    for text in gathered:
        cli.out.line(f"  gathered: {text}")
    for pid in users:
        cli.out.line(f"  {'mapped' if facts.format == 'records' else 'used'} by {proc.describe(pid)}")
    if facts.problem:
        cli.out.line(f"  {facts.problem}")
        cli.out.hint("ds41ctl engram build")
        raise typer.Exit(int(Exit.INTEGRITY))


@app.command()
def verify(
    profile: options.ProfileOpt = None,
    full: Annotated[bool, typer.Option("--full", help="Compare every byte, not a sample of rows.")] = False,
    json: options.JsonOpt = False,
) -> None:
    """Compare records with the shards they were built from. Exit 12 at the first difference."""
    from ds41ctl.steps import engram

    session = open_session(profile)
    rows, difference = engram.verify(session.layout, full=full)
    cli.out.data({"rows_compared": rows, "difference": difference, "full": full})
    if difference:
        raise IntegrityError(f"Engram store: {difference}", hints=("ds41ctl engram drop", "ds41ctl engram build"))
    cli.out.line(f"{rows} rows equal to the shards" + ("" if full else " (a sample; --full compares all)"), mark="OK")


@app.command()
def drop(profile: options.ProfileOpt = None, json: options.JsonOpt = False) -> None:
    """Remove the store and the mount made for it. Refused while a process maps it."""
    from ds41ctl.steps import engram

    session = open_session(profile)
    removed = engram.drop(session.layout)
    cli.out.data({"removed": removed})
    cli.out.line(f"removed {len(removed)} files and mounts" if removed else "there was no store", mark="OK")
