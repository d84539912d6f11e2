"""The silent-fault matrix: faults that raise no error, how each is injected, which check sees it, and what it says.

README.md shows this table; tests/unit/test_silent_faults.py injects every row.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import smoke
from ds41ctl.adapters.http import EngineClient
from ds41ctl.core.finding import Finding
from smoke.canaries import generate
from smoke.soak_judge import judge
from tests.fakes.profiles import least_profile
from tests.fakes.soak_traces import MINUTE, Script, trace
from tests.fakes.sse_server import FakeEngine, Quirk, Request, Say, ScriptedServer, but, instead, whole

CANARIES = generate(11, copies=20, needle_tokens=300, images=6)
LATER = 15 * MINUTE
SOAK = {"first_acceptance_min": 0.7, "vram_headroom_mib_min": 1000.0}


@dataclass(frozen=True)
class SilentFault:
    """One row. `detected`: id of the check; `says`: a part of its finding that names the cause."""

    fault: str
    injected: str
    detected: str
    says: str
    find: Callable[[], Finding]


def served(test: str, intent: str, quirk: Quirk, **values: Any) -> Callable[[], Finding]:
    """A scripted server with one fault, asked by one smoke test."""

    def find() -> Finding:
        with ScriptedServer(FakeEngine(CANARIES, quirks={intent: quirk})) as server:
            client = EngineClient(server.url)
            return smoke.run(client, CANARIES, least_profile(**values), only=(test,), deadline_s=20)[0]

    return find


def served_as(test: str, model: str) -> Callable[[], Finding]:
    """A healthy server that serves another model."""

    def find() -> Finding:
        with ScriptedServer(FakeEngine(CANARIES, model=model)) as server:
            return smoke.run(EngineClient(server.url), CANARIES, least_profile(), only=(test,), deadline_s=20)[0]

    return find


def soaked(criterion: str, **changes: Any) -> Callable[[], Finding]:
    """A scripted soak trace with one fault, judged."""

    def find() -> Finding:
        found = judge(trace(Script(gpus=2, drafter=0.8), **changes), least_profile(soak=SOAK))
        return next(item for item in found.findings if item.id == criterion)

    return find


def every(number: int, change: Callable[[str], str]) -> Quirk:
    """A quirk that changes the content of every `number`-th answer."""
    count = {"n": 0}

    def quirk(say: Say, request: Request) -> Say:
        count["n"] += 1
        return replace(say, content=change(say.content or "")) if count["n"] % number == 0 else say

    return quirk


def other_rank(text: str) -> str:
    """The identifier with its parts in another order: rows that belong to somebody else."""
    return "_".join(reversed(text.split("_")))


def once_only(say: Say, request: Request) -> Say:
    """Answers that differ from each other."""
    return replace(say, content=f"{say.content} {id(request)}")


class Crowd:
    """Changes the answer while another request runs."""

    def __init__(self) -> None:
        self.open = 0

    def __call__(self, say: Say, request: Request) -> Say:
        import time

        self.open += 1
        time.sleep(0.15)
        crowded = self.open > 1
        self.open -= 1
        return replace(say, content="flipped") if crowded else say


class FakeHits:
    """/metrics that count prefix hits for texts nobody has sent."""

    def __init__(self) -> None:
        self.reads = 0

    def __call__(self, say: Say, request: Request) -> list[Any]:
        self.reads += 1
        text = f'vllm:prompt_tokens_cached_total{{engine="0"}} {20 * self.reads}\n'
        return [whole(text.encode(), content_type="text/plain")]


class Drafts:
    """/metrics of an engine that drafts: so many steps more with every reading, and first drafts accepted of them."""

    def __init__(self, steps: int, accepted: int) -> None:
        self.steps, self.accepted, self.reads = steps, accepted, 0

    def __call__(self, say: Say, request: Request) -> list[Any]:
        self.reads += 1
        rows = {
            "num_drafts_total{": self.steps,
            "num_draft_tokens_total{": 5 * self.steps,
            'num_accepted_tokens_per_pos_total{position="0",': self.accepted,
        }
        text = "".join(f'vllm:spec_decode_{name}engine="0"}} {value * self.reads}\n' for name, value in rows.items())
        return [whole(text.encode(), content_type="text/plain")]


DSML = '<｜DSML｜ calls>\n<｜DSML｜ invoke name="get_weather">'
NOT_MULTIMODAL = whole({"error": {"message": "deepseek-v4.1-flash is not a multimodal model"}}, status=400)
TOOL = CANARIES.tool
assert TOOL is not None
WHOLE_CALL = json.dumps(TOOL.arguments)

MATRIX: tuple[SilentFault, ...] = (
    SilentFault(
        "Engram tables missing",
        "copies lose their underscores",
        "smoke.copy",
        "the Engram tables are not (or wrongly) loaded",
        served("smoke.copy", "copy", every(1, lambda text: text.replace("_", ""))),
    ),
    SilentFault(
        "Engram zero switch left on",
        "every fourth copy loses its underscores",
        "smoke.copy",
        "15/20 exact",
        served("smoke.copy", "copy", every(4, lambda text: text.replace("_", ""))),
    ),
    SilentFault(
        "Engram rows of another rank",
        "copies made of the right parts in the wrong order",
        "smoke.copy",
        "damaged Engram rows",
        served("smoke.copy", "copy", every(2, other_rank)),
    ),
    SilentFault(
        "wrong scale of Engram rows",
        "copies in the wrong case",
        "smoke.copy",
        "identifiers come back changed",
        served("smoke.copy", "copy", every(3, str.swapcase)),
    ),
    SilentFault(
        "P2P flips a character",
        "one character of 20 identifiers",
        "smoke.copy",
        "19/20 exact",
        served("smoke.copy", "copy", every(20, lambda text: ("x" if text[0] != "x" else "y") + text[1:])),
    ),
    SilentFault(
        "K or codebook mismatch (a noisy expert)",
        "389 instead of 391",
        "smoke.arithmetic",
        "weights, kernels or the chat template are wrong",
        served("smoke.arithmetic", "arithmetic", but(content="389")),
    ),
    SilentFault(
        "collapse into a loop",
        "an answer that repeats itself",
        "smoke.needle",
        "an endless loop",
        served("smoke.needle", "needle", but(content="the the " * 400)),
    ),
    SilentFault(
        "tool parser off",
        "the model's markup as content",
        "smoke.tool-call",
        "a parser is missing",
        served("smoke.tool-call", "tool", but(content=DSML, calls=(), finish="stop")),
    ),
    SilentFault(
        "truncated tool JSON",
        "arguments cut, finish_reason tool_calls",
        "smoke.tool-stream",
        "arguments are not JSON",
        served("smoke.tool-stream", "tool-stream", but(calls=(("get_weather", WHOLE_CALL[:-3]),))),
    ),
    SilentFault(
        "forced tool ignored",
        "a sentence where tool_choice names the tool",
        "smoke.tool-forced",
        "no call",
        served("smoke.tool-forced", "tool-forced", but(content="It is sunny.", calls=(), finish="stop")),
    ),
    SilentFault(
        "reasoning parser off",
        "`</think>` in the content",
        "smoke.thinking",
        "a parser is missing",
        served("smoke.thinking", "thinking", but(content="17 * 23 = 391</think>391", reasoning="")),
    ),
    SilentFault(
        "thinking on by default",
        "reasoning that nobody asked for",
        "smoke.arithmetic",
        "thinking is on by default",
        served("smoke.arithmetic", "arithmetic", but(reasoning="17 * 20 is 340, and 51 makes 391.")),
    ),
    SilentFault(
        "picture dropped",
        "prompt tokens do not grow by the picture",
        "smoke.images",
        "the server drops the picture",
        served("smoke.images", "image", but(prompt_tokens=20)),
    ),
    SilentFault(
        "second picture dropped",
        "prompt tokens of the first picture only",
        "smoke.images-many",
        "a picture is dropped",
        served("smoke.images-many", "image", lambda say, request: replace(say, prompt_tokens=84)),
    ),
    SilentFault(
        "picture limit not kept",
        "65 pictures are accepted",
        "smoke.images-many",
        "the limit of 64 pictures is not kept",
        served("smoke.images-many", "bad-request", instead(whole({"choices": []}))),
    ),
    SilentFault(
        "text-only engine",
        "HTTP 400, not a multimodal model",
        "smoke.images",
        "not a multimodal model",
        served("smoke.images", "image", instead(NOT_MULTIMODAL)),
    ),
    SilentFault(
        "prefix cache fakes prefill",
        "cached tokens for a text never sent",
        "smoke.prefix-cache",
        "a text nobody sent counts as cached",
        served("smoke.prefix-cache", "metrics", FakeHits()),
    ),
    SilentFault(
        "events counted as tokens",
        "a stream without usage",
        "smoke.decode",
        "events are not tokens",
        served("smoke.decode", "decode", but(usage=False)),
    ),
    SilentFault(
        "CUDA graphs off",
        "a decode rate far below the profile's",
        "smoke.decode",
        "CUDA graphs off",
        served("smoke.decode", "decode", but(pause=0.02), bench={"published": {"decode.code.c1": 500.0}}),
    ),
    SilentFault(
        "health 200 on a dead engine",
        "/health answers, completions say EngineDeadError",
        "smoke.health",
        "a worker died",
        served("smoke.health", "hello", instead(whole({"error": {"message": "EngineDeadError"}}, status=500))),
    ),
    SilentFault(
        "wrong model on the port",
        "another served name",
        "smoke.health",
        "another model",
        served_as("smoke.health", "qwen3-8b"),
    ),
    SilentFault(
        "non-determinism",
        "another answer each time at temperature 0",
        "smoke.repeat",
        "greedy decoding does not repeat",
        served("smoke.repeat", "hello", once_only),
    ),
    SilentFault(
        "a batch changes answers",
        "another answer while a second request runs",
        "smoke.batch",
        "kernels picked by batch size",
        served("smoke.batch", "copy", Crowd()),
    ),
    SilentFault(
        "needle lost",
        "a wrong code from a long prompt",
        "smoke.needle",
        "a fact far back is lost",
        served("smoke.needle", "needle", but(content="111111")),
    ),
    SilentFault(
        "NaN in the drafter's taps",
        "no first draft accepted in the first steps of a chat",
        "smoke.drafter",
        "blind at the start of a chat",
        served("smoke.drafter", "metrics", Drafts(250, 0), drafter=True, soak={"first_acceptance_min": 0.7}),
    ),
    SilentFault(
        "a drafter half as good",
        "0.49 of the first drafts of code accepted, in the canary of a soak",
        "soak.first-acceptance",
        "far worse than a sound one",
        soaked("soak.first-acceptance", first=0.49),
    ),
    SilentFault(
        "encoder limit not kept",
        "a picture of 1,500 prompt tokens",
        "smoke.images",
        "pictures fill the context",
        served("smoke.images", "image", but(prompt_tokens=1520), image_tokens_max=1024),
    ),
    SilentFault(
        "drafter blind",
        "5 % of the drafted tokens accepted",
        "soak.acceptance",
        "the drafter guesses blindly",
        soaked("soak.acceptance", drafter=0.05),
    ),
    SilentFault(
        "clock latched low",
        "1200 MHz under load, 1530 locked",
        "soak.clocks",
        "latched low",
        soaked("soak.clocks", mhz=lambda at: 1200.0 if at > LATER else 1530.0),
    ),
    SilentFault(
        "zombie request",
        "one request running at rest",
        "soak.zombie",
        "a hung-up stream was not aborted",
        soaked("soak.zombie", left_running=lambda at: float(at > LATER)),
    ),
    SilentFault(
        "KV leak",
        "KV use grows from drain to drain",
        "soak.kv-idle",
        "never given back",
        soaked("soak.kv-idle", kv=lambda at: at / 1800 * 0.2),
    ),
    SilentFault(
        "host memory leak",
        "4 GiB an hour",
        "soak.rss",
        "host memory leaks",
        soaked("soak.rss", rss=lambda at: 3000 + at * 4096 / 3600),
    ),
    SilentFault(
        "GPU memory creeps",
        "1000 MiB an hour on each GPU",
        "soak.vram",
        "memory taken after the profiler ran",
        soaked("soak.vram", vram=lambda at: 20_000 + at * 1000 / 3600),
    ),
    SilentFault(
        "hardly any GPU memory left",
        "230 MiB left on each GPU at one sample",
        "soak.headroom",
        "the engine dies of it",
        soaked("soak.headroom", vram=lambda at: 23_770.0 if at == LATER else 20_000.0),
    ),
    SilentFault(
        "silent empty answers",
        "HTTP 200 with 0 tokens",
        "soak.silent-empty",
        "no client notices",
        soaked("soak.silent-empty", outcome=lambda at: "empty" if 700 < at < 704.5 else "ok"),
    ),
    SilentFault(
        "late collapse of speed",
        "a fifth of the rate in the last minute",
        "soak.decode",
        "collapsed at the end",
        soaked("soak.decode", speed=lambda at: 0.2 if at > 28.5 * MINUTE else 1.0),
    ),
    SilentFault(
        "engine hangs under load",
        "requests running and no token for three minutes",
        "soak.stall",
        "the engine hangs",
        soaked("soak.stall", stuck=(600.0, 780.0)),
    ),
    SilentFault(
        "engine restarted by a supervisor",
        "another process in the middle of the run",
        "soak.engine",
        "restarted in between",
        soaked("soak.engine", engine=lambda at: f"pid {10 + int(at > LATER)}", reset_at=LATER),
    ),
    SilentFault(
        "Engram store unmapped",
        "no process maps the store any more",
        "soak.store",
        "spoils exact copies without an error",
        soaked("soak.store", mapped=lambda at: at < LATER),
    ),
    SilentFault(
        "power brake",
        "HW power brake in the GPU's event reasons",
        "soak.throttle",
        "HW power brake",
        soaked("soak.throttle", throttle=lambda at: 0x80 if at > LATER else 0),
    ),
    SilentFault(
        "power limit gone",
        "180 W, then 250 W, as after a new load of the driver",
        "soak.power-limit",
        "rates before and after are not comparable",
        soaked("soak.power-limit", watts=lambda at: 250.0 if at > LATER else 180.0),
    ),
)
