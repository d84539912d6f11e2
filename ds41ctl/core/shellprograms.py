"""Simple commands of a script that is followed: builtins, functions, and programs that hide another command. Pure."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from typing import NoReturn

from ds41ctl.core.errors import ConfigError
from ds41ctl.core.shellparse import DECLARING, parse
from ds41ctl.core.shelltree import (
    ArithmeticCommand,
    Assign,
    Node,
    Simple,
    Substitution,
    Test,
    Text,
    Word,
)
from ds41ctl.core.shellvalues import Hole, marked, requoted, setting
from ds41ctl.core.shellwords import (
    BINARY,
    DEPTH,
    UNARY,
    EndError,
    LoopError,
    ReturnError,
    Start,
    State,
    UnreadableError,
    Words,
    status_of,
)

_QUIET = frozenset(
    {"trap", "ulimit", "umask", "wait", "sleep", "cd", "pushd", "popd", "hash", "alias", "shopt", "type", "echo"}
    | {"printf", "kill", "disown", "jobs", "enable"}
)
_WITHOUT_TRACE = frozenset({"nohup", "setsid", "command", "builtin", "time", "stdbuf", "unbuffer"})
_KEPT = frozenset({"numactl", "taskset", "nice", "ionice", "chrt", "timeout"})
_PYTHON = re.compile(r"python[0-9.]*")
_TMUX_STARTS = frozenset({"new-session", "new", "new-window", "neww", "respawn-pane", "respawn-window"})
_TMUX_STARTS |= {"split-window", "splitw"}
_TMUX_VALUES = "ceFfnstxylp"

_BUILTINS = {
    **{name: name for name in ("exit", "return", "break", "continue", "set", "shift", "unset", "getopts", "eval")},
    ":": "true",
    "true": "true",
    "false": "false",
    "source": "source",
    ".": "source",
    "[": "test",
    "test": "test",
    "read": "read",
    "mapfile": "read",
    "readarray": "read",
    "let": "let",
    "echo": "echo",
    "printf": "printf",
}


class Programs(Words):
    """What a simple command does to the reader's state; see Reader."""

    _tree: tuple[Node, ...] = ()

    def _one(self, node: Node) -> int | None:
        """Follow one command."""
        raise NotImplementedError

    def _assigned(self, part: object, seen: set[str]) -> set[str]:
        """Names that some piece of the tree assigns."""
        raise NotImplementedError

    # ---- simple commands
    def _simple(self, node: Simple) -> int | None:
        if node.here and node.writes:
            self._note(node.line, node.source, "a file written from a here-document")
        if not node.words:
            for item in node.assigns:
                self._assign(item)
            return None if any(_substitutes(item) for item in node.assigns) else 0
        first = node.words[0]
        if isinstance(first, Word) and first.source in DECLARING:
            return self._declare(first.source, node)
        words = [item for word in node.words if isinstance(word, Word) for item in self._fields(word)]
        if not words:
            for item in node.assigns:
                self._assign(item)
            return 0
        prefix = {item.name: self._string(item.value) for item in node.assigns if isinstance(item.value, Word)}
        return self._command(words, prefix, node)

    def _declare(self, what: str, node: Simple) -> int | None:
        options = "".join(word.source for word in node.words[1:] if isinstance(word, Word) and word.source[:1] == "-")
        exports = what == "export" or "x" in options
        for word in node.words[1:]:
            if isinstance(word, Word):
                if not word.source.startswith("-"):
                    self._declare_worked_out(what, word, node, exports=exports)
                continue
            if "n" in options and what != "export":
                self._note(node.line, node.source, "a name that stands for another one")
            if what == "local" or (what in ("declare", "typeset") and self._state.scopes and "g" not in options):
                self._localise(word.name)
            if word.value is None:
                if what != "export" and what != "readonly" and word.name not in self.settings:
                    self._state.values.setdefault(word.name, [] if "a" in options.lower() else "")
            elif set(options) & set("iulnA"):
                self._set(word.name, self.holes.make(word.line, node.source, f"{what} {options}"), word.line)
            else:
                self._assign(word)
            if exports and "n" not in options:
                self._state.exported.add(word.name)
            elif "n" in options:
                self._state.exported.discard(word.name)
        return 0

    def _declare_worked_out(self, what: str, word: Word, node: Simple, *, exports: bool) -> None:
        """`export "$pair"`, with what the word comes to."""
        for text in self._fields(word):
            name, equals, value = text.partition("=")
            if not re.fullmatch(r"[A-Za-z_]\w*", name) or what == "local":
                self._note(node.line, node.source, f"{what} of a name that is not known")
                continue
            self.assignments += 1
            if equals:
                self._set(name, value, word.line)
            if exports:
                self._state.exported.add(name)

    def _localise(self, name: str) -> None:
        if self._state.scopes and name not in self._state.scopes[-1]:
            self._state.scopes[-1][name] = (self._state.values.pop(name, None), name in self._state.exported)

    def _command(self, words: list[str], prefix: dict[str, str], node: Simple) -> int | None:
        name = words[0]
        if name in self._state.functions or (name == "eval" and prefix):
            body = self._state.functions.get(name)
            if prefix and (name == "eval" or self._assigned(body, {name}) & set(prefix)):
                for item in prefix:  # bash decides by how it is set whether it stays so
                    self._note(node.line, node.source, f"sets {item} in front of what sets it too")
            return self._prefixed(prefix, lambda: self._called(name, words[1:], node))
        handler = getattr(self, f"_do_{_BUILTINS[name]}", None) if name in _BUILTINS else None
        if handler is not None:
            return handler(words[1:], node)  # type: ignore[no-any-return]
        if name == "exec":
            rest = words[1:]
            while rest and rest[0].startswith("-"):
                del rest[: 2 if rest[0] == "-a" else 1]
            if all(re.fullmatch(r"\{\w+\}", word) for word in rest):  # only redirections
                for word in rest:
                    self._set(word[1:-1], self.holes.make(node.line, node.source, "a file number"), node.line)
                return 0
            self._external(rest, self._environment() | prefix, node)
            raise EndError
        if self._output is not None:
            return self._pure(words, node)
        if name in _QUIET:
            if name == "cd":
                self._go(words[1:])
            return 0 if name in ("echo", "printf", "trap", "ulimit") else None
        self._external(words, self._environment() | prefix, node)
        return None

    def _prefixed(self, prefix: dict[str, str], body: Callable[[], int | None]) -> int | None:
        """`A=1 function`: set and exported while it runs."""
        before = {name: (self._state.values.get(name), name in self._state.exported) for name in prefix}
        for name, text in prefix.items():
            self._set(name, text, 0)
            self._state.exported.add(name)
        status = body()
        for name, (value, exported) in before.items():
            self._state.values.pop(name, None)
            if value is not None:
                self._state.values[name] = value
            if not exported:
                self._state.exported.discard(name)
        return status

    def _called(self, name: str, words: list[str], node: Simple) -> int | None:
        return self._call(name, words, node) if name in self._state.functions else self._do_eval(words, node)

    def _call(self, name: str, arguments: list[str], node: Simple) -> int | None:
        if self._depth >= DEPTH:
            raise ConfigError(f"{self.name}: line {node.line}: functions call each other more than {DEPTH} deep")
        kept, self._depth = self._state.arguments, self._depth + 1
        self._state.arguments = arguments
        self._state.scopes.append({})
        try:
            status = self._one(self._state.functions[name])
        except ReturnError as found:
            status = found.status
        finally:
            self._depth -= 1
            if self._state.scopes:
                for local, (value, exported) in self._state.scopes.pop().items():
                    self._state.values.pop(local, None)
                    self._state.exported.discard(local)
                    if value is not None:
                        self._state.values[local] = value
                    if exported:
                        self._state.exported.add(local)
            self._state.arguments = kept
        return status

    def _environment(self) -> dict[str, str]:
        found = {}
        for name in sorted(self._state.exported):
            value = self._state.values.get(name)
            if isinstance(value, str):  # a list cannot be exported
                found[name] = value
        return found

    # ---- builtins
    def _do_true(self, words: list[str], node: Simple) -> int | None:
        return 0

    def _do_false(self, words: list[str], node: Simple) -> int | None:
        return 1

    def _do_exit(self, words: list[str], node: Simple) -> NoReturn:
        raise EndError

    def _do_return(self, words: list[str], node: Simple) -> NoReturn:
        raise ReturnError(int(words[0]) if words and words[0].isdecimal() else None)

    def _do_break(self, words: list[str], node: Simple) -> NoReturn:
        raise LoopError(again=False)

    def _do_continue(self, words: list[str], node: Simple) -> NoReturn:
        raise LoopError(again=True)

    def _do_set(self, words: list[str], node: Simple) -> int | None:
        for at, word in enumerate(words):
            if word == "--" or (at == 0 and word[:1] not in "-+"):
                self._state.arguments = words[at + 1 :] if word == "--" else words
                return 0
            if re.fullmatch(r"[-+][A-Za-z]*a[A-Za-z]*", word) or (word == "allexport" and at):
                self._state.export_all = (words[at - 1] if word == "allexport" else word).startswith("-")
        return 0

    def _do_shift(self, words: list[str], node: Simple) -> int | None:
        count = int(words[0]) if words and words[0].isdecimal() else 1
        if count > len(self._state.arguments):
            return 1
        del self._state.arguments[:count]
        return 0

    def _do_unset(self, words: list[str], node: Simple) -> int | None:
        for word in words:
            if not re.fullmatch(r"-[fnv]|[A-Za-z_]\w*", word):
                self._note(node.line, node.source, "takes away a name or an element that is worked out")
            elif not word.startswith("-") and word not in self.settings and word not in self.forced:
                self._state.values.pop(word, None)
                self._state.exported.discard(word)
        return 0

    def _do_read(self, words: list[str], node: Simple) -> int | None:
        takes, names = False, []
        listed = isinstance(node.words[0], Word) and node.words[0].source in ("mapfile", "readarray")
        valued = "dnOsuCc" if listed else "dinNptu"
        for word in words:
            if takes:
                takes = False
            elif word.startswith("-"):
                takes = word[-1] in valued
                if "a" in word and not listed:
                    listed, takes = True, False
            else:
                names.append(word)
        for name in names or ["MAPFILE" if listed else "REPLY"]:
            hole = self.holes.make(node.line, node.source, f"{name} is read from input")
            self._set(name, [hole] if listed else hole, node.line)
        return None

    def _do_getopts(self, words: list[str], node: Simple) -> int | None:
        if not self._state.arguments:
            return 1
        for name in (*words[1:2], "OPTARG", "OPTIND"):
            self._set(name, self.holes.make(node.line, node.source, "an option of the launcher's own"), node.line)
        return None

    def _do_source(self, words: list[str], node: Simple) -> int | None:
        if words and words[0].rsplit("/", 1)[-1] in self.sourced:
            return 0
        self._note(node.line, node.source, "another file, which may set anything")
        return None

    def _do_eval(self, words: list[str], node: Simple) -> int | None:
        text = " ".join(words)
        if self.holes.of(text):
            self._note(node.line, node.source, "evaluates text that is not known")
            return None
        return self._all(parse(text, self.name, node.line))

    def _do_test(self, words: list[str], node: Simple) -> int | None:
        if node.words[0].source == "[" and words[-1:] == ["]"]:
            words = words[:-1]
        operators = set(BINARY) | {"!", "-z", "-n", "-v"} | {f"-{mark}" for mark in UNARY}
        if len(words) == 3 and words[1] in BINARY:  # whatever stands around the operator is no operator
            first, second = (Word((Text(item, quoted=True),), node.line, "''") for item in (words[0], words[2]))
            return status_of(self._compare(first, words[1], second))
        if {"-a", "-o", "(", ")"} & set(words) or len(words) > 4:
            return None
        tokens = tuple(
            Word((Text(item, quoted=item not in operators),), node.line, item if item in operators else "''")
            for item in words
        )
        return status_of(self._test(Test(node.line, node.source, tokens)))

    def _do_let(self, words: list[str], node: Simple) -> int | None:
        return self._arithmetic_command(ArithmeticCommand(node.line, node.source, " ".join(words)))

    def _do_echo(self, words: list[str], node: Simple) -> int | None:
        if self._output is not None and not node.writes:
            newline = "\n"
            while words and re.fullmatch(r"-[neE]+", words[0]):
                if "e" in words[0]:
                    raise UnreadableError("echo -e")
                newline = ""
                words = words[1:]
            self._output.append(" ".join(words) + newline)
        return 0

    def _do_printf(self, words: list[str], node: Simple) -> int | None:
        target = words[1] if words[:1] == ["-v"] and len(words) > 2 else None
        if target is None and self._output is None:
            return 0
        text = _formatted(words[2:] if target else [word for word in words if word != "--"])
        if target is not None:
            made = self.holes.make(node.line, node.source, "a format that is not worked out") if text is None else text
            self._set(target, made, node.line)
        elif text is None or self._output is None:
            raise UnreadableError("printf")
        else:
            self._output.append(text)
        return 0

    def _go(self, words: list[str]) -> None:
        target = next((word for word in words if not word.startswith("-")), "")
        self._state.folder = self._located(target)

    def _located(self, path: str) -> str | None:
        if marked(path) and ".." in path.split("/"):
            return None
        if not path.startswith(("/", "\0s")):
            if self._state.folder is None or self.holes.of(path):
                return None
            path = f"{self._state.folder}/{path}"
        return posixpath.normpath(path)

    def _pure(self, words: list[str], node: Simple) -> int | None:
        """Inside `$(...)`: the few commands whose output is a matter of text."""
        name, rest = words[0], [word for word in words[1:] if not re.fullmatch(r"-[A-Za-z]|--", word)]
        output = self._output
        if output is None or node.writes:
            raise UnreadableError(name)
        text: str | None = None
        if name == "cd" and rest:
            self._go(rest)
            if self._state.folder is None:
                raise UnreadableError("a folder that is not known")
            return 0
        if name == "pwd":
            text = self._state.folder
        elif name in ("realpath", "readlink") and len(rest) == 1:
            text = self._located(rest[0])
        elif name in ("dirname", "basename") and len(rest) == 1:
            head, slash, tail = rest[0].rstrip("/").rpartition("/")
            if not marked(tail):
                text = (head or slash or ".") if name == "dirname" else tail
        if text is None:
            raise UnreadableError(f"{name} is run")
        output.append(text + "\n")
        return 0

    # ---- other programs
    def _external(self, words: list[str], env: dict[str, str], node: Simple) -> None:
        if self._output is not None:
            raise UnreadableError(f"{words[0]} is run")
        kept: list[str] = []
        while words:
            name = words[0].rsplit("/", 1)[-1]
            if self.holes.of(name) and words[1:2] != ["-m"]:
                kept.append(words[0])
                words = words[1:]
            elif name == "env":
                words, env = self._env(words[1:], env, node)
            elif name in _WITHOUT_TRACE or (name == "exec" and kept == []):
                if name == "command" and words[1:2] in (["-v"], ["-V"]):
                    break
                words = words[1:]
                while words and words[0].startswith("-"):
                    words = words[1:]
            elif name in _KEPT and (at := next((at for at, item in enumerate(words) if _interpreter(item)), 0)):
                kept += words[:at]
                words = words[at:]
            else:
                break
        if not words:
            return
        name = words[0].rsplit("/", 1)[-1]
        if _is_engine(words):
            self.starts.append(Start(node.line, [*kept, *words], env))
        elif words[0] == self.path or (name in ("bash", "sh") and words[1:2] == [self.path]):
            arguments = words[2:] if words[0] != self.path else words[1:]
            self._fresh(lambda: self._all(self._tree), env, arguments, node)
        elif name == "tmux":
            self._tmux(words[1:], env, node)
        elif name in ("bash", "sh") and len(words) > 2 and re.fullmatch(r"-[a-z]*c", words[1]):
            self._script(words[2], env, node)
        elif name in ("sudo", "systemd-run", "screen", "docker", "podman", "ssh", "su", "runuser") and any(
            "vllm" in word for word in words
        ):
            self._note(node.line, node.source, f"starts something by {name}")
        else:
            self.passed.append(Hole(node.line, node.source, "a command of its own"))

    def _env(self, words: list[str], env: dict[str, str], node: Simple) -> tuple[list[str], dict[str, str]]:
        env = dict(env)
        while words:
            word = words[0]
            name, equals, value = word.partition("=")
            if word in ("-i", "-", "--ignore-environment"):
                env = {}
            elif word in ("-u", "--unset") and len(words) > 1:
                env.pop(words[1], None)
                words = words[1:]
            elif word == "--":
                pass
            elif word.startswith("-"):
                self._note(node.line, node.source, f"env {word}")
            elif equals and re.fullmatch(r"[A-Za-z_]\w*", name):
                env[name] = value
            elif self.holes.of(word) and not _interpreter(word) and len(words) > 1:
                self._note(node.line, node.source, "; ".join(hole.why for hole in self.holes.of(word)))
            else:
                break
            words = words[1:]
        return words, env

    def _tmux(self, words: list[str], env: dict[str, str], node: Simple) -> None:
        while words and words[0].startswith("-"):
            words = words[2 if words[0] in ("-L", "-S", "-f", "-T", "-c") else 1 :]
        if not words:
            return
        command, words = words[0], words[1:]
        if command in ("send-keys", "send"):
            texts = [word for word in words if word not in ("C-m", "Enter", "C-j", "-l")]
            while texts and texts[0].startswith("-"):
                texts = texts[2 if texts[0] in ("-t", "-N") else 1 :]
            if any("vllm" in text or self.path in text for text in texts):
                self._script("".join(texts), env, node)
            return
        if command not in _TMUX_STARTS:
            return
        env = dict(env)
        while words and re.match(r"-[A-Za-z]", words[0]):
            takes = words[0][-1] in _TMUX_VALUES
            if words[0] == "-e" and len(words) > 1:
                name, _, value = words[1].partition("=")
                env[name] = value
            words = words[2 if takes and len(words[0]) == 2 else 1 :]
        words = words[1:] if words[:1] == ["--"] else words
        if len(words) == 1:
            self._script(words[0], env, node)
        elif words:
            self._external(words, env, node)

    def _script(self, text: str, env: dict[str, str], node: Simple) -> None:
        """Text that another shell is given."""
        tree = parse(text, self.name, node.line)
        self._fresh(lambda: self._all(tree), env, [], node)

    def _fresh(self, body: Callable[[], int | None], env: dict[str, str], arguments: list[str], node: Simple) -> None:
        if self._depth >= DEPTH:
            raise ConfigError(f"{self.name}: line {node.line}: starts itself more than {DEPTH} deep")
        kept = self._state
        self._state = State(dict(env), set(env), {}, arguments, folder=kept.folder)
        self._depth += 1
        try:
            body()
        except (EndError, ReturnError, LoopError):
            pass
        finally:
            self._state = kept
            self._depth -= 1


