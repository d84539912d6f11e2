"""Every probe against a fake engine: passing, and each way of failing, over real loopback sockets."""

from __future__ import annotations

import base64
import re
import socket
import struct
import time
from dataclasses import replace
from typing import Any

import pytest

import smoke
from ds41ctl.adapters.http import EngineClient
from ds41ctl.core.errors import ConfigError
from ds41ctl.core.finding import Finding, Status
from smoke import judge, probes
from smoke.canaries import Canaries, generate
from tests.fakes.profiles import least_profile
from tests.fakes.sse_server import (
    DONE,
    HTML,
    Act,
    FakeEngine,
    Quirk,
    Say,
    ScriptedServer,
    but,
    event,
    instead,
    stream_head,
    whole,
)

CANARIES = generate(7, copies=20, needle_tokens=300, images=6)
DEAD = {"error": {"message": "EngineCore encountered an issue", "code": 500}}


def run(
    quirks: dict[str, Quirk] | None = None,
    *,
    only: tuple[str, ...] = (),
    canaries: Canaries = CANARIES,
    deadline_s: float = 20.0,
    level: smoke.Level = "quick",
    model: str = "deepseek-v4.1-flash",
    **smoke_values: Any,
) -> dict[str, Finding]:
    engine = FakeEngine(canaries, model=model, quirks=quirks or {})
    with ScriptedServer(engine) as server:
        findings = smoke.run(
            EngineClient(server.url),
            canaries,
            least_profile(**smoke_values),
            level=level,
            only=only,
            deadline_s=deadline_s,
        )
    for finding in findings:
        check_form(finding)
    return {finding.id: finding for finding in findings}


def check_form(finding: Finding) -> None:
    """What holds of every finding: one line, a fix when something is wrong, no crash."""
    assert finding.summary and "\n" not in finding.summary
    assert finding.status is not Status.CRASH, finding.summary
    assert finding.seconds is not None
    if finding.status in (Status.FAIL, Status.WARN):
        assert finding.why and finding.fix and finding.expected and finding.found
    if finding.status is Status.UNKNOWN:
        assert finding.fix


def one(test: str, quirk: Quirk | None = None, intent: str = "", **values: Any) -> Finding:
    """The finding of one test, with one quirk."""
    quirks = {intent or test.removeprefix("smoke."): quirk} if quirk else None
    return run(quirks, only=(test,), **values)[test]


@pytest.mark.parametrize("level", smoke.LEVELS)
def test_a_healthy_engine_passes_everything(level: smoke.Level) -> None:
    findings = run(level=level)
    included = smoke.LEVELS[: smoke.LEVELS.index(level) + 1]
    assert list(findings) == [test.id for test in smoke.TESTS if test.level in included]
    assert len(findings) == {"quick": 12, "full": 18, "thorough": 18}[level]
    drafter = findings.pop("smoke.drafter", None)
    assert drafter is None or drafter.status is Status.SKIP
    assert {finding.status for finding in findings.values()} == {Status.OK}, findings


def test_requests_are_greedy_bounded_and_think_only_when_asked() -> None:
    engine = FakeEngine(CANARIES)
    with ScriptedServer(engine) as server:
        smoke.run(EngineClient(server.url), CANARIES, least_profile())
        bodies = [r.body for r in server.requests if r.body and r.body["max_tokens"] > 0]
    assert len(bodies) > 25
    for body in bodies:
        assert body["temperature"] == 0 and 1 <= body["max_tokens"] <= 512
        assert body["model"] == "deepseek-v4.1-flash"
    thinking = [body for body in bodies if "chat_template_kwargs" in body]
    assert [body["chat_template_kwargs"] for body in thinking] == [{"thinking": True}]


# health


