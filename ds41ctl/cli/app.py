"""The command table: names and one-line help here, modules imported only when a command runs."""

from __future__ import annotations

import importlib
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from ds41ctl.core.errors import ConfigError
from ds41ctl.core.nearest import nearest

# name -> (module below ds41ctl.cli, help). A module defines `app`, a Typer with one callback or several commands.
COMMANDS: dict[str, tuple[str, str]] = {
    "up": ("up", "Bare machine to proven engine in one go"),
    "preflight": ("preflight", "Check this machine for a profile"),
    "fetch": ("fetch", "Get the pinned pack, verified by sha256"),
    "pack": ("pack", "Build the hybrid pack, or look into a pack"),
    "engine": ("engine", "Install, verify or list engines"),
    "engram": ("engram", "Build, show, verify or drop the Engram store"),
    "clocks": ("clocks", "Hold clocks and power limits, give them back"),
    "serve": ("serve", "Start the engine, wait until tokens flow"),
    "status": ("status", "What runs, since when, and is it as started"),
    "logs": ("logs", "Show the engine's log"),
    "stop": ("stop", "Stop the engine, prove nothing is left"),
    "smoke": ("smoke", "Prove by behaviour that the engine works"),
    "gate": ("gate", "Is it still the same model? Compare with an oracle"),
    "bench": ("bench", "Measure prefill and decode as recipes do"),
    "soak": ("soak", "Work the engine for hours, and judge it"),
    "profile": ("profile", "List, show or check profiles"),
    "facts": ("facts", "Record this machine for tests and reports"),
    "report": ("report", "Show what a run amounted to"),
    "config": ("config", "Show every setting and its origin"),
}


class LazyGroup(TyperGroup):
    """Looks commands up in COMMANDS; help and completion of the top level import none of them."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names in table order."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A stand-in that carries name and help (for listings)."""
        if cmd_name not in COMMANDS:
            return None
        return TyperCommand(name=cmd_name, help=COMMANDS[cmd_name][1], callback=None)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The real command, for running it (or for completing its options)."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            near = nearest(args[0], COMMANDS)
            raise ConfigError(
                f"no command {args[0]!r}" + (f"; did you mean {near}?" if near else ""),
                hints=("ds41ctl --help",),
            )
        name, stand_in, rest = super().resolve_command(ctx, args)
        if name is None or stand_in is None:
            return name, stand_in, rest
        module = importlib.import_module(f"ds41ctl.cli.{COMMANDS[name][0]}")
        command = get_command(module.app)
        command.name = name
        return name, command, rest


root = typer.Typer(
    cls=LazyGroup,
    name="ds41ctl",
    no_args_is_help=False,
    invoke_without_command=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@root.callback()
def _root(
    ctx: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print versions and exit."),
) -> None:
    """Launcher and ops CLI for DeepSeek-V4.1-Flash on a pinned vLLM engine."""
    if version:
        from ds41ctl import __version__
        from ds41ctl.core.profile import PROFILE_SCHEMA

        typer.echo(f"ds41ctl {__version__} (profile schema {PROFILE_SCHEMA})")
        raise typer.Exit(0)
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
        raise typer.Exit(0)


def group(help: str) -> typer.Typer:
    """A Typer for one command module."""
    return typer.Typer(help=help, rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)
