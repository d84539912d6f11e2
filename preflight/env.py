"""Checks of the environment: switches that change an engine without a word."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from ds41ctl.core.facts import HostFacts
from ds41ctl.core.profile import Profile
from preflight.check import Check, Stage, Verdict, fail, ok, warn

GROUP = "ENVIRONMENT"
Predicate = Callable[[str, Profile], bool]


@dataclass(frozen=True)
class Denied:
    """A variable that must not reach the engine with a value that `bad` accepts."""

    name: str
    why: str
    bad: Predicate


def _set(value: str, profile: Profile) -> bool:
    return bool(value)


def _on(value: str, profile: Profile) -> bool:
    return value.strip().lower() not in ("", "0", "false", "no", "off")


def _off(value: str, profile: Profile) -> bool:
    return value.strip().lower() in ("0", "false", "no", "off")


def _equals(text: str) -> Predicate:
    return lambda value, profile: value.strip().lower() == text


def _expandable(value: str, profile: Profile) -> bool:
    return "expandable_segments:true" in value.replace(" ", "").lower()


def _with_gpus(predicate: Predicate) -> Predicate:
    return lambda value, profile: profile.hardware.gpus > 0 and predicate(value, profile)


def _without_plugin(value: str, profile: Profile) -> bool:
    return profile.engine.plugin and "ds41_engine" not in [name.strip() for name in value.split(",")]


def _quiet(value: str, profile: Profile) -> bool:
    return value.strip().upper() in ("WARNING", "WARN", "ERROR", "CRITICAL", "FATAL")


DENIED = (
    Denied("DSV41_ENGRAM_ZERO", "diagnostic switch: Engram rows read as zero, copies lose characters", _on),
    Denied("DS41_ENGRAM_UNFILLED", "diagnostic switch: serves with empty Engram tables", _on),
    Denied("DSV41_SKIP_WEIGHT_RE", "weights whose names match are silently not loaded", _set),
    Denied(
        "DSV41_ENGRAM_STORAGE",
        "host mode reserves memory for the Engram tables and never fills it",
        _equals("host"),
    ),
    Denied("VLLM_PLUGINS", "leaves out ds41_engine, so the stock model class would be used", _without_plugin),
    Denied("VLLM_LOGGING_LEVEL", "hides the log lines that prove the Engram tables are read", _quiet),
    Denied("VLLM_CONFIGURE_LOGGING", "hides the log lines that prove the Engram tables are read", _off),
    Denied(
        "VLLM_TRACE_FUNCTION",
        "diagnostic switch: traces every function call, orders of magnitude slower",
        _on,
    ),
    Denied("VLLM_WORKER_MULTIPROC_METHOD", "fork breaks CUDA in the workers", _with_gpus(_equals("fork"))),
    Denied("PYTHONPATH", "another vllm or torch may be imported instead of the pinned one", _set),
    Denied("PYTHONHOME", "the engine would look for its standard library elsewhere", _set),
    Denied("PYTHONINSPECT", "the engine would wait for a keyboard at its end", _on),
    Denied("PYTHONDONTWRITEBYTECODE", "vLLM imports in 25 s instead of 10 s at every start", _on),
    Denied("LD_PRELOAD", "a foreign library is loaded into the engine first", _set),
    Denied(
        "PYTORCH_CUDA_ALLOC_CONF",
        "expandable_segments gives NaN or runs out of memory on these cards",
        _expandable,
    ),
    Denied(
        "PYTORCH_ALLOC_CONF",
        "expandable_segments gives NaN or runs out of memory on these cards",
        _expandable,
    ),
    Denied(
        "CUDA_DEVICE_ORDER",
        "GPU indices would not be those of nvidia-smi",
        _with_gpus(_equals("fastest_first")),
    ),
    Denied("CUDA_LAUNCH_BLOCKING", "diagnostic switch: every kernel waits for the one before", _on),
    Denied("CUDA_VISIBLE_DEVICES", "hides GPUs, and renumbers those that are left", _with_gpus(_set)),
    Denied("NCCL_P2P_DISABLE", "all-reduce goes through host memory", _with_gpus(_on)),
)


# the profile may name its own GPUs; inherited, the same variable would override its choice
_PROFILE_MAY_SET = frozenset({"CUDA_VISIBLE_DEVICES"})
# harmless in this shell, because it is not passed on
_SHELL_MAY_SET = frozenset({"PYTHONDONTWRITEBYTECODE"})


def _found(profile: Profile, environment: Mapping[str, str], allowed: frozenset[str]) -> list[Denied]:
    return [
        item
        for item in DENIED
        if item.name in environment and item.name not in allowed and item.bad(environment[item.name], profile)
    ]


def passed_on(profile: Profile) -> dict[str, str]:
    """What the profile gives the engine: [serve.env], and `-e NAME=VALUE` of a container's command line."""
    words = profile.serve.argv
    options = [word for flag, word in pairwise(words) if flag in ("-e", "--env")]
    options += [word.removeprefix("--env=") for word in words if word.startswith("--env=")]
    given = {name: value for name, equals, value in (word.partition("=") for word in options) if equals}
    return {**profile.serve.env, **profile.serve.dspark_env, **(given if profile.engine.kind == "container" else {})}


def inherited(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """The deny-list, against what the profile passes on (fails) and what this shell has set (warns)."""
    given = passed_on(profile)
    passed = _found(profile, given, _PROFILE_MAY_SET)
    expected = "no variable that changes the engine unasked"
    if passed:
        names = ", ".join(f"{item.name}={given[item.name]}" for item in passed)
        return fail(
            f"the profile passes {names} to the engine",
            expected=expected,
            found=names,
            fix=tuple(f"remove {item.name} from [serve] of profile {profile.name}" for item in passed),
            why="; ".join(item.why for item in passed),
        )
    found = _found(profile, facts.environment, _SHELL_MAY_SET)
    if found:
        names = ", ".join(f"{item.name}={facts.environment[item.name]}" for item in found)
        return warn(
            f"set in this shell: {names}",
            expected=expected,
            found=names,
            fix=("unset " + " ".join(item.name for item in found),),
            why="not passed to the engine, but what you start by hand differs: " + "; ".join(i.why for i in found),
        )
    return ok("nothing that changes the engine is set", expected=expected, found="none")


CHECKS = (
    Check(
        "env.inherited",
        "diagnostic and loader variables, in the profile and in this shell",
        1,
        GROUP,
        "a switch left on from a test that makes answers wrong and raises no error",
        inherited,
    ),
)
