"""Recipes: a published recipe's JSON read into a profile, and a profile written as one. Pure; every value is judged.

A recipe is somebody else's text. It becomes data: words of a command line that no shell sees, variables by allow-list,
mounts only of the folders a profile has, the API on loopback. What has no place in a profile is listed, not guessed.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from ds41ctl.core import toml
from ds41ctl.core.errors import ConfigError
from ds41ctl.core.launchline import LaunchLine, parse
from ds41ctl.core.masking import secret_name
from ds41ctl.core.profile import Profile, option_value, parse_profile

LARGEST = 1 << 20  # bytes; the published ones have 14 KB
# the model this tool is for: constants of its checkpoint, from vLLM 0.33's code and the public shard headers
MODEL_REPO = "deepseek-ai/DeepSeek-V4.1-Flash-1017"
ENGRAM = (
    {"layer": 1, "rows": 384_006_168, "shard": "model-00047-of-00048.safetensors"},
    {"layer": 14, "rows": 384_016_682, "shard": "model-00048-of-00048.safetensors"},
)
ROUTED_GLOB = "layers.*.ffn.experts.*"  # what `non-expert tensors` leaves out: the drafter's experts are mtp.*
HEADLINE = "decode.code.c1"  # the row of bench that a recipe's one decode rate is kept as
ENGRAM_GIB = 189
TOKEN_MAP = "Built engram token map (129280 -> 99092 ids) for layers (1, 14)"  # noqa: S105 - a log line
_CARDS = {"cmp-170hx": "CMP 170HX", "v100-sxm2": "Tesla V100-SXM2-32GB"}
_SHA = re.compile(r"\b[0-9a-f]{40}\b")
# variables a recipe may give the engine
ENV_ALLOWED = re.compile(
    r"(?:VLLM|NCCL|DSV41|DS41|TORCH|TORCHINDUCTOR|PYTORCH|TRITON|CUDA|OMP|GLOO|TILELANG|FLASHINFER|SAFETENSORS)_\w+"
    r"|HF_HUB_OFFLINE|MAX_JOBS|PYTHONUNBUFFERED|TORCH_CUDA_ARCH_LIST"
)
ENV_REFUSED = re.compile(r"VLLM_API_KEY|VLLM_ALLOW_INSECURE\w*|VLLM_SERVER_DEV_MODE|\w*_ZERO$|DS41_ENGRAM_UNFILLED")
_ENV_REFUSED_WHY = "opens the server, carries a secret or empties the Engram"
# arguments of the engine that a recipe may not set
ARGUMENTS_REFUSED = {
    "--api-key": "the key comes from a file: DS41_API_KEY_FILE",
    "--trust-remote-code": "code of a model repository is never run",
    "--allowed-origins": "browsers of other sites would reach the API",
    "--ssl-keyfile": "terminate TLS in a reverse proxy",
    "--middleware": "imports code by name",
    "--tool-parser-plugin": "imports code by path",
    "--reasoning-parser-plugin": "imports code by path",
    "--logits-processors": "imports code by name",
    "--worker-cls": "imports code by name",
    "--worker-extension-cls": "imports code by name",
    "--scheduler-cls": "imports code by name",
}
# keys of config.env that say again what the launch line says
_REPEATED = {"BIND", "PORT", "IMAGE", "LAYOUT", "EXTRA_ARGS", "MAX_NUM_SEQS", "MAX_MODEL_LEN", "ENGRAM_HOST_DIR"}
_REPEATED |= {"GPU_MEMORY_UTILIZATION", "SPEC_TOKENS", "P2P", "ENGRAM_STORAGE"}


@dataclass
class Imported:
    """A profile's text, what of the recipe it does not hold, and what was changed to be safe."""

    text: str
    unmapped: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)


