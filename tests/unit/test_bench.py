"""Bench against a fake engine whose pace is known: right numbers, and a mark on every number that means nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from ds41ctl.adapters.http import HttpFault
from ds41ctl.adapters.metrics import EngineMetrics
from ds41ctl.adapters.telemetry import GpuState, HostState
from ds41ctl.core import recipe
from ds41ctl.core.errors import ConfigError, Ds41Error
from ds41ctl.core.profile import Profile
from smoke import bench, bench_report
from smoke.answer import Answer
from smoke.bench import Row
from smoke.load import Reading
from tests.fakes.profiles import least_profile
from tests.fakes.sse_server import FakeEngine, Quirk, Request, Say, Script, ScriptedServer, but, instead, whole
from tests.unit.test_smoke import CANARIES


def profile(**values: Any) -> Profile:
    base = least_profile(gpus=0)
    wanted = {
        "decode_tokens": 40,
        "concurrency": (1, 2, 4),
        "prefill_tokens": (500, 100_000),
        "prefill_runs": 3,
        "context_tokens": (500, 3700),
        "during_prefill_tokens": 0,
        "published": {"decode.code.c1": 200.0},
        **values,
    }
    return base.model_copy(
        update={
            "bench": base.bench.model_copy(update=wanted),
            "serve": base.serve.model_copy(update={"max_model_len": 4096, "max_num_seqs": 2}),
        }
    )


class Engine(FakeEngine):
    """Counts prompt tokens as four characters each, and takes 1 ms for 10 of them."""

    def right(self, intent: str, request: Request) -> Say:
        say = super().right(intent, request)
        if intent != "decode":
            return say
        text = request.body["messages"][-1]["content"]
        return bench_say(say, len(text) // 4)


def bench_say(say: Say, tokens: int) -> Say:
    from dataclasses import replace

    return replace(say, prompt_tokens=tokens, pause=max(say.pause, tokens / 10_000 if tokens > 300 else say.pause))


def measure(
    parts: tuple[str, ...] = ("decode",), quirk: Quirk | None = None, intent: str = "decode", **values: Any
) -> dict[str, Row]:
    drift = values.pop("drift", ())
    force = values.pop("force", False)
    texts = values.pop("texts", ())
    engine = Engine(CANARIES, token_s=0.01, quirks={intent: quirk} if quirk else {})
    with ScriptedServer(engine) as server:
        target = bench.Target(server.url, profile(**values), drift=drift, texts=texts)
        rows = bench.run(target, parts=parts, suites=("code",), force=force)
    return {row.name: row for row in rows}


def page(**values: float) -> Quirk:
    """/metrics with these rows; `grow` adds so much to the token count with every reading."""
    seen = {"count": 0}
    grow = values.pop("grow", 0.0)

    def quirk(say: Say, request: Request) -> Script:
        seen["count"] += 1
        rows = {**values, "generation_tokens_total": grow * seen["count"]}
        text = "".join(f'vllm:{name}{{engine="0"}} {value}\n' for name, value in rows.items())
        return [whole(text.encode(), content_type="text/plain")]

    return quirk


def test_decode_rates_are_those_of_the_server_and_only_streams_it_takes_are_opened() -> None:
    rows = measure()
    assert list(rows) == ["decode.code.c1", "decode.code.c2"]
    one, two = rows["decode.code.c1"], rows["decode.code.c2"]
    assert one.marks == () and two.marks == ()
    # 10 ms a token, and what sockets and a busy machine add: the rate is that of the tokens as they came
    for row, streams in ((one, 1), (two, 2)):
        middle, late = row.detail["inter_token_s_p50"], row.detail["inter_token_s_p99"]
        assert middle is not None and late is not None and middle >= 0.01
        assert row.value is not None and streams / late <= row.value < 100 * streams
    assert one.detail["tokens"] == 40 and two.detail["tokens"] == 80


def test_prefill_is_a_median_over_distinct_texts_and_what_does_not_fit_is_left_out() -> None:
    rows = measure(("prefill",), quirk=page(prompt_tokens_cached_total=7, grow=0.2), intent="metrics")
    assert list(rows) == ["prefill.500"]
    row = rows["prefill.500"]
    assert row.value is not None and 5000 < row.value < 10_500 and row.marks == () and row.detail["runs"] == 3


def test_a_text_that_came_out_too_short_teaches_the_length_and_is_measured_again() -> None:
    asked: list[int] = []

    def longer_tokens(say: Say, request: Request) -> Say:  # 6 characters a token after the texts that warm up
        size = len(str(request.body["messages"][-1]["content"]))
        asked.append(size)
        return bench_say(say, size // (4 if len(asked) <= 2 else 6))

    row = measure(("prefill",), quirk=longer_tokens, prefill_runs=2)["prefill.500"]
    assert len(asked) == 2 + 1 + 2 and row.detail["runs"] == 2
    assert 485 <= (row.detail["prompt_tokens"] or 0) <= 550
    assert not any("wanted" in mark for mark in row.marks)


@pytest.mark.parametrize(
    ("parts", "quirk", "intent", "mark"),
    [
        (("decode",), page(grow=500), "metrics", "another client"),
        (("decode",), instead(whole(b"", status=404)), "metrics", "could not be read"),
        (("prefill",), page(grow=1), "metrics", "not proven cold"),
        (("prefill",), but(prompt_tokens=90), "decode", "prompt of 90 tokens, 500 wanted"),
    ],
)
def test_what_spoils_a_number_is_written_on_it(parts: Any, quirk: Quirk, intent: str, mark: str) -> None:
    for row in measure(parts, quirk, intent).values():
        assert any(mark in item for item in row.marks), row


def test_decode_behind_a_prompt_counts_the_decode_alone_and_leaves_out_what_does_not_fit() -> None:
    sent: list[str] = []

    def slow_start(say: Say, request: Request) -> Say | Script:
        sent.append(str(request.body["messages"][-1]["content"]))
        if request.body["max_tokens"] < 40:
            return say
        head, *rest = Engine(CANARIES).stream(replace(say, pause=0.005))
        return [head, 2.0, *rest]

    rows = measure(("context",), quirk=slow_start)
    assert list(rows) == ["decode.code.c1@500"], "3,700 tokens and the answer are more than 4,096"
    row = rows["decode.code.c1@500"]
    assert row.value is not None and row.value > 40 / 2.0, "the two seconds until the first token are not in it"
    assert row.marks == () and 485 <= (row.detail["prompt_tokens"] or 0) <= 600 and row.detail["tokens"] == 40
    warm, asked = sent[-2:]
    assert asked.startswith(warm) and "Python module" in asked[len(warm) :], "the document was in the cache before"


def test_decode_behind_a_prompt_that_came_out_short_is_marked() -> None:
    row = measure(("context",), quirk=but(prompt_tokens=90))["decode.code.c1@500"]
    assert any("prompt of 90 tokens, 500 wanted" in mark for mark in row.marks)


def test_prefill_of_texts_is_the_median_of_all_runs_each_with_a_start_of_its_own() -> None:
    sent: list[str] = []

    def watch(say: Say, request: Request) -> Say:
        sent.append(str(request.body["messages"][-1]["content"]))
        return say

    values = {"prefill_tokens": (), "prefill_texts": (400, 500, 600), "prefill_runs": 3}
    row = measure(("prefill",), quirk=watch, **values)["prefill.texts"]
    texts = sent[2:]
    assert row.detail["runs"] == 9 == len({text[:20] for text in texts}), "no prefix is there twice"
    assert row.value is not None and 5000 < row.value < 10_500 and not any("wanted" in mark for mark in row.marks)
    assert row.note == "texts: generated here (english, french, code)"
    given = (("voyage", "Long ago. " * 2000), ("letters", "Dear friend, " * 2000), ("notes", "Item one: " * 2000))
    row = measure(("prefill",), texts=given, **values)["prefill.texts"]
    assert row.note == "texts: voyage, letters, notes" and row.detail["shortest"] == pytest.approx(412, abs=20)
    short = measure(("prefill",), texts=(("note", "Too short. " * 20),), **values)["prefill.texts"]
    assert any("wanted" in mark for mark in short.marks)


def test_a_figure_is_compared_with_the_one_of_its_own_drafter_setting() -> None:
    base = profile(published_plain={"decode.code.c1": 75.0})
    drafted = base.model_copy(
        update={
            "serve": base.serve.model_copy(update={"dspark": True, "dspark_argv": ("--speculative-config", "{}")}),
        }
    )

    def published(drafter: bool | None, tested: Profile = drafted) -> Any:
        now = bench_report.document("r", "2026", tested, DIGESTS, ROWS[:1], (), drafter)
        return bench_report.comparison(now, tested, None)[0]["published"]

    assert (published(True), published(False), published(None)) == (200.0, 75.0, None)
    assert published(None, base) == 200.0, "a profile without a drafter has one setting"
    same = bench_report.document("r", "2026", drafted, DIGESTS, ROWS[:1], (), True)
    other = bench_report.document("r", "2026", drafted, DIGESTS, ROWS[:1], (), False)
    assert bench_report.comparison(same, drafted, same)[0]["of_earlier"] == 1.0
    assert bench_report.comparison(same, drafted, other)[0]["of_earlier"] is None


def test_points_behind_a_prompt_and_of_texts_have_their_place_in_a_recipe() -> None:
    rows = [
        Row("decode.code.c1@500", 80.0, "tok/s", {"prompt_tokens": 512}),
        Row("prefill.texts", 2500.0, "tok/s", {"runs": 9, "shortest": 400, "longest": 600}, note="texts: mine"),
    ]
    exported = bench_report.recipe(bench_report.document("r", "2026", profile(), DIGESTS, rows, ()), profile())
    decode, prefill = exported["perf_points"]
    assert (decode["context_len"], decode["concurrency"], decode["decode_tok_s"]) == (500, 1, 80.0)
    assert "behind a prompt of 512 tokens" in decode["notes"]
    assert (
        prefill["prefill_tok_s"] == 2500.0 and "median of 9 runs of 400 to 600 tokens; texts: mine" in prefill["notes"]
    )
    text = bench_report.markdown(
        bench_report.document("r", "2026", profile(), DIGESTS, rows, ()), profile(), bench_report.comparison(
            bench_report.document("r", "2026", profile(), DIGESTS, rows, ()), profile(), None
        ),
    )  # fmt: skip
    assert "- prefill.texts: texts: mine" in text


def test_a_prefill_served_by_the_cache_is_no_prefill() -> None:
    reading = Reading("ok", Answer(choices=1, prompt_tokens=1000, cached_tokens=960), 0.1, 1)
    assert bench.cold(reading, EngineMetrics(), EngineMetrics()) == ["960 tokens came from the prefix cache"]
    unseen = Reading("ok", Answer(choices=1, prompt_tokens=1000), 0.1, 1)
    assert bench.cold(unseen, EngineMetrics(cached=5), EngineMetrics(cached=5)) == []
    assert "960" in bench.cold(unseen, EngineMetrics(cached=5), EngineMetrics(cached=965))[0]
    assert "960" in bench.cold(unseen, EngineMetrics(prefix_hits=0), EngineMetrics(prefix_hits=960))[0]
    assert "not proven" in bench.cold(unseen, EngineMetrics(), EngineMetrics())[0]


def test_a_slowed_card_and_a_swapping_machine_are_marks() -> None:
    calm = HostState(swapped_pages=10, gpus=(GpuState(throttle=0),))
    assert bench._machine(calm, calm) == []
    braked = HostState(swapped_pages=10, gpus=(GpuState(throttle=0x80),))
    assert "GPU 0 throttles" in bench._machine(calm, braked)[0]
    assert "swapped 5000 pages" in bench._machine(calm, HostState(swapped_pages=5010))[0]


def test_a_power_limit_or_clock_offset_that_changed_meanwhile_is_a_mark() -> None:
    def host(watts: float | None, mhz: int | None) -> HostState:
        return HostState(gpus=(GpuState(power_limit_w=180.0), GpuState(power_limit_w=watts, offset_mhz=mhz)))

    marks = bench._machine(host(180.0, 200), host(250.0, 0))
    assert marks == [
        "GPU 1: power limit 180 W before and 250 W after",
        "GPU 1: clock offset +200 MHz before and +0 MHz after",
    ]
    assert bench._machine(host(180.0, 200), host(None, None)) == [], "what cannot be read has not changed"


def test_a_machine_that_works_for_others_is_a_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.os, "cpu_count", lambda: 2)
    before, after = HostState(engine_cpu_s=10, machine_cpu_s=100), HostState(engine_cpu_s=16, machine_cpu_s=113)
    assert bench._company(before, after, client_s=1.0, seconds=10) == ["other programs used 0.6 of 2 cores"]
    assert bench._company(before, after, client_s=5.0, seconds=10) == []
    assert bench._company(HostState(), after, client_s=1.0, seconds=10) == [], "unknown: an engine elsewhere"


def test_events_are_not_tokens_and_without_usage_there_is_no_number() -> None:
    row = measure(quirk=but(usage=False))["decode.code.c1"]
    assert row.value is None and "no usage" in row.note


def test_an_engine_in_use_is_refused_and_measured_only_with_a_mark() -> None:
    with pytest.raises(bench.ContaminatedError, match="3 requests of somebody else") as caught:
        measure(quirk=page(num_requests_running=2, num_requests_waiting=1), intent="metrics")
    assert caught.value.code == 3 and caught.value.hints
    busy = page(num_requests_running=2, grow=900)
    assert measure(quirk=busy, intent="metrics", force=True)["decode.code.c1"].marks


def test_an_engine_that_differs_from_its_profile_marks_every_number() -> None:
    for row in measure(drift=("the profile changed since the start",)).values():
        assert "the profile changed since the start" in row.marks


def test_an_engine_that_fails_gives_an_error_and_no_table() -> None:
    with pytest.raises(HttpFault):
        measure(quirk=instead(whole({"error": "x"}, status=500)))
    with pytest.raises(Ds41Error, match="0 tokens"):
        measure(quirk=but(content="", completion_tokens=0))


def test_another_machine_is_not_measured_unconfirmed() -> None:
    with pytest.raises(ConfigError, match="another machine"):
        bench.run(bench.Target("http://192.0.2.1:8011", profile()))


def test_tokens_between_events_share_the_time_between_them() -> None:
    answer = Answer(choices=1, marks=((1.0, 1), (1.3, 4), (1.4, 5), (1.5, None)))
    assert bench.token_gaps(Reading("ok", answer, 2.0, 1)) == pytest.approx([0.1, 0.1, 0.1, 0.1])


ROWS = [
    Row("decode.code.c1", 150.0, "tok/s"),
    Row("decode.code.c2", 250.0, "tok/s", marks=("another client",)),
    Row("prefill.500", None, "tok/s", note="x"),
    Row("prefill.1000", 2000.0, "tok/s", {"runs": 3}),
]
DIGESTS = {"profile": "p", "engine": "e", "facts": "f"}


def test_comparison_leaves_out_what_is_marked_and_what_is_another_engine() -> None:
    now = bench_report.document("r2", "2026", profile(), DIGESTS, ROWS, ())
    earlier = bench_report.document("r1", "2025", profile(), DIGESTS, [Row("decode.code.c1", 100.0, "tok/s")], ())
    found = {item["name"]: item for item in bench_report.comparison(now, profile(), earlier)}
    assert found["decode.code.c1"]["of_published"] == 0.75 and found["decode.code.c1"]["of_earlier"] == 1.5
    assert found["decode.code.c2"]["of_published"] is None
    other = {**earlier, "engine_digest": "another"}
    assert bench_report.comparison(now, profile(), other)[0]["of_earlier"] is None
    text = bench_report.markdown(now, profile(), list(found.values()))
    assert "another client" in text and "| decode.code.c1 | 150 | 200 | 0.75 | 100 | 1.5 | - |" in text


def test_a_recipe_holds_the_unmarked_points_only() -> None:
    exported = bench_report.recipe(bench_report.document("r", "2026", profile(), DIGESTS, ROWS, ()), profile())
    metrics = json.loads(exported["performance"][0]["metrics"])
    assert metrics["tok_s"] == 150.0
    assert [point.get("decode_tok_s") or point.get("prefill_tok_s") for point in metrics["points"]] == [150.0, 2000.0]
    assert exported["speeds"] == {"decode_tok_s": 150.0, "prefill_tok_s": 2000.0}
    assert exported["config"] == recipe.write(profile())["config"], "the form of `profile export`"
