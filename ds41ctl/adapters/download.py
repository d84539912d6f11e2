"""Ranged HTTP of files that a server keeps at a fixed size: what arrives is the asked range, or one typed fault.

The second importer of httpx2 beside http.py: that one speaks to our own engine over loopback, this one to the Hub,
its mirrors and the stores they redirect to (proxies, TLS, redirects, credentials).
"""

from __future__ import annotations

import contextlib
import email.utils
import os
import re
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

import httpx2

from ds41ctl.core.errors import ConfigError, Ds41Error, IntegrityError, NetworkError, NotFoundError, UnauthorisedError
from ds41ctl.core.masking import mask_text

REDIRECTS = (301, 302, 303, 307, 308)
MAX_REDIRECTS = 8
SMALL_CAP = 64 << 20  # bytes of a file list or another answer of the API
RETRY_AFTER_CAP_S = 300.0
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
_TOKEN_HINT = "export HF_TOKEN=...   # or: hf auth login"  # noqa: S105 - a hint, not a token


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a transfer. `stall_s`: without STALL_BYTES in this time a stream is dropped and opened again;
    `attempts`: faults in a row, without progress between them, before the transfer ends."""

    connect_s: float = 15.0
    stall_s: float = 60.0
    attempts: int = 6
    backoff_s: float = 0.5
    backoff_max_s: float = 30.0


def pause(limits: Limits, attempt: int, retry_after: float | None) -> float:
    """Seconds to wait before try number `attempt` + 1."""
    return retry_after if retry_after is not None else min(limits.backoff_s * 2 ** (attempt - 1), limits.backoff_max_s)


def next_attempt(limits: Limits, attempt: int, wait_s: float) -> str:
    """What is said while waiting after try number `attempt`."""
    return f"attempt {attempt + 1} of {limits.attempts} in {wait_s:.3g} s"


class Fault(NetworkError):
    """A fault worth another try; `retry_after` in seconds when the server named a time."""

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message, hints=("run the same command again: it goes on where it stopped",))
        self.retry_after = retry_after


class RangesIgnored(Fault):
    """The server answers a range with the whole file."""


class FileChanged(IntegrityError):
    """A server's file is no longer the one whose first bytes it sent; `what` names it."""

    def __init__(self, message: str, what: str) -> None:
        super().__init__(message, hints=("run the same command again: this file is begun anew",))
        self.what = what


class Stream(Protocol):
    """Bytes of one span, in order."""

    def __iter__(self) -> Iterator[bytes]:
        """The bytes; ends early only by raising."""
        ...

    def cancel(self) -> None:
        """Make the reader's next step raise or end; callable from another thread."""
        ...


class Source(Protocol):
    """One file at one place."""

    label: str

    def open(self, begin: int, end: int) -> contextlib.AbstractContextManager[Stream]:
        """Bytes [begin, end)."""
        ...


def translate(error: Exception, url: str) -> Ds41Error:
    """The error a user understands for an exception of the HTTP library."""
    if isinstance(error, Ds41Error):
        return error
    if isinstance(error, httpx2.RequestError):
        with contextlib.suppress(RuntimeError):  # without a request
            url = str(error.request.url)  # where a redirect had led to
    place = _place(url)
    text = mask_text(str(error).splitlines()[0] if str(error) else type(error).__name__)
    if isinstance(error, httpx2.ConnectTimeout | httpx2.PoolTimeout):
        return Fault(f"{place}: no connection in time")
    if isinstance(error, httpx2.TimeoutException):
        return Fault(f"{place}: no byte for too long")
    if isinstance(error, httpx2.ConnectError):
        cause = _tls_cause(error)
        if cause is not None:
            return _tls_error(place, cause)
        fault = Fault(f"{place}: cannot be reached: {text}")
        if urllib.request.getproxies():
            fault.hints = ("env | grep -i _proxy   # the request went through this", *fault.hints)
        return fault
    if isinstance(error, httpx2.HTTPError | httpx2.StreamError | ssl.SSLError | OSError):
        return Fault(f"{place}: the connection broke: {text}")
    return NetworkError(f"{place}: {text}")