def load(raw: bytes, origin: str) -> dict[str, Any]:
    """Parse a recipe's bytes. Raises ConfigError for anything that is not a JSON object of a sane size."""
    if len(raw) > LARGEST:
        raise ConfigError(f"{origin}: {len(raw)} bytes, at most {LARGEST} expected of a recipe")
    try:
        tree = json.loads(raw.decode("utf-8-sig"))
        json.dumps(tree, ensure_ascii=False).encode()  # half a surrogate pair cannot be written anywhere
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{origin}: not JSON: {str(error)[:120]}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{origin}: a JSON object expected, found {type(tree).__name__}")
    return tree


def read(tree: dict[str, Any], name: str) -> Imported:
    """A recipe as the profile `name`. Raises ConfigError with every reason why it cannot be one."""
    require_name(name)
    config = _dict(tree, "config")
    launch = config.get("launch")
    if not isinstance(launch, list) or not launch or not all(isinstance(line, str) for line in launch):
        raise ConfigError("config.launch: a list of text lines expected")
    line = parse([str(item) for item in launch])
    models = [str(item.get("hf_repo")) for item in _list(tree, "models")]
    if MODEL_REPO not in models:
        raise ConfigError(f"models: {MODEL_REPO} expected, found {', '.join(models) or 'none'}")
    found = Imported("")
    argv, served_from = _argv(line, found)
    source = f"recipe {_text(tree, 'slug') or name}"
    profile: dict[str, Any] = {
        "schema": 1,
        "name": name,
        "title": _text(tree, "title") or name,
        "state": "never run on the real card",
        "lacks": [],
        "hardware": _hardware(tree, config),
        "model": _model(tree, argv, served_from, found),
        "engine": _engine(tree, line),
        "serve": _serve(config, line, argv, found),
        "engram": _engram(line),
        "smoke": _smoke(tree),
        "bench": _bench(tree),
        "provenance": {},
    }
    profile["provenance"] = _provenance(source, profile)
    _name_the_rest(tree, config, found)
    profile["lacks"] = [f"from the recipe, without a place in a profile: {text}" for text in found.unmapped]
    found.text = f"# Imported by ds41ctl from {source}. Look at what `lacks` names.\n" + toml.dumps(profile)
    parse_profile(found.text, f"{name}.toml")
    return found


def short_name(tree: dict[str, Any]) -> str:
    """A profile name from the recipe's slug: at most 40 characters, cut at a dash."""
    slug = re.sub(r"[^a-z0-9]+", "-", _text(tree, "slug").lower()).strip("-")
    while len(slug) > 40 and "-" in slug:
        slug = slug.rpartition("-")[0]
    return slug[:40] or "imported"


def require_name(name: str) -> None:
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,63}", name):
        raise ConfigError(f"profile name {name!r}: small letters, digits, dots and dashes expected")


def _dict(tree: dict[str, Any], key: str) -> dict[str, Any]:
    found = tree.get(key)
    return found if isinstance(found, dict) else {}


def _list(tree: dict[str, Any], key: str) -> list[dict[str, Any]]:
    found = tree.get(key)
    return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []


def _text(tree: dict[str, Any], key: str, longest: int = 200) -> str:
    found = tree.get(key)
    return re.sub(r"[\x00-\x1f\x7f]+", " ", found)[:longest].strip() if isinstance(found, str) else ""


def _number(value: Any) -> float | int | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    rounded = round(float(value), 6)
    return int(rounded) if rounded == int(rounded) else rounded


