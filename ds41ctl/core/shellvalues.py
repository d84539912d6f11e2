"""Values of a script that is followed without a shell: text in which what could not be read stands as a hole.

A hole is never filled: where one reaches the engine's command line or environment, its line is named. A setting is a
name such as `model` whose value is this machine's: it stands for `${model}` of a profile.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

from ds41ctl.core.masking import mask_argv

# a script holds no NUL, so neither can be forged by one
MARK = re.compile(r"\x00([hs])(\w+)\x00")


@dataclass(frozen=True)
class Hole:
    """Text of the script whose value is not known, and why; `many`: it stands for any number of words."""

    line: int
    source: str
    why: str
    many: bool = False

    def __str__(self) -> str:
        first, *more = self.source.strip().splitlines() or [""]
        first = " ".join(mask_argv(first.split(" ")))
        shown = first if len(first) <= 100 else first[:97] + "..."
        return f"line {self.line}: {shown}{' ...' if more and shown == first else ''}: {self.why}"


class Holes:
    """The holes of one reading; each stands in a value as `\\0hN\\0`."""

    def __init__(self) -> None:
        self._all: list[Hole] = []

    def make(self, line: int, source: str, why: str, *, many: bool = False) -> str:
        """The text that stands for what is not known."""
        hole = Hole(line, source, why, many)
        if hole not in self._all:
            self._all.append(hole)
        return f"\0h{self._all.index(hole)}\0"

    def of(self, text: str) -> list[Hole]:
        """The holes in a value."""
        return [self._all[int(number)] for kind, number in MARK.findall(text) if kind == "h"]


def setting(name: str) -> str:
    """The text that stands for this machine's value of a setting."""
    return f"\0s{name}\0"


def marked(text: str) -> bool:
    """True when a value is not wholly known."""
    return "\0" in text


def empty(text: str) -> bool | None:
    """Is it the empty text? None when that depends on a hole; a setting is never empty."""
    if text == "":
        return True
    rest = MARK.sub(lambda match: match[0] if match[1] == "s" else "", text)
    return None if rest == "" else False


def glob(pattern: str) -> re.Pattern[str] | None:
    """A shell pattern (quoted characters come escaped by a backslash) as an expression; None for an extended one."""
    out, at = [], 0
    while at < len(pattern):
        mark = pattern[at]
        if mark == "\\":
            out.append(re.escape(pattern[at + 1 : at + 2]))
            at += 2
            continue
        if mark in "?*+@!" and pattern[at + 1 : at + 2] == "(":
            return None
        if mark == "[":
            end = pattern.find("]", at + 2)
            inner = pattern[at + 1 : end]
            if end < 0 or not re.fullmatch(r"[!^]?[\w.,:/ -]+", inner):
                return None
            out.append("[" + re.sub(r"^[!]", "^", inner) + "]")
            at = end + 1
            continue
        out.append({"*": ".*", "?": "."}.get(mark, re.escape(mark)))
        at += 1
    try:
        return re.compile("".join(out), re.DOTALL)
    except re.error:
        return None


def trim(text: str, expression: re.Pattern[str], op: str) -> str:
    """`${x#p}`, `${x##p}`, `${x%p}`, `${x%%p}`: the shortest or longest match taken off."""
    sizes = range(len(text) + 1) if len(op) == 1 else range(len(text), -1, -1)
    for size in sizes:
        piece = text[:size] if op[0] == "#" else text[len(text) - size :]
        if expression.fullmatch(piece):
            return text[size:] if op[0] == "#" else text[: len(text) - size]
    return text


def requoted(text: str) -> str:
    """A word as bash's `printf %q` writes it, to be read by a shell again."""
    if text == "":
        return "''"
    if re.search(r"[\x01-\x1f\x7f]", text):
        escapes = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "'": "\\'", "\\": "\\\\"}
        escapes |= {"\a": "\\a", "\b": "\\b", "\f": "\\f", "\v": "\\v", "\x1b": "\\E"}
        plain = {
            mark: mark if mark == "\0" or (mark >= " " and mark != "\x7f") else f"\\{ord(mark):03o}" for mark in text
        }
        return "$'" + "".join((plain | escapes)[mark] for mark in text) + "'"
    text = re.sub(r"([ '\"\\|&;()<>!{}*\[?\]^$`,])", r"\\\1", text)
    return re.sub(r"^([#~])|(?<=[:=])~", lambda match: "\\" + match[0], text)


_BINARY: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    # towards zero, as C
    ast.Div: lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    ast.Mod: lambda a, b: abs(a) % abs(b) * (1 if a >= 0 else -1),
}
_COMPARE: dict[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def arithmetic(expression: str, value: Callable[[str], str | None]) -> int | None:
    """The value of a plain integer expression; None for one that this does not compute (assignments, bits, bases).

    `value`: the text of a variable, None when it is not known.
    """
    text = expression.strip()
    plain = re.sub(r"[=!<>]=|&&|\|\|", "", text)
    if not text or re.search(r"[^\w\s+\-*/%()<>!]|\*\*|<<|>>|\+\+|--|//|\b0\d|\d[A-Za-z_]", plain):
        return None
    if "!" in plain:
        return None  # binds tighter than Python's `not`
    text = text.replace("&&", " and ").replace("||", " or ").replace("\n", " ")
    try:
        return _computed(ast.parse(text, mode="eval").body, value)
    except (SyntaxError, ValueError, ZeroDivisionError, KeyError, RecursionError, MemoryError):
        return None


def _computed(node: ast.expr, value: Callable[[str], str | None]) -> int:
    """Raises ValueError or KeyError for what is not computed."""
    found: int
    if isinstance(node, ast.Constant) and type(node.value) is int:
        found = node.value
    elif isinstance(node, ast.Name):
        text = value(node.id)
        if text is None or not re.fullmatch(r"-?(?:0|[1-9][0-9]{0,17})", text):
            raise ValueError
        found = int(text)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        inner = _computed(node.operand, value)
        found = -inner if isinstance(node.op, ast.USub) else inner
    elif isinstance(node, ast.BinOp):
        found = _BINARY[type(node.op)](_computed(node.left, value), _computed(node.right, value))
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        found = int(_COMPARE[type(node.ops[0])](_computed(node.left, value), _computed(node.comparators[0], value)))
    elif isinstance(node, ast.BoolOp):
        results = [bool(_computed(item, value)) for item in node.values]
        found = int(all(results) if isinstance(node.op, ast.And) else any(results))
    else:
        raise ValueError
    if abs(found) >= 1 << 62:
        raise ValueError
    return found
