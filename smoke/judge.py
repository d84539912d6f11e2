"""Judges: is an answer right, and if not, what is the likely cause. Pure; no judge ever asks a server."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ds41ctl.adapters.http import printable
from smoke.answer import Answer

PARSER_FIX = (
    "start the engine with --enable-auto-tool-choice --tool-call-parser deepseek_v41 "
    "--reasoning-parser deepseek_v41 (profile: serve.argv), then ds41ctl serve --replace",
)
MIN_DECODE_WINDOW_S = 0.1  # below it the clock and the socket decide, not the engine
_SHOWN = 80  # characters of an answer in a finding


@dataclass(frozen=True, slots=True)
class Verdict:
    """Outcome of a judge. `found` is one line; `why` and `fix` are set when the answer is wrong."""

    ok: bool
    found: str
    why: str = ""
    fix: tuple[str, ...] = ()


def quote(text: str) -> str:
    """An answer as one short quoted line."""
    return f"`{printable(text.strip(), _SHOWN)}`" if text.strip() else "an empty text"


# numbers

# Atomic and possessive groups, so that `391e2` or `3910` cannot give up characters until `391` fits.
_NUMBER = re.compile(r"(?<![\w.,])[-−]?(?>[0-9](?:,?[0-9])*+)(?:\.[0-9]++)?+(?![\w%])")
_DENIED = re.compile(
    r"(?:\b(?:not|never|cannot|isn't|isn’t)(?:\s+(?:be|equal|to|exactly|is|the|number|answer))*|≠|!=)"
    r"[\s*_`$\"'(]*\Z",
    re.IGNORECASE,
)


def says_number(text: str, expected: int, prompt: str = "") -> bool:
    """True when `text` answers with the number `expected`, on its own.

    `391`, `391.`, `**391**` and `17 * 23 = 391` are right; `3910`, `1391`, `39 1`, `391.5`, `-391` and
    "not 391" are wrong, and so is an answer that ends on another number, unless all others are in `prompt`.
    """
    asked = {_value(match) for match in _NUMBER.finditer(prompt)}
    matches = list(_NUMBER.finditer(text))
    hits = [match for match in matches if _value(match) == expected]
    if not hits or any(_DENIED.search(text[max(0, match.start() - 80) : match.start()]) for match in hits):
        return False
    others = {_value(match) for match in matches} - asked - {float(expected)}
    return _value(matches[-1]) == expected or not others


def _value(match: re.Match[str]) -> float:
    return float(match.group().replace(",", "").replace("−", "-"))


# texts

_MARKUP = re.compile(r"</?｜[^｜\n]{1,40}｜[^>\n]{0,80}>|</?\|?DSML\|?|</?think>|｜DSML｜")
_FENCE = re.compile(r"\A\s*(`{3,})[^\n`]*\n(?P<body>.*?)\n?[ \t]*\1\s*\Z", re.DOTALL)


def leaked_markup(content: str) -> str:
    """The model's own markup that a parser should have taken out of `content`; '' when there is none."""
    match = _MARKUP.search(content)
    return match.group() if match else ""


def says_words(text: str, expected: str) -> bool:
    """True when every word of `expected` stands as a word in `text`, in any order and case."""
    said = set(re.findall(r"\w+", text.lower()))
    wanted = re.findall(r"\w+", expected.lower())
    return bool(wanted) and all(word in said for word in wanted)


def without_fence(text: str) -> str:
    """`text` with \\n line ends, without blanks at line ends and without a code fence around it."""
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n")]
    body = "\n".join(lines)
    fenced = _FENCE.match(body)
    if fenced:
        return fenced["body"].strip("\n")
    body = body.strip()
    inline = re.fullmatch(r"(`{1,2})([^`\n]+)\1", body)
    return inline.group(2) if inline else body


class Copy(StrEnum):
    """How an identifier came back."""

    EXACT = "exact"
    ESCAPED = "escaped"  # `\_`: kept, but written as markdown
    UNDERSCORES = "underscores lost"
    WRONG = "wrong"


