"""Profile: one machine, one engine pin, one pack, as frozen data; every number carries its source."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from ds41ctl.core.errors import ConfigError
from ds41ctl.core.nearest import nearest

PROFILE_SCHEMA = 1

# pydantic's regular expressions are Rust's: `$` is the end of the text and does not accept a trailing newline
Revision = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{40}$")]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Port = Annotated[int, Field(ge=1, le=65535)]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Hardware(_Model):
    """The machine the profile is for. GPU fields are empty for a profile without GPUs."""

    gpus: int = Field(ge=0, description="number of GPUs")
    gpu_name: str = Field("", description="name as NVML reports it")
    compute_capability: str = Field("", description="for example 7.0")
    vram_mib_min: int = Field(0, ge=0, description="smallest acceptable total memory of each GPU, MiB")
    ram_gib_min: float = Field(ge=0, description="host memory needed beside the Engram store, GiB")
    gpu_groups: dict[str, tuple[int, ...]] = Field(
        default_factory=dict,
        description="tensor-parallel groups by name; each must be all-NVLink when nvlink is set",
    )
    nvlink: bool = False
    p2p: bool = False


class HubSource(_Model):
    """Files of one Hub repository at one commit."""

    kind: Literal["hub"] = "hub"
    repo: str
    revision: Revision
    patterns: tuple[str, ...] = ("*",)
    what: str = ""


class RecipeSource(_Model):
    """A pack that this package generates itself, bit-exactly, from a committed recipe."""

    kind: Literal["recipe"] = "recipe"
    recipe: str
    what: str = ""


class LocalSource(_Model):
    """A folder the user made: nothing pins its bytes, so only its own headers and index can be checked."""

    kind: Literal["local"] = "local"
    what: str = ""


Source = Annotated[HubSource | RecipeSource | LocalSource, Field(discriminator="kind")]


class EngramTable(_Model):
    """One Engram layer: `rows` of 264 bytes (256 B F8_E4M3 + 8 B UE8M0), held by `shard`."""

    layer: int = Field(ge=0)
    rows: int = Field(gt=0)
    shard: str


class Model(_Model):
    """The pack: where it comes from and what must be true of it."""

    served_name: str
    dir: str = Field(description="folder below the data folder; DS41_MODEL overrides it")
    sources: tuple[Source, ...]
    vocab_size: int = Field(gt=0)
    compressed_vocab_size: int = Field(gt=0, description="ids after the Engram token map")
    engram: tuple[EngramTable, ...]

    @property
    def engram_layers(self) -> tuple[int, ...]:
        """Layer ids that own an Engram table."""
        return tuple(table.layer for table in self.engram)


class Engine(_Model):
    """The pinned engine."""

    kind: Literal["venv", "container"]
    name: str = Field(description="folder below <data>/engines, or the container's name")
    python: str = Field(
        "", description="venv: version the engine's wheel needs, for example 3.12 (empty: the CLI's own)"
    )
    lock: str = Field("", description="venv: fully pinned requirements in engine_patches/locks")
    torch: str = Field("", description="venv: torch requirement, installed first and alone")
    torch_index: str = Field("", description="venv: index asked only when the configured indexes lack that torch")
    plugin: bool = Field(False, description="venv: install ds41_engine into it")
    wheel: str = Field("", description="venv: file name of the engine wheel when it is not in the lock")
    wheel_url: str = ""
    wheel_sha256: Sha256 | Literal[""] = ""
    image: str = Field("", description="container: image reference")
    image_digest: str = Field("", description="container: sha256:... when the image is published")
    build: str = Field("", description="container: how the image is made when it is not published")
    notices: tuple[str, ...] = ()


class Marker(_Model):
    """A log line that must (or must not) appear while the engine starts; `count` is the least number of times."""

    text: str
    count: int = Field(1, ge=1)
    why: str = ""


class Serve(_Model):
    """How the engine is started. `argv`/`env` are templates: ${python} ${model} ${host} ${port} ${engram} ${cache}."""

    host: str = "127.0.0.1"
    port: Port
    argv: tuple[str, ...]
    dspark_argv: tuple[str, ...] = Field((), description="appended while the drafter is on")
    dspark: bool = False
    env: dict[str, str] = Field(default_factory=dict)
    ready_timeout_s: float = Field(gt=0, description="upper bound of a start; progress is judged long before")
    stall_timeout_s: float = Field(gt=0, description="a start whose log and CPU time stand still this long is dead")
    required_markers: tuple[Marker, ...] = ()
    forbidden_markers: tuple[Marker, ...] = ()
    max_model_len: int = Field(gt=0)
    max_num_seqs: int = Field(gt=0)


class Engram(_Model):
    """Where the tables live while the engine runs."""

    storage: Literal["tmpfs", "hugetlb", "none"]
    dir: str = Field("", description="absolute folder; empty: chosen below /dev/shm or the state folder")
    size_gib: float = Field(0, ge=0, description="tmpfs size; 0 computes it from the tables")
    page: Literal["", "4K", "2M", "1G"] = ""


class Clocks(_Model):
    """SM clock to lock. None leaves the clocks alone."""

    sm_mhz: int | None = None
    governor: str = ""


class Smoke(_Model):
    """What the model behind this profile can be asked."""

    canaries: str = Field(description="folder of profiles/packs with trained canaries, or `random` for a real model")
    copies: int = Field(20, ge=1)
    images: bool = True
    needle_tokens: int = Field(1300, ge=0, description="length of the needle prompt, tokens; 0 skips it")
    image_limit: int | None = Field(None, ge=1, description="pictures a prompt may hold; None: no limit is checked")
    restart_exact: bool = Field(False, description="prompt log-probabilities are bit-identical after a restart")
    perplexity_change_max: float = Field(0.01, ge=0, le=1, description="share of perplexity that may be lost")
    kl_max: float | None = Field(None, gt=0, description="largest mean KL per position to a reference, nats")
    batch_exact: bool = Field(False, description="answers in a batch must be those of a request alone")
    decode_tps_expected: float | None = Field(
        None, description="streamed decode rate published for this profile, tok/s"
    )


class Soak(_Model):
    """How a soak works the engine and what it must keep to pass. The defaults are this project's targets (T20); a
    profile that sets a number of its own gives its source."""

    minutes: float = Field(30, gt=0, le=10_080, description="length of `soak run` without --minutes")
    sample_s: float = Field(5, ge=0.2, le=300, description="seconds between two samples of engine, host and GPUs")
    canary_minutes: float = Field(5, gt=0, le=240, description="minutes between two rounds of canaries")
    session_tokens: int = Field(0, ge=0, description="context a session grows to; 0: half of serve.max_model_len")
    answer_tokens: int = Field(64, ge=8, le=4096, description="tokens of an answer to a fresh request")
    cancel_share: float = Field(0.1, ge=0, le=0.5, description="share of the requests that is hung up on mid-way")
    min_turns: int = Field(20, ge=5, description="fewer finished turns than this prove nothing")
    decode_retention_min: float = Field(
        0.95, gt=0, le=1, description="decode rate, median of the last fifth over median of the first"
    )
    decode_retention_warn: float = Field(0.98, gt=0, le=1)
    ttft_ratio_max: float = Field(1.5, ge=1, description="TTFT p95, last fifth over first")
    vram_growth_mib_max: float = Field(200, ge=0, description="a GPU, after the warm baseline")
    rss_gib_per_hour_max: float = Field(1.0, gt=0, description="host memory of the engine's processes")
    kv_idle_margin: float = Field(0.01, ge=0, lt=1, description="KV use after a drain, above the idle level")
    acceptance_min: float | None = Field(None, ge=0, le=1, description="drafter: accepted over drafted tokens")
    clock_margin_mhz: int = Field(15, ge=0, le=1000, description="how far below clocks.sm_mhz is still locked")
    clock_share_min: float = Field(0.99, gt=0, le=1, description="share of samples under load at the locked clock")
    stall_s: float = Field(120, gt=0, description="requests running and no token for this long is a dead engine")
    repeat: bool = Field(True, description="three answers at temperature 0 must be identical")
    keep: int = Field(30, ge=1, le=10_000, description="runs kept")


class Bench(_Model):
    """What `bench` measures on this profile."""

    decode_tokens: int = Field(400, ge=8, le=8192, description="cap of an answer, as seed 004")
    concurrency: tuple[int, ...] = Field((1, 2, 4, 8), description="streams at once; above serve.max_num_seqs left out")
    prefill_tokens: tuple[int, ...] = Field((8192, 32768, 131072), description="lengths of cold prompts")
    prefill_runs: int = Field(3, ge=1, le=99, description="the median of this many")
    during_prefill_tokens: int = Field(
        32768, ge=0, description="prompt beside which one stream decodes; 0: not measured"
    )
    logprob_window: int = Field(512, ge=16, description="longest prompt that prompt_logprobs may be asked for")
    published: dict[str, float] = Field(default_factory=dict, description="row -> figure its author published")


class Profile(_Model):
    """One profile file."""

    schema_version: int = Field(alias="schema")
    name: str
    title: str
    state: Literal["measured", "never run on the real card"]
    lacks: tuple[str, ...] = Field((), description="what this version cannot do for this profile yet")
    hardware: Hardware
    model: Model
    engine: Engine
    serve: Serve
    engram: Engram
    clocks: Clocks = Clocks()
    smoke: Smoke
    soak: Soak = Soak()
    bench: Bench = Bench()
    provenance: dict[str, str] = Field(description="dotted key or prefix -> source of the numbers below it")

    @model_validator(mode="after")
    def _consistent(self) -> Profile:
        if self.schema_version != PROFILE_SCHEMA:
            raise ValueError(f"schema {self.schema_version} is not known (this version reads {PROFILE_SCHEMA})")
        used = [index for group in self.hardware.gpu_groups.values() for index in group]
        if len(used) != len(set(used)):
            raise ValueError("hardware.gpu_groups overlap: each GPU belongs to one group")
        if self.hardware.gpu_groups and len(used) != self.hardware.gpus:
            raise ValueError(f"hardware.gpu_groups name {len(used)} GPUs, hardware.gpus says {self.hardware.gpus}")
        if self.engine.kind == "container" and not self.engine.image:
            raise ValueError("engine.image is missing for a container engine")
        tree = self.model_dump(by_alias=True)
        # the defaults of these two are the project's own; what a profile sets needs a source
        tree |= {"soak": self.soak.model_dump(exclude_unset=True), "bench": self.bench.model_dump(exclude_unset=True)}
        uncovered = [key for key in _number_keys(tree) if not self._source_of(key)]
        if uncovered:
            raise ValueError("numbers without a source in [provenance]: " + ", ".join(uncovered))
        return self

    def _source_of(self, key: str) -> str:
        parts = key.split(".")
        for end in range(len(parts), 0, -1):
            source = self.provenance.get(".".join(parts[:end]))
            if source:
                return source
        return ""

    def source_of(self, key: str) -> str:
        """Source of the number at dotted `key` (longest matching prefix), '' when none is given."""
        return self._source_of(key)

    def digest(self) -> str:
        """sha256 of the profile's canonical JSON: what runs and reports are compared by."""
        text = json.dumps(self.model_dump(mode="json", by_alias=True), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


_UNSOURCED = {"schema", "hardware.gpus", "serve.port"}  # structure and choice, not measurements


def _number_keys(tree: Any, prefix: str = "") -> list[str]:
    """Dotted keys of all non-zero numbers of a profile tree that need a source."""
    if isinstance(tree, bool) or prefix.startswith("hardware.gpu_groups"):
        return []
    if isinstance(tree, int | float):
        return [prefix] if tree and prefix not in _UNSOURCED else []
    if isinstance(tree, dict):
        return [key for name, sub in tree.items() for key in _number_keys(sub, f"{prefix}.{name}".lstrip("."))]
    if isinstance(tree, list | tuple):
        found: list[str] = []
        for sub in tree:
            if isinstance(sub, dict) and not prefix.endswith("_markers"):
                found += _number_keys(sub, prefix)
        return found
    return []


def problems(error: ValidationError, tree: dict[str, Any]) -> list[str]:
    """One line a problem of a pydantic error, unknown keys with the near name."""
    lines = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            known = _fields_at(item["loc"][:-1])
            hint = nearest(str(item["loc"][-1]), known)
            lines.append(f"unknown key {where}" + (f"; did you mean {hint}?" if hint else ""))
        else:
            text = re.sub(r"^Value error, ", "", item["msg"])
            found = item.get("input")
            shown = "" if isinstance(found, dict | list | tuple) or item["type"] == "missing" else f", found {found!r}"
            lines.append(f"{where}: {text}{shown}" if where else text)
    return lines


def _fields_at(location: tuple[int | str, ...]) -> list[str]:
    model: Any = Profile
    for part in location:
        if isinstance(part, int):
            continue
        info = getattr(model, "model_fields", {}).get(part)
        model = info.annotation if info is not None else None
    fields = getattr(model, "model_fields", {})
    return [info.alias or name for name, info in fields.items()]


def parse_profile(text: str, origin: str) -> Profile:
    """Parse a profile TOML. Raises ConfigError naming every problem in one go."""
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{origin}: not valid TOML: {error}") from None
    try:
        return Profile.model_validate(tree)
    except ValidationError as error:
        lines = problems(error, tree)
        message = f"{origin}: {lines[0]}" if len(lines) == 1 else f"{origin}: {len(lines)} problems"
        raise ConfigError(
            message, detail=lines if len(lines) > 1 else (), hints=("ds41ctl profile check FILE",)
        ) from None


def json_schema() -> dict[str, Any]:
    """JSON Schema of a profile file (committed as profiles/schema.json; a test keeps it equal)."""
    return Profile.model_json_schema(by_alias=True)
