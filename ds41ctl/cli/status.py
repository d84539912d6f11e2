"""status: what is running, since when, and whether it is what the profile says."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import typer

from ds41ctl import cli
from ds41ctl.cli import options
from ds41ctl.cli.app import group
from ds41ctl.cli.session import Session, open_running
from ds41ctl.core.exits import Exit

if TYPE_CHECKING:
    from ds41ctl.adapters.running import Running

app = group("What is running, since when, and whether it is what the profile says.")


@app.command()
def status(profile: options.ProfileOpt = None, json: options.JsonOpt = False) -> None:
    """Exit 0 ready, 10 not running, 16 died, 1 running but not answering or not what the profile says."""
    session = open_running(profile)
    tree = collect(session)
    cli.out.data(tree)
    name = session.profile.name
    state = tree["state"]
    if state == "stopped":
        cli.out.line(f"{name}   not running")
        cli.out.hint(f"ds41ctl up --profile {name}")
        raise typer.Exit(int(Exit.NOT_FOUND))
    if state == "died":
        cli.out.line(f"{name}   DIED   pid {tree['pid']}: {tree['ending']}")
        for text in tree["last_lines"]:
            cli.out.line(f"  | {text}")
        for text in tree["left_behind"]:
            cli.out.line(f"  left behind: {text}")
        if tree["meaning"]:
            cli.out.line(f"  {tree['meaning']}")
        cli.out.hint("ds41ctl logs")
        cli.out.hint("ds41ctl stop   # clears what is left of it")
        raise typer.Exit(int(Exit.ENGINE_DIED))
    cli.out.line(f"{name}   {state} {tree['since']}   pid {tree['pid']}   {tree['url']}/v1")
    cli.out.line(f"  attach    {tree['attach']}")
    cli.out.line(f"  engram    {tree['engram']}")
    if tree["requests"]:
        cli.out.line(f"  requests  {tree['requests']}")
    cli.out.line(f"  drift     {', '.join(tree['drift']) or 'none (profile, engine and command line as started)'}")
    if state != "ready" or tree["drift"]:
        raise typer.Exit(int(Exit.FINDINGS))


def collect(session: Session) -> dict[str, Any]:
    """Everything `status` shows, as data."""
    from ds41ctl.adapters import proc, running, store, tmux
    from ds41ctl.steps import serve

    layout = session.layout
    record = running.read(layout.record_path)
    if record is None:
        return {"state": "stopped", "profile": session.profile.name}
    tree: dict[str, Any] = {
        "profile": record.profile,
        "pid": record.pid,
        "url": record.url,
        "started_at": record.started_at,
        "ready_at": record.ready_at,
        "log": record.log,
        "attach": tmux.attach_command(layout.socket_path),
        "requests": "",
    }
    if not record.alive():
        left = [proc.describe(item.pid) for item in proc.family(0, record.marker)]
        return {**tree, "state": "died", "left_behind": left, **_death(session, record.log)}
    health = serve.health(record.url)
    if not record.ready_at:
        tree["state"] = "starting"
    else:
        tree["state"] = "ready" if health == "ok" else f"not answering ({health})"
    tree["since"] = _ago(record.ready_at or record.started_at)
    folder = store.locate(layout)
    family = {item.pid for item in proc.family(record.pid, record.marker)}
    if not session.profile.engram.own_store:
        tree["engram"] = "no store: this profile's engine keeps its own tables, unproven"
    else:
        mapped = len(family & set(store.mapped_by(folder)))
        tree["engram"] = f"{folder}, mapped by {mapped} of {len(family)} processes"
    tree["drift"] = drift(session, record)
    if tree["state"] == "ready":
        tree["requests"] = _requests(record.url)
    return tree


def drift(session: Session, record: Running) -> list[str]:
    """What of the live engine differs from its profile, its manifest or its start."""
    from ds41ctl.adapters import enginevenv

    found = []
    if record.profile_digest != session.profile.digest():
        found.append("the profile changed since the start")
    if record.engine_digest != enginevenv.manifest_digest(session.layout.engine_dir):
        found.append("the engine on disk is not the one that runs")
    live = _live_argv(record.pid)
    if live is not None and live != list(record.argv):
        found.append("the live command line differs from the one that was started")
    return found


def _death(session: Session, log: str) -> dict[str, Any]:
    from pathlib import Path

    from ds41ctl.adapters import tmux
    from ds41ctl.core.faults import fingerprint

    pane = tmux.read(session.layout.socket_path)
    ending = pane.ending() if pane is not None and pane.dead else "how is not known (its tmux server is gone)"
    path = Path(log)
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    known = fingerprint(lines, ending)
    return {
        "ending": ending,
        "meaning": known.meaning if known else "",
        "last_lines": [line[:200] for line in lines if line.strip()][-5:],
    }


def _ago(stamp: str) -> str:
    seconds = int((datetime.now(UTC) - datetime.fromisoformat(stamp)).total_seconds())
    if seconds < 120:
        return f"{seconds} s"
    minutes = seconds // 60
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def _live_argv(pid: int) -> list[str] | None:
    from pathlib import Path

    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return None
    # a process that set its own title shows one string only: nothing to compare
    parts = raw.rstrip(b"\0").split(b"\0")
    return [part.decode(errors="replace") for part in parts] if len(parts) > 1 else None


def _requests(url: str) -> str:
    from prometheus_client.parser import text_string_to_metric_families

    from ds41ctl.adapters.http import EngineClient, HttpFault

    try:
        reply = EngineClient(url).get("/metrics")
        totals: dict[str, float] = {}
        for family in text_string_to_metric_families(reply.body.decode(errors="replace")):
            for sample in family.samples:
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    except (HttpFault, ValueError):
        return "unknown (/metrics cannot be read)"
    if "vllm:num_requests_running" not in totals:
        return "unknown (/metrics has no vllm:num_requests_running)"
    use = totals.get("vllm:kv_cache_usage_perc")
    kv = "" if use is None else f", KV {100 * use:.1f} %"
    return (
        f"{totals['vllm:num_requests_running']:.0f} running, "
        f"{totals.get('vllm:num_requests_waiting', 0):.0f} waiting{kv}"
    )
