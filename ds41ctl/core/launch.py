"""Launch: the engine's whole start (command, environment, limits, folders) from profile and facts alone; pure."""

from __future__ import annotations

import shlex
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from ds41ctl.core.errors import ConfigError, UnsupportedError
from ds41ctl.core.facts import GpuFacts, HostFacts
from ds41ctl.core.layout import Layout
from ds41ctl.core.masking import mask_argv, mask_value
from ds41ctl.core.profile import Profile

# what the engine inherits from the caller; everything else of its environment is the profile's
INHERITED = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TMPDIR", "TZ")
# what a container client needs beside that: where its daemon is and how it logs in
INHERITED_BY_CLIENTS = (*INHERITED, "DOCKER_HOST", "DOCKER_CONFIG", "DOCKER_CONTEXT", "XDG_RUNTIME_DIR")
RUN_MARKER = "DS41_ENGINE_RUN"
KEY_VARIABLE = "VLLM_API_KEY"

# variables that change an engine or its libraries: when the caller has one that is not passed on, it is named
_TELLING = (
    *("VLLM_", "NCCL_", "CUDA_", "DSV41_", "TORCH", "PYTORCH_", "TRITON_", "TILELANG_", "FLASHINFER_"),
    *("HF_", "GLOO_", "OMP_", "MKL_", "KMP_", "LD_", "PYTHON", "NVIDIA_", "CUBLAS_"),
)

# compilers' caches below the engine's own folder; vLLM derives DeepGEMM's and its own from VLLM_CACHE_ROOT
_CACHES = {"VLLM_CACHE_ROOT": "vllm", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
_GPU_CACHES = {
    "TORCH_EXTENSIONS_DIR": "torch_extensions",
    "TILELANG_CACHE_DIR": "tilelang",
    "CUDA_CACHE_PATH": "cuda",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
}
CACHE_VARIABLES = frozenset(_CACHES | _GPU_CACHES)

UNLIMITED = -1
# policy: one file descriptor a connection, shard and worker pipe; no core dump of hundreds of GB of mapped memory
_LIMITS = {"nofile": 65_536, "core": 0}
_GPU_LIMITS = {"memlock": UNLIMITED}  # the Engram tables are registered with the GPU


@dataclass(frozen=True)
class Machine:
    """What of this machine a start depends on. `gpus`: index -> UUID; `environ`: the caller's variables; `runtime`: the
    container client that is there, docker or podman."""

    gpus: Mapping[int, str] = field(default_factory=dict)
    driver: str = ""
    engine_digest: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)
    runtime: str = ""

    @classmethod
    def of(cls, facts: HostFacts, environ: Mapping[str, str]) -> Machine:
        """The part of recorded facts that a start depends on."""
        digest = facts.engine.manifest_digest if facts.engine is not None else ""
        runtime = facts.container.runtime if facts.container is not None else ""
        return cls(uuids(facts.gpus), facts.driver, digest, environ, runtime)


def uuids(gpus: tuple[GpuFacts, ...] | None) -> dict[int, str]:
    """Index -> UUID of the GPUs that state one."""
    return {gpu.index: gpu.uuid for gpu in gpus or () if gpu.uuid}


