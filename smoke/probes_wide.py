"""Wider probes (levels full and thorough): forced tools, stop texts, batches, the prefix cache, several pictures."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from ds41ctl.adapters.http import printable
from ds41ctl.core.finding import Finding, Status
from smoke import judge
from smoke.answer import Answer
from smoke.judge import Verdict
from smoke.probes import CHAT, Message, Session, judged, no_canary, picture_part, skipped, unknown
from smoke.prompts import Prompts

BATCH = 4  # requests at once, or as many as the profile serves
CACHED_MIN = 0.5  # of a prompt that was sent a moment ago


def tool_forced(s: Session) -> Finding:
    """A tool that the client forces is called with right arguments, whole and streamed, by name and as `required`."""
    test, canary = "smoke.tool-forced", s.canaries.tool
    if canary is None:
        return no_canary(test, "tool")
    named = {"type": "function", "function": {"name": canary.name}}
    wanted = json.dumps(canary.arguments, ensure_ascii=False)
    expected = f"{canary.name}({wanted}) by name and as required, whole and streamed"
    for choice, label in ((named, "by name"), ("required", "as required")):
        for ask, how in ((s.chat, "whole"), (s.streamed, "streamed")):
            answer = ask(canary.prompt, 256, tools=list(canary.tools), tool_choice=choice)
            if answer.finish_reason == "stop" and answer.tool_calls:
                answer = replace(answer, finish_reason="tool_calls")  # what the API says of a call forced by name
            verdict = judge.unusable(answer, max_tokens=256) or judge.judge_tool(answer, canary.name, canary.arguments)
            if not verdict.ok:
                return judged(test, verdict, expected=expected, wrong=f"{label}, {how}")
    return judged(test, Verdict(True, f"{canary.name}({wanted}), four ways"), expected=expected)


def stop(s: Session) -> Finding:
    """A stop text ends the answer before it, and is not part of it."""
    test = "smoke.stop"
    whole = s.chat(s.canaries.hello.prompt, 24).content
    text = whole.strip()
    if len(text) < 5:
        return unknown(test, f"the answer {judge.quote(whole)} is too short to be stopped", ("ds41ctl logs",))
    word = text[len(text) // 2 : len(text) // 2 + 2]
    wanted = whole[: whole.index(word)]
    answer = s.chat(s.canaries.hello.prompt, 24, stop=[word])
    expected = f"{judge.quote(wanted)} and finish_reason stop, for the stop text `{printable(word, 10)}`"
    good = answer.content == wanted and answer.finish_reason == "stop"
    why = "stop texts do not end an answer: agents that rely on them read on into the next turn"
    found = f"{judge.quote(answer.content)}, finish_reason {answer.finish_reason}"
    return judged(test, Verdict(good, found, why, ("ds41ctl engine verify",)), expected=expected)


def batch(s: Session) -> Finding:
    """The same requests, alone and together: a neighbour in the batch must not change an answer."""
    test, size = "smoke.batch", min(BATCH, s.profile.serve.max_num_seqs)
    if size < 2:
        return skipped(test, "the profile serves one request at a time")
    prompts = [s.canaries.hello.prompt]
    if s.canaries.arithmetic is not None:
        prompts.append(s.canaries.arithmetic.prompt)
    if s.canaries.copies is not None:
        prompts += [s.canaries.copies.prompt(item) for item in s.canaries.copies.identifiers]
    prompts = (prompts * size)[:size]
    alone = [s.chat(prompt, 32).content for prompt in prompts]
    with ThreadPoolExecutor(size) as pool:
        together = [answer.content for answer in pool.map(lambda prompt: s.chat(prompt, 32), prompts)]
    expected = f"{size} answers as when asked alone"
    different = [(a, b) for a, b in zip(alone, together, strict=True) if a != b]
    if not different:
        return judged(test, Verdict(True, f"{size} of {size} the same"), expected=expected)
    found = f"{len(different)} of {size} differ: {judge.quote(different[0][0])} became {judge.quote(different[0][1])}"
    return Finding(
        id=test,
        status=Status.FAIL if s.profile.smoke.batch_exact else Status.WARN,
        summary=found,
        expected=expected,
        found=found,
        why="sums change with the number of rows (kernels picked by batch size), or rows of two requests mix",
        fix=("ds41ctl smoke --only smoke.repeat", "ds41ctl smoke --only smoke.copy"),
    )


def prefix_cache(s: Session) -> Finding:
    """A text never sent before is not in the cache; sent again it is, and the answer stays the same; and what follows
    it for several steps more is computed behind the hit (a hit inside a prefill of several steps ended an engine).
    """
    test = "smoke.prefix-cache"
    expected = f"0 cached tokens first, over {CACHED_MIN:.0%} of the prompt the second time"
    step, longest = s.profile.serve.max_num_batched_tokens or 0, s.profile.serve.max_model_len // 3
    prompts = Prompts(secrets.randbits(31))
    text = prompts.filler(min(max(600, 2 * step), longest))
    caching = s.metrics().prefix_caching
    first, cached_first = _cached(s, text)
    second, cached_second = _cached(s, text)
    s.chat(f"{text}\n{prompts.filler(min(max(600, 2 * step), longest))}", 8)
    if cached_first is None or cached_second is None or first.prompt_tokens is None:
        flag = ("start the engine with --enable-prompt-tokens-details (profile: serve.argv)",)
        return unknown(test, "nobody counts cached tokens: neither usage nor /metrics", flag)
    found = f"{cached_first:.0f}, then {cached_second:.0f} of {first.prompt_tokens} tokens"
    fix: tuple[str, ...] = ("ds41ctl engine verify", "ds41ctl logs")
    if cached_first > (1 - CACHED_MIN) * first.prompt_tokens:
        why = "a text nobody sent counts as cached: prefill speeds measured here are not cold, or rows are mixed up"
        return judged(test, Verdict(False, found, why, fix), expected=expected, wrong="the cache knows too much")
    if first.content != second.content and not s.may_draft:
        shown = f"{judge.quote(first.content)}, then {judge.quote(second.content)}"
        why = "rows from the cache differ from computed ones: answers change with what was asked before"
        return judged(test, Verdict(False, shown, why, fix), expected="the same answer from the cache")
    if caching is False:
        return judged(test, Verdict(True, f"off, and nothing is cached ({found})"), expected=expected)
    if cached_second < CACHED_MIN * first.prompt_tokens:
        why = "agents send their whole history each turn: without the cache all of it is read again"
        fix = ("start the engine with --enable-prefix-caching (profile: serve.argv)", "ds41ctl logs")
        return judged(test, Verdict(False, found, why, fix), expected=expected, wrong="no hit")
    return judged(test, Verdict(True, found), expected=expected)


def _cached(s: Session, text: str) -> tuple[Answer, float | None]:
    before = s.metrics()
    answer = s.chat(text, 8)
    if answer.cached_tokens is not None:
        return answer, float(answer.cached_tokens)
    after = s.metrics()
    for name in ("cached", "prefix_hits"):
        a, b = getattr(before, name), getattr(after, name)
        if a is not None and b is not None:
            return answer, float(b - a)
    return answer, None


def images_many(s: Session) -> Finding:
    """Several pictures in one prompt and one inside a tool result reach the model; one beyond the limit is refused."""
    test = "smoke.images-many"
    if not s.profile.smoke.images:
        return skipped(test, "the profile serves text only (smoke.images false)")
    pictures, tool = s.canaries.images, s.canaries.tool
    if len(pictures) < 2 or tool is None:
        return no_canary(test, "images (two of them) and tool")
    expected = "each picture adds its prompt tokens, in a prompt and in a tool result"
    question = {"type": "text", "text": pictures[0].question}
    counts = [_tokens(s, [*(picture_part(item) for item in pictures[:n]), question]) for n in (0, 1, 2)]
    in_result = [_tokens_of_result(s, parts) for parts in ([], [picture_part(pictures[0])])]
    if any(count is None for count in (*counts, *in_result)):
        return unknown(test, "the server counts no prompt tokens", ("ds41ctl logs",))
    one, two = (counts[1] or 0) - (counts[0] or 0), (counts[2] or 0) - (counts[1] or 0)
    result = (in_result[1] or 0) - (in_result[0] or 0)
    found = f"first picture +{one} tokens, second +{two}, in a tool result +{result}"
    if min(one, two, result) <= 0:
        why = "a picture is dropped without a word: the model answers as if it had seen it"
        return judged(test, Verdict(False, found, why, ("ds41ctl engine verify", "ds41ctl logs")), expected=expected)
    limit = s.profile.smoke.image_limit
    if limit is None:
        return judged(test, Verdict(True, f"{found}; no limit in the profile"), expected=expected)
    content = [*([picture_part(pictures[0])] * (limit + 1)), question]
    reply = s.client.post_json(CHAT, s.body([{"role": "user", "content": content}], 8, {}), s.limits(120))
    if reply.status != 400:
        why = f"the limit of {limit} pictures is not kept: one client can use up the memory for pictures"
        shown = f"HTTP {reply.status} for {limit + 1} pictures"
        fix = (f"--limit-mm-per-prompt '{{\"image\": {limit}}}' (profile: serve.argv)",)
        return judged(test, Verdict(False, shown, why, fix), expected=f"HTTP 400 beyond {limit} pictures")
    return judged(test, Verdict(True, f"{found}; {limit + 1} refused"), expected=expected)


def _tokens(s: Session, content: Sequence[Mapping[str, Any]]) -> int | None:
    return s.chat([{"role": "user", "content": list(content)}], 1).prompt_tokens


def _tokens_of_result(s: Session, parts: Sequence[Mapping[str, Any]]) -> int | None:
    tool = s.canaries.tool
    assert tool is not None  # noqa: S101 - the caller looked
    function = {"name": tool.name, "arguments": json.dumps(tool.arguments, ensure_ascii=False)}
    messages: list[Message] = [
        {"role": "user", "content": tool.prompt},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call_smoke_2", "type": "function", "function": function}],
        },
        {
            "role": "tool",
            "tool_call_id": "call_smoke_2",
            "content": [*parts, {"type": "text", "text": "see the picture"}],
        },
    ]
    return s.chat(messages, 1, tools=list(tool.tools)).prompt_tokens