@pytest.mark.parametrize(
    ("intent", "quirk", "status", "text"),
    [
        ("health", instead(HTML), Status.FAIL, "another service"),
        ("models", instead(HTML), Status.FAIL, "another service"),
        ("health", instead(whole({"error": "loading"}, status=503)), Status.FAIL, "503"),
        ("health", instead(Act.RESET), Status.FAIL, "reset"),
        ("models", instead(whole({"data": [{"id": "llama"}]})), Status.FAIL, "another model is served: llama"),
        ("models", instead(whole({"detail": "Not Found"}, status=404)), Status.FAIL, "another service"),
        ("models", instead(whole(b"hello", content_type="text/plain")), Status.FAIL, "another service"),
        ("models", instead(whole({"data": "x"})), Status.FAIL, "another model is served: none"),
        ("models", instead(whole({"error": "Unauthorized"}, status=401)), Status.UNKNOWN, "wants a key"),
        ("hello", instead(whole({"error": "Unauthorized"}, status=401)), Status.UNKNOWN, "wants a key"),
        ("hello", but(content="", completion_tokens=0), Status.FAIL, "0 tokens"),
        ("hello", but(choices=False), Status.FAIL, "0 tokens"),
        ("hello", instead(whole(DEAD, status=500)), Status.FAIL, "EngineCore encountered an issue"),
        ("hello", instead(whole(DEAD)), Status.FAIL, "EngineCore encountered an issue"),
        ("hello", instead(whole(b"<garbage>")), Status.FAIL, "not JSON"),
        ("hello", instead(whole({"choices": [7]})), Status.FAIL, "choices[0]: expected an object"),
        ("hello", instead(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"), Status.FAIL, "closed the connection"),
    ],
)
def test_health_sees(intent: str, quirk: Quirk, status: Status, text: str) -> None:
    finding = one("smoke.health", quirk, intent)
    assert finding.status is status
    assert text in finding.summary


def test_health_200_on_a_dead_engine() -> None:
    finding = one("smoke.health", instead(Act.HANG), "hello", deadline_s=1.5)
    assert finding.status is Status.FAIL
    assert "/health says 200, but no token flows" in finding.summary


def test_health_of_nobody() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    findings = smoke.run(EngineClient(f"http://127.0.0.1:{port}"), CANARIES, least_profile(), deadline_s=5)
    assert findings[0].status is Status.FAIL and "class: engine" in findings[0].evidence
    assert "ds41ctl serve" in findings[0].fix
    rest = findings[1:]
    assert len(rest) == 11
    assert {f.status for f in rest} == {Status.UNKNOWN}
    assert all("smoke.health did not pass" in f.summary for f in rest)


def test_an_engine_without_health_route_is_judged_by_its_token() -> None:
    assert one("smoke.health", instead(whole({"detail": "Not Found"}, status=404))).status is Status.OK


# answers


@pytest.mark.parametrize(
    ("test", "intent", "quirk", "text"),
    [
        ("arithmetic", "arithmetic", but(content="3910"), "`3910`"),
        ("arithmetic", "arithmetic", but(content="", completion_tokens=0), "an empty answer"),
        ("arithmetic", "arithmetic", but(content=None, reasoning="391"), "no content"),
        ("arithmetic", "arithmetic", but(content="391</think>391"), "raw markup"),
        ("arithmetic", "arithmetic", but(content=None, reasoning="hm", finish="length"), "in the reasoning"),
        ("arithmetic", "arithmetic", but(content="the " * 400, finish="length"), "endless loop"),
        ("thinking", "thinking", but(reasoning=""), "no reasoning"),
        ("thinking", "thinking", but(content="17*23...</think>391", reasoning=""), "raw markup `</think>`"),
        ("thinking", "thinking", but(content="390"), "`390`"),
        ("thinking", "thinking", but(content="", finish="length"), "no answer within max_tokens 2048"),
        ("thinking", "thinking", but(reasoning="the " * 400, content="", finish="length"), "endless loop"),
        ("tool-call", "tool", but(calls=(("get_weather", "{}"),)), "get_weather({})"),
        ("tool-call", "tool", but(calls=(("get_weather", {"city": "Toronto"}),)), "not a text"),
        ("tool-call", "tool", but(finish="stop"), "finish_reason stop"),
        ("tool-call", "tool", but(calls=(), content="Sunny.", finish="stop"), "no call; content `Sunny.`"),
        ("tool-call", "tool", but(calls=(), content="<｜DSML｜ calls>\n<｜DSML｜ invoke", finish="stop"), "raw markup"),
        ("tool-call", "tool", but(calls=(), content=None, finish="length"), "cut by max_tokens"),
        ("tool-stream", "tool-stream", but(calls=(("get_weather", '{"city": "Tor'),)), "not JSON"),
        ("tool-stream", "tool-stream", but(finish="stop"), "finish_reason stop"),
        ("tool-stream", "tool-stream", but(calls=(), finish="stop", completion_tokens=0), "an empty answer"),
        ("tool-stream", "tool-stream", but(choices=False), "no choices"),
        ("tool-follow-up", "follow-up", but(content="I cannot know."), "`I cannot know.`"),
        ("tool-follow-up", "follow-up", but(content=None, calls=(("get_weather", "{}"),)), "another call"),
        ("repeat", "hello", but(content="", completion_tokens=0), "an empty answer"),
        ("needle", "needle", but(content="000000"), "`000000`"),
        ("images", "image", but(content="red 5 green 6 blue"), "picture 1 is"),
        ("images", "image", but(prompt_tokens=20), "20 prompt tokens with picture 1, 20 without"),
        ("images", "no-image", but(content=CANARIES.images[1].answer), "without a picture"),
        ("decode", "decode", but(content="", completion_tokens=0), "0 tokens"),
        ("limits", "hello", but(finish="stop"), "finish_reason stop"),
        ("limits", "hello", but(completion_tokens=40), "after 40 tokens"),
        ("limits", "bad-request", instead(whole({"choices": []})), "HTTP 200"),
        ("limits", "bad-request", instead(whole(DEAD, status=500)), "EngineCore"),
    ],
)
def test_wrong_answers_fail_with_what_was_found(test: str, intent: str, quirk: Quirk, text: str) -> None:
    finding = one(f"smoke.{test}", quirk, intent)
    assert finding.status is Status.FAIL
    assert text in finding.summary, finding.summary


def test_the_other_reasoning_field_is_accepted_and_named() -> None:
    finding = one("smoke.thinking", but(reasoning_field="reasoning_content"))
    assert finding.status is Status.OK and "`reasoning_content`" in finding.summary


def test_thinking_by_default_is_a_warning() -> None:
    finding = one("smoke.arithmetic", but(reasoning="hm"))
    assert finding.status is Status.WARN
    assert "--default-chat-template-kwargs" in finding.fix[0]


def test_long_thinking_gets_more_tokens_before_it_fails() -> None:
    def quirk(say: Say, request: Any) -> Say:
        return replace(say, content="", finish="length") if request.body["max_tokens"] <= 512 else say

    assert one("smoke.thinking", quirk).status is Status.OK


def drop_underscores(wrong: int) -> Quirk:
    """The Engram seed's picture: so many of the copies lose their underscores, all else is right."""
    count = iter(range(10_000))
    return lambda say, request: (
        replace(say, content=say.content.replace("_", "")) if say.content and next(count) < wrong else say
    )


def test_a_missing_engram_is_seen_by_the_copy_test_alone() -> None:
    findings = run({"copy": drop_underscores(5)})
    assert [f.id for f in findings.values() if f.status is not Status.OK] == ["smoke.copy"]
    copy = findings["smoke.copy"]
    assert copy.status is Status.FAIL
    assert "15/20 exact; `" in copy.summary and "` came back as `" in copy.summary
    assert "the Engram tables are not (or wrongly) loaded" in copy.why
    assert copy.fix[0] == "ds41ctl engram verify"
    assert len(copy.evidence) == 5


def test_copies_escaped_as_markdown_are_a_warning() -> None:
    finding = one("smoke.copy", lambda say, _: replace(say, content=(say.content or "").replace("_", r"\_")))
    assert finding.status is Status.WARN and "Engram is not the cause" in finding.why


@pytest.mark.parametrize(
    ("quirk", "text"),
    [
        (but(content="", completion_tokens=0), "an empty answer"),
        (but(content="</think>x"), "raw markup"),
        (but(content="a " * 100), "0/20 exact"),
    ],
)
def test_copies_that_are_none(quirk: Quirk, text: str) -> None:
    finding = one("smoke.copy", quirk)
    assert finding.status is Status.FAIL and text in finding.summary


def test_fenced_copies_pass_and_the_profile_says_how_many() -> None:
    finding = one("smoke.copy", lambda say, _: replace(say, content=f"```\n{say.content}\n```"), copies=3)
    assert finding.status is Status.OK and finding.found == "3/3 exact"


def test_answers_that_change_are_not_repeatable() -> None:
    count = iter(range(100))
    finding = one("smoke.repeat", lambda say, _: replace(say, content=f"Hello {next(count) // 2}"), "hello")
    assert finding.status is Status.FAIL and "2 different answers of 3, from character 7 on" in finding.summary


@pytest.mark.parametrize(("quirk", "text"), [(but(prompt_tokens=200), "of 200 tokens"), (but(usage=False), "no usage")])
def test_a_short_needle_is_the_harness_fault(quirk: Quirk, text: str) -> None:
    finding = one("smoke.needle", quirk)
    assert finding.status is Status.UNKNOWN and text in finding.summary
    assert finding.evidence == ("class: harness",)


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ("deepseek is not a multimodal model", "text only"),
        ("At most 0 image(s) may be provided in one prompt.", "limit of images"),
        ("This model's maximum context length is 64 tokens.", "longer than the engine's context"),
    ],
)
def test_a_refused_image_names_its_cause(message: str, why: str) -> None:
    finding = one("smoke.images", instead(whole({"error": {"message": message}}, status=400)), "image")
    assert finding.status is Status.FAIL and why in finding.why