# ---- the launch line
def _argv(line: LaunchLine, found: Imported) -> tuple[list[str], str]:
    """The launch line as a template, and the pack's folder inside the container."""
    if not line.command or line.command[0] != "serve":
        raise ConfigError("the launch line must run `vllm serve MODEL`")
    model = line.command[1] if len(line.command) > 1 else ""
    if not re.fullmatch(r"/[A-Za-z0-9._-]+/[A-Za-z0-9][A-Za-z0-9._-]*", model):
        raise ConfigError(f"the launch line serves {model!r}: a folder below a mounted folder expected")
    root, _, served_from = model[1:].partition("/")
    argv = [line.runtime, "run"]
    env, mounts = iter(line.pairs), iter(line.mounts)
    published = False
    for option, value in _publish_in_place(line):
        short = {"--env": "-e", "--volume": "-v", "--detach": "-d", "--publish": "-p"}.get(option, option)
        if option == "--env":
            argv += _variable(*next(env), f"/{root}/{served_from}", found)
        elif option == "--volume":
            argv += ["-v", _mount(*next(mounts), f"/{root}")]
        elif option == "--publish":
            argv += ["-p", _address(str(value), found)]
            published = True
        elif option == "--restart":
            if value not in ("no", None):
                found.changed.append(f"--restart {value} is left out: ds41ctl watches the engine itself")
        else:
            argv += [short] if value is None else [short, literal(value)]
    if not published:
        raise ConfigError("the launch line publishes no port (-p)")
    argv += ["${image}", "serve", f"/{root}/${{model_name}}", *_arguments(line.command[2:], found)]
    return argv, served_from


def _publish_in_place(line: LaunchLine) -> list[tuple[str, str | None]]:
    """Options in their order; the address stands where the mounts end, as published lines have it."""
    places = [index for index, (name, _) in enumerate(line.options) if name == "--env"]
    at = places[0] if places else len(line.options)
    return [*line.options[:at], *(("--publish", value) for value in line.publish), *line.options[at:]]


def literal(text: str) -> str:
    return text.replace("$", "$$")


def _variable(name: str, value: str, model: str, found: Imported) -> list[str]:
    if ENV_REFUSED.fullmatch(name) and value.lower() not in ("", "0", "false"):
        raise ConfigError(f"the launch line sets {name}, which {_ENV_REFUSED_WHY}")
    if secret_name(name) or not ENV_ALLOWED.fullmatch(name):
        found.changed.append(f"{name} is not passed on: it is no variable of the engine")
        return []
    folder = literal(value)
    if value == model:
        folder = f"{model.rsplit('/', 1)[0]}/${{model_name}}"
    return ["-e", f"{name}={folder}"]


def _mount(host: str, target: str, flags: str, root: str) -> str:
    where = f"-v {host}:{target}"
    if ".." in host.split("/") or ".." in target.split("/") or not target.startswith("/"):
        raise ConfigError(f"the launch line mounts {where}: a path without `..` expected")
    tail = f":{target}" + (f":{flags}" if flags else "")
    if target == root:
        if flags != "ro":
            raise ConfigError(f"the launch line mounts {where} writable: the pack must be `:ro`")
        return "${models}" + tail
    if target == "/engram":
        return "${engram}" + (tail if "ro" in flags.split(",") else tail + ":ro")
    match = re.fullmatch(r"<CACHE_DIR>((?:/[A-Za-z0-9._-]+)*)", host)
    if match and target.startswith("/root/."):
        return "${cache}" + match[1] + tail
    raise ConfigError(f"the launch line mounts {where}: only the pack, the Engram store and caches may be mounted")


def _address(value: str, found: Imported) -> str:
    parts = value.rsplit(":", 2)
    if not all(part.isdecimal() for part in parts[-2:]) or len(parts) < 2:
        raise ConfigError(f"the launch line publishes {value!r}: ADDRESS:PORT:PORT expected")
    if len(parts) == 2 or parts[0] not in ("127.0.0.1", "localhost"):
        found.changed.append(f"-p {value} would be reachable from other machines: 127.0.0.1 instead")
    return "${host}:${port}:${port}"


def _arguments(words: list[str], found: Imported) -> list[str]:
    out: list[str] = []
    position = 0
    while position < len(words):
        word = words[position]
        name = word.partition("=")[0]
        takes = "=" not in word and position + 1 < len(words) and not words[position + 1].startswith("--")
        value = words[position + 1] if takes else None
        position += 2 if takes else 1
        if not name.startswith("--"):
            raise ConfigError(f"the launch line has {word[:60]!r} where an option is expected")
        if name in ARGUMENTS_REFUSED:
            found.changed.append(f"{name} is left out: {ARGUMENTS_REFUSED[name]}")
            continue
        if name == "--port":
            value = "${port}"
        elif name == "--chat-template" or (value is not None and ".." in value.split("/")):
            raise ConfigError(f"the launch line reads {value!r} ({name}): a path out of the pack")
        elif value is not None:
            value = literal(value)
        out += [literal(word)] if value is None else [name, value]
    return out


