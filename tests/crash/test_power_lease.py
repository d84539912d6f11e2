"""Power limits and clock offsets under the lease: whoever dies, the value of before comes back, and no other goes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds41ctl.adapters import proc
from tests.crash.test_clock_lease import Machine, end_guardian, owner, wait_until
from tests.fakes import nvml
from tests.fakes.nvml.fixtures import driver, nvml_library

__all__ = ["driver", "nvml_library", "owner"]

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="limits are root's to set: unshare -r python -m pytest tests/crash/test_power_lease.py"
)

SET = {"power": dict.fromkeys(range(4), 200_000), "offset": dict.fromkeys(range(4), 200)}
BEFORE = {"power": dict.fromkeys(range(4), 250_000), "offset": dict.fromkeys(range(4), 0)}
FIRST_AND_LAST = (1, 4, 5, 8)  # of the four values of each kind
Owner = subprocess.Popen[bytes]


@pytest.fixture
def machine(driver: nvml.Driver, tmp_path: Path) -> Iterator[Machine]:
    """4x CMP 170HX at their default limits."""
    driver.play(nvml.cmp())
    found = Machine(driver, tmp_path / "state", "cmp170hx-tp4")
    yield found
    end_guardian(found)


def values(machine: Machine) -> dict[str, dict[int, int]]:
    return {what: machine.driver.values(what) for what in ("power", "offset")}


def as_before(machine: Machine) -> bool:
    """Every value that was ever set is the one from before again."""
    found = values(machine)
    return all(BEFORE[what][gpu] == value for what, cards in found.items() for gpu, value in cards.items())


def kill(process: Owner) -> None:
    process.kill()
    process.wait()


def changed(machine: Machine, gpu: int, what: str, value: int) -> None:
    """Somebody sets it by other means."""
    (machine.driver.folder / f"gpu{gpu}.{what}").write_text(f"{value}\n")


def test_limits_and_offsets_are_journalled_set_and_given_back(machine: Machine, owner: Owner) -> None:
    machine.run("lock", "--pid", str(owner.pid))
    lease = machine.lease()
    assert values(machine) == SET and machine.driver.locks() == {}, "this profile locks no clock"
    assert (lease["power_limit_w"], lease["offset_mhz"], lease["mhz"], lease["missed"]) == (200.0, 200, None, [])
    assert set(lease["power_before_w"].values()) == {250.0} and set(lease["offset_before_mhz"].values()) == {0}
    assert lease["module"] and lease["locked"] and len(lease["uuids"]) == 4
    assert [line.split()[0] for line in machine.driver.calls()] == ["power"] * 4 + ["offset"] * 4, (
        "no card gets a higher clock before its power is bounded"
    )
    status = machine.run("status")["data"]
    assert status["values"]["status"] == "ok" and status["wanted"]["power_limit_w"] == 200.0
    assert status["gpus"][0]["power_limit_w"] == 200.0 and status["gpus"][0]["power_default_w"] == 250.0
    assert (status["gpus"][0]["offset_mhz"], status["gpus"][0]["offset_max_mhz"]) == (200, 500)
    machine.run("unlock")
    assert values(machine) == BEFORE and not machine.journal.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_the_owners_death_gives_everything_back(machine: Machine, owner: Owner, number: signal.Signals) -> None:
    machine.run("lock", "--pid", str(owner.pid))
    os.kill(owner.pid, number)
    wait_until(lambda: values(machine) == BEFORE)
    wait_until(lambda: not machine.journal.exists())


def test_when_owner_and_guardian_are_killed_the_next_command_gives_back(machine: Machine, owner: Owner) -> None:
    machine.run("lock", "--pid", str(owner.pid))
    guardian = machine.guardian()
    os.kill(guardian, signal.SIGKILL)
    kill(owner)
    wait_until(lambda: proc.identify(guardian) is None)
    assert values(machine) == SET, "nobody was left to undo it"
    machine.run("status")
    assert values(machine) == BEFORE and not machine.journal.exists()


KILLED = """
import os, signal, sys
from ds41ctl.adapters import nvml
from ds41ctl.cli import main
done = []
def killing(plain):
    def setter(self, uuid, value):
        text = plain(self, uuid, value)
        done.append(uuid)
        if len(done) == int(sys.argv[1]):
            os.kill(os.getpid(), signal.SIGKILL)
        return text
    return setter
