"""Session: what a command needs to start: settings, profile, layout, facts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds41ctl.adapters import paths, profiles
from ds41ctl.adapters.pins import LOCK_SUFFIX
from ds41ctl.core import settings as settings_module
from ds41ctl.core.errors import NotFoundError
from ds41ctl.core.layout import Dirs, Layout, layout
from ds41ctl.core.profile import Profile
from ds41ctl.core.settings import Resolved


@dataclass(frozen=True)
class Session:
    """Resolved once at the start of a command."""

    resolved: Resolved
    dirs: Dirs
    profile: Profile
    profile_path: Path
    profile_origin: str
    layout: Layout


def load_settings(flags: dict[str, Any] | None = None) -> Resolved:
    """Settings of this process."""
    user, system = paths.config_paths(os.environ)
    files = settings_module.config_files(os.environ, user, system)
    return settings_module.load(environ=os.environ, files=files, flags=flags)


def open_session(profile: str | None, **flags: Any) -> Session:
    """Settings, profile and layout for a command that works on a profile's machine.

    Without --profile: DS41_PROFILE or the config file, then cpu-tiny.
    """
    resolved = load_settings({"profile": profile, **flags})
    name = resolved.settings.profile or profiles.DEFAULT
    path = profiles.find(name)
    return _session(resolved, path, resolved.origin("profile"))


def open_running(profile: str | None) -> Session:
    """As open_session, but without --profile the running engine's profile is meant."""
    from ds41ctl.adapters import running

    resolved = load_settings({"profile": profile})
    if resolved.settings.profile is None:
        records = running.all_records(paths.dirs(resolved.settings).state)
        alive = [item for item in records if item.alive()] or records
        if len([item for item in alive if item.alive()]) > 1:
            raise NotFoundError(
                "several engines are running: " + ", ".join(item.profile for item in alive),
                hints=("name one: --profile NAME",),
            )
        if alive:
            record = alive[0]
            path = Path(record.profile_path)
            resolved = load_settings({"profile": str(path), "port": record.port})
            return _session(resolved, path, "the running engine")
    return open_session(profile)


def _session(resolved: Resolved, path: Path, origin: str) -> Session:
    profile = profiles.read(path)
    dirs = paths.dirs(resolved.settings)
    return Session(
        resolved=resolved,
        dirs=dirs,
        profile=profile,
        profile_path=path,
        profile_origin=origin,
        layout=layout(
            profile,
            resolved.settings,
            dirs,
            may_mount=_may_mount(),
            committed_pins=path.with_name(path.stem + LOCK_SUFFIX),
        ),
    )


def _may_mount() -> bool:
    from ds41ctl.adapters.proc import sudo_passwordless

    return os.getuid() == 0 or sudo_passwordless()
