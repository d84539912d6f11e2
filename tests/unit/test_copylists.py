"""Copies of lists: 100 lists of 40 identifiers, three times over, each exact and each time the same bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ds41ctl.adapters.http import EngineClient
from ds41ctl.core.finding import Finding, Status
from smoke import copylists
from smoke.canaries import generate
from smoke.copylists import Copied
from tests.fakes.profiles import least_profile
from tests.fakes.sse_server import Request, Script, ScriptedServer, whole

CANARIES = generate(3)
PROFILE = least_profile()
Change = Callable[[int, str], str]


class Copier:
    """Copies the list of a prompt, changed by `change` (number of the request, text)."""

    def __init__(self, change: Change = lambda number, text: text) -> None:
        self.change, self.bodies = change, []  # type: ignore[var-annotated]

    def __call__(self, request: Request) -> Script:
        self.bodies.append(request.body)
        text = request.body["messages"][0]["content"].partition("\n\n")[2]
        said = self.change(len(self.bodies), text)
        return [whole({"choices": [{"message": {"content": said}, "finish_reason": "stop"}]})]


def copied(change: Change = lambda number, text: text, *, lists: int = 4, passes: int = 3) -> list[Copied]:
    with ScriptedServer(Copier(change)) as server:
        wanted = copylists.lists_of(CANARIES, False, lists, 5)
        return copylists.ask(EngineClient(server.url), PROFILE, CANARIES, wanted, passes, lambda text: None)


def judged(change: Change, *, drafter: bool = False) -> dict[str, Finding]:
    return {item.id: item for item in copylists.findings(copied(change), drafter=drafter)}


def test_the_form_of_the_seed_is_a_hundred_lists_of_forty_different_identifiers() -> None:
    lists = copylists.lists_of(CANARIES, False, 100, 1)
    assert len(lists) == 100 and {len(set(item)) for item in lists} == {40}
    assert lists == copylists.lists_of(CANARIES, False, 100, 1) != copylists.lists_of(CANARIES, False, 100, 2)
    done = [Copied(item, ("\n".join(item),) * 3) for item in lists]
    found = copylists.findings(done, drafter=False)
    assert found[0].found == "300/300 exact (100 lists x 40 ids x 3 passes)"
    assert found[1].found == "repeats byte-identical (100 lists x 40 ids x 3 passes)"


def test_each_list_is_asked_in_every_pass_greedily_with_room_for_all_of_it() -> None:
    engine = Copier()
    with ScriptedServer(engine) as server:
        wanted = copylists.lists_of(CANARIES, False, 2, 5)
        copylists.ask(EngineClient(server.url), PROFILE, CANARIES, wanted, 3, lambda text: None)
    assert len(engine.bodies) == 6 and engine.bodies[0] == engine.bodies[2] == engine.bodies[4]
    for body, names in zip(engine.bodies, wanted * 3, strict=True):
        assert body["temperature"] == 0 and body["max_tokens"] >= len("\n".join(names))


def test_right_copies_pass_also_within_a_fence() -> None:
    found = judged(lambda number, text: f"```\n{text}\n```")
    assert {item.status for item in found.values()} == {Status.OK}
    assert found["fidelity.copy"].found.startswith("12/12 exact")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda number, text: text.replace("_", "") if number == 6 else text, "Engram tables are not"),
        (lambda number, text: "\n".join(text.splitlines()[:-1]) if number == 6 else text, "cut, loops, or is none"),
        (lambda number, text: "\n".join(reversed(text.splitlines())) if number == 6 else text, "come back changed"),
        (lambda number, text: "" if number == 6 else text, "cut, loops, or is none"),
    ],
)
def test_one_wrong_list_of_one_pass_fails_with_its_cause(change: Change, why: str) -> None:
    found = judged(change)
    copy = found["fidelity.copy"]
    assert copy.status is Status.FAIL and copy.found.startswith("11/12 exact") and why in copy.why and copy.fix
    assert copy.evidence[0].startswith("list 2, pass 2: ")
    assert found["fidelity.repeat"].status is Status.FAIL, "another pass copied it rightly"


def test_bytes_that_change_at_a_repeat_are_seen_though_every_copy_is_exact() -> None:
    found = judged(lambda number, text: text + "\n" if number > 8 else text)
    assert found["fidelity.copy"].status is Status.OK
    assert found["fidelity.repeat"].status is Status.FAIL and "4 of 4 lists" in found["fidelity.repeat"].summary
    drafted = judged(lambda number, text: text + "\n" if number > 8 else text, drafter=True)
    assert drafted["fidelity.repeat"].status is Status.WARN


def test_a_pack_trained_on_single_identifiers_is_asked_for_those_and_it_is_said() -> None:
    lists = copylists.lists_of(CANARIES, True, 3, 5)
    assert CANARIES.copies is not None and lists == [(item,) for item in CANARIES.copies.identifiers[:3]]

    def answer(request: Request) -> Script:
        said = request.body["messages"][0]["content"].rpartition(": ")[2]
        return [whole({"choices": [{"message": {"content": said}, "finish_reason": "stop"}]})]

    with ScriptedServer(answer) as server:
        done = copylists.ask(EngineClient(server.url), PROFILE, CANARIES, lists, 2, lambda text: None)
    found = copylists.findings(done, drafter=False)[0]
    assert found.status is Status.OK and "6/6 exact (3 lists x 1 ids x 2 passes), single identifiers" in found.summary


def test_no_list_is_no_test() -> None:
    assert [item.status for item in copylists.findings([], drafter=False)] == [Status.SKIP]
