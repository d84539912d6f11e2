"""The NVML adapter through the real nvidia-ml-py, with a driver that plays described machines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ds41ctl.core import topology
from ds41ctl.core.facts import HostFacts, MemoryFacts, SystemFacts
from tests.facts.replay import FACTS, machine
from tests.fakes import nvml
from tests.fakes.nvml.fixtures import driver, nvml_library

__all__ = ["driver", "nvml_library"]

ROOT = str(Path(__file__).parents[2])
SURVEY = """
import json
from ds41ctl.adapters import nvml
s = nvml.survey()
print(json.dumps({
    "gpus": None if s.gpus is None else [g.model_dump(mode="json") for g in s.gpus],
    "note": s.note, "reason": s.reason, "driver": s.driver, "cuda": s.cuda,
    "p2p": s.p2p.model_dump(mode="json") if s.p2p else None,
}))
"""


def child(driver: nvml.Driver, code: str, **environ: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**driver.environ, "PYTHONPATH": ROOT, **environ},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def survey(driver: nvml.Driver, cards: nvml.Machine, **environ: str) -> dict[str, Any]:
    driver.play(cards)
    tree: dict[str, Any] = json.loads(child(driver, SURVEY, **environ))
    return tree


def facts(tree: dict[str, Any]) -> HostFacts:
    return HostFacts.model_validate(
        {
            "collected_at": "now",
            "profile": "p",
            "system": SystemFacts().model_dump(),
            "memory": MemoryFacts().model_dump(),
            "gpus": tree["gpus"],
            "p2p": tree["p2p"],
        }
    )


def ds41ctl(driver: nvml.Driver, *args: str, state: Path) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "ds41ctl", *args, "--json"],
        env={**driver.environ, "PYTHONPATH": ROOT, "DS41_STATE_DIR": str(state), "DS41_DATA_DIR": str(state / "data")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout, done.stderr
    tree: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, tree


def test_every_field_of_a_card_is_read(driver: nvml.Driver) -> None:
    tree = survey(driver, nvml.v100())
    assert tree["driver"] == "580.173.02" and tree["cuda"] == "13.0" and tree["note"] == ""
    card = tree["gpus"][0]
    supported = card.pop("sm_supported_mhz")
    assert supported[0] == 135 and supported[-1] == 1530
    assert [link["remote_bus_id"] for link in card.pop("nvlinks")] == [
        *["00000000:1B:00.0", "00000000:3D:00.0", "00000000:3E:00.0"],
        *["00000000:3E:00.0", "00000000:88:00.0", "00000000:88:00.0"],
    ]
    assert card == {
        "index": 0,
        "name": "Tesla V100-SXM2-32GB",
        "uuid": "GPU-00000000-0000-0000-0000-000000000000",
        "bus_id": "00000000:1A:00.0",
        "memory_total_mib": 32768,
        "memory_free_mib": 32765,
        "compute_capability": "7.0",
        "processes": [],
        "sm_mhz": 135,
        "sm_max_mhz": 1530,
        "memory_mhz": 877,
        "throttle": 1,
        "power_limit_w": 300.0,
        "power_default_w": 300.0,
        "power_min_w": None,
        "power_max_w": None,
        "offset_mhz": None,
        "offset_min_mhz": None,
        "offset_max_mhz": None,
        "offset_note": "this GPU does not support it",
        "temperature_c": 34,
        "persistence": True,
        "ecc": True,
        "ecc_uncorrected": 0,
        "mig": False,
        "compute_mode": "default",
        "display_active": False,
        "pcie_gen": 3,
        "pcie_gen_max": 3,
        "pcie_width": 16,
        "pcie_width_max": 16,
        "numa_node": None,
    }


QUADS = {"a": (0, 1, 2, 3), "c": (4, 5, 6, 7)}


@pytest.mark.parametrize(
    ("cards", "quads"),
    [
        (nvml.v100(), {"a": (0, 1, 2, 3), "c": (4, 5, 6, 7)}),
        (nvml.v100(cards=4), None),
        (nvml.v100_crossed(), {"a": (0, 2, 4, 6), "c": (1, 3, 5, 7)}),
        (nvml.v100_link_down(), None),
        (nvml.v100(cards=7), None),
        (nvml.v100(mib=16384), {"a": (0, 1, 2, 3), "c": (4, 5, 6, 7)}),
        (nvml.h200_pair(), None),
        (nvml.cmp(), None),
    ],
    ids=["two-quads", "one-quad", "crossed", "link-down", "7-of-8", "16-gb", "h200-pair", "cmp"],
)
def test_quads_of_a_described_machine(driver: nvml.Driver, cards: nvml.Machine, quads: topology.Groups | None) -> None:
    assert topology.suggest(facts(survey(driver, cards)), QUADS) == quads


def test_the_matrix_is_the_recorded_one(driver: nvml.Driver) -> None:
    found = facts(survey(driver, nvml.v100()))
    text = machine("v100-8x-hugepages-reserved").topology
    assert text is not None
    for a in range(8):
        for b in range(8):
            if a != b:
                recorded = text.code(a, b)
                count = int(recorded[2:]) if recorded.startswith("NV") else 0
                assert topology.direct_links(found, a, b) == count, (a, b)


def test_the_pair_behind_a_switch_is_the_one_that_was_recorded(driver: nvml.Driver) -> None:
    """The described H200 pair answers what a real one answered (nvml-h200x2.json, recorded on the real cards)."""
    real = json.loads((FACTS / "nvml-h200x2.json").read_text())
    tree = survey(driver, nvml.h200_pair())
    assert tree["driver"] == real["driver"] and len(tree["gpus"]) == real["count"]
    for index, card in enumerate(tree["gpus"]):
        assert card["name"] == real[f"{index}.nvmlDeviceGetName"]
        assert card["bus_id"] == real[f"{index}.nvmlDeviceGetPciInfo"]["busId"]
        assert card["memory_total_mib"] == real[f"{index}.nvmlDeviceGetMemoryInfo"]["total"] >> 20
        assert card["sm_mhz"] == real[f"{index}.sm"] and card["sm_max_mhz"] == real[f"{index}.maxsm"]
        assert card["throttle"] == real[f"{index}.nvmlDeviceGetCurrentClocksThrottleReasons"]
        assert len(card["nvlinks"]) == 18
        for link in card["nvlinks"]:
            recorded = real[f"{index}.nvlink{link['link']}.remote"]
            assert link["up"] == bool(real[f"{index}.nvlink{link['link']}.state"])
            assert link["remote_bus_id"] == recorded["busId"] and link["remote_type"] == "switch"
    codes = [real[f"0-1.p2p{index}"] for index in range(5)]
    assert codes == [0, 0, 0, 0, 5]
    assert [tree["p2p"][name][0] for name in ("read", "write", "nvlink", "atomics", "pcie")] == [*["X OK"] * 4, "X NS"]


@pytest.mark.parametrize(
    ("error", "reason", "words"),
    [
        (12, "no-library", "not installed"),
        (9, "no-driver", "not loaded"),
        (18, "mismatch", "mismatch"),
        (4, "denied", "permission"),
        (999, "other", "NVML"),
    ],
)
def test_a_driver_that_does_not_start_is_a_note(driver: nvml.Driver, error: int, reason: str, words: str) -> None:
    cards = nvml.v100()
    cards.system["init_error"] = error
    tree = survey(driver, cards)
    assert tree["gpus"] is None and tree["reason"] == reason and words in tree["note"]


def test_without_the_library_it_is_a_note(driver: nvml.Driver, tmp_path: Path) -> None:
    tree = survey(driver, nvml.v100(), LD_LIBRARY_PATH=str(tmp_path))
    assert tree["gpus"] is None and tree["reason"] == "no-library"


def test_a_library_that_is_no_library_is_a_note(driver: nvml.Driver, tmp_path: Path) -> None:
    (tmp_path / nvml.LIBRARY).write_text("not ELF")
    tree = survey(driver, nvml.v100(), LD_LIBRARY_PATH=str(tmp_path))
    assert tree["gpus"] is None and tree["reason"] == "no-library"


@pytest.mark.parametrize("calls", [0, 1, 3, 5, 10, 20, 40, 80])
def test_a_card_lost_after_any_number_of_calls_is_no_crash(driver: nvml.Driver, calls: int) -> None:
    cards = nvml.v100()
    cards.gpus[3]["lost_after"] = calls
    tree = survey(driver, cards)
    found = {card["index"]: card for card in tree["gpus"]}
    assert set(found) | {3} == set(range(8))
    if 3 not in found:
        assert tree["note"] == "GPU 3: a GPU has fallen off the bus"
    # what was not answered is not measured: never zero, never empty
    assert all(card["memory_total_mib"] in (32768, None) for card in tree["gpus"])
    assert topology.direct_links(facts(tree), 3, 0) in (None, 2)


def test_what_a_card_does_not_state_stays_unmeasured(driver: nvml.Driver) -> None:
    cards = nvml.v100()
    for name in ("memory_mib", "sm_max_mhz", "throttle", "power_mw", "persistence", "pcie_gen"):
        del cards.gpus[2][name]
    card = survey(driver, cards)["gpus"][2]
    for name in ("memory_total_mib", "sm_max_mhz", "throttle", "power_limit_w", "persistence", "pcie_gen"):
        assert card[name] is None, name
    assert card["uuid"]


def test_processes_are_named_and_ours_are_told_from_others(driver: nvml.Driver, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], env={**driver.environ, "DS41_ENGINE_RUN": "x"}
    ) as worker:
        try:
            cards = nvml.v100()
            cards.gpus[0]["processes"] = f"{worker.pid}:30122 4194301:7"
            driver.play(cards)
            _, tree = ds41ctl(driver, "facts", "--profile", "v100-pp2tp4", state=tmp_path)
        finally:
            worker.kill()
    ours, foreign = tree["data"]["gpus"][0]["processes"]
    assert ours["ours"] and ours["used_mib"] == 30122 and ours["name"].startswith("python")
    assert not foreign["ours"] and foreign["name"] == "" and foreign["used_mib"] == 7


def test_setters_change_what_getters_return(driver: nvml.Driver) -> None:
    code = (
        "from ds41ctl.adapters.nvml import Nvml\n"
        "n = Nvml(); u = n.survey().gpus[1].uuid\n"
        "mhz = lambda: n.samples([u])[u].mhz\n"
        "print(mhz(), repr(n.lock(u, 1380)), mhz(), repr(n.reset(u)), mhz())\n"
        "print(n.samples(['GPU-nobody']), repr(n.lock('GPU-nobody', 1)))\n"
    )
    first, second = child(driver, code).splitlines()
    assert first == "135 '' 1380 '' 135"
    assert second.startswith("{} ") and "NVML" in second
    assert driver.calls() == ["lock 1 1380", "reset 1 0"]


def test_a_refused_setter_says_so(driver: nvml.Driver) -> None:
    cards = nvml.v100()
    cards.system["lock_error"] = 4
    driver.play(cards)
    code = "from ds41ctl.adapters.nvml import Nvml\nn = Nvml()\nprint(n.lock(n.survey().gpus[0].uuid, 1380))"
    assert child(driver, code).strip() == "no permission"


# ---- the command line on a played machine


def findings(tree: dict[str, Any]) -> dict[str, str]:
    return {item["id"]: item["status"] for item in tree["data"]["findings"]}


@pytest.mark.parametrize(
    ("cards", "asked", "wrong"),
    [
        (nvml.v100(), "v100-pp2tp4", set()),
        (nvml.v100(cards=4), "v100-pp2tp4", {"gpu.count", "gpu.nvlink-quads", "gpu.nvlink-ports"}),
        (nvml.v100(cards=7), "v100-pp2tp4", {"gpu.count", "gpu.nvlink-quads", "gpu.nvlink-ports"}),
        (nvml.v100_crossed(), "v100-pp2tp4", {"gpu.nvlink-quads"}),
        (nvml.v100_link_down(), "v100-pp2tp4", {"gpu.nvlink-quads", "gpu.nvlink-ports"}),
        (nvml.v100(mib=16384), "v100-pp2tp4", {"gpu.memory", "gpu.name", "gpu.weights"}),
        (nvml.cmp(), "cmp170hx-tp4", set()),
        (nvml.cmp(mib=(65536, 65536, 8192, 65536)), "cmp170hx-tp4", {"gpu.memory"}),
        (
            nvml.h200_pair(),
            "v100-pp2tp4",
            {"gpu.count", "gpu.name", "gpu.capability", "gpu.nvlink-quads"},
        ),
        (nvml.h200_pair(), "cmp170hx-tp4", {"gpu.count", "gpu.name", "gpu.capability"}),
    ],
    ids=["v100", "4-of-8", "7-of-8", "crossed", "link-down", "16-gb", "cmp", "cmp-locked", "h200", "h200-as-cmp"],
)
def test_preflight_refuses_a_played_machine_for_the_right_reasons(
    driver: nvml.Driver, tmp_path: Path, cards: nvml.Machine, asked: str, wrong: set[str]
) -> None:
    driver.play(cards)
    _, tree = ds41ctl(driver, "preflight", "--profile", asked, "--only", "gpu", state=tmp_path)
    # about the driver's module and packages, the IOMMU and NUMA nodes, this machine speaks, not the played one
    here = {"gpu.driver-module", "gpu.driver-hold", "gpu.peer-route", "gpu.numa", "gpu.topology-agrees"}
    failed = {id for id, status in findings(tree).items() if status in ("fail", "crash") and id not in here}
    assert failed == wrong, tree


def test_facts_of_a_played_machine_replay_to_the_same_findings(driver: nvml.Driver, tmp_path: Path) -> None:
    driver.play(nvml.v100_crossed())
    _, recorded = ds41ctl(driver, "facts", "--profile", "v100-pp2tp4", "--redact", state=tmp_path)
    path = tmp_path / "facts.json"
    path.write_text(json.dumps(recorded))
    for gpu in recorded["data"]["gpus"]:
        assert gpu["uuid"] == f"GPU-{gpu['index']}"
    _, live = ds41ctl(driver, "preflight", "--profile", "v100-pp2tp4", "--only", "gpu", state=tmp_path)
    _, replayed = ds41ctl(
        driver, "preflight", "--profile", "v100-pp2tp4", "--only", "gpu", "--facts", str(path), state=tmp_path
    )
    assert findings(live) == findings(replayed)
    again = next(item for item in replayed["data"]["findings"] if item["id"] == "gpu.nvlink-quads")
    assert again["fix"][0] == "export DS41_GPUS_A=0,2,4,6 DS41_GPUS_C=1,3,5,7"


def test_the_users_groups_are_judged_not_the_profiles(driver: nvml.Driver, tmp_path: Path) -> None:
    driver.play(nvml.v100_crossed())
    environ = {"DS41_GPUS_A": "0,2,4,6", "DS41_GPUS_C": "1,3,5,7"}
    done = subprocess.run(
        [sys.executable, "-m", "ds41ctl", "preflight", "-p", "v100-pp2tp4", "--only", "gpu.nvlink-quads", "--json"],
        env={**driver.environ, "PYTHONPATH": ROOT, "DS41_STATE_DIR": str(tmp_path), **environ},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert findings(json.loads(done.stdout)) == {"gpu.nvlink-quads": "ok"}
