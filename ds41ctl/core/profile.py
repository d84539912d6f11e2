"""Profile: one machine, one engine pin, one pack, as frozen data; every number carries its source."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)

from ds41ctl.core.errors import ConfigError
from ds41ctl.core.nearest import nearest

PROFILE_SCHEMA = 1
IMAGE_ROOM = 2.0  # policy: an image that is built here needs its own size and as much again for layers and their cache

# pydantic's regular expressions are Rust's: `$` is the end of the text and does not accept a trailing newline
Revision = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{40}$")]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Digest = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]
Version = Annotated[str, StringConstraints(pattern=r"^[0-9]+(\.[0-9]+)+$")]
FileName = Annotated[str, StringConstraints(pattern=r"^[0-9A-Za-z_][0-9A-Za-z_.+-]*$")]
WebAddress = Annotated[str, StringConstraints(pattern=r"^https?://[^\s/@?#]+(/[^\s?#]*)?$")]
Repository = Annotated[str, StringConstraints(pattern=r"^((https?|ssh|git|file)://\S+|/\S+)$")]
Port = Annotated[int, Field(ge=1, le=65535)]
GpuIndex = Annotated[int, Field(ge=0, le=63)]
Gib = Annotated[float, Field(gt=0, le=4096)]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Hardware(_Model):
    """The machine the profile is for. GPU fields are empty for a profile without GPUs."""

    gpus: int = Field(ge=0, le=64, description="number of GPUs")
    gpu_name: str = Field("", description="name as NVML reports it")
    compute_capability: Version | Literal[""] = Field("", description="for example 7.0")
    vram_mib_min: int = Field(0, ge=0, le=1 << 20, description="smallest acceptable total memory of each GPU, MiB")
    ram_gib_min: float = Field(ge=0, le=16384, description="host memory needed beside the Engram store, GiB")
    gpu_groups: dict[str, tuple[GpuIndex, ...]] = Field(
        default_factory=dict,
        description="tensor-parallel groups by name; each must be all-NVLink when nvlink is set",
    )
    stage_weights_gib: tuple[Gib, ...] = Field((), description="weights a GPU of each group holds, GiB, in their order")
    nvlink: bool = False
    nvlinks_per_gpu: int = Field(0, ge=0, le=36, description="NVLink ports that must be up on each GPU; 0: not judged")
    p2p: bool = Field(False, description="the driver must allow peer access between every pair of GPUs")
    driver_min: Version | Literal[""] = Field("", description="oldest driver that runs the engine's CUDA")
    driver_measured: Version | Literal[""] = Field("", description="driver that the numbers were measured with")
    driver_open: bool = Field(False, description="the numbers were measured with NVIDIA's open kernel module")
    driver_branch_max: int = Field(
        0, ge=0, le=9999, description="newest driver branch that still knows the card; 0: any"
    )
    pcie_gen: int = Field(0, ge=0, le=7, description="PCIe generation the numbers were measured with; 0: not judged")
    pcie_width: int = Field(0, ge=0, le=32, description="PCIe lanes; 0: not judged")


class HubSource(_Model):
    """Files of one Hub repository at one commit."""

    kind: Literal["hub"] = "hub"
    repo: str
    revision: Revision
    patterns: tuple[str, ...] = ("*",)
    leave_out: tuple[str, ...] = Field(
        (), description="globs of tensor names that are not fetched out of the .safetensors files"
    )
    size_bytes: int = Field(
        0, ge=0, le=1 << 50, description="what this profile takes of the repository, bytes; 0: not stated"
    )
    dir: str = Field("", description="folder below the data folder; empty: the pack's own folder")
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

    layer: int = Field(ge=0, le=1023)
    rows: int = Field(gt=0, le=1 << 32)
    shard: str


class Graft(_Model):
    """A hybrid pack made of links: trunk and experts of two packs, some layers' experts of a third one.

    `trunk`, `experts` and `donor` are the `dir` of three sources.
    """

    trunk: str = Field(description="every tensor that is no routed expert, and the Engram tables")
    experts: str = Field(description="routed experts of the layers that are not grafted, and the EXL3 settings")
    donor: str = Field(description="routed experts of the grafted layers")
    layers: tuple[int, ...] = Field(min_length=1)
    bits: float = Field(gt=0, le=8, description="K of every grafted matrix, bits a weight")
    tensors: int = Field(gt=0, description="tensors the hybrid's index must name")
    grafted: int = Field(gt=0, description="tensors that must come from the donor")


class Model(_Model):
    """The pack: where it comes from and what must be true of it."""

    served_name: str
    dir: str = Field(description="folder below the data folder; DS41_MODEL overrides it")
    sources: tuple[Source, ...]
    vocab_size: int = Field(gt=0, le=1 << 24)
    compressed_vocab_size: int = Field(gt=0, le=1 << 24, description="ids after the Engram token map")
    engram: tuple[EngramTable, ...]
    graft: Graft | None = Field(None, description="set: the pack's folder is built from the sources' folders")

    @property
    def hub_sources(self) -> tuple[HubSource, ...]:
        """The sources that are downloaded."""
        return tuple(source for source in self.sources if isinstance(source, HubSource))

    @property
    def size_bytes(self) -> int | None:
        """What the Hub sources state together, bytes; None when one of them states nothing, or there is none."""
        sizes = [source.size_bytes for source in self.hub_sources]
        return sum(sizes) if sizes and all(sizes) else None

    @property
    def engram_layers(self) -> tuple[int, ...]:
        """Layer ids that own an Engram table."""
        return tuple(table.layer for table in self.engram)


class GpuKernels(_Model):
    """Kernels of ds41_kernels that `engine install` compiles for the profile's card and `engine verify` runs on it."""

    bits: tuple[Annotated[int, Field(ge=1, le=8)], ...] = Field(
        min_length=1, description="bits a weight of the pack's experts"
    )
    codebooks: tuple[Literal["3inst", "mcg", "mul1"], ...] = Field(
        min_length=1, description="EXL3 codebooks of the pack's experts"
    )


