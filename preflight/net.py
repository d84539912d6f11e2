"""Checks of the network: the port the API will listen on."""

from __future__ import annotations

from ds41ctl.core.facts import HostFacts, PortFacts
from ds41ctl.core.profile import Profile
from preflight.check import Check, Stage, Verdict, fail, ok, skip, unknown

GROUP = "NETWORK"
COMMAND_SHOWN = 60  # policy: how much of the holder's command line a one-line summary shows


def port(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """A real bind() of exactly the host and port the engine will use."""
    found, running = facts.port, facts.running
    expected = f"port {found.port if found else profile.serve.port} free"
    if found is None or found.free is None:
        number = found.port if found else profile.serve.port
        return unknown(
            "whether the port is free is not known" + (f": {found.error}" if found and found.error else ""),
            expected=expected,
            fix=(f"ss -ltnp 'sport = :{number}'",),
        )
    where = f"port {found.port} on {found.host}"
    if found.free:
        return ok(f"{where} is free", expected=expected, found="free")
    if found.reason == "in-use":
        if running is not None and running.alive and running.port == found.port:
            return skip(f"{where} is held by our own engine (pid {running.pid}, profile {running.profile})")
        holder = _holder(found)
        return fail(
            f"{where} is held by {holder}",
            expected=expected,
            found=f"pid {found.holder.pid}, {found.holder.command}" if found.holder else "in use",
            fix=(
                *((f"kill {found.holder.pid}   # if it is not needed",) if found.holder else _who(found.port)),
                _another_port(profile, stage, found.port),
            ),
            why="the engine would fail after it has loaded, or share the port with the other server",
        )
    advice = {
        "denied": (_another_port(profile, stage, 8010),),
        "not-local": ("ip -brief address   # the addresses of this machine", "set serve.host to 127.0.0.1"),
        "unresolved": ("set serve.host to 127.0.0.1", f"getent hosts {found.host}"),
        "out-of-range": (_another_port(profile, stage, 8010),),
    }
    reason = {
        "denied": "ports below 1024 need root",
        "not-local": f"{found.host} is not an address of this machine",
        "unresolved": f"{found.host} does not resolve",
        "out-of-range": "ports are 1 to 65535",
    }
    return fail(
        f"{where} cannot be bound: {reason.get(found.reason, found.error)}",
        expected=expected,
        found=found.error or found.reason,
        fix=advice.get(found.reason, (_another_port(profile, stage, found.port),)),
    )


def _holder(found: PortFacts) -> str:
    if found.holder is None:
        return "a process this user may not see"
    what = found.holder.command or found.holder.name or "?"
    what = what if len(what) <= COMMAND_SHOWN else what[: COMMAND_SHOWN - 3] + "..."
    return f"pid {found.holder.pid} ({what}" + (f", user {found.holder.user})" if found.holder.user else ")")


def _who(number: int) -> tuple[str, ...]:
    return (f"sudo ss -ltnp 'sport = :{number}'   # who it is",)


def _another_port(profile: Profile, stage: Stage, number: int) -> str:
    other = number + 1 if 1024 <= number < 65535 else 8011
    return f"DS41_PORT={other} ds41ctl {stage} --profile {profile.name}"


CHECKS = (
    Check(
        "net.port",
        "the API's port, by a real bind",
        1,
        GROUP,
        "a port conflict found only after the whole model has been loaded",
        port,
    ),
)
