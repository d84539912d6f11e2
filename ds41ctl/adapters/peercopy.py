"""Copies a pattern between GPUs and compares it. Run by the engine's Python, never imported: it needs torch alone.

usage: python -I peercopy.py MIB A,B [A,B ...]     prints one JSON list of {a, b, equal, gib_per_s}
"""

import json
import sys
import time


def main() -> None:
    """Copy MIB of a pattern from A to B, and back through another buffer, for every pair."""
    import torch

    count = int(sys.argv[1]) << 18  # int32 values
    found = []
    for pair in sys.argv[2:]:
        a, b = (int(part) for part in pair.split(","))
        # a pattern in which every 4-byte word differs from its neighbours and from the other pairs' words
        source = torch.arange(count, dtype=torch.int32, device=f"cuda:{a}") * 2654435 + 977 * a + b
        there = torch.empty(count, dtype=torch.int32, device=f"cuda:{b}")
        back = torch.zeros_like(source)
        there.copy_(source)  # warm up: maps the peer's memory
        torch.cuda.synchronize(a)
        torch.cuda.synchronize(b)
        started = time.perf_counter()
        there.copy_(source)
        torch.cuda.synchronize(a)
        torch.cuda.synchronize(b)
        seconds = time.perf_counter() - started
        back.copy_(there)
        torch.cuda.synchronize(a)
        equal = bool(torch.equal(source, back)) and bool(torch.equal(source.cpu(), there.cpu()))
        found.append({"a": a, "b": b, "equal": equal, "gib_per_s": round(count * 4 / seconds / 2**30, 2)})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