class Launch(BaseModel):
    """One start. `env` is the engine's whole environment beside the `inherited` names; `secrets` name variables whose
    value is read from a file at the start; `limits` are `ulimit` names (-1: unlimited). A container's client reads
    its secrets from `env_file`, which the start writes (0600)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    argv: tuple[str, ...]
    env: dict[str, str]
    inherited: tuple[str, ...]
    secrets: dict[str, str] = {}
    env_file: str = ""
    limits: dict[str, int] = {}
    cwd: str
    cache: str
    dropped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def cache_key(machine: Machine) -> str:
    """Compiled code is only good for the engine and the driver that made it."""
    return f"{machine.engine_digest[:12] or 'unpinned'}-{machine.driver or 'no-driver'}"


def launch(layout: Layout, machine: Machine, store: str, *, strict: bool = False) -> Launch:
    """The start of the profile's engine. Raises ConfigError for an unknown placeholder; `strict`: also
    UnsupportedError for a GPU that is not there."""
    profile, serve = layout.profile, layout.profile.serve
    contained = profile.engine.kind == "container"
    cache = layout.cache_dir / cache_key(machine)
    values, notes = _values(layout, machine, store, cache)
    if strict and notes and machine.gpus:
        raise UnsupportedError(notes[0], hints=("ds41ctl preflight --only gpu",))
    argv = [*serve.argv, *(serve.dspark_argv if layout.dspark else ())]
    if serve.numa == "interleave" and not contained:
        argv = ["numactl", "--interleave=all", *argv]
    env_file = ""
    if contained:
        argv[0] = machine.runtime or argv[0]
        if layout.api_key_file is not None:
            env_file = str(layout.dirs.runtime / f"{layout.name}.env")
            argv[2:2] = ["--env-file", env_file]  # after `docker run`
    env: dict[str, str] = {}
    if not contained:
        chosen = _CACHES | (_GPU_CACHES if profile.hardware.gpus else {})
        env = {name: str(cache / folder) for name, folder in chosen.items()}
    given = serve.env | (serve.dspark_env if layout.dspark else {})
    env |= {name: _fill(text, values, f"serve.env.{name}") for name, text in given.items()}
    inherited = INHERITED_BY_CLIENTS if contained else INHERITED
    passed = {*env, *inherited}
    dropped = sorted(name for name in machine.environ if name.startswith(_TELLING) and name not in passed)
    return Launch(
        argv=tuple(_fill(part, values, "serve.argv") for part in argv),
        env=env,
        inherited=inherited,
        secrets={KEY_VARIABLE: str(layout.api_key_file)} if layout.api_key_file else {},
        env_file=env_file,
        limits={} if contained else _LIMITS | (_GPU_LIMITS if profile.hardware.gpus else {}),
        cwd=str(layout.dirs.state / "cwd"),
        cache=str(cache),
        dropped=tuple(dropped),
        notes=tuple(notes),
    )


def _values(layout: Layout, machine: Machine, store: str, cache: Path) -> tuple[dict[str, str], list[str]]:
    """Placeholder -> value, and what has to be said about them."""
    notes = []
    wanted = [index for _, indices in layout.gpu_groups for index in indices]
    unknown = [index for index in wanted if index not in machine.gpus]
    if unknown and machine.gpus:
        notes.append(f"GPU {', '.join(map(str, unknown))} is not there: NVML lists {len(machine.gpus)}")
    elif unknown:
        notes.append("GPUs by index, not by UUID: NVML could not be asked")
    names = {index: str(index) if unknown else machine.gpus[index] for index in wanted}

    def listed(indices: tuple[int, ...] | list[int]) -> str:
        return ",".join(names[index] for index in indices)

    return {
        "python": str(layout.python),
        "model": str(layout.model_dir),
        "models": str(layout.model_dir.parent),
        "model_name": layout.model_dir.name,
        "host": layout.host,
        "port": str(layout.port),
        "engram": store,
        "cache": str(cache),
        "image": layout.profile.engine.image,
        "gpus": listed(wanted),
        **{f"gpus_{name}": listed(indices) for name, indices in layout.gpu_groups},
    }, notes


def as_told(profile: Profile, host: str, port: int) -> Profile:
    """The profile as an engine at `host` and `port` is told it: ${host} and ${port} are filled and `$$` is `$`, in the
    command line and the environment alike; what depends on folders or GPUs stays. For judging, not for starting.
    """
    values = {"host": host, "port": str(port)}

    def fill(text: str) -> str:
        return string.Template(text).safe_substitute(values)

    serve = profile.serve.model_copy(
        update={
            "host": host,
            "port": port,
            "argv": tuple(fill(word) for word in profile.serve.argv),
            "dspark_argv": tuple(fill(word) for word in profile.serve.dspark_argv),
            "env": {name: fill(text) for name, text in profile.serve.env.items()},
            "dspark_env": {name: fill(text) for name, text in profile.serve.dspark_env.items()},
        }
    )
    return profile.model_copy(update={"serve": serve})


def passed_on(profile: Profile) -> dict[str, str]:
    """What the profile gives the engine: [serve.env], and `-e NAME=VALUE` of a container's command line."""
    words = profile.serve.argv
    options = [word for flag, word in pairwise(words) if flag in ("-e", "--env")]
    options += [word.removeprefix("--env=") for word in words if word.startswith("--env=")]
    given = {name: value for name, equals, value in (word.partition("=") for word in options) if equals}
    return {**profile.serve.env, **profile.serve.dspark_env, **(given if profile.engine.kind == "container" else {})}


def _fill(template: str, values: dict[str, str], where: str) -> str:
    try:
        return string.Template(template).substitute(values)
    except (KeyError, ValueError) as error:
        known = " ".join(f"${{{name}}}" for name in values)
        raise ConfigError(f"{where}: {template!r}: unknown placeholder {error}; known: {known}") from None


def masked(env: Mapping[str, str]) -> dict[str, str]:
    """The environment with secrets masked, for output."""
    return {name: mask_value(name, value) for name, value in env.items()}


_ULIMIT = {"nofile": "-n", "core": "-c", "memlock": "-l", "stack": "-s"}


def as_shell(start: Launch) -> list[str]:
    """The same start as a paste-ready shell script with its secrets masked: one option a line.

    A key that lies in a file is read from there by the script, and appears in the environment only.
    """
    lines = [f"mkdir -p {shlex.quote(start.cwd)} && cd {shlex.quote(start.cwd)} || exit 1"]
    if start.env_file:
        lines.append("umask 077")
        parts = " ".join(f'"{name}=$(cat {shlex.quote(path)})"' for name, path in start.secrets.items())
        lines.append(f"printf '%s\\n' {parts} > {shlex.quote(start.env_file)}")
    for name, value in start.limits.items():
        # a hard limit below is not ours to raise: the engine's own start does as much as it may and says so
        word = "unlimited" if value == UNLIMITED else str(value)
        lines.append(f"ulimit -S {_ULIMIT[name]} {word} 2>/dev/null")
    if start.inherited == INHERITED:
        lines.append("env -i \\")
        lines += [f'  ${{{name}:+{name}="${name}"}} \\' for name in start.inherited]
        lines += [f"  {name}={shlex.quote(value)} \\" for name, value in sorted(masked(start.env).items())]
        lines += [f'  {name}="$(cat {shlex.quote(path)})" \\' for name, path in start.secrets.items()]
    groups: list[list[str]] = []
    for part in mask_argv(start.argv):
        if part.startswith("-") or not groups:
            groups.append([part])
        else:
            groups[-1].append(part)
    shown = [" ".join(shlex.quote(part) for part in group) for group in groups]
    return lines + [
        ("  " if index else "") + text + (" \\" if index < len(shown) - 1 else "") for index, text in enumerate(shown)
    ]