def test_a_missing_tool_parser_names_its_flags() -> None:
    text = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
    finding = one("smoke.tool-call", instead(whole({"error": {"message": text}}, status=400)), "tool")
    assert finding.status is Status.FAIL and "--tool-call-parser deepseek_v41" in finding.fix[0]


# decode


def test_the_decode_rate_is_the_engines_pace_not_its_events() -> None:
    def drafter(say: Say, request: Any) -> Say:
        return replace(say, pieces=max(1, say.completion_tokens // 4), pause=0.04)

    finding = one("smoke.decode", drafter)
    found = re.fullmatch(r"([\d.]+) tok/s \((\d+) tokens in ([\d.]+) s\)", finding.found)
    assert finding.status is Status.OK and found
    rate, tokens, window = map(float, found.groups())
    assert tokens == 60  # 16 events of 4 tokens, less the first; 15 by counting events
    assert rate == pytest.approx(tokens / window, rel=0.05)
    assert "nothing to compare with" in finding.summary


def rows(**published: float) -> dict[str, Any]:
    """[bench] with these figures for one stream."""
    return {"published": {f"decode.{suite}.c1": value for suite, value in published.items()}}


def test_a_slow_decode_is_a_warning_and_a_fast_one_ok() -> None:
    assert one("smoke.decode", bench=rows(code=1e6)).status is Status.WARN
    finding = one("smoke.decode", bench=rows(code=1.0))
    assert finding.status is Status.OK and "of the published 1 for code" in finding.summary


def asked_for(bench: dict[str, Any], **values: Any) -> tuple[Finding, list[str]]:
    """smoke.decode on a profile with a drafter, and what it asked to be written at length."""
    profile = least_profile(drafter=True, bench=bench)
    with ScriptedServer(FakeEngine(CANARIES)) as server:
        found = smoke.run(EngineClient(server.url), CANARIES, profile, only=("decode",), deadline_s=20, **values)[0]
        bodies = [request.body for request in server.requests if request.body.get("max_tokens", 0) > 8]
    check_form(found)
    return found, [str(body["messages"][0]["content"]) for body in bodies]


def test_decode_is_measured_on_the_kind_of_text_that_has_a_figure() -> None:
    found, texts = asked_for(rows(code=1.0), drafter=True)
    assert found.status is Status.OK and "Python module" in texts[0] and "for code, drafter on" in found.summary
    found, texts = asked_for(rows(prose=1e6), drafter=True)
    assert found.status is Status.WARN and "lighthouse keeper who finds" in texts[0] and "for prose" in found.summary


def test_without_its_drafter_an_engine_is_compared_with_the_figure_of_plain_decode() -> None:
    both = {**rows(code=1e6), "published_plain": {"decode.code.c1": 1.0}}
    assert asked_for(both, drafter=True)[0].status is Status.WARN
    found, _ = asked_for(both, drafter=False)
    assert found.status is Status.OK and "of the published 1 for code, drafter off" in found.summary
    slow = {**rows(code=1.0), "published_plain": {"decode.code.c1": 1e6}}
    assert asked_for(slow, drafter=False)[0].status is Status.WARN


def test_without_a_figure_for_the_setting_decode_is_measured_and_said_not_to_be_judged() -> None:
    found, _ = asked_for(rows(code=1e6), drafter=False)
    assert found.status is Status.OK and "no figure is published for it, drafter off" in found.summary


def test_an_engine_of_unknown_drafter_setting_is_not_judged_unless_its_counters_tell() -> None:
    found, _ = asked_for(rows(code=1.0), drafter=None)
    assert found.status is Status.UNKNOWN and "nobody knows whether the drafter is on" in found.summary
    quirks = {"metrics": spec_page(0, 0)}
    with ScriptedServer(FakeEngine(CANARIES, quirks=quirks)) as server:
        profile = least_profile(drafter=True, bench=rows(code=1.0))
        found = smoke.run(EngineClient(server.url), CANARIES, profile, only=("decode",))[0]
    assert found.status is Status.OK and "drafter on" in found.summary


# drafter


def spec_page(drafts: float, first: float, *, made: float | None = None) -> Quirk:
    """/metrics of an engine that drafts: each reading finds `drafts` more steps, `first` of them with a good first
    draft, and `made` more tokens."""
    count = {"n": 0}

    def quirk(say: Say, request: Any) -> list[Any]:
        n = count["n"] = count["n"] + 1
        values = {"num_drafts": drafts, "num_draft_tokens": 5 * drafts, "num_accepted_tokens": 2 * first}
        text = "".join(f'vllm:spec_decode_{k}_total{{engine="0"}} {v * n}\n' for k, v in values.items())
        if made is not None:
            text += f'vllm:generation_tokens_total{{engine="0"}} {made * n}\n'
        for position, share in enumerate((1.0, 0.5, 0.2)):
            text += (
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="{position}"}} '
                f"{first * share * n}\n"
            )
        return [whole(text.encode(), content_type="text/plain")]

    return quirk


