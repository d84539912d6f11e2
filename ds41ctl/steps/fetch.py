"""fetch: every pinned file of the pack arrives once, whole, and is published only when its digest matches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ds41ctl.adapters import download, files, mounts, pack, part, pins, tensorfile
from ds41ctl.adapters.hub import Hub, XetStore
from ds41ctl.adapters.pack import Checked, Expected, Holding
from ds41ctl.adapters.packsize import SPACE_MARGIN
from ds41ctl.adapters.transfer import Order, State, Summary, Transfer
from ds41ctl.core import packgen
from ds41ctl.core.errors import ConfigError, DeniedError, IntegrityError, NoSpaceError, UnsupportedError
from ds41ctl.core.layout import Layout
from ds41ctl.steps import own
from ds41ctl.steps.hashing import Told, hash_all
from ds41ctl.steps.runner import Goal, Progress

CONNECTIONS = 8


@contextlib.contextmanager
def locked_folders(folders: Sequence[Path], what: str) -> Iterator[None]:
    """Hold the lock of every folder, in one order for everybody; raises LockedError naming the holder."""
    with contextlib.ExitStack() as held:
        for folder in sorted(set(folders)):
            held.enter_context(files.locked(folder / pack.LOCK_FILE, what))
        yield


class Fetch:
    """Bring what is missing, from a recipe or from Hub repositories; what is there is proven, not trusted."""

    name = "fetch"

    def __init__(
        self,
        layout: Layout,
        *,
        repair: bool = False,
        connections: int = CONNECTIONS,
        hub: Callable[[], Hub] = Hub.of_environment,
    ) -> None:
        self.layout, self.repair, self.connections, self._hub = layout, repair, connections, hub
        self._summary: Summary | None = None

    def check(self) -> Goal:
        """All files there and vouched for by their sidecars: no byte is read."""
        folder = self.layout.model_dir
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"{folder} is a file, expected the pack's folder", hints=("ds41ctl config",))
        if pack.own_hybrid(self.layout):
            return own.check(self.layout)
        held = pack.holdings(self.layout)
        if held is None:
            return Goal(False, "the file list of the pack was not fetched yet")
        if not held:
            return self._unpinned()
        bad = pack.quick(held)
        count = sum(len(holding.items) for holding in held)
        if bad:
            _, item, reason = bad[0]
            return Goal(False, f"{len(bad)} of {count} files: {item.name} is {reason}")
        total = sum(item.size for holding in held for item in holding.items)
        text = f"{count} files, {total / 2**20:,.0f} MiB, sha256 verified"
        data: dict[str, Any] = {"bytes": total, "files": count}
        if self._summary is not None:
            text += "".join(
                f", {amount / 2**20:,.0f} MiB by {label}" for label, amount in self._summary.received.items()
            )
            text += f", {self._summary.resumed / 2**20:,.0f} MiB from an earlier run" if self._summary.resumed else ""
            data |= {"received": dict(self._summary.received), "resumed": self._summary.resumed}
        return Goal(True, text, data)

    def _unpinned(self) -> Goal:
        folder = self.layout.model_dir
        facts = pack.inspect(self.layout)
        if not facts.exists or facts.index_names is None:
            raise IntegrityError(f"no pack in {folder}", hints=("DS41_MODEL=FOLDER",))
        if facts.problems:
            raise IntegrityError(facts.problems[0])
        return Goal(True, f"local folder, {facts.index_names} tensors indexed, bytes not pinned")

    def do(self, progress: Progress) -> None:
        """Prove what is there, write what is missing. A wrong file is replaced only with `repair`."""
        if pack.own_hybrid(self.layout):
            own.look_through(self.layout, progress)
            return
        folders = {self.layout.source_dir(source.dir) for source in self.layout.profile.model.hub_sources}
        with locked_folders([*folders] or [self.layout.model_dir], f"fetching {self.layout.name}"):
            held = self._pinned(progress)
            bad = self._proven(held, progress)
            _demand_access(bad)
            _sweep(held, bad)
            corrupt = [(folder, item, reason) for folder, item, reason in bad if reason != pack.MISSING]
            if corrupt and not self.repair:
                folder, item, reason = corrupt[0]
                raise IntegrityError(
                    f"{folder / item.name}: {reason}" + (f" (and {len(corrupt) - 1} more)" if corrupt[1:] else ""),
                    hints=_advice(reason),
                )
            _demand_space(bad)
            for folder, item, _ in corrupt:
                _quarantine(folder / item.name, progress)
            try:
                if pack.recipe(self.layout.profile) is not None:
                    self._generate(bad, progress)
                else:
                    self._download(bad, progress)
            except OSError as error:
                raise files.os_error(error, f"writing {error.filename or 'the pack'}") from error

    def _pinned(self, progress: Progress) -> tuple[Holding, ...]:
        held = pack.holdings(self.layout)
        if held is None:
            hub = self._hub()
            hub.note = lambda text: progress(text, {"note": True})
            progress(f"file lists from {hub.name}", {})
            pins.ensure(self.layout, hub)
            tensorfile.ensure(self.layout, hub, lambda text: progress(text, {}))
            held = pack.holdings(self.layout)
        if not held:
            raise UnsupportedError(f"nothing in this version can make the pack of {self.layout.name}")
        return held

    def _proven(self, held: Sequence[Holding], progress: Progress) -> list[Checked]:
        """What is not the pinned file. A file of the right size whose sidecar says too little is hashed once;
        `repair` believes no sidecar."""
        bad = pack.quick(held)
        unsure = [(folder, item) for folder, item, reason in bad if _only_sidecar(folder, item, reason)]
        if self.repair:
            named = {(folder, item.name) for folder, item, _ in bad}
            trusted = [(h.folder, item) for h in held for item in h.items if (h.folder, item.name) not in named]
            unsure += trusted
            bad += [(folder, item, "") for folder, item in trusted]
        hashed = {(folder, item.name): reason for folder, item, reason in hash_all(unsure, progress)}
        judged = [(folder, item, hashed.get((folder, item.name), reason)) for folder, item, reason in bad]
        return [entry for entry in judged if entry[2]]

    def _generate(self, bad: Sequence[Checked], progress: Progress) -> None:
        recipe = pack.recipe(self.layout.profile)
        assert recipe is not None  # noqa: S101 - the caller asked
        for folder, item, _ in bad:
            path = folder / item.name
            for leftover in (files.part(path), part.part_path(path, item.identity)):
                leftover.unlink(missing_ok=True)
            files.publish(path, _counted(recipe, item, progress), sha256=item.sha256)
            pack.write_sidecar(path, item)

    def _download(self, bad: Sequence[Checked], progress: Progress) -> None:
        if not bad:
            return
        hub = self._hub()
        hub.demand_online("the pack")
        client = download.Client(hub.endpoint, hub.token, hub.limits)
        stores = {(item.repo, item.revision): hub.xet_store(client, item.repo, item.revision) for _, item, _ in bad}

        def order(folder: Path, item: Expected) -> Order:
            target = folder / item.name
            _demand_inside(folder, target)
            pinned = download.Pinned(
                item.name, item.size, item.revision, tuple(d for d in (item.sha256, item.git_oid) if d)
            )
            if item.partial is not None:
                return self._some_tensors(hub, client, stores[item.repo, item.revision], target, item)
            sources: list[download.Source] = []
            if hub.xet and item.xet:
                sources.append(stores[item.repo, item.revision].file(item.xet, item.size, item.name))
            sources.append(download.HttpFile(client, hub.url(item.repo, item.revision, item.name), pinned))
            return Order(
                target,
                item.size,
                item.digest,
                tuple(sources),
                lambda sha256: pack.write_sidecar(target, item, sha256),
            )

        orders = [order(folder, item) for folder, item, _ in bad]
        tell = Told(progress)
        way = "Xet where the Hub has it" if hub.xet else "plain HTTP"
        progress(f"{len(bad)} files from {hub.name}, {way}", {"note": True})
        transfer = Transfer(
            orders,
            connections=self.connections,
            limits=hub.limits,
            progress=lambda state: tell(_line(state), _numbers(state)),
            note=lambda text: progress(text, {"note": True}),
        )
        try:
            self._summary = transfer.run()
        except download.FileChanged as error:
            for folder, item, _ in bad:
                if item.partial is not None and item.name == error.what:
                    _forget(self.layout, folder / item.name, item)
            raise
        finally:
            client.close()

    def _some_tensors(self, hub: Hub, client: download.Client, store: XetStore, target: Path, item: Expected) -> Order:
        """The order of a file that holds some tensors of a file of the Hub."""
        partial = item.partial
        assert partial is not None  # noqa: S101 - the caller asked
        repo, revision, leave_out = partial.key
        head = tensorfile.load(self.layout, repo, revision, partial.origin)
        if head is None:  # what arrived of it was bound to an ETag that nobody knows any more
            _forget(self.layout, target, item)
            head = tensorfile.fetch_head(self.layout, hub, client, repo, revision, partial.origin)
        found = tensorfile.plan_of(head, partial.origin, leave_out)
        if (head.sha256, found.digest(partial.origin.digest, head.sha256)) != (partial.head_sha256, partial.plan):
            raise IntegrityError(f"{item.name}: its header is not the one that was pinned")
        sources: list[download.Source] = []
        if hub.xet and item.xet:
            sources.append(tensorfile.SomeTensors(store.file(item.xet, partial.origin.size, item.name), found))
        plain = tensorfile.http_file(hub, client, repo, revision, partial.origin, etag=head.etag)
        sources.append(tensorfile.SomeTensors(plain, found))
        return Order(
            target,
            item.size,
            item.digest,
            tuple(sources),
            lambda sha256: pack.write_sidecar(target, item, sha256),
            item.sha256,
            lambda sha256: pins.record(self.layout, partial.key, item.name, sha256),
        )


def _forget(layout: Layout, target: Path, item: Expected) -> None:
    """Begin a file that holds some tensors anew: nothing would tell bytes of two origins apart."""
    arriving = part.part_path(target, item.identity)
    for path in (arriving, arriving.with_name(arriving.name + part.JOURNAL_SUFFIX)):
        path.unlink(missing_ok=True)
    if item.partial is not None:
        tensorfile.forget(layout, item.repo, item.revision, item.partial.origin)


def _advice(reason: str) -> tuple[str, ...]:
    if reason == pack.LINK_OUT:  # typical of the Hub client's cache: the bytes may well be right, but not here
        return ("move the bytes into the folder: hf download --local-dir, or cp -L",)
    return ("ds41ctl fetch --repair   # quarantines the file and gets it again",)


def _sweep(held: Sequence[Holding], bad: Sequence[Checked]) -> None:
    """Remove what a killed run left of files that are there by now."""
    wanted = {(folder, item.name) for folder, item, _ in bad}
    for holding in held:
        for item in holding.items:
            if (holding.folder, item.name) not in wanted:
                arriving = part.part_path(holding.folder / item.name, item.identity)
                for path in (arriving, arriving.with_name(arriving.name + part.JOURNAL_SUFFIX)):
                    path.unlink(missing_ok=True)


def _only_sidecar(folder: Path, item: Expected, reason: str) -> bool:
    """True when the file has its place and size, and only its sidecar does not vouch for it."""
    return reason != pack.MISSING and pack.place_problem(folder, item) == ""


def _demand_access(bad: Sequence[Checked]) -> None:
    """A file that may not be read is not wrong: getting it again would not help whoever may not read it."""
    closed = [folder / item.name for folder, item, reason in bad if reason == pack.NO_ACCESS]
    if closed:
        more = f" (and {len(closed) - 1} more)" if closed[1:] else ""
        raise DeniedError(f"{closed[0]} {pack.NO_ACCESS}{more}", hints=(f"chmod a+r {closed[0]}",))


def _demand_inside(folder: Path, target: Path) -> None:
    parent = mounts.existing_parent(target.parent)
    if not parent.resolve().is_relative_to(folder.resolve()) and parent.is_relative_to(folder):
        raise IntegrityError(f"{target.parent} is a symlink that leaves {folder}", hints=(f"ls -ld {target.parent}",))


def _demand_space(bad: Sequence[Checked]) -> None:
    """Raise NoSpaceError when what is still to be written does not fit its filesystem, before a byte is."""
    needs: dict[int, tuple[Path, int]] = {}
    for folder, item, reason in bad:
        claimed = part.claimed(folder / item.name, item.identity) if reason == pack.MISSING else 0
        device = mounts.existing_parent(folder).stat().st_dev
        first, need = needs.get(device, (folder, 0))
        needs[device] = (first, need + item.size - claimed)
    for folder, need in needs.values():
        wanted, free = int(need * SPACE_MARGIN), mounts.free_bytes(folder)
        if free < wanted:
            raise NoSpaceError(
                f"the pack needs {wanted} bytes in {folder}, {free} are free",
                hints=(f"df -h {mounts.existing_parent(folder)}",),
            )


def _quarantine(path: Path, progress: Progress) -> None:
    if path.is_dir() and not path.is_symlink():
        raise IntegrityError(f"{path} is a folder, expected a file", hints=(f"mv {path} {path}.aside",))
    target = path.with_name(path.name + pack.QUARANTINE)
    path.rename(target)
    path.with_name(path.name + pack.SIDECAR).unlink(missing_ok=True)
    progress(f"{path.name} quarantined as {target.name}", {})


def _counted(recipe: packgen.PackRecipe, item: Expected, progress: Progress) -> Iterator[bytes]:
    done = 0
    for chunk in packgen.generate(recipe, item.name):
        done += len(chunk)
        progress(item.name, {"bytes": done, "total": item.size})
        yield chunk


def _line(state: State) -> str:
    shown = [f"{name} {100 * done / size if size else 100:.0f} %" for name, done, size in state.active]
    return f"{len(shown)} files: " + ", ".join(shown[:3]) + (" ..." if shown[3:] else "") if shown else "finishing"


def _numbers(state: State) -> dict[str, Any]:
    return {
        "bytes": state.done,
        "total": state.total,
        "rate": state.rate,
        "eta_s": state.eta_s,
        "files": {name: done for name, done, _ in state.active},
    }
