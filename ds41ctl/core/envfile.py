"""An environment file of the seed's launcher (`ds41.env`): assignments as data. It is never sourced."""

from __future__ import annotations

import re

from ds41ctl.core.errors import ConfigError

_LINE = re.compile(r"(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)=(.*)")


def parse(text: str, origin: str) -> tuple[dict[str, str], list[str]]:
    """(name -> value, remarks). Raises ConfigError naming every line that is no plain assignment."""
    remarks, faults = [], []
    if text.startswith("\ufeff"):
        text = text[1:]
        remarks.append("a byte order mark was ignored")
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        remarks.append("Windows line ends were ignored")
    found: dict[str, str] = {}
    for number, raw in enumerate(text.split("\n"), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if not match:
            faults.append(f"line {number}: NAME=VALUE expected, found {line[:60]!r}")
            continue
        name, fault, value = match[1], "", match[2]
        value, fault = _value(value)
        if fault:
            faults.append(f"line {number}: {name}: {fault}")
        elif name in found and found[name] != value:
            faults.append(f"line {number}: {name} is set twice, to {found[name]!r} and {value!r}")
        else:
            found[name] = value
    if faults:
        message = f"{origin}: {faults[0]}" if len(faults) == 1 else f"{origin}: {len(faults)} lines cannot be taken"
        raise ConfigError(message, detail=faults if len(faults) > 1 else ())
    return found, remarks


def _value(text: str) -> tuple[str, str]:
    """(value, fault): quotes taken off, a trailing comment dropped, anything a shell would work on refused."""
    if text[:1] in ("'", '"'):
        end = text.find(text[0], 1)
        rest = text[end + 1 :].strip() if end > 0 else ""
        if end < 0 or (rest and not rest.startswith("#")):
            return "", f"a quote that does not end: {text[:60]!r}"
        quoted, text = text[0], text[1:end]
        if quoted == '"' and re.search(r"[$`\\]", text):
            return "", f"a shell would work on {text[:60]!r}; write the value itself"
    else:
        text = re.split(r"\s+#", text, maxsplit=1)[0].strip()
        if re.search(r"[$`\\;&|<>()*?]", text) or " " in text:
            return "", f"a shell would work on {text[:60]!r}; write the value itself, in single quotes if need be"
        if text.startswith("~"):
            return "", f"~ is not a path here; write {text[:60]!r} from / on"
    return ("", "a control character") if re.search(r"[\x00-\x1f\x7f]", text) else (text, "")