DRAFTED = {"drafter": True, "soak": {"first_acceptance_min": 0.7}}


@pytest.mark.parametrize(
    ("drafts", "first", "status", "text", "why"),
    [
        (200, 180, Status.OK, "90% of 200 steps", ""),
        (200, 98, Status.FAIL, "49% of 200 steps", "far worse than a sound one"),
        (250, 0, Status.FAIL, "0% of 250 steps", "blind at the start of a chat: NaN in its taps"),
        (0, 0, Status.FAIL, "no token was drafted", "drafts nothing"),
        (20, 18, Status.UNKNOWN, "too few", ""),
    ],
)
def test_first_drafts_of_code_in_a_chat_are_judged_by_the_engines_counters(
    drafts: float, first: float, status: Status, text: str, why: str
) -> None:
    finding = one("smoke.drafter", spec_page(drafts, first), "metrics", **DRAFTED)
    assert finding.status is status and text in finding.summary and why in finding.why


def test_a_drafter_is_asked_for_code_in_chats_of_its_own_that_end_before_the_blind_steps_do() -> None:
    with ScriptedServer(FakeEngine(CANARIES, quirks={"metrics": spec_page(200, 180)})) as server:
        smoke.run(EngineClient(server.url), CANARIES, least_profile(**DRAFTED), only=("drafter",))
        bodies = [request.body for request in server.requests if request.body]
    assert len({str(body["messages"]) for body in bodies}) == len(bodies) == 4
    for body in bodies:
        assert body["max_tokens"] < 100 and len(body["messages"]) == 1 and "Python" in body["messages"][0]["content"]


