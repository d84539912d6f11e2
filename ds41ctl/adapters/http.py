"""HTTP client of one engine: plain requests and server-sent-event streams, all bounded in time and bytes.

The only module that imports httpx2. Whatever a server does, a call ends in a value or in one `HttpFault`
whose kind says what happened, at most a moment after its limit: refused, reset, silent, stalled, cut,
compressed, not JSON, not even this service.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import re
import socket
import ssl
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, TypeVar

import httpx2

from ds41ctl.core.errors import ConfigError, NetworkError

DONE = "[DONE]"
_TEXT_CAP = 200  # characters of remote text in a message
_ERROR_BODY_CAP = 64 * 1024  # bytes of an error body worth reading
_MAX_EVENT_BYTES = 4 * 1024 * 1024
_T = TypeVar("_T")
_LINE_END = re.compile(rb"\r\n|\r|\n")


class Fault(StrEnum):
    """What went wrong with a request; the value is stable and appears in reports."""

    REFUSED = "refused"  # nothing accepts connections there
    RESET = "reset"  # connection reset by the peer
    CUT = "cut"  # ended before it was complete
    NO_FIRST_EVENT = "no-first-event"  # time-out before anything was said
    STALL = "stall"  # time-out between two events
    TIMEOUT = "timeout"  # total time-out
    TOO_BIG = "too-big"  # body or event over its cap
    ENCODING = "encoding"  # compressed though identity was asked, or not UTF-8
    BAD_JSON = "bad-json"  # not JSON, or JSON of another shape
    OTHER_SERVICE = "other-service"  # HTML, no HTTP at all: somebody else holds the port
    STATUS = "status"  # HTTP status other than 200
    ERROR_EVENT = "error-event"  # HTTP 200 that carries an error object
    NO_DONE = "no-done"  # stream ended properly, without its [DONE]


TIMEOUTS = frozenset({Fault.NO_FIRST_EVENT, Fault.STALL, Fault.TIMEOUT})


class HttpFault(NetworkError):
    """A request that gave no usable answer. `status`: the HTTP status, if any; `seconds`: since the start."""

    def __init__(self, kind: Fault, message: str, *, status: int | None = None, seconds: float | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.status = status
        self.seconds = seconds


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one request, seconds and bytes. `first_s` and `idle_s` count events of a stream, not bytes:
    keep-alive comments do not prove that the engine still works."""

    connect_s: float = 5.0
    first_s: float = 60.0
    idle_s: float = 30.0
    total_s: float = 120.0
    max_bytes: int = 64 * 1024 * 1024
    max_event_bytes: int = _MAX_EVENT_BYTES

    def within(self, seconds: float) -> Limits:
        """The same bounds, none longer than `seconds` (but 1 ms: a spent budget must end in a fault)."""
        cap = max(seconds, 0.001)
        return replace(
            self,
            connect_s=min(self.connect_s, cap),
            first_s=min(self.first_s, cap),
            idle_s=min(self.idle_s, cap),
            total_s=min(self.total_s, cap),
        )


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer of any HTTP status. `seconds` is the time from sending to the last byte."""

    status: int
    content_type: str
    body: bytes
    seconds: float

    def json(self) -> dict[str, Any]:
        """The body as a JSON object. Raises HttpFault (OTHER_SERVICE for HTML, else BAD_JSON)."""
        return _json_object(self.body, self.content_type, self.status, self.seconds)

    def error_text(self) -> str:
        """The server's own error message, printable and short; '' when the body holds none."""
        try:
            return error_message(self.json())
        except HttpFault:
            return ""

    def ok_json(self) -> dict[str, Any]:
        """The body of an HTTP 200 without an error object. Raises HttpFault otherwise."""
        if self.status != 200:
            if _is_html(self.body, self.content_type):
                raise _other_service(self.status, self.seconds)
            raise _status_fault(self.status, self.error_text(), self.seconds)
        body = self.json()
        if carries_error(body):
            raise HttpFault(
                Fault.ERROR_EVENT,
                f"HTTP 200 with an error: {error_message(body)}",
                status=200,
                seconds=self.seconds,
            )
        return body


@dataclass(frozen=True, slots=True)
class Chunk:
    """One JSON event of a stream; `at` is seconds since the request was sent."""

    at: float
    data: dict[str, Any]


