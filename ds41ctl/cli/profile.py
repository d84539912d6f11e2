"""profile: list, show or check profiles."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ds41ctl import cli
from ds41ctl.cli import options
from ds41ctl.cli.app import group
from ds41ctl.core.errors import ConfigError

app = group("List, show or check profiles.")


@app.command("list")
def list_profiles(json: options.JsonOpt = False) -> None:
    """Built-in profiles and those in the config folder."""
    from ds41ctl.adapters import profiles

    rows = []
    for name, path in profiles.paths().items():
        try:
            profile = profiles.read(path)
        except ConfigError as error:  # one broken file of the user must not hide the others
            what = f"cannot be read: {error.message}"
            rows.append({"name": name, "title": what, "state": "broken", "path": str(path)})
            continue
        rows.append({"name": name, "title": profile.title, "state": profile.state, "path": str(path)})
    cli.out.data(rows)
    for row in rows:
        cli.out.line(f"{row['name']:<16} {row['title']}   ({row['state']})")


@app.command()
def show(
    name: str = typer.Argument(help="Profile name or path."),
    origin: Annotated[bool, typer.Option("--origin", help="Show the source of every number.")] = False,
    json: options.JsonOpt = False,
) -> None:
    """A profile with its sources; --json gives it whole."""
    from ds41ctl.adapters import profiles

    path = profiles.find(name)
    profile = profiles.read(path)
    cli.out.data(
        {
            "path": str(path),
            "digest": profile.digest(),
            "profile": profile.model_dump(mode="json", by_alias=True),
        }
    )
    cli.out.line(f"{profile.name}   {profile.title}   ({profile.state}; {path}, digest {profile.digest()[:12]})")
    tree = profile.model_dump(mode="json", by_alias=True, exclude={"provenance"})
    for key, value in _leaves(tree):
        source = f"   [{profile.source_of(key)}]" if origin and profile.source_of(key) else ""
        cli.out.line(f"  {key} = {value}{source}")
    for text in profile.lacks:
        cli.out.line(f"  not in this version: {text}")


@app.command()
def check(
    file: Annotated[Path | None, typer.Argument(help="Profile TOML; without it, every known profile.")] = None,
    json: options.JsonOpt = False,
) -> None:
    """Check profiles; every problem in one go, unknown keys with the near name."""
    from ds41ctl.adapters import profiles

    chosen = [file] if file is not None else list(profiles.paths().values())
    bad: list[str] = []
    for path in chosen:
        try:
            profiles.read(profiles.find(str(path)))
        except ConfigError as error:
            bad += [error.message, *(f"{path.name}: {line}" for line in error.detail)]
            continue
        cli.out.line(str(path), mark="OK")
    cli.out.data({"checked": [str(path) for path in chosen], "problems": bad})
    if bad:
        raise ConfigError(bad[0], detail=bad[1:])


@app.command("import")
def import_profile(
    source: Annotated[str | None, typer.Argument(metavar="FILE|URL", help="Recipe JSON.")] = None,
    env_file: Annotated[
        Path | None, typer.Option("--env-file", metavar="FILE", help="A ds41.env of the V100 launcher instead.")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the new profile.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write here, not to the config folder.")
    ] = None,
    json: options.JsonOpt = False,
) -> None:
    """A published recipe, or an environment file, as a profile that passes the check; what has no place is listed."""
    from ds41ctl.adapters import files, profiles, webtext
    from ds41ctl.core import envfile, recipe

    if (source is None) == (env_file is None):
        raise ConfigError("profile import: a recipe or --env-file expected, one of them")
    stem = output.stem if output is not None else name
    if env_file is not None:
        values, remarks = envfile.parse(webtext.read_file(env_file).decode("utf-8", errors="replace"), str(env_file))
        stem = stem or "v100-mine"
        found = recipe.of_env_file(values, profiles.tree(profiles.find("v100-pp2tp4")), stem)
        found.changed[:0] = remarks
    else:
        tree = recipe.load(webtext.read(str(source), recipe.LARGEST), str(source))
        stem = stem or recipe.short_name(tree)
        found = recipe.read(tree, stem)
    if name is not None and stem != name:
        raise ConfigError(f"--name {name} and the file's name {stem} differ: a profile is named as its file")
    target = output if output is not None else profiles.user_folder() / f"{stem}.toml"
    if target.exists():
        raise ConfigError(f"{target} exists", hints=(f"rm {target}", "or choose another: --name NAME"))
    target.parent.mkdir(parents=True, exist_ok=True)
    files.publish(target.absolute(), [found.text.encode()])
    cli.out.data({"path": str(target), "name": stem, "unmapped": found.unmapped, "changed": found.changed})
    cli.out.line(f"{target}: passes the check", mark="OK")
    for text in found.changed:
        cli.out.line(f"  changed: {text}")
    for text in found.unmapped:
        cli.out.line(f"  not mapped: {text}")
    cli.out.hint(f"ds41ctl serve --profile {stem if output is None else target} --dry-run")


@app.command("export")
def export_profile(
    name: str = typer.Argument(help="Profile name or path."),
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write here.")] = None,
    json: options.JsonOpt = False,
) -> None:
    """A profile in the form of a published recipe (`bench --recipe` adds measured points)."""
    import json as codec

    from ds41ctl.adapters import files, profiles
    from ds41ctl.core import recipe

    tree = recipe.write(profiles.read(profiles.find(name)))
    cli.out.data(tree)
    if output is not None:
        files.publish_json(output.absolute(), tree)
        cli.out.line(str(output), mark="OK")
    else:
        cli.out.line(codec.dumps(tree, indent=1, ensure_ascii=False))


@app.command()
def schema(json: options.JsonOpt = False) -> None:
    """The JSON Schema of a profile file."""
    import json as codec

    from ds41ctl.core.profile import json_schema

    cli.out.data(json_schema())
    cli.out.line(codec.dumps(json_schema(), indent=1, sort_keys=True))


def _leaves(tree: object, prefix: str = "") -> list[tuple[str, object]]:
    if isinstance(tree, dict):
        return [leaf for name, sub in tree.items() for leaf in _leaves(sub, f"{prefix}.{name}".lstrip("."))]
    if isinstance(tree, list) and any(isinstance(item, dict) for item in tree):
        return [leaf for index, sub in enumerate(tree) for leaf in _leaves(sub, f"{prefix}.{index}")]
    return [(prefix, tree)] if tree not in ("", [], None) else []