class BuildPatch(_Model):
    """A patch put on an image's source before it is built, as one commit of a repository holds it."""

    repo: Repository
    revision: Revision = Field(description="the commit names the patch's bytes")
    path: str = Field(
        min_length=1, description="file below the repository, or a pattern (*): all matches in their order"
    )
    sha256: Sha256 | Literal[""] = Field("", description="digest of the one file that `path` names")


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
    system_packages: bool = Field(
        False, description="venv: it sees the packages of the Python it is made with (CUDA libraries of an image)"
    )
    plugin: bool = Field(False, description="venv: install ds41_engine into it")
    gpu_kernels: GpuKernels | None = Field(None, description="venv: EXL3 kernels of ours to compile for the card")
    wheel: str = Field("", description="venv: file name of the engine wheel when it is not in the lock")
    wheel_url: str = Field("", description="the release's page, for people")
    wheel_assets: WebAddress | Literal[""] = Field(
        "", description="venv: address below which the release's files lie, `wheel` and `wheel_sums` among them"
    )
    wheel_sha256: Sha256 | Literal[""] = ""
    wheel_sums: FileName | Literal[""] = Field(
        "", description="venv: checksum file of the release whose entry pins the wheel"
    )
    wheel_sums_sha256: Sha256 | Literal[""] = Field(
        "", description="venv: digest of that checksum file; empty: asked once, with --accept-sums"
    )
    cuda: Version | Literal[""] = Field("", description="CUDA the engine is built for, for example 12.8")
    image: str = Field("", description="container: image reference")
    image_digest: Digest | Literal[""] = Field("", description="container: sha256:... when the image is published")
    build: str = Field("", description="container: how the image is made when it is not published")
    build_repo: Repository | Literal[""] = Field("", description="container: repository that commit is fetched from")
    build_revision: Revision | Literal[""] = Field("", description="container: commit the image is built from")
    build_patches: tuple[BuildPatch, ...] = Field((), description="container: put on that commit before the build")
    image_bytes: int = Field(0, ge=0, le=1 << 42, description="container: size of the image, bytes; 0: not known")
    notices: tuple[str, ...] = ()


class Marker(_Model):
    """A log line that must (or must not) appear while the engine starts; `count` is the least number of times."""

    text: str
    count: int = Field(1, ge=1, le=1024)
    why: str = ""