def test_without_a_floor_only_a_blind_drafter_is_a_fault() -> None:
    weak = one("smoke.drafter", spec_page(200, 98), "metrics", drafter=True)
    assert weak.status is Status.OK and "no floor" in weak.summary
    assert one("smoke.drafter", spec_page(200, 2), "metrics", drafter=True).status is Status.FAIL


def test_a_drafter_that_nobody_counts_is_unknown_and_one_that_is_off_is_skipped() -> None:
    finding = one("smoke.drafter", **DRAFTED)
    assert finding.status is Status.UNKNOWN and "by position" in finding.summary
    assert one("smoke.drafter").status is Status.SKIP
    with ScriptedServer(FakeEngine(CANARIES)) as server:
        client, profile = EngineClient(server.url), least_profile(**DRAFTED)
        found = smoke.run(client, CANARIES, profile, only=("drafter",), drafter=False)[0]
        assert found.status is Status.SKIP and not [item for item in server.requests if item.body]


def test_drafts_of_another_client_are_not_taken_for_ours() -> None:
    finding = one("smoke.drafter", spec_page(200, 180, made=500), "metrics", **DRAFTED)
    assert finding.status is Status.UNKNOWN and "another client" in finding.summary
    assert one("smoke.drafter", spec_page(200, 180, made=20), "metrics", **DRAFTED).status is Status.OK