def printable(text: str, cap: int = _TEXT_CAP) -> str:
    """One line of remote `text`, control characters escaped, at most `cap` characters."""
    shown = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text[: cap + 1])
    return shown if len(shown) <= cap else shown[: cap - 1] + "…"


def carries_error(body: Mapping[str, Any]) -> bool:
    """True when a JSON object is an error report (OpenAI's `error`, or vLLM's older `object: error`)."""
    return bool(body.get("error")) or body.get("object") == "error"


def error_message(body: Mapping[str, Any]) -> str:
    """Printable message of an error object, '' when there is none."""
    error = body.get("error")
    if isinstance(error, Mapping):
        error = error.get("message") or json.dumps(error, default=str)
    text = error or body.get("message") or body.get("detail") or ""
    return printable(text if isinstance(text, str) else json.dumps(text, default=str))


def base_url(host: str, port: int) -> str:
    """URL under which this machine reaches an engine that binds `host`:`port` (a wildcard means loopback)."""
    reachable = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1", "*": "127.0.0.1"}.get(host, host)  # noqa: S104
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


class SseReader:
    """Incremental reader of server-sent events: bytes in, `data` of each complete event out.

    Any cut of the same bytes gives the same events, be it inside a UTF-8 character, inside `data:` or between
    CR and LF. Comments and fields other than `data` are skipped, events without data too.
    """

    def __init__(self, max_event_bytes: int = _MAX_EVENT_BYTES) -> None:
        self._max = max_event_bytes
        self._line = bytearray()
        self._data: list[bytes] = []
        self._size = 0
        self._after_cr = False
        self._started = False

    @property
    def pending(self) -> bool:
        """True when an event has begun and was not finished by an empty line."""
        return bool(self._line or self._data)

    def feed(self, chunk: bytes) -> list[str]:
        """Events completed by `chunk`, in order. Raises HttpFault (TOO_BIG, ENCODING) and is then spent."""
        if not chunk:
            return []
        if self._after_cr and chunk[:1] == b"\n":
            chunk = chunk[1:]
        self._after_cr = chunk.endswith(b"\r")
        *ended, rest = _LINE_END.split(chunk)
        events: list[str] = []
        for part in ended:
            self._grow(part)
            line = bytes(self._line)
            self._line.clear()
            event = self._take(line)
            if event is not None:
                events.append(event)
        self._grow(rest)
        return events

    def _grow(self, part: bytes) -> None:
        self._line += part
        if self._size + len(self._line) > self._max:
            raise HttpFault(Fault.TOO_BIG, f"one event of the stream is over {self._max} bytes")

    def _take(self, line: bytes) -> str | None:
        if not self._started:
            line = line.removeprefix(b"\xef\xbb\xbf")
            self._started = True
        if line:
            name, _, value = line.partition(b":")
            if name == b"data":
                value = value.removeprefix(b" ")
                self._data.append(value)
                self._size += len(value) + 1
            return None
        if not self._data:
            return None
        joined = b"\n".join(self._data)
        self._data.clear()
        self._size = 0
        try:
            return joined.decode("utf-8")
        except UnicodeDecodeError as error:
            raise HttpFault(Fault.ENCODING, f"an event of the stream is not UTF-8 (byte {error.start})") from None


