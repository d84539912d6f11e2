"""Checks of how the GPUs are joined: NVLink quads, peer access, order, NUMA nodes, and whether sources agree."""

from __future__ import annotations

from itertools import combinations

from ds41ctl.core import topology
from ds41ctl.core.facts import HostFacts
from ds41ctl.core.launch import passed_on
from ds41ctl.core.profile import Profile
from ds41ctl.core.topology import Groups
from preflight.check import Check, Stage, Verdict, fail, ok, skip, unknown, warn
from preflight.gpu import GROUP, groups, used
from preflight.text import as_root, command

SHOWN = 3  # policy: how many pairs a one-line summary names


def _pairs(found: list[tuple[int, int]]) -> str:
    rest = len(found) - SHOWN
    return ", ".join(f"{a}-{b}" for a, b in found[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _export(chosen: Groups) -> str:
    return "export " + " ".join(
        f"DS41_GPUS_{name.upper()}={','.join(map(str, group))}" for name, group in chosen.items()
    )


def quads(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """Every pair of each tensor-parallel group is on NVLink, directly or through a switch."""
    if not profile.hardware.nvlink or not profile.hardware.gpu_groups:
        return skip("the profile asks for no NVLink" if profile.hardware.gpus else "no GPU in this profile")
    chosen, known = groups(profile, facts), set(topology.indices(facts))
    expected = " and ".join(f"{len(group)} GPUs with NVLink between every pair" for group in chosen.values())
    look = ("nvidia-smi topo -m", "nvidia-smi nvlink -s")
    if not known:
        return unknown("the topology is not known", expected=expected, fix=look)
    everything = [index for group in chosen.values() for index in group]
    advice = topology.suggest(facts, chosen)
    fix = (_export(advice),) if advice else ("ds41ctl profile list   # none of these groups is possible here", *look)
    shown = ", ".join(f"{name}={','.join(map(str, group))}" for name, group in chosen.items())
    twice = sorted({index for index in everything if everything.count(index) > 1})
    if twice:
        return fail(
            f"GPU {', '.join(map(str, twice))} belongs to two groups ({shown})", expected=expected, found=shown, fix=fix
        )
    absent = sorted(set(everything) - known)
    if absent:
        return fail(
            f"there is no GPU {', '.join(map(str, absent))} ({shown})",
            expected=expected,
            found=f"GPUs {', '.join(map(str, sorted(known)))}",
            fix=fix,
        )
    rows, open_pairs = [], []
    for name, group in chosen.items():
        without, unclear = topology.missing_pairs(facts, group)
        open_pairs += unclear
        if without:
            ways = sorted({topology.way(facts, a, b) for a, b in without} - {""})
            verb = (
                f"{'goes' if len(without) == 1 else 'go'} {' or '.join(ways)}" if ways else "without a link that is up"
            )
            rows.append(
                f"DS41_GPUS_{name.upper()}={','.join(map(str, group))} is not all-NVLink: {_pairs(without)} {verb}"
            )
    if rows:
        none = "" if advice else f"; this machine does not have {len(chosen)} such groups"
        return fail(
            rows[0] + none,
            expected=expected,
            found=f"{len(rows)} of {len(chosen)} groups are not all-NVLink",
            fix=fix,
            why="the tensor-parallel all-reduce would cross the slow link on every layer",
            evidence=tuple(rows),
        )
    if open_pairs:
        return unknown(f"whether {_pairs(open_pairs)} are linked is not known", expected=expected, fix=look)
    return ok(f"{shown}: all pairs on NVLink", expected=expected, found=shown)


def ports(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """Every NVLink port of every card is up: by NVML, else by the text of nvidia-smi."""
    wanted = profile.hardware.nvlinks_per_gpu
    if not wanted:
        return skip("the profile states no number of NVLinks" if profile.hardware.gpus else "no GPU in this profile")
    expected = f"{wanted} NVLinks up on each GPU"
    fix = (
        "nvidia-smi nvlink -s",
        as_root("reboot   # a link that stays down is a fault of board or card", facts.system),
    )
    counts = _links_up(profile, facts)
    few = {index: count for index, count in counts.items() if count is not None and count < wanted}
    if few:
        found = ", ".join(f"GPU {index} {count} of {wanted} up" for index, count in few.items())
        return fail(f"NVLinks are down: {found}", expected=expected, found=found, fix=fix)
    if not counts or None in counts.values():
        return unknown("the state of the NVLinks is not known", expected=expected, fix=fix[:1])
    return ok(expected, expected=expected, found=expected)


def _links_up(profile: Profile, facts: HostFacts) -> dict[int, int | None]:
    """GPU -> links that are up; None where it is not stated."""
    if facts.gpus is None:
        text = facts.topology.nvlinks_up if facts.topology is not None else ()
        return dict(enumerate(text))
    return {
        gpu.index: None
        if gpu.nvlinks is None or any(link.up is None for link in gpu.nvlinks)
        else sum(1 for link in gpu.nvlinks if link.up)
        for gpu in used(profile, facts)
    }


def peer_access(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """The driver allows reads and writes between every pair of the profile's GPUs."""
    if not profile.hardware.p2p:
        return skip("the profile asks for no peer access" if profile.hardware.gpus else "no GPU in this profile")
    expected = "peer reads and writes OK between every pair"
    fix = (
        "nvidia-smi topo -p2p r",
        "install the driver with the peer-access patch that the recipe names, and hold its packages",
    )
    wanted = sorted({index for group in groups(profile, facts).values() for index in group}) or list(
        range(profile.hardware.gpus)
    )
    refused, unclear = [], []
    for a, b in combinations(wanted, 2):
        if facts.p2p is not None:
            codes = [facts.p2p.code(kind, *pair) for kind in ("read", "write") for pair in ((a, b), (b, a))]
        else:
            rows = facts.topology.p2p_read if facts.topology is not None else ()
            cells = rows[a].split() if a < len(rows) else []
            codes = [cells[b] if b < len(cells) else ""]
        bad = [code for code in codes if code in ("CNS", "GNS", "TNS", "DR", "NS")]
        if bad:
            refused.append(f"{a}-{b} {bad[0]}")
        elif any(code != "OK" for code in codes):
            unclear.append((a, b))
    words = {
        "CNS": "chipset not supported",
        "GNS": "GPU not supported",
        "TNS": "topology not supported",
        "DR": "disabled by a registry key",
        "NS": "not supported",
    }
    if refused:
        code = refused[0].split()[1]
        return fail(
            f"the driver refuses peer access: {refused[0]} ({words[code]})"
            + (f" and {len(refused) - 1} more pairs" if refused[1:] else ""),
            expected=expected,
            found=f"{len(refused)} pairs refused",
            fix=fix,
            why="all-reduce between these cards would go through host memory, or fail at its first call",
            evidence=tuple(refused),
        )
    if unclear:
        return unknown(f"peer access of {_pairs(unclear)} is not known", expected=expected, fix=fix[:1])
    return ok("OK between every pair", expected=expected, found="OK")


def peer_route(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """No IOMMU translation between the cards: with it, peer access is reported OK and is ten times slower."""
    if not profile.hardware.p2p:
        return skip("the profile asks for no peer access" if profile.hardware.gpus else "no GPU in this profile")
    expected = "IOMMU off, or in passthrough mode"
    system = facts.system
    fix = (
        as_root("sed -i 's/^GRUB_CMDLINE_LINUX=\"/&iommu=off /' /etc/default/grub", system),
        as_root("update-grub", system),
        as_root("reboot", system),
    )
    if system.iommu_groups is None or system.boot_options is None:
        return unknown(
            "the IOMMU's state is not known",
            expected=expected,
            fix=("ls /sys/kernel/iommu_groups", "cat /proc/cmdline"),
        )
    if system.iommu_groups == 0:
        return ok("no IOMMU translation", expected=expected, found="off")
    if "iommu=pt" in system.boot_options:
        return ok("IOMMU in passthrough mode", expected=expected, found="iommu=pt")
    return warn(
        f"IOMMU translation is on ({system.iommu_groups} groups)",
        expected=expected,
        found="on",
        fix=fix,
        why="peer copies at 0.3 to 0.5 GB/s instead of about 6.5 (field report)",
    )


def agreement(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """NVML and nvidia-smi state the same topology."""
    expected = "NVML and nvidia-smi agree"
    if profile.hardware.gpus < 2:
        return skip("fewer than two GPUs in this profile")
    text = facts.topology
    if text is None:
        return skip("nvidia-smi is not installed: NVML alone was asked")
    if text.problem or text.odd:
        what = text.problem or f"codes that are not known: {', '.join(text.odd)}"
        return warn(f"nvidia-smi topo -m: {what}", expected=expected, found=what, fix=("nvidia-smi topo -m",))
    if facts.gpus is None:
        return unknown("NVML was not asked: nothing to compare with", expected=expected, fix=("nvidia-smi",))
    found = topology.disagreements(facts)
    if found:
        return warn(
            found[0] + (f" and {len(found) - 1} more" if found[1:] else ""),
            expected=expected,
            found=f"{len(found)} disagreement(s)",
            fix=("nvidia-smi topo -m; nvidia-smi nvlink -s", command("facts --json --redact", profile)),
            why="one of the two is wrong, and the groups were chosen by one of them",
        )
    return ok("agree", expected=expected, found="agree")


def numa(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """The GPUs of each group share a node, and the groups do not all hang on one of several."""
    if not profile.hardware.gpus:
        return skip("no GPU in this profile")
    nodes = facts.memory.numa_nodes
    expected = "the GPUs of each group on one NUMA node, the groups spread over the nodes"
    fix = ("nvidia-smi topo -m   # column NUMA Affinity", "cat /sys/bus/pci/devices/*/numa_node")
    if not nodes:
        return unknown("the machine's NUMA nodes are not known", expected=expected, fix=fix)
    if len(nodes) == 1:
        return ok("one NUMA node", expected=expected, found="one node")
    if facts.gpus is not None:
        known = {gpu.index: gpu.numa_node for gpu in facts.gpus}
    else:
        known = dict(enumerate(facts.topology.numa if facts.topology is not None else ()))
    if not known:
        return unknown("the GPUs are not known", expected=expected, fix=fix)
    chosen = groups(profile, facts) or {"gpus": tuple(range(profile.hardware.gpus))}
    places = {name: [known.get(index) for index in group] for name, group in chosen.items()}
    if any(node is None for row in places.values() for node in row):
        return unknown("the NUMA node of a GPU is not known", expected=expected, fix=fix)
    found = ", ".join(
        f"{name}: node {'/'.join(str(node) for node in sorted(set(row), key=str))}" for name, row in places.items()
    )
    if any(len(set(row)) > 1 for row in places.values()):
        return warn(f"a group spans NUMA nodes ({found})", expected=expected, found=found, fix=fix)
    if len(places) > 1 and len({row[0] for row in places.values()}) == 1:
        return warn(
            f"all groups hang on one of {len(nodes)} NUMA nodes ({found})",
            expected=expected,
            found=found,
            fix=fix,
            why="an Engram store split by the GPUs' nodes would put every table on that one node",
        )
    return ok(found, expected=expected, found=found)


def order(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """The engine counts GPUs as NVML does: by bus id, or it is given UUIDs."""
    if profile.hardware.gpus < 2 or not profile.hardware.gpu_groups or profile.engine.kind == "container":
        return skip("no GPU is chosen by its index here")
    given = passed_on(profile)
    expected = "CUDA_DEVICE_ORDER=PCI_BUS_ID, or UUIDs in CUDA_VISIBLE_DEVICES"
    if given.get("CUDA_VISIBLE_DEVICES", "").startswith("GPU-"):
        return ok("GPUs are named by UUID", expected=expected, found="UUIDs")
    found = given.get("CUDA_DEVICE_ORDER", "")
    if found == "PCI_BUS_ID":
        return ok("by bus id", expected=expected, found=found)
    return fail(
        f"the engine would order GPUs by {found or 'speed'}, the groups are in bus order",
        expected=expected,
        found=found or "unset (FASTEST_FIRST)",
        fix=(f'set CUDA_DEVICE_ORDER = "PCI_BUS_ID" in [serve.env] of profile {profile.name}',),
        why="index 0 of nvidia-smi may be another card in CUDA: a quad would be made of the wrong cards",
    )


def peer_copy(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """A pattern copied between the GPUs of each group, and from stage to stage, comes back unchanged."""
    if profile.hardware.gpus < 2:
        return skip("fewer than two GPUs in this profile")
    expected = "every copied byte equal"
    again = (command("preflight --level 3 --only gpu.peer-copy", profile),)
    if facts.load is None:
        return unknown("nothing was copied", expected=expected, fix=again)
    if facts.load.problem or not facts.load.copies:
        return unknown(f"the copy did not run: {facts.load.problem or 'no pair'}", expected=expected, fix=again)
    wrong = [f"{copy.a}-{copy.b}" for copy in facts.load.copies if not copy.equal]
    if wrong:
        return fail(
            f"data copied between GPUs arrives changed: {', '.join(wrong)}",
            expected=expected,
            found=f"{len(wrong)} of {len(facts.load.copies)} pairs",
            fix=("remove the peer-access patch, or set NCCL_P2P_DISABLE=1 for a test", *again),
            why="a patched peer access that lies gives wrong answers and raises no error",
        )
    rates = [copy.gib_per_s for copy in facts.load.copies]
    return ok(f"{len(rates)} pairs equal, {min(rates):.1f} to {max(rates):.1f} GiB/s", expected=expected, found="equal")


CHECKS = (
    Check(
        "gpu.nvlink-quads",
        "every pair of each tensor-parallel group on NVLink",
        1,
        GROUP,
        "an all-reduce that crosses the CPUs on every layer",
        quads,
    ),
    Check(
        "gpu.nvlink-ports",
        "every NVLink port up",
        1,
        GROUP,
        "a dead link that halves the bandwidth of a pair without an error",
        ports,
    ),
    Check(
        "gpu.peer-access",
        "peer access between every pair, by the driver's status",
        1,
        GROUP,
        "an all-reduce through host memory, or one that fails at its first call",
        peer_access,
    ),
    Check(
        "gpu.peer-route",
        "IOMMU translation between the cards",
        1,
        GROUP,
        "peer access that is reported OK and is ten times slower than it should be",
        peer_route,
    ),
    Check(
        "gpu.topology-agrees",
        "NVML and nvidia-smi state the same topology",
        1,
        GROUP,
        "groups chosen by a source that is wrong",
        agreement,
    ),
    Check(
        "gpu.numa",
        "NUMA nodes of the GPUs",
        1,
        GROUP,
        "Engram tables on the wrong node, read across the socket link",
        numa,
    ),
    Check(
        "gpu.order",
        "the engine counts GPUs by bus id, as NVML does",
        1,
        GROUP,
        "a quad made of other cards than the ones that were checked",
        order,
    ),
    Check(
        "gpu.peer-copy",
        "data copied between the GPUs, compared byte by byte",
        3,
        GROUP,
        "a patched peer access that changes data and raises no error",
        peer_copy,
    ),
)
