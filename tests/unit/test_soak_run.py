"""The runner of a soak against a fake engine over real sockets: what it records, and how it ends."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import pytest

from ds41ctl.core.errors import ConfigError, NoSpaceError
from ds41ctl.core.profile import Profile
from smoke import soak
from smoke.prompts import Prompts
from smoke.soak_judge import judge
from smoke.trace import End, Start, Trace, collect
from tests.fakes.profiles import least_profile
from tests.fakes.sse_server import Act, FakeEngine, Request, Say, Script, ScriptedServer, but, whole
from tests.unit.test_smoke import CANARIES

PLAN = soak.Plan(seconds=3, streams=2, sample_s=0.1, canary_s=1.0, seed=5)
SHORT = soak.Plan(seconds=1, streams=2, sample_s=0.1, canary_s=0.4, seed=5)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the fake engine needs long to settle."""
    monkeypatch.setattr(soak, "SETTLE_S", 0.3)
    monkeypatch.setattr(soak, "LIFE_PAUSE_S", 0.1)


def profile(**soak_values: Any) -> Profile:
    base = least_profile(gpus=0)
    values = {"answer_tokens": 32, "decode_retention_min": 0.2, "decode_retention_warn": 0.2, "ttft_ratio_max": 9.0}
    return base.model_copy(
        update={
            "soak": base.soak.model_copy(update={**values, **soak_values}),
            "serve": base.serve.model_copy(update={"max_model_len": 2048, "max_num_seqs": 2}),
        }
    )


def play(
    handler: Callable[[Request], Script], plan: soak.Plan = PLAN, *, full_after: int | None = None, **soak_values: Any
) -> tuple[Trace, BaseException | None]:
    """Trace of a run, and what it raised."""
    events: list[Any] = [Start(planned_s=plan.seconds, sample_s=plan.sample_s, identity_known=False, mode=plan.mode)]
    raised: BaseException | None = None

    def record(event: Any) -> None:
        events.append(event)
        if full_after is not None and len(events) > full_after:
            raise NoSpaceError("writing events.jsonl: no space left")

    with ScriptedServer(handler) as server:
        target = soak.Target(url=server.url, profile=profile(**soak_values), canaries=CANARIES)
        try:
            soak.run(target, plan, record, lambda text: None)
        except NoSpaceError as error:
            raised = error
    assert isinstance(events[-1], End) and sum(isinstance(item, End) for item in events) == 1
    return collect(events), raised


def healthy(**values: Any) -> FakeEngine:
    return FakeEngine(CANARIES, token_s=0.005, **values)


def test_a_healthy_engine_passes_everything_was_tried_and_sessions_grew_with_their_tool_results() -> None:
    seen: list[list[dict[str, Any]]] = []
    engine = healthy()

    def watch(request: Request) -> Script:
        if request.body.get("tools") and request.body.get("stream"):
            seen.append(request.body["messages"])
        return engine(request)

    trace, _ = play(watch)
    found = judge(trace, profile())
    # a busy machine may make three seconds too noisy for a verdict on speed; nothing else may be in doubt
    assert found.word != "fail" and set(found.reasons) <= {"soak.decode", "soak.ttft"}, found.reasons
    assert {turn.kind for turn in trace.turns} == {"session", "fresh", "cancel", "image"}
    grown = [turn.prompt_tokens for turn in trace.turns if turn.kind == "session"]
    assert len(grown) > 5 and max(turn.index for turn in trace.turns if turn.kind == "session") >= 3
    assert max(turn.streams for turn in trace.turns) == 2
    assert len({item.id for item in trace.canaries}) == 5
    assert any(item.loaded for item in trace.canaries) and any(not item.loaded for item in trace.canaries)
    assert len(trace.drains) >= 2 and trace.drains[-1].final
    assert len(trace.samples) > 10
    assert "soak.rss" in found.not_proved[-1]
    longest = max(seen, key=len)
    roles = [message["role"] for message in longest]
    assert roles[:4] == ["user", "assistant", "tool", "user"] and len(roles) >= 10
    assert longest[1]["tool_calls"][0]["id"] == longest[2]["tool_call_id"]
    sizes = sorted({len(str(messages)) for messages in seen})
    assert sizes[-1] > 4 * sizes[0]


