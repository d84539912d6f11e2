"""Plan: what a command would do, computed from profile, layout and facts alone; `--dry-run` prints it."""

from __future__ import annotations

import hashlib
import json
import string

from pydantic import BaseModel, ConfigDict

from ds41ctl.core.errors import ConfigError
from ds41ctl.core.layout import Layout
from ds41ctl.core.masking import mask_value

PLAN_SCHEMA = 1

# what the engine inherits from the caller; everything else of its environment is the profile's
INHERITED = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TMPDIR", "TZ")
RUN_MARKER = "DS41_ENGINE_RUN"


class PlannedStep(BaseModel):
    """One step: `what` in words, the files it would write, the bytes it would move, its time budget in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: str
    what: str
    writes: tuple[str, ...] = ()
    bytes: int | None = None
    budget_s: float | None = None
    commands: tuple[tuple[str, ...], ...] = ()


class Plan(BaseModel):
    """Everything a run would do. `env` is the engine's whole environment beside the inherited names."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = PLAN_SCHEMA
    command: str
    profile: str
    profile_digest: str
    steps: tuple[PlannedStep, ...]
    argv: tuple[str, ...] = ()
    env: dict[str, str] = {}
    inherited: tuple[str, ...] = INHERITED
    url: str = ""
    lacks: tuple[str, ...] = ()

    def digest(self) -> str:
        """sha256 of the plan's canonical JSON."""
        return hashlib.sha256(json.dumps(self.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()


def _values(layout: Layout, store: str) -> dict[str, str]:
    cache = layout.cache_dir
    groups = {f"gpus_{name}": ",".join(map(str, indices)) for name, indices in layout.gpu_groups}
    every = ",".join(str(index) for _, indices in layout.gpu_groups for index in indices)
    return {
        "python": str(layout.python),
        "model": str(layout.model_dir),
        "models": str(layout.model_dir.parent),
        "model_name": layout.model_dir.name,
        "host": layout.host,
        "port": str(layout.port),
        "engram": store,
        "cache": str(cache),
        "image": layout.profile.engine.image,
        "gpus": every,
        **groups,
    }


def _fill(template: str, values: dict[str, str], where: str) -> str:
    try:
        return string.Template(template).substitute(values)
    except (KeyError, ValueError) as error:
        known = " ".join(f"${{{name}}}" for name in values)
        raise ConfigError(f"{where}: {template!r}: unknown placeholder {error}; known: {known}") from None


def engine_argv(layout: Layout, store: str) -> tuple[str, ...]:
    """The command line that starts the engine."""
    serve = layout.profile.serve
    values = _values(layout, store)
    parts = [*serve.argv, *(serve.dspark_argv if layout.dspark else ())]
    return tuple(_fill(part, values, "serve.argv") for part in parts)


def engine_env(layout: Layout, store: str) -> dict[str, str]:
    """The profile's part of the engine's environment."""
    values = _values(layout, store)
    return {name: _fill(text, values, f"serve.env.{name}") for name, text in layout.profile.serve.env.items()}


def serve_plan(layout: Layout, store: str, command: str, steps: tuple[PlannedStep, ...]) -> Plan:
    """Plan of a command that ends with a running engine."""
    return Plan(
        command=command,
        profile=layout.name,
        profile_digest=layout.profile.digest(),
        steps=steps,
        argv=engine_argv(layout, store),
        env=engine_env(layout, store),
        url=layout.url + "/v1",
        lacks=layout.profile.lacks,
    )


def as_shell(argv: tuple[str, ...], env: dict[str, str]) -> list[str]:
    """The same start as paste-ready shell lines: environment first, one option a line."""
    import shlex

    lines = [f"{name}={shlex.quote(value)} \\" for name, value in sorted(env.items())]
    groups: list[list[str]] = []
    for part in argv:
        if part.startswith("-") or not groups:
            groups.append([part])
        else:
            groups[-1].append(part)
    shown = [" ".join(shlex.quote(part) for part in group) for group in groups]
    lines += [
        ("  " if index else "") + text + (" \\" if index < len(shown) - 1 else "") for index, text in enumerate(shown)
    ]
    return lines


def masked(env: dict[str, str]) -> dict[str, str]:
    """The environment with secrets masked, for output."""
    return {name: mask_value(name, value) for name, value in env.items()}
