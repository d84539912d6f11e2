"""Checks of GPUs as NVML names them: how many, which, and how much memory."""

from __future__ import annotations

from collections.abc import Callable

from ds41ctl.core.facts import GpuFacts, HostFacts
from ds41ctl.core.profile import Profile
from preflight.check import Check, CheckFunction, Stage, Verdict, fail, ok, skip, unknown
from preflight.text import as_root

GROUP = "GPU"
CMP_LOCKED_MIB = 8192  # what a CMP 170HX states while its memory is locked (field report)


def _asked(
    expected: Callable[[Profile], str],
    judge: Callable[[Profile, HostFacts, tuple[GpuFacts, ...]], Verdict],
) -> CheckFunction:
    """A check that applies to GPU profiles and needs NVML's answer."""

    def check(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
        if not profile.hardware.gpus:
            return skip("no GPU in this profile")
        if facts.gpus is None:
            return unknown(
                f"NVML could not be asked: {facts.gpu_note or 'no reason given'}",
                expected=expected(profile),
                fix=_driver_fix(facts),
                found=facts.gpu_note or "could not be measured",
            )
        return judge(profile, facts, facts.gpus)

    return check


def driver(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """NVML answers. A driver that is absent or does not match its library is a failure, not an unknown."""
    expected = "a loaded NVIDIA driver that matches its library"
    if not profile.hardware.gpus:
        return skip("no GPU in this profile")
    if facts.gpus is not None:
        return ok(f"driver {facts.driver or 'loaded'}", expected=expected, found=facts.driver or "loaded")
    note = facts.gpu_note or "no reason given"
    if facts.gpu_reason in ("no-library", "no-driver", "mismatch"):
        return fail(note, expected=expected, found=note, fix=_driver_fix(facts))
    return unknown(f"NVML could not be asked: {note}", expected=expected, fix=_driver_fix(facts), found=note)


def _driver_fix(facts: HostFacts) -> tuple[str, ...]:
    if facts.gpu_reason == "mismatch":
        return (
            as_root("reboot   # or unload and load the nvidia modules", facts.system),
            as_root(
                "apt-mark hold 'nvidia-*' 'libnvidia-*'   # no driver update under a running engine",
                facts.system,
            ),
        )
    if facts.system.container:
        return ("start the container with its GPUs: --gpus all, or --device nvidia.com/gpu=all", "nvidia-smi")
    return ("install the NVIDIA driver", "nvidia-smi   # must list the GPUs")


def _used(profile: Profile, gpus: tuple[GpuFacts, ...]) -> list[GpuFacts]:
    """The GPUs the profile's groups name; without groups the first `hardware.gpus`."""
    named = {index for group in profile.hardware.gpu_groups.values() for index in group}
    wanted = named or set(range(profile.hardware.gpus))
    return [gpu for gpu in gpus if gpu.index in wanted]


def _count(profile: Profile, facts: HostFacts, gpus: tuple[GpuFacts, ...]) -> Verdict:
    wanted = profile.hardware.gpus
    expected, found = f"{wanted} GPUs", f"{len(gpus)} GPUs"
    lost = f" ({facts.gpu_note})" if facts.gpu_note else ""
    if len(gpus) < wanted:
        return fail(
            f"{len(gpus)} GPUs, {wanted} needed{lost}",
            expected=expected,
            found=found + lost,
            fix=(
                as_root("dmesg | grep -i -E 'xid|nvrm'   # has a GPU fallen off the bus?", facts.system),
                "nvidia-smi -L",
            ),
        )
    missing = sorted({i for g in profile.hardware.gpu_groups.values() for i in g} - {gpu.index for gpu in gpus})
    if missing:
        return fail(
            f"the profile's groups name GPU {', '.join(map(str, missing))}, which does not answer{lost}",
            expected=expected,
            found=found + lost,
            fix=("nvidia-smi -L", "export DS41_GPUS_A=... DS41_GPUS_C=...   # other indices"),
        )
    return ok(f"{len(gpus)} (want {wanted})", expected=expected, found=found)


def _plain(name: str) -> str:
    return name.upper().removeprefix("NVIDIA ").removeprefix("TESLA ").strip()


def _name(profile: Profile, facts: HostFacts, gpus: tuple[GpuFacts, ...]) -> Verdict:
    wanted, used = profile.hardware.gpu_name, _used(profile, gpus)
    if not wanted:
        return skip("the profile names no GPU model")
    other = [gpu for gpu in used if _plain(gpu.name) != _plain(wanted)]
    if other:
        names = ", ".join(f"GPU {gpu.index} {gpu.name}" for gpu in other)
        return fail(
            f"not {wanted}: {names}",
            expected=f"{profile.hardware.gpus} x {wanted}",
            found=names,
            fix=("ds41ctl profile list   # which profile is for these cards",),
        )
    if len(used) < profile.hardware.gpus:
        return unknown(
            "not all GPUs of the profile answer: see gpu.count",
            expected=wanted,
            fix=("nvidia-smi -L",),
            found=f"{len(used)}",
        )
    return ok(f"{len(used)} x {wanted}", expected=wanted, found=used[0].name)


def _memory_fix(small: list[GpuFacts]) -> tuple[str, ...]:
    fix = "ds41ctl profile list   # which profile is for these cards"
    if any("CMP" in gpu.name and gpu.memory_total_mib == CMP_LOCKED_MIB for gpu in small):
        return ("unlock the card again: a driver update has locked it to 8 GB", fix)
    return (fix,)


def _memory(profile: Profile, facts: HostFacts, gpus: tuple[GpuFacts, ...]) -> Verdict:
    least, used = profile.hardware.vram_mib_min, _used(profile, gpus)
    if not least:
        return skip("the profile states no least GPU memory")
    expected = f"{least} MiB on each of {profile.hardware.gpus}"
    small = [gpu for gpu in used if gpu.memory_total_mib is not None and gpu.memory_total_mib < least]
    if small:
        names = ", ".join(f"GPU {gpu.index} {gpu.memory_total_mib} MiB" for gpu in small)
        return fail(
            f"too little memory: {names}",
            expected=expected,
            found=names,
            fix=_memory_fix(small),
        )
    unmeasured = [gpu.index for gpu in used if gpu.memory_total_mib is None]
    if unmeasured or len(used) < profile.hardware.gpus:
        return unknown(
            "not every GPU states its memory",
            expected=expected,
            fix=("nvidia-smi --query-gpu=memory.total --format=csv",),
        )
    return ok(
        f"{min(gpu.memory_total_mib or 0 for gpu in used)} MiB or more on each",
        expected=expected,
        found=", ".join(str(gpu.memory_total_mib) for gpu in used),
    )


CHECKS = (
    Check(
        "gpu.driver",
        "the NVIDIA driver answers",
        1,
        GROUP,
        "a download of hours for a machine whose driver cannot run anything",
        driver,
    ),
    Check(
        "gpu.count",
        "as many GPUs as the profile uses",
        1,
        GROUP,
        "a launch on a machine where a GPU has fallen off the bus",
        _asked(lambda profile: f"{profile.hardware.gpus} GPUs", _count),
    ),
    Check(
        "gpu.name",
        "the GPU model the profile is for",
        1,
        GROUP,
        "kernels compiled for another architecture",
        _asked(lambda profile: profile.hardware.gpu_name, _name),
    ),
    Check(
        "gpu.memory",
        "memory of each GPU",
        1,
        GROUP,
        "out of memory 12 minutes into the start: a 16 GB card among 32 GB ones, one locked to 8 GB",
        _asked(lambda profile: f"{profile.hardware.vram_mib_min} MiB on each", _memory),
    ),
)
