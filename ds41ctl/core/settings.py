"""Settings: what the user chose, layer by layer, each value with its origin; misspelt names are refused."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from ds41ctl.core.errors import ConfigError
from ds41ctl.core.nearest import nearest

PREFIX = "DS41_"


class Settings(BaseSettings):
    """Every setting. The environment name is DS41_ + the field's name in capitals (the seeds' names included)."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True, env_prefix=PREFIX)

    profile: str | None = Field(None, description="profile to use when --profile is not given")
    model: Path | None = Field(None, description="pack folder instead of <data>/<profile's model.dir>")
    python: Path | None = Field(None, description="interpreter of an engine you installed yourself")
    gpus_a: Annotated[tuple[int, ...] | None, NoDecode] = Field(
        None, description="GPU indices of pipeline stage 1, for example 0,1,2,3"
    )
    gpus_c: Annotated[tuple[int, ...] | None, NoDecode] = Field(
        None, description="GPU indices of pipeline stage 2, for example 4,5,6,7"
    )
    port: Annotated[int, Field(ge=1, le=65535)] | None = Field(None, description="port of the API")
    host: str | None = Field(None, description="address of the API; another than loopback needs DS41_API_KEY_FILE")
    api_key_file: Path | None = Field(None, description="0600 file that holds the API's key (one line)")
    dspark: bool | None = Field(None, description="drafter on (1) or off (0)")
    engram_dir: Path | None = Field(None, description="folder for the Engram store that you prepared")
    data_dir: Path | None = Field(None, description="packs and engines (default: XDG data folder)")
    state_dir: Path | None = Field(None, description="runs, logs, records of running engines")
    cache_dir: Path | None = Field(None, description="compiler and bytecode caches of the engine")
    xet: bool | None = Field(
        None, description="fetch from Xet storage (1) or by plain HTTP (0); default: Xet for the Hub, not for a mirror"
    )
    debug: bool = Field(False, description="show tracebacks of internal errors")

    @field_validator("gpus_a", "gpus_c", mode="before")
    @classmethod
    def _index_list(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        parts = [part.strip() for part in value.split(",")]
        if not all(part.isdecimal() for part in parts):
            raise ValueError("must be GPU indices separated by commas, for example 0,1,2,3")
        indices = tuple(int(part) for part in parts)
        if len(set(indices)) != len(indices):
            raise ValueError("names a GPU twice")
        return indices

    @field_validator("port", mode="before")
    @classmethod
    def _plain_port(cls, value: Any) -> Any:
        # int("1_0") and int(" 80 ") succeed in Python; a port that looks odd is a typing error
        if isinstance(value, str) and not value.isdecimal():
            raise ValueError("must be a whole number from 1 to 65535")
        return value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only explicit values: `load` merges the layers itself, so that every value knows its origin."""
        return (init_settings,)


def env_name(field: str) -> str:
    """DS41_ name of a settings field."""
    return PREFIX + field.upper()


# read before any layer: it names a layer
CONFIG_VARIABLE = "DS41_CONFIG"


class Resolved:
    """Settings with the origin of each value: `default`, a config file's path, a DS41_ name or a flag."""

    def __init__(self, settings: Settings, origins: Mapping[str, str]) -> None:
        self.settings = settings
        self.origins = dict(origins)

    def origin(self, field: str) -> str:
        """Where the value of a field came from."""
        return self.origins.get(field, "default")


def load(
    *,
    environ: Mapping[str, str],
    files: tuple[Path, ...] = (),
    flags: Mapping[str, Any] | None = None,
) -> Resolved:
    """Merge config files (weakest first), DS41_* and flags (None = not given).

    Raises ConfigError that names every problem in one go: unknown file keys and DS41_* names with the near name,
    wrong types with their origin.
    """
    fields = Settings.model_fields
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    lines: list[str] = []
    for path in files:
        for key, value in _read_toml(path).items():
            if key not in fields:
                near = nearest(key, fields)
                lines.append(f"unknown key {key} in {path}" + (f"; did you mean {near}?" if near else ""))
                continue
            values[key], origins[key] = value, str(path)
    known = {env_name(field): field for field in fields}
    for name, text in environ.items():
        if not name.startswith(PREFIX) or name == CONFIG_VARIABLE:
            continue
        if name not in known:
            near = nearest(name, [*known, CONFIG_VARIABLE])
            lines.append(f"unknown environment variable {name}" + (f"; did you mean {near}?" if near else ""))
        elif text != "":
            values[known[name]], origins[known[name]] = text, name
    for key, value in (flags or {}).items():
        if value is not None:
            values[key], origins[key] = value, "--" + key.replace("_", "-")
    try:
        settings = Settings.model_validate(values)
    except ValidationError as error:
        for item in error.errors():
            key = str(item["loc"][0])
            text = item["msg"].removeprefix("Value error, ")
            lines.append(f"{origins.get(key, key)}={item['input']!s}: {text[0].lower()}{text[1:]}")
        settings = Settings.model_construct()
    if lines:
        raise ConfigError(
            lines[0] if len(lines) == 1 else f"{len(lines)} problems in the settings",
            detail=lines if len(lines) > 1 else (),
            hints=("ds41ctl config",),
        )
    return Resolved(settings, origins)


def config_files(environ: Mapping[str, str], user_config: Path, system_config: Path) -> tuple[Path, ...]:
    """Config files that exist, weakest first; a file named by DS41_CONFIG must exist."""
    found = [path for path in (system_config, user_config) if path.is_file()]
    named = environ.get(CONFIG_VARIABLE)
    if named:
        path = Path(named)
        if not path.is_file():
            raise ConfigError(f"{CONFIG_VARIABLE}={named}: no such file", hints=(f"unset {CONFIG_VARIABLE}",))
        found.append(path)
    return tuple(found)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        # utf-8-sig: a byte order mark left by an editor is not the user's mistake
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
