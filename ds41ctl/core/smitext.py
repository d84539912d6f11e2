"""nvidia-smi's tables as text: read by the names in their headers, so that no variant shifts a column."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_GPU = re.compile(r"GPU(\d+)")
# SOC is what drivers before 2017 called SYS
_LINK = re.compile(r"NV\d+|PIX|PXB|PHB|NODE|SYS|SOC|X")
_PEER = frozenset({"X", "OK", "CNS", "GNS", "TNS", "DR", "NS", "U"})


@dataclass(frozen=True)
class Matrix:
    """Codes of every pair of GPUs, one row of blank-separated codes a GPU; `?` where a row or cell is missing."""

    rows: tuple[str, ...] = ()
    numa: tuple[int | None, ...] = ()
    odd: tuple[str, ...] = ()


def _table(text: str) -> tuple[list[str], list[list[str]]]:
    """(column names, rows whose first cell is a GPU's name); ([], []) when there is no header."""
    columns: list[str] = []
    rows: list[list[str]] = []
    for raw in text.splitlines():
        line = _ANSI.sub("", raw).rstrip("\r")
        if not line.strip():
            if rows:
                break  # the legend repeats names
            continue
        tabs = "\t" in line
        # in the tab form a blank cell is a cell; in the form padded with blanks it leaves no trace
        cells = [cell.strip() for cell in (line.split("\t") if tabs else re.split(r"\s{2,}|(?<=\S)\s+(?=\S)", line))]
        if not tabs:
            cells = [cell for cell in cells if cell]
        if not columns:
            names = [cell.strip() for cell in (line.split("\t") if tabs else re.split(r"\s{2,}", line.strip()))]
            while names and not names[0]:
                names = names[1:]
            if names and _GPU.fullmatch(names[0]):
                columns = names
            continue
        while cells and not cells[0]:
            cells = cells[1:]
        if cells and _GPU.fullmatch(cells[0]):
            rows.append(cells)
    return columns, rows


def _matrix(text: str, known: re.Pattern[str] | frozenset[str]) -> Matrix:
    columns, rows = _table(text)
    gpus = [(int(match[1]), position) for position, name in enumerate(columns) if (match := _GPU.fullmatch(name))]
    place = next((i for i, name in enumerate(columns) if name in ("NUMA Affinity", "NUMA")), None)
    cells: dict[tuple[int, int], str] = {}
    numa: dict[int, int] = {}
    odd: list[str] = []
    for row in rows:
        number = int(row[0][3:])
        values = row[1:]
        for other, position in gpus:
            code = values[position] if position < len(values) else "?"
            fine = code in known if isinstance(known, frozenset) else known.fullmatch(code) is not None
            if not fine and code not in odd:
                odd.append(code or "(blank)")
            cells[number, other] = code if fine else "?"
        if place is not None and place < len(values) and re.fullmatch(r"\d+", values[place]):
            numa[number] = int(values[place])
    order = sorted(number for number, _ in gpus)
    return Matrix(
        tuple(" ".join(cells.get((a, b), "?") for b in order) for a in order),
        tuple(numa.get(a) for a in order),
        tuple(odd),
    )


def topo_m(text: str) -> Matrix:
    """`nvidia-smi topo -m`; rows are empty when the text holds no matrix."""
    return _matrix(text, _LINK)


def topo_p2p(text: str) -> Matrix:
    """`nvidia-smi topo -p2p r` (or another capability)."""
    return _matrix(text, _PEER)


def nvlink_status(text: str) -> tuple[int | None, ...]:
    """`nvidia-smi nvlink -s`: links that carry a rate, a GPU. None for a GPU about which nothing is said."""
    found: dict[int, int | None] = {}
    gpu: int | None = None
    for line in text.splitlines():
        head = re.match(r"\s*GPU (\d+):", line)
        if head:
            gpu = int(head[1])
            found[gpu] = None
        elif gpu is not None and re.match(r"\s*Link \d+:", line):
            up = re.search(r":\s*[\d.]+ GB/s", line) is not None
            found[gpu] = (found[gpu] or 0) + (1 if up else 0)
        elif gpu is not None and "all links are inactive" in line.lower():
            found[gpu] = 0
    return tuple(found.get(number) for number in range(max(found, default=-1) + 1))


def worst(rows: Sequence[str]) -> set[str]:
    """All codes of a matrix but the diagonal's X."""
    return {code for row in rows for code in row.split() if code != "X"}
