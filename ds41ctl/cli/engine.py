"""engine: install, verify or list engines."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated

import typer

from ds41ctl import cli
from ds41ctl.adapters.supply import Supply
from ds41ctl.cli import options, runs
from ds41ctl.cli.app import group
from ds41ctl.cli.session import load_settings, open_session
from ds41ctl.core.errors import ConfigError, IntegrityError, NotFoundError
from ds41ctl.core.masking import mask_text

app = group("Install, verify or list engines.")


@app.command()
def install(
    profile: options.ProfileOpt = None,
    force: Annotated[bool, typer.Option("--force", help="Install again even when nothing is wrong.")] = False,
    wheels: options.WheelsOpt = None,
    checkout: options.CheckoutOpt = None,
    accept_sums: options.AcceptSumsOpt = None,
    json: options.JsonOpt = False,
) -> None:
    """Install the profile's engine beside the one in use, prove it, use it; the one before stays for `rollback`."""
    from ds41ctl.adapters import enginevenv
    from ds41ctl.steps.engine import EngineInstall

    session = open_session(profile)
    given = supply_of(wheels, checkout, accept_sums)
    step = EngineInstall(session.layout, os.environ, given, force=force)
    with runs.run(session, "engine install") as runner:
        runner.step(step, always=force or checkout is not None)
    cli.out.data(
        {
            "dir": str(session.layout.engine_dir),
            "manifest": enginevenv.manifest_digest(session.layout.engine_dir),
        }
    )


def supply_of(wheels: str | None, checkout: str | None, accept_sums: str | None) -> Supply:
    """What the three options mean. Raises NotFoundError for a folder that is not there, ConfigError for no digest."""
    digest = (accept_sums or "").lower()
    if digest and not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise ConfigError(f"--accept-sums {accept_sums}: expected the 64 digits of a sha256")
    return Supply(_place(wheels, ("http", "https")), _place(checkout, ("http", "https", "ssh", "git", "file")), digest)


def _place(text: str | None, schemes: tuple[str, ...]) -> Path | str | None:
    """An address as it is, a folder by its absolute path."""
    if text is None:
        return None
    if re.match(r"[a-z+]+://", text):
        if not text.startswith(tuple(f"{scheme}://" for scheme in schemes)) or re.search(r"\s", text):
            raise ConfigError(f"{mask_text(text)}: expected a folder, or an address of {', '.join(schemes)}")
        return text
    if not Path(text).is_dir():
        raise NotFoundError(f"no folder {text}")
    return Path(text).absolute()


@app.command()
def verify(profile: options.ProfileOpt = None, json: options.JsonOpt = False) -> None:
    """Compare every installed file with its digest, the engine with its manifest; run its GPU kernels on the card."""
    from ds41ctl.steps import engine

    session = open_session(profile)
    cli.out.progress("hashing every file of the engine", force=True)
    found = engine.verify(session.layout)
    cli.out.data({"dir": str(session.layout.engine_dir), "drift": found})
    if found:
        raise IntegrityError(
            f"the engine in {session.layout.engine_dir} differs from its manifest: {found[0]}",
            detail=found[1:20],
            hints=("ds41ctl engine install --force",),
        )
    cli.out.line(f"{session.layout.engine_dir}: every file as installed", mark="OK")
    passed = engine.check_kernels(session.layout, os.environ)
    if passed is not None:
        cli.out.line(f"GPU kernels: {passed} checks on this card equal the reference", mark="OK")


@app.command("list")
def list_engines(json: options.JsonOpt = False) -> None:
    """Engines installed below the data folder."""
    from ds41ctl.adapters import enginevenv, generations, paths

    folder = paths.dirs(load_settings().settings).data / "engines"
    rows = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if not path.is_dir():
            continue
        tree = enginevenv.read_manifest(path)
        rows.append(
            {
                "name": path.name,
                "installed_at": tree["installed_at"] if tree else None,
                "manifest": enginevenv.manifest_digest(path),
                "distributions": len(tree["distributions"]) if tree else None,
                "notices": tree.get("notices", []) if tree else [],
                "generations": [
                    {"name": item.name, "installed_at": item.installed_at, "current": item.current}
                    for item in generations.all_of(path)
                ],
            }
        )
    cli.out.data(rows)
    for row in rows:
        what = (
            f"installed {row['installed_at']}, manifest {str(row['manifest'])[:12]}"
            if row["installed_at"]
            else "not complete"
        )
        cli.out.line(f"{row['name']:<24} {what}")
        for item in row["generations"]:
            cli.out.line(f"  {'*' if item['current'] else ' '} {item['name']:<26} {item['installed_at']}")
    if not rows:
        cli.out.line(f"no engines below {folder}")
        cli.out.hint("ds41ctl engine install")


@app.command()
def rollback(profile: options.ProfileOpt = None, json: options.JsonOpt = False) -> None:
    """Use the engine that was in use before; one that runs now keeps what it was started with."""
    from ds41ctl.adapters import enginevenv, files, generations

    session = open_session(profile)
    engine = session.layout.engine_dir
    with files.locked(engine.with_suffix(".lock"), "changing the engine"):
        found = generations.back(engine)
    cli.out.data({"generation": found.name, "manifest": enginevenv.manifest_digest(engine)})
    cli.out.line(f"{engine.name}: {found.name}, installed {found.installed_at}", mark="OK")


@app.command()
def path(profile: options.ProfileOpt = None, json: options.JsonOpt = False) -> None:
    """Print the engine's interpreter."""
    session = open_session(profile)
    cli.out.data({"python": str(session.layout.python)})
    cli.out.line(str(session.layout.python))
