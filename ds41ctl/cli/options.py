"""Option types used by several commands, defined once."""

from __future__ import annotations

from typing import Annotated

import typer


def _profiles(incomplete: str) -> list[str]:
    from ds41ctl.adapters.profiles import names

    return [name for name in names() if name.startswith(incomplete)]


ProfileOpt = Annotated[
    str | None,
    typer.Option("--profile", "-p", help="Profile name, or the path of a profile TOML.", autocompletion=_profiles),
]
JsonOpt = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
PortOpt = Annotated[int | None, typer.Option("--port", help="Port of the API.")]
DryRunOpt = Annotated[bool, typer.Option("--dry-run", help="Print the plan and touch nothing.")]
PlanOpt = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Print the plan, touch nothing; with --strict check too: exit 1 when anything fails, warns, is unknown.",
    ),
]
StrictOpt = Annotated[bool, typer.Option("--strict", help="Warnings and unknown results fail too.")]
VerboseOpt = Annotated[bool, typer.Option("--verbose", "-v", help="Show evidence.")]
SkipOpt = Annotated[
    list[str] | None,
    typer.Option(
        "--skip-check", metavar="ID", help="Leave out a check (or a domain); repeatable, recorded in the run."
    ),
]
DsparkOpt = Annotated[
    bool | None, typer.Option("--dspark/--no-dspark", help="Drafter on or off (default: the profile's).")
]
WheelsOpt = Annotated[
    str | None,
    typer.Option(
        "--wheels",
        metavar="DIR|URL",
        help="Take every package of the engine from this folder, asking no index; or a release's files from a mirror.",
    ),
]
CheckoutOpt = Annotated[
    str | None,
    typer.Option(
        "--checkout",
        metavar="DIR|URL",
        help="Build a container's image from the pinned commit in this repository instead of the profile's.",
    ),
]
AcceptSumsOpt = Annotated[
    str | None,
    typer.Option(
        "--accept-sums",
        metavar="SHA256",
        help="Once: the sha256 of the release's checksum file, after comparing it; it is remembered.",
    ),
]
