"""nvidia-smi's texts: every recorded variant is read, and leads to the right verdict without NVML."""

from __future__ import annotations

import pytest

import preflight
from ds41ctl.adapters import smi
from ds41ctl.core import smitext, topology
from ds41ctl.core.facts import GpuFacts, HostFacts
from ds41ctl.core.finding import Finding, Status
from tests.facts.replay import FACTS, changed, machine, profile

TOPO = FACTS / "topo"
TABLES = sorted(path.name for path in TOPO.glob("*_*.txt") if "nvlink-s" not in path.name and "p2p-rw" not in path.name)
V100 = "v100-sxm2-32gb-8x_r580_nic0_tabs.txt"


def text(name: str) -> str:
    return (TOPO / name).read_text()


def known_by_text(matrix: str, peers: str = "", *, of: str = "v100-8x-hugepages-reserved") -> HostFacts:
    """A machine whose topology is known from nvidia-smi alone."""
    return changed(machine(of), gpus=None, p2p=None, topology=smi.parse(matrix, peers))


def ask(id: str, asked: str, facts: HostFacts) -> Finding:
    (finding,) = preflight.run(profile(asked), facts, only=(id,))
    return finding


# file -> (verdict on the quads of v100-pp2tp4, complete sets of four, NUMA nodes) as the file's origin states it
VERDICTS: dict[str, tuple[str, list[tuple[int, ...]], list[int | None]]] = {
    V100: ("ok", [(0, 1, 2, 3), (4, 5, 6, 7)], [0, 0, 0, 0, 1, 1, 1, 1]),
    "v100-sxm2-32gb-8x_r580_nic0_ansi.txt": ("ok", [(0, 1, 2, 3), (4, 5, 6, 7)], [0, 0, 0, 0, 1, 1, 1, 1]),
    "dgx1-v100-8x_4nic_old-header_tabs.txt": ("ok", [(0, 1, 2, 3), (4, 5, 6, 7)], [None] * 8),
    "v100-sxm2-16gb-8x_1nic_old-header_spaces.txt": ("ok", [(0, 1, 2, 3), (4, 5, 6, 7)], [None] * 8),
    "v100-sxm2-4x_one-quad_1nic_tabs.txt": ("fail", [(0, 1, 2, 3)], [None] * 4),
    "v100-4x_nv3-pairs_not-a-quad_4nic_tabs.txt": ("fail", [], [None] * 4),
    "pcie-only-8x_6plus2-numa_tabs.txt": ("fail", [], [0, 0, 0, 0, 0, 0, 1, 1]),
    "pcie-only-8x_all-sys_2nic_tabs.txt": ("fail", [], [0, 0, 0, 0, 1, 1, 1, 1]),
    "pcie-4x_phb_p2p-ok_tabs.txt": ("fail", [], [0] * 4),
    "pcie-4x_node_tabs.txt": ("fail", [], [0] * 4),
    "pcie-2x_phb_tabs.txt": ("fail", [], [0] * 2),
    "nvlink-2x_h200_nv18_numa-1.txt": ("fail", [], [0, 0]),
    "nvswitch-4x_blank-cpu-affinity_tabs.txt": ("fail", [(0, 1, 2, 3)], [0, 1, 1, 1]),
    "a100-4x_nv12_1nic_tabs.txt": ("fail", [(0, 1, 2, 3)], [1] * 4),
}


def test_every_recorded_table_has_a_stated_verdict() -> None:
    assert set(TABLES) == set(VERDICTS)


@pytest.mark.parametrize("name", TABLES)
def test_a_recorded_table_leads_to_the_right_verdict(name: str) -> None:
    status, sets, numa = VERDICTS[name]
    facts = known_by_text(text(name))
    assert facts.topology is not None
    assert facts.topology.odd == () and list(facts.topology.numa) == numa
    assert topology.complete_sets(facts, 4) == sets
    finding = ask("gpu.nvlink-quads", "v100-pp2tp4", facts)
    assert finding.status == status, finding.summary
    assert finding.status == Status.OK or finding.fix


def test_sixteen_gigabyte_cards_are_refused_whatever_their_links() -> None:
    facts = known_by_text(text("v100-sxm2-16gb-8x_1nic_old-header_spaces.txt"))
    cards = tuple(GpuFacts(index=i, name="Tesla V100-SXM2-16GB", memory_total_mib=16384) for i in range(8))
    assert ask("gpu.memory", "v100-pp2tp4", changed(facts, gpus=cards)).status == Status.FAIL


