"""stop: end the engine and prove that nothing of it is left."""

from __future__ import annotations

from ds41ctl import cli
from ds41ctl.cli import options
from ds41ctl.cli.app import group
from ds41ctl.cli.session import open_running

app = group("Stop the engine and prove that nothing of it is left.")


@app.command()
def stop(profile: options.ProfileOpt = None, json: options.JsonOpt = False) -> None:
    """SIGTERM, a grace of 60 s, SIGKILL; then: port closed, no process left, else exit 1 with the list."""
    from ds41ctl.adapters import running
    from ds41ctl.steps import stop as steps

    session = open_running(profile)
    record = running.read(session.layout.record_path)
    if record is None:
        cli.out.data({"stopped": False, "was_running": False})
        cli.out.line(f"{session.profile.name} is not running")
        return
    cli.out.progress(f"stopping {session.profile.name} (pid {record.pid})", force=True)
    done = steps.end(session.layout, record)
    cli.out.data({"stopped": True, "was_running": done.was_alive, "processes": done.processes, "seconds": done.seconds})
    for text in done.kept:
        cli.out.note(text)
    how = f"{done.processes} processes ended" if done.was_alive else "it was already dead; its remains were cleared"
    cli.out.line(
        f"stopped {session.profile.name}: {how}, port {record.port} closed, nothing left   {done.seconds:.1f} s",
        mark="OK",
    )
