"""Probes: one function a test. Each asks the running server and returns one Finding.

A fault of the connection or the engine is told apart from a wrong answer: time-outs are `unknown` (the limit
may be too short), other faults are failures of the engine; both carry `class:` and `fault:` as evidence.
"""

from __future__ import annotations

import base64
import json
import secrets
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ds41ctl.adapters import metrics
from ds41ctl.adapters.http import TIMEOUTS, EngineClient, Fault, HttpFault, Limits, printable
from ds41ctl.adapters.metrics import EngineMetrics
from ds41ctl.core.finding import Finding, Status
from ds41ctl.core.profile import Profile
from smoke import judge
from smoke.answer import Answer, from_body, from_chunks
from smoke.canaries import Canaries, Image, Needle
from smoke.judge import Verdict
from smoke.png import plain_square
from smoke.prompts import Prompts

Level = Literal["quick", "full", "thorough"]
LEVELS: tuple[Level, ...] = ("quick", "full", "thorough")
Message = Mapping[str, Any]

CHAT = "/v1/chat/completions"
REQUEST_S = 120.0  # bound of one request; the run's own deadline cuts it further
DECODE_TOLERANCE = 0.8  # of the expected rate; below it the finding is a warning
NEEDLE_LENGTH_MIN = 0.97  # of the length asked for, in prompt tokens
THOROUGH_PASSES = 3  # of all copies
IMAGE_QUESTIONS = 6  # as seed 000 asks
LARGE_PICTURE = 2048  # pixels a side: more than any encoder takes as it is
DECODE_SUITES = ("code", "structured", "prose")  # the first of them that has a published figure is asked for
KEY_FIX = "give smoke the key the engine was started with (VLLM_API_KEY)"


class OutOfTimeError(Exception):
    """The run's deadline has come before this request was sent."""