class Serve(_Model):
    """How the engine is started. `argv`/`env` are templates: ${python} ${model} ${host} ${port} ${engram} ${cache}."""

    host: str = "127.0.0.1"
    port: Port
    argv: tuple[str, ...]
    dspark_argv: tuple[str, ...] = Field((), description="appended while the drafter is on")
    dspark: bool = False
    env: dict[str, str] = Field(default_factory=dict)
    dspark_env: dict[str, str] = Field(default_factory=dict, description="set while the drafter is on")
    source: Literal["", "published", "imported", "partial", "inferred"] = Field(
        "",
        description="where argv and env come from: published word by word; imported from the engine's own launcher, or "
        "only a part of it; inferred from a text that states some of it. Not needed where state is measured",
    )
    launcher: str = Field("", description="the engine's own launcher in its source tree, for `profile import`")
    launcher_env: str = Field("", description="the environment file it is used with")
    numa: Literal["", "interleave"] = Field("", description="where the engine's host memory goes; empty: the default")
    cudagraph_mode: str = Field(
        "", description="CUDA-graph mode the engine must report at its start; empty: not judged"
    )
    ready_timeout_s: float = Field(gt=0, le=86400, description="upper bound of a start; progress is judged long before")
    stall_timeout_s: float = Field(
        gt=0, le=86400, description="a start whose log and CPU time stand still this long is dead"
    )
    required_markers: tuple[Marker, ...] = ()
    forbidden_markers: tuple[Marker, ...] = ()
    max_model_len: int = Field(gt=0, le=1 << 24, description="longest context, tokens")
    max_num_seqs: int = Field(gt=0, le=4096, description="requests computed at the same time")
    max_num_batched_tokens: int | None = Field(None, ge=16, le=1 << 20, description="tokens of one engine step")
    gpu_memory_utilization: float | None = Field(
        None, ge=0.1, le=0.99, description="share of each GPU the engine may take; 1.0 leaves the driver nothing"
    )
    tensor_parallel_size: int | None = Field(None, ge=1, le=64)
    pipeline_parallel_size: int | None = Field(None, ge=1, le=64)
    pipeline_cut: int | None = Field(None, ge=1, le=1024, description="first layer of pipeline stage 2")
    spec_tokens: int | None = Field(
        None, ge=0, le=64, description="draft tokens while the drafter is on; 0: no drafter"
    )
    kv_pool_tokens: int | None = Field(
        None, ge=1, le=1 << 32, description="KV cache the engine must report at its start, tokens"
    )
    kv_pool_tolerance: float = Field(0.01, ge=0, le=0.5, description="accepted deviation from kv_pool_tokens")
    kv_pool_at: dict[str, Annotated[int, Field(ge=1)]] = Field(
        default_factory=dict, description="KV cache measured at other shares of GPU memory: share -> tokens"
    )
    context_by_chunk: dict[str, Annotated[int, Field(ge=1)]] = Field(
        default_factory=dict, description="tokens of one engine step -> longest context that fits beside them"
    )
    prompt_logprobs: bool = Field(False, description="clients ask for prompt_logprobs, which needs memory of its own")


class Engram(_Model):
    """Where the tables live while the engine runs, and in what form."""

    storage: Literal["tmpfs", "hugetlb", "disk", "engine", "none"] = Field(
        description="tmpfs and hugetlb are memory; disk reads each row from a drive, for machines without the memory; "
        "engine: it keeps the tables itself and fills them from the pack, which its plugin, or the growth of the "
        "host's memory, proves"
    )
    format: Literal["records", "shards"] = Field(
        "records",
        description="what the store holds. records: rows of 264 bytes, read by ds41_engine; shards: copies of the "
        "pack's Engram shards and an index that names their tables, for an engine that reads safetensors",
    )
    dir: str = Field(
        "",
        description="absolute folder; a memory filesystem is mounted there unless it lies on one. Empty: chosen below "
        "/dev/shm or the state folder",
    )
    size_gib: float = Field(0, ge=0, le=16384, description="tmpfs size; 0 computes it from the tables")
    host_copies: int = Field(
        0,
        ge=0,
        le=64,
        description="storage engine: whole copies of the tables the engine keeps in host memory; 0: not judged",
    )
    page: Literal["", "4K", "2M", "1G"] = Field("", description="page size; empty: the best there is")

    @property
    def own_store(self) -> bool:
        """True when ds41ctl builds the store that the engine reads."""
        return self.storage not in ("none", "engine")