class _Watchdog:
    """Shuts the request's socket down at a deadline that can be moved.

    httpx2's own time-outs restart with every received byte, so a server that drips bytes could hold a caller
    for ever; this bounds the whole exchange, and the time between events.
    """

    def __init__(self, total_s: float) -> None:
        self._began = time.monotonic()
        self._total_at = self._began + total_s
        self._total_s = total_s
        self._deadline = self._total_at
        self._fault = (Fault.TIMEOUT, f"no complete answer within {total_s:.3g} s")
        self._wake = threading.Condition()
        self._socket: socket.socket | None = None
        self._closed = False
        self._fired: tuple[Fault, str] | None = None
        self._thread = threading.Thread(target=self._run, name="ds41-http-watchdog", daemon=True)
        self._thread.start()

    def elapsed(self) -> float:
        """Seconds since the request began."""
        return time.monotonic() - self._began

    def on_trace(self, name: str, info: Mapping[str, Any]) -> None:
        """Trace hook of httpx2: learns the socket once it is connected, before there is a response."""
        if name.endswith("connect_tcp.complete"):
            found = info["return_value"].get_extra_info("socket")
            with self._wake:
                self._socket = found
                if self._fired is not None:
                    self._shut()

    def expect(self, seconds: float, kind: Fault, message: str) -> None:
        """Move the deadline to `seconds` from now, or to the total limit when that comes first."""
        with self._wake:
            at = time.monotonic() + seconds
            if at < self._total_at:
                self._fault = (kind, message)
            else:
                at = self._total_at
                self._fault = (Fault.TIMEOUT, f"no complete answer within {self._total_s:.3g} s")
            sooner = at < self._deadline
            self._deadline = at
            if sooner:
                self._wake.notify()

    def check(self) -> None:
        """Raise the time-out that fired, if one did."""
        if self._fired is not None:
            raise HttpFault(*self._fired, seconds=self.elapsed())

    def close(self) -> None:
        """End the watch; waits for its thread."""
        with self._wake:
            self._closed = True
            self._socket = None
            self._wake.notify()
        self._thread.join()

    def _shut(self) -> None:
        if self._socket is not None:
            try:
                self._socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                return  # already closed by the peer: the reader ends by itself

    def _run(self) -> None:
        with self._wake:
            while not self._closed:
                left = self._deadline - time.monotonic()
                if left <= 0:
                    self._fired = self._fault
                    self._shut()
                    return
                self._wake.wait(left)


@dataclass(frozen=True)
class EngineClient:
    """Client of the engine at `url` (`http://host:port`); usable from several threads, keeps no connection.

    `key` is sent as a bearer token and never shown: not in repr, not in a message, not when the server echoes
    it. Raises ConfigError for a URL or key that cannot be used.
    """

    url: str
    key: str | None = field(default=None, repr=False)
    _client: httpx2.Client = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_client", httpx2.Client(headers=_headers(self.url, self.key), **_options(self.url)))

    def close(self) -> None:
        """Free the client."""
        self._client.close()

    def get(self, path: str, limits: Limits | None = None) -> Reply:
        """GET `path`; any HTTP status is a Reply. Raises HttpFault."""
        return self._whole("GET", path, None, limits or Limits(total_s=10))

    def post_json(self, path: str, body: Mapping[str, Any], limits: Limits | None = None) -> Reply:
        """POST `body` as JSON; any HTTP status is a Reply. Raises HttpFault."""
        return self._whole("POST", path, body, limits or Limits())

    def stream(self, path: str, body: Mapping[str, Any], limits: Limits | None = None) -> Generator[Chunk, None, None]:
        """POST `body` and yield the JSON events of the stream up to [DONE]; closing the generator hangs up.

        Raises HttpFault where the stream breaks, after the events before it. What follows [DONE] is not read.
        """
        bounds = limits or Limits()
        with self._exchange("POST", path, body, bounds, first_s=bounds.first_s) as (response, watchdog):
            self._require_event_stream(response, bounds, watchdog)
            for text in self._events(response, bounds, watchdog):
                if text.strip() == DONE:
                    return
                data = _event_object(text, watchdog.elapsed())
                watchdog.expect(bounds.total_s, Fault.TIMEOUT, "")  # the caller's own time is not a stall
                yield Chunk(watchdog.elapsed(), data)
                watchdog.expect(bounds.idle_s, Fault.STALL, f"the stream stood still for {bounds.idle_s:.3g} s")
            watchdog.check()
            raise HttpFault(Fault.NO_DONE, "the stream ended without [DONE]", status=200, seconds=watchdog.elapsed())

    def _whole(self, method: str, path: str, body: Mapping[str, Any] | None, limits: Limits) -> Reply:
        with self._exchange(method, path, body, limits) as (response, watchdog):
            read = self._body(response, limits.max_bytes, watchdog)
            return Reply(response.status_code, _content_type(response), read, watchdog.elapsed())

    def _require_event_stream(self, response: httpx2.Response, limits: Limits, watchdog: _Watchdog) -> None:
        kind = _content_type(response)
        if response.status_code == 200 and kind == "text/event-stream":
            return
        cap = min(limits.max_bytes, _ERROR_BODY_CAP)
        read = self._body(response, cap, watchdog)
        _refuse_other_than_stream(Reply(response.status_code, kind, read, watchdog.elapsed()))

    def _events(self, response: httpx2.Response, limits: Limits, watchdog: _Watchdog) -> Iterator[str]:
        _refuse_compression(response)
        reader = SseReader(limits.max_event_bytes)
        total = 0
        for raw in response.iter_raw():
            total += len(raw)
            if total > limits.max_bytes:
                raise HttpFault(Fault.TOO_BIG, f"the stream is over {limits.max_bytes} bytes")
            yield from reader.feed(raw)
        watchdog.check()
        if reader.pending:
            raise HttpFault(Fault.CUT, "the stream ended inside an event", status=200, seconds=watchdog.elapsed())

    def _body(self, response: httpx2.Response, cap: int, watchdog: _Watchdog) -> bytes:
        _refuse_compression(response)
        read = bytearray()
        for raw in response.iter_raw():
            read += raw
            if len(read) > cap:
                raise HttpFault(Fault.TOO_BIG, f"the answer is over {cap} bytes", status=response.status_code)
        watchdog.check()
        return bytes(read)

    @contextmanager
    def _exchange(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        limits: Limits,
        *,
        first_s: float | None = None,
    ) -> Iterator[tuple[httpx2.Response, _Watchdog]]:
        watchdog = _Watchdog(limits.total_s)
        if first_s is not None:
            watchdog.expect(first_s, Fault.NO_FIRST_EVENT, f"nothing was answered for {first_s:.3g} s")
        answered = False
        try:
            with self._client.stream(
                method,
                path,
                json=body,
                timeout=httpx2.Timeout(limits.total_s, connect=limits.connect_s),
                extensions={"trace": watchdog.on_trace},
            ) as response:
                answered = True
                yield response, watchdog
        except httpx2.HTTPError as error:
            watchdog.check()
            raise _redacted(_translated(error, self.url, answered, watchdog.elapsed()), self.key) from None
        except HttpFault as fault:
            watchdog.check()
            raise _redacted(fault, self.key) from None
        finally:
            watchdog.close()


