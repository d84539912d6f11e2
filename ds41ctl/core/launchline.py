"""A published launch line (`docker run ... IMAGE serve MODEL ...`) taken apart by allow-list: nothing of it ever meets
a shell, and an option that would open the machine is refused by name."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from ds41ctl.core.errors import ConfigError

_OPERATORS = frozenset({";", "&", "&&", "|", "||", ">", ">>", "<", "<<", "(", ")"})
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_SHELL = re.compile(r"`|\$\(|;\s*$|^[;&|>]|^<(?![A-Z_]+>)")

# options of `docker run` that a recipe may use; True: it takes a value
_OPTIONS = {
    **dict.fromkeys(("--device", "--cap-add", "--ulimit", "--volume", "--publish", "--env", "--entrypoint"), True),
    **dict.fromkeys(("--name", "--ipc", "--shm-size", "--memory", "--memory-swap", "--cpuset-cpus"), True),
    **dict.fromkeys(("--cpuset-mems", "--restart", "--stop-timeout", "--gpus", "--label", "--hostname"), True),
    **dict.fromkeys(("--detach", "--init", "--rm"), False),
}
_SHORT = {"-d": "--detach", "-v": "--volume", "-p": "--publish", "-e": "--env"}
_CAPABILITIES = frozenset({"SYS_NICE", "IPC_LOCK"})
_IMAGE = re.compile(r"[a-z0-9][a-z0-9._/:-]{0,200}(?:@sha256:[0-9a-f]{64})?")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass
class LaunchLine:
    """The parts of one line. `mounts`: (host, container, options); `pairs`: variables in order; `command`: what the
    image runs."""

    runtime: str
    name: str = ""
    image: str = ""
    entrypoint: str = ""
    publish: list[str] = field(default_factory=list)
    mounts: list[tuple[str, str, str]] = field(default_factory=list)
    pairs: list[tuple[str, str]] = field(default_factory=list)
    options: list[tuple[str, str | None]] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

    @property
    def env(self) -> dict[str, str]:
        """The variables; the last assignment of a name counts."""
        return dict(self.pairs)


def words(lines: list[str]) -> list[str]:
    """The words of a launch line as published: blanks part them, quotes and JSON brackets hold them together.

    Raises ConfigError for shell syntax and control characters: a launch line is data, never a script.
    """
    found: list[str] = []
    for line in lines:
        if _CONTROL.search(line):
            raise ConfigError(f"the launch line holds a control character: {line[:80]!r}")
        rest = line.strip().removesuffix("\\").strip()
        while rest:
            word, rest = _next(rest)
            if word in _OPERATORS or _SHELL.search(word):
                raise ConfigError(f"the launch line holds shell syntax, {word[:80]!r}: it is data, not a script")
            found.append(word)
            rest = rest.lstrip()
    return found


def _next(text: str) -> tuple[str, str]:
    if text[0] in "\"'":
        end = text.find(text[0], 1)
        if end < 0:
            raise ConfigError(f"the launch line has a quote that never ends: {text[:80]!r}")
        return text[1:end], text[end + 1 :]
    if text[0] in "{[":
        return _bracketed(text)
    word, _, rest = text.partition(" ")
    return word, rest


def _bracketed(text: str) -> tuple[str, str]:
    depth, quoted = 0, False
    for position, mark in enumerate(text):
        if mark == '"' and text[position - 1] != "\\":
            quoted = not quoted
        depth += 0 if quoted else (mark in "{[") - (mark in "}]")
        if depth == 0 and not quoted:
            return text[: position + 1], text[position + 1 :]
    raise ConfigError(f"the launch line has a JSON value that never ends: {text[:80]!r}")


def parse(lines: list[str]) -> LaunchLine:
    """Take a launch line apart. Raises ConfigError naming the first option that is not allowed."""
    todo = words(lines)
    if len(todo) < 3 or todo[0] not in ("docker", "podman") or todo[1] != "run":
        raise ConfigError(f"the launch line must begin with `docker run`, found {' '.join(todo[:2])!r}")
    line = LaunchLine(todo[0])
    del todo[:2]
    while todo and todo[0].startswith("-"):
        word = todo.pop(0)
        name, equals, value = word.partition("=")
        name = _SHORT.get(name, name)
        if name not in _OPTIONS:
            raise ConfigError(
                f"option {name} of the launch line is not allowed: it could open this machine",
                hints=("write the profile by hand if you want it: ds41ctl profile show cmp170hx-tp4",),
            )
        if _OPTIONS[name] and not equals:
            if not todo:
                raise ConfigError(f"option {name} of the launch line has no value")
            value = todo.pop(0)
        _take(line, name, value if _OPTIONS[name] else None, written=word if equals else "")
    if not todo:
        raise ConfigError("the launch line names no image")
    line.image, line.command = todo[0], todo[1:]
    for what, text, pattern in (("image", line.image, _IMAGE), ("container name", line.name, _NAME)):
        if not pattern.fullmatch(text):
            raise ConfigError(f"the launch line's {what} is {text!r}, which is none")
    return line


def _take(line: LaunchLine, name: str, value: str | None, *, written: str) -> None:
    if name == "--name" and value is not None:
        line.name = value
    elif name == "--entrypoint" and value is not None:
        if value not in ("vllm", "python3", "python"):
            raise ConfigError(f"the launch line's entrypoint is {value!r}, expected vllm")
        line.entrypoint = value
    elif name == "--publish" and value is not None:
        line.publish.append(value)
        return
    elif name == "--volume" and value is not None:
        host, _, rest = value.partition(":")
        target, _, flags = rest.partition(":")
        line.mounts.append((host, target, flags))
    elif name == "--env" and value is not None:
        variable, equals, text = value.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", variable):
            raise ConfigError(f"the launch line passes {value[:60]!r} of the caller's: NAME=VALUE expected")
        line.pairs.append((variable, text))
    elif name == "--cap-add" and value not in _CAPABILITIES:
        raise ConfigError(
            f"the launch line adds the capability {value}: {', '.join(sorted(_CAPABILITIES))} are allowed"
        )
    elif name == "--device" and not (value or "").startswith("nvidia.com/gpu="):
        raise ConfigError(f"the launch line passes the device {value}: only GPUs by CDI name are allowed")
    elif name == "--ipc" and value not in ("host", "private", "shareable"):
        raise ConfigError(f"the launch line shares {value!r} as IPC namespace")
    line.options.append((written or name, None if written else value))