# how much of the prompt a picture takes


def test_a_picture_that_takes_more_of_the_prompt_than_it_may_is_a_failure() -> None:
    assert "64 prompt tokens for the largest picture" in one("smoke.images", image_tokens_max=1024).summary
    finding = one("smoke.images", but(prompt_tokens=20 + 1500), "image", image_tokens_max=1024)
    assert (
        finding.status is Status.FAIL and "1500 prompt tokens" in finding.summary and "fill the context" in finding.why
    )
    finding = one("smoke.images", but(usage=False), "no-image", image_tokens_max=1024)
    assert finding.status is Status.UNKNOWN and "counts no prompt tokens" in finding.summary


def test_a_large_picture_is_what_shows_the_limit() -> None:
    def by_size(say: Say, request: Any) -> Say:
        url = request.body["messages"][-1]["content"][0]["image_url"]["url"]
        side = struct.unpack(">I", base64.b64decode(url.partition(",")[2])[16:20])[0]
        return replace(say, prompt_tokens=20 + (side // 28) ** 2)

    assert one("smoke.images", by_size, "image", image_tokens_max=1024).status is Status.OK
    finding = one("smoke.images", by_size, "image", level="full", image_tokens_max=1024)
    assert finding.status is Status.FAIL and f"{73 * 73} prompt tokens" in finding.summary


@pytest.mark.parametrize(
    ("quirk", "text"), [(but(usage=False), "no usage"), (but(pause=0.0, pieces=2), "too few to measure")]
)
def test_no_rate_rather_than_a_wrong_one(quirk: Quirk, text: str) -> None:
    finding = one("smoke.decode", quirk)
    assert finding.status is Status.UNKNOWN and text in finding.summary


# faults are not wrong answers

HI = event({"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": None}]})


@pytest.mark.parametrize(
    ("quirk", "fault"),
    [
        (instead(stream_head(), HI, event(DEAD)), "error-event"),
        (instead(stream_head(), HI, Act.RESET), "reset"),
        (instead(stream_head(), HI, b"data: {"), "cut"),
        (instead(stream_head(), HI), "no-done"),
        (instead(stream_head(), event("{no}"), DONE), "bad-json"),
        (instead(stream_head(), event({"choices": [{"delta": {"content": 1}}]}), DONE), "bad-json"),
        (instead(whole(DEAD, status=503)), "status"),
        (instead(HTML), "other-service"),
    ],
)
def test_a_broken_stream_is_an_engine_failure(quirk: Quirk, fault: str) -> None:
    finding = one("smoke.tool-stream", quirk)
    assert finding.status is Status.FAIL
    assert "not a wrong answer" in finding.summary
    assert finding.evidence[:2] == ("class: engine", f"fault: {fault}")


def test_a_timeout_is_unknown_and_the_rest_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "REQUEST_S", 0.3)
    monkeypatch.setattr(smoke, "_ALIVE_S", 0.3)
    hang = instead(Act.HANG)
    began = time.monotonic()
    names = ("arithmetic", "repeat", "limits")
    findings = run({"arithmetic": hang, "hello": hang}, only=names, deadline_s=10)
    assert time.monotonic() - began < 6
    first, *rest = findings.values()
    assert first.status is Status.UNKNOWN and first.evidence[0] == "class: harness"
    assert all("stopped answering in smoke.arithmetic" in f.summary for f in rest)
    assert {f.status for f in rest} == {Status.UNKNOWN}