# ---- the parts of a profile
def _hardware(tree: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    cards = _list(tree, "hardware")
    count = sum(int(_number(card.get("device_count")) or 0) for card in cards)
    if len(cards) != 1 or not 1 <= count <= 64:
        raise ConfigError("hardware: one kind of card with a device_count of 1 to 64 expected")
    card = cards[0]
    name = _text(card, "card", 40)
    arch = next((tag[2:] for tag in tree.get("tags") or () if re.fullmatch(r"sm\d{2,3}", str(tag))), "")
    ram = _number(_dict(config, "storage_requirements").get("ram_gb"))
    return {
        "gpus": count,
        "gpu_name": _CARDS.get(name, name.upper().replace("-", " ")),
        "compute_capability": f"{arch[:-1]}.{arch[-1]}" if arch else None,
        "vram_mib_min": int((_number(card.get("vram_gb")) or 0) * 1000),
        "ram_gib_min": float(max(0, (ram or 0) - ENGRAM_GIB)),
        "p2p": _dict(config, "env").get("P2P") in (1, "1", True),
        "gpu_groups": {"a": list(range(count))},
    }


def _model(tree: dict[str, Any], argv: list[str], served_from: str, found: Imported) -> dict[str, Any]:
    sources = []
    for item in _list(tree, "artifacts"):
        if item.get("kind") != "model_weights":
            continue
        pointer, pin = _text(item, "pointer"), _text(item, "pin", 400)
        repo = re.fullmatch(r"https://huggingface\.co/([\w.-]+/[\w.-]+)", pointer)
        commit = _SHA.search(pin)
        if not repo or not commit:
            raise ConfigError(
                f"artifacts: {pointer!r} at {pin!r}: a huggingface.co repository and a full commit expected"
            )
        shards = re.search(r"shards (\d{5})-(\d{5})-of-(\d{5})", pin)
        patterns = None
        if shards:
            first, last, of = (int(part) for part in shards.groups())
            if not 1 <= first <= last <= of <= 999:
                raise ConfigError(f"artifacts: {pin!r} names no sane range of shards")
            patterns = [f"model-{number:05d}-of-{of:05d}.safetensors" for number in range(first, last + 1)]
        folder = f"models/{repo[1].rsplit('/', 1)[1]}"
        source = {"kind": "hub", "repo": repo[1], "revision": commit[0], "patterns": patterns}
        if repo[1] == MODEL_REPO and "non-expert tensors" in pin:
            source["leave_out"] = [ROUTED_GLOB]
        sources.append({**source, "dir": folder, "what": pin})
    if not sources:
        raise ConfigError("artifacts: no model_weights with a pinned commit")
    return {
        "served_name": option_value(tuple(argv), "--served-model-name") or "deepseek-v4.1-flash",
        "dir": f"models/{served_from}",
        "sources": sources,
        "vocab_size": 129280,
        "compressed_vocab_size": 99092,
        "graft": _graft(tree, sources, found),
        "engram": list(ENGRAM),
    }


def _graft(tree: dict[str, Any], sources: list[dict[str, Any]], found: Imported) -> dict[str, Any] | None:
    """A hybrid's graft, when the recipe states all of it."""
    donors = [(item, re.search(r"grafted into layers (\d+)-(\d+)", item["what"])) for item in sources]
    chosen = [(item, match) for item, match in donors if match]
    if not chosen:
        return None
    notes = _text(_dict(_dict(tree, "config"), "runtime"), "notes", 10_000)
    counts = re.search(r"([\d,]+) tensors, ([\d,]+) grafted at ([\d.]+) bits", notes)
    trunk = next((item for item in sources if item["repo"] == MODEL_REPO), None)
    others = [item for item in sources if item is not trunk and item is not chosen[0][0]]
    if not counts or trunk is None or len(others) != 1:
        found.unmapped.append("the graft: its tensor counts or its three sources are not stated")
        return None
    donor, layers = chosen[0]
    return {
        "trunk": trunk["dir"],
        "experts": others[0]["dir"],
        "donor": donor["dir"],
        "layers": list(range(int(layers[1]), int(layers[2]) + 1)),
        "bits": float(counts[3]),
        "tensors": int(counts[1].replace(",", "")),
        "grafted": int(counts[2].replace(",", "")),
    }


def _engine(tree: dict[str, Any], line: LaunchLine) -> dict[str, Any]:
    source = _dict(tree, "engine_source")
    note = _text(source, "install_note", 4000)
    digest = source.get("image_digest")
    commit = _SHA.search(note) or _SHA.search(str(source.get("pinned_commit") or ""))
    if not digest and not commit:
        raise ConfigError("engine_source: neither image_digest nor a full commit pins the image")
    agpl = "AGPL" in _text(tree, "license") or "AGPL" in note
    notice = "the image contains AGPL-3.0-only code: serving it over a network has duties (section 13)"
    return {
        "kind": "container",
        "name": line.name,
        "image": line.image,
        "image_digest": digest if isinstance(digest, str) else None,
        "build": note[:400] or None,
        "build_revision": commit[0] if commit else None,
        "build_repo": _repository(tree, commit[0]) if commit else None,
        "notices": [notice] if agpl else [],
    }


def _repository(tree: dict[str, Any], commit: str) -> str | None:
    """The repository that an artifact pins at this commit."""
    for item in _list(tree, "artifacts"):
        pointer = str(item.get("pointer") or "")
        if (
            item.get("pointer_type") == "git_commit"
            and commit in str(item.get("pin"))
            and pointer.startswith("https://")
        ):
            return pointer
    return None


def _serve(config: dict[str, Any], line: LaunchLine, argv: list[str], found: Imported) -> dict[str, Any]:
    told = tuple(argv)

    def integer(option: str) -> int | None:
        text = option_value(told, option)
        if text is not None and not text.isdecimal():
            raise ConfigError(f"the launch line's {option} is {text!r}, a whole number expected")
        return None if text is None else int(text)

    share = option_value(told, "--gpu-memory-utilization")
    speculative = option_value(told, "--speculative-config")
    graphs = re.search(r'"cudagraph_mode":\s*"(\w+)"', option_value(told, "--compilation-config") or "")
    port = _number(_dict(config, "env").get("PORT"))
    context, seqs = integer("--max-model-len"), integer("--max-num-seqs")
    if context is None or seqs is None:
        raise ConfigError("the launch line sets no --max-model-len or no --max-num-seqs")
    if port is None:
        port = int(line.publish[0].rsplit(":", 2)[-2])
    wait = line.env.get("VLLM_ENGINE_READY_TIMEOUT_S", "3600")
    try:
        draft = json.loads(speculative.replace("$$", "$")).get("num_speculative_tokens") if speculative else 0
        utilisation = None if share is None else float(share)
        ready = float(wait)
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"the launch line has a value that cannot be read: {error}") from None
    ranks = (integer("--tensor-parallel-size") or 1) * (integer("--pipeline-parallel-size") or 1)
    return {
        "source": "published",
        "host": "127.0.0.1",
        "port": port,
        "max_model_len": context,
        "max_num_seqs": seqs,
        "max_num_batched_tokens": integer("--max-num-batched-tokens"),
        "gpu_memory_utilization": utilisation,
        "tensor_parallel_size": integer("--tensor-parallel-size"),
        "pipeline_parallel_size": integer("--pipeline-parallel-size"),
        "spec_tokens": draft,
        "kv_pool_tokens": _number(config.get("kv_pool_tokens")),
        "cudagraph_mode": graphs[1] if graphs else None,
        "ready_timeout_s": ready,
        "stall_timeout_s": 900.0,
        "argv": argv,
        "required_markers": [{"text": TOKEN_MAP, "count": ranks, "why": "once on every rank"}],
        "forbidden_markers": [
            {"text": "offloaded to pinned", "why": "the Engram tables were reserved and never filled"},
        ],
    }


