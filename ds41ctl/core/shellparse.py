"""Shell text as a tree: the part of bash that launchers are written in. Pure; nothing is run.

What is no shell at all (a quote or a bracket that does not end) raises ConfigError with its line; what is shell but
not followed here (a process substitution, `${!name}`) stays in the tree as Strange.
"""

from __future__ import annotations

import bisect
import re
from dataclasses import replace
from typing import Literal, NoReturn

from ds41ctl.core.errors import ConfigError
from ds41ctl.core.shelltree import (
    Arithmetic,
    ArithmeticCommand,
    Assign,
    Block,
    Case,
    Chain,
    For,
    Function,
    If,
    Loop,
    Node,
    Param,
    Part,
    Pipeline,
    Simple,
    Strange,
    Substitution,
    Test,
    Text,
    Word,
)

LARGEST = 1 << 20  # bytes; launchers of engines have some ten KB
DECLARING = frozenset({"export", "readonly", "local", "declare", "typeset"})
_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_ASSIGN = re.compile(rf"({_NAME})(?:\[([^\]\n]*)\])?(\+?)=")
_KEYWORD = re.compile(
    r"(if|then|elif|else|fi|for|while|until|do|done|case|esac|in|function|select|coproc|\{|\}|!|\[\[)(?=[\s;&|()<>]|$)"
)
_PARAM = re.compile(rf"{_NAME}|[0-9]+|[@*#?$!-]")
_OPERATOR = re.compile(r":?[-=+?]|%%?|##?|//?|:|\^\^?|,,?|@[A-Za-z]\}")
_REDIRECT = re.compile(r"[0-9]*(?:<<<|<<-?|<>|<&|>>|>&|>\||<|>)|&>>?")
_META = frozenset(" \t\n;&|<>()")
_ANSI = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "e": "\x1b", "E": "\x1b"}
_ANSI |= {"\\": "\\", "'": "'", '"': '"', "?": "?"}


def decode(raw: bytes, origin: str) -> tuple[str, list[str]]:
    """(text, remarks) of a script's bytes. Raises ConfigError for a binary or a file of another size than scripts."""
    if len(raw) > LARGEST:
        raise ConfigError(f"{origin}: {len(raw)} bytes, at most {LARGEST} expected of a launcher")
    if b"\x00" in raw:
        raise ConfigError(f"{origin}: a binary file, a shell script expected")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = raw[: error.start].count(b"\n") + 1
        raise ConfigError(f"{origin}: line {number}: no UTF-8 text, a shell script expected") from None
    remarks = []
    if raw.startswith(b"\xef\xbb\xbf"):
        remarks.append(f"{origin}: a byte order mark was ignored")
    if "\r" in text:
        remarks.append(f"{origin}: Windows line ends were ignored")
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text, remarks


def parse(text: str, origin: str, first: int = 1) -> tuple[Node, ...]:
    """The commands of a script whose first line has the number `first`.

    Raises ConfigError `ORIGIN: line N: ...` for what is no shell.
    """
    parser = _Parser(text, origin, first)
    try:
        found = parser.commands(())
        if parser.at < len(text):
            parser.fault(f"{text[parser.at]!r} without what it closes")
    except RecursionError:
        raise ConfigError(f"{origin}: line {parser.line()}: nested too deep") from None
    return found


