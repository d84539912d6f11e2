"""The watchdog on scripted looks, the bound of restarts, and what Prometheus and systemd are told."""

from __future__ import annotations

import configparser
import subprocess
from pathlib import Path
from shutil import which

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ds41ctl.core.promtext import render
from ds41ctl.core.unit import render as render_unit
from ds41ctl.core.watch import Look, Restarts, Watch, rate
from tests.unit.test_launch import made


def looks(*rows: tuple[float, float | None, float | None]) -> list[Look]:
    """(seconds, running, generated) of an engine that lives and answers."""
    return [Look(at, alive=True, running=running, generated=generated) for at, running, generated in rows]


def fed(watch: Watch, series: list[Look], *, probe: bool | None = None) -> list[str]:
    found = []
    for look in series:
        state = watch.feed(look)
        if watch.wants_probe(look):
            assert probe is not None, "no probe was expected"
            state = watch.probed(probe)
        found.append(state)
    return found


def test_an_engine_at_work_and_one_without_work_are_ready_for_ever() -> None:
    busy = looks(*((at, 1, at * 10) for at in range(0, 1000, 10)))
    idle = looks(*((at, 0, 7) for at in range(0, 1000, 10)))
    assert set(fed(Watch(120), busy)) == set(fed(Watch(120), idle)) == {"ready"}


def test_a_dead_engine_is_dead_at_the_next_look() -> None:
    watch = Watch()
    assert fed(watch, [*looks((0, 1, 5)), Look(2, alive=False)]) == ["ready", "dead"]


def test_running_requests_without_a_token_mean_a_hang_when_a_fresh_request_gets_none_either() -> None:
    series = looks((0, 1, 5), (60, 1, 5), (119, 1, 5), (120, 1, 5), (130, 1, 5))
    assert fed(Watch(120), series, probe=False) == ["ready", "ready", "ready", "hung", "hung"]


def test_and_zombie_requests_when_it_does() -> None:
    series = looks((0, 1, 5), (120, 1, 5), (130, 1, 6), (140, 1, 6))
    # the probe's own token at 130 s is no progress of the request that is stuck
    assert fed(Watch(120), series, probe=True) == ["ready", "zombie", "zombie", "zombie"]


def test_a_stuck_request_that_ends_or_moves_on_is_forgiven() -> None:
    ended = looks((0, 1, 5), (120, 1, 5), (130, 0, 5), (500, 0, 5))
    assert fed(Watch(120), ended, probe=True)[-2:] == ["ready", "ready"]
    moved = looks((0, 1, 5), (120, 1, 5), (130, 1, 50), (140, 1, 80))
    assert fed(Watch(120), moved, probe=False)[-2:] == ["ready", "ready"]


def test_three_looks_without_an_answer_are_a_fault_and_one_is_none() -> None:
    silent = [Look(at, alive=True, answers=False) for at in (0, 2, 4)]
    assert fed(Watch(), silent) == ["ready", "ready", "not answering"]
    watch = Watch()
    assert fed(watch, [silent[0], *looks((1, 0, 0)), silent[1], silent[2]])[-1] == "ready"


def test_a_start_is_not_judged_by_its_tokens() -> None:
    assert set(fed(Watch(1), [Look(at, alive=True, ready=False) for at in range(0, 600, 60)])) == {"starting"}


def test_counters_that_start_again_are_movement() -> None:
    assert fed(Watch(120), looks((0, 1, 500), (119, 1, 3), (200, 1, 3)))[-1] == "ready"


def test_restarts_are_bounded_later_each_time_and_forgotten_after_an_hour() -> None:
    bound = Restarts(3)
    waits = []
    for at in (0.0, 100.0, 200.0):
        waits.append(bound.wait_s(at))
        bound.note(at)
    assert waits == [5.0, 30.0, 120.0] and bound.wait_s(300) is None
    assert bound.wait_s(3650) is not None


@pytest.mark.parametrize(
    ("samples", "found"),
    [
        ([(0, 0), (2, 50)], 25.0),
        ([(0, None), (2, 50)], None),
        ([(0, 50), (2, 0)], None),
        ([(1, 5)], None),
        ([(1, 5), (1, 9)], None),
    ],
)
def test_a_rate_needs_two_counts_that_grow(samples: list[tuple[float, float | None]], found: float | None) -> None:
    assert rate(samples) == found


READY = {
    "profile": 'a "b"\\', "state": "ready", "uptime_s": 60, "drift": ["x"],
    "load": {"running": 1.0, "waiting": 0.0, "generated": 9.0, "kv": 0.25, "tokens_per_s": None, "acceptance": 0.88},
    "gpus": [{"index": 0, "used_mib": 10, "sm_mhz": 1530, "temperature_c": None}],
}  # fmt: skip


def test_the_textfile_is_what_prometheus_reads_and_leaves_out_what_is_unknown() -> None:
    found = {
        (sample.name, sample.labels.get("state", sample.labels.get("gpu", ""))): sample.value
        for family in text_string_to_metric_families(render(READY, 1e9))
        for sample in family.samples
    }
    assert found["ds41_state", "ready"] == 1 and found["ds41_state", "died"] == 0
    assert found["ds41_kv_used_ratio", ""] == 0.25 and found["ds41_drift", ""] == 1
    assert found["ds41_gpu_memory_used_bytes", "0"] == 10 << 20
    names = {name for name, _ in found}
    assert "ds41_decode_tokens_per_second" not in names and "ds41_gpu_temperature_celsius" not in names
    assert 'ds41_state{profile="a \\"b\\"\\\\"' in render(READY, 1e9)


def test_a_stopped_engine_has_a_state_and_no_numbers() -> None:
    text = render({"profile": "p", "state": "stopped"}, 1e9)
    assert 'state="stopped"} 1' in text and "requests" not in text


@pytest.mark.parametrize("name", ["v100-pp2tp4", "cpu-tiny", "cmp170hx-tp4"])
def test_the_unit_is_one_that_systemd_reads(name: str, tmp_path: Path) -> None:
    text = render_unit(made(name), "/a b/100%.toml", "/usr/bin/python3", {"DS41_PORT": "8012", "HOME": "/x"})
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[method-assign,assignment]
    unit.read_string(text)
    service = unit["Service"]
    assert "'/a b/100%%.toml'" in service["ExecStart"] and service["Environment"] == '"DS41_PORT=8012"'
    assert ("--foreground" in service["ExecStart"]) == (name != "cmp170hx-tp4")
    assert service["Type"] == ("oneshot" if name == "cmp170hx-tp4" else "exec")
    assert "17" in service["RestartPreventExitStatus"].split() and "16" not in service["RestartPreventExitStatus"]
    assert ("LimitMEMLOCK" in service) == (name == "v100-pp2tp4" or name == "cmp170hx-tp4")
    if which("systemd-analyze"):
        path = tmp_path / "ds41.service"
        path.write_text(text)
        done = subprocess.run(["systemd-analyze", "verify", str(path)], capture_output=True, text=True, check=False)
        assert "Unknown" not in done.stderr and "Failed to parse" not in done.stderr, done.stderr
