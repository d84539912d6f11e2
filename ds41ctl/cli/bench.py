"""bench: the tables the recipes print, and what makes them comparable."""

from __future__ import annotations

import json as json_module
import secrets
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ds41ctl import cli
from ds41ctl.cli import live, options
from ds41ctl.cli.app import group
from ds41ctl.cli.session import Session, open_running
from ds41ctl.core.errors import ConfigError, NotFoundError
from ds41ctl.core.exits import Exit

if TYPE_CHECKING:
    from smoke.bench import Row

FILE = "bench.json"

app = group("Measure prefill and decode as the recipes report them.")


@app.command()
def bench(
    profile: options.ProfileOpt = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="PART", help="decode, context, prefill or during-prefill.")
    ] = None,
    suite: Annotated[
        list[str] | None, typer.Option("--suite", metavar="NAME", help="structured, code or prose; repeatable.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Measure beside other clients and mark every number.")] = False,
    target: Annotated[
        str | None, typer.Option("--target", metavar="URL", help="An engine that was not started here.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Confirms a --target that is not this machine.")] = False,
    recipe: Annotated[
        Path | None, typer.Option("--recipe", metavar="FILE", help="Export the unmarked points as a recipe's JSON.")
    ] = None,
    texts: Annotated[
        Path | None, typer.Option("--texts", metavar="DIR", help="Long texts of your own for the row prefill.texts.")
    ] = None,
    json: options.JsonOpt = False,
) -> None:
    """Measure the running engine. Exit 0; 3 when a number is marked or missing; 11 when another load runs."""
    from smoke.bench import PARTS, SUITES

    for given, known, name in ((only, PARTS, "--only"), (suite, SUITES, "--suite")):
        for item in given or ():
            if item not in known:
                raise typer.BadParameter(f"{name} is one of: " + ", ".join(known))
    session = open_running(profile)
    with live.only_load(session, f"a bench of {session.profile.name}"):
        _bench(session, tuple(only or PARTS), tuple(suite or SUITES), force, target, yes, recipe, texts)


def _bench(
    session: Session,
    parts: tuple[str, ...],
    suites: tuple[str, ...],
    force: bool,
    target: str | None,
    yes: bool,
    recipe: Path | None,
    texts: Path | None,
) -> None:
    from ds41ctl.adapters import files
    from ds41ctl.adapters.journal import new_folder
    from smoke import bench, bench_report

    known = live.to_load(session, target, confirmed=yes)
    engine = bench.Target(
        url=known.url, profile=session.profile, record=known.record, drift=known.drift, confirmed=yes, key=known.key,
        texts=_texts(session, texts),
    )  # fmt: skip
    runs = session.dirs.state / "bench"
    earlier = _latest(runs)
    cli.out.line(f"bench  {session.profile.name}  {known.url}")
    for text in known.drift:
        cli.out.note(f"note: {text}")
    started = datetime.now(UTC).isoformat(timespec="seconds")

    def show(row: Row) -> None:
        for text in bench_report.lines([row], []):
            cli.out.line(f"  {text}")

    rows = bench.run(engine, parts=parts, suites=suites, force=force, seed=secrets.randbits(31), show=show)
    folder = new_folder(runs)
    digests = {"profile": known.profile_digest, "engine": known.engine_digest, "facts": known.facts_digest}
    saved = bench_report.document(folder.name, started, session.profile, digests, rows, known.drift, known.drafter)
    compared = bench_report.comparison(saved, session.profile, earlier)
    files.publish_json(folder / FILE, saved)
    files.publish(folder / "bench.md", [bench_report.markdown(saved, session.profile, compared).encode()])
    if recipe is not None:
        files.publish_json(recipe.absolute(), bench_report.recipe(saved, session.profile))
    cli.out.data({**saved, "compared": compared, "folder": str(folder)})
    for item in compared:
        for label, share, other in (("published", "of_published", "published"), ("last run", "of_earlier", "earlier")):
            if item[share] is not None:
                cli.out.line(f"  {item['name']:<24} {item[share]:.0%} of the {label} ({item[other]:g})")
    bad = [row for row in rows if row.marks or row.value is None]
    cli.out.line(
        f"{len(rows) - len(bad)} of {len(rows)} numbers can be compared", mark="UNKNOWN" if bad or not rows else "OK"
    )
    cli.out.hint(f"less {folder / 'bench.md'}")
    if bad or not rows:
        raise typer.Exit(int(Exit.INCONCLUSIVE))


def _texts(session: Session, folder: Path | None) -> tuple[tuple[str, str], ...]:
    """The user's texts by name; none without a folder. Raises NotFoundError, ConfigError."""
    from smoke.fidelity import texts_of

    if folder is None:
        return ()
    if not session.profile.bench.prefill_texts:
        raise ConfigError(f"--texts: profile {session.profile.name} asks for no texts (bench.prefill_texts is empty)")
    if not folder.is_dir():
        raise NotFoundError(f"no folder {folder}")
    return tuple(texts_of(folder).items())


def _latest(runs: Path) -> dict[str, Any] | None:
    try:
        tree = json_module.loads((runs / "latest" / FILE).read_text())
    except (OSError, ValueError):
        return None
    return tree if isinstance(tree, dict) and isinstance(tree.get("rows"), list) else None
