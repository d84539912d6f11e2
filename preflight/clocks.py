"""Checks of what the clock lease will do: can the target be held, may this user ask for it, which CPU governor."""

from __future__ import annotations

from ds41ctl.core.facts import GpuFacts, HostFacts
from ds41ctl.core.lease import settings
from ds41ctl.core.profile import Profile
from preflight.check import Check, Stage, Verdict, fail, ok, skip, unknown, warn
from preflight.gpu import GROUP, asked, listed, used
from preflight.text import as_root, command


def _target(profile: Profile, facts: HostFacts, gpus: tuple[GpuFacts, ...]) -> Verdict:
    target = profile.clocks.sm_mhz
    if target is None:
        return skip("this profile locks no clock")
    chosen = used(profile, facts)
    expected = f"{target} MHz within every card's range"
    low = [gpu for gpu in chosen if gpu.sm_max_mhz is not None and target > gpu.sm_max_mhz]
    if low:
        found = listed(low, lambda gpu: f"at most {gpu.sm_max_mhz} MHz")
        return fail(
            f"{target} MHz is above what these cards reach: {found}",
            expected=expected,
            found=found,
            fix=(f"set sm_mhz = {min(gpu.sm_max_mhz or target for gpu in low)} in [clocks] of a profile of your own",),
            why="the driver accepts the request and runs at another clock",
        )
    odd = [gpu for gpu in chosen if gpu.sm_supported_mhz and target not in gpu.sm_supported_mhz]
    if odd:
        nearest = min(odd[0].sm_supported_mhz or (), key=lambda mhz: abs(mhz - target))
        return fail(
            f"{target} MHz is not a clock of GPU {', '.join(str(gpu.index) for gpu in odd)}",
            expected=expected,
            found=f"the nearest is {nearest} MHz",
            fix=(f"set sm_mhz = {nearest} in [clocks] of a profile of your own", "nvidia-smi -q -d SUPPORTED_CLOCKS"),
        )
    if not chosen or any(gpu.sm_max_mhz is None for gpu in chosen):
        return unknown("the cards' clock range is not known", expected=expected, fix=("nvidia-smi -q -d CLOCK",))
    return ok(
        f"{target} MHz is available", expected=expected, found=f"up to {min(g.sm_max_mhz or 0 for g in chosen)} MHz"
    )


def permission(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """Root, or sudo without a password, for the commands that set what [clocks] name and give it back."""
    want = profile.clocks
    if not want.touched:
        return skip("this profile leaves clocks alone")
    flags = ["-lgc and -rgc"] if want.sm_mhz is not None else []
    flags += ["-pl"] if want.power_limit_w is not None else []
    expected = f"root, or sudo -n for nvidia-smi {' and '.join(flags)}" if flags else "root, or sudo without a password"
    without = "or run without it: other rates than the profile's"
    if want.sm_mhz is not None:
        without = "or run without the lock: expect 26.9 instead of 27.7 tok/s (build log, without DSpark)"
    fix = (
        command("clocks sudoers", profile) + "   # prints the lines for: sudo visudo -f /etc/sudoers.d/ds41ctl",
        without,
    )
    if facts.clock_permission == "none":
        return warn(
            f"{settings(want.sm_mhz, want.power_limit_w, want.offset_mhz)} cannot be set by this user",
            expected=expected,
            found="no permission",
            fix=fix,
            why="auto-boost dips between decode bursts" if want.sm_mhz is not None else "",
        )
    if not facts.clock_permission:
        return unknown(
            "whether this user may set clocks is not known", expected=expected, fix=("sudo -n -l nvidia-smi",)
        )
    return ok(f"by {facts.clock_permission}", expected=expected, found=facts.clock_permission)


def governor(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """The CPU governor the profile asks for, set now or by the lease."""
    wanted, system = profile.clocks.governor, facts.system
    if not wanted:
        return skip("the profile asks for no CPU governor")
    expected = f"governor {wanted} on every CPU"
    if system.governors is None:
        return unknown("the CPU governors are not known", expected=expected, fix=("cpupower frequency-info",))
    if not system.governors:
        return skip("the kernel scales no CPU frequency here (a virtual machine, or it is off in the firmware)")
    found = ", ".join(sorted(set(system.governors.values()) - {""})) or "not stated"
    if set(system.governors.values()) == {wanted}:
        return ok(found, expected=expected, found=found)
    by_hand = as_root(f"cpupower frequency-set -g {wanted}", system)
    if system.governors_available and wanted not in system.governors_available:
        return warn(
            f"the kernel offers no governor {wanted}",
            expected=expected,
            found=f"{found} (offered: {', '.join(system.governors_available)})",
            fix=("add intel_pstate=passive to the kernel's command line", by_hand),
        )
    if facts.clock_permission in ("root", "sudo"):
        return ok(f"{found} now, {wanted} while serving", expected=expected, found=found)
    return warn(
        f"governor {found}, and this user may not change it",
        expected=expected,
        found=found,
        fix=(by_hand, command("clocks sudoers", profile)),
        why="token latency is bound by the CPU between short kernels",
    )


CHECKS = (
    Check(
        "gpu.clock-target",
        "the clock to lock is within every card's range",
        1,
        GROUP,
        "a lock that the driver accepts and the card does not reach",
        asked(lambda profile: f"{profile.clocks.sm_mhz} MHz within every card's range", _target),
    ),
    Check(
        "gpu.clock-permission",
        "this user may set clocks and power limits",
        1,
        GROUP,
        "numbers that cannot be compared because auto-boost dips between bursts",
        permission,
    ),
    Check(
        "host.governor",
        "CPU frequency governor",
        1,
        "HOST",
        "CPUs that clock down between short kernels",
        governor,
    ),
)