def _tls_cause(error: BaseException) -> ssl.SSLError | None:
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    return cause


def _tls_error(place: str, cause: ssl.SSLError) -> NetworkError:
    """A handshake that failed will fail again: no Fault."""
    if not isinstance(cause, ssl.SSLCertVerificationError):
        reason = (cause.reason or str(cause)).lower().replace("_", " ")
        return NetworkError(f"{place}: no TLS connection: {reason}", hints=("echo $HF_ENDPOINT   # https or http?",))
    why = cause.verify_message.rstrip(".")
    if "expired" in why or "not yet valid" in why:
        hint = "date   # or is it this machine's clock?"
    elif "mismatch" in why:
        hint = "echo $HF_ENDPOINT   # the certificate is made out to another name"
    else:
        hint = "export SSL_CERT_FILE=/path/of/your/ca.pem   # the CA that signed it"
    return NetworkError(f"{place}: its certificate is not accepted: {why}", hints=(hint,))


def status_error(status: int, headers: Mapping[str, str], url: str, *, what: str) -> Ds41Error:
    """The error for an HTTP status that is no success; `what` names the file or list that was asked for."""
    place, code = _place(url), headers.get("x-error-code", "")
    if status in (401, 403):
        gated = code == "GatedRepo"
        asks = (
            "asks you to accept its terms first"
            if gated
            else "refuses this token"
            if status == 403
            else "wants a token"
        )
        return UnauthorisedError(
            f"{what}: {place} {asks} (HTTP {status}{f', {code}' if code else ''})", hints=(_TOKEN_HINT,)
        )
    if status in (404, 410):
        thing = {
            "RepoNotFound": "no such repository",
            "RevisionNotFound": "no such revision",
            "EntryNotFound": "no such file",
        }
        return NotFoundError(f"{what}: {thing.get(code, 'not found')} at {place} (HTTP {status})")
    if status == 416:
        return IntegrityError(f"{what}: {place} holds a shorter file than the pinned one (HTTP 416)")
    if status in (408, 425, 429) or status >= 500:
        return Fault(f"{what}: {place} answers HTTP {status}", retry_after=retry_after(headers.get("retry-after", "")))
    return NetworkError(f"{what}: {place} answers HTTP {status}")


def retry_after(text: str) -> float | None:
    """Seconds a Retry-After header asks for (delay or date), capped; None when it says nothing usable."""
    if text.strip().isdecimal():
        return min(float(text), RETRY_AFTER_CAP_S)
    try:
        at = email.utils.parsedate_to_datetime(text)
    except ValueError:
        return None
    if at.tzinfo is None:
        at = at.replace(tzinfo=UTC)
    return min(max(0.0, (at - datetime.now(UTC)).total_seconds()), RETRY_AFTER_CAP_S)


def _place(url: str) -> str:
    try:
        parsed = httpx2.URL(url)
    except httpx2.InvalidURL:
        return "the server"
    return parsed.host + (f":{parsed.port}" if parsed.port else "")


def next_place(url: httpx2.URL, location: str, what: str) -> httpx2.URL:
    """Where a redirect leads. Raises NetworkError for a place without TLS after one with it, or no web address."""
    target = url.join(location)
    if target.scheme not in ("http", "https") or (url.scheme, target.scheme) == ("https", "http"):
        raise NetworkError(f"{what}: {url.host} redirects to {target.scheme}://{target.host}")
    return target


