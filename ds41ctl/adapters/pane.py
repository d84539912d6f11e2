"""Exec wrapper: what tmux really starts. Standard library only, run by path, replaced by the engine.

Usage: python -I pane.py SPEC. SPEC is a 0600 JSON file: {"argv", "env", "cwd", "log", "limits", "secrets",
"die_with_parent"}. The environment travels in the file because tmux would put it into an argv that every user can
read; a secret stays in its own file until the engine is started.
"""

import json
import os
import signal
import sys


def main() -> None:
    """Read the spec, point stdout and stderr at the log, become the engine (same pid, so tmux sees how it ends)."""
    with open(sys.argv[1], encoding="utf-8") as source:  # noqa: PTH123 - pathlib would double the start time
        spec = json.load(source)
    log = os.open(spec["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    sys.stdout.write(f"output goes to {spec['log']}\n")
    sys.stdout.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    if not os.isatty(0):  # tmux takes a pane for dead as soon as nobody holds its terminal open
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
    if spec.get("die_with_parent"):  # serve --foreground: a killed ds41ctl must not leave its engine behind
        import ctypes

        pr_set_pdeathsig = 1  # linux/prctl.h
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
    for name, value in spec.get("limits", {}).items():
        limit(name, value)
    env = spec["env"]
    for name, path in spec.get("secrets", {}).items():
        with open(path, encoding="utf-8-sig") as source:  # noqa: PTH123
            env[name] = source.read().strip()
    os.chdir(spec["cwd"])
    try:
        os.execvpe(spec["argv"][0], spec["argv"], env)  # noqa: S606 - that is the purpose
    except OSError as error:
        os.write(2, f"ds41: cannot start {spec['argv'][0]}: {error.strerror}\n".encode())
        os._exit(127)


def limit(name: str, value: int) -> None:
    """Set a limit as far as this user may, and say in the log what could not be had."""
    import resource

    kind = getattr(resource, "RLIMIT_" + name.upper())
    hard = resource.getrlimit(kind)[1]
    wanted = resource.RLIM_INFINITY if value < 0 else value
    try:
        resource.setrlimit(kind, (wanted, hard if name != "core" and fits(wanted, hard) else wanted))
    except (OSError, ValueError):
        resource.setrlimit(kind, (hard, hard))
        os.write(2, f"ds41: limit {name}: {value} wanted, {hard} is the hard limit\n".encode())


def fits(wanted: int, hard: int) -> bool:
    """True when `hard` allows `wanted`; -1 is no limit."""
    return hard == -1 or (wanted != -1 and wanted <= hard)


if __name__ == "__main__":
    main()