def test_waves_send_eight_long_prompts_at_once_all_different() -> None:
    prompts: list[str] = []
    engine = healthy()

    def watch(request: Request) -> Script:
        if request.body.get("stream"):
            prompts.append(str(request.body["messages"][-1]["content"]))
        return engine(request)

    trace, _ = play(watch, soak.Plan(seconds=1, mode="waves", streams=2, sample_s=0.2, canary_s=0.5))
    waves = [turn for turn in trace.turns if turn.kind == "wave"]
    assert len(waves) >= 8 and max(turn.streams for turn in waves) == 8
    assert len(prompts) == len(set(prompts))


def later(seconds: float, script: Script, paths: tuple[str, ...] = ()) -> Callable[[Request], Script]:
    """A healthy engine that plays `script` instead (for `paths`, or all) after `seconds`."""
    engine, began = healthy(), time.monotonic()

    def handler(request: Request) -> Script:
        hit = not paths or request.path in paths
        return script if hit and time.monotonic() - began > seconds else engine(request)

    return handler


def test_an_engine_that_dies_ends_the_run_at_once_as_a_fail() -> None:
    began = time.monotonic()
    trace, _ = play(later(0.5, [Act.RESET]), soak.Plan(seconds=60, streams=2, sample_s=0.2, canary_s=20))
    assert time.monotonic() - began < 20
    assert trace.end is not None and trace.end.reason == "engine-died"
    found = judge(trace, profile())
    assert found.word == "fail" and "soak.complete" in found.reasons


def test_a_dead_engine_behind_a_living_server_is_a_fail_too() -> None:
    hung = later(0.5, [Act.HANG], ("/v1/chat/completions",))
    began = time.monotonic()
    trace, _ = play(hung, soak.Plan(seconds=60, streams=2, sample_s=0.2, canary_s=60), stall_s=0.5)
    assert time.monotonic() - began < 20
    assert trace.end is not None and trace.end.reason == "engine-died" and "no token flows" in trace.end.text
    assert "soak.complete" in judge(trace, profile()).reasons


def test_an_engine_that_refuses_everything_is_asked_ever_more_slowly_and_fails() -> None:
    refused = whole(b'{"error": "no"}', status=500)
    trace, _ = play(later(0.0, [refused], ("/v1/chat/completions",)), soak.Plan(seconds=3, streams=2, canary_s=60))
    asked = [turn for turn in trace.turns if turn.outcome != "ok"]
    assert 3 <= len(asked) < 40, "a second of it without a pause is hundreds"
    assert "soak.errors" in judge(trace, profile()).reasons


def test_silent_empty_answers_and_wrong_copies_fail() -> None:
    trace, _ = play(healthy(quirks={"decode": but(content="", completion_tokens=0, finish="stop")}), SHORT)
    assert "soak.silent-empty" in judge(trace, profile()).reasons
    dropped = but(content="kvcachedtype")
    trace, _ = play(healthy(quirks={"copy": dropped}), SHORT)
    assert judge(trace, profile()).reasons == ("soak.canaries",)


def test_kv_that_does_not_come_back_is_seen_at_the_drain() -> None:
    engine = healthy()

    def leaking(say: Say, request: Request) -> Script:
        page = engine.metrics_page(kv_cache_usage_perc=min(0.9, engine.generated / 4000))
        return [whole(page.encode(), content_type="text/plain")]

    engine.quirks["metrics"] = leaking
    trace, _ = play(engine, soak.Plan(seconds=2, streams=2, sample_s=0.2, canary_s=0.8))
    assert "soak.kv-idle" in judge(trace, profile()).reasons


def test_a_full_disk_ends_the_run_and_is_said() -> None:
    trace, raised = play(healthy(), full_after=12)
    assert isinstance(raised, NoSpaceError)
    assert trace.end is not None and trace.end.reason == "disk-full"
    assert judge(trace, profile()).word == "inconclusive"


