"""Variables, words and conditions of a script that is followed without a shell; core/shellread.py walks it. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ds41ctl.core.masking import mask_argv, mask_value
from ds41ctl.core.shellparse import quoted_word
from ds41ctl.core.shelltree import (
    Arithmetic,
    ArithmeticCommand,
    Assign,
    Node,
    Param,
    Strange,
    Substitution,
    Test,
    Text,
    Word,
)
from ds41ctl.core.shellvalues import Hole, Holes, arithmetic, empty, glob, marked, setting, trim

DEPTH = 40  # policy: functions and scripts inside each other
# known only to the shell that runs
CALLERS = frozenset(
    {"HOME", "USER", "LOGNAME", "PATH", "PWD", "OLDPWD", "HOSTNAME", "UID", "EUID", "PPID", "SHELL", "TERM", "TMPDIR"}
    | {"RANDOM", "SECONDS", "LINENO", "EPOCHSECONDS", "BASHPID", "BASH_VERSION", "OSTYPE", "LD_LIBRARY_PATH", "TMUX"}
    | {"PYTHONPATH", "CUDA_VISIBLE_DEVICES", "VIRTUAL_ENV", "CONDA_PREFIX", "XDG_RUNTIME_DIR", "SUDO_USER", "LANG"}
)
UNARY = frozenset("abcdefghknoprstuvwxzGLNOS")
_NUMERIC: dict[str, Callable[[int, int], bool]] = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
}
BINARY = frozenset({"==", "=", "!=", "=~", "-nt", "-ot", "-ef", *_NUMERIC})

Value = str | list[str]
Pieces = list[tuple[str, str] | None]  # (kind, text); None parts two fields


class EndError(Exception):
    """The script ends here."""


class ReturnError(Exception):
    """A function returns."""

    def __init__(self, status: int | None) -> None:
        super().__init__()
        self.status = status


class LoopError(Exception):
    """break or continue."""

    def __init__(self, *, again: bool) -> None:
        super().__init__()
        self.again = again


class UnreadableError(Exception):
    """Inside `$(...)`: something only a shell could do."""


@dataclass
class Start:
    """One start of the engine: words and exported variables, with holes and settings in them."""

    line: int
    argv: list[str]
    env: dict[str, str]


@dataclass
class State:
    values: dict[str, Value] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)
    functions: dict[str, Node] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)
    scopes: list[dict[str, tuple[Value | None, bool]]] = field(default_factory=list)
    export_all: bool = False
    folder: str | None = None

    def copy(self) -> State:
        values = {name: list(value) if isinstance(value, list) else value for name, value in self.values.items()}
        scopes = [dict(scope) for scope in self.scopes]
        return State(
            values,
            set(self.exported),
            dict(self.functions),
            list(self.arguments),
            scopes,
            self.export_all,
            self.folder,
        )


class Words:
    """What the reader knows, and what a word of the script comes to; see Reader."""

    def __init__(
        self, path: str, settings: dict[str, str], forced: dict[str, str], sourced: frozenset[str] = frozenset()
    ) -> None:
        self.path, self.settings, self.forced, self.sourced = path, settings, forced, sourced
        self.name = path.rsplit("/", 1)[-1]
        self.holes = Holes()
        self.starts: list[Start] = []
        self.unread: list[Hole] = []
        self.passed: list[Hole] = []
        self.given: dict[str, str] = {}
        self.assignments = 0
        self._state = State()
        for name, text in {**{key: setting(value) for key, value in settings.items()}, **forced}.items():
            self._state.values[name] = text
            self._state.exported.add(name)
        self._tree: tuple[Node, ...] = ()
        self._output: list[str] | None = None
        self._steps = self._depth = 0
        self._feeding = False

    def _all(self, nodes: Iterable[Node]) -> int | None:
        """Follow commands; the status of the last one, None when it is not known."""
        raise NotImplementedError

    # ---- what cannot be read
    def _note(self, line: int, source: str, why: str) -> None:
        """Something that could change the start; what comes after the start cannot."""
        hole = Hole(line, source, why)
        if self._output is not None:
            raise UnreadableError(why)
        if not self.starts and hole not in self.unread:
            self.unread.append(hole)

    # ---- variables
    def _look(self, name: str) -> Value | None:
        if name in ("@", "*"):
            return list(self._state.arguments)
        if name == "#":
            return str(len(self._state.arguments))
        if name.isdecimal():
            number = int(name)
            if number == 0:
                return self.path
            return self._state.arguments[number - 1] if number <= len(self._state.arguments) else None
        if name == "BASH_SOURCE":
            return [self.path]
        return self._state.values.get(name)

    def _set(self, name: str, value: Value, line: int) -> None:
        if name in self.settings or name in self.forced:
            # a script that sets a forced name mostly repeats what it was given: `X="${X:-1}"`
            if isinstance(value, str) and not marked(value) and (self._feeding or name in self.settings):
                self.given[name] = value
            return
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            self._note(line or 1, name, "sets a name or an element that is worked out")
            return
        self._state.values[name] = value
        if self._state.export_all:
            self._state.exported.add(name)

    def _assign(self, item: Assign) -> None:
        self.assignments += 1
        if item.value is None:
            return
        if item.index is not None:
            self._computed(item.index, item.line)
            self._set(item.name, self.holes.make(item.line, item.source, "one element of a list"), item.line)
            return
        now = self._state.values.get(item.name)
        if isinstance(item.value, tuple):
            strange = next((word for word in item.value if re.match(r"\[[^\]]*\]=", word.source)), None)
            new: Value = (
                [self.holes.make(item.line, item.source, "a list with keys")] if strange else self._list(item.value)
            )
            if item.append and now is not None:
                new = [*(now if isinstance(now, list) else [now]), *new]
        else:
            text = self._string(item.value, assigned=True)
            if isinstance(now, list):
                new = [(now[0] if now and item.append else "") + text, *now[1:]]
            else:
                new = (now or "") + text if item.append else text
        self._set(item.name, new, item.line)

    # ---- words
    def _pieces(self, word: Word, *, assigned: bool = False) -> Pieces:
        found: Pieces = []
        for at, part in enumerate(word.parts):
            match part:
                case Text(text, quoted):
                    if not quoted and (
                        (at == 0 and re.match(r"(?:[A-Za-z_]\w*=)?~", text)) or (assigned and ":~" in text)
                    ):
                        text = self.holes.make(word.line, word.source, "~ is the caller's home folder")
                    found.append(("quoted" if quoted else "literal", text))
                case Param():
                    found += self._param(part, word)
                case Substitution():
                    text = self._captured(part, word)
                    found.append(("quoted" if part.quoted else "expanded", text))
                case Arithmetic():
                    computed = self._computed(part.expression, word.line)
                    text = (
                        self.holes.make(word.line, part.source, "arithmetic that is not computed here")
                        if computed is None
                        else str(computed)
                    )
                    found.append(("quoted" if part.quoted else "expanded", text))
                case Strange():
                    found.append(("quoted", self.holes.make(word.line, word.source, part.why)))
        return found

    def _string(self, word: Word, *, assigned: bool = False) -> str:
        """A word that is not split: a value, a subject of `case`."""
        return "".join(" " if piece is None else piece[1] for piece in self._pieces(word, assigned=assigned))

    def _list(self, words: Iterable[Word]) -> list[str]:
        return [item for word in words for item in self._fields(word)]

    def _fields(self, word: Word) -> list[str]:
        """A word as the arguments it becomes."""
        separators = self._state.values.get("IFS", " \t\n")
        out: list[str] = []
        current: str | None = None
        bare = braces = ""
        patterned = False

        def push() -> None:
            nonlocal current, bare, braces, patterned
            if current is not None:
                patterned = re.search(r"[*?]|\[.*\]", bare) is not None
                if patterned:
                    current = self.holes.make(word.line, word.source, "a pattern of file names")
                elif re.search(r"\{[^{}]*(?:,|\.\.)[^{}]*\}", braces):
                    current = self.holes.make(word.line, word.source, "braces that a shell would multiply")
                out.append(current)
            current, bare, braces = None, "", ""

        for piece in self._pieces(word):
            if piece is None:
                push()
                continue
            kind, text = piece
            if kind != "expanded":
                current = (current or "") + text
                bare += text if kind == "literal" else "a" * len(text)
                braces += text if kind == "literal" else "a" * len(text)
                continue
            if not isinstance(separators, str) or marked(separators):
                text = self.holes.make(word.line, word.source, "split by an IFS that is not known")
            elif separators != " \t\n" and any(mark in text for mark in separators):
                text = self.holes.make(word.line, word.source, "split by an IFS of its own")
            chunks = re.split(r"[ \t\n]+", text) if separators == " \t\n" else [text]
            for at, chunk in enumerate(chunks):
                if at:
                    push()
                if chunk:
                    current = (current or "") + chunk
                    bare, braces = bare + chunk, braces + "a" * len(chunk)
        push()
        return out

    def _param(self, part: Param, word: Word) -> Pieces:
        many = part.index in ("@", "*")
        kind = "quoted" if part.quoted else "expanded"
        value = self._indexed(part, word)
        if part.length:
            return [(kind, self._length(part, value, word))]
        op = part.op
        if op and op.lstrip(":") in ("-", "=", "+", "?") and part.word is not None:
            return self._conditional(part, part.word, value, word)
        if value is None:
            if not many:
                return [(kind, self._unset(part, word))]
            value = []
        items = value if isinstance(value, list) else [value]
        if op == ":" and many:
            return [(kind, self.holes.make(word.line, part.source, "a part of a list", many=True))]
        if op:
            items = [self._changed(part, item, word) for item in items]
        if not many:
            return [(kind, items[0] if items else "")]
        if part.index == "*" and part.quoted:
            separators = self._state.values.get("IFS", " ")
            joint = separators[:1] if isinstance(separators, str) else " "
            return [(kind, joint.join(items))]
        found: Pieces = []
        for at, item in enumerate(items):
            found += [None, (kind, item)] if at else [(kind, item)]
        return found

    def _indexed(self, part: Param, word: Word) -> Value | None:
        value = self._look(part.name)
        if value is None and part.name in CALLERS:
            value = self.holes.make(word.line, part.source, "known only to the shell that runs")
        if value is None and part.name in ("?", "$", "!", "-"):
            value = self.holes.make(word.line, part.source, "known only to the shell that runs")
        if part.index in ("@", "*"):
            return [value] if isinstance(value, str) else value
        if part.index is None:
            return (value[0] if value else None) if isinstance(value, list) else value
        items = value if isinstance(value, list) else [] if value is None else [value]
        if not part.index.isdecimal():
            self._computed(part.index, word.line)
        if any(self.holes.of(item) for item in items) or not re.fullmatch(r"-?\d+", part.index):
            return self.holes.make(word.line, part.source, "an element that is not known")
        at = int(part.index)
        return items[at] if -len(items) <= at < len(items) else None

    def _unset(self, part: Param, word: Word) -> str:
        if part.name.isdecimal():
            return ""
        if self._declared(part.name):
            return ""
        return self.holes.make(word.line, part.source, f"{part.name} is set neither here nor in the environment file")

    def _declared(self, name: str) -> bool:
        return name in self._state.values

    def _length(self, part: Param, value: Value | None, word: Word) -> str:
        many = part.index in ("@", "*")
        items = value if isinstance(value, list) else [] if value is None else [value]
        if any(self.holes.of(item) for item in items) or (not many and any(marked(item) for item in items)):
            return self.holes.make(word.line, part.source, "a length that is not known")
        return str(len(items)) if many else str(len(items[0]) if items else 0)

    def _conditional(self, part: Param, alternative: Word, value: Value | None, word: Word) -> Pieces:
        """`${x:-w}` and its like."""
        many, op = part.index in ("@", "*"), part.op
        kind = "quoted" if part.quoted else "expanded"
        if (part.name in self.settings or part.name in self.forced) and op.lstrip(":") in ("-", "="):
            default = self._string(alternative)
            if not marked(default):
                self.given.setdefault(part.name, default)
        missing: bool | None
        if isinstance(value, list):
            missing = not value or (op.startswith(":") and len(value) == 1 and empty(value[0]))
        else:
            missing = value is None or (op.startswith(":") and empty(value))
        plain = Param(part.name, part.source, part.quoted, part.index)
        if op.lstrip(":") == "+":
            if missing is None:
                return [(kind, self.holes.make(word.line, part.source, f"depends on {part.name}"))]
            return (
                [] if missing and not part.quoted else [(kind, "")] if missing else self._alternative(part, alternative)
            )
        if missing is None and op.lstrip(":") in "-=":
            return [(kind, self.holes.make(word.line, part.source, f"depends on {part.name}"))]
        if not missing or op.lstrip(":") == "?":
            return self._param(plain, word)
        if op.lstrip(":") == "=" and not many:
            text = self._string(alternative)
            self.assignments += 1
            self._set(part.name, text, word.line)
            return [(kind, text)]
        return self._alternative(part, alternative)

    def _alternative(self, part: Param, alternative: Word) -> Pieces:
        found = self._pieces(alternative)
        if part.quoted:
            return found or [("quoted", "")]
        return [piece if piece is None or piece[0] == "quoted" else ("expanded", piece[1]) for piece in found]

    def _changed(self, part: Param, text: str, word: Word) -> str:
        """`${x%p}`, `${x/p/r}`, `${x^^}`, `${x@Q}`."""
        op, unknown = part.op, f"`{part.op}` on a value that is not known"
        if op == "@Q" and not re.search(r"[\x01-\x1f\x7f]", text):
            return "'" + text.replace("'", "'\\''") + "'"
        if marked(text):
            return self.holes.make(word.line, part.source, unknown)
        if op in ("^^", ",,") and part.word is not None and not part.word.parts:
            return text.upper() if op == "^^" else text.lower()
        if op in ("#", "##", "%", "%%") and part.word is not None:
            expression = self._pattern(part.word)
            if expression is not None:
                return trim(text, expression, op)
        if op in ("/", "//") and part.word is not None:
            replaced = self._replaced(part.word, text, every=op == "//")
            if replaced is not None:
                return replaced
        return self.holes.make(word.line, part.source, f"`{op}` is not worked out here")

    def _replaced(self, word: Word, text: str, *, every: bool) -> str | None:
        """Only plain text for plain text: `${x//,/ }`."""
        if any(not isinstance(part, Text) for part in word.parts):
            return None
        whole = "".join(part.text for part in word.parts if isinstance(part, Text))
        old, slash, new = whole.partition("/")
        if not old or (slash and "&" in new) or re.search(r"[*?\[\\(#%]", old):
            return None
        return text.replace(old, new, -1 if every else 1)

    def _pattern(self, word: Word) -> re.Pattern[str] | None:
        text = ""
        for piece in self._pieces(word):
            if piece is None or marked(piece[1]):
                return None
            text += re.sub(r"(\W)", r"\\\1", piece[1]) if piece[0] == "quoted" else piece[1]
        return glob(text)

    def _matches(self, subject: str, word: Word) -> bool | None:
        if word.source == "*":
            return True
        expression = self._pattern(word)
        if expression is None or self.holes.of(subject):
            return None
        if marked(subject):  # a setting: not empty, else anything
            return False if expression.fullmatch("") and expression.pattern == "" else None
        return expression.fullmatch(subject) is not None

    def _captured(self, part: Substitution, word: Word) -> str:
        """`$(...)` of commands that only make text."""
        kept, output, depth = self._state, self._output, self._depth
        self._state, self._output, self._depth = kept.copy(), [], depth + 1
        try:
            if self._depth > DEPTH:
                raise UnreadableError("nested too deep")
            self._all(part.body)
            text = "".join(self._output).rstrip("\n")
        except (EndError, ReturnError, LoopError):
            text = self.holes.make(word.line, part.source, "ends in the middle")
        except UnreadableError as error:
            text = self.holes.make(word.line, part.source, f"a command's output ({error})")
        finally:
            self._state, self._output, self._depth = kept, output, depth
        return text

    # ---- arithmetic and tests
    def _computed(self, expression: str, line: int) -> int | None:
        """An integer expression; what it would assign is not known when it is not computed."""
        text = self._string(quoted_word(expression, self.name, line))
        found = None if marked(text) else arithmetic(text, self._number)
        if found is None:
            names = re.findall(r"([A-Za-z_]\w*)\s*(?:(?:[-+*/%&|^]|<<|>>)?=(?!=)|\+\+|--)", expression)
            for name in (*names, *re.findall(r"(?:\+\+|--)\s*([A-Za-z_]\w*)", expression)):
                self._set(name, self.holes.make(line, expression, "arithmetic that is not computed here"), line)
        return found

    def _number(self, name: str) -> str | None:
        value = self._look(name)
        text = value[0] if isinstance(value, list) and value else value
        return (text or "0") if isinstance(text, str) else None

    def _arithmetic_command(self, node: ArithmeticCommand) -> int | None:
        found = self._computed(node.expression, node.line)
        return None if found is None else int(found == 0)

    def _test(self, node: Test) -> bool | None:
        tokens = list(node.tokens)
        found = self._test_or(tokens)
        return None if tokens else found

    def _test_or(self, tokens: list[Word | str]) -> bool | None:
        found = self._test_and(tokens)
        while tokens and tokens[0] == "||":
            tokens.pop(0)
            other = self._test_and(tokens)
            found = True if True in (found, other) else None if None in (found, other) else False
        return found

    def _test_and(self, tokens: list[Word | str]) -> bool | None:
        found = self._test_one(tokens)
        while tokens and tokens[0] == "&&":
            tokens.pop(0)
            other = self._test_one(tokens)
            found = False if False in (found, other) else None if None in (found, other) else True
        return found

    def _test_one(self, tokens: list[Word | str]) -> bool | None:
        if not tokens:
            return None
        first = tokens.pop(0)
        if first == "(":
            found = self._test_or(tokens)
            if tokens and tokens[0] == ")":
                tokens.pop(0)
            return found
        if isinstance(first, str):
            return None
        if first.source == "!":
            found = self._test_one(tokens)
            return None if found is None else not found
        following = tokens[0] if tokens else None
        if isinstance(following, Word) and following.source in BINARY:
            tokens.pop(0)
            second = tokens.pop(0) if tokens else None
            return self._compare(first, following.source, second) if isinstance(second, Word) else None
        if following in ("<", ">"):
            del tokens[:2]
            return None
        if re.fullmatch(r"-[A-Za-z]", first.source) and first.source[1] in UNARY and isinstance(following, Word):
            tokens.pop(0)
            return self._unary(first.source, following)
        is_empty = empty(self._string(first))
        return None if is_empty is None else not is_empty

    def _unary(self, op: str, word: Word) -> bool | None:
        if op in ("-z", "-n"):
            is_empty = empty(self._string(word))
            return None if is_empty is None else is_empty == (op == "-z")
        if op == "-v":
            name = self._string(word)
            return None if marked(name) or name in CALLERS else self._look(name) is not None
        return None

    def _compare(self, first: Word, op: str, second: Word) -> bool | None:
        if op in ("==", "=", "!="):
            found = self._matches(self._string(first), second)
            return None if found is None else found == (op != "!=")
        if op in _NUMERIC:
            left, right = (self._computed(self._string(word) or "0", word.line) for word in (first, second))
            return None if left is None or right is None else _NUMERIC[op](left, right)
        return None


def status_of(found: bool | None) -> int | None:
    return None if found is None else int(not found)


def shown(name: str, value: Value | None) -> str:
    if value is None or value == [] or value == "":
        return "nothing"
    text = " ".join(mask_argv(value)) if isinstance(value, list) else mask_value(name, value)
    text = re.sub(r"\0[hs]\w+\0", "...", text)
    return f"`{text if len(text) <= 60 else text[:57] + '...'}`"
