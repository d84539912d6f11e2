"""Telemetry: engine processes and machine at one moment, for soak and bench. What cannot be read is None."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import psutil

from ds41ctl.adapters import kernel, nvml, proc, store
from ds41ctl.adapters.running import Running


@dataclass(frozen=True, slots=True)
class GpuState:
    """One GPU. MiB (used, and in all), MHz, NVML's bits of clock event reasons, degrees Celsius, W, MHz."""

    used_mib: float | None = None
    total_mib: float | None = None
    sm_mhz: int | None = None
    throttle: int | None = None
    temperature_c: int | None = None
    power_limit_w: float | None = None
    offset_mhz: int | None = None


@dataclass(frozen=True, slots=True)
class HostState:
    """`engine`: the engine's first process, '' when it is gone. `rss_mib`: anonymous memory of all its processes: rows
    of a mapped Engram store are not counted, they fill with use and are no leak. `xid`: messages in the kernel log.
    `engine_cpu_s`, `machine_cpu_s`: CPU seconds used so far, by the engine's processes and by everything here."""

    engine: str = ""
    rss_mib: float | None = None
    swapped_pages: int | None = None
    gpus: tuple[GpuState, ...] | None = None
    xid: int | None = None
    store_mapped: bool | None = None
    engine_cpu_s: float | None = None
    machine_cpu_s: float | None = None


def read(record: Running | None, *, gpus: int, store_dir: Path | None) -> HostState:
    """State of the engine of `record` and of this machine. `store_dir`: the Engram store it must map, None if none."""
    states = _gpus() if gpus else None
    xid = xid_count() if gpus else None
    if record is None or not record.alive():
        return HostState(swapped_pages=swapped_pages(), gpus=states, xid=xid, machine_cpu_s=machine_cpu_seconds())
    family = [item.pid for item in proc.family(record.pid, record.marker, session=record.identity)]
    return HostState(
        engine=f"pid {record.pid}, started {record.start_ticks}",
        rss_mib=_anonymous_mib(family),
        swapped_pages=swapped_pages(),
        gpus=states,
        xid=xid,
        store_mapped=None if store_dir is None else bool(set(store.mapped_by(store_dir)) & set(family)),
        engine_cpu_s=proc.cpu_seconds(family),
        machine_cpu_s=machine_cpu_seconds(),
    )


def machine_cpu_seconds() -> float | None:
    """CPU time that was not idle since boot, all cores together, what a hypervisor took away included."""
    try:
        times = psutil.cpu_times()
    except (OSError, psutil.Error):
        return None
    return float(times.user + times.nice + times.system + times.irq + times.softirq + times.steal)


def swapped_pages() -> int | None:
    """Pages this machine has swapped in and out since it was booted."""
    try:
        rows = dict(line.split(" ", 1) for line in Path("/proc/vmstat").read_text().splitlines())
        return int(rows["pswpin"]) + int(rows["pswpout"])
    except (OSError, KeyError, ValueError):
        return None


def xid_count() -> int | None:
    """NVIDIA Xid messages in the kernel log since boot."""
    found = kernel.log(Path("/"))
    return sum(item.count for item in found.xids) if found.readable else None


def _anonymous_mib(pids: list[int]) -> float | None:
    total = 0
    seen = False
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            continue
        match = re.search(r"^RssAnon:\s+(\d+) kB", text, re.MULTILINE)
        if match:
            total += int(match.group(1))
            seen = True
    return total / 1024 if seen else None


def _gpus() -> tuple[GpuState, ...] | None:
    found = nvml.survey().gpus
    if found is None:
        return None
    states = []
    for gpu in found:
        total, free = gpu.memory_total_mib, gpu.memory_free_mib
        states.append(
            GpuState(
                used_mib=float(total - free) if total is not None and free is not None else None,
                total_mib=float(total) if total is not None else None,
                sm_mhz=gpu.sm_mhz,
                throttle=gpu.throttle,
                temperature_c=gpu.temperature_c,
                power_limit_w=gpu.power_limit_w,
                offset_mhz=gpu.offset_mhz,
            )
        )
    return tuple(states)