def test_an_engine_without_metrics_is_inconclusive_not_passed() -> None:
    trace, _ = play(healthy(quirks={"metrics": lambda say, request: [whole(b"", status=404)]}), SHORT)
    found = judge(trace, profile())
    assert found.word == "inconclusive" and "soak.stall" in found.reasons


def test_the_plan_follows_the_profile_and_keeps_three_rounds_of_canaries() -> None:
    plan = soak.Plan.of(profile())
    assert (plan.seconds, plan.streams, plan.canary_s, plan.sample_s) == (1800, 2, 300, 5)
    short = soak.Plan.of(profile(), minutes=2)
    assert short.seconds == 120 and short.canary_s == 40 and short.sample_s == 2


def test_counted_waves_end_the_run_and_their_prompts_have_the_length_that_was_asked_for() -> None:
    lengths: list[int] = []
    engine = healthy()

    def watch(request: Request) -> Script:
        if request.body.get("stream") and request.body["max_tokens"] == soak.WAVE_ANSWER:
            lengths.append(len(str(request.body["messages"][-1]["content"])))
        return engine(request)

    plan = soak.Plan.of_waves(profile(), waves=2, prompt_tokens=900)
    assert plan.seconds > 600, "an upper bound, not the length"
    trace, _ = play(watch, plan)
    assert len([turn for turn in trace.turns if turn.kind == "wave"]) == 16 == len(lengths)
    assert trace.end is not None and trace.end.reason == "complete" and trace.seconds < 60
    assert trace.drains[-1].final and all(not item.loaded for item in trace.canaries)
    size = Prompts(1).chars_per_token  # the fake engine says 20 tokens of any text, which is not believable
    assert min(lengths) >= 900 * min(size, 12.0)


def test_prompts_longer_than_the_context_are_refused_before_anything_is_sent() -> None:
    with pytest.raises(ConfigError, match="prompts of 5000 tokens: at most 1926 expected") as caught:
        soak.Plan.of_waves(profile(), waves=2, prompt_tokens=5000)
    assert caught.value.hints == ("--prompt-tokens 1926",)
    with pytest.raises(ConfigError, match="at most 1926"):
        soak.Plan.of(profile(), mode="waves", prompt_tokens=5000)


def test_the_drafter_is_asked_at_every_drain_with_nobody_beside_it_and_its_steps_are_recorded() -> None:
    engine = healthy()
    steps = {"n": 0}

    def counted(say: Say, request: Request) -> Script:
        page = engine.metrics_page()
        for name, value in (("num_drafts_total", steps["n"]), ("num_draft_tokens_total", 5 * steps["n"])):
            page += f'vllm:spec_decode_{name}{{engine="0"}} {value}\n'
        good = 0.9 * steps["n"]
        page += f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} {good}\n'
        return [whole(page.encode(), content_type="text/plain")]

    def step(say: Say, request: Request) -> Say:
        steps["n"] += 25 if "Python module" in str(request.body["messages"]) else 0
        return say

    engine.quirks |= {"metrics": counted, "copy": step}
    events: list[Any] = [Start(planned_s=1, identity_known=False, drafter=True)]
    with ScriptedServer(engine) as server:
        drafted = profile(first_acceptance_min=0.7)
        target = soak.Target(url=server.url, profile=drafted, canaries=CANARIES, drafter=True)
        soak.run(target, SHORT, events.append, lambda text: None)
    asked = [item for item in collect(events).canaries if item.id == "smoke.drafter"]
    assert len(asked) >= 2 and all(item.drafts == 100 and item.first_accepted == 90 for item in asked)
    found = {item.id: item for item in judge(collect(events), drafted).findings}
    assert found["soak.first-acceptance"].summary.startswith("first draft accepted in 90% of")


@pytest.mark.parametrize("seconds", [0.5])
def test_a_run_shorter_than_its_requests_still_ends(seconds: float) -> None:
    with contextlib.suppress(NoSpaceError):
        trace, _ = play(healthy(), soak.Plan(seconds=seconds, streams=2, sample_s=0.2, canary_s=5))
        assert judge(trace, profile()).word == "inconclusive"
