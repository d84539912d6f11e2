"""Release: the engine's wheel by its address, resumable, kept for the next install, used only when proven."""

from __future__ import annotations

import contextlib
import hashlib
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2

from ds41ctl.adapters import download, files, mounts, part, supply, wheels
from ds41ctl.adapters.download import Client, Fault, HttpFile, Limits, Pinned
from ds41ctl.adapters.enginevenv import Progress
from ds41ctl.adapters.supply import Supply
from ds41ctl.adapters.transfer import Order, State, Transfer
from ds41ctl.core.errors import Ds41Error, NetworkError, NoSpaceError, NotFoundError
from ds41ctl.core.layout import Layout

CONNECTIONS = 4
LIMITS = Limits()
_TELL_EVERY_S = 1.0  # a download of minutes must not fill its own journal
_TOTAL = re.compile(r"bytes \d+-\d+/(\d+)")


def wheel(layout: Layout, given: Supply, progress: Progress) -> Path:
    """The engine's wheel: in the given folder, from an earlier download, or downloaded now.

    It has the digest that the profile or the release's checksum file states; of the latter see supply.judge. Raises
    IntegrityError for any other bytes, NotFoundError, NetworkError, NoSpaceError.
    """
    engine = layout.profile.engine
    wheels.demand_name(engine)
    if given.folder is not None:
        return _from_folder(layout, given, given.folder)
    base = supply.base_url(engine, given)
    folder = supply.release_dir(layout)
    if not base:
        raise NotFoundError(
            f"profile {layout.name} does not say where {engine.wheel} lies",
            hints=(f"ds41ctl engine install --profile {layout.name} --wheels FOLDER",),
        )
    with files.locked(folder / "lock", f"getting {engine.wheel}"), _own_hints():
        digest = engine.wheel_sha256 or wheels.entry(engine, _sums(layout, given, base, folder, progress))
        path = folder / engine.wheel
        if path.is_file() and files.file_sha256(path) == digest:
            progress(f"{engine.wheel} as downloaded before", {})
            return path
        _download(supply.file_url(base, engine.wheel), path, digest, progress)
        return path


def _from_folder(layout: Layout, given: Supply, folder: Path) -> Path:
    engine = layout.profile.engine
    page = (f"get it from {engine.wheel_url}",) if engine.wheel_url else ()
    digest = engine.wheel_sha256
    if not digest:
        sums = folder / engine.wheel_sums
        if not sums.is_file():
            raise NotFoundError(f"no {engine.wheel_sums} in {folder}", hints=page)
        digest = wheels.entry(engine, wheels.read_sums(sums))
        supply.judge(layout, given, files.file_sha256(sums), str(folder))
    return wheels.checked(folder / engine.wheel, digest, page)


def _sums(layout: Layout, given: Supply, base: str, folder: Path, progress: Progress) -> dict[str, str]:
    """The release's checksum file: the one of before when it is the accepted one, else as the server has it now."""
    engine = layout.profile.engine
    path = folder / engine.wheel_sums
    trusted = engine.wheel_sums_sha256 or given.accept_sums or supply.accepted(layout)[0]
    if trusted and path.is_file() and files.file_sha256(path) == trusted:
        supply.judge(layout, given, trusted, base)
        return wheels.read_sums(path)
    url = supply.file_url(base, engine.wheel_sums)
    progress(url, {})
    client = Client(base, None, LIMITS, lambda text: progress(text, {"note": True}))
    try:
        _, body = client.patiently(url, engine.wheel_sums)
    finally:
        client.close()
    found = wheels.parse_sums(body.decode(errors="replace"), url)
    wheels.entry(engine, found)  # what does not even name the wheel is not offered for acceptance
    if not trusted:
        files.publish(path, [body])  # kept, so that preflight can name its digest
    supply.judge(layout, given, hashlib.sha256(body).hexdigest(), base)
    files.publish(path, [body])
    return found


def _download(url: str, target: Path, sha256: str, progress: Progress) -> None:
    """Bring one file of the release. A cut-off download goes on where it was."""
    told = [0.0]

    def tell(state: State) -> None:
        now = time.monotonic()
        if now - told[0] >= _TELL_EVERY_S:
            told[0] = now
            data: dict[str, Any] = {"bytes": state.done, "total": state.total, "rate": state.rate, "eta_s": state.eta_s}
            progress(target.name, data)

    def note(text: str) -> None:
        progress(text, {"note": True})

    progress(url, {"note": True})
    client = Client(url, None, LIMITS, note)
    try:
        size = _size(client, url, target.name, note)
        identity = part.Identity(size, f"sha256:{sha256}")
        missing, free = size - part.claimed(target, identity), mounts.free_bytes(target.parent)
        if free < missing:
            raise NoSpaceError(
                f"{target.name} needs {missing} bytes in {target.parent}, {free} are free",
                hints=(f"df -h {target.parent}", "export DS41_CACHE_DIR=/a/larger/filesystem"),
            )
        file = HttpFile(client, url, Pinned(target.name, size))
        order = Order(target, size, identity.digest, (file,), lambda sha256: None)
        Transfer([order], connections=CONNECTIONS, limits=LIMITS, progress=tell, note=note).run()
    except OSError as error:
        raise files.os_error(error, f"writing {target}") from error
    finally:
        client.close()


def _size(client: Client, url: str, what: str, note: Any) -> int:
    """Bytes of the file at `url`, tried again after faults that may pass. A release states digests, no sizes."""
    for attempt in range(1, LIMITS.attempts):
        try:
            return _ask_size(client, url, what)
        except Fault as fault:
            wait = download.pause(LIMITS, attempt, fault.retry_after)
            note(f"{fault.message}; {download.next_attempt(LIMITS, attempt, wait)}")
            time.sleep(wait)
    return _ask_size(client, url, what)


def _ask_size(client: Client, url: str, what: str) -> int:
    """The total that the answer to a range of one byte states (or the length of a whole answer, which is not read)."""
    target = httpx2.URL(url)
    try:
        for _ in range(download.MAX_REDIRECTS):
            with contextlib.closing(client.send(target, {"Range": "bytes=0-0"})) as response:
                status, headers = response.status_code, response.headers
            if status not in download.REDIRECTS:
                break
            target = download.next_place(target, headers.get("location", ""), what)
        else:
            raise NetworkError(f"{what}: {target.host} redirects more than {download.MAX_REDIRECTS} times")
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
        raise download.translate(error, url) from None
    if status not in (200, 206):
        raise download.status_error(status, headers, url, what=what)
    match = _TOTAL.fullmatch(headers.get("content-range", ""))
    length = match[1] if status == 206 and match else headers.get("content-length", "") if status == 200 else ""
    if not length.isdecimal() or not int(length):
        raise NetworkError(f"{what}: {target.host} does not state its size")
    return int(length)


@contextlib.contextmanager
def _own_hints() -> Iterator[None]:
    """The transfer's advice is about the Hub; a release asks for no token and has no endpoint to set."""
    try:
        yield
    except Ds41Error as error:
        kept = tuple(hint for hint in error.hints if "HF_" not in hint)
        own = ("--wheels URL|FOLDER   # a mirror of the release's files",)
        error.hints = (*kept, *own) if len(kept) < len(error.hints) or isinstance(error, NetworkError) else error.hints
        raise
