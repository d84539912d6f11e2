"""status: what is running, since when, and whether it is what the profile says."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ds41ctl import cli
from ds41ctl.cli import options
from ds41ctl.cli.app import group
from ds41ctl.cli.session import Session, open_running
from ds41ctl.core.errors import ConfigError
from ds41ctl.core.exits import Exit

if TYPE_CHECKING:
    from ds41ctl.adapters.running import Running

app = group("What is running, since when, and whether it is what the profile says.")


@app.command()
def status(
    profile: options.ProfileOpt = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Look again and again; name a death within 5 s. Ctrl-C ends it.")
    ] = False,
    every: Annotated[float, typer.Option("--every", min=0.2, max=60, help="Seconds between two looks.")] = 2.0,
    restart: Annotated[
        int, typer.Option("--restart", min=0, max=20, help="With --watch: restarts allowed within an hour.")
    ] = 0,
    prom: Annotated[
        Path | None, typer.Option("--prom", metavar="FILE", help="Write metrics for node_exporter's textfile reader.")
    ] = None,
    json: options.JsonOpt = False,
) -> None:
    """Exit 0 ready, 10 not running, 16 died, 1 running but not answering or not what the profile says."""
    session = open_running(profile)
    if restart and not watch:
        raise ConfigError("--restart needs --watch")
    if watch:
        _watch(session, every, restart, prom)
    tree = collect(session)
    _write(prom, tree)
    cli.out.data(tree)
    _show(session.profile.name, tree)
    code = exit_code(tree)
    if code is not Exit.OK:
        raise typer.Exit(int(code))


def exit_code(tree: dict[str, Any]) -> Exit:
    """What a status means for scripts."""
    if tree["state"] == "stopped":
        return Exit.NOT_FOUND
    if tree["state"] == "died":
        return Exit.ENGINE_DIED
    return Exit.OK if tree["state"] == "ready" and not tree["drift"] else Exit.FINDINGS


def collect(session: Session) -> dict[str, Any]:
    """Everything `status` shows, as data."""
    from ds41ctl.steps import live

    return live.collect(session.layout)


def drift(session: Session, record: Running) -> list[str]:
    """What of the live engine differs from its profile, its manifest or its start."""
    from ds41ctl.steps import live

    return live.drift(session.layout, record)


def _write(prom: Path | None, tree: dict[str, Any]) -> None:
    if prom is not None:
        from ds41ctl.adapters import files
        from ds41ctl.core.promtext import render

        files.publish(prom.absolute(), [render(tree, time.time()).encode()])


def _show(name: str, tree: dict[str, Any]) -> None:
    state = tree["state"]
    if state == "stopped":
        cli.out.line(f"{name}   not running")
        cli.out.hint(f"ds41ctl up --profile {name}")
        return
    if state == "died":
        cli.out.line(f"{name}   DIED   pid {tree['pid']}: {tree['ending']}")
        for text in tree["last_lines"]:
            cli.out.line(f"  | {text}")
        for text in tree["left_behind"]:
            cli.out.line(f"  left behind: {text}")
        cli.out.line(f"  {tree['meaning']}")
        if tree["fix"]:
            cli.out.hint(tree["fix"])
        cli.out.hint("ds41ctl logs")
        cli.out.hint("ds41ctl stop   # clears what is left of it")
        return
    since = f" {_duration(tree['uptime_s'])}" if tree.get("uptime_s") is not None else ""
    cli.out.line(f"{name}   {state}{since}   pid {tree['pid']}   {tree['url']}/v1")
    cli.out.line(f"  attach    {tree['attach']}")
    cli.out.line(f"  engram    {tree['engram']}")
    if tree["clocks"]:
        cli.out.line(f"  clocks    {tree['clocks']}")
    for gpu in tree["gpus"]:
        cli.out.line(f"  gpu {gpu['index']}     {_gpu(gpu)}")
    if state == "ready":
        cli.out.line(f"  requests  {_load(tree['load'])}")
    cli.out.line(f"  drift     {', '.join(tree['drift']) or 'none (profile, engine and command line as started)'}")


def _gpu(gpu: dict[str, Any]) -> str:
    def shown(value: Any, unit: str) -> str:
        return "unknown" if value is None else f"{value:,} {unit}"

    memory = f"{shown(gpu['used_mib'], 'MiB')} of {shown(gpu['total_mib'], 'MiB')}"
    limit = gpu["power_limit_w"]
    power = "limit unknown" if limit is None else f"limit {limit:g} W"
    offset = f", offset {gpu['offset_mhz']:+d} MHz" if gpu["offset_mhz"] else ""
    return f"{memory}, {shown(gpu['sm_mhz'], 'MHz')}{offset}, {power}, {shown(gpu['temperature_c'], 'C')}"


def _load(load: dict[str, Any] | None) -> str:
    if load is None or load["running"] is None:
        return "unknown (/metrics cannot be read)"
    parts = [f"{load['running']:.0f} running, {load['waiting'] or 0:.0f} waiting"]
    if load["tokens_per_s"] is not None:
        parts.append(f"{load['tokens_per_s']:.1f} tok/s")
    if load["acceptance"] is not None:
        parts.append(f"drafter accepts {load['acceptance']:.2f}")
    if load["kv"] is not None:
        parts.append(f"KV {100 * load['kv']:.1f} %")
    return ", ".join(parts)


def _duration(seconds: int) -> str:
    if seconds < 120:
        return f"{seconds} s"
    minutes = seconds // 60
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def _watch(session: Session, every: float, restart: int, prom: Path | None) -> None:
    """Print a line whenever the state changes, and a line a minute; return when there is nothing left to watch."""
    from ds41ctl.steps import live
    from ds41ctl.steps.watchdog import Watchdog

    layout = session.layout
    dog = Watchdog(
        layout, session.profile_path, os.environ, most=restart, stall_s=session.profile.soak.stall_s, every_s=every
    )
    shown, shown_at, before = "", 0.0, None
    for state, look in dog.states(cli.out.note):
        tree = None
        if state != shown or look.at - shown_at >= 60 or prom is not None:
            tree = live.collect(layout, before=before)
            _write(prom, tree)
        if state != shown or look.at - shown_at >= 60:
            told = _load(tree["load"]) if tree and tree.get("load") else ""
            cause = f"{tree['ending']}: {tree['meaning']}" if tree and "ending" in tree else told
            cli.out.note(f"{time.strftime('%H:%M:%S')}  {session.profile.name}  {state}  {cause}")
            shown, shown_at = state, look.at
        before = (look.at, look.generated)
