"""profile: list, show or check profiles."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ds41ctl import cli
from ds41ctl.cli import options
from ds41ctl.cli.app import group
from ds41ctl.core.errors import ConfigError
from ds41ctl.core.exits import Exit

if TYPE_CHECKING:
    from ds41ctl.core.launcher import Read

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
    launcher: Annotated[
        Path | None, typer.Option("--launcher", metavar="FILE", help="The engine's own serve script instead.")
    ] = None,
    env: Annotated[
        Path | None, typer.Option("--env", metavar="FILE", help="The environment file --launcher is used with.")
    ] = None,
    base: Annotated[
        str, typer.Option("--base", help="Profile that --launcher is laid over: hardware, pack, engine, checks.")
    ] = "v100-pp2tp4",
    name: Annotated[str | None, typer.Option("--name", help="Name of the new profile.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write here, not to the config folder.")
    ] = None,
    json: options.JsonOpt = False,
) -> None:
    """A published recipe, an environment file or an engine's own serve script, as a profile that passes the check.

    What has no place in a profile is listed. A script is read, never run: what could not be read of it is named with
    its line, and the exit code is 3 then (the profile is written and lists the same).
    """
    from ds41ctl.adapters import files, profiles, webtext
    from ds41ctl.core import envfile, recipe

    if env is not None and launcher is None:
        raise ConfigError("profile import: --env goes with --launcher; without a launcher it is --env-file")
    if sum(item is not None for item in (source, env_file, launcher)) != 1:
        raise ConfigError("profile import: a recipe, --env-file or --launcher expected, one of them")
    read: Read | None = None
    stem = output.stem if output is not None else name
    if env_file is not None:
        values, remarks = envfile.parse(webtext.read_file(env_file).decode("utf-8", errors="replace"), str(env_file))
        stem = stem or "v100-mine"
        found = recipe.of_env_file(values, profiles.tree(profiles.find("v100-pp2tp4")), stem)
        found.changed[:0] = remarks
    elif launcher is not None:
        stem = stem or f"{base.rsplit('/', 1)[-1].split('-')[0].removesuffix('.toml')}-mine"
        found = read = _of_launcher(launcher, env, base, stem)
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
    data: dict[str, object] = {"path": str(target), "name": stem, "unmapped": found.unmapped, "changed": found.changed}
    if read is not None:
        data |= {"assignments": read.assignments, "options": read.options, "passed_over": read.passed}
        data |= {"not_read": read.unread}
    cli.out.data(data)
    cli.out.line(f"{target}: passes the check", mark="OK")
    for text in found.changed:
        cli.out.line(f"  changed: {text}")
    for text in found.unmapped:
        cli.out.line(f"  not mapped: {text}")
    if read is not None:
        for text in read.unread:
            cli.out.line(f"  not read: {text}")
        rest = f"not read: {len(read.unread)}, see above" if read.unread else "nothing was left unread"
        cli.out.line(
            f"read {read.assignments} assignments, {read.options} options; {rest} "
            f"({read.passed} commands of its own passed over)",
            mark="WARN" if read.unread else "OK",
        )
    shown = stem if output is None else target
    cli.out.hint(f"ds41ctl serve --profile {shown} --dry-run")
    if read is not None and read.unread:
        cli.out.hint(f'put what was not read into {target}, then: serve.source = "imported"')
        raise typer.Exit(int(Exit.INCONCLUSIVE))


def _of_launcher(script: Path, env: Path | None, base: str, name: str) -> Read:
    from ds41ctl.adapters import profiles, webtext
    from ds41ctl.core import launcher, shellparse

    remarks: list[str] = []
    texts = []
    for path in (script, *([env] if env is not None else ())):
        text, said = shellparse.decode(webtext.read_file(path, shellparse.LARGEST), str(path))
        texts.append((text, path.name))
        remarks += said
    where = str(script.absolute())
    path = profiles.find(base)
    profiles.read(path)
    found = launcher.of_launcher(texts[0], texts[1] if env is not None else None, where, profiles.tree(path), name)
    found.changed[:0] = remarks
    return found


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
