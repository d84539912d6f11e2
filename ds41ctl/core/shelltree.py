"""The tree of a shell script: what core/shellparse.py reads and core/shellread.py follows. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Text:
    """Literal characters; unquoted ones may be patterns."""

    text: str
    quoted: bool = False


@dataclass(frozen=True)
class Param:
    """`$name` or `${name...}`. `index`: None, "@", "*" or the text between the brackets; `source`: as written."""

    name: str
    source: str
    quoted: bool = False
    index: str | None = None
    length: bool = False
    op: str = ""
    word: Word | None = None


@dataclass(frozen=True)
class Substitution:
    """`$(...)` or backticks."""

    body: tuple[Node, ...]
    source: str
    quoted: bool = False


@dataclass(frozen=True)
class Arithmetic:
    """`$((...))`; `expression` is what stands between."""

    expression: str
    source: str
    quoted: bool = False


@dataclass(frozen=True)
class Strange:
    """A part of a word that is not read here, and why."""

    source: str
    why: str
    quoted: bool = False


Part = Text | Param | Substitution | Arithmetic | Strange


@dataclass(frozen=True)
class Word:
    """One word of the script."""

    parts: tuple[Part, ...]
    line: int
    source: str


@dataclass(frozen=True)
class Assign:
    """`name=value`, `name+=value`, `name=(...)`; `value` None is a bare name after `export` and its like."""

    name: str
    line: int
    source: str
    value: Word | tuple[Word, ...] | None
    append: bool = False
    index: str | None = None


@dataclass(frozen=True)
class Simple:
    """A simple command. `here`: it has a here-document; `writes`: its output goes to a file."""

    line: int
    source: str
    assigns: tuple[Assign, ...]
    words: tuple[Word | Assign, ...]
    here: bool = False
    writes: bool = False


@dataclass(frozen=True)
class If:
    """`arms`: (condition, body) of if and each elif."""

    line: int
    source: str
    arms: tuple[tuple[tuple[Node, ...], tuple[Node, ...]], ...]
    other: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Loop:
    """while and until."""

    line: int
    source: str
    condition: tuple[Node, ...]
    body: tuple[Node, ...]
    until: bool = False


@dataclass(frozen=True)
class For:
    """`words` None: over the arguments; `name` empty: the form with arithmetic, whose rounds are not counted here."""

    line: int
    source: str
    name: str
    words: tuple[Word, ...] | None
    body: tuple[Node, ...]


@dataclass(frozen=True)
class Case:
    """`arms`: (patterns, body, how it ends: `;;`, `;&` or `;;&`)."""

    line: int
    source: str
    word: Word
    arms: tuple[tuple[tuple[Word, ...], tuple[Node, ...], str], ...]


@dataclass(frozen=True)
class Block:
    """`{ ...; }`, or `( ... )` when `apart`."""

    line: int
    source: str
    body: tuple[Node, ...]
    apart: bool = False


@dataclass(frozen=True)
class Function:
    """A definition."""

    line: int
    source: str
    name: str
    body: Node


@dataclass(frozen=True)
class Test:
    """`[[ ... ]]`: words, and operators as plain strings."""

    line: int
    source: str
    tokens: tuple[Word | str, ...]


@dataclass(frozen=True)
class ArithmeticCommand:
    """`(( ... ))`."""

    line: int
    source: str
    expression: str


@dataclass(frozen=True)
class Pipeline:
    """Commands joined by `|`, or one that is negated or sent to the background."""

    line: int
    source: str
    parts: tuple[Node, ...]
    negated: bool = False
    background: bool = False


@dataclass(frozen=True)
class Chain:
    """`first && second || third`: the operator before each one after the first."""

    line: int
    source: str
    first: Node
    rest: tuple[tuple[Literal["&&", "||"], Node], ...]


Node = Simple | If | Loop | For | Case | Block | Function | Test | ArithmeticCommand | Pipeline | Chain
