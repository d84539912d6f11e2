"""The load generator: every stream ends in a typed outcome with the server's counts; it is bounded and cheap."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from ds41ctl.adapters.http import Fault, Limits
from ds41ctl.core.errors import ConfigError
from smoke.load import BoundReachedError, Bounds, Load, Reading
from tests.fakes.sse_server import (
    DONE,
    HTML,
    Act,
    FakeEngine,
    Quirk,
    Script,
    ScriptedServer,
    but,
    event,
    stream_head,
    whole,
)
from tests.unit.test_smoke import CANARIES

SHORT = Limits(connect_s=5, first_s=1.0, idle_s=0.5, total_s=5)
WORD = event({"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}]})
STOP = event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
USAGE = event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 0}})


def ask(handler: Any, limits: Limits = SHORT, **extra: Any) -> Reading:
    async def one(url: str) -> Reading:
        load = Load(url, "deepseek-v4.1-flash")
        try:
            return await load.ask("Say hello.", extra.pop("max_tokens", 32), limits=limits, **extra)
        finally:
            await load.aclose()

    with ScriptedServer(handler) as server:
        return asyncio.run(one(server.url))


def engine(intent: str = "", quirk: Quirk | None = None, **values: Any) -> FakeEngine:
    return FakeEngine(CANARIES, quirks={intent: quirk} if quirk else {}, **values)


@pytest.mark.parametrize(
    ("script", "outcome", "kind"),
    [
        pytest.param([Act.HANG], "timeout", Fault.NO_FIRST_EVENT, id="no first byte"),
        pytest.param([stream_head(), WORD, Act.HANG], "timeout", Fault.STALL, id="stall mid-token"),
        pytest.param([stream_head(), WORD, 0.2, Act.RESET], "interrupted", Fault.RESET, id="reset"),
        pytest.param([Act.RESET], "error", Fault.RESET, id="reset before the head"),
        pytest.param([stream_head(), WORD], "interrupted", Fault.NO_DONE, id="no [DONE]"),
        pytest.param([stream_head(), WORD, b'data: {"a'], "interrupted", Fault.CUT, id="cut inside JSON"),
        pytest.param([stream_head(), event("{no}"), DONE], "error", Fault.BAD_JSON, id="invalid JSON"),
        pytest.param([stream_head(), event({"choices": 1}), DONE], "error", Fault.BAD_JSON, id="wrong shape"),
        pytest.param([stream_head(), WORD, event({"error": "x"})], "interrupted", Fault.ERROR_EVENT, id="error event"),
        pytest.param([whole({"error": "loading"}, status=503)], "error", Fault.STATUS, id="503"),
        pytest.param([whole({"error": "bad"}, status=400)], "error", Fault.STATUS, id="400"),
        pytest.param([HTML], "error", Fault.OTHER_SERVICE, id="another service"),
        pytest.param([stream_head(), STOP, USAGE, DONE], "empty", None, id="silent empty"),
        pytest.param([stream_head(), DONE], "empty", None, id="no choices"),
    ],
)
def test_every_fault_ends_in_its_outcome(script: Script, outcome: str, kind: Fault | None) -> None:
    began = time.monotonic()
    reading = ask(lambda _: script)
    assert (reading.outcome, reading.fault_kind) == (outcome, kind), reading
    assert reading.fault and "\n" not in reading.fault
    assert reading.decode_tps is None and reading.why
    assert time.monotonic() - began < SHORT.total_s + 4


def test_tokens_are_the_servers_and_the_rate_is_theirs() -> None:
    reading = ask(engine(token_s=0.01), ignore_eos=True, max_tokens=50)
    assert reading.outcome == "ok" and reading.answer.completion_tokens == 50
    assert reading.decode_tps is not None and 40 < reading.decode_tps < 100
    assert reading.ttft_s is not None and reading.ttft_s < 1


def test_events_are_never_counted_as_tokens() -> None:
    several = engine("decode", but(pieces=10, completion_tokens=35, pause=0.02))
    assert ask(several).answer.completion_tokens == 35
    unknown = ask(engine("decode", but(usage=False, pause=0.02)), max_tokens=32)
    assert unknown.outcome == "ok" and unknown.decode_tps is None and "no usage" in unknown.why


def test_a_tool_call_that_does_not_parse_is_an_outcome_of_its_own() -> None:
    tools = [{"type": "function", "function": {"name": "get_weather"}}]
    cut = engine("tool-stream", but(calls=(("get_weather", '{"city": "Tor'),)))
    assert ask(cut, tools=tools).outcome == "bad-tool"
    capped = engine("tool-stream", but(calls=(("get_weather", '{"city": "Tor'),), finish="length"))
    assert ask(capped, tools=tools).outcome == "ok"  # our own max_tokens cut it
    lost = engine("tool-stream", but(calls=(), content="x"))
    assert ask(lost, tools=tools).outcome == "bad-tool"


def test_hanging_up_closes_the_stream_and_is_no_failure() -> None:
    reading = ask(engine(token_s=0.05), ignore_eos=True, max_tokens=200, hang_up_after=3)
    assert reading.outcome == "cancelled" and reading.answer.deltas == 3 and reading.seconds < 3


def test_it_stops_at_its_bounds() -> None:
    async def many(url: str, bounds: Bounds) -> int:
        load = Load(url, "deepseek-v4.1-flash", bounds=bounds)
        try:
            for done in range(100):
                try:
                    await load.ask("x", 4, limits=SHORT)
                except BoundReachedError:
                    return done
        finally:
            await load.aclose()
        return 100

    with ScriptedServer(engine()) as server:
        assert asyncio.run(many(server.url, Bounds(requests=3))) == 3
        assert asyncio.run(many(server.url, Bounds(seconds=0))) == 0
        assert 0 < asyncio.run(many(server.url, Bounds(bytes=3000))) < 10


@pytest.mark.parametrize("url", ["http://10.0.0.5:8011", "http://example.com:8011", "http://[2001:db8::1]:80"])
def test_another_machine_needs_to_be_confirmed(url: str) -> None:
    with pytest.raises(ConfigError, match="another machine"):
        Load(url, "deepseek-v4.1-flash")
    Load(url, "deepseek-v4.1-flash", confirmed=True)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://localhost:1", "http://[::1]:1", "http://127.9.9.9:1"])
def test_this_machine_does_not(url: str) -> None:
    Load(url, "deepseek-v4.1-flash")


def test_64_streams_at_once_cost_less_than_one_core() -> None:
    async def many(url: str) -> list[Reading]:
        load = Load(url, "deepseek-v4.1-flash")
        try:
            return list(await asyncio.gather(*(load.ask(f"{i}", 60, ignore_eos=True) for i in range(64))))
        finally:
            await load.aclose()

    # the server runs in a process of its own, so that this one's CPU time is the client's alone
    with ServerProcess(token_s=0.05) as url:
        cpu, began = time.process_time(), time.monotonic()
        readings = asyncio.run(many(url))
        cpu, took = time.process_time() - cpu, time.monotonic() - began
    assert all(item.outcome == "ok" and item.answer.completion_tokens == 60 for item in readings), readings[0]
    assert {item.streams for item in readings} == {64}
    assert cpu < took, f"{cpu:.2f} s of CPU in {took:.2f} s"


class ServerProcess:
    """A FakeEngine in a process of its own."""

    def __init__(self, token_s: float) -> None:
        self._token_s = token_s

    def __enter__(self) -> str:
        import subprocess
        import sys
        from pathlib import Path

        code = (
            "import sys, json; from tests.fakes.sse_server import FakeEngine, ScriptedServer;"
            "from smoke.canaries import generate;"
            f"server = ScriptedServer(FakeEngine(generate(7, needle_tokens=0), token_s={self._token_s}));"
            "print(json.dumps(server.url), flush=True); sys.stdin.read()"
        )
        self._child = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        assert self._child.stdout is not None
        url: str = json.loads(self._child.stdout.readline())
        return url

    def __exit__(self, *error: object) -> None:
        self._child.kill()
        self._child.communicate()
