"""Transfer: many files and several ranges of each at once, every file published as soon as its digest is right."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ds41ctl.adapters import files
from ds41ctl.adapters.download import Fault, Limits, RangesIgnored, Source, Stream, next_attempt, pause
from ds41ctl.adapters.part import Identity, Part
from ds41ctl.core.errors import Ds41Error, IntegrityError

SPAN = 64 << 20  # one request: long enough that its start costs nothing, short enough that all workers get some
RANGES_PER_FILE = 4
STALL_BYTES = 64 << 10  # less than this in `stall_s` is a stall
XET_FAULTS = 3  # then the file goes on over plain HTTP
# Xet hands out pieces as large as a xorb (64 MiB) or as its span, whichever is less, and holds two or three a stream:
# the span bounds its memory, and what a kill loses of a file besides part.UNCLAIMED_MAX. Peak of the process, measured
# on its local store with 1 GiB in two or four files: 200 to 252 MiB with four streams of 12 MiB, 244 to 288 with four
# of 16 MiB, 326 to 376 with two of 64 MiB
XET_STREAMS = 4
XET_SPAN = 12 << 20
XET_RANGES_PER_FILE = 2
_RATE_WINDOW_S = 10.0
_LOOK_S = 0.2


@dataclass(frozen=True)
class Order:
    """One file to bring: `sources` in the order they are tried; `arrived` is told the sha256 once it is published,
    `before` just before that. `sha256`: see part.Identity."""

    target: Path
    size: int
    digest: str
    sources: tuple[Source, ...]
    arrived: Callable[[str], None]
    sha256: str = ""
    before: Callable[[str], None] = lambda sha256: None


@dataclass(frozen=True)
class State:
    """Where a transfer is. Bytes; `rate` is bytes a second over the last seconds, None before anything is known."""

    done: int
    total: int
    rate: float | None
    active: tuple[tuple[str, int, int], ...]

    @property
    def eta_s(self) -> float | None:
        """Seconds to go at this rate."""
        return (self.total - self.done) / self.rate if self.rate else None


@dataclass
class Summary:
    """What a transfer did: bytes by the way they came, bytes found from an earlier run."""

    received: Counter[str] = field(default_factory=Counter)
    resumed: int = 0
    files: int = 0


@dataclass(eq=False)
class _File:
    order: Order
    part: Part
    sources: list[Source]
    flying: list[tuple[int, int]] = field(default_factory=list)
    faults: int = 0
    xet_faults: int = 0
    single: bool = False  # the server ignores ranges
    again: bool = False  # this is the second try after a wrong digest
    not_before: float = 0.0
    finishing: bool = False

    @property
    def xet(self) -> bool:
        """Comes from Xet storage now."""
        return self.sources[0].label == "xet"

    @property
    def span(self) -> int:
        """Bytes of one request."""
        return min(SPAN, XET_SPAN) if self.xet else SPAN

    @property
    def ranges(self) -> int:
        """Requests at once."""
        return XET_RANGES_PER_FILE if self.xet else RANGES_PER_FILE

    def gap(self) -> tuple[int, int] | None:
        """The next span nobody is fetching, None when there is none."""
        if self.finishing or len(self.flying) >= (1 if self.single else self.ranges):
            return None
        missing = self.part.missing()
        if self.single:
            return (missing[0][0], self.order.size) if missing else None
        for begin, end in missing:
            at = begin
            for busy_begin, busy_end in sorted(self.flying):
                if busy_end <= at or busy_begin >= end:
                    continue
                if busy_begin > at:
                    return at, min(busy_begin, at + self.span)
                at = busy_end
            if at < end:
                return at, min(end, at + self.span)
        return None


@dataclass(eq=False)
class _Flight:
    """One span on its way. `warned`: it stood still and was cancelled; `lost`: even then it did not end."""

    item: _File
    span: tuple[int, int]
    source: Source
    thread: threading.Thread
    since: float
    stream: Stream | None = None
    bytes: int = 0
    warned: bool = False
    lost: bool = False


class Transfer:
    """Runs orders with `connections` workers; `progress` and `note` are called by the thread that calls `run` alone.

    One run an object.
    """

    def __init__(
        self,
        orders: Sequence[Order],
        *,
        connections: int,
        limits: Limits,
        progress: Callable[[State], None],
        note: Callable[[str], None],
    ) -> None:
        self._waiting = deque(sorted(orders, key=lambda order: order.size))
        self._total = sum(order.size for order in orders)
        self._connections, self._limits, self._progress, self._note = connections, limits, progress, note
        self._notes: deque[str] = deque()
        self._changed = threading.Condition()
        self._active: list[_File] = []
        self._flights: set[_Flight] = set()
        self._workers: list[threading.Thread] = []
        self._published = 0
        self._error: BaseException | None = None
        self._stop = False
        self._rates: deque[tuple[float, int]] = deque()
        self.summary = Summary()

    def run(self) -> Summary:
        """Bring everything. Raises the first error; parts stay for the next run."""
        for _ in range(self._connections):
            self._hire()
        try:
            while self._busy():
                with self._changed:
                    self._changed.wait(_LOOK_S)
                self._watch()
                self._tell()
                self._progress(self._state())
        finally:
            self._end()
            self._tell()
        if self._error is not None:
            raise self._error
        return self.summary

    def _busy(self) -> bool:
        with self._changed:
            return self._error is None and bool(self._waiting or self._active)

    def _hire(self) -> None:
        worker = threading.Thread(target=self._work, daemon=True)
        self._workers.append(worker)
        worker.start()

    def _end(self) -> None:
        with self._changed:
            self._stop = True
            for flight in self._flights:
                if flight.stream is not None:
                    flight.stream.cancel()
            self._changed.notify_all()
        deadline = time.monotonic() + 5
        for worker in self._workers:
            worker.join(max(0.0, deadline - time.monotonic()))
        for item in self._active:
            with contextlib.suppress(OSError):  # a full disk: the last claim stays the one before
                item.part.keep()
            item.part.close()

    # ---- watching

    def _tell(self) -> None:
        while self._notes:
            self._note(self._notes.popleft())

    def _state(self) -> State:
        with self._changed:
            active = tuple((f.order.target.name, f.part.received, f.order.size) for f in self._active)
            done = self._published + sum(received for _, received, _ in active)
            fresh = sum(self.summary.received.values())
        now = time.monotonic()
        self._rates.append((now, fresh))
        while now - self._rates[0][0] > _RATE_WINDOW_S:
            self._rates.popleft()
        seconds = now - self._rates[0][0]
        rate = (fresh - self._rates[0][1]) / seconds if seconds > 1 else None
        return State(done, self._total, rate, active)

    def _watch(self) -> None:
        """Drop streams that stand still (silence, or a drip that would take for ever)."""
        now = time.monotonic()
        with self._changed:
            for flight in [flight for flight in self._flights if now - flight.since >= self._limits.stall_s]:
                # a reader that waits for this disk is no fault of the server's
                still = flight.bytes < STALL_BYTES and not flight.item.part.waiting
                if still and flight.warned:
                    self._lose(flight)
                elif still and flight.stream is not None:
                    flight.stream.cancel()
                flight.warned, flight.since, flight.bytes = still, now, 0

    def _lose(self, flight: _Flight) -> None:
        """A library call that never comes back: leave its thread behind and let another one do its work."""
        flight.lost = True
        self._flights.discard(flight)
        self._workers.remove(flight.thread)
        flight.item.flying.remove(flight.span)
        self._faulted(
            flight.item, flight.source, Fault(f"{flight.source.label}: a stream that stands still does not end")
        )
        self._hire()

    # ---- working

    def _work(self) -> None:
        try:
            while True:
                with self._changed:
                    found = self._next()
                    while found is None:
                        if self._stop or self._error is not None or not (self._waiting or self._active):
                            self._changed.notify_all()
                            return
                        self._changed.wait(_LOOK_S)
                        found = self._next()
                    item, span = found
                    flight = None if span is None else self._take_off(item, span)
                if flight is None:
                    self._finish(item)
                else:
                    self._fetch(flight)
                    if flight.lost:
                        return
        except BaseException as error:
            with self._changed:
                self._error = self._error or self._typed(error)
                self._changed.notify_all()

    @staticmethod
    def _typed(error: BaseException) -> BaseException:
        if isinstance(error, OSError) and not isinstance(error, Ds41Error):
            return files.os_error(error, f"writing {error.filename or 'the pack'}")
        return error

    def _next(self) -> tuple[_File, tuple[int, int] | None] | None:
        """Work for one worker: a span of a file, or None instead of a span: the file is whole, finish it."""
        if self._stop or self._error is not None:
            return None
        now = time.monotonic()
        for item in self._active:
            if item.finishing or item.not_before > now:
                continue
            if not item.flying and not item.part.missing():
                item.finishing = True
                return item, None
        # spread the workers: the file with the fewest of them first, a new file before a second range of an old one
        xet = sum(flight.source.label == "xet" for flight in self._flights)
        for item in sorted(self._active, key=lambda f: len(f.flying)):
            if xet >= XET_STREAMS and item.xet:
                continue
            if item.flying and self._waiting and len(self._active) < self._connections:
                break
            span = None if item.not_before > now else item.gap()
            if span is not None:
                return item, span
        if self._waiting and len(self._active) < self._connections:
            self._start(self._waiting.popleft())
            return self._next()
        return None

    def _start(self, order: Order, *, sources: list[Source] | None = None, again: bool = False) -> None:
        identity = Identity(order.size, order.digest, order.sha256)
        part = Part(order.target, identity, git=order.digest.startswith("git:"))
        self.summary.resumed += part.resumed
        self._active.append(_File(order, part, sources or list(order.sources), again=again))

    def _take_off(self, item: _File, span: tuple[int, int]) -> _Flight:
        flight = _Flight(item, span, item.sources[0], threading.current_thread(), time.monotonic())
        item.flying.append(span)
        self._flights.add(flight)
        return flight

    def _fetch(self, flight: _Flight) -> None:
        item, (begin, end), single = flight.item, flight.span, flight.item.single
        fault: Fault | None = None
        try:
            with flight.source.open(0 if single else begin, end) as stream:
                flight.stream = stream
                self._receive(flight, stream, 0 if single else begin)
        except Fault as caught:
            fault = caught
        finally:
            with self._changed:
                if not flight.lost:
                    self._flights.discard(flight)
                    item.flying.remove(flight.span)
                    if fault is not None:
                        self._faulted(item, flight.source, fault)
                self._changed.notify_all()

    def _receive(self, flight: _Flight, stream: Stream, at: int) -> None:
        """Write a stream that begins at `at`; what lies before the span is there already and is skipped."""
        item, keep_from = flight.item, flight.span[0]
        for chunk in stream:
            data = chunk
            if at < keep_from:
                data = chunk[keep_from - at :]
            if data and not flight.lost:
                item.part.write(at + len(chunk) - len(data), data)
            at += len(chunk)
            with self._changed:
                self.summary.received[flight.source.label] += len(chunk)
                flight.bytes += len(chunk)
                if data:  # progress: what a stream repeats from the start is none
                    item.faults = 0
                if self._stop or self._error is not None or flight.lost:
                    return

    def _faulted(self, item: _File, source: Source, fault: Fault) -> None:
        """Wait and try again, or go over to the next source, or give up."""
        if self._stop or self._error is not None:
            return
        if isinstance(fault, RangesIgnored):
            if not item.single:
                item.single = True
                self._notes.append(fault.message + ": one stream from the start")
            return
        if source is not item.sources[0]:  # another worker has already gone over to the next source
            return
        item.faults += 1
        if source.label == "xet":
            item.xet_faults += 1
            if item.xet_faults >= XET_FAULTS and len(item.sources) > 1:
                item.sources.pop(0)
                item.faults = 0
                self._notes.append(f"{item.order.target.name}: {fault.message}; going on over plain HTTP")
                return
        if item.faults >= self._limits.attempts:
            self._error = Fault(f"{fault.message} ({item.faults} times in a row)")
            return
        wait = pause(self._limits, item.faults, fault.retry_after)
        item.not_before = time.monotonic() + wait
        attempt = next_attempt(self._limits, item.faults, wait)
        self._notes.append(f"{item.order.target.name}: {fault.message}; {attempt}")

    def _finish(self, item: _File) -> None:
        try:
            sha256 = item.part.finish(item.order.before)
        except IntegrityError as error:
            self._wrong_digest(item, error)
            return
        item.order.arrived(sha256)
        with self._changed:
            self._active.remove(item)
            self._published += item.order.size
            self.summary.files += 1
            self._changed.notify_all()

    def _wrong_digest(self, item: _File, error: IntegrityError) -> None:
        """Bytes of an earlier run, or of Xet, get one more chance from scratch over plain HTTP; others are wrong."""
        item.part.discard()
        with self._changed:
            self._active.remove(item)
            plain = [source for source in item.sources if source.label != "xet"]
            doubtful = item.part.resumed > 0 or item.order.sources[0].label == "xet"
            if item.again or not doubtful or not plain:
                raise error
            self._notes.append(f"{error.message}; fetched once more")
            self._start(item.order, sources=plain, again=True)
            self._changed.notify_all()