def test_one_slow_test_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "REQUEST_S", 1.0)
    findings = run({"arithmetic": instead(Act.HANG)}, only=("arithmetic", "repeat"), deadline_s=10)
    assert findings["smoke.arithmetic"].status is Status.UNKNOWN
    assert findings["smoke.repeat"].status is Status.OK


def test_the_deadline_holds_and_leaves_unknowns() -> None:
    began = time.monotonic()
    findings = run({"thinking": instead(Act.HANG)}, deadline_s=2.0)
    assert time.monotonic() - began < 6
    statuses = [finding.status for finding in findings.values()]
    assert statuses[:2] == [Status.OK, Status.OK]
    assert set(statuses[2:]) == {Status.UNKNOWN}
    assert "time limit of 2 s" in findings["smoke.limits"].summary


def test_a_bug_in_a_probe_is_a_crash_finding_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("boom\n")

    monkeypatch.setattr(judge, "judge_number", broken)
    with ScriptedServer(FakeEngine(CANARIES)) as server:
        findings = smoke.run(EngineClient(server.url), CANARIES, least_profile(), only=("arithmetic", "limits"))
    assert [f.status for f in findings] == [Status.CRASH, Status.OK]
    assert "RuntimeError: boom" in findings[0].summary and "\n" not in findings[0].summary


# profile, canaries, selection


def test_what_the_profile_excludes_is_skipped() -> None:
    findings = run(only=("images", "needle"), images=False, needle_tokens=0)
    assert {f.status for f in findings.values()} == {Status.SKIP}
    assert CANARIES.arithmetic is not None
    plain = CANARIES.model_copy(update={"arithmetic": CANARIES.arithmetic.model_copy(update={"thinking": False})})
    assert one("smoke.thinking", canaries=plain).status is Status.SKIP


def test_missing_canaries_are_unknown_never_ok() -> None:
    bare = Canaries(hello=CANARIES.hello)
    findings = run(canaries=bare)
    unknown = {name for name, finding in findings.items() if finding.status is Status.UNKNOWN}
    asked = ("arithmetic", "thinking", "tool-call", "tool-stream", "tool-follow-up", "copy", "needle", "images")
    assert unknown == {f"smoke.{name}" for name in asked}


def test_only_takes_short_names_keeps_the_order_and_calls_back() -> None:
    seen: list[str] = []
    with ScriptedServer(FakeEngine(CANARIES)) as server:
        client = EngineClient(server.url)
        smoke.run(
            client,
            CANARIES,
            least_profile(),
            only=("smoke.limits", "arithmetic"),
            on_finding=lambda f: seen.append(f.id),
        )
        assert seen == ["smoke.arithmetic", "smoke.limits"]
        with pytest.raises(ConfigError, match=r"did you mean smoke\.copy") as caught:
            smoke.run(client, CANARIES, least_profile(), only=("copi",))
    assert "smoke.health" in caught.value.hints[0]


def test_ids_are_unique_and_the_table_tells_them() -> None:
    ids = [test.id for test in smoke.TESTS]
    assert len(set(ids)) == len(ids) == 18
    assert [row[0] for row in smoke.table()] == ids
    assert all(level.split(";")[0] in smoke.LEVELS and proves for _, level, proves in smoke.table())


# the wider tests


def test_a_forced_tool_may_end_with_stop_and_must_have_its_arguments() -> None:
    assert one("smoke.tool-forced", but(finish="stop")).status is Status.OK
    finding = one("smoke.tool-forced", but(calls=(("get_weather", "{}"),)))
    assert finding.status is Status.FAIL and "by name, whole" in finding.summary
    finding = one("smoke.tool-forced", but(calls=(), content="It is sunny.", finish="stop"))
    assert finding.status is Status.FAIL and "no call" in finding.summary


def test_a_stop_text_that_is_ignored_or_kept_is_a_failure() -> None:
    for text in ("Hello! Hello! Hello! ", "Hello! Hel"):
        finding = one("smoke.stop", but(content=text))
        assert finding.status is Status.FAIL and "stop texts do not end" in finding.why


class Neighbours:
    """Requests that run at the same time; the answer changes when there is another one."""

    def __init__(self) -> None:
        self.open = 0

    def __call__(self, say: Say, request: Any) -> Say:
        self.open += 1
        time.sleep(0.15)
        crowded = self.open > 1
        self.open -= 1
        return replace(say, content="flipped") if crowded else say