def _engram(line: LaunchLine) -> dict[str, Any]:
    host = next((host for host, target, _ in line.mounts if target == "/engram"), None)
    if host is None:
        raise ConfigError("the launch line mounts no Engram store (-v ...:/engram:ro): its tables would stay empty")
    if line.env.get("DSV41_ENGRAM_STORAGE") != "ssd":
        raise ConfigError("the launch line does not set DSV41_ENGRAM_STORAGE=ssd: the Engram tables would stay empty")
    if not re.fullmatch(r"/(?:opt|srv|mnt|data|dev/shm)(?:/[A-Za-z0-9][A-Za-z0-9._-]*)+", host):
        raise ConfigError(f"the launch line's Engram store is {host!r}: a folder below /opt, /srv or /mnt expected")
    return {"storage": "tmpfs", "format": "shards", "dir": host, "size_gib": 200.0}


def _smoke(tree: dict[str, Any]) -> dict[str, Any]:
    return {
        "canaries": "random",
        "copies": 20,
        "images": "vision" in (tree.get("tasks") or ()),
        "needle_tokens": 8000,
    }


def _bench(tree: dict[str, Any]) -> dict[str, Any]:
    rate = _number(_dict(tree, "speeds").get("decode_tok_s"))
    return {} if rate is None else {"published": {HEADLINE: float(rate)}}