def judge_copy(identifier: str, text: str) -> Copy:
    """How `identifier` came back in `text`; only code fence and line ends are forgiven."""
    if len(text) > len(identifier) + 1000:
        return Copy.WRONG  # nothing of that length is the identifier in a fence
    got = without_fence(text)
    if got == identifier:
        return Copy.EXACT
    if got.replace("\\_", "_") == identifier:
        return Copy.ESCAPED
    if _bare(got) == _bare(identifier) and got.count("_") < identifier.count("_"):
        return Copy.UNDERSCORES
    return Copy.WRONG


def _bare(text: str) -> str:
    return re.sub(r"[_\s]", "", text)


def loops(text: str) -> bool:
    """True when `text` runs in a loop: its end repeats one unit, or its words hardly vary.

    The end: the last 400 characters, and at least 8 periods, repeat a unit of at most 200 characters. The
    words: of 200 or more, under a tenth of the groups of four are distinct. Differing table rows are no loop.
    """
    for period in range(1, 201):
        window = max(400, 8 * period)
        if len(text) < window:
            break
        tail = text[-window:]
        if tail[period:] == tail[:-period]:
            return True
    words = text.split()
    if len(words) < 200:
        return False
    groups = [tuple(words[i : i + 4]) for i in range(len(words) - 3)]
    return len(set(groups)) < len(groups) / 10


# answers


def unusable(answer: Answer, *, max_tokens: int) -> Verdict | None:
    """Verdict on an answer no test can use: empty, raw markup, endless loop, cut. None if usable."""
    if answer.choices == 0:
        return Verdict(False, "no choices", "the server answered HTTP 200 without a completion", ("ds41ctl logs",))
    said = f"{answer.completion_tokens} tokens" if answer.completion_tokens is not None else "no usage"
    if answer.silent and answer.finish_reason != "length":
        why = "silent empty: HTTP 200, but the engine produced nothing"
        return Verdict(False, f"an empty answer ({said}, finish {answer.finish_reason})", why, ("ds41ctl logs",))
    markup = leaked_markup(answer.content)
    if markup:
        why = "a parser is missing or does not match the model: its markup reached the content"
        return Verdict(False, f"raw markup `{printable(markup, 40)}` in the content", why, PARSER_FIX)
    if loops(answer.content) or loops(answer.reasoning):
        why = "the model repeats itself without end: wrong weights, kernels or sampling"
        return Verdict(False, "an endless loop", why, ("ds41ctl fetch --verify", "ds41ctl logs"))
    if answer.finish_reason == "length":
        where = "reasoning" if answer.reasoning and not answer.content else "answer"
        found = f"cut by max_tokens {max_tokens} in the {where} ({said})"
        if where == "reasoning":
            why = "the thinking used up max_tokens before an answer came"
            fix = (
                "if thinking was not asked for: --default-chat-template-kwargs '{\"thinking\": false}' "
                "(profile: serve.argv)",
            )
            return Verdict(False, found, why, fix)
        return Verdict(False, found, "the answer should have been short and ended by itself", ("ds41ctl logs",))
    return None


def judge_number(answer: Answer, expected: int, prompt: str) -> Verdict:
    """Verdict on an answer whose content must be the number `expected`."""
    if says_number(answer.content, expected, prompt):
        return Verdict(True, quote(answer.content))
    if not answer.content and answer.reasoning:
        why = "the whole answer went to the reasoning field: the reasoning parser takes content for thinking"
        return Verdict(False, f"no content, {len(answer.reasoning)} characters of reasoning", why, PARSER_FIX)
    why = "weights, kernels or the chat template are wrong: this model gets it right"
    return Verdict(False, quote(answer.content), why, ("ds41ctl fetch --verify", "ds41ctl engine verify"))


def judge_thinking(answer: Answer, expected: int, prompt: str) -> Verdict:
    """Verdict on a thinking answer: the reasoning in its own field, the number in the content."""
    if not answer.reasoning:
        why = "no reasoning field: the reasoning parser is missing, or thinking was not passed to the template"
        return Verdict(False, f"no reasoning; content {quote(answer.content)}", why, PARSER_FIX)
    verdict = judge_number(answer, expected, prompt)
    size = f"{len(answer.reasoning)} characters in `{answer.reasoning_field}`"
    return Verdict(verdict.ok, f"{verdict.found}, {size}", verdict.why, verdict.fix)