def test_an_answer_that_changes_in_a_batch_is_a_warning_or_a_failure_by_profile() -> None:
    finding = run({"copy": Neighbours(), "hello": Neighbours()}, only=("batch",))["smoke.batch"]
    assert finding.status is Status.WARN and "differ" in finding.summary
    finding = run({"copy": Neighbours()}, only=("batch",), batch_exact=True)["smoke.batch"]
    assert finding.status is Status.FAIL


def cache_page(**rows: float) -> Quirk:
    calls = {"n": 0}

    def quirk(say: Say, request: Any) -> list[Any]:
        calls["n"] += 1
        text = "".join(f'vllm:{k}{{engine="0"}} {v * ((calls["n"] + 1) // 2)}\n' for k, v in rows.items())
        return [whole(text.encode(), content_type="text/plain")]

    return quirk


def test_the_prefix_cache_must_hit_what_was_sent_and_nothing_else() -> None:
    fine = one("smoke.prefix-cache")
    assert fine.status is Status.OK and "0, then 20 of 20" in fine.summary
    fakes = one("smoke.prefix-cache", cache_page(prompt_tokens_cached_total=20), "metrics")
    assert fakes.status is Status.FAIL and "knows too much" in fakes.summary
    dead = one("smoke.prefix-cache", cache_page(prompt_tokens_cached_total=0), "metrics")
    assert dead.status is Status.FAIL and "no hit" in dead.summary
    unseen = one("smoke.prefix-cache", instead(whole(b"", status=404)), "metrics")
    assert unseen.status is Status.UNKNOWN and "nobody counts" in unseen.summary


def test_an_answer_that_changes_with_the_cache_is_a_failure() -> None:
    seen: list[str] = []

    def stale(say: Say, request: Any) -> Say:
        text = str(request.body["messages"])
        seen.append(text)
        return replace(say, content="stale") if seen.count(text) > 1 else say

    finding = one("smoke.prefix-cache", stale, "copy")
    assert finding.status is Status.FAIL and "answers change" in finding.why


def test_pictures_that_are_dropped_or_not_limited_are_failures() -> None:
    def only_one(say: Say, request: Any) -> Say:
        return replace(say, prompt_tokens=min(say.prompt_tokens, 84))

    finding = one("smoke.images-many", only_one, "image")
    assert finding.status is Status.FAIL and "second +0" in finding.summary
    finding = one("smoke.images-many", but(prompt_tokens=20), "follow-up")
    assert finding.status is Status.FAIL and "in a tool result +0" in finding.summary
    finding = one("smoke.images-many", instead(whole({"choices": []})), "bad-request")
    assert finding.status is Status.FAIL and "HTTP 200 for 65 pictures" in finding.summary


def test_with_a_drafter_repeats_that_differ_are_a_warning() -> None:
    count = {"n": 0}

    def drift(say: Say, request: Any) -> Say:
        count["n"] += 1
        return replace(say, content=f"answer {count['n']}")

    drafted = least_profile(drafter=True)
    for wanted, tested, started_with in (
        (Status.FAIL, least_profile(), None),
        (Status.WARN, drafted, None),
        (Status.WARN, drafted, True),
        (Status.FAIL, drafted, False),
    ):
        with ScriptedServer(FakeEngine(CANARIES, quirks={"hello": drift})) as server:
            found = smoke.run(EngineClient(server.url), CANARIES, tested, only=("repeat",), drafter=started_with)
        assert found[0].status is wanted


def test_thorough_copies_every_identifier_three_times() -> None:
    engine = FakeEngine(CANARIES)
    with ScriptedServer(engine) as server:
        found = smoke.run(EngineClient(server.url), CANARIES, least_profile(copies=5), level="thorough", only=("copy",))
    assert found[0].summary == "60/60 exact"


def test_bad_requests_of_every_kind_are_tried_at_level_full() -> None:
    assert "5 bad requests refused" in one("smoke.limits", level="full").summary
    finding = one("smoke.limits", instead(whole({"choices": []})), "other-model", level="full")
    assert finding.status is Status.FAIL and "HTTP 200 for a model that is not served" in finding.summary