@pytest.mark.parametrize(
    ("matrix", "peers", "status", "words"),
    [
        ("pcie-4x_phb_p2p-ok_tabs.txt", "pcie-4x_phb_p2p-ok.topo-p2p-rw.txt", "ok", "OK"),
        ("pcie-4x_node_tabs.txt", "", "unknown", "not known"),  # an acceptable shape; the driver must still allow it
    ],
)
def test_four_cards_on_pcie_have_the_shape_of_the_cmp_profile(matrix: str, peers: str, status: str, words: str) -> None:
    facts = known_by_text(text(matrix), text(peers) if peers else "", of="cmp170hx-4x-ready")
    finding = ask("gpu.peer-access", "cmp170hx-tp4", facts)
    assert finding.status == status and words in finding.summary
    assert "topo -p2p" in "".join(finding.fix) or status == "ok"
    assert ask("gpu.nvlink-quads", "cmp170hx-tp4", facts).status == Status.SKIP


def test_a_driver_that_refuses_peer_access_is_named_with_its_code() -> None:
    refused = text("pcie-4x_phb_p2p-ok.topo-p2p-rw.txt").replace("OK\t", "GNS\t")
    facts = known_by_text(text("pcie-2x_phb_tabs.txt"), refused, of="cmp170hx-4x-ready")
    finding = ask("gpu.peer-access", "cmp170hx-tp4", facts)
    assert finding.status == Status.FAIL and "GNS (GPU not supported)" in finding.summary


def test_a_locked_cmp_card_states_8192_mib() -> None:
    rows = [row.split(", ") for row in text("cmp170hx-4x_one-still-locked.query-gpu.csv").splitlines()]
    cards = tuple(
        GpuFacts(index=int(row[0]), name=row[1], memory_total_mib=int(row[2].removesuffix(" MiB"))) for row in rows
    )
    finding = ask("gpu.memory", "cmp170hx-tp4", changed(machine("cmp170hx-4x-ready"), gpus=cards))
    assert finding.status == Status.FAIL and "GPU 2 8192 MiB" in finding.summary and "unlock" in finding.fix[0]


WRONG_GROUPS = [
    ((0, 1, 4, 5), (2, 3, 6, 7), "0-5, 1-4", "DS41_GPUS_A=0,1,2,3 DS41_GPUS_C=4,5,6,7"),
    ((0, 1, 2, 4), (3, 5, 6, 7), "1-4, 2-4", "DS41_GPUS_A=0,1,2,3 DS41_GPUS_C=4,5,6,7"),
    ((0, 1, 2, 8), (4, 5, 6, 7), "no GPU 8", "DS41_GPUS_A=0,1,2,3 DS41_GPUS_C=4,5,6,7"),
    ((0, 1, 2, 3), (3, 5, 6, 7), "GPU 3 belongs to two groups", "DS41_GPUS_A=0,1,2,3 DS41_GPUS_C=4,5,6,7"),
]


@pytest.mark.parametrize(("a", "c", "named", "suggested"), WRONG_GROUPS)
@pytest.mark.parametrize("source", ["nvml", "text"])
def test_a_wrong_quad_names_the_missing_pair_and_suggests_the_right_ones(
    a: tuple[int, ...], c: tuple[int, ...], named: str, suggested: str, source: str
) -> None:
    facts = machine("v100-8x-hugepages-reserved") if source == "nvml" else known_by_text(text(V100))
    finding = ask("gpu.nvlink-quads", "v100-pp2tp4", changed(facts, gpu_groups={"a": a, "c": c}))
    assert finding.status == Status.FAIL and named in finding.summary, finding.summary
    assert suggested in finding.fix[0]


def test_only_two_of_the_seventy_sets_of_four_are_complete() -> None:
    assert topology.complete_sets(machine("v100-8x-hugepages-reserved"), 4) == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_a_reordered_machine_is_suggested_its_own_quads() -> None:
    finding = ask("gpu.nvlink-quads", "v100-pp2tp4", machine("v100-8x-crossed-quads"))
    assert finding.fix[0] == "export DS41_GPUS_A=0,2,4,6 DS41_GPUS_C=1,3,5,7"
    chosen = changed(machine("v100-8x-crossed-quads"), gpu_groups={"a": (0, 2, 4, 6), "c": (1, 3, 5, 7)})
    assert ask("gpu.nvlink-quads", "v100-pp2tp4", chosen).status == Status.OK


# ---- variants of the text