def judge_tool(answer: Answer, name: str, arguments: Mapping[str, Any]) -> Verdict:
    """Verdict on what must be one call of `name` with `arguments` and finish_reason tool_calls."""
    why, fix = "clients would run the wrong tool, or none", ("ds41ctl fetch --verify", *PARSER_FIX)
    calls = answer.tool_calls
    if not calls:
        if answer.finish_reason == "tool_calls":
            return Verdict(False, "finish_reason tool_calls without a call", "the tool parser lost it", PARSER_FIX)
        return Verdict(False, f"no call; content {quote(answer.content)}", why, fix)
    if len(calls) > 1:
        return Verdict(False, f"{len(calls)} calls: {printable(', '.join(c.name for c in calls))}", why, fix)
    call = calls[0]
    if call.name != name:
        return Verdict(False, f"a call of `{printable(call.name, 40)}`", why, fix)
    if not isinstance(call.arguments, str):
        kind = type(call.arguments).__name__
        return Verdict(False, f"arguments are a JSON {kind}, not a text", "the tool parser is broken", PARSER_FIX)
    try:
        parsed = json.loads(call.arguments)
    except (ValueError, RecursionError):
        why = "the arguments were cut or garbled; clients cannot parse them"
        return Verdict(False, f"arguments are not JSON: {quote(call.arguments)}", why, fix)
    if parsed != dict(arguments):
        return Verdict(False, f"{name}({printable(call.arguments, _SHOWN)})", why, fix)
    if answer.finish_reason != "tool_calls":
        why = "agents wait for finish_reason tool_calls before they run a tool"
        return Verdict(False, f"the right call, but finish_reason {answer.finish_reason}", why, PARSER_FIX)
    return Verdict(True, f"{name}({printable(call.arguments, _SHOWN)}), finish_reason tool_calls")


def judge_follow_up(answer: Answer, expect: str) -> Verdict:
    """Verdict on the turn after a tool result: a sentence that uses it, and no second call."""
    if answer.tool_calls:
        why = "the model calls again instead of answering: the tool result did not reach its prompt"
        return Verdict(False, f"another call of `{printable(answer.tool_calls[0].name, 40)}`", why, PARSER_FIX)
    if expect.lower() in answer.content.lower():
        return Verdict(True, quote(answer.content))
    why = "the tool result did not reach the model, or it cannot use it"
    return Verdict(False, quote(answer.content), why, ("ds41ctl engine verify", "ds41ctl logs"))


def judge_copies(identifiers: Sequence[str], texts: Sequence[str]) -> Verdict:
    """Verdict on the copies of all identifiers. The only test that sees a missing Engram, so it says so."""
    kinds = [judge_copy(want, got) for want, got in zip(identifiers, texts, strict=True)]
    exact = kinds.count(Copy.EXACT)
    score = f"{exact}/{len(kinds)} exact"
    if exact == len(kinds):
        return Verdict(True, score)
    # the telling example first: a lost underscore says more than any other mistake
    worst = next((k for k in (Copy.UNDERSCORES, Copy.WRONG) if k in kinds), Copy.ESCAPED)
    at = kinds.index(worst)
    found = f"{score}; `{identifiers[at]}` came back as {quote(without_fence(texts[at]))}"
    if worst is Copy.UNDERSCORES:
        why = (
            "identifiers lose their underscores: the Engram tables are not (or wrongly) loaded; "
            "speed and arithmetic do not show it"
        )
        return Verdict(False, found, why, ("ds41ctl engram verify", "ds41ctl engram build", "ds41ctl serve --replace"))
    if worst is Copy.ESCAPED:
        why = "underscores are kept but escaped as markdown: a matter of style, the Engram is not the cause"
        return Verdict(False, found, why, ("no action for the engine; ask for a code block in your prompts",))
    why = "identifiers come back changed: damaged Engram rows, damaged weights or a wrong kernel"
    return Verdict(False, found, why, ("ds41ctl engram verify", "ds41ctl fetch --verify", "ds41ctl engine verify"))


