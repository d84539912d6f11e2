"""Entry point: parse, call, render. Here is the only try/except that ends in a message and an exit code."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from ds41ctl.cli.output import Output
from ds41ctl.core.errors import ConfigError, DeniedError, Ds41Error, NoSpaceError
from ds41ctl.core.exits import Exit

# where commands print; replaced at the start of each main()
out = Output(json_mode=False)


class _Terminated(BaseException):
    """SIGTERM or SIGHUP, raised so that every finally runs."""


def _on_term(number: int, frame: FrameType | None) -> None:
    raise _Terminated


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code."""
    global out
    args = list(sys.argv[1:] if argv is None else argv)
    out = Output(json_mode="--json" in args)
    signal.signal(signal.SIGTERM, _on_term)
    signal.signal(signal.SIGHUP, _on_term)  # a closed terminal must not skip what SIGTERM would clean up
    try:
        code, error = _run(args), None
    except BaseException as caught:
        code, error = _judge(caught)
    if error is not None or out.json_mode:
        out.finish(code, error)
    return code


def _run(args: list[str]) -> int:
    from typer.main import get_command

    from ds41ctl.cli.app import root

    result = get_command(root).main(args=args, prog_name="ds41ctl", standalone_mode=False)
    return result if isinstance(result, int) else 0


def _judge(caught: BaseException) -> tuple[int, Ds41Error | None]:
    """The exception table: what a failure says and which exit code it has. Subclasses come before their bases."""
    if isinstance(caught, Ds41Error):
        return int(caught.code), caught
    if isinstance(caught, KeyboardInterrupt) or type(caught).__name__ == "Abort":
        return int(Exit.SIGINT), Ds41Error("interrupted")
    if isinstance(caught, _Terminated):
        return int(Exit.SIGTERM), Ds41Error("terminated")
    if hasattr(caught, "format_message"):  # a usage error of the command line parser
        context = getattr(caught, "ctx", None)
        path = context.command_path if context is not None else "ds41ctl"
        return int(Exit.USAGE), ConfigError(caught.format_message().replace("\n", " "), hints=(f"{path} --help",))
    if type(caught).__name__ == "Exit" and hasattr(caught, "exit_code"):
        return int(caught.exit_code), None
    if isinstance(caught, BrokenPipeError | SystemExit):
        # the reader went away (`| head`), which the parser turns into SystemExit: not a failure of ours
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return int(Exit.OK), None
    if isinstance(caught, PermissionError):
        return int(Exit.PERMISSION), DeniedError(f"permission denied: {caught.filename or caught}")
    if isinstance(caught, MemoryError):
        return int(Exit.NO_SPACE), NoSpaceError("out of memory")
    if os.environ.get("DS41_DEBUG") in ("1", "true"):
        raise caught
    where = caught.__traceback__
    while where is not None and where.tb_next is not None:
        where = where.tb_next
    place = f" at {Path(where.tb_frame.f_code.co_filename).name}:{where.tb_lineno}" if where else ""
    return int(Exit.INTERNAL), Ds41Error(
        f"internal error: {type(caught).__name__}: {str(caught).splitlines()[0] if str(caught) else ''}{place}",
        hints=("DS41_DEBUG=1 shows the traceback; please report it with `ds41ctl facts --redact --json`",),
    )