nvml.Nvml.set_power = killing(nvml.Nvml.set_power)
nvml.Nvml.set_offset = killing(nvml.Nvml.set_offset)
main(["clocks", *sys.argv[2:], "--profile", "cmp170hx-tp4"])
"""


def killed_after(machine: Machine, setters: int, *words: str) -> None:
    """`ds41ctl clocks ...` that is killed right after so many values were set."""
    environ = {**machine.driver.environ, "DS41_STATE_DIR": str(machine.state)}
    environ["PYTHONPATH"] = str(Path(__file__).parents[2])
    argv = [sys.executable, "-c", KILLED, str(setters), *words]
    assert subprocess.run(argv, env=environ, capture_output=True, timeout=60).returncode == -signal.SIGKILL


@pytest.mark.parametrize("at", range(1, 9))
def test_a_command_killed_between_two_values_leaves_none(machine: Machine, owner: Owner, at: int) -> None:
    killed_after(machine, at, "lock", "--pid", str(owner.pid))
    assert sum(len(cards) for cards in values(machine).values()) == at and not machine.lease()["locked"]
    kill(owner)
    wait_until(lambda: not machine.journal.exists())
    assert as_before(machine)


@pytest.mark.parametrize("at", FIRST_AND_LAST)
def test_a_command_killed_while_it_gives_back_is_finished_by_another(machine: Machine, owner: Owner, at: int) -> None:
    machine.run("lock", "--pid", str(owner.pid))
    killed_after(machine, at, "unlock")
    assert machine.journal.exists()
    kill(owner)
    wait_until(lambda: not machine.journal.exists())
    assert values(machine) == BEFORE


@pytest.mark.parametrize("at", FIRST_AND_LAST)
def test_a_lease_of_nobody_killed_in_the_middle_is_undone_by_unlock(machine: Machine, at: int) -> None:
    killed_after(machine, at, "lock")
    machine.run("unlock")
    assert as_before(machine) and not machine.journal.exists()


def test_a_new_load_of_the_driver_module_voids_the_lease(machine: Machine, owner: Owner) -> None:
    machine.run("lock", "--pid", str(owner.pid))
    machine.journal.write_text(json.dumps({**machine.lease(), "module": "inode 7"}))
    machine.driver.forget()  # the driver came back with its defaults
    calls = machine.driver.calls()
    tree = machine.run("status")["data"]
    assert "before the driver module was loaded again" in tree["recovered"][0] and tree["lease"] is None
    assert machine.driver.calls() == calls and not machine.journal.exists(), "no old number was set again"


def test_the_guardian_of_a_void_lease_sets_nothing_either(machine: Machine, owner: Owner) -> None:
    machine.run("lock", "--pid", str(owner.pid))
    machine.journal.write_text(json.dumps({**machine.lease(), "module": "inode 7"}))
    machine.driver.forget()
    calls = machine.driver.calls()
    kill(owner)
    wait_until(lambda: not machine.journal.exists())
    assert machine.driver.calls() == calls


def test_a_clock_lock_of_before_the_new_load_is_not_reset(driver: nvml.Driver, tmp_path: Path, owner: Owner) -> None:
    machine = Machine(driver, tmp_path / "state")  # the V100s, whose clock is locked
    machine.run("lock", "--pid", str(owner.pid))
    machine.journal.write_text(json.dumps({**machine.lease(), "module": "inode 7"}))
    kill(owner)
    wait_until(lambda: not machine.journal.exists())
    assert machine.resets() == 0


def test_after_a_reboot_nothing_is_set(machine: Machine, owner: Owner) -> None:
    machine.run("lock", "--pid", str(owner.pid))
    machine.journal.write_text(json.dumps({**machine.lease(), "boot_id": "another"}))
    machine.driver.forget()
    calls = machine.driver.calls()
    assert "earlier boot" in machine.run("status")["data"]["recovered"][0]
    assert machine.driver.calls() == calls and not machine.journal.exists()


def test_what_somebody_else_has_set_meanwhile_stays_and_is_named(machine: Machine, owner: Owner) -> None:
    machine.run("lock", "--pid", str(owner.pid))
    changed(machine, 1, "power", 180_000)
    changed(machine, 2, "offset", 90)
    tree = machine.run("status", code=1)["data"]
    assert tree["values"]["evidence"] == [
        "GPU 1: power limit 180 W now, 200 W was set",
        "GPU 2: clock offset +90 MHz now, +200 MHz was set",
    ]
    kept = machine.run("unlock")["data"]["kept"]
    assert len(kept) == 2 and "180 W is somebody else's" in " ".join(kept) and "+90 MHz" in " ".join(kept)
    assert values(machine) == {
        "power": {**BEFORE["power"], 1: 180_000},
        "offset": {**BEFORE["offset"], 2: 90},
    }
    assert not machine.journal.exists()


def test_a_value_that_was_there_already_is_neither_set_nor_given_back(machine: Machine, owner: Owner) -> None:
    cards = nvml.cmp()
    cards.gpus[0]["power_mw"] = 200_000
    machine.driver.play(cards)
    machine.run("lock", "--pid", str(owner.pid))
    machine.run("unlock")
    assert values(machine)["power"] == {1: 250_000, 2: 250_000, 3: 250_000}


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        ({"power_error": 3}, 70, "does not support it"),
        ({"power_error": 4}, 77, "no permission"),
    ],
)
def test_a_card_that_refuses_its_limit_undoes_the_others_and_is_named(
    machine: Machine, owner: Owner, fault: dict[str, str | int], code: int, words: str
) -> None:
    cards = nvml.cmp()
    cards.gpus[2] |= fault
    machine.driver.play(cards)
    error = machine.run("lock", "--pid", str(owner.pid), code=code)["error"]
    assert "GPU-00000002" in error["message"] and words in error["message"] and error["hints"]
    assert as_before(machine) and values(machine)["offset"] == {} and not machine.journal.exists()


def test_a_driver_that_takes_a_limit_and_sets_another_one_is_found_out_both_ways(
    machine: Machine, owner: Owner
) -> None:
    cards = nvml.cmp()
    cards.gpus[2]["power_lies"] = 210_000
    machine.driver.play(cards)
    error = machine.run("lock", "--pid", str(owner.pid), code=70)["error"]
    assert "GPU-00000002" in error["message"] and "took 200 W and states 210 W" in error["message"]
    assert values(machine)["power"] == {**BEFORE["power"], 2: 210_000}
    assert list(machine.lease()["power_before_w"].values()) == [250.0], "what is not back yet stays written down"
    machine.driver.play(nvml.cmp())
    kill(owner)
    machine.run("status")


def test_a_limit_that_a_card_does_not_take_is_refused_before_anything_is_touched(
    machine: Machine, owner: Owner
) -> None:
    machine.driver.play(nvml.cmp().all(power_min_mw=220_000))
    error = machine.run("lock", "--pid", str(owner.pid), code=70)["error"]
    assert "200 W is outside 220 to 250 W" in error["message"] and "between 220 and 250" in error["hints"][0]
    assert machine.driver.calls() == [] and not machine.journal.exists()


@pytest.mark.parametrize(
    ("machine_values", "words"),
    [
        ({"offset_error": 4}, "no permission"),
        ({"offset_error": 3}, "does not support it"),
        ({"offset_max": 150}, "it takes -500 to +150 MHz"),
        ({"offset_lies": 0}, "NVML took +200 MHz, and reads 0"),
    ],
)
def test_an_offset_that_cannot_be_had_is_named_and_the_limit_is_set_all_the_same(
    machine: Machine, owner: Owner, machine_values: dict[str, str | int], words: str
) -> None:
    cards = nvml.cmp()
    cards.gpus[3] |= machine_values
    machine.driver.play(cards)
    tree = machine.run("lock", "--pid", str(owner.pid))["data"]
    notes = tree["notes"]
    assert ("permission" in words) == any("ds41ctl.adapters.offset 200" in hint for hint in tree["hints"])
    assert len(notes) == 1 and "clock offset +200 MHz not set" in notes[0] and words in notes[0]
    assert values(machine)["power"] == SET["power"]
    assert set(values(machine)["offset"].values()) <= {0}, "one card without it would leave the others waiting"
    calls = machine.driver.calls()
    assert machine.run("lock", "--pid", str(owner.pid))["data"]["mhz"] is None
    assert machine.driver.calls() == calls, "what was had is there already"
    kill(owner)
    wait_until(lambda: not machine.journal.exists())
    assert values(machine)["power"] == BEFORE["power"]


def test_a_card_without_clock_offsets_gets_none_and_the_hint_names_the_other_way(
    machine: Machine, owner: Owner
) -> None:
    cards = nvml.cmp()
    for gpu in cards.gpus:
        del gpu["offset"]
    machine.driver.play(cards)
    tree = machine.run("lock", "--pid", str(owner.pid))
    assert "does not support it" in tree["data"]["notes"][0]
    assert any("170tune" in hint for hint in tree["data"]["hints"])
    assert not any(line.startswith("offset") for line in machine.driver.calls())


@pytest.mark.parametrize(
    ("system", "had"), [({"offsets_by_state": 0}, True), ({"offsets_by_state": 0, "old_offsets": 0}, False)]
)
def test_a_driver_before_clock_offsets_by_state_is_asked_in_the_old_way(
    machine: Machine, owner: Owner, system: dict[str, str | int], had: bool
) -> None:
    cards = nvml.cmp()
    cards.system |= system
    machine.driver.play(cards)
    notes = machine.run("lock", "--pid", str(owner.pid))["data"]["notes"]
    assert values(machine)["offset"] == (SET["offset"] if had else {})
    assert had == (not notes) and (had or "too old" in notes[0])
    machine.run("unlock")
    assert as_before(machine)


def test_a_limit_that_refuses_to_go_back_stays_in_the_journal_and_is_tried_again(
    machine: Machine, owner: Owner
) -> None:
    machine.run("lock", "--pid", str(owner.pid))
    cards = nvml.cmp()
    cards.gpus[2]["power_error"] = 999
    machine.driver.play(cards)
    error = machine.run("unlock", code=1)["error"]
    assert "GPU-00000002" in error["message"] and "power limit" in error["message"]
    assert machine.lease()["power_before_w"] == {nvml.cmp().gpus[2]["uuid"]: 250.0}
    assert values(machine) == {**BEFORE, "power": {**BEFORE["power"], 2: 200_000}}
    machine.driver.play(nvml.cmp())
    machine.run("unlock")
    assert values(machine) == BEFORE and not machine.journal.exists()


def test_a_card_that_fell_off_the_bus_holds_no_limit(machine: Machine, owner: Owner) -> None:
    machine.run("lock", "--pid", str(owner.pid))
    cards = nvml.cmp()
    cards.gpus[2]["lost_after"] = 0
    machine.driver.play(cards)
    machine.run("unlock")
    assert not machine.journal.exists()
    assert values(machine)["power"] == {**BEFORE["power"], 2: 200_000}, (
        "the stub keeps it; a card that is gone does not"
    )


def test_the_program_that_sudo_runs_sets_the_offset_of_the_cards_it_is_given(machine: Machine) -> None:
    from ds41ctl.adapters import offset

    environ = {**machine.driver.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    uuids = [str(gpu["uuid"]) for gpu in nvml.cmp().gpus[:2]]

    def asked(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(words, env=environ, capture_output=True, text=True, timeout=60)

    assert asked(*offset.argv(200, uuids)).returncode == 0
    assert values(machine)["offset"] == {0: 200, 1: 200}
    refused = asked(*offset.argv(900, uuids))
    assert refused.returncode == 1 and refused.stderr.count("NVML refuses the value") == 2
    assert asked(*offset.argv(200, [])).returncode == 2


def test_the_sudoers_lines_name_both_limits_and_how_the_offset_is_set_by_hand(machine: Machine) -> None:
    lines = machine.run("sudoers")["data"]["lines"]
    assert lines[0].count("-pl 200") == 4 and lines[0].count("-pl 250") == 4
    assert "offset" not in lines[0] and "-lgc" not in lines[0]
