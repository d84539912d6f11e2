"""A systemd unit for an engine; printed, never installed."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from ds41ctl.core.exits import Exit
from ds41ctl.core.layout import Layout

# a restart cannot help where the machine, the profile or the bytes are wrong, or where an engine runs already
_FINAL = (Exit.USAGE, Exit.UNSUPPORTED, Exit.NOT_FOUND, Exit.INTEGRITY, Exit.ALREADY_RUNNING, Exit.PERMISSION)


def render(layout: Layout, profile: str, python: str, environ: Mapping[str, str]) -> str:
    """The unit's text. `profile`: name or absolute path; `environ`: the DS41_ settings in force go into the unit."""
    command = [python, "-m", "ds41ctl"]
    contained = layout.profile.engine.kind == "container"
    start = [*command, "serve", "--profile", profile, *([] if contained else ["--foreground"])]
    stop = [*command, "stop", "--profile", profile]
    settings = sorted(name for name in environ if name.startswith("DS41_") and environ[name])
    gpus = layout.profile.hardware.gpus > 0
    lines = [
        "[Unit]",
        f"Description=ds41ctl: {_text(layout.profile.title)}",
        "After=network-online.target" + (" nvidia-persistenced.service" if gpus else "")
        + (" docker.service" if contained else ""),
        "StartLimitIntervalSec=3600",
        "StartLimitBurst=3",
        "",
        "[Service]",
        *(["Type=oneshot", "RemainAfterExit=yes"] if contained else ["Type=exec"]),
        f"ExecStart={_words(start)}",
        f"ExecStop={_words(stop)}",
        *(f'Environment="{name}={_text(environ[name])}"' for name in settings),
        f"TimeoutStartSec={layout.profile.serve.ready_timeout_s:.0f}",
        "TimeoutStopSec=150",
        "Restart=on-failure",
        "RestartSec=30",
        f"RestartPreventExitStatus={' '.join(str(int(code)) for code in _FINAL)}",
        # the engine is a child of ds41ctl here: it is asked first, and everything of the unit is ended after that
        "KillMode=mixed",
        "LimitNOFILE=65536",
        "LimitCORE=0",
        *(["LimitMEMLOCK=infinity"] if gpus else []),
        "",
        "[Install]",
        "WantedBy=" + ("multi-user.target" if layout.dirs.uid == 0 else "default.target"),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _text(value: str) -> str:
    """systemd reads `%` as a specifier, and quotes and backslashes inside quotes as its own."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("\n", " ")


def _words(words: list[str]) -> str:
    return " ".join(shlex.quote(word).replace("%", "%%").replace("$", "$$") for word in words)