class Client:
    """Connections shared by all files. `token` goes to `endpoint`'s origin alone and is shown nowhere."""

    def __init__(
        self, endpoint: str, token: str | None, limits: Limits, note: Callable[[str], None] = lambda text: None
    ) -> None:
        """`note` is told of every wait. Raises ConfigError for CA files or proxies of this environment that are none.

        `SSL_CERT_FILE` (or `SSL_CERT_DIR`) replaces the certificates of the system.
        """
        self.endpoint, self._token, self.limits, self._note = httpx2.URL(endpoint), token, limits, note
        try:
            self._client = httpx2.Client(
                timeout=httpx2.Timeout(limits.stall_s, connect=limits.connect_s),
                limits=httpx2.Limits(max_connections=None, max_keepalive_connections=16),
                headers={"Accept-Encoding": "identity", "User-Agent": "ds41ctl"},
                follow_redirects=False,
            )
        except OSError as error:
            name = next((name for name in ("SSL_CERT_FILE", "SSL_CERT_DIR") if os.environ.get(name)), "")
            reason = (error.strerror or str(error)).lower()
            raise ConfigError(
                f"{name}={os.environ[name]}: no CA certificates there: {reason}" if name else f"TLS: {reason}",
                hints=(f"unset {name}   # then the certificates of the system count",) if name else (),
            ) from None
        except (ValueError, ImportError, httpx2.InvalidURL) as error:
            found = " ".join(f"{scheme}: {mask_text(url)}" for scheme, url in urllib.request.getproxies().items())
            reason = "SOCKS is not supported" if isinstance(error, ImportError) else "expected http://HOST:PORT"
            raise ConfigError(
                f"the proxy of this environment ({found}) cannot be used: {reason}", hints=("env | grep -i _proxy",)
            ) from None

    def close(self) -> None:
        """Free the connections."""
        self._client.close()

    def authorisation(self, url: httpx2.URL) -> dict[str, str]:
        """The header for `url`: the token for the endpoint's own origin, nothing for any other."""
        same = (url.scheme, url.host, url.port) == (self.endpoint.scheme, self.endpoint.host, self.endpoint.port)
        return {"Authorization": f"Bearer {self._token}"} if self._token and same else {}

    def get(self, url: str, what: str) -> tuple[Mapping[str, str], bytes]:
        """(headers, body) of a small answer, redirects followed. Raises Fault and the errors of status_error."""
        target = httpx2.URL(url)
        try:
            for _ in range(MAX_REDIRECTS):
                response = self.send(target, {})
                with contextlib.closing(response):
                    body = b""
                    for chunk in response.iter_bytes():
                        body += chunk
                        if len(body) > SMALL_CAP:
                            raise NetworkError(f"{what}: {_place(url)} answers with more than {SMALL_CAP} bytes")
                if response.status_code not in REDIRECTS:
                    break
                target = next_place(target, response.headers.get("location", ""), what)
            else:
                raise NetworkError(f"{what}: {_place(url)} redirects more than {MAX_REDIRECTS} times")
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
            raise translate(error, url) from None
        if response.status_code != 200:
            raise status_error(response.status_code, response.headers, url, what=what)
        return response.headers, body

    def patiently(self, url: str, what: str) -> tuple[Mapping[str, str], bytes]:
        """`get`, tried again after faults that may pass."""
        for attempt in range(1, self.limits.attempts):
            try:
                return self.get(url, what)
            except Fault as fault:
                wait = pause(self.limits, attempt, fault.retry_after)
                self._note(f"{fault.message}; {next_attempt(self.limits, attempt, wait)}")
                time.sleep(wait)
        return self.get(url, what)

    def send(self, url: httpx2.URL, headers: Mapping[str, str]) -> httpx2.Response:
        """One streamed GET, redirects not followed."""
        request = self._client.build_request("GET", url, headers={**headers, **self.authorisation(url)})
        return self._client.send(request, stream=True)


@dataclass(frozen=True)
class Pinned:
    """What a server must say about the file, as far as it says anything. '' is not compared."""

    what: str
    size: int
    revision: str = ""
    digests: tuple[str, ...] = ()


