"""fetch: every pinned file of the pack arrives once, whole, and is published only when its sha256 matches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ds41ctl.adapters import files, mounts, pack
from ds41ctl.core import packgen
from ds41ctl.core.errors import IntegrityError, NoSpaceError, UnsupportedError
from ds41ctl.core.layout import Layout
from ds41ctl.steps.runner import Goal, Progress

SPACE_MARGIN = 1.02  # filesystem metadata and blocks only partly used


class Fetch:
    """Materialise a recipe's pack, file by file."""

    name = "fetch"

    def __init__(self, layout: Layout, *, verify: bool = False, repair: bool = False) -> None:
        self.layout = layout
        self.hash_everything = verify
        self.repair = repair
        self._hashed: set[str] = set()

    def _bad(self) -> list[tuple[pack.Expected, str]]:
        """Files that are not the pinned ones, with the reason; an untrusted sidecar costs one hash."""
        bad = []
        for item in pack.expected(self.layout.profile):
            reason = pack.file_problem(self.layout.model_dir, item, hash_it=False)
            same_size = reason and (self.layout.model_dir / item.name).is_file() and "bytes, expected" not in reason
            if (self.hash_everything and item.name not in self._hashed and not reason) or same_size:
                reason = pack.file_problem(self.layout.model_dir, item, hash_it=True)
                self._hashed.add(item.name)
                if not reason:
                    pack.write_sidecar(self.layout.model_dir / item.name, item)
            if reason:
                bad.append((item, reason))
        return bad

    def check(self) -> Goal:
        """All files there and vouched for."""
        wanted = pack.expected(self.layout.profile)
        if not wanted:
            return self._unpinned()
        bad = self._bad()
        if bad:
            item, reason = bad[0]
            return Goal(False, f"{len(bad)} of {len(wanted)} files: {item.name} is {reason}")
        total = sum(item.size for item in wanted)
        how = "every byte hashed" if self.hash_everything else "sha256 verified"
        return Goal(
            True,
            f"{len(wanted)} files, {total / 2**20:.0f} MiB, {how}",
            {"bytes": total, "files": len(wanted)},
        )

    def _unpinned(self) -> Goal:
        folder = self.layout.model_dir
        if pack.from_hub(self.layout.profile):
            raise UnsupportedError(
                f"this version cannot download the pack of {self.layout.name} from the Hub",
                hints=(
                    *self.layout.profile.lacks,
                    f"DS41_MODEL=FOLDER uses a pack you downloaded (now: {folder})",
                ),
            )
        facts = pack.inspect(self.layout.profile, folder)
        if not facts.exists or facts.index_names is None:
            raise IntegrityError(f"no pack in {folder}", hints=("DS41_MODEL=FOLDER",))
        if facts.problems:
            raise IntegrityError(facts.problems[0])
        return Goal(True, f"local folder, {facts.index_names} tensors indexed, bytes not pinned")

    def do(self, progress: Progress) -> None:
        """Write what is missing or wrong. A wrong file is replaced only with `repair` or when it was never whole."""
        folder = self.layout.model_dir
        recipe = pack.recipe(self.layout.profile)
        if recipe is None:
            raise UnsupportedError(f"nothing in this version can make the pack of {self.layout.name}")
        bad = self._bad()
        corrupt = [(item, reason) for item, reason in bad if reason != "missing"]
        if corrupt and not self.repair:
            item, reason = corrupt[0]
            raise IntegrityError(
                f"{folder / item.name}: {reason}" + (f" (and {len(corrupt) - 1} more)" if corrupt[1:] else ""),
                hints=("ds41ctl fetch --repair   # quarantines the file and makes it again",),
            )
        need = int(sum(item.size for item, _ in bad) * SPACE_MARGIN)
        free = mounts.free_bytes(folder)
        if free < need:
            raise NoSpaceError(
                f"the pack needs {need} bytes in {folder}, {free} are free",
                hints=(f"df -h {mounts.existing_parent(folder)}",),
            )
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob("*" + files.PART_SUFFIX):
            leftover.unlink()
        for item, reason in bad:
            path = folder / item.name
            if reason != "missing":
                self._quarantine(path, progress)
            files.publish(path, self._counted(recipe, item, progress), sha256=item.sha256)
            pack.write_sidecar(path, item)

    def _quarantine(self, path: object, progress: Progress) -> None:
        from pathlib import Path

        source = Path(str(path))
        target = source.with_name(source.name + ".bad")
        if source.is_dir() and not source.is_symlink():
            raise IntegrityError(f"{source} is a folder, expected a file", hints=(f"mv {source} {source}.aside",))
        source.rename(target)
        with contextlib.suppress(FileNotFoundError):
            source.with_name(source.name + pack.SIDECAR).unlink()
        progress(f"{source.name} quarantined as {target.name}", {})

    @staticmethod
    def _counted(recipe: packgen.PackRecipe, item: pack.Expected, progress: Progress) -> Iterator[bytes]:
        done = 0
        for chunk in packgen.generate(recipe, item.name):
            done += len(chunk)
            progress(item.name, {"bytes": done, "total": item.size})
            yield chunk
