"""verify: is every byte, header and name of the pack as pinned? Looks only, needs no network."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath

from ds41ctl.adapters import pack
from ds41ctl.adapters.pack import Holding
from ds41ctl.core.errors import IntegrityError
from ds41ctl.core.finding import Finding, Status
from ds41ctl.core.layout import Layout
from ds41ctl.core.pins import PICKLED
from ds41ctl.core.tensors import roles, violations
from ds41ctl.steps.hashing import hash_all
from ds41ctl.steps.own import NOT_PINNED
from ds41ctl.steps.runner import Goal, Progress

SHOWN = 20  # violations listed one by one
# what a loader may pick up although the index does not name it, or what runs code when it is loaded
RISKY = PICKLED | {".safetensors", ".py", ".so"}
REPAIR = ("ds41ctl fetch --repair",)


class VerifyPack:
    """Bytes against the pins on all cores, headers and index against the V4.1 contract, and nothing else lying there.

    `quick` trusts a sidecar that nothing changed since, and reads no header.
    """

    name = "verify"

    def __init__(self, layout: Layout, *, quick: bool = False) -> None:
        self.layout, self.quick = layout, quick
        self.findings: list[Finding] = []

    def judge(self, on_finding: Callable[[Finding], None], progress: Progress) -> Goal:
        """Look at everything, report each finding."""
        held = pack.holdings(self.layout)
        if held is None:
            raise IntegrityError(
                f"nothing pins the pack of {self.layout.name} yet: its file lists were never fetched",
                hints=("ds41ctl fetch",),
            )
        own = pack.expected(self.layout)
        looked = [*held]
        if self.layout.profile.model.graft is not None and not self._own:
            looked.append(Holding(self.layout.model_dir, own))
        self.findings = self._bytes(looked, progress)
        if self._own:
            self.findings.append(self._not_pinned())
        if not self.quick:
            self.findings += self._contract(own)
            self.findings += [finding for holding in looked for finding in _foreign(holding)]
        for finding in self.findings:
            on_finding(finding)
        failed = [item for item in self.findings if item.failed()]
        if failed:
            more = f" (and {len(failed) - 1} more)" if failed[1:] else ""
            return Goal(False, failed[0].summary + more)
        return Goal(True, self.findings[0].summary)

    @property
    def _own(self) -> bool:
        return pack.own_hybrid(self.layout)

    def _not_pinned(self) -> Finding:
        seen = pack.own_record(self.layout)
        since = seen.recorded_at if seen else "just now"
        return Finding(
            id="pack.pins",
            status=Status.WARN,
            summary=f"a hybrid of your own, first hashed {since}: {NOT_PINNED}",
            expected="digests that the profile's sources pin",
            found=f"digests in {self.layout.own_pins_dir}",
            why="a file that was wrong when it was first hashed stays wrong",
            fix=("unset DS41_MODEL   # the pinned packs are fetched and grafted",),
        )

    def _bytes(self, held: Sequence[Holding], progress: Progress) -> list[Finding]:
        wanted = [(holding.folder, item) for holding in held for item in holding.items]
        if not wanted:
            return [_finding("pack.bytes", Status.UNKNOWN, "local folder: nothing pins its bytes", "pinned files", "")]
        # what lies behind a link is hashed once, at its own place
        bad = pack.quick(held) if self.quick else self._hashed(wanted, progress)
        if not self.quick and not self._own:
            links = [(folder, item) for folder, item in wanted if item.target is not None]
            bad += [(folder, item, pack.place_problem(folder, item)) for folder, item in links]
        faults = [
            _finding(
                "pack.bytes",
                Status.FAIL,
                f"{folder / item.name}: {reason}",
                item.digest,
                reason,
                (f"chmod a+r {folder / item.name}",) if reason == pack.NO_ACCESS else REPAIR,
            )
            for folder, item, reason in bad
            if reason
        ]
        total = sum(item.size for _, item in wanted if self._own or item.target is None)
        how = "sidecars unchanged" if self.quick else "every byte hashed"
        text = f"{len(wanted)} files, {total / 2**20:,.0f} MiB, {how}"
        return faults or [_finding("pack.bytes", Status.OK, text, "the pinned bytes", "")]

    def _hashed(self, wanted: Sequence[tuple[Path, pack.Expected]], progress: Progress) -> list[pack.Checked]:
        return hash_all([pair for pair in wanted if self._own or pair[1].target is None], progress, lenient=True)

    def _contract(self, own: Sequence[pack.Expected]) -> list[Finding]:
        folder = self.layout.model_dir
        expected = "every tensor of the V4.1 contract, once"
        if own and not {"config.json", pack.INDEX} <= {item.name for item in own}:
            return [_finding("pack.contract", Status.SKIP, "the pins name no config.json or index", expected, "")]
        return contract_findings(folder, drafter=self.layout.dspark)


def contract_findings(folder: Path, *, drafter: bool = False) -> list[Finding]:
    """Headers, index and config of a folder against the V4.1 contract."""
    expected = "every tensor of the V4.1 contract, once"
    try:
        config = pack.config(folder)
        found = pack.contents(folder)
    except IntegrityError as error:
        return [_finding("pack.contract", Status.FAIL, error.message, expected, error.message, error.hints)]
    lines = list(found.problems)
    lines += itertools.islice(violations(config, found.indexed, outside=found.outside, drafter=drafter), 0, 100_000)
    if lines:
        return [
            Finding(
                id="pack.contract",
                status=Status.FAIL,
                summary=lines[0] + (f" (and {len(lines) - 1} more)" if lines[1:] else ""),
                expected=expected,
                found=f"{len(lines)} violation(s) in {folder}",
                why="the loader of a quantised model does not miss a tensor: it answers wrongly at full speed",
                fix=REPAIR,
                evidence=tuple(lines[:SHOWN]),
            )
        ]
    counts = roles(config, found.indexed | found.outside)
    text = f"{found.index_names} tensors as the V4.1 contract wants them"
    outside = f", {len(found.outside)} Engram tensors beside the index" if found.outside else ""
    evidence = tuple(f"{role}: {there} of {wanted}" for role, (there, wanted) in counts.items())
    return [Finding(id="pack.contract", status=Status.OK, summary=text + outside, expected=expected, evidence=evidence)]


def _foreign(holding: Holding) -> list[Finding]:
    found = []
    for name, what in pack.foreign(holding):
        risky = "symlink" in what or PurePosixPath(name).suffix.lower() in RISKY
        found.append(
            Finding(
                id="pack.foreign",
                status=Status.FAIL if risky else Status.WARN,
                summary=f"{name} in {holding.folder} is {what}",
                expected="pinned files only",
                found=what,
                why="a loader may pick it up, and nobody vouches for its bytes" if risky else "",
                fix=(f"mv '{holding.folder / name}' /somewhere/else",),
            )
        )
    return found


def _finding(id: str, status: Status, summary: str, expected: str, found: str, fix: tuple[str, ...] = ()) -> Finding:
    return Finding(id=id, status=status, summary=summary, expected=expected, found=found, fix=fix)