def _provenance(source: str, profile: dict[str, Any]) -> dict[str, str]:
    found = {
        "hardware": f"{source}: hardware",
        "hardware.ram_gib_min": f"{source}: storage_requirements.ram_gb less the {ENGRAM_GIB} GiB of Engram",
        "model": "vLLM 0.33 code and the public shard headers",
        "serve": f"{source}: config.launch",
        "serve.kv_pool_tokens": f"{source}: config.kv_pool_tokens",
        "serve.stall_timeout_s": "choice: the first start compiles kernels for about 10 minutes",
        "engram.size_gib": "choice: the two tables are 188.83 GiB",
        "smoke": "choice",
        "bench.published": f"{source}: speeds.decode_tok_s, taken for one stream of code",
    }
    if profile["model"]["graft"]:
        found["model.graft"] = f"{source}: config.runtime.notes and artifacts"
    return found


def _name_the_rest(tree: dict[str, Any], config: dict[str, Any], found: Imported) -> None:
    """What a profile has no field for, by name, so that nobody takes it for granted."""
    for key, value in _dict(config, "env").items():
        shown = re.sub(r"[^\x20-\x7e]", "?", f"{key}={value}")[:80]
        if key not in _REPEATED and not ENV_ALLOWED.fullmatch(str(key)):
            found.unmapped.append(f"config.env.{shown}")
    disk = _dict(config, "storage_requirements").get("nvme_gb")
    if disk:
        found.unmapped.append(f"storage_requirements.nvme_gb = {_number(disk)}: preflight counts the files themselves")
    for item in _list(tree, "artifacts"):
        if item.get("kind") != "model_weights":
            found.unmapped.append(f"{_text(item, 'kind', 20)} {_text(item, 'pointer')} @ {_text(item, 'pin', 60)}")
    points = len(_list(tree, "perf_points"))
    if points:
        found.unmapped.append(f"perf_points: {points} figures of its author; bench compares with [bench.published]")


# ---- the seed's launcher
_TO_GROUP = {"DS41_GPUS_A": "a", "DS41_GPUS_C": "c"}


