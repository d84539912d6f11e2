"""Topology: which GPUs are linked by NVLink, which groups of them are complete, and where two sources disagree."""

from __future__ import annotations

import re
from itertools import combinations

from ds41ctl.core.facts import GpuFacts, HostFacts

Groups = dict[str, tuple[int, ...]]


def bus_key(bus_id: str) -> str:
    """`00000000:1A:00.0` and `0000:1a:00.0` as one: domain without leading zeros, lower case."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain.lstrip('0') or '0'}:{rest}"


def gpu_at(facts: HostFacts, index: int) -> GpuFacts | None:
    """The GPU with this index, None when it does not answer."""
    return next((gpu for gpu in facts.gpus or () if gpu.index == index), None)


def direct_links(facts: HostFacts, a: int, b: int) -> int | None:
    """NVLinks that are up between two GPUs, through a switch included; None when nothing states it.

    Behind an NVSwitch a link's remote end is the switch (in a virtual machine with a masked bus id), so only the
    driver's peer status says which GPUs it joins.
    """
    first, second = gpu_at(facts, a), gpu_at(facts, b)
    if first is not None and second is not None and first.nvlinks is not None and second.nvlinks is not None:
        if any(link.up is None for link in (*first.nvlinks, *second.nvlinks)):
            return None
        up = [link for link in first.nvlinks if link.up]
        wanted = bus_key(second.bus_id)
        direct = sum(1 for link in up if link.remote_type != "switch" and bus_key(link.remote_bus_id) == wanted)
        if direct:
            return direct
        switched = min(_switch_links(first), _switch_links(second))
        if not switched:
            return 0
        status = facts.p2p.code("nvlink", a, b) if facts.p2p is not None else ""
        return None if status in ("", "U", "?") else switched if status == "OK" else 0
    return text_links(facts, a, b)


def _switch_links(gpu: GpuFacts) -> int:
    return sum(1 for link in gpu.nvlinks or () if link.up and link.remote_type == "switch")


def text_links(facts: HostFacts, a: int, b: int) -> int | None:
    """NVLinks between two GPUs as `nvidia-smi topo -m` states them; None when it was not asked or is not clear."""
    code = facts.topology.code(a, b) if facts.topology is not None else ""
    if code in ("", "?"):
        return None
    match = re.fullmatch(r"NV(\d+)", code)
    return int(match[1]) if match else 0


def way(facts: HostFacts, a: int, b: int) -> str:
    """How a pair without NVLink is joined, in words; '' when that is not known."""
    code = facts.topology.code(a, b) if facts.topology is not None else ""
    words = {
        "SYS": "over the CPUs' socket link",
        "SOC": "over the CPUs' socket link",
        "NODE": "over the CPU",
        "PHB": "over a PCIe host bridge",
        "PXB": "over PCIe switches",
        "PIX": "over one PCIe switch",
    }
    return words.get(code, "")


def indices(facts: HostFacts) -> tuple[int, ...]:
    """Indices of the GPUs that answer, or that the text names when NVML was not asked."""
    if facts.gpus is not None:
        return tuple(gpu.index for gpu in facts.gpus)
    return tuple(range(len(facts.topology.links))) if facts.topology is not None else ()


def missing_pairs(facts: HostFacts, group: tuple[int, ...]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(pairs of the group without NVLink, pairs about which nothing is known)."""
    without, unknown = [], []
    for a, b in combinations(sorted(group), 2):
        count = direct_links(facts, a, b)
        if count is None:
            unknown.append((a, b))
        elif count == 0:
            without.append((a, b))
    return without, unknown


def complete_sets(facts: HostFacts, size: int) -> list[tuple[int, ...]]:
    """All sets of `size` GPUs of which every pair is on NVLink, in index order."""
    linked = {pair for pair in combinations(sorted(indices(facts)), 2) if direct_links(facts, *pair)}
    return [
        chosen
        for chosen in combinations(sorted(indices(facts)), size)
        if all(pair in linked for pair in combinations(chosen, 2))
    ]


def suggest(facts: HostFacts, groups: Groups) -> Groups | None:
    """Disjoint complete groups of the same sizes and names, None when this machine has none."""
    names = list(groups)

    def place(position: int, used: frozenset[int]) -> Groups | None:
        if position == len(names):
            return {}
        for chosen in complete_sets(facts, len(groups[names[position]])):
            if used.isdisjoint(chosen):
                rest = place(position + 1, used | set(chosen))
                if rest is not None:
                    return {names[position]: chosen, **rest}
        return None

    return place(0, frozenset())


def disagreements(facts: HostFacts) -> list[str]:
    """Where NVML and nvidia-smi's text state different things, one line each; [] when nothing can be compared."""
    found: list[str] = []
    text = facts.topology
    if text is None or facts.gpus is None:
        return found
    if text.links and len(text.links) != len(facts.gpus):
        return [f"NVML names {len(facts.gpus)} GPUs, nvidia-smi topo -m {len(text.links)}"]
    for a, b in combinations(indices(facts), 2):
        ours, theirs = direct_links(facts, a, b), text_links(facts, a, b)
        if ours is not None and theirs is not None and ours != theirs:
            found.append(f"GPU {a}-{b}: NVML counts {ours} NVLinks, nvidia-smi {text.code(a, b)}")
    for row, line in enumerate(text.p2p_read):
        for column, code in enumerate(line.split()):
            ours_code = facts.p2p.code("read", row, column) if facts.p2p is not None else ""
            if row < column and ours_code and code != "?" and ours_code != code:
                found.append(f"GPU {row}-{column}: peer reads are {ours_code} by NVML, {code} by nvidia-smi")
    for gpu, count in zip(facts.gpus, text.nvlinks_up, strict=False):
        up = None if gpu.nvlinks is None else sum(1 for link in gpu.nvlinks if link.up)
        if up is not None and count is not None and up != count:
            found.append(f"GPU {gpu.index}: {up} NVLinks up by NVML, {count} by nvidia-smi nvlink -s")
    return found
