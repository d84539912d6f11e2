"""Drafter: is the first draft of a step accepted, in a chat, on code? What a blind drafter costs no text shows.

Drafts that are never accepted change no answer and no error count, only the speed. They were seen to be blind for the
first hundred steps of every chat and of nothing else (build log: the attention-sink tokens at the start of a chat
overflowed the drafter's fp16 taps, first-draft acceptance on code was 0.49 instead of 0.90), so what is asked here are
short answers to chat requests, each a conversation of its own.
"""

from __future__ import annotations

import secrets

from ds41ctl.core.finding import Finding, Status
from smoke.probes import Session, skipped, unknown
from smoke.prompts import Prompts

TEST = "smoke.drafter"
CHATS, TOKENS = 4, 64  # answers, and tokens of each: fewer steps than the hundred that were seen to be blind
FEWEST_DRAFTS = 30  # steps that drafted; below it a share says little
BLIND = 0.05  # share of accepted first drafts below which nothing the drafter says is used

FIX = (
    "ds41ctl engine verify",
    "ds41ctl serve --no-dspark --replace   # plain decode until it is mended",
    "ds41ctl logs",
)
BLIND_WHY = (
    "the drafter is blind at the start of a chat: NaN in its taps (fp16 overflow at the first tokens), or a wrong KV "
    "group; it costs time and gives none"
)
WEAK_WHY = "the drafter guesses far worse than a sound one does on code: NaN taps, or KV rows that are not its own"


def drafter(s: Session) -> Finding:
    """First drafts of code in fresh chats, by the growth of the engine's own counters by position."""
    state = s.drafts()
    if state is False or (state is None and not s.profile.drafter):
        return skipped(TEST, "the engine has no drafter, or was started without it")
    before = s.metrics()
    prompts = Prompts(secrets.randbits(31))
    made = 0
    for _ in range(CHATS):
        made += s.chat(prompts.code(), TOKENS, ignore_eos=True).completion_tokens or 0
    after = s.metrics()
    known = (before.drafts, before.first_accepted, after.drafts, after.first_accepted)
    if any(value is None for value in known):
        return unknown(
            TEST,
            "the engine does not count accepted drafts by position (vllm:spec_decode_num_accepted_tokens_per_pos)",
            ("curl -s URL/metrics | grep spec_decode", "ds41ctl status"),
        )
    if before.generated is not None and after.generated is not None and after.generated - before.generated > made + 2:
        others = after.generated - before.generated - made
        return unknown(TEST, f"another client made {others:.0f} tokens meanwhile", ("stop it, and ask again",))
    drafts, accepted = ((b or 0.0) - (a or 0.0) for a, b in zip(known[:2], known[2:], strict=True))
    return judge(drafts, accepted, s.profile.soak.first_acceptance_min)


def judge(drafts: float, accepted: float, floor: float | None, *, test: str = TEST) -> Finding:
    """Finding of `drafts` steps that drafted, of which `accepted` had their first draft accepted. `floor`: least share,
    None when the profile states none: then only a blind drafter is a fault."""
    expected = f"the first draft of a step accepted in at least {BLIND if floor is None else floor:.0%} of the steps"
    if drafts <= 0:
        why = "the engine was started with a drafter, and it drafts nothing"
        return _bad(test, "no token was drafted", expected, why)
    share = accepted / drafts
    found = f"first draft accepted in {share:.0%} of {drafts:.0f} steps"
    if drafts < FEWEST_DRAFTS:
        return unknown(test, f"{found}: too few to tell", (f"ds41ctl smoke --only {TEST}",))
    if share < BLIND:
        return _bad(test, found, expected, BLIND_WHY)
    if floor is None:
        note = f"{found}; the profile has no floor (soak.first_acceptance_min)"
        return Finding(id=test, status=Status.OK, summary=note, expected=expected, found=found)
    if share < floor:
        return _bad(test, found, expected, WEAK_WHY)
    return Finding(id=test, status=Status.OK, summary=found, expected=expected, found=found)


def _bad(test: str, found: str, expected: str, why: str) -> Finding:
    return Finding(id=test, status=Status.FAIL, summary=found, expected=expected, found=found, why=why, fix=FIX)