def of_env_file(values: dict[str, str], base: dict[str, Any], name: str) -> Imported:
    """The values of a `ds41.env` laid over the tree of the profile it is for. Raises ConfigError for a bad value."""
    require_name(name)
    found = Imported("")
    tree, rest = machine_values(values, base, found)
    env = dict(tree["serve"].get("env", {}))
    for key, value in rest.items():
        if secret_name(key) or ENV_REFUSED.fullmatch(key) or not ENV_ALLOWED.fullmatch(key):
            found.changed.append(f"{key} is not passed on: it is no variable of the engine, or not a harmless one")
        else:
            env[key] = literal(value)
    tree |= {
        "name": name,
        "title": f"{base['title']} (from an environment file)",
        "serve": {**tree["serve"], "env": env},
        "lacks": [*tree.get("lacks", ()), *found.unmapped],
    }
    found.text = "# Imported by ds41ctl from an environment file of the launcher.\n" + toml.dumps(tree)
    parse_profile(found.text, f"{name}.toml")
    return found


def machine_values(
    values: dict[str, str], base: dict[str, Any], found: Imported
) -> tuple[dict[str, Any], dict[str, str]]:
    """The base's tree with the launcher's DS41_* settings in it, and the values that are none.

    Raises ConfigError for a bad value.
    """
    hardware, model, serve = dict(base["hardware"]), dict(base["model"]), dict(base["serve"])
    groups, rest = dict(hardware.get("gpu_groups", {})), {}
    for key, value in values.items():
        if key == "DS41_MODEL":
            if not value.startswith("/") or ".." in value.split("/"):
                raise ConfigError(f"DS41_MODEL={value}: an absolute path without `..` expected")
            model["dir"] = value
        elif key in _TO_GROUP:
            if not re.fullmatch(r"\d{1,2}(?:,\d{1,2})*", value):
                raise ConfigError(f"{key}={value}: GPU indices separated by commas expected, for example 0,1,2,3")
            groups[_TO_GROUP[key]] = [int(part) for part in value.split(",")]
        elif key == "DS41_PORT":
            if not value.isdecimal() or not 1 <= int(value) <= 65535:
                raise ConfigError(f"DS41_PORT={value}: a whole number from 1 to 65535 expected")
            serve["port"] = int(value)
        elif key == "DS41_DSPARK":
            if value not in ("0", "1"):
                raise ConfigError(f"DS41_DSPARK={value}: 0 or 1 expected")
            serve["dspark"] = value == "1"
        elif key == "DS41_PYTHON":
            found.unmapped.append(f"{key}={value}: a setting of this machine, not of a profile: export it, or put")
            found.unmapped[-1] += f' python = "{value}" into config.toml'
        else:
            rest[key] = value
    return {**base, "hardware": {**hardware, "gpu_groups": groups}, "model": model, "serve": serve}, rest