class Clocks(_Model):
    """What of the GPUs is set while the engine lives, and given back. None leaves it alone."""

    sm_mhz: int | None = Field(None, ge=100, le=5000, description="SM clock to lock, MHz")
    power_limit_w: float | None = Field(None, ge=50, le=2000, description="power limit of each GPU, W")
    offset_mhz: int | None = Field(
        None, ge=-1000, le=1000, description="graphics clock offset in performance state 0, MHz"
    )
    governor: Literal["", "performance", "powersave", "schedutil", "ondemand", "conservative", "userspace"] = ""

    @property
    def touched(self) -> bool:
        """Something of the GPUs is to be set."""
        return (self.sm_mhz, self.power_limit_w, self.offset_mhz) != (None, None, None)


class Smoke(_Model):
    """What the model behind this profile can be asked."""

    canaries: str = Field(description="folder of profiles/packs with trained canaries, or `random` for a real model")
    copies: int = Field(20, ge=1, le=1000)
    images: bool = True
    needle_tokens: int = Field(1300, ge=0, le=1 << 24, description="length of the needle prompt, tokens; 0 skips it")
    image_limit: int | None = Field(
        None, ge=1, le=4096, description="pictures a prompt may hold; None: no limit is checked"
    )
    restart_exact: bool = Field(False, description="prompt log-probabilities are bit-identical after a restart")
    perplexity_change_max: float = Field(0.01, ge=0, le=1, description="share of perplexity that may be lost")
    kl_max: float | None = Field(None, gt=0, le=1e6, description="largest mean KL per position to a reference, nats")
    batch_exact: bool = Field(False, description="answers in a batch must be those of a request alone")
    image_tokens_max: int | None = Field(
        None, ge=1, le=1 << 20, description="prompt tokens that one picture may become; None: not checked"
    )