class AsyncEngineClient:
    """The same for many streams at once in one thread: GET and event streams, with the same faults and limits.

    `received` counts the bytes of all bodies so far. Raises ConfigError for a URL or key that cannot be used.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url
        self.received = 0
        self._key = key
        self._client = httpx2.AsyncClient(headers=_headers(url, key), **_options(url))

    async def aclose(self) -> None:
        """Free the client."""
        await self._client.aclose()

    async def get(self, path: str, limits: Limits | None = None) -> Reply:
        """GET `path`; any HTTP status is a Reply. Raises HttpFault."""
        bounds = limits or Limits(total_s=10)
        clock = _Clock(bounds)
        response: httpx2.Response | None = None
        try:
            response = await clock.before_total(self._send("GET", path, None, bounds))
            body = await self._body(response, bounds.max_bytes, clock)
            return Reply(response.status_code, _content_type(response), body, clock.elapsed())
        except httpx2.HTTPError as error:
            raise _redacted(_translated(error, self.url, response is not None, clock.elapsed()), self._key) from None
        except HttpFault as fault:
            raise _redacted(fault, self._key) from None
        finally:
            if response is not None:
                await response.aclose()

    async def stream(
        self, path: str, body: Mapping[str, Any], limits: Limits | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """POST `body` and yield the JSON events of the stream up to [DONE]; closing the generator hangs up.

        Raises HttpFault where the stream breaks, after the events before it. What follows [DONE] is not read.
        """
        bounds = limits or Limits()
        clock = _Clock(bounds)
        response: httpx2.Response | None = None
        try:
            clock.expect(bounds.first_s, Fault.NO_FIRST_EVENT, f"nothing was answered for {bounds.first_s:.3g} s")
            response = await clock.before(self._send("POST", path, body, bounds))
            kind = _content_type(response)
            if response.status_code != 200 or kind != "text/event-stream":
                cap = min(bounds.max_bytes, _ERROR_BODY_CAP)
                read = await self._body(response, cap, clock)
                _refuse_other_than_stream(Reply(response.status_code, kind, read, clock.elapsed()))
            async for text in self._events(response, bounds, clock):
                if text.strip() == DONE:
                    return
                yield Chunk(clock.elapsed(), _event_object(text, clock.elapsed()))
                clock.expect(bounds.idle_s, Fault.STALL, f"the stream stood still for {bounds.idle_s:.3g} s")
            raise HttpFault(Fault.NO_DONE, "the stream ended without [DONE]", status=200, seconds=clock.elapsed())
        except httpx2.HTTPError as error:
            raise _redacted(_translated(error, self.url, response is not None, clock.elapsed()), self._key) from None
        except HttpFault as fault:
            raise _redacted(fault, self._key) from None
        finally:
            if response is not None:
                await response.aclose()

    async def _send(self, method: str, path: str, body: Mapping[str, Any] | None, limits: Limits) -> httpx2.Response:
        timeout = httpx2.Timeout(limits.total_s, connect=limits.connect_s)
        request = self._client.build_request(method, path, json=body, timeout=timeout)
        return await self._client.send(request, stream=True)

    async def _events(self, response: httpx2.Response, limits: Limits, clock: _Clock) -> AsyncGenerator[str, None]:
        _refuse_compression(response)
        reader = SseReader(limits.max_event_bytes)
        total = 0
        raws = response.aiter_raw()
        while True:
            try:
                raw = await clock.before(anext(raws))
            except StopAsyncIteration:
                break
            total += len(raw)
            self.received += len(raw)
            if total > limits.max_bytes:
                raise HttpFault(Fault.TOO_BIG, f"the stream is over {limits.max_bytes} bytes")
            for event in reader.feed(raw):
                yield event
        if reader.pending:
            raise HttpFault(Fault.CUT, "the stream ended inside an event", status=200, seconds=clock.elapsed())

    async def _body(self, response: httpx2.Response, cap: int, clock: _Clock) -> bytes:
        _refuse_compression(response)
        read = bytearray()
        raws = response.aiter_raw()
        while True:
            try:
                raw = await clock.before(anext(raws))
            except StopAsyncIteration:
                return bytes(read)
            read += raw
            self.received += len(raw)
            if len(read) > cap:
                raise HttpFault(Fault.TOO_BIG, f"the answer is over {cap} bytes", status=response.status_code)


class _Clock:
    """Deadlines of one exchange in an event loop: each wait ends at the nearer of the next event's and the total's."""

    def __init__(self, limits: Limits) -> None:
        self._began = time.monotonic()
        self._total_at = self._began + limits.total_s
        self._total = (Fault.TIMEOUT, f"no complete answer within {limits.total_s:.3g} s")
        self._at, self._fault = self._total_at, self._total

    def elapsed(self) -> float:
        """Seconds since the request began."""
        return time.monotonic() - self._began

    def expect(self, seconds: float, kind: Fault, message: str) -> None:
        """The next event is due in `seconds`."""
        self._at, self._fault = time.monotonic() + seconds, (kind, message)
        if self._at >= self._total_at:
            self._at, self._fault = self._total_at, self._total

    async def before(self, work: Awaitable[_T]) -> _T:
        """`work`, unless the deadline comes first. Raises the HttpFault of the deadline."""
        try:
            async with asyncio.timeout(self._at - time.monotonic()):
                return await work
        except TimeoutError:
            raise HttpFault(*self._fault, seconds=self.elapsed()) from None

    async def before_total(self, work: Awaitable[_T]) -> _T:
        """`work`, unless the time for the whole exchange is over first."""
        self._at, self._fault = self._total_at, self._total
        return await self.before(work)


def _headers(url: str, key: str | None) -> dict[str, str]:
    try:
        parsed = httpx2.URL(url)
        plain = not parsed.userinfo and parsed.path in ("", "/") and not parsed.query
        port_ok = parsed.port is None or 1 <= parsed.port <= 65535
        usable = parsed.scheme == "http" and bool(parsed.host) and plain and port_ok
    except httpx2.InvalidURL:
        usable = False
    if not usable:
        raise ConfigError(f"engine URL: expected http://HOST:PORT, found {printable(url)!r}")
    headers = {"Accept-Encoding": "identity", "Connection": "close", "User-Agent": "ds41ctl"}
    if key is not None:
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError("engine API key: expected printable ASCII without blanks, found something else")
        headers["Authorization"] = f"Bearer {key}"
    return headers


def _options(url: str) -> dict[str, Any]:
    return {
        "base_url": url,
        "trust_env": False,  # a proxy from the environment must not see loopback traffic
        "verify": ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),  # http only: do not load the CA bundle
        "limits": httpx2.Limits(max_connections=None, max_keepalive_connections=0),
        "follow_redirects": False,
    }


def is_loopback(url: str) -> bool:
    """True when `url` names this machine by a loopback address or as localhost."""
    try:
        host = httpx2.URL(url).host
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except (httpx2.InvalidURL, ValueError):
        return False


def _event_object(text: str, seconds: float) -> dict[str, Any]:
    """JSON object of one event. Raises HttpFault for anything else, and for an error that comes as an event."""
    data = _json_object(text.encode(), "text/event-stream", 200, seconds)
    if carries_error(data):
        message = f"the stream carries an error: {error_message(data)}"
        raise HttpFault(Fault.ERROR_EVENT, message, status=200, seconds=seconds)
    return data


def _refuse_other_than_stream(reply: Reply) -> None:
    reply.ok_json()
    message = "a whole JSON answer came where a stream was asked"
    raise HttpFault(Fault.BAD_JSON, message, status=200, seconds=reply.seconds)


def _translated(error: httpx2.HTTPError, url: str, answered: bool, seconds: float) -> HttpFault:
    reason = printable(str(error) or type(error).__name__)
    match error:
        case httpx2.ConnectTimeout():
            kind, text = Fault.TIMEOUT, f"no connection to {url} in time"
        case httpx2.ConnectError():
            kind, text = Fault.REFUSED, f"nothing answers at {url}: {reason}"
        case httpx2.TimeoutException():
            kind, text = Fault.TIMEOUT, f"{url} did not answer in time"
        case httpx2.NetworkError():
            kind, text = Fault.RESET, f"{url} reset the connection: {reason}"
        case httpx2.RemoteProtocolError() if answered or "disconnected" in str(error):
            kind, text = Fault.CUT, f"{url} closed the connection before the answer was complete"
        case httpx2.RemoteProtocolError():
            kind, text = Fault.OTHER_SERVICE, f"what listens at {url} does not speak HTTP: {reason}"
        case _:
            kind, text = Fault.OTHER_SERVICE, f"{url}: {reason}"
    return HttpFault(kind, text, seconds=seconds)


def _redacted(fault: HttpFault, key: str | None) -> HttpFault:
    if key is None or key not in fault.message:
        return fault
    text = fault.message.replace(key, "***")
    return HttpFault(fault.kind, text, status=fault.status, seconds=fault.seconds)


def _content_type(response: httpx2.Response) -> str:
    return response.headers.get("content-type", "").partition(";")[0].strip().lower()


def _refuse_compression(response: httpx2.Response) -> None:
    coding = response.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        text = f"the answer is compressed ({printable(coding, 20)}), identity was asked: a proxy in between?"
        raise HttpFault(Fault.ENCODING, text, status=response.status_code)


def _is_html(body: bytes, content_type: str) -> bool:
    return content_type == "text/html" or body.lstrip()[:9].lower().startswith((b"<!doctype", b"<html"))


def _other_service(status: int, seconds: float) -> HttpFault:
    text = f"an HTML page came back (HTTP {status}): another service holds this port"
    return HttpFault(Fault.OTHER_SERVICE, text, status=status, seconds=seconds)


def _status_fault(status: int, message: str, seconds: float) -> HttpFault:
    text = f"HTTP {status}" + (f": {message}" if message else "")
    return HttpFault(Fault.STATUS, text, status=status, seconds=seconds)


def _json_object(body: bytes, content_type: str, status: int, seconds: float) -> dict[str, Any]:
    if _is_html(body, content_type):
        raise _other_service(status, seconds)
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        shown = printable(body[:80].decode("utf-8", "replace"), 60)
        raise HttpFault(Fault.BAD_JSON, f"not JSON: {shown!r}", status=status, seconds=seconds) from None
    if not isinstance(parsed, dict):
        text = f"expected a JSON object, found {type(parsed).__name__}"
        raise HttpFault(Fault.BAD_JSON, text, status=status, seconds=seconds)
    return parsed
