"""Checks of each GPU and its driver: how many, which, how much memory is free, and in what state they are."""

from __future__ import annotations

from collections.abc import Callable

from ds41ctl.core.facts import GpuFacts, HostFacts
from ds41ctl.core.finding import Status
from ds41ctl.core.lease import TOLERANCE_W
from ds41ctl.core.profile import Profile
from ds41ctl.core.topology import Groups
from preflight import need
from preflight.check import Check, CheckFunction, Stage, Verdict, fail, ok, skip, unknown, warn
from preflight.text import as_root, command, version

GROUP = "GPU"
CMP_LOCKED_MIB = 8192  # what a CMP 170HX states while its memory is locked (field report)


def asked(
    expected: Callable[[Profile], str],
    judge: Callable[[Profile, HostFacts, tuple[GpuFacts, ...]], Verdict],
) -> CheckFunction:
    """A check that applies to GPU profiles and needs NVML's answer."""

    def check(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
        if not profile.hardware.gpus:
            return skip("no GPU in this profile")
        if facts.gpus is None:
            asked_of_none = judge(profile, facts, ())
            if asked_of_none.status is Status.SKIP:
                return asked_of_none  # what does not apply needs no measurement
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


def groups(profile: Profile, facts: HostFacts) -> Groups:
    """The GPU groups in force: the user's choice over the profile's."""
    return profile.hardware.gpu_groups if facts.gpu_groups is None else facts.gpu_groups


def used(profile: Profile, facts: HostFacts) -> list[GpuFacts]:
    """The GPUs the groups name; without groups the first `hardware.gpus`."""
    named = {index for group in groups(profile, facts).values() for index in group}
    wanted = named or set(range(profile.hardware.gpus))
    return [gpu for gpu in facts.gpus or () if gpu.index in wanted]


def listed(gpus: list[GpuFacts], text: Callable[[GpuFacts], object]) -> str:
    """`GPU 0 x, GPU 3,4 y`: cards of which the same is to be said are named together."""
    said: dict[str, list[str]] = {}
    for gpu in gpus:
        said.setdefault(str(text(gpu)), []).append(str(gpu.index))
    return ", ".join(f"GPU {','.join(indices)} {words}" for words, indices in said.items())


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
    missing = sorted({i for g in groups(profile, facts).values() for i in g} - {gpu.index for gpu in gpus})
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
    wanted, chosen = profile.hardware.gpu_name, used(profile, facts)
    if not wanted:
        return skip("the profile names no GPU model")
    other = [gpu for gpu in chosen if _plain(gpu.name) != _plain(wanted)]
    if other:
        names = listed(other, lambda gpu: gpu.name)
        return fail(
            f"not {wanted}: {names}",
            expected=f"{profile.hardware.gpus} x {wanted}",
            found=names,
            fix=("ds41ctl profile list   # which profile is for these cards",),
        )
    if len(chosen) < profile.hardware.gpus:
        return unknown(
            "not all GPUs of the profile answer: see gpu.count",
            expected=wanted,
            fix=("nvidia-smi -L",),
            found=f"{len(chosen)}",
        )
    return ok(f"{len(chosen)} x {wanted}", expected=wanted, found=chosen[0].name)


def _memory_fix(small: list[GpuFacts]) -> tuple[str, ...]:
    fix = "ds41ctl profile list   # which profile is for these cards"
    if any("CMP" in gpu.name and gpu.memory_total_mib == CMP_LOCKED_MIB for gpu in small):
        return ("unlock the card again: a driver update has locked it to 8 GB", fix)
    return (fix,)


def _memory(profile: Profile, facts: HostFacts, gpus: tuple[GpuFacts, ...]) -> Verdict:
    least, chosen = profile.hardware.vram_mib_min, used(profile, facts)
    if not least:
        return skip("the profile states no least GPU memory")
    expected = f"{least} MiB on each of {profile.hardware.gpus}"
    small = [gpu for gpu in chosen if gpu.memory_total_mib is not None and gpu.memory_total_mib < least]
    if small:
        names = listed(small, lambda gpu: f"{gpu.memory_total_mib} MiB")
        return fail(
            f"too little memory: {names}",
            expected=expected,
            found=names,
            fix=_memory_fix(small),
        )
    unmeasured = [gpu.index for gpu in chosen if gpu.memory_total_mib is None]
    if unmeasured or len(chosen) < profile.hardware.gpus:
        return unknown(
            "not every GPU of the profile answers and states its memory",
            expected=expected,
            fix=("nvidia-smi --query-gpu=memory.total --format=csv",),
        )
    return ok(
        f"{min(gpu.memory_total_mib or 0 for gpu in chosen)} MiB or more on each",
        expected=expected,
        found=", ".join(str(gpu.memory_total_mib) for gpu in chosen),
    )


def _capability(profile: Profile, facts: HostFacts, gpus: tuple[GpuFacts, ...]) -> Verdict:
    wanted = profile.hardware.compute_capability
    if not wanted:
        return skip("the profile states no compute capability")
    chosen = used(profile, facts)
    other = [gpu for gpu in chosen if gpu.compute_capability and gpu.compute_capability != wanted]
    if other:
        return fail(
            f"not compute capability {wanted}: {listed(other, lambda gpu: gpu.compute_capability)}",
            expected=wanted,
            found=listed(other, lambda gpu: gpu.compute_capability),
            fix=("ds41ctl profile list   # which profile is for these cards",),
        )
    if not chosen or any(not gpu.compute_capability for gpu in chosen):
        return unknown(
            "not every GPU states its compute capability",
            expected=wanted,
            fix=("nvidia-smi --query-gpu=compute_cap --format=csv",),
        )
    return ok(wanted, expected=wanted, found=wanted)


def _free_memory(profile: Profile, facts: HostFacts, gpus: tuple[GpuFacts, ...]) -> Verdict:
    """The engine refuses to start when less is free than the share it was told to take."""
    if need.running(facts):
        return skip("an engine is running: its memory is already taken")
    share = profile.serve.gpu_memory_utilization
    if share is None:
        return skip("the profile states no gpu_memory_utilization")
    expected = f"{share:g} of each GPU's memory free"
    chosen = used(profile, facts)
    short = [
        gpu
        for gpu in chosen
        if gpu.memory_free_mib is not None
        and gpu.memory_total_mib is not None
        and gpu.memory_free_mib < share * gpu.memory_total_mib
    ]
    if short:
        found = listed(short, lambda gpu: f"{gpu.memory_free_mib} of {gpu.memory_total_mib} MiB")
        return fail(
            f"too little memory is free: {found}",
            expected=expected,
            found=found,
            fix=("nvidia-smi   # who holds it", command("preflight --only gpu.processes", profile)),
            why="the engine measures free memory at its start and gives up, minutes after it was launched",
        )
    if not chosen or any(gpu.memory_free_mib is None or gpu.memory_total_mib is None for gpu in chosen):
        return unknown(
            "free memory is not known on every GPU",
            expected=expected,
            fix=("nvidia-smi --query-gpu=memory.free --format=csv",),
        )
    least = min(gpu.memory_free_mib or 0 for gpu in chosen)
    return ok(f"{least} MiB or more free on each", expected=expected, found=f"{least} MiB")


def _processes(profile: Profile, facts: HostFacts, gpus: tuple[GpuFacts, ...]) -> Verdict:
    """Nobody else computes on our GPUs; leftovers of our own engine are told from foreign processes."""
    if need.running(facts):
        return skip("an engine is running: its workers are on the GPUs")
    expected = "no compute process on the GPUs of this profile"
    chosen = used(profile, facts)
    busy = [(gpu, process) for gpu in chosen for process in gpu.processes or ()]
    if busy:
        rows = [
            f"GPU {gpu.index}: pid {process.pid}"
            + (
                f" ({process.command or process.name}, user {process.user or '?'})"
                if process.name
                else " (not visible)"
            )
            + (f" {process.used_mib} MiB" if process.used_mib is not None else "")
            + (", left over from an engine of ds41ctl" if process.ours else "")
            for gpu, process in busy
        ]
        ours = sorted({process.pid for _, process in busy if process.ours})
        foreign = sorted({process.pid for _, process in busy if not process.ours})
        return fail(
            rows[0] + (f" and {len(rows) - 1} more" if rows[1:] else ""),
            expected=expected,
            found=f"{len({process.pid for _, process in busy})} process(es)",
            fix=(
                *((command("stop", profile),) if ours else ()),
                *(f"kill {pid}   # if it is not needed" for pid in [*ours, *foreign]),
            ),
            why="any other CUDA client takes memory that this configuration does not leave free",
            evidence=tuple(rows),
        )
    if not chosen or any(gpu.processes is None for gpu in chosen):
        return unknown(
            "whether other processes are on the GPUs is not known",
            expected=expected,
            fix=("nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv",),
        )
    return ok("no other process", expected=expected, found="none")


def _weights(profile: Profile, facts: HostFacts, gpus: tuple[GpuFacts, ...]) -> Verdict:
    """The weights of each stage fit into the share of the cards that hold it."""
    weights, share = profile.hardware.stage_weights_gib, profile.serve.gpu_memory_utilization or 1.0
    if not weights:
        return skip("the profile states no weights a stage")
    known = {gpu.index: gpu for gpu in gpus}
    rows, unmeasured = [], []
    for (name, group), gib in zip(groups(profile, facts).items(), weights, strict=False):
        for index in group:
            total = known[index].memory_total_mib if index in known else None
            if total is None:
                unmeasured.append(index)
            elif gib * 1024 > share * total:
                rows.append(
                    f"GPU {index} (stage {name}): {gib:g} GiB of weights, {share * total / 1024:.1f} GiB usable"
                )
    expected = " and ".join(f"{gib:g} GiB" for gib in weights) + f" of weights within {share:g} of each GPU"
    if rows:
        return fail(
            rows[0] + (f" and {len(rows) - 1} more" if rows[1:] else ""),
            expected=expected,
            found=f"{len(rows)} GPUs too small",
            fix=("ds41ctl profile list   # which profile is for these cards",),
            evidence=tuple(rows),
        )
    if unmeasured:
        return unknown(
            f"the memory of GPU {', '.join(map(str, unmeasured))} is not known",
            expected=expected,
            fix=("nvidia-smi --query-gpu=memory.total --format=csv",),
        )
    return ok(f"{max(weights):g} GiB a GPU fit", expected=expected, found="fit")


def driver_version(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """The driver runs the engine's CUDA, and still knows the card."""
    hardware, cuda = profile.hardware, profile.engine.cuda
    if not (hardware.driver_min or hardware.driver_branch_max or hardware.driver_measured or cuda):
        return skip("the profile asks for no driver version" if hardware.gpus else "no GPU in this profile")
    parts = [f"{hardware.driver_min} or newer"] if hardware.driver_min else []
    parts += [f"branch {hardware.driver_branch_max} or older"] if hardware.driver_branch_max else []
    parts += [f"CUDA {cuda}"] if cuda else []
    measured = f"{hardware.driver_measured}{', open kernel module' if hardware.driver_open else ''}"
    parts += [measured] if hardware.driver_measured else []
    expected = ", ".join(parts)
    found = facts.driver or facts.driver_module or ""
    if not version(found):
        return unknown("the driver's version is not known", expected=expected, fix=("nvidia-smi",))
    install = (f"install an NVIDIA driver of branch {hardware.driver_branch_max or 'that fits'}", "nvidia-smi")
    if hardware.driver_min and version(found) < version(hardware.driver_min):
        return fail(
            f"driver {found} is too old for CUDA {cuda}",
            expected=expected,
            found=found,
            fix=install,
            why="the engine's kernels are compiled at run time and the driver must take what that compiler makes",
        )
    if hardware.driver_branch_max and version(found)[0] > hardware.driver_branch_max:
        return fail(
            f"driver {found} no longer supports this card",
            expected=expected,
            found=found,
            fix=install,
            why=f"branch {hardware.driver_branch_max} is the last for {hardware.gpu_name}",
        )
    if cuda and facts.driver_cuda and version(facts.driver_cuda) < version(cuda):
        return fail(
            f"driver {found} runs CUDA {facts.driver_cuda}, the engine is built for {cuda}",
            expected=expected,
            found=f"CUDA {facts.driver_cuda}",
            fix=install,
        )
    if hardware.driver_measured and version(found)[0] != version(hardware.driver_measured)[0]:
        return warn(
            f"driver {found}: the profile's numbers were measured with {measured}",
            expected=expected,
            found=found,
            fix=(f"install {measured}", "nvidia-smi"),
            why=profile.source_of("hardware.driver_measured"),
        )
    if hardware.driver_open and facts.driver_open is None:
        return unknown(
            "which kernel module is loaded is not known", expected=expected, fix=("modinfo -F license nvidia",)
        )
    if hardware.driver_open and not facts.driver_open:
        return warn(
            f"driver {found} with the proprietary kernel module",
            expected=expected,
            found="proprietary module",
            fix=("install the open kernel modules (packages named nvidia-open, or -m=kernel-open)",),
            why=profile.source_of("hardware.driver_measured"),
        )
    return ok(f"driver {found}", expected=expected, found=found)


def driver_module(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """The loaded kernel module and the installed library are of one version."""
    expected = "kernel module and library of one version"
    if not profile.hardware.gpus:
        return skip("no GPU in this profile")
    module = facts.driver_module
    if module == "":
        return fail(
            "the NVIDIA kernel module is not loaded",
            expected=expected,
            found="no module",
            fix=(as_root("modprobe nvidia", facts.system), "nvidia-smi"),
        )
    if facts.gpu_reason == "mismatch" or (module and facts.driver and module != facts.driver):
        return fail(
            f"the loaded module is {module or 'of another version'}, the library {facts.driver or 'newer'}",
            expected=expected,
            found=f"module {module or '?'}, library {facts.driver or '?'}",
            fix=(
                as_root("reboot   # or unload and load the nvidia modules", facts.system),
                as_root(
                    "apt-mark hold 'nvidia-*' 'libnvidia-*'   # no driver update under a running engine", facts.system
                ),
            ),
            why="NVML and CUDA refuse to work from the next process on",
        )
    if not module or not facts.driver:
        return unknown(
            "module or library version is not known", expected=expected, fix=("cat /proc/driver/nvidia/version",)
        )
    kind = ", open module" if facts.driver_open else ""
    return ok(f"{module} both{kind}", expected=expected, found=module)


def driver_hold(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """No unattended update replaces the driver under a running engine (or its patched build)."""
    if not profile.hardware.gpus:
        return skip("no GPU in this profile")
    held = facts.system.held_packages
    expected = "driver packages on hold"
    if held is None:
        return unknown("the package database is not readable", expected=expected, fix=("apt-mark showhold",))
    if not held:
        return skip("the driver is not a package of dpkg here")
    loose = [name for name, is_held in held.items() if not is_held]
    if loose:
        return warn(
            f"an update may replace {loose[0]}" + (f" and {len(loose) - 1} more" if loose[1:] else ""),
            expected=expected,
            found=f"{len(loose)} of {len(held)} not on hold",
            fix=(as_root(f"apt-mark hold {' '.join(loose[:8])}", facts.system),),
        )
    return ok(f"{len(held)} packages on hold", expected=expected, found="all")


def _mode(profile: Profile, facts: HostFacts, gpus: tuple[GpuFacts, ...]) -> Verdict:
    chosen = used(profile, facts)
    expected = "compute mode default, MIG off"
    split = [gpu for gpu in chosen if gpu.mig]
    if split:
        return fail(
            f"split by MIG: {listed(split, lambda gpu: 'MIG on')}",
            expected=expected,
            found="MIG on",
            fix=(as_root(f"nvidia-smi -i {split[0].index} -mig 0", facts.system),),
            why="an instance is a part of a GPU with a part of its memory",
        )
    closed = [gpu for gpu in chosen if gpu.compute_mode not in ("", "default")]
    if closed:
        return fail(
            f"compute mode: {listed(closed, lambda gpu: gpu.compute_mode)}",
            expected=expected,
            found=closed[0].compute_mode,
            fix=(as_root("nvidia-smi -c DEFAULT", facts.system),),
            why="a leftover context then makes the engine's own start fail with `device unavailable`",
        )
    if not chosen or any(gpu.mig is None or not gpu.compute_mode for gpu in chosen):
        return unknown("the GPUs' modes are not known", expected=expected, fix=("nvidia-smi -q -d COMPUTE",))
    return ok("default, not split", expected=expected, found="default")


def _ecc(profile: Profile, facts: HostFacts, gpus: tuple[GpuFacts, ...]) -> Verdict:
    chosen = used(profile, facts)
    expected = "no uncorrected memory errors since the driver was loaded"
    bad = [gpu for gpu in chosen if gpu.ecc_uncorrected]
    if bad:
        found = listed(bad, lambda gpu: f"{gpu.ecc_uncorrected} uncorrected")
        return fail(
            f"memory errors: {found}",
            expected=expected,
            found=found,
            fix=(
                "nvidia-smi -q -d ECC,PAGE_RETIREMENT,ROW_REMAPPER",
                as_root("reboot   # retires the bad pages", facts.system),
            ),
        )
    if chosen and all(gpu.ecc is False for gpu in chosen):
        return skip("ECC is off, or these cards have none: memory errors stay unseen")
    if not chosen or any(gpu.ecc is None or (gpu.ecc and gpu.ecc_uncorrected is None) for gpu in chosen):
        return unknown("the error counters are not known", expected=expected, fix=("nvidia-smi -q -d ECC",))
    return ok("none", expected=expected, found="0")


def _persistence(profile: Profile, facts: HostFacts, gpus: tuple[GpuFacts, ...]) -> Verdict:
    chosen = used(profile, facts)
    expected = "persistence mode on"
    off = [gpu for gpu in chosen if gpu.persistence is False]
    if off:
        return warn(
            f"persistence mode is off on GPU {', '.join(str(gpu.index) for gpu in off)}",
            expected=expected,
            found="off",
            fix=(
                as_root("nvidia-smi -pm 1", facts.system),
                as_root("systemctl enable --now nvidia-persistenced", facts.system),
            ),
            why="the driver forgets clock locks and power limits as soon as no process uses the card",
        )
    if not chosen or any(gpu.persistence is None for gpu in chosen):
        return unknown("persistence mode is not known", expected=expected, fix=("nvidia-smi -q | grep Persistence",))
    return ok("on", expected=expected, found="on")


def _power(profile: Profile, facts: HostFacts, gpus: tuple[GpuFacts, ...]) -> Verdict:
    wanted = profile.clocks.power_limit_w
    if wanted is None:
        return skip("the profile states no power limit")
    chosen = used(profile, facts)
    expected = f"{wanted:g} W"
    outside = [
        gpu
        for gpu in chosen
        if (gpu.power_min_w is not None and wanted < gpu.power_min_w - TOLERANCE_W)
        or (gpu.power_max_w is not None and wanted > gpu.power_max_w + TOLERANCE_W)
    ]
    if outside:
        found = listed(outside, lambda gpu: f"takes {gpu.power_min_w or 0:g} to {gpu.power_max_w or 0:g} W")
        return fail(
            f"{wanted:g} W is outside what the cards take: {found}",
            expected=expected,
            found=found,
            fix=("set power_limit_w within that range in [clocks] of a profile of your own", "nvidia-smi -q -d POWER"),
            why="the driver refuses the limit, and the engine would run at another one",
        )
    if not chosen or any(gpu.power_limit_w is None for gpu in chosen):
        return unknown("the power limit is not known", expected=expected, fix=("nvidia-smi -q -d POWER",))
    other = [gpu for gpu in chosen if abs((gpu.power_limit_w or 0) - wanted) > TOLERANCE_W]
    if not other:
        return ok(expected, expected=expected, found=expected)
    over = [gpu for gpu in chosen if gpu.power_limit_w is not None and gpu.power_limit_w > wanted + TOLERANCE_W]
    found = listed(other, lambda gpu: f"{gpu.power_limit_w:g} W")
    if facts.clock_permission in ("root", "sudo"):
        return ok(f"{found} now, will be set to {wanted:g} W while the engine runs", expected=expected, found=found)
    indices = ",".join(str(gpu.index) for gpu in chosen)
    if over:
        return warn(
            f"power limit above {wanted:g} W: {found}",
            expected=expected,
            found=found,
            fix=(
                as_root(f"nvidia-smi -i {indices} -pl {wanted:g}", facts.system)
                + "   # again after each boot and each load of the driver",
                command("clocks sudoers", profile) + "   # or let ds41ctl set it while the engine runs",
            ),
            why="cards of this kind fell off the bus on power transients at higher limits (Xid 79, field report)",
        )
    return ok(f"{found}: below {wanted:g} W, and stays so", expected=f"{wanted:g} W at most", found=found)


def _offset(profile: Profile, facts: HostFacts, gpus: tuple[GpuFacts, ...]) -> Verdict:
    """The clock offset by NVML: whether it is there, whether the card takes it, whether this user may set it."""
    wanted = profile.clocks.offset_mhz
    if wanted is None:
        return skip("the profile asks for no clock offset")
    chosen = used(profile, facts)
    expected = f"graphics clock offset {wanted:+d} MHz"
    tune = f"set {wanted:+d} MHz with the recipe author's tool 170tune, before the engine starts"
    without = "or go on without it: the recipe's rates were measured with it"
    unsupported = [gpu for gpu in chosen if gpu.offset_mhz is None and gpu.offset_note]
    if unsupported:
        found = listed(unsupported, lambda gpu: gpu.offset_note)
        return warn(
            f"NVML cannot set a clock offset here: {found}",
            expected=expected,
            found=found,
            fix=(tune, without),
            why="decode runs at the card's own clock, below the one the recipe was measured at",
        )
    if not chosen or any(gpu.offset_mhz is None for gpu in chosen):
        return unknown("the clock offset is not known", expected=expected, fix=("ds41ctl clocks status", tune))
    outside = [
        gpu
        for gpu in chosen
        if gpu.offset_min_mhz is not None
        and gpu.offset_max_mhz is not None
        and not gpu.offset_min_mhz <= wanted <= gpu.offset_max_mhz
    ]
    if outside:
        found = listed(outside, lambda gpu: f"takes {gpu.offset_min_mhz:+d} to {gpu.offset_max_mhz:+d} MHz")
        return warn(
            f"{wanted:+d} MHz is outside what the driver takes: {found}",
            expected=expected,
            found=found,
            fix=("set offset_mhz within that range in [clocks] of a profile of your own", tune),
            why="the engine runs without the offset",
        )
    found = listed(chosen, lambda gpu: f"{gpu.offset_mhz:+d} MHz")
    if all(gpu.offset_mhz == wanted for gpu in chosen):
        return ok(f"{wanted:+d} MHz", expected=expected, found=found)
    if facts.system.root or facts.system.sudo_passwordless:
        return ok(f"{found} now, {wanted:+d} MHz while the engine runs", expected=expected, found=found)
    return warn(
        f"{found}, and this user may not change it",
        expected=expected,
        found=found,
        fix=(command("clocks sudoers", profile) + "   # its comment has the line to run as root", tune, without),
        why="NVML lets root alone set it, and nvidia-smi has no option that a sudoers line could allow",
    )


# nvml.h, nvmlClocksEventReason*: what slows a card down although it has work
BAD_THROTTLE = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}


def throttled(bits: int) -> list[str]:
    """The harmful reasons in a bit mask; idle, the power cap and a requested clock are none."""
    return [text for bit, text in BAD_THROTTLE.items() if bits & bit]


def _throttle(profile: Profile, facts: HostFacts, gpus: tuple[GpuFacts, ...]) -> Verdict:
    chosen = used(profile, facts)
    expected = "no slowdown by heat or power brake"
    slow = [gpu for gpu in chosen if gpu.throttle is not None and throttled(gpu.throttle)]
    if slow:
        found = listed(slow, lambda gpu: " and ".join(throttled(gpu.throttle or 0)))
        return fail(
            f"slowed down: {found}",
            expected=expected,
            found=found,
            fix=(
                "nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER",
                "check the power cables and the air flow of these cards",
            ),
            why="a power brake makes the card about four times slower (field report)",
        )
    if not chosen or any(gpu.throttle is None for gpu in chosen):
        return unknown(
            "the clock event reasons are not known", expected=expected, fix=("nvidia-smi -q -d PERFORMANCE",)
        )
    return ok("none", expected=expected, found="none")


def _pcie(profile: Profile, facts: HostFacts, gpus: tuple[GpuFacts, ...]) -> Verdict:
    """Generation by what the slot and card can do (an idle card falls back to generation 1), lanes as they are."""
    generation, width = profile.hardware.pcie_gen, profile.hardware.pcie_width
    if not generation and not width:
        return skip("the profile states no PCIe link")
    chosen = used(profile, facts)
    expected = f"PCIe generation {generation}, {width} lanes"
    slow = [
        gpu
        for gpu in chosen
        if (gpu.pcie_gen_max is not None and gpu.pcie_gen_max < generation)
        or (gpu.pcie_width is not None and gpu.pcie_width < width)
    ]
    if slow:
        found = listed(slow, lambda gpu: f"generation {gpu.pcie_gen_max}, {gpu.pcie_width} lanes")
        return warn(
            f"a slower PCIe link: {found}",
            expected=expected,
            found=found,
            fix=(
                "reseat the card, or move it to a slot with more lanes",
                as_root("lspci -vv | grep LnkSta", facts.system),
            ),
            why="every all-reduce of this profile goes over PCIe",
        )
    if not chosen or any(gpu.pcie_gen_max is None or gpu.pcie_width is None for gpu in chosen):
        return unknown("the PCIe link is not known", expected=expected, fix=("nvidia-smi -q -d PCIE | grep -A9 Link",))
    return ok(expected, expected=expected, found=expected)


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
        asked(lambda profile: f"{profile.hardware.gpus} GPUs", _count),
    ),
    Check(
        "gpu.name",
        "the GPU model the profile is for",
        1,
        GROUP,
        "kernels compiled for another architecture",
        asked(lambda profile: profile.hardware.gpu_name, _name),
    ),
    Check(
        "gpu.memory",
        "memory of each GPU",
        1,
        GROUP,
        "out of memory 12 minutes into the start: a 16 GB card among 32 GB ones, one locked to 8 GB",
        asked(lambda profile: f"{profile.hardware.vram_mib_min} MiB on each", _memory),
    ),
    Check(
        "gpu.capability",
        "compute capability of each GPU",
        1,
        GROUP,
        "an engine without a kernel image for the card",
        asked(lambda profile: profile.hardware.compute_capability or "none", _capability),
    ),
    Check(
        "gpu.weights",
        "the weights of each stage fit its cards",
        1,
        GROUP,
        "out of memory while the weights are loaded",
        asked(lambda profile: "weights within each GPU's share", _weights),
    ),
    Check(
        "gpu.free-memory",
        "free memory of each GPU against the share the engine takes",
        1,
        GROUP,
        "an engine that gives up at its start because another process holds memory",
        asked(lambda profile: "enough free memory", _free_memory),
    ),
    Check(
        "gpu.processes",
        "no other compute process, and no leftover worker, on the GPUs",
        1,
        GROUP,
        "a dead engine's worker that still holds its memory, or a monitor that makes the engine run out of it",
        asked(lambda profile: "no other process", _processes),
    ),
    Check(
        "gpu.driver-version",
        "the driver fits the engine's CUDA and the card",
        1,
        GROUP,
        "an engine whose kernels the driver refuses, or a driver that no longer knows the card",
        driver_version,
    ),
    Check(
        "gpu.driver-module",
        "kernel module and driver library of one version",
        1,
        GROUP,
        "a driver update that breaks every new process until the next boot",
        driver_module,
    ),
    Check(
        "gpu.driver-hold",
        "driver packages are on hold",
        1,
        GROUP,
        "an unattended driver update that loses a patch or breaks a running engine",
        driver_hold,
    ),
    Check(
        "gpu.mode",
        "compute mode default, MIG off",
        1,
        GROUP,
        "workers that cannot open their GPU",
        asked(lambda profile: "compute mode default, MIG off", _mode),
    ),
    Check(
        "gpu.ecc",
        "uncorrected memory errors",
        1,
        GROUP,
        "wrong answers or a crash from a card with failing memory",
        asked(lambda profile: "no uncorrected errors", _ecc),
    ),
    Check(
        "gpu.persistence",
        "persistence mode",
        1,
        GROUP,
        "clock locks and power limits that the driver forgets between two starts",
        asked(lambda profile: "persistence mode on", _persistence),
    ),
    Check(
        "gpu.power-limit",
        "power limit of each GPU",
        1,
        GROUP,
        "cards that fall off the bus on a power transient",
        asked(lambda profile: "the profile's power limit", _power),
    ),
    Check(
        "gpu.clock-offset",
        "the clock offset can be set by NVML",
        1,
        GROUP,
        "an engine below its published rates because a tuning step of the recipe is missing",
        asked(lambda profile: "the profile's clock offset", _offset),
    ),
    Check(
        "gpu.throttle",
        "slowdown by heat or power brake",
        1,
        GROUP,
        "an engine that is several times slower than its published numbers",
        asked(lambda profile: "no slowdown", _throttle),
    ),
    Check(
        "gpu.pcie",
        "PCIe generation and lanes",
        1,
        GROUP,
        "a card in a slow slot that holds all others back",
        asked(lambda profile: "the profile's PCIe link", _pcie),
    ),
)