def judge_images(answers: Sequence[Answer], expected: Sequence[str], without: Answer) -> Verdict:
    """Verdict on the answers about several pictures, and on the same question asked `without` a picture."""
    for position, (answer, words) in enumerate(zip(answers, expected, strict=True)):
        tokens, plain = answer.prompt_tokens, without.prompt_tokens
        if tokens is not None and plain is not None and tokens <= plain:
            found = f"{tokens} prompt tokens with picture {position + 1}, {plain} without"
            why = "the server drops the picture without a word: the model never sees it"
            return Verdict(False, found, why, ("ds41ctl engine verify", "ds41ctl logs"))
        if not says_words(answer.content, words):
            found = f"picture {position + 1} is `{printable(words, 40)}`, the answer is {quote(answer.content)}"
            same = any(other.content == answer.content for other in answers if other is not answer)
            why = (
                "the pictures are not told apart: the vision tower is not loaded or not used"
                if same
                else "the picture reaches the model changed: wrong vision weights or preprocessing"
            )
            return Verdict(False, found, why, ("ds41ctl fetch --verify", "ds41ctl engine verify"))
    if any(says_words(without.content, words) for words in expected):
        why = "the answer does not need the picture, so it proves nothing about vision"
        return Verdict(False, f"the right answer without a picture: {quote(without.content)}", why, ("ds41ctl logs",))
    shown = ", ".join(quote(answer.content) for answer in answers)
    return Verdict(True, shown)


def judge_picture_tokens(answers: Sequence[Answer], without: Answer, most: int) -> Verdict | None:
    """Verdict on how much a prompt grows by a picture: `answers` have one each, `without` none, the question is the
    same. None: the server does not count prompt tokens."""
    grown = [
        answer.prompt_tokens - without.prompt_tokens
        for answer in answers
        if answer.prompt_tokens is not None and without.prompt_tokens is not None
    ]
    if not grown or len(grown) < len(answers):
        return None
    why = "the encoder's limit is not kept: pictures fill the context, and a prompt with many of them is refused"
    found = f"{max(grown)} prompt tokens for the largest picture"
    return Verdict(max(grown) <= most, found, why, ("ds41ctl engine verify", "ds41ctl fetch --verify"))


def judge_repeats(answers: Sequence[Answer]) -> Verdict:
    """Verdict on answers to one request at temperature 0, which must be identical."""
    texts = [answer.reasoning + answer.content for answer in answers]
    different = list(dict.fromkeys(texts))
    if len(different) == 1:
        return Verdict(True, f"{len(texts)} identical: {quote(texts[0])}")
    first, second = different[:2]
    same = min(len(first), len(second))
    at = next((i for i in range(same) if first[i] != second[i]), same)
    found = f"{len(different)} different answers of {len(texts)}, from character {at + 1} on"
    why = "greedy decoding does not repeat: a race in a kernel, stale cache rows, or others in the batch"
    return Verdict(False, found, why, ("stop other clients, then: ds41ctl smoke --only smoke.repeat", "ds41ctl logs"))


def decode_rate(answer: Answer) -> tuple[float | None, str]:
    """Streamed decode rate, tokens/s, and on what it rests; None with the reason when it cannot be told.

    Tokens come from the server's usage, never from counting events: a drafter puts several in one event.
    The window runs from the first event that says something to the final one.
    """
    total = answer.completion_tokens
    if total is None:
        return None, "the server sent no usage, and events are not tokens"
    if answer.first_s is None or answer.final_s is None:
        return None, f"nothing was streamed ({total} tokens)"
    window = answer.final_s - answer.first_s
    tokens = total - (answer.first_tokens or 1)
    if window < MIN_DECODE_WINDOW_S or tokens < 1:
        return None, f"{total} tokens within {window * 1000:.0f} ms are too few to measure"
    return tokens / window, f"{tokens} tokens in {window:.2f} s"
