"""Run by test_store_matrix.py: builds and drops stores in children that die, and reports what was left as JSON."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ds41ctl.adapters import mounts, profiles, store, storebuild, storeplace
from ds41ctl.core.engram import Geometry
from ds41ctl.core.errors import Ds41Error
from ds41ctl.core.layout import Dirs, Layout, layout
from ds41ctl.core.settings import Settings
from ds41ctl.steps import engram
from tests.fakes.packs import local_profile, write_pack

POOL = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages")
# what changes the system: files made, renamed, removed, sized, mapped; folders; programs started
EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "mmap.__new__", "subprocess.Popen"}


def make(kind: str, root: Path) -> tuple[Layout, Geometry]:
    """A pack and the layout of a store of that kind."""
    found = write_pack(root / "pack")
    profile = local_profile(profiles.read(profiles.find("cpu-tiny")), found)
    shards, _, how = kind.rpartition("-")
    storage = {"hugetlb": "hugetlb", "disk": "disk", "folder": "disk"}.get(how, "tmpfs")
    engram = profile.engram.model_copy(update={"storage": storage, "format": "shards" if shards else "records"})
    if how == "at":
        engram = engram.model_copy(update={"dir": str(root / "deep" / "er"), "size_gib": 0.0625})
    profile = profile.model_copy(update={"engram": engram})
    dirs = Dirs(data=root / "data", state=root / "state", cache=root / "cache", runtime=root / "run", uid=os.getuid())
    chosen: dict[str, Any] = {"model": root / "pack"}
    if how in ("folder", "prepared"):
        chosen["engram_dir"] = root / "chosen"
    return layout(profile, Settings.model_validate(chosen), dirs, may_mount=how in ("tmpfs", "hugetlb")), found


def own_mounts(root: Path) -> list[str]:
    """Our mounts below the test's folder."""
    return [
        str(mount.point)
        for mount in mounts.mounts()
        if mount.source == storeplace.MOUNT_SOURCE and mount.point.is_relative_to(root.resolve())
    ]


def pool() -> int:
    """Hugepages of 2 MiB that the machine has."""
    return int(POOL.read_text()) if POOL.exists() else 0


def files_of(root: Path) -> list[str]:
    """Everything a store may leave."""
    patterns = ("layer-*", "manifest.json*", "*.ledger.json*", "model*", "deep")
    found = [path for pattern in patterns for path in root.rglob(pattern) if path.is_file() or path.name == "deep"]
    return [str(path) for path in found if path.parent != root / "pack"]


class Watch:
    """What must be true after every death, and after the drop that follows."""

    def __init__(self, it: Layout, root: Path) -> None:
        self.it, self.root, self.pages = it, root, pool()
        self.faults: list[str] = []

    def after_death(self, when: str) -> None:
        self._index(when)
        facts = store.inspect(self.it)
        if facts.exists and not facts.problem and engram.verify(self.it, full=True)[1]:
            self.faults.append(f"{when}: a store that is not the shards' passes")
        shown = storeplace.leftovers(self.it)
        for point in own_mounts(self.root):
            if point not in shown["mounts"]:
                self.faults.append(f"{when}: status does not show the mount {point}")
        if pool() - self.pages > sum(item["pages"] for item in shown["hugepages"]):
            self.faults.append(f"{when}: status does not show {pool() - self.pages} hugepages")

    def _index(self, when: str) -> None:
        """An engine that finds an index of shards finds every byte of them."""
        for index in self.root.rglob("model.safetensors.index.json"):
            if index.parent != self.it.model_dir:
                for name in set(json.loads(index.read_text())["weight_map"].values()):
                    if (index.parent / name).read_bytes() != (self.it.model_dir / name).read_bytes():
                        self.faults.append(f"{when}: the index names {name}, which is not whole")

    def after_drop(self, when: str) -> None:
        left = [*own_mounts(self.root), *files_of(self.root)]
        if left:
            self.faults.append(f"{when}: drop left {left}")
        if pool() != self.pages:
            self.faults.append(f"{when}: drop left {pool() - self.pages} hugepages")


def child(work: Callable[[], object], deadly: int) -> bool:
    """Run `work` in a child that dies before its `deadly`-th operation; True when it died so."""
    pid = os.fork()
    if not pid:
        seen = 0

        def hook(event: str, args: tuple[Any, ...]) -> None:
            nonlocal seen
            reading = event == "open" and not (args[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if event in EVENTS and not reading:
                seen += 1
                if seen == deadly:
                    os.kill(os.getpid(), signal.SIGKILL)

        status = 1
        with contextlib.suppress(BaseException):
            sys.addaudithook(hook)
            work()
            status = 0
        os._exit(status)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return True
    if os.WEXITSTATUS(status):
        raise SystemExit(f"the child failed at operation {deadly}")
    return False


def matrix(what: str, it: Layout, found: Geometry, root: Path) -> dict[str, Any]:
    """Deaths of build, of a build over a valid store, and of drop."""

    def build() -> object:
        return storebuild.build(it, found, lambda text, data: None)

    watch = Watch(it, root)
    deaths = 0
    while True:
        if what != "build":
            build()
        if not child(build if what != "drop" else lambda: engram.drop(it), deaths + 1):
            break
        deaths += 1
        watch.after_death(f"death {deaths}")
        if what == "rebuild" and deaths % 2:  # the next build must cope as well as drop does
            build()
            if engram.verify(it, full=True)[1]:
                watch.faults.append(f"death {deaths}: the next build is not right")
        engram.drop(it)
        watch.after_drop(f"death {deaths}")
        if deaths > 400:
            raise SystemExit("it never ends")
    engram.drop(it)
    return {"deaths": deaths, "faults": watch.faults}


def failing(it: Layout, found: Geometry, root: Path, harm: Callable[[str], None]) -> dict[str, Any]:
    """A build that something goes wrong with."""
    watch = Watch(it, root)
    error = ""
    try:
        storebuild.build(it, found, lambda text, data: harm(text))
    except Ds41Error as caught:
        error = caught.message
    watch.after_death("failure")
    if store.inspect(it).exists:
        watch.faults.append("a failed build left a store")
    watch.after_drop("failure")  # a build that lives to see its failure clears up after itself
    engram.drop(it)
    watch.after_drop("drop")
    return {"error": error, "faults": watch.faults}


def main() -> None:
    """what, kind, folder."""
    what, kind, root = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    it, found = make(kind, root)
    store.READ_BYTES = 7 * 256  # many pieces
    storebuild.PROGRESS_EVERY_S = 0
    if what in ("build", "rebuild", "drop"):
        print(json.dumps(matrix(what, it, found, root)))
        return
    shard = it.model_dir / it.profile.model.engram[1].shard
    chosen = root / "chosen"

    def harm(text: str) -> None:
        if what == "truncated" and text.startswith("layer 3"):
            os.truncate(shard, 20_000)
        if what == "taken" and text.startswith("layer 1"):
            POOL.write_text("0")
        if what == "full" and text.startswith("layer 1"):
            with contextlib.suppress(OSError), (chosen / "filler").open("wb") as out:
                while True:
                    out.write(bytes(1 << 20))

    if kind == "prepared":
        chosen.mkdir()
        size = "64k" if what == "small" else "9m"
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},huge=always", "test", str(chosen)], check=True)
    before = pool()
    try:
        report = failing(it, found, root, harm)
    finally:
        if kind == "prepared":
            subprocess.run(["umount", str(chosen)], check=True)
        if what == "taken" and pool() != before:
            POOL.write_text(str(before))
    shutil.rmtree(root / "pack")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