class HttpFile:
    """A file behind a URL that may redirect: the place it ends at is remembered, so is the ETag.

    `ranges_alone`: no digest of the whole file will be taken, so what binds a range to the pinned file is what every
    single answer says: its range and size, and one ETag (`etag`, of an earlier run; '': the first one counts). A
    server without ETags is asked through the Hub each time, which must state the pinned digest.
    """

    label = "http"

    def __init__(self, client: Client, url: str, pinned: Pinned, *, ranges_alone: bool = False, etag: str = "") -> None:
        self._client, self._url, self._pinned = client, httpx2.URL(url), pinned
        self._ranges_alone = ranges_alone
        self._lock = threading.Lock()
        self._final: httpx2.URL | None = None
        self._etag = etag
        self._linked = False  # the Hub stated the pinned digest

    @property
    def etag(self) -> str:
        """The ETag of the file, '' while nothing was asked."""
        with self._lock:
            return self._etag

    @contextlib.contextmanager
    def open(self, begin: int, end: int) -> Iterator[Stream]:
        """Ask for bytes [begin, end).

        Raises RangesIgnored when the server sends the whole file instead and `begin` is not 0, IntegrityError when
        what it says about the file is not what is pinned, Fault and the errors of status_error.
        """
        try:
            response = self._get(begin, end)
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
            raise translate(error, str(self._final or self._url)) from None
        try:
            yield _Body(response, end - begin)
        finally:
            with contextlib.suppress(Exception):
                response.close()

    def _get(self, begin: int, end: int) -> httpx2.Response:
        with self._lock:
            final, etag = self._final, self._etag
        headers = {"Range": f"bytes={begin}-{end - 1}"}
        if etag:
            headers["If-Range"] = etag
        if final is not None:
            response = self._client.send(final, headers)
            if response.status_code in (206, 200, 416, 429) or response.status_code >= 500:
                return self._accepted(response, begin, end, sent_etag=etag)
            response.close()  # a signed address that has expired: ask the Hub for a new one
        return self._accepted(self._resolve(headers), begin, end, sent_etag=etag)

    def _resolve(self, headers: Mapping[str, str]) -> httpx2.Response:
        url = self._url
        for _ in range(MAX_REDIRECTS):
            response = self._client.send(url, headers)
            self._compare(response.headers)
            if response.status_code not in REDIRECTS:
                with self._lock:
                    self._final = url if response.status_code in (200, 206) else None
                return response
            response.close()
            url = next_place(url, response.headers.get("location", ""), self._pinned.what)
        raise NetworkError(f"{self._pinned.what}: {self._url.host} redirects more than {MAX_REDIRECTS} times")

    def _compare(self, headers: httpx2.Headers) -> None:
        """A Hub states commit, size and digest of the file: another one than the pinned is never fetched."""
        what, pinned = self._pinned.what, self._pinned
        commit = headers.get("x-repo-commit", "")
        if pinned.revision and commit and commit != pinned.revision:
            raise IntegrityError(
                f"{what}: the server answers with commit {commit[:12]}, {pinned.revision[:12]} is pinned"
            )
        size = headers.get("x-linked-size", "")
        if size.isdecimal() and int(size) != pinned.size:
            raise IntegrityError(f"{what}: the server says {size} bytes, {pinned.size} are pinned")
        digest = headers.get("x-linked-etag", "").removeprefix("W/").strip('"')
        if pinned.digests and digest and digest not in pinned.digests:
            raise IntegrityError(f"{what}: the server says digest {digest[:16]}, {pinned.digests[0][:16]} is pinned")
        self._linked = self._linked or bool(pinned.digests and digest)

    def _accepted(self, response: httpx2.Response, begin: int, end: int, *, sent_etag: str) -> httpx2.Response:
        try:
            self._judge(response, begin, end, sent_etag)
        except BaseException:
            response.close()
            raise
        return response

    def _judge(self, response: httpx2.Response, begin: int, end: int, sent_etag: str) -> None:
        what, size = self._pinned.what, self._pinned.size
        status, headers, url = response.status_code, response.headers, str(response.request.url)
        if status not in (200, 206):
            raise status_error(status, headers, url, what=what)
        coding = headers.get("content-encoding", "identity").lower()
        if coding not in ("", "identity"):
            raise NetworkError(f"{what}: {_place(url)} compresses ({coding}) though identity was asked: a proxy?")
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind == "text/html" and not what.endswith((".html", ".htm")):
            raise NetworkError(f"{what}: {_place(url)} answers with a web page: a login page or proxy is in between")
        if self._ranges_alone:
            self._judge_alone(headers, url, whole=status == 200 and (begin, end) != (0, size))
        if status == 206:
            match = _CONTENT_RANGE.fullmatch(headers.get("content-range", ""))
            if match is None or int(match[1]) != begin or not begin <= int(match[2]) < end:
                raise Fault(f"{what}: {_place(url)} answers with another range than the one asked for")
            if match[3] != "*" and int(match[3]) != size:
                raise IntegrityError(f"{what}: the server says {match[3]} bytes, {size} are pinned")
        else:
            if sent_etag and begin:
                with self._lock:
                    self._etag, self._final = "", None
                raise Fault(f"{what}: the file changed on {_place(url)} between two requests")
            length = headers.get("content-length", "")
            if length.isdecimal() and int(length) != size:
                raise IntegrityError(f"{what}: the server says {length} bytes, {size} are pinned")
            if begin:
                raise RangesIgnored(f"{what}: {_place(url)} ignores ranges")
        etag = headers.get("etag", "")
        if etag and not etag.startswith("W/"):
            with self._lock:
                self._etag = etag

    def _judge_alone(self, headers: httpx2.Headers, url: str, *, whole: bool) -> None:
        """Nothing checks the bytes of a range later: the answer itself must bind them to the pinned file."""
        what, known = self._pinned.what, self.etag
        stated = headers.get("etag", "")
        etag = stated.removeprefix("W/")
        if known and etag and etag != known:
            raise FileChanged(f"{what}: the file changed on {_place(url)}: ETag {etag}, {known} before", what)
        if whole:
            raise NetworkError(
                f"{what}: {_place(url)} ignores ranges, single tensors cannot be fetched from it",
                hints=("unset HF_ENDPOINT   # or name a mirror that serves ranges",),
            )
        match = _CONTENT_RANGE.fullmatch(headers.get("content-range", ""))
        if match is not None and match[3] == "*":
            raise NetworkError(f"{what}: {_place(url)} does not state the file's size")
        if not etag or etag != stated:
            if not self._linked:
                raise IntegrityError(
                    f"{what}: {_place(url)} states neither ETag nor digest: nothing binds a range to the pinned file",
                    hints=("unset HF_ENDPOINT   # the Hub states both",),
                )
            with self._lock:
                self._final = None


class _Body:
    """The body of one answer, cut at the span's end; shorter than the span is a Fault."""

    def __init__(self, response: httpx2.Response, length: int) -> None:
        self._response, self._left = response, length

    def __iter__(self) -> Iterator[bytes]:
        url = str(self._response.request.url)
        try:
            for chunk in self._response.iter_raw():
                piece = chunk[: self._left]
                self._left -= len(piece)
                if piece:
                    yield piece
                if not self._left:
                    return
        except (httpx2.HTTPError, httpx2.StreamError, ssl.SSLError, OSError) as error:
            raise translate(error, url) from None
        if self._left:
            raise Fault(f"{_place(url)}: the answer ended {self._left} bytes early")

    def cancel(self) -> None:
        """Shut the socket down: a reader that waits for bytes gets an error."""
        stream = self._response.extensions.get("network_stream")
        found = stream.get_extra_info("socket") if stream is not None else None
        if found is not None:
            with contextlib.suppress(OSError):
                found.shutdown(socket.SHUT_RDWR)