def _substitutes(item: Assign) -> bool:
    words = item.value if isinstance(item.value, tuple) else [item.value] if item.value else []
    return any(isinstance(part, Substitution) for word in words for part in word.parts)


def _interpreter(word: str) -> bool:
    name = word.rsplit("/", 1)[-1]
    return bool(_PYTHON.fullmatch(name)) or name in ("vllm", "env", "bash", "sh") or word == setting("python")


def _is_engine(words: list[str]) -> bool:
    """`python -m vllm...`, `vllm serve` or an interpreter that is given a server's options."""
    name = words[0].rsplit("/", 1)[-1]
    if name == "vllm":
        return words[1:2] == ["serve"]
    if not (_PYTHON.fullmatch(name) or words[0] == setting("python") or words[1:2] == ["-m"]):
        return False
    rest = words[1:]
    while rest and re.fullmatch(r"-[uOBEsIqXW]+", rest[0]):
        rest = rest[2 if rest[0] in ("-X", "-W") else 1 :]
    if rest[:1] == ["-m"]:
        return len(rest) > 1 and "vllm" in rest[1].split(".")
    server = {"--served-model-name", "--max-model-len", "--tensor-parallel-size"}
    return bool(rest) and not rest[0].startswith("-") and any(word.partition("=")[0] in server for word in rest)


def _formatted(words: list[str]) -> str | None:
    """printf, as far as launchers use it."""
    if not words or marked(words[0]):
        return None
    pattern, rest = words[0], words[1:]
    parts = re.findall(r"%[sqd%]|\\n|\\t|[^%\\]+|.", pattern, re.DOTALL)
    if any(part in ("%", "\\") for part in parts):
        return None
    wanted = sum(1 for part in parts if part in ("%s", "%q", "%d"))
    out = []
    while True:
        for part in parts:
            if part in ("%s", "%q", "%d"):
                item = rest.pop(0) if rest else ("0" if part == "%d" else "")
                if part == "%d" and not item.isdecimal():
                    return None
                out.append(requoted(item) if part == "%q" else item)
            else:
                out.append({"%%": "%", "\\n": "\n", "\\t": "\t"}.get(part, part))
        if not rest or not wanted:
            return "".join(out)
