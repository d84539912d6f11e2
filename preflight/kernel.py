"""Checks of what the kernel logged and of the machine's clock."""

from __future__ import annotations

from ds41ctl.core.facts import HostFacts
from ds41ctl.core.profile import Profile
from preflight.check import Check, Stage, Verdict, fail, ok, skip, unknown, warn
from preflight.text import as_root

GROUP = "HOST"
# What a card does not recover from by itself, and what field reports saw before that. Sources: the Xid catalogue at
# docs.nvidia.com/deploy/xid-errors, docs.nvidia.com/deploy/dynamic-page-retirement (48, 64) and NVIDIA's list of
# health checks (docs.nvidia.com/health-validation/reference/checks/xid: 46, 48 and others drain a node)
FATAL_XIDS = {
    43: "a process was stopped by the GPU",
    46: "the GPU stopped processing",
    48: "double-bit memory error",
    62: "internal micro-controller halt",
    64: "memory page could not be retired",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    94: "contained memory error",
    95: "uncontained memory error",
    119: "the GPU's system processor does not answer",
    120: "error of the GPU's system processor",
}
EARLIEST = "2026-10-25"  # release day of the engine: a clock before it is wrong, and TLS refuses its certificates


def xid(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """NVIDIA errors since boot."""
    if not profile.hardware.gpus:
        return skip("no GPU in this profile")
    log = facts.kernel_log
    expected = "no Xid error since boot"
    read = (as_root("sysctl kernel.dmesg_restrict=0", facts.system), as_root("dmesg | grep -i xid", facts.system))
    if log is not None and log.xids:
        shown = [
            f"Xid {item.code} on {item.bus_id or 'a GPU'}"
            + (f", {item.count} times" if item.count > 1 else "")
            + (f": {FATAL_XIDS[item.code]}" if item.code in FATAL_XIDS else "")
            for item in log.xids
        ]
        fatal = [text for text, item in zip(shown, log.xids, strict=True) if item.code in FATAL_XIDS]
        rest = len(shown) - 1
        text = (fatal or shown)[0] + (f" and {rest} more" if rest else "")
        fix = (
            as_root("dmesg | grep -i xid", facts.system),
            as_root("reboot   # a card that fell off the bus needs it", facts.system),
        )
        if fatal:
            return fail(
                text,
                expected=expected,
                found=f"{len(shown)} kind(s) of Xid",
                fix=fix,
                evidence=tuple(i.line for i in log.xids),
            )
        return warn(text, expected=expected, found=f"{len(shown)} kind(s) of Xid", fix=fix)
    if log is None or not log.readable:
        why = f" ({log.problem})" if log is not None and log.problem else ""
        return unknown(f"the kernel log is not readable{why}", expected=expected, fix=read)
    if not log.whole:
        return unknown(
            "the kernel log no longer reaches back to the boot",
            expected=expected,
            fix=(as_root("journalctl -k -b | grep -i xid", facts.system),),
            found="the last lines only, without an Xid",
        )
    return ok("none", expected=expected, found=f"none in {log.source or 'the kernel log'}")


def clock(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """The machine knows what time it is."""
    expected = f"a date after {EARLIEST}, kept by a time daemon"
    now = facts.collected_at[:10]
    fix = (as_root("timedatectl set-ntp true", facts.system), "timedatectl")
    if not now[:4].isdecimal():
        return unknown("the time is not known", expected=expected, fix=("date",))
    if now < EARLIEST:
        return fail(
            f"the clock says {now}",
            expected=expected,
            found=now,
            fix=fix,
            why="certificates are refused, and sidecars and logs are ordered wrongly",
        )
    if facts.system.clock_synchronised is None:
        return unknown("whether the clock is kept is not known", expected=expected, fix=("timedatectl",), found=now)
    if not facts.system.clock_synchronised and not facts.system.container and profile.hardware.gpus:
        return warn(f"{now}, but no time daemon keeps the clock", expected=expected, found="not synchronised", fix=fix)
    kept = "kept by a time daemon" if facts.system.clock_synchronised else "not kept by a time daemon of this machine"
    return ok(f"{now}, {kept}", expected=expected, found=now)


CHECKS = (
    Check(
        "host.xid",
        "NVIDIA errors in the kernel log since boot",
        1,
        GROUP,
        "a launch on a card that has failed since the machine was started",
        xid,
    ),
    Check(
        "host.clock",
        "the machine's clock",
        1,
        GROUP,
        "downloads refused for their certificates, logs out of order",
        clock,
    ),
)
