"""Unified diffs, applied to the letter: every context line must be where the diff says, nothing is searched for."""

from __future__ import annotations

import re

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


class PatchError(ValueError):
    """The diff does not fit. The text is one line."""


def apply(text: str, diff: str) -> str:
    """`text` with the one-file unified `diff` applied. Raises PatchError naming the first line that differs."""
    lines = text.splitlines(keepends=True)
    out: list[str] = []
    at = 0
    rows = diff.splitlines(keepends=True)
    position, hunks = 0, 0
    while position < len(rows):
        match = _HUNK.match(rows[position])
        position += 1
        if match is None:
            continue
        hunks += 1
        start, count = int(match[1]), int(match[2] or 1)
        added = int(match[4] or 1)
        begin = start - 1 if count else start
        if begin < at or begin > len(lines):
            raise PatchError(f"hunk {hunks} begins at line {start}, which is past the end or before the hunk above")
        out += lines[at:begin]
        at = begin
        while count or added:
            if position >= len(rows):
                raise PatchError(f"hunk {hunks} is cut off")
            row = rows[position]
            position += 1
            mark, body = row[:1], row[1:]
            if position < len(rows) and rows[position].startswith("\\ No newline"):
                body = body.removesuffix("\n")
                position += 1
            if mark in (" ", "-", "\n"):
                body = "\n" if mark == "\n" else body
                if at >= len(lines) or lines[at] != body:
                    found = lines[at].rstrip("\n")[:80] if at < len(lines) else "the end"
                    raise PatchError(f"line {at + 1}: {body.rstrip()[:80]!r} expected, found {found!r}")
                if mark != "-":
                    out.append(body)
                    added -= 1
                at += 1
                count -= 1
            elif mark == "+":
                out.append(body)
                added -= 1
            else:
                raise PatchError(f"hunk {hunks} holds {row.rstrip()[:60]!r}")
            if count < 0 or added < 0:
                raise PatchError(f"hunk {hunks} has more lines than it says")
    if not hunks:
        raise PatchError("it holds no hunk")
    return "".join(out + lines[at:])
