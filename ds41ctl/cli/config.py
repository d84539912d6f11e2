"""config: every setting and where its value came from."""

from __future__ import annotations

from ds41ctl import cli
from ds41ctl.cli import options
from ds41ctl.cli.app import group
from ds41ctl.cli.session import load_settings

app = group("Show every setting and where its value came from.")


@app.command()
def config(json: options.JsonOpt = False) -> None:
    """Layers, weakest first: defaults, /etc, your config file, DS41_CONFIG, DS41_* variables, flags."""
    from ds41ctl.adapters import paths
    from ds41ctl.core.settings import Settings, env_name

    resolved = load_settings()
    values = resolved.settings.model_dump(mode="json")
    rows = [
        {
            "setting": name,
            "variable": env_name(name),
            "value": values[name],
            "origin": resolved.origin(name),
            "description": field.description,
        }
        for name, field in Settings.model_fields.items()
    ]
    dirs = paths.dirs(resolved.settings)
    cli.out.data(
        {
            "settings": rows,
            "dirs": {name: str(getattr(dirs, name)) for name in ("data", "state", "cache", "runtime")},
        }
    )
    for row in rows:
        value = "-" if row["value"] is None else row["value"]
        cli.out.line(f"{row['variable']:<18} {value!s:<32} {row['origin']}")
    for name in ("data", "state", "cache", "runtime"):
        cli.out.line(f"{name + ' folder':<18} {getattr(dirs, name)}")