VARIANTS = {
    "no leading tab": lambda t: t.lstrip("\t"),
    "CRLF": lambda t: t.replace("\n", "\r\n"),
    "trailing blanks": lambda t: t.replace("\n", "  \n"),
    "legend twice": lambda t: t + "\nLegend:\n\n  GPU0\tGPU1\n",
    "the old name of SYS": lambda t: t.replace("SYS", "SOC"),
    "NUMA column by its short name": lambda t: t.replace("NUMA Affinity", "NUMA"),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_says_the_same(name: str) -> None:
    plain, varied = smitext.topo_m(text(V100)), smitext.topo_m(VARIANTS[name](text(V100)))
    assert [row.replace("SOC", "SYS") for row in varied.rows] == list(plain.rows)
    assert varied.numa == plain.numa


@pytest.mark.parametrize("empty", ["", "\n\n", "Legend:\n\n  X    = Self\n", "No devices were found\n"])
def test_a_text_without_a_table_has_no_rows(empty: str) -> None:
    assert smitext.topo_m(empty).rows == ()
    assert smi.parse(empty).problem


def test_a_code_nobody_knows_is_no_nvlink_and_a_finding() -> None:
    facts = known_by_text(text(V100).replace("NV1", "C2C"))
    assert facts.topology is not None and facts.topology.odd == ("C2C",)
    assert topology.direct_links(facts, 0, 1) is None
    assert ask("gpu.nvlink-quads", "v100-pp2tp4", facts).status == Status.UNKNOWN
    assert ask("gpu.topology-agrees", "v100-pp2tp4", facts).status == Status.WARN


def test_blank_cells_do_not_shift_columns() -> None:
    found = smitext.topo_m(text("nvswitch-4x_blank-cpu-affinity_tabs.txt"))
    assert found.rows[3] == "NV18 NV18 NV18 X" and found.numa == (0, 1, 1, 1)


def test_links_that_are_up_are_counted() -> None:
    assert smitext.nvlink_status(text("v100-sxm2-32gb-8x.nvlink-s.txt")) == (6,) * 8
    assert smitext.nvlink_status(text("nvlink-s_one-gpu-inactive.txt")) == (4, 4, 0)
    assert smitext.nvlink_status("GPU 0: x\n\t Link 0: <inactive>\n\t Link 1: 25.781 GB/s\nGPU 1: y\n") == (1, None)


def test_a_card_with_dead_links_is_named_by_the_text_alone() -> None:
    links = text("v100-sxm2-32gb-8x.nvlink-s.txt")
    good = changed(machine("v100-8x-hugepages-reserved"), gpus=None, topology=smi.parse(text(V100), "", links))
    assert ask("gpu.nvlink-ports", "v100-pp2tp4", good).status == Status.OK
    inactive = text("nvlink-s_one-gpu-inactive.txt")
    dead = changed(good, topology=smi.parse(text(V100), "", inactive))
    finding = ask("gpu.nvlink-ports", "v100-pp2tp4", dead)
    assert finding.status == Status.FAIL and "GPU 2 0 of 6 up" in finding.summary
    assert ask("gpu.nvlink-ports", "v100-pp2tp4", changed(good, topology=smi.parse(text(V100)))).status == "unknown"


def test_an_uneven_split_over_numa_nodes_is_a_warning() -> None:
    finding = ask("gpu.numa", "v100-pp2tp4", known_by_text(text("pcie-only-8x_6plus2-numa_tabs.txt")))
    assert finding.status == Status.WARN and "c: node 0/1" in finding.summary
    assert ask("gpu.numa", "v100-pp2tp4", known_by_text(text(V100))).status == Status.OK
    # an old driver's table has no such column: then sysfs must say it, and here nobody asked sysfs
    old = known_by_text(text("dgx1-v100-8x_4nic_old-header_tabs.txt"))
    assert ask("gpu.numa", "v100-pp2tp4", old).status == Status.UNKNOWN


def test_two_sources_that_disagree_are_a_finding_that_names_the_pair() -> None:
    facts = machine("v100-8x-hugepages-reserved")
    assert facts.topology is not None and topology.disagreements(facts) == []
    rows = ("X NV2 " + " ".join(facts.topology.links[0].split()[2:]), *facts.topology.links[1:])
    finding = ask("gpu.topology-agrees", "v100-pp2tp4", changed(facts, "topology", links=rows))
    assert finding.status == Status.WARN and "GPU 0-1: NVML counts 1 NVLinks, nvidia-smi NV2" in finding.summary


def test_behind_a_switch_the_peer_status_decides() -> None:
    pair = machine("h200-2x-nvlink")
    assert topology.direct_links(pair, 0, 1) == 18
    assert pair.p2p is not None and pair.gpus is not None
    assert {link.remote_bus_id for link in pair.gpus[0].nvlinks or ()} == {"FFFFFFFF:FF:FF.0"}
    refused = changed(pair, "p2p", nvlink=("X NS", "NS X"))
    assert topology.direct_links(refused, 0, 1) == 0
    assert topology.direct_links(changed(pair, p2p=None), 0, 1) is None, "not stated is not linked, and not unlinked"
