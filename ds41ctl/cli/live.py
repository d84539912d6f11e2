"""Live: what load commands know about the running engine, and the lock that keeps them apart."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ds41ctl.cli.session import Session
from ds41ctl.core.errors import LockedError, NotFoundError

if TYPE_CHECKING:
    from ds41ctl.adapters.http import EngineClient
    from ds41ctl.adapters.running import Running


@dataclass(frozen=True)
class Live:
    """The engine behind a URL: its record when it was started here, the digests its numbers belong to, and `drift`:
    what differs from the profile (each a sentence). `drafter`: it was started with one (None: not known). `key`: what
    to send to it."""

    url: str
    record: Running | None
    profile_digest: str
    engine_digest: str
    facts_digest: str
    store_dir: Path | None
    drift: tuple[str, ...]
    drafter: bool | None = None
    key: str | None = field(default=None, repr=False)


def client(session: Session) -> EngineClient:
    """Client of this profile's engine, with the key it was started with."""
    from ds41ctl.adapters import running
    from ds41ctl.adapters.http import EngineClient

    record = running.read(session.layout.record_path)
    return EngineClient(session.layout.url, _key(session, record))


def started(session: Session) -> tuple[str, ...]:
    """The command line that this profile's running engine was started with; empty when it was not started here."""
    from ds41ctl.adapters import running

    record = running.read(session.layout.record_path)
    return record.argv if record is not None and record.alive() else ()


def drafter(session: Session) -> bool | None:
    """Whether this profile's running engine was started with its drafter; None: it was not started here."""
    argv = started(session)
    return session.profile.drafter_in(argv) if argv else None


def _key(session: Session, record: Running | None) -> str | None:
    """The key of the recorded engine, whatever this shell's settings say; else that of the settings."""
    from ds41ctl.adapters import keyfile
    from ds41ctl.steps import proof

    started_with = proof.key_of(record) if record is not None else None
    return started_with or keyfile.read(session.layout.api_key_file)


def look(session: Session, target: str | None) -> Live:
    """What is known of the engine: the one of this profile, or any other behind `target`."""
    from ds41ctl.adapters import enginevenv, running, store
    from ds41ctl.adapters.http import is_loopback
    from ds41ctl.cli.status import drift
    from ds41ctl.steps.proof import reads_records

    layout = session.layout
    url = target or layout.url
    record = running.read(layout.record_path)
    if record is not None and (not record.alive() or (target and record.url != target)):
        record = None
    found: tuple[str, ...] = ("the engine was not started by this ds41ctl: its pin is not known",)
    if record is not None:
        found = tuple(drift(session, record))
    return Live(
        url=url,
        record=record,
        profile_digest=session.profile.digest(),
        engine_digest=enginevenv.manifest_digest(layout.engine_dir) if record is not None else "",
        facts_digest=machine_digest(session),
        # who reads shards need not map them: nothing can be looked for while a load runs
        store_dir=store.locate(layout) if record is not None and reads_records(layout) else None,
        drift=found,
        drafter=session.profile.drafter_in(record.argv) if record is not None else None,
        # a key of this machine is not sent to another one
        key=_key(session, record) if record is not None or is_loopback(url) else None,
    )


def to_load(session: Session, target: str | None, *, confirmed: bool) -> Live:
    """`look` at an engine that is to be put under load.

    Raises NotFoundError when this profile's engine is to be and does not run, ConfigError for another machine's
    without `confirmed`.
    """
    from smoke.load import require_confirmed

    known = look(session, target)
    if known.record is None and target is None:
        raise NotFoundError(
            f"{session.profile.name} is not running", hints=("ds41ctl up", "another engine: --target URL")
        )
    require_confirmed(known.url, confirmed)
    return known


def machine_digest(session: Session) -> str:
    """sha256 of what of this machine does not change from minute to minute: system, processor, driver, GPUs."""
    from ds41ctl.adapters.probe import probe

    facts = probe(session.layout)
    lasting = {
        "system": facts.system.model_dump(
            mode="json", include={"kernel", "machine", "os_name", "libc", "cpus", "cpu_model", "cpu_flags"}
        ),
        "driver": facts.driver,
        "gpus": [[gpu.name, gpu.memory_total_mib] for gpu in facts.gpus or ()],
    }
    return hashlib.sha256(json.dumps(lasting, sort_keys=True, default=str).encode()).hexdigest()


@contextlib.contextmanager
def only_load(session: Session, what: str) -> Iterator[None]:
    """One soak or bench at a time on this machine. Raises LockedError at once when another one runs."""
    from ds41ctl.adapters.files import locked

    try:
        with locked(session.dirs.state / "load.lock", what):
            yield
    except LockedError as error:
        raise LockedError(error.message) from None
