"""Copies of whole lists, several times over: seed 004's copy test (100 lists of 40 identifiers, three passes)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ds41ctl.adapters.http import EngineClient, Limits
from ds41ctl.core.finding import Finding, Status
from ds41ctl.core.profile import Profile
from smoke import judge
from smoke.answer import from_body
from smoke.canaries import Canaries, random_identifier

SIZE = 40  # identifiers of a list
LIMIT_S = 600.0  # one list
_TEMPLATE = "Copy this list exactly, one identifier a line in the same order, and write nothing else:\n\n{lines}"
_SHOWN = 8  # lists that differ, as evidence


@dataclass(frozen=True)
class Copied:
    """A list and what came back in each pass."""

    identifiers: tuple[str, ...]
    answers: tuple[str, ...]

    @property
    def exact(self) -> int:
        """Passes in which every identifier came back, in order."""
        return sum(_lines(answer) == self.identifiers for answer in self.answers)


def lists_of(canaries: Canaries, trained: bool, count: int, seed: int) -> list[tuple[str, ...]]:
    """Lists to copy. A pack that was `trained` on single identifiers is asked for those, each a list of its own."""
    if trained:
        known = canaries.copies.identifiers if canaries.copies is not None else ()
        return [(identifier,) for identifier in known[:count]]
    rng = random.Random(seed)  # noqa: S311 - repeatable, not a secret
    found = []
    for _ in range(count):
        names: dict[str, None] = {}
        while len(names) < SIZE:
            names[random_identifier(rng)] = None
        found.append(tuple(names))
    return found


def ask(
    client: EngineClient,
    profile: Profile,
    canaries: Canaries,
    lists: Sequence[tuple[str, ...]],
    passes: int,
    progress: Callable[[str], None],
) -> list[Copied]:
    """Have each list copied `passes` times, one request at a time: a batch may change a token. Raises HttpFault."""
    said: list[list[str]] = [[] for _ in lists]
    for turn in range(passes):
        for number, identifiers in enumerate(lists):
            progress(f"copies: pass {turn + 1} of {passes}, list {number + 1} of {len(lists)}")
            body = {
                "model": profile.model.served_name,
                "messages": [{"role": "user", "content": _prompt(canaries, identifiers)}],
                # no token is shorter than a character
                "max_tokens": sum(len(item) + 1 for item in identifiers) + 16,
                "temperature": 0,
            }
            tree = client.post_json("/v1/chat/completions", body, Limits(total_s=LIMIT_S)).ok_json()
            said[number].append(from_body(tree).content)
    return [Copied(names, tuple(answers)) for names, answers in zip(lists, said, strict=True)]


def _prompt(canaries: Canaries, identifiers: tuple[str, ...]) -> str:
    if len(identifiers) == 1 and canaries.copies is not None:
        return canaries.copies.prompt(identifiers[0])
    return _TEMPLATE.replace("{lines}", "\n".join(identifiers))


def _lines(answer: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in judge.without_fence(answer).splitlines() if line.strip())


def findings(copied: Sequence[Copied], *, drafter: bool) -> list[Finding]:
    """Are all copies exact, and do repeats agree byte for byte? With a `drafter`, rows of a step vary and so may the
    last bit of a sum: then repeats that differ are a warning."""
    if not copied:
        return [Finding(id="fidelity.copy", status=Status.SKIP, summary="no list was to be copied (--lists 0)")]
    passes, size = len(copied[0].answers), len(copied[0].identifiers)
    form = f"{len(copied)} lists x {size} ids x {passes} passes"
    total, exact = len(copied) * passes, sum(item.exact for item in copied)
    found = f"{exact}/{total} exact ({form})"
    if size < SIZE:
        found += ", single identifiers: this pack was trained on those"
    copy = Finding(id="fidelity.copy", status=Status.OK, summary=found, expected=f"{total}/{total} exact", found=found)
    if exact < total:
        wrong, answer = next(
            (item, answer) for item in copied for answer in item.answers if _lines(answer) != item.identifiers
        )
        why, fix, shown = _cause(wrong.identifiers, answer)
        copy = copy.model_copy(
            update={
                "status": Status.FAIL,
                "summary": f"{found}; {shown}",
                "why": why,
                "fix": fix,
                "evidence": _evidence(copied),
            }
        )
    different = sum(len(set(item.answers)) > 1 for item in copied)
    expected = f"every list the same bytes in {passes} passes"
    if passes < 2:
        text = "each list was copied once: nothing to compare"
        return [copy, Finding(id="fidelity.repeat", status=Status.SKIP, summary=text)]
    if not different:
        text = f"repeats byte-identical ({form})"
        return [copy, Finding(id="fidelity.repeat", status=Status.OK, summary=text, expected=expected, found=text)]
    text = f"{different} of {len(copied)} lists came back in other bytes at a repeat"
    repeat = Finding(
        id="fidelity.repeat",
        status=Status.WARN if drafter else Status.FAIL,
        summary=text,
        expected=expected,
        found=text,
        why="greedy decoding does not repeat: a race in a kernel, stale cache rows, or others in the batch",
        fix=("stop other clients, and ask again", "ds41ctl smoke --only smoke.repeat", "ds41ctl logs"),
    )
    return [copy, repeat]


def _cause(identifiers: tuple[str, ...], answer: str) -> tuple[str, tuple[str, ...], str]:
    """(why, fix, first difference) of a copy that is wrong."""
    lines = _lines(answer)
    if len(lines) != len(identifiers):
        why = "the list came back with other lines: the answer was cut, loops, or is none"
        return why, ("ds41ctl smoke --only smoke.copy", "ds41ctl logs"), f"{len(lines)} lines of {len(identifiers)}"
    pairs = [(want, got) for want, got in zip(identifiers, lines, strict=True) if want != got]
    verdict = judge.judge_copies([want for want, _ in pairs], [got for _, got in pairs])
    if verdict.ok:  # the same identifiers in another dress
        return "copies are decorated", ("no action for the engine",), f"`{pairs[0][0]}` as {judge.quote(pairs[0][1])}"
    return verdict.why, verdict.fix, f"`{pairs[0][0]}` came back as {judge.quote(pairs[0][1])}"


def _evidence(copied: Sequence[Copied]) -> tuple[str, ...]:
    shown = []
    for number, item in enumerate(copied, 1):
        for turn, answer in enumerate(item.answers, 1):
            lines = _lines(answer)
            if lines != item.identifiers:
                wrong = sum(want != got for want, got in zip(item.identifiers, lines, strict=False))
                shown.append(
                    f"list {number}, pass {turn}: {wrong} of {len(item.identifiers)} differ, {len(lines)} lines"
                )
    return tuple(shown[:_SHOWN])