class _Parser:
    def __init__(self, text: str, origin: str, first: int = 1) -> None:
        self.text, self.origin, self.at, self.first = text, origin, 0, first
        self._starts = [0, *(match.end() for match in re.finditer("\n", text))]
        self._heres: list[tuple[str, bool, int]] = []

    # ---- small things
    def line(self, at: int | None = None) -> int:
        return bisect.bisect_right(self._starts, self.at if at is None else at) + self.first - 1

    def fault(self, text: str, at: int | None = None) -> NoReturn:
        raise ConfigError(f"{self.origin}: line {self.line(at)}: {text}")

    def peek(self, length: int = 1) -> str:
        return self.text[self.at : self.at + length]

    def source(self, start: int) -> str:
        return self.text[start : self.at].strip()

    def blanks(self) -> None:
        text = self.text
        while self.at < len(text):
            if text[self.at] in " \t":
                self.at += 1
            elif text.startswith("\\\n", self.at):
                self.at += 2
            elif text[self.at] == "#":
                end = text.find("\n", self.at)
                self.at = len(text) if end < 0 else end
            else:
                return

    def newline(self) -> None:
        self.at += 1
        for mark, tabs, start in self._heres:
            while True:
                if self.at >= len(self.text):
                    self.fault(f"a here-document that does not end: {mark} expected", start)
                end = self.text.find("\n", self.at)
                end = len(self.text) if end < 0 else end
                row = self.text[self.at : end]
                self.at = min(end + 1, len(self.text))
                if (row.lstrip("\t") if tabs else row) == mark:
                    break
        self._heres.clear()

    def newlines(self) -> None:
        self.blanks()
        while self.peek() == "\n":
            self.newline()
            self.blanks()

    def keyword(self) -> str:
        match = _KEYWORD.match(self.text, self.at)
        return match[1] if match else ""

    def expect(self, word: str, start: int) -> None:
        self.newlines()
        if self.keyword() != word:
            found = self.text[self.at : self.at + 20].split("\n")[0]
            self.fault(f"{word} expected, found {found!r}" if found else f"no {word} to what begins here", start)
        self.at += len(word)

    # ---- lists, chains, pipelines
    def commands(self, stop: tuple[str, ...]) -> tuple[Node, ...]:
        """Commands up to a keyword of `stop`, a closing `)` or `;;`, or the end."""
        found: list[Node] = []
        while True:
            self.newlines()
            if self.at >= len(self.text) or self.peek() == ")" or self.peek(2) in (";;", ";&"):
                return tuple(found)
            if self.peek() in ";&|":
                self.fault(f"{self.peek()!r} where a command is expected")
            if self.keyword() in stop:
                return tuple(found)
            start = self.at
            node = self.chain()
            self.blanks()
            if self.peek() == "&" and self.peek(2) != "&&":
                self.at += 1
                node = Pipeline(self.line(start), self.source(start), (node,), background=True)
            elif self.peek() == ";" and self.peek(2) not in (";;", ";&"):
                self.at += 1
            elif self.peek() not in ("\n", "", ")", ";"):
                self.fault(f"{self.text[self.at : self.at + 20].splitlines()[0]!r} after a command")
            found.append(node)

    def chain(self) -> Node:
        start = self.at
        first = self.pipeline()
        rest: list[tuple[Literal["&&", "||"], Node]] = []
        self.blanks()
        while self.peek(2) in ("&&", "||"):
            op: Literal["&&", "||"] = "&&" if self.peek() == "&" else "||"
            self.at += 2
            self.newlines()
            rest.append((op, self.pipeline()))
            self.blanks()
        return Chain(self.line(start), self.source(start), first, tuple(rest)) if rest else first

    def pipeline(self) -> Node:
        self.blanks()
        start, negated = self.at, False
        while self.keyword() == "!":
            negated = not negated
            self.at += 1
            self.blanks()
        parts = [self.command()]
        self.blanks()
        while self.peek() == "|" and self.peek(2) != "||":
            self.at += 2 if self.peek(2) == "|&" else 1
            self.newlines()
            parts.append(self.command())
            self.blanks()
        if len(parts) == 1 and not negated:
            return parts[0]
        return Pipeline(self.line(start), self.source(start), tuple(parts), negated)

    # ---- commands
    def command(self) -> Node:
        self.blanks()
        start = self.at
        if self.at >= len(self.text) or self.peek() in "\n;&|)":
            self.fault("a command is missing", min(start, max(len(self.text) - 1, 0)))
        if self.peek(2) == "((" and (found := self.arithmetic_command(start)) is not None:
            return found
        word = self.keyword()
        if self.peek() == "(" or word in ("{", "if", "while", "until", "for", "case", "[["):
            node = self.compound(word, start)
            self.redirects()
            return node
        if word in ("select", "coproc"):
            self.fault(f"`{word}` is not read here")
        if word not in ("", "in", "function"):
            self.fault(f"{word} without its beginning")
        match = re.compile(rf"function[ \t]+({_NAME})[ \t]*(?:\([ \t]*\))?|({_NAME})[ \t]*\([ \t]*\)").match(
            self.text, self.at
        )
        if match:
            self.at = match.end()
            self.newlines()
            body = self.command()
            return Function(self.line(start), self.source(start), match[1] or match[2], body)
        return self.simple(start)

    def compound(self, word: str, start: int) -> Node:
        line = self.line(start)
        if word == "[[":
            self.at += 2
            return self.double_bracket(start, line)
        if self.peek() == "(":
            self.at += 1
            body = self.commands(())
            self.close(")", "a ( that is never closed", start)
            return Block(line, self.source(start), body, apart=True)
        self.at += len(word)
        if word == "{":
            body = self.commands(("}",))
            self.expect("}", start)
            return Block(line, self.source(start), body)
        if word == "if":
            return self.conditional(start, line)
        if word in ("while", "until"):
            condition = self.commands(("do",))
            body = self.body(start)
            return Loop(line, self.source(start), condition, body, until=word == "until")
        return self.loop(start, line) if word == "for" else self.case(start, line)

    def close(self, mark: str, message: str, start: int) -> None:
        if self.peek(len(mark)) != mark:
            self.fault(message, start)
        self.at += len(mark)

    def body(self, start: int) -> tuple[Node, ...]:
        self.expect("do", start)
        found = self.commands(("done",))
        self.expect("done", start)
        return found

    def conditional(self, start: int, line: int) -> Node:
        arms = []
        while True:
            condition = self.commands(("then",))
            self.expect("then", start)
            arms.append((condition, self.commands(("elif", "else", "fi"))))
            self.newlines()
            if self.keyword() != "elif":
                break
            self.at += 4
        other: tuple[Node, ...] = ()
        if self.keyword() == "else":
            self.at += 4
            other = self.commands(("fi",))
        self.expect("fi", start)
        return If(line, self.source(start), tuple(arms), other)

    def loop(self, start: int, line: int) -> Node:
        self.blanks()
        if self.peek(2) == "((":
            found = self.arithmetic_command(self.at)
            if found is None:
                self.fault("a for (( without its ))")
            self.separator()
            return For(line, self.source(start), "", (), self.body(start))
        match = re.compile(_NAME).match(self.text, self.at)
        if not match:
            self.fault("for: a name expected")
        self.at = match.end()
        self.newlines()
        words: tuple[Word, ...] | None = None
        if self.keyword() == "in":
            self.at += 2
            collected = []
            self.blanks()
            while self.peek() not in ("\n", ";", ""):
                collected.append(self.word())
                self.blanks()
            words = tuple(collected)
        self.separator()
        body = self.body(start)
        return For(line, self.source(start), match[0], words, body)

    def separator(self) -> None:
        self.blanks()
        if self.peek() == ";":
            self.at += 1

    def case(self, start: int, line: int) -> Node:
        self.blanks()
        subject = self.word()
        self.expect("in", start)
        arms: list[tuple[tuple[Word, ...], tuple[Node, ...], str]] = []
        while True:
            self.newlines()
            if self.keyword() == "esac":
                break
            if self.at >= len(self.text):
                self.fault("no esac to what begins here", start)
            if self.peek() == "(":
                self.at += 1
            patterns = []
            while True:
                self.blanks()
                patterns.append(self.word(pattern=True))
                self.blanks()
                if self.peek() != "|":
                    break
                self.at += 1
            self.close(")", "a case pattern without its )", self.at)
            body = self.commands(("esac",))
            self.newlines()
            end = next((mark for mark in (";;&", ";;", ";&") if self.peek(len(mark)) == mark), "")
            self.at += len(end)
            arms.append((tuple(patterns), body, end or ";;"))
        self.at += 4
        return Case(line, self.source(start), subject, tuple(arms))

    def double_bracket(self, start: int, line: int) -> Node:
        tokens: list[Word | str] = []
        while True:
            self.newlines()
            if self.at >= len(self.text):
                self.fault("a [[ that is never closed", start)
            if self.keyword_end():
                self.at += 2
                return Test(line, self.source(start), tuple(tokens))
            if self.peek(2) in ("&&", "||"):
                tokens.append(self.peek(2))
                self.at += 2
            elif self.peek() in "()<>":
                tokens.append(self.peek())
                self.at += 1
            elif self.peek() in ";&|":
                self.fault(f"{self.peek()!r} inside [[ ]]")
            elif tokens and isinstance(tokens[-1], Word) and tokens[-1].source == "=~":
                tokens.append(self.word(pattern=True, regex=True))
            else:
                tokens.append(self.word(pattern=True))

    def keyword_end(self) -> bool:
        return re.compile(r"\]\](?=[\s;&|()<>]|$)").match(self.text, self.at) is not None

    def arithmetic_command(self, start: int) -> Node | None:
        """`(( ... ))` at the cursor; None when these are two brackets of subshells."""
        end = self.balanced(self.at + 2)
        if end is None or self.text[end : end + 2] != "))":
            return None
        expression = self.text[self.at + 2 : end]
        self.at = end + 2
        return ArithmeticCommand(self.line(start), self.source(start), expression)

    def balanced(self, at: int) -> int | None:
        """Where the bracket that is open at `at` closes."""
        depth = 0
        while at < len(self.text):
            mark = self.text[at]
            if mark == ")":
                if depth == 0:
                    return at
                depth -= 1
            depth += mark == "("
            at += 1
        return None

    def simple(self, start: int) -> Node:
        assigns: list[Assign] = []
        words: list[Word | Assign] = []
        here = writes = False
        end = start
        while True:
            end = max(end, self.at)
            self.blanks()
            redirect = _REDIRECT.match(self.text, self.at)
            if redirect and self.peek(2) not in ("<(", ">("):
                kind = self.redirect(redirect)
                here, writes = here or kind == "here", writes or kind == "file"
                continue
            if self.at >= len(self.text) or (self.peek() in _META and self.peek(2) not in ("<(", ">(")):
                break
            first = words[0].source if words else ""
            assign = _ASSIGN.match(self.text, self.at)
            if assign and (not words or first in DECLARING):
                (words if words else assigns).append(self.assignment(assign))
            elif first in DECLARING and re.compile(rf"{_NAME}(?=[\s;&|()<>]|$)").match(self.text, self.at):
                word = self.word()
                words.append(Assign(word.source, word.line, word.source, None))
            else:
                words.append(self.word())
        if not assigns and not words and not here and not writes and self.at == start:
            self.fault(f"{self.peek()!r} is not read here")
        source = self.text[start:end].strip()
        return Simple(self.line(start), source, tuple(assigns), tuple(words), here, writes)

    def redirects(self) -> None:
        self.blanks()
        while (found := _REDIRECT.match(self.text, self.at)) and self.peek(2) not in ("<(", ">("):
            self.redirect(found)
            self.blanks()

    def redirect(self, match: re.Match[str]) -> str:
        start = self.at
        self.at = match.end()
        self.blanks()
        if self.at >= len(self.text) or self.peek() == "\n":
            self.fault("a redirection without its file", start)
        word = self.word()
        kind = match[0].lstrip("0123456789")
        if kind in ("<<", "<<-"):
            mark = "".join(part.text for part in word.parts if isinstance(part, Text))
            self._heres.append((mark, kind == "<<-", start))
            return "here"
        target = word.source
        aside = kind.startswith("<") or kind == ">&" or target.startswith(("/dev/", "&"))
        return "" if aside else "file"

    def assignment(self, match: re.Match[str]) -> Assign:
        start = self.at
        self.at = match.end()
        value: Word | tuple[Word, ...]
        if self.peek() == "(":
            self.at += 1
            items = []
            while True:
                self.newlines()
                if self.peek() == ")":
                    break
                if self.at >= len(self.text):
                    self.fault(f"the list of {match[1]} is never closed", start)
                if self.peek() in ";&|<>" and self.peek(2) not in ("<(", ">("):
                    self.fault(f"{self.peek()!r} inside the list of {match[1]}")
                items.append(self.word())
            self.at += 1
            value = tuple(items)
        elif self.at >= len(self.text) or self.peek() in _META:
            value = Word((), self.line(start), "")
        else:
            value = self.word()
        return Assign(match[1], self.line(start), self.source(start), value, bool(match[3]), match[2])

    # ---- words
    def word(self, *, pattern: bool = False, regex: bool = False) -> Word:
        """The word at the cursor. `pattern`: brackets after ?*+@! belong to it; `regex`: all of them do."""
        start = self.at
        parts: list[Part] = []
        plain: list[str] = []
        depth = 0

        def flush() -> None:
            if plain:
                parts.append(Text("".join(plain)))
                plain.clear()

        while self.at < len(self.text):
            mark = self.peek()
            if mark in "<>" and self.peek(2) in ("<(", ">(") and self.at == start and not regex:
                return self.process(start)
            if mark == "(" and (regex or (pattern and self.at > start and self.text[self.at - 1] in "?*+@!")):
                depth += 1
            elif mark == ")" and depth:
                depth -= 1
            elif mark in _META and not (regex and mark in "|<>&;") and not (depth and mark == "|"):
                break
            if mark == "\\":
                flush()
                if self.peek(2) != "\\\n":
                    parts.append(Text(self.text[self.at + 1 : self.at + 2], quoted=True))
                self.at += 2
            elif mark in "'\"`$":
                flush()
                parts += self.special(quoted=False)
            else:
                plain.append(mark)
                self.at += 1
        flush()
        if self.at == start:
            shown = self.text[self.at : self.at + 20].split("\n")[0]
            self.fault(f"a word expected, found {shown!r}" if shown else "a word is missing")
        return Word(tuple(parts), self.line(start), self.text[start : self.at])

    def process(self, start: int) -> Word:
        end = self.balanced(self.at + 2)
        if end is None:
            self.fault("a <( that is never closed")
        self.at = end + 1
        source = self.text[start : self.at]
        return Word((Strange(source, "a process substitution"),), self.line(start), source)

    def special(self, *, quoted: bool) -> list[Part]:
        """The quote or the expansion at the cursor."""
        mark, start = self.peek(), self.at
        if mark == "'":
            end = self.text.find("'", self.at + 1)
            if end < 0:
                self.fault("a quote ' that does not end")
            self.at = end + 1
            return [Text(self.text[start + 1 : end], quoted=True)]
        if mark == '"':
            self.at += 1
            return self.double(start)
        if mark == "`":
            return [self.backticks(quoted)]
        if self.peek(2) == "$'" and not quoted:
            return [self.ansi()]
        if self.peek(2) == '$"' and not quoted:
            self.at += 2
            return self.double(start)
        return [self.dollar(quoted)]

    def double(self, start: int, end: str = '"') -> list[Part]:
        """The inside of double quotes, and the closing mark."""
        parts: list[Part] = []
        plain: list[str] = []
        while True:
            if self.at >= len(self.text):
                self.fault('a quote " that does not end', start)
            mark = self.peek()
            if mark == end:
                break
            if mark == "\\" and self.at + 1 < len(self.text) and self.text[self.at + 1] in '$`"\\\n':
                plain.append(self.text[self.at + 1].replace("\n", ""))
                self.at += 2
            elif mark in "$`":
                parts += [Text("".join(plain), quoted=True)] if plain else []
                plain = []
                parts += self.special(quoted=True)
            else:
                plain.append(mark)
                self.at += 1
        self.at += 1
        if plain or not parts:
            parts.append(Text("".join(plain), quoted=True))
        return parts

    def ansi(self) -> Part:
        start = self.at
        self.at += 2
        found: list[str] = []
        while True:
            if self.at >= len(self.text):
                self.fault("a quote $' that does not end", start)
            mark = self.peek()
            if mark == "'":
                self.at += 1
                return Text("".join(found), quoted=True)
            if mark != "\\":
                found.append(mark)
                self.at += 1
                continue
            match = re.compile(r"\\(?:x([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{1,4})|([0-7]{1,3})|(.))", re.DOTALL).match(
                self.text, self.at
            )
            if not match:
                self.fault("a quote $' that does not end", start)
            self.at = match.end()
            code = int(match[1] or match[2] or "0", 16) or int(match[3] or "0", 8)
            if match[4] is not None:
                found.append(_ANSI.get(match[4], "\\" + match[4]))
            elif not 0 < code < (0x80 if not match[2] else 0xD800):
                self.fault(f"{match[0]} is not read here")
            else:
                found.append(chr(code))

    def backticks(self, quoted: bool) -> Part:
        start = self.at
        match = re.compile(r"`((?:[^`\\]|\\.)*)`", re.DOTALL).match(self.text, self.at)
        if not match:
            self.fault("a ` that does not end")
        self.at = match.end()
        inner = re.sub(r"\\([`\\$])", r"\1", match[1])
        return Substitution(self.inner(inner, start), match[0], quoted)

    def inner(self, text: str, start: int) -> tuple[Node, ...]:
        parser = _Parser(text, self.origin, self.line(start))
        found = parser.commands(())
        if parser.at < len(text):
            parser.fault(f"{text[parser.at]!r} without what it closes")
        return found

    def dollar(self, quoted: bool) -> Part:
        start = self.at
        if self.peek(3) == "$((":
            end = self.balanced(self.at + 3)
            if end is not None and self.text[end : end + 2] == "))":
                self.at = end + 2
                return Arithmetic(self.text[start + 3 : end], self.text[start : self.at], quoted)
        if self.peek(2) == "$(":
            self.at += 2
            heres, self._heres = self._heres, []
            body = self.commands(())
            self._heres = heres
            self.close(")", "a $( that is never closed", start)
            return Substitution(body, self.text[start : self.at], quoted)
        if self.peek(2) == "${":
            return self.braces(quoted)
        match = re.compile(rf"{_NAME}|[0-9@*#?$!-]").match(self.text, self.at + 1)
        if not match:
            self.at += 1
            return Text("$", quoted=True)
        self.at = match.end()
        index = match[0] if match[0] in "@*" else None
        return Param(match[0], self.text[start : self.at], quoted, index)

    def braces(self, quoted: bool) -> Part:
        start = self.at
        self.at += 2
        length = self.peek() == "#" and self.peek(2) not in ("#}", "##", "#%", "#:")
        self.at += length
        match = _PARAM.match(self.text, self.at)
        if not match or self.peek() == "!":
            return self.unread_braces(start, quoted)
        self.at = match.end()
        name = match[0]
        index = name if name in "@*" else None
        if self.peek() == "[":
            end = self.text.find("]", self.at)
            if end < 0:
                self.fault("a ${ that is never closed", start)
            index = self.text[self.at + 1 : end]
            self.at = end + 1
        op, word = "", None
        operator = _OPERATOR.match(self.text, self.at)
        if operator and operator[0].startswith("@"):
            op = operator[0][:-1]
            self.at += len(op)
        elif operator:
            op = operator[0]
            self.at = operator.end()
            word = self.braces_word(start, quoted=quoted and op.lstrip(":") in "-=+?")
        if self.peek() != "}":
            return self.unread_braces(start, quoted)
        self.at += 1
        return Param(name, self.text[start : self.at], quoted, index, length, op, word)

    def braces_word(self, start: int, *, quoted: bool) -> Word:
        """The word of `${name:-word}`, up to the closing brace."""
        begin, paired = self.at, False
        parts: list[Part] = []
        plain: list[str] = []
        while True:
            if self.at >= len(self.text):
                self.fault("a ${ that is never closed", start)
            mark = self.peek()
            if mark == "}" and not paired:
                break
            if mark == "'" and quoted:  # stays text, but bash wants it in pairs and closes no brace between them
                paired = not paired
            if mark == "\\":
                escapes = not quoted or self.text[self.at + 1 : self.at + 2] in ("$", "`", '"', "\\", "}")
                parts += [Text("".join(plain), quoted)] if plain else []
                plain = []
                taken = self.text[self.at + (1 if escapes else 0) : self.at + 2]
                parts.append(Text(taken.replace("\n", "") if escapes else taken, quoted=True))
                self.at += 2
            elif mark in '$`"' or (mark == "'" and not quoted):
                parts += [Text("".join(plain), quoted)] if plain else []
                plain = []
                parts += [replace(part, quoted=True) if quoted else part for part in self.special(quoted=quoted)]
            else:
                plain.append(mark)
                self.at += 1
        parts += [Text("".join(plain), quoted)] if plain else []
        return Word(tuple(parts), self.line(begin), self.text[begin : self.at])

    def unread_braces(self, start: int, quoted: bool) -> Part:
        depth, at = 1, start + 2
        while depth:
            if at >= len(self.text):
                self.fault("a ${ that is never closed", start)
            depth += (self.text[at] == "{") - (self.text[at] == "}")
            at += 1
        self.at = at
        return Strange(self.text[start:at], "an expansion that is not read here", quoted)


def quoted_word(text: str, origin: str, line: int) -> Word:
    """Text as it would stand between double quotes: what arithmetic is made of."""
    parser = _Parser(text.replace('"', "") + '"', origin)
    parts = parser.double(0)
    return Word(tuple(parts), line, text)