class Gate(_Model):
    """What the engine's distributions may differ by from the fp32 oracle's."""

    kl_max: float | None = Field(None, gt=0, le=100, description="largest mean divergence of a position, nats")


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
    first_acceptance_min: float | None = Field(
        None, ge=0, le=1, description="drafter: share of the steps whose first draft is accepted, for code in a chat"
    )
    vram_headroom_mib_min: float | None = Field(
        None, ge=0, description="memory that each GPU must have left at the highest sample, MiB; None: not judged"
    )
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
    prefill_texts: tuple[int, ...] = Field(
        (), description="lengths of the texts of the row prefill.texts: the median over prefill_runs cold runs of each"
    )
    context_tokens: tuple[int, ...] = Field(
        (8192, 32768, 131072), description="prompts after which decode is measured (rows decode.SUITE.c1@TOKENS)"
    )
    during_prefill_tokens: int = Field(
        32768, ge=0, description="prompt beside which one stream decodes; 0: not measured"
    )
    logprob_window: int | None = Field(
        None, ge=0, description="longest prompt the engine has room to answer prompt_logprobs for; unset: not known"
    )
    published: dict[str, float] = Field(
        default_factory=dict, description="row -> figure its author published, with the drafter as this profile has it"
    )
    published_plain: dict[str, float] = Field(
        default_factory=dict, description="row -> figure its author published without the drafter that this profile has"
    )


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
    gate: Gate = Gate()
    soak: Soak = Soak()
    bench: Bench = Bench()
    provenance: dict[str, str] = Field(description="dotted key or prefix -> source of the numbers below it")

    @model_validator(mode="after")
    def _consistent(self) -> Profile:
        tree = self.model_dump(by_alias=True)
        # the defaults of these two are the project's own; what a profile sets needs a source
        tree |= {"soak": self.soak.model_dump(exclude_unset=True), "bench": self.bench.model_dump(exclude_unset=True)}
        faults = disagreements(tree)
        if faults:
            raise ValueError("\n".join(faults))
        return self

    @property
    def drafter(self) -> bool:
        """True when the engine drafts tokens as this profile starts it."""
        return self.drafter_in(self.serve.argv + (self.serve.dspark_argv if self.serve.dspark else ()))

    def drafter_in(self, argv: tuple[str, ...]) -> bool:
        """True when an engine started with `argv` drafts tokens."""
        if any(word.startswith("--spec") or word == "-sc" for word in argv):
            return True
        added = self.serve.dspark_argv
        return bool(added) and any(argv[at : at + len(added)] == added for at in range(len(argv)))

    def figures(self, drafter: bool | None) -> dict[str, float]:
        """Published figures for an engine with this drafter setting (None: not known): row -> tok/s.

        Empty when none were published for that setting, or when it matters and nobody knows it.
        """
        if drafter is None:
            return {} if self.serve.dspark_argv else self.bench.published
        if drafter == self.drafter:
            return self.bench.published
        return {} if drafter else self.bench.published_plain

    def source_of(self, key: str) -> str:
        """Source of the number at dotted `key` (longest matching prefix), '' when none is given."""
        return _source(self.provenance, key)

    def digest(self) -> str:
        """sha256 of the profile's canonical JSON: what runs and reports are compared by."""
        text = json.dumps(self.model_dump(mode="json", by_alias=True), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def disagreements(tree: dict[str, Any]) -> list[str]:
    """What the parts of a profile say against each other, one line with its path each.

    Works on the raw tree, valid or not, so that these problems are named together with those of single fields.
    """
    engine, hardware, serve = (_table(tree, name) for name in ("engine", "hardware", "serve"))
    faults = []
    if tree.get("schema") != PROFILE_SCHEMA:
        faults.append(f"schema: {tree.get('schema')} is not known (this version reads {PROFILE_SCHEMA})")
    faults += _group_faults(hardware)
    faults += _pin_faults(engine)
    faults += _argv_faults(serve)
    faults += _graft_faults(_table(tree, "model"))
    faults += _pool_faults(serve)
    faults += _engram_faults(_table(tree, "engram"))
    if serve.get("host") == "":
        faults.append("serve.host: is empty")
    provenance = _table(tree, "provenance")
    uncovered = [key for key in _number_keys(tree) if not _source(provenance, key)]
    if uncovered:
        faults.append("provenance: numbers without a source: " + ", ".join(uncovered))
    return faults


def _table(tree: dict[str, Any], name: str) -> dict[str, Any]:
    found = tree.get(name)
    return found if isinstance(found, dict) else {}


def _source(provenance: dict[str, Any], key: str) -> str:
    """The entry of the longest prefix of a dotted key, '' when there is none."""
    parts = key.split(".")
    for end in range(len(parts), 0, -1):
        source = provenance.get(".".join(parts[:end]))
        if source:
            return str(source)
    return ""


def _graft_faults(model: dict[str, Any]) -> list[str]:
    graft, sources = _table(model, "graft"), model.get("sources")
    dirs = {source.get("dir") for source in sources or () if isinstance(source, dict)} - {"", None}
    parts = ("trunk", "experts", "donor") if graft else ()
    return [f"model.graft.{part}: is the dir of no source" for part in parts if graft.get(part) not in dirs]


def _engram_faults(engram: dict[str, Any]) -> list[str]:
    faults = []
    if engram.get("format") == "shards" and engram.get("storage") == "hugetlb":
        # measured: ftruncate of a hugetlbfs file to anything but whole pages is EINVAL, and a reader of safetensors
        # compares the file's size with its header
        faults.append("engram.storage: files of a hugetlbfs are whole pages, shards are not; use tmpfs")
    if engram.get("host_copies") and engram.get("storage") != "engine":
        faults.append("engram.host_copies: is for storage engine; the store of ds41ctl is one copy for all ranks")
    return faults


def _group_faults(hardware: dict[str, Any]) -> list[str]:
    faults = []
    groups = _table(hardware, "gpu_groups")
    used = [index for group in groups.values() if isinstance(group, list | tuple) for index in group]
    if len(used) != len(set(map(str, used))):
        faults.append("hardware.gpu_groups: overlap; each GPU belongs to one group")
    if groups and len(used) != hardware.get("gpus"):
        faults.append(f"hardware.gpu_groups: name {len(used)} GPUs, hardware.gpus says {hardware.get('gpus')}")
    weights = hardware.get("stage_weights_gib") or ()
    if isinstance(weights, list | tuple) and weights and len(weights) != len(groups):
        faults.append(f"hardware.stage_weights_gib: {len(weights)} values for {len(groups)} gpu_groups")
    return faults


def _pin_faults(engine: dict[str, Any]) -> list[str]:
    """Every engine is pinned by a digest, a checksum file's entry, a lock with digests, or a full commit."""
    faults = []
    if engine.get("wheel") and not (engine.get("wheel_sha256") or engine.get("wheel_sums")):
        faults.append("engine.wheel: nothing pins it; give wheel_sha256, or wheel_sums (a SHA256SUMS of the release)")
    if engine.get("kind") == "container":
        if not engine.get("image"):
            faults.append("engine.image: is missing for a container engine")
        elif not (engine.get("image_digest") or engine.get("build_revision")):
            faults.append("engine.image: nothing pins it; give image_digest, or build_revision (a full commit)")
    patches = engine.get("build_patches") or ()
    for number, patch in enumerate(patches if isinstance(patches, list | tuple) else ()):
        if isinstance(patch, dict) and patch.get("sha256") and "*" in str(patch.get("path")):
            faults.append(f"engine.build_patches.{number}.sha256: one digest for a pattern; name one file")
    return faults


def _argv_faults(serve: dict[str, Any]) -> list[str]:
    """The engine is told what the profile says: an option and the field that judges it agree."""
    faults = []
    argv = serve.get("argv")
    words = tuple(str(word) for word in argv) if isinstance(argv, list | tuple) else ()
    for option in (
        "--max-model-len",
        "--max-num-seqs",
        "--max-num-batched-tokens",
        "--gpu-memory-utilization",
        "--tensor-parallel-size",
        "--pipeline-parallel-size",
    ):
        field = option.removeprefix("--").replace("-", "_")
        value, told = serve.get(field), option_value(words, option)
        if value is not None and told is not None and "$" not in told and not _same(told, value):
            faults.append(f"serve.{field}: {value} here, {option} {told} in serve.argv")
    return faults


def _pool_faults(serve: dict[str, Any]) -> list[str]:
    """The KV pool to expect is the one that was measured at this share of memory."""
    share, pools = serve.get("gpu_memory_utilization"), _table(serve, "kv_pool_at")
    if not isinstance(share, int | float):
        return []
    measured = pools.get(f"{share:g}")
    if measured is None or measured == serve.get("kv_pool_tokens"):
        return []
    return [
        f"serve.kv_pool_tokens: {serve.get('kv_pool_tokens')} here, {measured} was measured at "
        f"gpu_memory_utilization {share:g} (serve.kv_pool_at)"
    ]


def _same(told: str, value: Any) -> bool:
    """Does an option say what a field says? `0.90` is 0.9."""
    try:
        return told == str(value) or float(told) == value
    except ValueError:
        return False


def option_value(argv: tuple[str, ...], option: str) -> str | None:
    """Value of `--option value` or `--option=value` (the last one counts), None when it is not given."""
    found = None
    for position, word in enumerate(argv):
        if word == option and position + 1 < len(argv):
            found = argv[position + 1]
        elif word.startswith(option + "="):
            found = word.removeprefix(option + "=")
    return found


# structure and choice, not measurements
_UNSOURCED = {"schema", "hardware.gpus", "serve.port", "serve.kv_pool_tolerance"}


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
            if not isinstance(sub, dict) or not prefix.endswith("_markers"):
                found += _number_keys(sub, prefix)
        return list(dict.fromkeys(found))
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
            if item["type"] == "value_error" and not where:
                lines += text.splitlines()
                continue
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
        # strict: `port = true` is not 1 and `port = "8011"` is not 8011; by way of JSON, whose arrays may be tuples
        return Profile.model_validate_json(json.dumps(tree, default=str), strict=True)
    except ValidationError as error:
        lines = problems(error, tree)
        lines += [line for line in disagreements(tree) if line not in lines]
        message = f"{origin}: {lines[0]}" if len(lines) == 1 else f"{origin}: {len(lines)} problems"
        raise ConfigError(
            message, detail=lines if len(lines) > 1 else (), hints=("ds41ctl profile check FILE",)
        ) from None


def json_schema() -> dict[str, Any]:
    """JSON Schema of a profile file (committed as profiles/schema.json; a test keeps it equal)."""
    return Profile.model_json_schema(by_alias=True)
