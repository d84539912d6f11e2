"""The store is used only when every proof holds; each fault has its one line and its fix."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ds41_engine.store import EngramStore, StoreError, locate_tensor

ROWS = {1: 40, 4: 60}
BOOT = "11111111-2222-3333-4444-555555555555"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store of random rows and the pack it was built from, side by side: ``store`` and ``pack``."""
    draw = np.random.default_rng(0)
    store, pack = tmp_path / "store", tmp_path / "pack"
    store.mkdir()
    pack.mkdir()
    layers, weight_map = [], {}
    for layer, rows in ROWS.items():
        records = draw.integers(0, 256, size=(rows, 264), dtype=np.uint8)
        (store / f"l{layer}").write_bytes(records.tobytes())
        name, shard = f"layers.{layer}.engram.embed", f"shard-{layer}.safetensors"
        header = {
            f"{name}.scale": {"dtype": "F8_E8M0", "shape": [rows, 8], "data_offsets": [0, rows * 8]},
            f"{name}.weight": {"dtype": "F8_E4M3", "shape": [rows, 256], "data_offsets": [rows * 8, rows * 264]},
        }
        raw = json.dumps(header).encode()
        body = records[:, 256:].tobytes() + records[:, :256].tobytes()
        (pack / shard).write_bytes(len(raw).to_bytes(8, "little") + raw + body)
        weight_map |= dict.fromkeys(header, shard)
        canaries = [{"row": r, "sha256": hashlib.sha256(records[r].tobytes()).hexdigest()} for r in (3, rows - 1)]
        layers.append(
            {
                "layer": layer,
                "rows": rows,
                "bytes": rows * 264,
                "parts": [{"file": f"l{layer}", "node": 0, "first_row": 0, "rows": rows, "bytes": rows * 264}],
                "source_file": shard,
                "source_sha256": "0" * 64,
                "canaries": canaries,
                "later_key": True,
            }
        )
    manifest = {
        "format": 2,
        "record_bytes": 264,
        "data_dir": "",
        "tensor_parallel": 1,
        "page_kind": "tmpfs-4k",
        "memory_backed": True,
        "boot_id": BOOT,
        "layers": layers,
    }
    (store / "manifest.json").write_text(json.dumps(manifest))
    (pack / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "store" / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def open_store(folder: Path, **changes: Any) -> EngramStore:
    arguments: dict[str, Any] = {"expected_rows": ROWS, "pack": folder / "pack", "boot_id": BOOT} | changes
    return EngramStore.open(folder / "store", **arguments)


def test_valid_store_gives_the_records_read_only(folder: Path) -> None:
    store = open_store(folder, sample_rows={1: [0, 20], 4: [59]})
    raw = np.frombuffer((folder / "store" / "l4").read_bytes(), dtype=np.uint8).reshape(60, 264)
    ids = np.array([[0, 59], [7, 7]])
    assert np.array_equal(store.gather(4, ids), raw[ids])
    with pytest.raises(ValueError, match="read-only"):
        store.layers[4].records[0][0, 0] = 1


def test_mapping_is_shared_not_a_private_copy(folder: Path) -> None:
    store = open_store(folder)
    with (folder / "store" / "l1").open("r+b") as file:
        file.seek(10 * 264)
        file.write(b"\x55")
    assert store.layers[1].records[0][10, 0] == 0x55
    maps = Path("/proc/self/maps").read_text()
    line = next(line for line in maps.splitlines() if line.endswith(str(folder / "store" / "l1")))
    assert line.split()[1] == "r--s"


def test_page_rounding_is_allowed_and_disk_store_ignores_the_boot(folder: Path) -> None:
    with (folder / "store" / "l1").open("ab") as file:
        file.write(bytes(4096))
    edit(folder, lambda m: m.update(memory_backed=False, boot_id="another"))
    assert open_store(folder).layers[1].records[0].shape == (40, 264)


def _drop(folder: Path, name: str) -> None:
    (folder / "store" / name).unlink()


def _rows(entry: dict[str, Any], rows: int) -> None:
    entry.update(rows=rows, bytes=rows * 264)
    entry["parts"][-1]["rows"] = rows


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no manifest": (lambda f: _drop(f, "manifest.json"), "manifest.json, found none"),
    "not json": (lambda f: (f / "store/manifest.json").write_text("{"), "readable JSON"),
    "not an object": (lambda f: (f / "store/manifest.json").write_text("[]"), "JSON object"),
    "wrong format": (lambda f: edit(f, lambda m: m.update(format=1)), "format: expected 2, found 1"),
    "wrong record": (lambda f: edit(f, lambda m: m.update(record_bytes=272)), "record_bytes: expected 264, found 272"),
    "missing key": (lambda f: edit(f, lambda m: m.pop("boot_id")), "boot_id"),
    "wrong type": (lambda f: edit(f, lambda m: m.update(memory_backed="yes")), "memory_backed"),
    "stale boot": (lambda f: edit(f, lambda m: m.update(boot_id="old")), "boot_id: expected .* found old"),
    "layer missing": (lambda f: edit(f, lambda m: m["layers"].pop()), "expected layer 4"),
    "wrong rows": (
        lambda f: edit(f, lambda m: _rows(m["layers"][0], 41)),
        "expected 40, found 41",
    ),
    "rows missing": (lambda f: edit(f, lambda m: m["layers"][0]["parts"][0].update(rows=20)), "hold 20 of 40 rows"),
    "rows off by one": (lambda f: edit(f, lambda m: m["layers"][0]["parts"][0].update(first_row=1)), "not at 0"),
    "of another TP": (lambda f: edit(f, lambda m: m.update(tensor_parallel=4)), "tensor_parallel 4"),
    "rows and bytes differ": (lambda f: edit(f, lambda m: m["layers"][0].update(bytes=5)), "bytes 5"),
    "no canaries": (lambda f: edit(f, lambda m: m["layers"][0].update(canaries=[])), "no canaries"),
    "canary outside": (lambda f: edit(f, lambda m: m["layers"][0]["canaries"][0].update(row=40)), "row 40"),
    "path escapes": (
        lambda f: edit(f, lambda m: m["layers"][0]["parts"][0].update(file="../pack/x")),
        "plain file name",
    ),
    "file gone": (lambda f: _drop(f, "l4"), "readable file"),
    "empty file": (lambda f: (f / "store/l4").write_bytes(b""), "truncated"),
    "truncated": (lambda f: (f / "store/l4").write_bytes((f / "store/l4").read_bytes()[:-1]), "truncated"),
    "canary weight byte": (lambda f: flip(f / "store/l1", 3 * 264), "canary row 3"),
    "canary scale byte": (lambda f: flip(f / "store/l4", 60 * 264 - 1), "canary row 59"),
    "first row": (lambda f: flip(f / "store/l1", 5), "row 0 of layer 1"),
    "sampled row": (lambda f: flip(f / "store/l4", 20 * 264 + 260), "row 20 of layer 4"),
    "shard changed": (lambda f: flip(f / "pack/shard-1.safetensors", -1), "row 39 of layer 1"),
    "shard damaged": (lambda f: (f / "pack/shard-1.safetensors").write_bytes(b"\xff" * 64), "safetensors header"),
    "index damaged": (lambda f: (f / "pack/model.safetensors.index.json").write_text("{}"), "weight_map"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_one_line_with_a_fix(folder: Path, fault: str) -> None:
    damage, text = FAULTS[fault]
    damage(folder)
    with pytest.raises(StoreError) as caught:
        open_store(folder, sample_rows={4: [20]})
    line = str(caught.value)
    assert re.search(text, line), line
    assert "\n" not in line
    assert "expected" in line
    assert "ds41ctl" in line


def test_unsampled_row_is_not_compared(folder: Path) -> None:
    """What the check does not claim: a changed byte outside canaries and samples passes."""
    flip(folder / "store" / "l1", 17 * 264)
    open_store(folder)


def test_missing_shard_or_index_skips_the_comparison(folder: Path) -> None:
    flip(folder / "store" / "l1", 5)
    (folder / "pack" / "shard-1.safetensors").unlink()
    open_store(folder)
    assert locate_tensor(folder / "pack", "layers.1.engram.embed.weight") is None
    assert locate_tensor(folder / "nowhere", "x") is None
    assert locate_tensor(folder / "pack", "not.there") is None


def test_this_boot_is_read_from_the_kernel(folder: Path) -> None:
    current = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    edit(folder, lambda m: m.update(boot_id=current))
    open_store(folder, boot_id=None)