# ---- the other way
def write(profile: Profile, points: list[dict[str, Any]] | None = None, notes: str = "") -> dict[str, Any]:
    """A profile in the same form, with measured points (`bench`'s) when there are some, and how they were measured.

    `speeds` are the measured ones then: the first decode rate of one stream (code's, when that was measured) and the
    first cold prefill; without points the rate its author states.
    """
    serve, engine = profile.serve, profile.engine
    env: dict[str, Any] = {"BIND": serve.host, "PORT": serve.port, "MAX_MODEL_LEN": serve.max_model_len}
    env |= {"MAX_NUM_SEQS": serve.max_num_seqs, "SPEC_TOKENS": serve.spec_tokens}
    env |= {"GPU_MEMORY_UTILIZATION": serve.gpu_memory_utilization, "P2P": int(profile.hardware.p2p)}
    env |= {"IMAGE": engine.image or None} | dict(serve.env)
    weights = [
        {
            "kind": "model_weights",
            "pointer_type": "hf_model",
            "pointer": f"https://huggingface.co/{source.repo}",
            "pin": f"{source.what} @ {source.revision}" if source.revision not in source.what else source.what,
        }
        for source in profile.model.hub_sources
    ]
    capability = profile.hardware.compute_capability.replace(".", "")
    graft = profile.model.graft
    graft_notes = (
        f"Graft build: {graft.tensors:,} tensors, {graft.grafted:,} grafted at {graft.bits:g} bits." if graft else ""
    )
    card = next((slug for slug, name in _CARDS.items() if name == profile.hardware.gpu_name), "")
    return {
        "slug": profile.name,
        "title": profile.title,
        "license": "; ".join(engine.notices),
        "engine_source": {
            "base_engine": "vllm",
            "base_version": engine.wheel or engine.lock or engine.image,
            "image_digest": engine.image_digest or None,
            "install_note": engine.build or engine.wheel_url,
            "pinned_commit": engine.build_revision or None,
        },
        "config": {
            "env": {name: value for name, value in env.items() if value is not None},
            "launch": launch_lines(profile),
            "runtime": {"notes": graft_notes},
            "kv_pool_tokens": serve.kv_pool_tokens,
            "max_context_len": serve.max_model_len,
            "storage_requirements": {
                "ram_gb": profile.hardware.ram_gib_min + (ENGRAM_GIB if profile.model.engram else 0)
            },
        },
        "models": [{"hf_repo": source.repo} for source in profile.model.hub_sources],
        "hardware": [
            {
                "vendor": "nvidia" if profile.hardware.gpus else "",
                "card": card or profile.hardware.gpu_name.lower().replace(" ", "-"),
                "vram_gb": profile.hardware.vram_mib_min // 1000,
                "device_count": profile.hardware.gpus,
            }
        ],
        "tags": [f"sm{capability}"] if capability else [],
        "tasks": ["chat", "code", *(["vision"] if profile.smoke.images else [])],
        "artifacts": weights,
        "performance": _performance(profile, points, notes) if points else [],
        "perf_points": [{**point, "claimed_by": "submitter"} for point in points or ()],
        "speeds": _speeds(points) if points else {"decode_tok_s": profile.bench.published.get(HEADLINE)},
    }


def _speeds(points: list[dict[str, Any]]) -> dict[str, Any]:
    alone = [item for item in points if item.get("concurrency") == 1 and "decode_tok_s" in item]
    alone.sort(key=lambda item: not str(item.get("notes", "")).startswith("code"))
    prefill = [item["prefill_tok_s"] for item in points if "prefill_tok_s" in item]
    return {
        "decode_tok_s": alone[0]["decode_tok_s"] if alone else None,
        "prefill_tok_s": prefill[0] if prefill else None,
    }


def _performance(profile: Profile, points: list[dict[str, Any]], notes: str) -> list[dict[str, Any]]:
    metrics = {
        "notes": notes,
        "tok_s": _speeds(points)["decode_tok_s"],
        "points": points,
        "context_len": profile.serve.max_model_len,
    }
    return [{"claimed_by": "submitter", "metrics": json.dumps(metrics, ensure_ascii=False)}]


def launch_lines(profile: Profile) -> list[str]:
    """The profile's command template as a published launch line: one option a line, folders as placeholders."""
    values = {
        "models": "<MODELS_DIR>",
        "cache": "<CACHE_DIR>",
        "engram": profile.engram.dir or "<ENGRAM_DIR>",
        "host": profile.serve.host,
        "port": str(profile.serve.port),
        "image": profile.engine.image,
        "model_name": profile.model.dir.rsplit("/", 1)[-1],
        "model": f"<MODELS_DIR>/{profile.model.dir.rsplit('/', 1)[-1]}",
        "python": "python",
        "gpus": "<GPUS>",
    }
    lines: list[str] = []
    for part in (*profile.serve.argv, *(profile.serve.dspark_argv if profile.serve.dspark else ())):
        word = re.sub(r"\$\{(\w+)\}", lambda match: values.get(match[1], match[0]), part).replace("$$", "$")
        if " " in word and not word.startswith(("{", "[")):
            word = f"'{word}'"
        if part.startswith("-") or not lines or part == "${image}":
            lines.append(word)
        else:
            lines[-1] += " " + word
    return lines
