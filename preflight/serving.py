"""Checks of the profile's own serving values: what would be found wrong an hour after the start, or never."""

from __future__ import annotations

import json
import re
from itertools import pairwise

from ds41ctl.core.facts import HostFacts
from ds41ctl.core.launch import passed_on
from ds41ctl.core.profile import Profile, option_value
from preflight.check import Check, Stage, Verdict, fail, ok, skip, unknown, warn

GROUP = "SERVE"
SPEC_STEP = 5  # seed and field reports: drafts of fewer than 5 come out garbled, the guard is a multiple of 5
LOGPROBS_SHARE_MAX = 0.97  # recipe: at 0.98, prompt_logprobs on 1,024-token windows leaves 0.23 GiB
LONG_BOOT_S = 600.0  # vLLM's own limit when VLLM_ENGINE_READY_TIMEOUT_S is unset


def _edit(profile: Profile, what: str) -> str:
    return f"{what} in profile {profile.name}"


def spec_tokens(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """Draft tokens: none, or a multiple of what the drafter was trained for; field and command line agree."""
    serve = profile.serve
    if serve.spec_tokens is None:
        return skip("this model has no drafter")
    expected = f"0 or a multiple of {SPEC_STEP}"
    told = _drafts(profile)
    if told is not None and told != serve.spec_tokens:
        return fail(
            f"serve.spec_tokens is {serve.spec_tokens}, the command line asks for {told}",
            expected=f"{serve.spec_tokens} in both",
            found=str(told),
            fix=(_edit(profile, f"make num_speculative_tokens {serve.spec_tokens}"),),
        )
    if serve.spec_tokens % SPEC_STEP:
        return fail(
            f"{serve.spec_tokens} draft tokens",
            expected=expected,
            found=str(serve.spec_tokens),
            fix=(_edit(profile, "set serve.spec_tokens and num_speculative_tokens to 5"), "or serve with --no-dspark"),
            why="the drafter was trained for blocks of 5: other lengths come out garbled or slower (field report)",
        )
    return ok(f"{serve.spec_tokens}", expected=expected, found=str(serve.spec_tokens))


def _drafts(profile: Profile) -> int | None:
    """num_speculative_tokens of the command line, None when it is not there or not readable."""
    text = option_value((*profile.serve.argv, *profile.serve.dspark_argv), "--speculative-config")
    try:
        tree = json.loads(text or "")
        return int(tree["num_speculative_tokens"])
    except (ValueError, TypeError, KeyError):
        return None


_RELEASE = re.compile(r"(https://github\.com/[\w.-]+/([\w.-]+))/releases/(?:tag|download)/([\w.-]+)")


def _import(profile: Profile) -> tuple[str, ...]:
    """The commands that read the engine's own launcher, from its source at the release's tag."""
    serve, release = profile.serve, _RELEASE.match(profile.engine.wheel_url)
    if not serve.launcher or release is None:
        return (
            _edit(profile, "compare serve.argv and serve.env with the engine's own launcher, then set serve.source"),
        )
    url, folder, tag = release.groups()
    command = f"ds41ctl profile import --base {profile.name} --launcher {folder}/{serve.launcher}"
    return (
        f"git clone --branch {tag} --depth 1 {url}",
        command + (f" --env {folder}/{serve.launcher_env}" if serve.launcher_env else ""),
    )


def source(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """Where the command line comes from: one that was put together from a description may lack what matters."""
    serve = profile.serve
    expected = "a command line that was measured here, published, or imported from the engine's own launcher"
    if profile.state == "measured":
        return ok("it was run and measured", expected=expected, found="measured")
    if serve.source in ("published", "imported"):
        return ok(serve.source, expected=expected, found=serve.source)
    if serve.source == "partial":
        return warn(
            "a part of the engine's launcher could not be read",
            expected=expected,
            found="imported in part",
            fix=(
                f"ds41ctl profile show {profile.name}   # what was not read",
                _edit(profile, 'complete serve.argv and serve.env, then set serve.source = "imported"'),
            ),
        )
    if serve.source == "inferred":
        return warn(
            "the command line is inferred, not the engine's own",
            expected=expected,
            found="inferred",
            fix=_import(profile),
        )
    return unknown(
        "the profile does not say where its command line comes from",
        expected=expected,
        found="serve.source is not set",
        fix=(_edit(profile, 'set serve.source to "published", "imported" or "inferred"'),),
    )


def knobs(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """The engine's own switches: a profile that sets none of those it has serves with everything off."""
    engine = facts.engine
    if engine is None or not engine.knobs:
        return skip("the engine is not there yet, or its vllm/envs.py names no VLLM_DS41_ variable")
    names = [name for name in passed_on(profile) if name.startswith("VLLM_DS41_")]
    left = [name for name in engine.knobs if name not in names]
    expected = "the knobs that the published numbers were measured with"
    found = f"{len(names)} set, {len(engine.knobs)} known to the engine"
    if not names:
        return warn(
            f"none of the engine's {len(engine.knobs)} VLLM_DS41_ knobs is set",
            expected=expected,
            found=f"not set: {', '.join(left)}",
            fix=_import(profile),
        )
    return ok(found, expected=expected, found=found, evidence=tuple(f"left at its default: {name}" for name in left))


def utilisation(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """Share of GPU memory against what clients will ask for."""
    share = profile.serve.gpu_memory_utilization
    if share is None or not profile.hardware.gpus:
        return skip("the profile sets no share of GPU memory")
    expected = (
        f"{LOGPROBS_SHARE_MAX:g} at most with prompt_logprobs" if profile.serve.prompt_logprobs else "0.99 at most"
    )
    if profile.serve.prompt_logprobs and share > LOGPROBS_SHARE_MAX:
        return fail(
            f"gpu_memory_utilization {share:g} leaves no room for prompt_logprobs",
            expected=expected,
            found=f"{share:g}",
            fix=(_edit(profile, f"set serve.gpu_memory_utilization to {LOGPROBS_SHARE_MAX:g}"),),
            why="full-vocabulary logits of a prompt chunk are allocated after the engine has sized its cache",
        )
    return ok(f"{share:g}", expected=expected, found=f"{share:g}")


def kv_pool(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """The KV cache the engine reports holds at least one request of full length."""
    pool, length = profile.serve.kv_pool_tokens, profile.serve.max_model_len
    if pool is None:
        return skip("the profile states no KV pool")
    expected = f"{length:,} tokens or more"
    if pool < length:
        return fail(
            f"a KV pool of {pool:,} tokens cannot hold one request of {length:,}",
            expected=expected,
            found=f"{pool:,}",
            fix=(_edit(profile, "lower serve.max_model_len or raise serve.gpu_memory_utilization"),),
            why="the engine refuses to start, after it has loaded all weights",
        )
    return ok(f"{pool:,} tokens: {pool / length:.1f} requests of full length", expected=expected, found=f"{pool:,}")


def context_room(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """The longest context fits beside what one engine step computes, as far as that was measured."""
    serve = profile.serve
    chunk, length = serve.max_num_batched_tokens, serve.max_model_len
    if not serve.context_by_chunk or chunk is None:
        return skip("the profile states no limit of context by chunk")
    # a bigger step takes more memory: every limit measured at this size or a smaller one holds
    limits = [longest for tokens, longest in serve.context_by_chunk.items() if int(tokens) <= chunk]
    expected = f"{min(limits):,} tokens or fewer" if limits else f"steps below {min(map(int, serve.context_by_chunk))}"
    if limits and length > min(limits):
        return fail(
            f"a context of {length:,} does not fit beside steps of {chunk:,} tokens",
            expected=expected,
            found=f"{length:,}",
            fix=(
                _edit(profile, f"set serve.max_model_len and --max-model-len to {min(limits)}"),
                _edit(profile, "or lower serve.max_num_batched_tokens and --max-num-batched-tokens"),
            ),
            why="the engine refuses the context after it has loaded all weights",
        )
    return ok(f"{length:,} tokens in steps of {chunk:,}", expected=expected, found=f"{length:,}")


def ready_timeout(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """The engine's own time limit for its start is not shorter than ours."""
    wanted = profile.serve.ready_timeout_s
    if wanted <= LONG_BOOT_S:
        return skip("this engine starts within vLLM's own limit")
    expected = f"VLLM_ENGINE_READY_TIMEOUT_S of {wanted:.0f} or more"
    text = passed_on(profile).get("VLLM_ENGINE_READY_TIMEOUT_S", "")
    if not text.isdecimal() or int(text) < wanted:
        return fail(
            f"VLLM_ENGINE_READY_TIMEOUT_S is {text or 'not set'}",
            expected=expected,
            found=text or f"unset ({LONG_BOOT_S:.0f} s)",
            fix=(_edit(profile, f'set VLLM_ENGINE_READY_TIMEOUT_S = "{wanted:.0f}"'),),
            why="the API server gives up in the middle of a good start and leaves its workers behind",
        )
    return ok(f"{text} s", expected=expected, found=text)


def workers(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """Workers of a GPU engine are spawned, not forked."""
    if profile.hardware.gpus < 2 or profile.engine.kind == "container":
        return skip("no workers are forked on this host")
    expected = "VLLM_WORKER_MULTIPROC_METHOD=spawn"
    found = passed_on(profile).get("VLLM_WORKER_MULTIPROC_METHOD", "")
    if found != "spawn":
        return fail(
            f"VLLM_WORKER_MULTIPROC_METHOD is {found or 'not set'}",
            expected=expected,
            found=found or "unset (fork)",
            fix=(_edit(profile, 'set VLLM_WORKER_MULTIPROC_METHOD = "spawn"'),),
            why="a forked process cannot use CUDA again",
        )
    return ok("spawn", expected=expected, found=found)


def offline(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """A start never turns into a download."""
    if profile.engine.kind == "container":
        return skip("the container is given a folder")
    expected = "HF_HUB_OFFLINE=1"
    found = passed_on(profile).get("HF_HUB_OFFLINE", "")
    if found.strip().lower() not in ("1", "true", "yes", "on"):
        return fail(
            f"HF_HUB_OFFLINE is {found or 'not set'}",
            expected=expected,
            found=found or "unset",
            fix=(_edit(profile, 'set HF_HUB_OFFLINE = "1"'),),
            why="a missing file would be fetched by the engine itself: unpinned, unverified, for hours",
        )
    return ok("the engine downloads nothing", expected=expected, found=found)


_LOOPBACK = ("127.", "::1", "localhost", "[::1]")


def _published(profile: Profile) -> str:
    """The address at which others can reach the API: of `-p` for a container, else the bind address."""
    if profile.engine.kind != "container":
        return profile.serve.host
    if "--network=host" in profile.serve.argv or option_value(profile.serve.argv, "--network") == "host":
        return option_value(profile.serve.argv, "--host") or profile.serve.host
    addresses = [_address(mapping) for mapping in _mappings(profile.serve.argv)]
    return next((address for address in addresses if not _is_local(address)), "127.0.0.1")


def _mappings(argv: tuple[str, ...]) -> list[str]:
    """Every port mapping of a container's command line: `-p X`, `-pX`, `--publish X` and `--publish=X`."""
    found = [value for flag, value in pairwise(argv) if flag in ("-p", "--publish")]
    found += [word.removeprefix("--publish=") for word in argv if word.startswith("--publish=")]
    return found + [word[2:] for word in argv if re.fullmatch(r"-p[0-9\[].*", word)]


def _address(mapping: str) -> str:
    parts = mapping.rsplit(":", 2)
    return parts[0] if len(parts) == 3 else "0.0.0.0"  # noqa: S104 - what docker binds without an address


def _is_local(address: str) -> bool:
    return address.startswith(_LOOPBACK)


def exposed(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """An API that others can reach asks for a key."""
    address = _published(profile)
    expected = "127.0.0.1, or an API key"
    given = passed_on(profile)
    key = facts.api_key or option_value(profile.serve.argv, "--api-key") is not None or given.get("VLLM_API_KEY")
    if _is_local(address):
        return ok(f"bound to {address}", expected=expected, found=address)
    if key:
        return ok(f"bound to {address}, with a key", expected=expected, found=f"{address}, key")
    return fail(
        f"the API is open to everyone who reaches {address}",
        expected=expected,
        found=f"{address}, no key",
        fix=(
            _edit(profile, 'DS41_HOST=127.0.0.1, or set serve.host = "127.0.0.1"'),
            "or (umask 077; openssl rand -hex 32 > FILE) and DS41_API_KEY_FILE=FILE",
        ),
        why="vLLM asks for no key by default: anybody on the network can use the cards and read prompts",
    )


def gloo(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """The control channel between local workers stays on the loopback interface."""
    if profile.engine.kind == "container":
        return skip("the container has a network of its own")
    expected = "GLOO_SOCKET_IFNAME=lo, or a host name that resolves to 127.*"
    found = passed_on(profile).get("GLOO_SOCKET_IFNAME", "")
    if found == "lo":
        return ok("lo", expected=expected, found="lo")
    addresses = facts.network.hostname_addresses if facts.network is not None else None
    fix = (_edit(profile, 'set GLOO_SOCKET_IFNAME = "lo"'),)
    if found:
        return warn(f"GLOO_SOCKET_IFNAME is {found}", expected=expected, found=found, fix=fix)
    if addresses is None:
        return unknown(
            "what the host name resolves to is not known", expected=expected, fix=(*fix, "getent hosts $(hostname)")
        )
    if addresses and all(address.startswith("127.") or address == "::1" for address in addresses):
        return ok(f"the host name is {addresses[0]}", expected=expected, found=addresses[0])
    shown = ", ".join(addresses) or "not in /etc/hosts"
    return warn(
        f"gloo would pick the interface of the host name ({shown})",
        expected=expected,
        found=shown,
        fix=fix,
        why="a docker bridge or a slow network between workers of one machine (535 ms a message, field report)",
    )


def container_flags(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """Shared memory, locked memory and GPUs as a container does not give them by itself."""
    if profile.engine.kind != "container":
        return skip("the engine is a venv")
    argv = profile.serve.argv
    joined = " ".join(argv)
    missing = []
    if option_value(argv, "--ipc") != "host" and option_value(argv, "--shm-size") is None:
        missing.append("--ipc=host")
    if "memlock=-1" not in joined:
        missing.append("--ulimit memlock=-1")
    if option_value(argv, "--device") is None and option_value(argv, "--gpus") is None:
        missing.append("--device nvidia.com/gpu=all")
    expected = "--ipc=host (or --shm-size), --ulimit memlock=-1, --device or --gpus"
    if missing:
        return fail(
            f"the container is started without {' and '.join(missing)}",
            expected=expected,
            found=f"without {', '.join(missing)}",
            fix=(_edit(profile, f"add {' '.join(missing)} to serve.argv"),),
            why="64 MiB of /dev/shm and 64 KiB of locked memory end in a bus error or a failed registration",
        )
    return ok("shared memory, locked memory, GPUs", expected=expected, found="all there")


def licence(profile: Profile, facts: HostFacts, stage: Stage) -> Verdict:
    """AGPL code in the engine: nothing to do alone on one machine, duties when served over a network."""
    notices = [text for text in profile.engine.notices if "AGPL" in text]
    if not notices:
        return skip("the profile names no licence with duties for serving")
    address = _published(profile)
    expected = "an API that only this machine reaches, or the source offered to its users"
    if _is_local(address):
        return ok(f"noted: {notices[0]}", expected=expected, found=f"bound to {address}")
    return warn(
        f"served over a network: {notices[0]}",
        expected=expected,
        found=f"bound to {address}",
        fix=(
            "offer your users the source of the engine as it runs (AGPL-3.0, section 13)",
            _edit(profile, "or bind 127.0.0.1"),
        ),
    )


CHECKS = (
    Check(
        "serve.source",
        "where the command line comes from",
        1,
        GROUP,
        "switches that nobody knew of: an engine that is slower, or starts after twelve minutes into a refusal",
        source,
    ),
    Check(
        "serve.knobs",
        "the engine's own switches",
        1,
        GROUP,
        "an engine that serves without what its published numbers were measured with",
        knobs,
    ),
    Check(
        "serve.spec-tokens",
        "draft tokens: 0 or a multiple of 5",
        1,
        GROUP,
        "a drafter outside what it was trained for",
        spec_tokens,
    ),
    Check(
        "serve.utilisation",
        "share of GPU memory against prompt_logprobs",
        1,
        GROUP,
        "out of memory at the first request that asks for prompt_logprobs",
        utilisation,
    ),
    Check(
        "serve.kv-pool",
        "KV pool against the longest context",
        1,
        GROUP,
        "an engine that refuses to start after it has loaded all weights",
        kv_pool,
    ),
    Check(
        "serve.context-room",
        "longest context against the tokens of one step",
        1,
        GROUP,
        "an engine that refuses its context after a boot of twelve minutes",
        context_room,
    ),
    Check(
        "serve.ready-timeout",
        "the engine's own limit for its start",
        1,
        GROUP,
        "an API server that gives up in the middle of a good start",
        ready_timeout,
    ),
    Check("serve.workers", "workers are spawned, not forked", 1, GROUP, "workers that cannot use CUDA", workers),
    Check(
        "serve.offline", "the engine may not download", 1, GROUP, "a start that turns into a download of hours", offline
    ),
    Check(
        "serve.container-flags",
        "shared memory, locked memory and GPUs of the container",
        1,
        GROUP,
        "workers that die with a bus error, and tables that cannot be pinned",
        container_flags,
    ),
    Check(
        "net.exposed",
        "an API others can reach asks for a key",
        1,
        "NETWORK",
        "an open API: everyone on the network uses the cards and reads prompts",
        exposed,
    ),
    Check(
        "net.gloo",
        "the interface local workers talk over",
        1,
        "NETWORK",
        "workers that talk over a docker bridge",
        gloo,
    ),
    Check(
        "engine.licence", "licence duties of the engine", 1, "ENGINE", "AGPL duties that nobody was told of", licence
    ),
)
