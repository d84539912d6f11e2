"""The judge of a soak on scripted traces: right on each, and inconclusive when it must be."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds41ctl.core.finding import Status
from ds41ctl.core.profile import Profile
from smoke.soak_judge import CRITERIA, SoakVerdict, judge
from smoke.trace import End, Sample, Start, Trace, Turn, collect, line, parse
from tests.fakes.profiles import least_profile
from tests.fakes.soak_traces import MINUTE, Script, trace, waves

CPU = least_profile(gpus=0)
GPU = CPU.model_copy(
    update={
        "hardware": CPU.hardware.model_copy(update={"gpus": 2}),
        "clocks": CPU.clocks.model_copy(update={"sm_mhz": 1530}),
    }
)
CAPPED = GPU.model_copy(update={"clocks": GPU.clocks.model_copy(update={"power_limit_w": 200.0})})
DRAFTED = GPU.model_copy(
    update={
        "soak": GPU.soak.model_copy(update={"acceptance_min": 0.4, "first_acceptance_min": 0.7}),
        "serve": GPU.serve.model_copy(update={"dspark": True, "dspark_argv": ("--speculative-config", "{}")}),
    }
)
ROOMY = GPU.model_copy(update={"soak": GPU.soak.model_copy(update={"vram_headroom_mib_min": 1000.0})})
HALF = 15 * MINUTE


def after(when: float, value: float, before: float = 1.0) -> Callable[[float], float]:
    return lambda at: value if at >= when else before


def rising(start: float, per_hour: float, since: float = 0.0) -> Callable[[float], float]:
    return lambda at: start + per_hour * max(0.0, at - since) / 3600


def sawtooth(start: float, height: float, period: float) -> Callable[[float], float]:
    return lambda at: start + height * (at % period) / period


def bad_at(outcome: str, *minutes: float) -> Callable[[float], str]:
    return lambda at: outcome if any(m * MINUTE <= at < m * MINUTE + 4 for m in minutes) else "ok"


def wrong_canary(name: str, since: float = 0.0, status: str = "fail") -> Callable[[float, str], str]:
    return lambda at, asked: status if asked == name and at >= since else "ok"


# name, profile, changes, verdict, the criterion that says so
# fmt: off
CASES: list[tuple[str, Profile, dict[str, Any], str, str]] = [
    ("flat", CPU, {}, "pass", ""),
    ("flat on GPUs", GPU, {"gpus": 2}, "pass", ""),
    ("noisy but flat, many requests", CPU, {"noise": 0.1}, "pass", ""),
    ("too noisy to tell", CPU, {"noise": 0.6, "every_s": 40.0}, "inconclusive", "soak.decode"),
    ("slow decay of the decode rate", CPU, {"speed": lambda at: 1 - 0.2 * at / 1800}, "fail", "soak.decode"),
    ("late collapse, in the last minute", CPU, {"speed": after(28.5 * MINUTE, 0.2)}, "fail", "soak.decode"),
    ("a dip in the middle that heals", CPU, {"speed": lambda at: 0.5 if 600 < at < 720 else 1.0}, "pass", ""),
    ("speed swings with a short period", CPU, {"speed": lambda at: 1 + 0.1 * math.sin(at / 20)}, "pass", ""),
    ("first tokens come later", CPU, {"wait": lambda at: 1 + 2 * at / 1800}, "fail", "soak.ttft"),
    ("host memory leaks", CPU, {"rss": rising(3000, 4 * 1024)}, "fail", "soak.rss"),
    ("a leak that begins late", CPU, {"rss": rising(3000, 12 * 1024, since=HALF)}, "fail", "soak.rss"),
    ("host memory is a sawtooth", CPU, {"rss": sawtooth(3000, 900, 240)}, "pass", ""),
    ("a leak under a sawtooth", CPU, {"rss": lambda at: 3000 + 1.5 * at + 400 * (at % 240) / 240}, "fail", "soak.rss"),
    ("a small leak below the limit", CPU, {"rss": rising(3000, 500)}, "pass", ""),
    ("one step at the warm-up", CPU, {"rss": after(9 * MINUTE, 4200, 3000)}, "pass", ""),
    ("GPU memory leaks", GPU, {"gpus": 2, "vram": rising(20_000, 1000)}, "fail", "soak.vram"),
    ("GPU memory is a sawtooth", GPU, {"gpus": 2, "vram": sawtooth(20_000, 800, 200)}, "pass", ""),
    (
        "a first session that dies is no baseline",
        GPU,
        {"gpus": 2, "outcome": bad_at("error", 0), "vram": lambda at: 2000.0 if at < 10 else 20_000.0},
        "fail",
        "soak.errors",
    ),
    (
        "no session without an error",
        GPU,
        {"gpus": 2, "outcome": lambda at: "cancelled" if int(at / 4) % 5 == 0 else "ok"},
        "inconclusive",
        "soak.vram",
    ),
    ("GPUs that nobody measured", GPU, {"gpus": 0}, "inconclusive", "soak.vram"),
    ("one GPU of two answers", GPU, {"gpus": 1}, "inconclusive", "soak.vram"),
    ("the kernel log cannot be read", GPU, {"gpus": 2, "xid": lambda at: None}, "inconclusive", "soak.xid"),
    ("a GPU fault", GPU, {"gpus": 2, "xid": lambda at: int(at > HALF)}, "fail", "soak.xid"),
    ("a clock that latched low", GPU, {"gpus": 2, "mhz": after(HALF, 1200.0, 1530.0)}, "fail", "soak.clocks"),
    ("one dip of a clock", GPU, {"gpus": 2, "mhz": lambda at: 1200.0 if at == 900 else 1530.0}, "pass", ""),
    ("power brake", GPU, {"gpus": 2, "throttle": after(HALF, 0x80, 0)}, "fail", "soak.throttle"),
    ("the power cap alone", GPU, {"gpus": 2, "throttle": lambda at: 0x4}, "pass", ""),
    ("a lifted power limit", GPU, {"gpus": 2, "watts": after(HALF, 250.0, 200.0)}, "fail", "soak.power-limit"),
    ("a clock offset that goes", GPU, {"gpus": 2, "offset": after(HALF, 0.0, 200.0)}, "fail", "soak.power-limit"),
    ("a power limit that was never set", CAPPED, {"gpus": 2, "watts": lambda at: 250.0}, "fail", "soak.power-limit"),
    ("a power limit below the profile's", CAPPED, {"gpus": 2, "watts": lambda at: 180.0}, "pass", ""),
    ("the power limit of the profile", CAPPED, {"gpus": 2, "watts": lambda at: 200.0}, "pass", ""),
    ("a power limit that cannot be read", CAPPED, {"gpus": 2, "watts": None}, "inconclusive", "soak.power-limit"),
    ("one error", CPU, {"outcome": bad_at("error", 12)}, "fail", "soak.errors"),
    ("one time-out", CPU, {"outcome": bad_at("timeout", 12)}, "fail", "soak.errors"),
    ("one broken stream", CPU, {"outcome": bad_at("interrupted", 12)}, "fail", "soak.interrupted"),
    ("one silent empty answer", CPU, {"outcome": bad_at("empty", 12)}, "fail", "soak.silent-empty"),
    ("one tool call that does not parse", CPU, {"outcome": bad_at("bad-tool", 12)}, "fail", "soak.tool-calls"),
    ("our own cancels are no errors", CPU, {"outcome": bad_at("cancelled", 7, 12, 17)}, "pass", ""),
    ("copies go wrong after a while", CPU, {"canary": wrong_canary("smoke.copy", HALF)}, "fail", "soak.canaries"),
    ("a canary without an answer", CPU, {"canary": wrong_canary("smoke.copy", HALF, "unknown")},
     "inconclusive", "soak.canaries"),
    ("no canary", CPU, {"canaries": False}, "inconclusive", "soak.canaries"),
    ("cancelled half-way", CPU, {"seconds": HALF, "end": "cancelled"}, "inconclusive", "soak.complete"),
    ("killed: no end at all", CPU, {"seconds": HALF, "end": ""}, "inconclusive", "soak.complete"),
    ("cancelled after an error", CPU, {"seconds": HALF, "end": "cancelled", "outcome": bad_at("error", 3)},
     "fail", "soak.errors"),
    ("disk full", CPU, {"seconds": HALF, "end": "disk-full"}, "inconclusive", "soak.complete"),
    ("the engine dies", CPU, {"seconds": HALF, "end": "engine-died"}, "fail", "soak.complete"),
    ("the engine was restarted", CPU, {"engine": lambda at: f"pid {10 + int(at > HALF)}", "reset_at": HALF},
     "fail", "soak.engine"),
    ("counters reset in the same process", CPU, {"reset_at": HALF}, "inconclusive", "soak.engine"),
    ("the wall clock was stepped", CPU, {"wall_step_at": HALF}, "pass", ""),
    ("the soak itself was suspended", CPU, {"blind": (600.0, 1200.0)}, "inconclusive", "soak.recording"),
    ("metrics cannot be read", CPU, {"metrics": False}, "inconclusive", "soak.stall"),
    ("a hang: running, no token", CPU, {"stuck": (600.0, 780.0)}, "fail", "soak.stall"),
    ("KV blocks leak", CPU, {"kv": lambda at: at / 1800 * 0.2}, "fail", "soak.kv-idle"),
    ("KV blocks that come back late once", CPU, {"kv": lambda at: 0.05 if at < 400 else 0.0}, "pass", ""),
    ("a zombie request", CPU, {"left_running": after(HALF, 1.0, 0.0)}, "fail", "soak.zombie"),
    ("the store was unmapped", CPU, {"mapped": lambda at: at < HALF}, "fail", "soak.store"),
    ("the drafter is blind", DRAFTED, {"gpus": 2, "drafter": 0.05, "first": 0.9}, "fail", "soak.acceptance"),
    ("the drafter is useful", DRAFTED, {"gpus": 2, "drafter": 0.8, "first": 0.9}, "pass", ""),
    ("the drafter drafts nothing", DRAFTED, {"gpus": 2, "first": 0.9}, "fail", "soak.acceptance"),
    ("the drafter was left out", DRAFTED, {"gpus": 2, "started_with_drafter": False}, "pass", ""),
    ("first drafts as with NaN taps", DRAFTED, {"gpus": 2, "drafter": 0.6, "first": 0.49},
     "fail", "soak.first-acceptance"),
    ("first drafts never accepted in a chat", DRAFTED, {"gpus": 2, "drafter": 0.6, "first": 0.0},
     "fail", "soak.first-acceptance"),
    ("first drafts that nobody counted", DRAFTED, {"gpus": 2, "drafter": 0.6}, "inconclusive", "soak.first-acceptance"),
    ("GPU memory is left", ROOMY, {"gpus": 2, "vram": lambda at: 22_669.0}, "pass", ""),
    ("hardly any GPU memory is left for a moment", ROOMY,
     {"gpus": 2, "vram": lambda at: 23_770.0 if 900 <= at < 906 else 22_669.0}, "fail", "soak.headroom"),
    ("the size of the GPUs is not known", ROOMY, {"gpus": 2, "total_mib": None}, "inconclusive", "soak.headroom"),
    ("another client on the engine", CPU, {"foreign": 0.5}, "pass", ""),
    ("events counted as tokens", CPU, {"foreign": -0.5}, "fail", "soak.tokens"),
    ("hardly any request", CPU, {"every_s": 100.0}, "inconclusive", "soak.work"),
]
# fmt: on


def verdict_of(case: tuple[str, Profile, dict[str, Any], str, str]) -> SoakVerdict:
    return judge(trace(Script(), **case[2]), case[1])


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_the_verdict_is_right_and_the_criterion_is_named(case: tuple[str, Profile, dict[str, Any], str, str]) -> None:
    found = verdict_of(case)
    shown = [f"{f.id} {f.status}: {f.summary}" for f in found.findings if f.status is not Status.OK]
    assert found.word == case[3], shown
    if case[4]:
        assert case[4] in found.reasons, shown
    assert [item.id for item in found.findings] == [name for name, _, _ in CRITERIA]
    for item in found.findings:
        assert item.status is not Status.CRASH, item.summary
        assert item.summary and "\n" not in item.summary
        if item.status in (Status.FAIL, Status.WARN, Status.UNKNOWN):
            assert item.why and item.fix and item.found


STRESS = ROOMY.model_copy(update={"serve": ROOMY.serve.model_copy(update={"max_model_len": 262_144})})


def test_two_waves_of_eight_long_prompts_pass_by_what_they_show() -> None:
    found = judge(waves(), STRESS)
    shown = {item.id: item for item in found.findings}
    assert found.word == "pass", [item for item in found.findings if item.status is Status.UNKNOWN]
    assert shown["soak.complete"].found == "2 waves in 14.5 min"
    assert shown["soak.work"].found == "16/16 prompts answered, 100400 to 100400 tokens"
    assert shown["soak.headroom"].found == "1,331 MiB left on GPU 0: 63,580 of 64,911 in use at the most"


def test_what_a_single_wave_cannot_show_is_not_claimed_and_is_no_doubt_either() -> None:
    found = judge(waves(wanted=1, sent=1), STRESS)
    shown = {item.id: item for item in found.findings}
    assert found.word == "pass", [item for item in found.findings if item.status is Status.UNKNOWN]
    for name in ("soak.decode", "soak.ttft", "soak.vram", "soak.rss"):
        assert shown[name].status is Status.SKIP and "1 waves show no trend" in shown[name].summary
        assert name in "\n".join(found.not_proved)


@pytest.mark.parametrize(
    ("changes", "word", "criterion"),
    [
        ({"sent": 1}, "inconclusive", "soak.complete"),
        ({"outcome": lambda number: "error" if number == 11 else "ok"}, "fail", "soak.errors"),
        ({"outcome": lambda number: "timeout" if number == 15 else "ok"}, "fail", "soak.errors"),
        ({"outcome": lambda number: "empty" if number == 3 else "ok"}, "fail", "soak.silent-empty"),
        ({"tokens": 60_000}, "inconclusive", "soak.work"),
        ({"cached": 90_000}, "inconclusive", "soak.work"),
        ({"vram": 64_676.0}, "fail", "soak.headroom"),
        ({"vram": 30_000.0, "gpus": 1}, "inconclusive", "soak.headroom"),
    ],
)
def test_a_stress_test_that_shows_less_or_worse_does_not_pass(
    changes: dict[str, Any], word: str, criterion: str
) -> None:
    found = judge(waves(**changes), STRESS)
    assert (found.word, criterion in found.reasons) == (word, True), found.reasons


def test_a_fault_shows_up_as_itself_and_in_nothing_else() -> None:
    for case in CASES:
        if case[3] == "fail" and case[0] not in (
            "the engine dies",
            "cancelled after an error",
            "events counted as tokens",
        ):
            assert verdict_of(case).reasons == (case[4],), case[0]


@pytest.mark.parametrize("seed", range(12))
def test_noise_alone_never_fails(seed: int) -> None:
    for noise, every in ((0.02, 4.0), (0.15, 4.0), (0.3, 8.0), (0.6, 20.0)):
        found = judge(trace(Script(), seed=seed, noise=noise, every_s=every), CPU)
        assert found.word != "fail", (seed, noise, found.reasons)


@pytest.mark.parametrize("seed", range(12))
def test_a_real_loss_of_a_fifth_is_never_passed(seed: int) -> None:
    for noise in (0.02, 0.1, 0.2):
        found = judge(trace(Script(), seed=seed, noise=noise, speed=lambda at: 1 - 0.25 * at / 1800), CPU)
        assert found.word != "pass", (seed, noise)


@pytest.mark.parametrize("reason", ["disk-full", "cancelled", "crashed"])
def test_a_run_that_broke_off_is_not_blamed_for_tokens_the_engine_was_not_asked_for_again(reason: str) -> None:
    whole = trace(Script(), seconds=10 * MINUTE, end=reason)
    found = judge(replace(whole, samples=[item for item in whole.samples if item.at < 5 * MINUTE]), CPU)
    assert found.word == "inconclusive" and "soak.tokens" in found.reasons


def test_warnings_pass_and_are_seen() -> None:
    found = judge(trace(Script(), foreign=0.5), CPU)
    assert found.word == "pass"
    warned = [item for item in found.findings if item.status is Status.WARN]
    assert [item.id for item in warned] == ["soak.tokens"] and "somebody else" in warned[0].why


def test_nothing_recorded_is_inconclusive_and_never_a_pass() -> None:
    assert judge(Trace(), CPU).word == "inconclusive"
    assert judge(Trace(), GPU).word == "inconclusive"
    assert judge(collect([Start(planned_s=60), End(at=60, reason="complete")]), CPU).word == "inconclusive"


def test_a_pass_says_what_it_does_not_prove() -> None:
    text = "\n".join(judge(trace(Script()), CPU).not_proved)
    for needed in ("800 tokens", "more than 1 streams", "another profile"):
        assert needed in text, text
    assert "soak.vram" in text


def test_a_stretch_of_the_trace_judges_as_the_file_it_was_written_to() -> None:
    whole = trace(Script())
    events = [whole.start, *whole.turns, *whole.samples, *whole.canaries, *whole.drains, whole.end]
    text = "".join(line(item) + "\n" for item in events if item is not None)
    again = parse(text)
    assert judge(again, CPU) == judge(whole, CPU) and again.unreadable == 0
    cut = parse(text[:-20])
    assert cut.unreadable == 1 and judge(cut, CPU).word == "inconclusive"


@settings(max_examples=60)
@given(
    turns=st.lists(
        st.builds(
            Turn,
            at=st.floats(0, 100),
            kind=st.sampled_from(["session", "fresh", "image", "wave", "cancel"]),
            session=st.integers(0, 3),
            outcome=st.sampled_from(["ok", "error", "empty", "cancelled", "timeout", "unfinished"]),
            completion_tokens=st.none() | st.integers(0, 100),
            ttft_s=st.none() | st.floats(0, 10),
            decode_tps=st.none() | st.floats(0, 1000),
            seconds=st.floats(0, 10),
        ),
        max_size=40,
    ),
    samples=st.lists(
        st.builds(
            Sample,
            at=st.floats(0, 100),
            running=st.none() | st.floats(0, 3),
            generated=st.none() | st.floats(0, 1e6),
            rss_mib=st.none() | st.floats(0, 1e5),
        ),
        max_size=40,
    ),
)
def test_no_trace_crashes_the_judge_and_errors_never_pass(turns: list[Turn], samples: list[Sample]) -> None:
    found = judge(collect([Start(planned_s=100), *turns, *samples, End(at=100, reason="complete")]), GPU)
    assert all(item.status is not Status.CRASH for item in found.findings), found
    if any(turn.outcome != "ok" and turn.outcome not in ("cancelled", "unfinished") for turn in turns):
        assert found.word == "fail"
    assert found.word != "pass"
