"""A reader of Engram shards as the notes of seed 004 and the published format describe it, with nothing of ours.

It opens the index, finds `layers.N.engram.embed.{weight,scale}`, opens the shard named there, takes the offsets from
its header, and preads rows. The container stand-in has this file's text in its engine.
"""

import json
import os
import struct
from pathlib import Path

SIZES = {"F8_E4M3": 1, "F8_E8M0": 1, "BF16": 2, "U8": 1}


class Table:
    """One layer's table."""

    def __init__(self, folder, layer):
        index = json.loads((Path(folder) / "model.safetensors.index.json").read_text())["weight_map"]
        self.spans = {}
        for side, width in (("weight", 256), ("scale", 8)):
            name = f"layers.{layer}.engram.embed.{side}"
            path = Path(folder) / index[name]
            handle = os.open(path, os.O_RDONLY)
            (length,) = struct.unpack("<Q", os.pread(handle, 8, 0))
            header = json.loads(os.pread(handle, length, 8))
            header.pop("__metadata__", None)
            end = max(item["data_offsets"][1] for item in header.values())
            if os.fstat(handle).st_size != 8 + length + end:
                raise ValueError(f"{path}: the file is not as long as its header says")
            item = header[name]
            begin, stop = item["data_offsets"]
            if item["shape"][1] != width or stop - begin != item["shape"][0] * width * SIZES[item["dtype"]]:
                raise ValueError(f"{name}: not a table")
            self.rows = item["shape"][0]
            self.spans[side] = (handle, 8 + length + begin, width)

    def row(self, number):
        """256 weights and 8 scales."""
        return b"".join(os.pread(handle, width, at + number * width) for handle, at, width in self.spans.values())

    def close(self):
        """Give the files back."""
        for handle, _, _ in self.spans.values():
            os.close(handle)