@dataclass(frozen=True)
class Session:
    """What a probe works with. `deadline` is on the monotonic clock; `spent` gets the tokens of each answer; `drafter`:
    the engine was started with it, without it, or (None) nobody knows."""

    client: EngineClient
    canaries: Canaries
    profile: Profile
    level: Level
    deadline: float
    spent: list[int] = field(default_factory=list)
    drafter: bool | None = None

    @property
    def model(self) -> str:
        """Served model name."""
        return self.profile.model.served_name

    @property
    def may_draft(self) -> bool:
        """True unless the engine is known to run without a drafter, or its profile has none."""
        return self.profile.drafter if self.drafter is None else self.drafter

    def metrics(self) -> EngineMetrics:
        """The engine's own counters; all unknown when it does not give them. Raises OutOfTimeError."""
        try:
            reply = self.client.get("/metrics", Limits(total_s=10).within(self.left()))
        except HttpFault:
            return EngineMetrics()
        return metrics.parse(reply.body.decode(errors="replace")) if reply.status == 200 else EngineMetrics()

    def drafts(self) -> bool | None:
        """Whether the engine drafts: how it was started, else its own counters. None: neither says so."""
        if self.drafter is not None:
            return self.drafter
        return True if self.metrics().drafted is not None else None

    def left(self) -> float:
        """Seconds left. Raises OutOfTimeError when none are."""
        seconds = self.deadline - time.monotonic()
        if seconds <= 0:
            raise OutOfTimeError
        return seconds

    def limits(self, total_s: float | None = None) -> Limits:
        """Bounds of the next request: `total_s` (default REQUEST_S), and never past the deadline."""
        total_s = REQUEST_S if total_s is None else total_s
        bounds = Limits(first_s=total_s, idle_s=60.0, total_s=total_s, max_bytes=8 * 1024 * 1024)
        return bounds.within(self.left())

    def body(self, messages: str | Sequence[Message], max_tokens: int, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Request body: temperature 0, always bounded."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        fixed = {"model": self.model, "messages": list(messages), "max_tokens": max_tokens, "temperature": 0}
        return {**fixed, **extra}

    def chat(
        self, messages: str | Sequence[Message], max_tokens: int, *, total_s: float | None = None, **extra: Any
    ) -> Answer:
        """A whole completion. Raises HttpFault, OutOfTimeError."""
        limits = self.limits(total_s)
        body = self.body(messages, max_tokens, extra)
        return self._counted(from_body(self.client.post_json(CHAT, body, limits).ok_json()))

    def streamed(self, messages: str | Sequence[Message], max_tokens: int, **extra: Any) -> Answer:
        """A streamed completion, assembled. Raises HttpFault, OutOfTimeError."""
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = self.body(messages, max_tokens, {**extra, "stream": True, "stream_options": options})
        return self._counted(from_chunks(self.client.stream(CHAT, body, self.limits())))

    def _counted(self, answer: Answer) -> Answer:
        self.spent.append(answer.completion_tokens or 0)
        return answer


# what came of it, as findings


def judged(test: str, verdict: Verdict, *, expected: str, ok: str = "", wrong: str = "wrong answer") -> Finding:
    """Finding of a verdict. `ok` and `wrong` start the summary; what was found follows."""
    if verdict.ok:
        summary = f"{ok}: {verdict.found}" if ok else verdict.found
        return Finding(id=test, status=Status.OK, summary=summary, expected=expected, found=verdict.found)
    return Finding(
        id=test,
        status=Status.FAIL,
        summary=f"{wrong}: {verdict.found}",
        expected=expected,
        found=verdict.found,
        why=verdict.why,
        fix=verdict.fix,
    )


def skipped(test: str, reason: str) -> Finding:
    """The test does not apply to this profile."""
    return Finding(id=test, status=Status.SKIP, summary=reason)


def unknown(test: str, reason: str, fix: Sequence[str]) -> Finding:
    """The test could not be made."""
    return Finding(id=test, status=Status.UNKNOWN, summary=reason, fix=tuple(fix))


def no_canary(test: str, part: str) -> Finding:
    """The canaries lack what this test asks."""
    return unknown(test, f"the canaries have no `{part}` part", ("profile: smoke.canaries",))


def faulted(test: str, fault: HttpFault) -> Finding:
    """Finding of a request that gave no answer: never confused with a wrong answer."""
    evidence: tuple[str, ...] = (f"fault: {fault.kind.value}",)
    if fault.seconds is not None:
        evidence = (*evidence, f"after {fault.seconds:.1f} s")
    if fault.kind in TIMEOUTS:
        return Finding(
            id=test,
            status=Status.UNKNOWN,
            summary=f"no answer to judge: {fault.message}",
            expected="an answer in time",
            found=fault.message,
            why="the engine is stuck or slower than the limit; this says nothing about its answers",
            fix=("ds41ctl status", "ds41ctl logs"),
            evidence=("class: harness", *evidence),
        )
    if fault.kind is Fault.STATUS and fault.status in (401, 403):
        return Finding(
            id=test,
            status=Status.UNKNOWN,
            summary=f"the engine is up and wants a key ({fault.message})",
            expected="an authorised request",
            found=fault.message,
            why="without the key nothing can be tested",
            fix=(KEY_FIX,),
            evidence=("class: harness", *evidence),
        )
    why, fix = _cause(fault)
    return Finding(
        id=test,
        status=Status.FAIL,
        summary=f"engine failure, not a wrong answer: {fault.message}",
        expected="HTTP 200 with a complete answer",
        found=fault.message,
        why=why,
        fix=fix,
        evidence=("class: engine", *evidence),
    )


def _cause(fault: HttpFault) -> tuple[str, tuple[str, ...]]:
    """Probable cause and fix of a fault that is not a time-out."""
    text = fault.message.lower()
    logs = "ds41ctl logs"
    if fault.kind is Fault.REFUSED:
        return "no engine listens there: it was not started, died, or binds another address", (
            "ds41ctl status",
            "ds41ctl serve",
        )
    if fault.kind is Fault.OTHER_SERVICE:
        return "another program holds the engine's port", (
            "stop it, or choose another port: DS41_PORT=8012 ds41ctl serve",
        )
    if fault.kind is Fault.STATUS and fault.status == 503:
        return "the engine process is dead or still loading behind its HTTP server", ("ds41ctl status", logs)
    if "multimodal" in text:
        return (
            "the engine serves the model as text only: a text-only build, or no vision config",
            ("ds41ctl engine verify",),
        )
    if "image(s) may be provided" in text:
        return "the engine was started with a lower limit of images", (
            "profile: serve.argv --limit-mm-per-prompt '{\"image\": 1}'",
            "ds41ctl serve --replace",
        )
    if "maximum context length" in text:
        return "the prompt is longer than the engine's context", (
            "profile: lower smoke.needle_tokens, or raise --max-model-len",
        )
    if "tool" in text and "parser" in text:
        return "the engine was started without a tool parser", judge.PARSER_FIX
    if fault.kind is Fault.STATUS and fault.status == 404 and "model" in text:
        return "the engine serves its model under another name", ("ds41ctl serve --replace",)
    if fault.kind is Fault.STATUS and fault.status is not None and fault.status < 500:
        return "the engine does not accept a request that its profile promises", (
            "ds41ctl engine verify",
            logs,
        )
    if fault.kind is Fault.ENCODING:
        return "something between here and the engine rewrites its answers", ("ask the engine itself, on loopback",)
    return "the engine broke off: a worker died or the server is broken", ("ds41ctl status", logs)


# the tests


def health(s: Session) -> Finding:
    """HTTP 200 is not enough (a dead engine may still say it): a token must flow, from the right model."""
    test, expected = "smoke.health", f"/health 200, model {s.model} served, one token produced"
    reply = s.client.get("/health", s.limits(10))
    if reply.status != 404:  # an engine behind a gateway may not show /health; the token below decides
        if reply.status != 200:
            reply.ok_json()
        if reply.body.strip() and reply.content_type == "text/html":
            reply.ok_json()
    served = _served(s)
    if s.model not in served:
        names = printable(", ".join(served)) or "none"
        return Finding(
            id=test,
            status=Status.FAIL,
            summary=f"another model is served: {names}",
            expected=expected,
            found=names,
            why="these tests would judge another model: wrong port, or --served-model-name differs",
            fix=("ds41ctl status", "ds41ctl serve --replace"),
        )
    began = time.monotonic()
    try:
        answer = s.chat(s.canaries.hello.prompt, 1, total_s=60)
    except HttpFault as fault:
        if fault.kind not in TIMEOUTS:
            raise
        return Finding(
            id=test,
            status=Status.FAIL,
            summary=f"/health says 200, but no token flows: {fault.message}",
            expected=expected,
            found=fault.message,
            why="the HTTP server lives, the engine behind it is dead or stuck",
            fix=("ds41ctl logs", "ds41ctl serve --replace"),
            evidence=("class: engine", f"fault: {fault.kind.value}"),
        )
    if answer.choices == 0 or answer.completion_tokens == 0:
        verdict = Verdict(False, "HTTP 200 with 0 tokens", "the engine produces nothing", ("ds41ctl logs",))
        return judged(test, verdict, expected=expected, wrong="silent empty")
    seconds = time.monotonic() - began
    return judged(test, Verdict(True, f"{s.model}, one token in {seconds:.2f} s"), expected=expected)


def _served(s: Session) -> list[str]:
    """Names of the models the server offers. Raises HttpFault OTHER_SERVICE when it is no OpenAI-compatible one."""
    try:
        data = s.client.get("/v1/models", s.limits(10)).ok_json().get("data")
    except HttpFault as fault:
        if fault.kind is not Fault.BAD_JSON and fault.status != 404:
            raise
        text = f"/v1/models gives no list of models ({fault.message}): another service holds this port"
        raise HttpFault(Fault.OTHER_SERVICE, text, status=fault.status, seconds=fault.seconds) from None
    items = data if isinstance(data, list) else []
    return [item["id"] for item in items if isinstance(item, dict) and isinstance(item.get("id"), str)]


def arithmetic(s: Session) -> Finding:
    """A short exact answer without thinking."""
    test, canary = "smoke.arithmetic", s.canaries.arithmetic
    if canary is None:
        return no_canary(test, "arithmetic")
    expected = str(canary.answer)
    answer = s.chat(canary.prompt, 64)
    verdict = judge.unusable(answer, max_tokens=64) or judge.judge_number(answer, canary.answer, canary.prompt)
    if verdict.ok and answer.reasoning:
        return Finding(
            id=test,
            status=Status.WARN,
            summary=f"right ({verdict.found}), but the model thinks without being asked",
            expected=f"{expected}, no reasoning",
            found=f"{len(answer.reasoning)} characters of reasoning",
            why="thinking is on by default: answers are slower and short max_tokens give nothing",
            fix=("profile: serve.argv --default-chat-template-kwargs '{\"thinking\": false}'",),
        )
    return judged(test, verdict, expected=expected)


def thinking(s: Session) -> Finding:
    """Reasoning arrives in its own field and the answer in content."""
    test, canary = "smoke.thinking", s.canaries.arithmetic
    if canary is None:
        return no_canary(test, "arithmetic")
    if not canary.thinking:
        return skipped(test, "this model was not trained to think")
    switch = {"thinking": True}
    max_tokens = 512
    began = time.monotonic()
    answer = s.chat(canary.prompt, max_tokens, chat_template_kwargs=switch)
    took = time.monotonic() - began
    if answer.finish_reason == "length" and not judge.loops(answer.reasoning) and s.left() > 8 * took:
        max_tokens *= 4  # a model that thinks long is not a broken one
        answer = s.chat(canary.prompt, max_tokens, chat_template_kwargs=switch)
    cut = answer.finish_reason == "length" and answer.reasoning and not answer.content
    if cut and not judge.loops(answer.reasoning):
        fix = ("ask again alone, with more time: ds41ctl smoke --only smoke.thinking", "ds41ctl logs")
        verdict = Verdict(
            False,
            f"no answer within max_tokens {max_tokens}",
            "thinking used up all tokens it was given",
            fix,
        )
    else:
        verdict = judge.unusable(answer, max_tokens=max_tokens) or judge.judge_thinking(
            answer, canary.answer, canary.prompt
        )
    return judged(test, verdict, expected=f"reasoning in its field, {canary.answer} in content")


def tool_call(s: Session) -> Finding:
    """The model calls the tool, and the parser turns its markup into an API tool call."""
    return _tool(s, "smoke.tool-call", stream=False)


def tool_stream(s: Session) -> Finding:
    """The same through a stream: argument pieces join to valid JSON."""
    return _tool(s, "smoke.tool-stream", stream=True)


def _tool(s: Session, test: str, *, stream: bool) -> Finding:
    canary = s.canaries.tool
    if canary is None:
        return no_canary(test, "tool")
    ask = s.streamed if stream else s.chat
    answer = ask(canary.prompt, 256, tools=list(canary.tools))
    verdict = judge.unusable(answer, max_tokens=256) or judge.judge_tool(answer, canary.name, canary.arguments)
    if verdict.ok and stream:
        verdict = Verdict(True, f"{verdict.found}, {answer.deltas} deltas")
    wanted = json.dumps(canary.arguments, ensure_ascii=False)
    return judged(test, verdict, expected=f"{canary.name}({wanted}), finish_reason tool_calls")


def tool_follow_up(s: Session) -> Finding:
    """A tool result reaches the model, which answers from it."""
    test, canary = "smoke.tool-follow-up", s.canaries.tool
    if canary is None or canary.follow_up is None:
        return no_canary(test, "tool.follow_up")
    function = {"name": canary.name, "arguments": json.dumps(canary.arguments, ensure_ascii=False)}
    call = {"id": "call_smoke_1", "type": "function", "function": function}
    messages: list[Message] = [
        {"role": "user", "content": canary.prompt},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_smoke_1", "content": canary.follow_up.result},
    ]
    answer = s.chat(messages, 128, tools=list(canary.tools))
    verdict = judge.unusable(answer, max_tokens=128) or judge.judge_follow_up(answer, canary.follow_up.expect)
    return judged(test, verdict, expected=f"a sentence with `{canary.follow_up.expect}`")


def copy(s: Session) -> Finding:
    """Identifiers come back exactly: the only test that sees a missing Engram."""
    test, canary = "smoke.copy", s.canaries.copies
    if canary is None:
        return no_canary(test, "copy")
    thorough = s.level == "thorough"
    identifiers = canary.identifiers if thorough else canary.identifiers[: s.profile.smoke.copies]
    identifiers *= THOROUGH_PASSES if thorough else 1
    texts = []
    for identifier in identifiers:
        max_tokens = len(identifier) + 16
        answer = s.chat(canary.prompt(identifier), max_tokens)
        if answer.choices == 0 or answer.silent or judge.leaked_markup(answer.content):
            bad = judge.unusable(answer, max_tokens=max_tokens)
            if bad is not None:
                return judged(test, bad, expected="a copy", wrong=f"no copy of `{identifier}`")
        texts.append(answer.content)
    verdict = judge.judge_copies(identifiers, texts)
    finding = judged(test, verdict, expected=f"{len(identifiers)}/{len(identifiers)} exact", wrong="copies differ")
    kinds = {judge.judge_copy(want, got) for want, got in zip(identifiers, texts, strict=True)}
    if kinds == {judge.Copy.EXACT, judge.Copy.ESCAPED} or kinds == {judge.Copy.ESCAPED}:
        return finding.model_copy(update={"status": Status.WARN})
    if finding.status is Status.FAIL:
        pairs = [
            f"{want} -> {judge.quote(judge.without_fence(got))}"
            for want, got in zip(identifiers, texts, strict=True)
            if judge.judge_copy(want, got) is not judge.Copy.EXACT
        ]
        return finding.model_copy(update={"evidence": tuple(pairs)})
    return finding


def repeat(s: Session) -> Finding:
    """The same request gives the same bytes at temperature 0."""
    test, times = "smoke.repeat", 3 if s.level == "quick" else 5
    answers = [s.chat(s.canaries.hello.prompt, 48) for _ in range(times)]
    expected = f"{times} identical answers"
    empty = next((a for a in answers if a.choices == 0 or a.silent), None)
    if empty is not None:
        bad = judge.unusable(empty, max_tokens=48)
        return judged(test, bad or Verdict(False, "an empty answer", "", ("ds41ctl logs",)), expected=expected)
    finding = judged(test, judge.judge_repeats(answers), expected=expected, wrong="not repeatable")
    if finding.status is Status.FAIL and s.may_draft:
        # accepted drafts change how many rows a step has, and with it the last bits of a sum
        return finding.model_copy(update={"status": Status.WARN})
    return finding


def needle(s: Session) -> Finding:
    """A fact in a long prompt is found: sparse attention selects the right rows."""
    test, wanted = "smoke.needle", s.profile.smoke.needle_tokens
    if wanted == 0:
        return skipped(test, "the profile has no needle (smoke.needle_tokens 0)")
    if not s.canaries.needle:
        return no_canary(test, "needle")
    asked = s.canaries.needle[: {"quick": 1, "full": 2, "thorough": None}[s.level]]
    lengths: list[int] = []
    for item in asked:
        answer = s.chat(item.message, 48)
        expected = f"`{item.answer}` from a prompt of at least {wanted} tokens"
        verdict = judge.unusable(answer, max_tokens=48) or _needle_verdict(item, answer)
        if not verdict.ok:
            return judged(test, verdict, expected=expected)
        length = answer.prompt_tokens
        if length is None or length < wanted * NEEDLE_LENGTH_MIN:
            shown = "of unknown length (no usage)" if length is None else f"of {length} tokens"
            finding = unknown(
                test,
                f"the answer is right, but the prompt was {shown}, wanted {wanted}",
                ("lengthen the needle's document, or lower smoke.needle_tokens in the profile",),
            )
            return finding.model_copy(update={"evidence": ("class: harness",)})
        lengths.append(length)
    found = f"{len(asked)} of {len(asked)} found, prompts of {', '.join(map(str, lengths))} tokens"
    return judged(test, Verdict(True, found), expected="every needle found")


def _needle_verdict(item: Needle, answer: Answer) -> Verdict:
    if judge.says_words(answer.content, item.answer):
        return Verdict(True, judge.quote(answer.content))
    why = "a fact far back is lost: sparse attention (indexer, compressor) or the KV cache is wrong"
    return Verdict(False, judge.quote(answer.content), why, ("ds41ctl engine verify", "ds41ctl logs"))


def images(s: Session) -> Finding:
    """Two pictures are told apart, and the answer needs the picture."""
    test = "smoke.images"
    if not s.profile.smoke.images:
        return skipped(test, "the profile serves text only (smoke.images false)")
    pictures = s.canaries.images
    if len(pictures) < 2:
        return no_canary(test, "images (two of them)")
    pictures = pictures[:2] if s.level == "quick" else pictures[:IMAGE_QUESTIONS]
    answers = []
    for picture in pictures:
        answer = s.chat([{"role": "user", "content": _picture_parts(picture)}], 64)
        bad = judge.unusable(answer, max_tokens=64)
        if bad is not None:
            return judged(test, bad, expected=picture.answer)
        answers.append(answer)
    without_question = pictures[0].question
    without = s.chat(without_question, 64)
    words = [picture.answer for picture in pictures]
    expected = " and ".join(f"`{word}`" for word in words)
    verdict = judge.judge_images(answers, words, without)
    most = s.profile.smoke.image_tokens_max
    if not verdict.ok or most is None:
        return judged(test, verdict, expected=expected)
    same = [answer for answer, picture in zip(answers, pictures, strict=True) if picture.question == without_question]
    if s.level != "quick":
        large = pictures[0].model_copy(update={"png": plain_square((20, 150, 50), LARGE_PICTURE)})
        same.append(s.chat([{"role": "user", "content": _picture_parts(large)}], 1))
    expected += f", at most {most} prompt tokens a picture"
    grown = judge.judge_picture_tokens(same, without, most)
    if grown is None:
        return unknown(test, "the pictures are told apart, but the server counts no prompt tokens", ("ds41ctl logs",))
    if grown.ok:
        grown = Verdict(True, f"{verdict.found}; {grown.found}")
    return judged(test, grown, expected=expected, wrong="a picture takes too much of the prompt")


def _picture_parts(picture: Image) -> list[dict[str, Any]]:
    return [picture_part(picture), {"type": "text", "text": picture.question}]


def picture_part(picture: Image) -> dict[str, Any]:
    """A picture as a part of a message, by data URL."""
    url = "data:image/png;base64," + base64.b64encode(picture.png).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def decode(s: Session) -> Finding:
    """Streamed decode rate by the server's own token count; the first request is a discarded warm-up.

    It is compared with the figure published for the same kind of text and the same setting of the drafter.
    """
    test, drafter = "smoke.decode", s.drafts()
    figures = s.profile.figures(drafter)
    suite = next((name for name in DECODE_SUITES if f"decode.{name}.c1" in figures), "")
    goal = figures.get(f"decode.{suite}.c1")
    setting = {True: ", drafter on", False: ", drafter off", None: ""}[drafter if s.profile.serve.dspark_argv else None]
    tokens, runs = (64, 1) if s.level == "quick" else (128, 3)
    expected = "a measured rate"
    if goal:
        expected = f"at least {goal * DECODE_TOLERANCE:.1f} tok/s (80 % of {goal:g}, published for {suite}{setting})"
    prompts = Prompts(secrets.randbits(31))
    s.streamed(s.canaries.hello.prompt, 8, ignore_eos=True)
    rates, basis = [], ""
    for _ in range(runs):
        text = getattr(prompts, suite)() if suite else s.canaries.hello.prompt
        answer = s.streamed(text, tokens, ignore_eos=True)
        if answer.choices == 0 or answer.completion_tokens == 0:
            verdict = Verdict(False, "0 tokens", "silent empty: HTTP 200, but no token came", ("ds41ctl logs",))
            return judged(test, verdict, expected=expected, wrong="nothing to measure")
        rate, basis = judge.decode_rate(answer)
        if rate is None:
            again = ("ds41ctl smoke --only smoke.decode --level full",)
            return unknown(test, f"no rate: {basis}", again).model_copy(update={"expected": expected})
        rates.append(rate)
    rate = statistics.median(rates)
    found = f"{rate:.1f} tok/s ({basis})" if runs == 1 else f"{rate:.1f} tok/s (median of {runs}; last {basis})"
    if goal is None:
        if drafter is None and (s.profile.bench.published or s.profile.bench.published_plain):
            reason = f"{found}, and nobody knows whether the drafter is on: no figure to compare with"
            return unknown(
                test, reason, ("ds41ctl serve --replace   # of an engine that was started here it is known",)
            )
        note = f"{found}; nothing to compare with: no figure is published for it{setting}"
        return Finding(id=test, status=Status.OK, summary=note, expected=expected, found=found)
    note = f"{found}, {rate / goal:.0%} of the published {goal:g} for {suite}{setting}"
    if rate < goal * DECODE_TOLERANCE:
        return Finding(
            id=test,
            status=Status.WARN,
            summary=note,
            expected=expected,
            found=found,
            why="clocks not locked, CUDA graphs off, a wrong NVLink group, or other requests in the batch",
            fix=("ds41ctl status", "nvidia-smi -q -d CLOCK,PERFORMANCE", "ds41ctl preflight"),
        )
    return Finding(id=test, status=Status.OK, summary=note, expected=expected, found=found)


def limits(s: Session) -> Finding:
    """max_tokens is kept, and a bad request is refused with HTTP 400 and a reason."""
    test, expected = "smoke.limits", "finish_reason length after 2 tokens; HTTP 400 for max_tokens -1"
    answer = s.chat(s.canaries.hello.prompt, 2, ignore_eos=True)
    if answer.finish_reason != "length" or answer.completion_tokens not in (None, 2):
        found = f"finish_reason {answer.finish_reason} after {answer.completion_tokens} tokens"
        verdict = Verdict(False, found, "max_tokens does not bound an answer: a loop would run on", ("ds41ctl logs",))
        return judged(test, verdict, expected=expected, wrong="max_tokens 2 is not kept")
    body = s.body(s.canaries.hello.prompt, -1, {})
    reply = s.client.post_json(CHAT, body, s.limits(30))
    if reply.status in (401, 403) or reply.status >= 500:
        reply.ok_json()
    if reply.status != 400:
        verdict = Verdict(
            False,
            f"HTTP {reply.status}",
            "clients cannot tell a bad request from a bad engine",
            ("ds41ctl logs",),
        )
        return judged(test, verdict, expected=expected, wrong="a bad request is not refused properly")
    reason = reply.error_text() or "no reason given"
    if s.level == "quick":
        return judged(test, Verdict(True, f"length kept; 400: {printable(reason, 60)}"), expected=expected)
    too_long = "long " * (2 * s.profile.serve.max_model_len)
    bad: tuple[tuple[str, dict[str, Any], int], ...] = (
        ("temperature -1", {"temperature": -1}, 400),
        ("a prompt beyond the context", {"messages": [{"role": "user", "content": too_long}]}, 400),
        ("tools that are no list", {"tools": "none"}, 400),
        ("a model that is not served", {"model": "no-such-model"}, 404),
    )
    for what, change, status in bad:
        reply = s.client.post_json(CHAT, {**s.body(s.canaries.hello.prompt, 2, {}), **change}, s.limits(60))
        if reply.status != status:
            why = "clients cannot tell a bad request from a bad engine"
            verdict = Verdict(False, f"HTTP {reply.status} for {what}", why, ("ds41ctl logs",))
            return judged(test, verdict, expected=f"HTTP {status} for {what}", wrong="not refused properly")
    return judged(test, Verdict(True, f"length kept; {1 + len(bad)} bad requests refused"), expected=expected)
