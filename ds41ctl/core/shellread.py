"""A launcher's script followed to the command line it starts, without a shell: nothing is run or guessed. Pure.

The reader walks the script as bash would, called without arguments: assignments, arrays, expansions, functions, `if`,
`case`, loops over words that are known. A value that only a running shell knows (`$(nproc)`, the caller's `$HOME`) is a
hole; a condition it cannot decide (`[[ -f x ]]`, `command -v numactl`) is followed both ways: a branch that ends the
script is one of the launcher's own checks and taken as passed, and what differs between two that go on is a hole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from ds41ctl.core.errors import ConfigError
from ds41ctl.core.shellprograms import Programs
from ds41ctl.core.shelltree import (
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
    Pipeline,
    Simple,
    Test,
    Word,
)
from ds41ctl.core.shellvalues import marked
from ds41ctl.core.shellwords import EndError, LoopError, ReturnError, State, UnreadableError, shown, status_of

STEPS = 200_000  # policy: commands followed; launchers have some hundred


class Reader(Programs):
    """Follows scripts. `path`: what `$0` is; `settings`: variable -> the setting it stands for; `forced`: variables
    whose value no assignment changes; `sourced`: basenames of files that were fed already.

    After `run`: `starts`, `unread` (what was passed over and could matter), `given` (values that a script or an
    environment file gives to settings and forced variables) and the counts.
    """

    # ---- entry points
    def feed(self, tree: tuple[Node, ...]) -> None:
        """Follow an environment file: its variables stay."""
        self._feeding = True
        self._until_end(tree)
        self._feeding = False

    def _until_end(self, tree: tuple[Node, ...]) -> None:
        try:
            self._all(tree)
        except (EndError, ReturnError, LoopError):
            return

    def run(self, tree: tuple[Node, ...], arguments: Sequence[str] = ()) -> None:
        """Follow a script from its first line."""
        self._tree = tree
        kept = self._state.copy()
        self._state.arguments = list(arguments)
        self._until_end(tree)
        self._state = kept

    # ---- lists of commands
    def _all(self, nodes: Iterable[Node]) -> int | None:
        status: int | None = 0
        for node in nodes:
            status = self._one(node)
        return status

    def _one(self, node: Node) -> int | None:
        self._steps += 1
        if self._steps > STEPS:
            raise ConfigError(f"{self.name}: line {node.line}: followed for {STEPS} commands without an end")
        match node:
            case Simple():
                return self._simple(node)
            case Chain():
                return self._chain(node)
            case Pipeline():
                return self._pipeline(node)
            case If():
                return self._arms(node, list(node.arms), node.other)
            case Test():
                return status_of(self._test(node))
            case ArithmeticCommand():
                return self._arithmetic_command(node)
            case Case():
                return self._case(node)
            case For():
                return self._for(node)
            case Loop():
                return self._loop(node)
            case Block():
                return self._apart(lambda: self._all(node.body)) if node.apart else self._all(node.body)
            case Function():
                self._state.functions[node.name] = node.body
                return 0

    def _chain(self, node: Chain) -> int | None:
        status = self._one(node.first)
        for op, following in node.rest:
            if status is None:
                status = self._either(
                    (lambda: None, lambda item=following: self._one(item)),  # type: ignore[misc]
                    node.line,
                    node.source,
                )
            elif (status == 0) == (op == "&&"):
                status = self._one(following)
        return status

    def _pipeline(self, node: Pipeline) -> int | None:
        if len(node.parts) == 1 and not node.background:
            status = self._one(node.parts[0])
            return None if status is None else int(status == 0)
        if self._output is not None:
            raise UnreadableError("a pipeline")
        for part in node.parts:
            self._apart(lambda item=part: self._one(item))  # type: ignore[misc]
        return 0 if node.background else None

    def _apart(self, body: Callable[[], int | None]) -> int | None:
        """In a subshell: what it sets is gone afterwards."""
        kept = self._state
        self._state = kept.copy()
        try:
            return body()
        except (EndError, ReturnError, LoopError):
            return None
        finally:
            self._state = kept

    def _arms(self, node: If, arms: list[Any], other: tuple[Node, ...]) -> int | None:
        if not arms:
            return self._all(other)
        condition, body = arms[0]
        status = self._all(condition)
        if status is None:
            source = node.source.split("\n")[0]
            return self._either((lambda: self._all(body), lambda: self._arms(node, arms[1:], other)), node.line, source)
        return self._all(body) if status == 0 else self._arms(node, arms[1:], other)

    def _case(self, node: Case) -> int | None:
        subject = self._string(node.word)
        open_arms: list[Callable[[], int | None]] = []
        for patterns, body, end in node.arms:
            verdicts = [self._matches(subject, word) for word in patterns]
            if True not in verdicts and None not in verdicts:
                continue
            if end != ";;":
                self._note(node.line, node.source, f"`case` with {end}")
            open_arms.append(lambda chosen=body: self._all(chosen))  # type: ignore[misc]
            if True in verdicts:
                break
        else:
            open_arms.append(lambda: 0)
        if len(open_arms) == 1:
            return open_arms[0]()
        return self._either(tuple(open_arms), node.line, node.source.split("\n")[0])

    def _for(self, node: For) -> int | None:
        if not node.name:
            return self._unknown_rounds(node, node.body, ())
        rounds = self._state.arguments if node.words is None else self._list(node.words)
        if any(marked(item) and self.holes.of(item) for item in rounds):
            return self._unknown_rounds(node, node.body, (node.name,))
        for item in list(rounds):
            self._set(node.name, item, node.line)
            try:
                self._all(node.body)
            except LoopError as found:
                if not found.again:
                    break
        return 0

    def _loop(self, node: Loop) -> int | None:
        while True:
            status = self._all(node.condition)
            if status is None:
                return self._unknown_rounds(node, node.body, ())
            if (status == 0) == node.until:
                return 0
            try:
                self._all(node.body)
            except LoopError as found:
                if not found.again:
                    return 0

    def _unknown_rounds(self, node: For | Loop, body: tuple[Node, ...], more: tuple[str, ...]) -> int | None:
        """A loop whose rounds are not known: whatever it assigns is not known."""
        source = node.source.split("\n")[0]

        def rounds() -> None:
            for name in (*more, *sorted(self._assigned(body, set()))):
                self._set(name, self.holes.make(node.line, source, f"sets {name} in a loop that is not counted"), 0)
            try:
                self._all(body)
            except LoopError:
                return

        return self._either((lambda: None, rounds), node.line, source)

    def _assigned(self, part: object, seen: set[str]) -> set[str]:
        """Names that some piece of the tree assigns, functions it calls included."""
        found: set[str] = set()
        if isinstance(part, Assign):
            found.add(part.name)
        if isinstance(part, Simple) and part.words and isinstance(part.words[0], Word):
            name = part.words[0].source
            if name in ("read", "mapfile", "readarray", "printf", "getopts", "unset"):
                found |= {word.source for word in part.words if re.fullmatch(r"[A-Za-z_]\w*", word.source)}
            if name in self._state.functions and name not in seen:
                found |= self._assigned(self._state.functions[name], seen | {name})
        if isinstance(part, tuple | list):
            for item in part:
                found |= self._assigned(item, seen)
        elif is_dataclass(part):
            for item in fields(part):
                found |= self._assigned(getattr(part, item.name), seen)
        return found

    # ---- both ways
    def _either(self, ways: tuple[Callable[[], int | None], ...], line: int, source: str) -> int | None:
        if self._output is not None:
            raise UnreadableError(f"depends on `{source}`")
        base = self._state
        alive: list[tuple[int | None, State]] = []
        ended: list[tuple[Exception, State]] = []
        for way in ways:
            self._state = base.copy()
            try:
                alive.append((way(), self._state))
            except (EndError, ReturnError, LoopError) as error:
                ended.append((error, self._state))
        for signal, _ in ended:
            failed_check = isinstance(signal, EndError) or (isinstance(signal, ReturnError) and signal.status)
            if alive and not failed_check:
                self._note(line, source, "whether the lines after it count depends on this")
        states = [state for _, state in alive] or [state for _, state in ended]
        self._state = states[0]
        for state in states[1:]:
            self._merge(state, line, source)
        if not alive:
            raise ended[0][0]
        statuses = {status for status, _ in alive}
        return statuses.pop() if len(statuses) == 1 else None

    def _merge(self, other: State, line: int, source: str) -> None:
        """Two states into the present one: what differs is a hole."""
        ours = self._state
        for name in sorted(set(ours.values) | set(other.values)):
            mine, theirs = ours.values.get(name), other.values.get(name)
            if mine == theirs and (name in ours.exported) == (name in other.exported):
                continue
            if isinstance(mine, list) and isinstance(theirs, list) and mine != theirs:
                ours.values[name] = self._merged(name, mine, theirs, line, source)
            else:
                told = " or ".join(shown(name, item) for item in (mine, theirs))
                ours.values[name] = self.holes.make(line, source, f"{name} depends on it: {told}")
        ours.exported |= other.exported
        if ours.functions != other.functions or ours.arguments != other.arguments:
            self._note(line, source, "functions or arguments depend on it")
        ours.functions |= other.functions
        ours.folder = ours.folder if ours.folder == other.folder else None

    def _merged(self, name: str, mine: list[str], theirs: list[str], line: int, source: str) -> list[str]:
        least = min(len(mine), len(theirs))
        head = next((at for at in range(least) if mine[at] != theirs[at]), least)
        tail = next((at for at in range(least - head) if mine[-1 - at] != theirs[-1 - at]), least - head)
        middles = [part[head : len(part) - tail] for part in (mine, theirs)]
        told = " or ".join(shown(name, part) for part in middles)
        hole = self.holes.make(line, source, f"{name} depends on it: {told}", many=True)
        return [*mine[:head], hole, *(mine[len(mine) - tail :] if tail else [])]
