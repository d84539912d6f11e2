"""Load generator: many bounded streams at once, each ending in a typed outcome and the server's own counts.

Bounded in requests, time and bytes; loopback unless the target was confirmed. One event loop, one thread: what the
client itself costs is measured with it, so that a slow client is not taken for a slow engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ds41ctl.adapters.http import TIMEOUTS, AsyncEngineClient, Fault, HttpFault, Limits, is_loopback, printable
from ds41ctl.core.errors import ConfigError
from smoke.answer import Answer, Assembly
from smoke.judge import decode_rate
from smoke.trace import Outcome

CHAT = "/v1/chat/completions"
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Bounds:
    """What all requests of a generator together may use. `seconds` is from its start."""

    requests: int = 1_000_000
    seconds: float = 12 * 3600
    bytes: int = 16 * 2**30


class BoundReachedError(Exception):
    """The generator has used what it was given."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One request. `answer` holds what came, also when the stream broke. `decode_tps` None: `why` says why.

    `streams`: most streams of this generator that were open at once while it ran.
    """

    outcome: Outcome
    answer: Answer
    seconds: float
    streams: int
    decode_tps: float | None = None
    why: str = ""
    fault: str = ""
    fault_kind: Fault | None = None

    @property
    def ttft_s(self) -> float | None:
        """Seconds from sending to the first event that says something (content, reasoning or a tool call)."""
        return self.answer.first_s


def require_confirmed(url: str, confirmed: bool) -> None:
    """Raises ConfigError when `url` is not this machine and nobody confirmed that it is meant."""
    if not confirmed and not is_loopback(url):
        raise ConfigError(
            f"{printable(url)} is another machine: load is sent to this one only",
            hints=("if you mean it: name it with --target and confirm it with --yes",),
        )


class Load:
    """Sends streamed chat completions to the engine at `url` for `model`.

    Raises ConfigError when `url` is not this machine and `confirmed` is not set.
    """

    def __init__(
        self, url: str, model: str, *, bounds: Bounds | None = None, confirmed: bool = False, key: str | None = None
    ) -> None:
        require_confirmed(url, confirmed)
        self.client = AsyncEngineClient(url, key)
        self.model = model
        self.bounds = bounds or Bounds()
        self.sent = 0
        self._open: set[_Stream] = set()
        self._began = time.monotonic()
        self._sent_bytes = 0

    @property
    def open(self) -> int:
        """Streams open now."""
        return len(self._open)

    async def aclose(self) -> None:
        """Free the client."""
        await self.client.aclose()

    async def ask(
        self,
        messages: str | Sequence[Message],
        max_tokens: int,
        *,
        hang_up_after: int | None = None,
        hang_up: asyncio.Event | None = None,
        limits: Limits | None = None,
        **extra: Any,
    ) -> Reading:
        """One streamed completion at temperature 0. Raises BoundReachedError before it, never HttpFault.

        `hang_up_after`: close the stream after so many events that say something; `hang_up`: with the next event once
        it is set (outcome `cancelled`).
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        body = {
            "model": self.model,
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            **extra,
        }
        self._reserve(len(json.dumps(body)))
        stream = _Stream()
        self._open.add(stream)
        for item in self._open:
            item.most = max(item.most, len(self._open))
        began = time.monotonic()
        assembly = Assembly()
        fault: HttpFault | None = None
        hung_up = False
        try:
            events = self.client.stream(CHAT, body, limits or Limits(first_s=300, idle_s=120, total_s=900))
            async with contextlib.aclosing(events):
                async for chunk in events:
                    assembly.add(chunk)
                    enough = hang_up_after is not None and assembly.deltas >= hang_up_after
                    if enough or (hang_up is not None and hang_up.is_set()):
                        hung_up = True
                        break
        except HttpFault as caught:
            fault = caught
        finally:
            self._open.discard(stream)
        return _reading(assembly.answer(), fault, hung_up, time.monotonic() - began, stream.most)

    def _reserve(self, size: int) -> None:
        self.sent += 1
        self._sent_bytes += size
        if (
            self.sent > self.bounds.requests
            or time.monotonic() - self._began > self.bounds.seconds
            or self._sent_bytes + self.client.received > self.bounds.bytes
        ):
            raise BoundReachedError


class _Stream:
    """An open stream: how many were open at most while it was."""

    def __init__(self) -> None:
        self.most = 1


def _reading(answer: Answer, fault: HttpFault | None, hung_up: bool, seconds: float, streams: int) -> Reading:
    reading = Reading("ok", answer, seconds, streams)
    if hung_up:
        return replace(reading, outcome="cancelled", why="hung up on purpose")
    if fault is not None:
        outcome: Outcome = "error"
        if fault.kind in TIMEOUTS:
            outcome = "timeout"
        elif answer.deltas:
            outcome = "interrupted"
        return replace(reading, outcome=outcome, fault=fault.message, fault_kind=fault.kind, why="no whole answer")
    if answer.choices == 0 or answer.completion_tokens == 0 or (answer.silent and answer.completion_tokens is None):
        return replace(reading, outcome="empty", fault="HTTP 200 with 0 tokens", why="nothing was said")
    broken = _broken_call(answer)
    if broken:
        return replace(reading, outcome="bad-tool", fault=broken, why="not comparable")
    rate, why = decode_rate(answer)
    return replace(reading, decode_tps=rate, why="" if rate is not None else why)


def _broken_call(answer: Answer) -> str:
    """What is wrong with a tool call's form; '' when nothing is, or when our own max_tokens cut it."""
    if answer.finish_reason == "length":
        return ""
    for call in answer.tool_calls:
        if not call.name:
            return "a tool call without a name"
        try:
            parsed = json.loads(call.arguments)
        except (TypeError, ValueError, RecursionError):
            return f"arguments of {call.name} are not JSON"
        if not isinstance(parsed, dict):
            return f"arguments of {call.name} are no object"
    if answer.finish_reason == "tool_calls" and not answer.tool_calls:
        return "finish_reason tool_calls without a call"
    return ""
