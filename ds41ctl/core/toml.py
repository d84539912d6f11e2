"""TOML writing, as much as a profile needs (the standard library only reads it)."""

from __future__ import annotations

import json
import re
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def dumps(tree: dict[str, Any]) -> str:
    """A nested mapping of strings, numbers, truth values, lists and tables as TOML; empty and None are left out."""
    return "\n".join(_table(tree, ())).lstrip("\n") + "\n"


def _table(tree: dict[str, Any], path: tuple[str, ...]) -> list[str]:
    lines, below = [], []
    for name, value in tree.items():
        if value is None:
            continue
        if isinstance(value, dict):
            body = _table(value, (*path, name))
            if body and not body[0].startswith("["):
                body = [f"[{_dotted((*path, name))}]", *body]
            below += ["", *body] if body else []
        elif isinstance(value, list | tuple) and value and all(isinstance(item, dict) for item in value):
            for item in value:
                below += ["", f"[[{_dotted((*path, name))}]]", *_table(item, (*path, name))]
        else:
            lines.append(f"{_key(name)} = {_value(value)}")
    while not lines and below and below[0] == "":
        below.pop(0)
    return lines + below


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _value(name)


def _dotted(path: tuple[str, ...]) -> str:
    return ".".join(_key(part) for part in path)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        # TOML's basic strings take JSON's escapes; DEL must be escaped too
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        inner = [_value(item) for item in value]
        if sum(map(len, inner)) < 90:
            return "[" + ", ".join(inner) + "]"
        return "[\n" + "".join(f"  {item},\n" for item in inner) + "]"
    raise TypeError(f"no TOML for {type(value).__name__}")
