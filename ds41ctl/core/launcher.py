"""An engine's own shell launcher as a profile: the command line it starts, its variables and knobs, as data. Pure.

What the reader could not read is named with its line; the profile then says `serve.source = "partial"` and lists it in
`lacks`. Folders of the machine it was written on become placeholders.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import Any

from ds41ctl.core import toml
from ds41ctl.core.errors import ConfigError
from ds41ctl.core.launch import CACHE_VARIABLES
from ds41ctl.core.masking import mask_argv, mask_value
from ds41ctl.core.profile import option_value, parse_profile
from ds41ctl.core.recipe import (
    ARGUMENTS_REFUSED,
    ENV_ALLOWED,
    ENV_REFUSED,
    Imported,
    literal,
    machine_values,
    require_name,
)
from ds41ctl.core.settings import Settings, env_name
from ds41ctl.core.shellparse import parse
from ds41ctl.core.shellread import Reader
from ds41ctl.core.shellvalues import MARK, Hole, marked, setting
from ds41ctl.core.shellwords import Start

_SETTINGS = {
    "DS41_MODEL": "model",
    "DS41_PYTHON": "python",
    "DS41_PORT": "port",
    "DS41_HOST": "host",
    "DS41_GPUS_A": "gpus_a",
    "DS41_GPUS_C": "gpus_c",
}
_DSPARK = "DS41_DSPARK"
# variables of a running engine that a launcher may set beside those of a recipe
_ALSO = re.compile(r"(?:CUBLAS|CUDNN|KMP|MKL|OPENBLAS|TVM|NVIDIA|C10|HF|PYTHONHASHSEED|TOKENIZERS)(?:_\w+)?")
# ours, whatever the launcher does: kept from the base profile where the launcher says nothing
_OURS = (
    *("CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "HF_HUB_OFFLINE", "MAX_JOBS"),
    *("VLLM_ENGINE_READY_TIMEOUT_S", "VLLM_NO_USAGE_STATS", "VLLM_WORKER_MULTIPROC_METHOD"),
)
_SHORT = {"-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size", "-O": "--compilation-config"}
_SHORT |= {"-cc": "--compilation-config", "-sc": "--speculative-config"}
_NUMBERS = (
    *("max_model_len", "max_num_seqs", "max_num_batched_tokens"),
    *("tensor_parallel_size", "pipeline_parallel_size"),
)
# as vLLM reads `1k` and `1M`: small letters are decimal, capitals binary
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_TITLE = r" \(command line of [^)]*\)$"
_UNREAD = "not read from "
REMEDY = "profile import --launcher"  # entries of a profile's `lacks` that name it are settled by an import


@dataclass
class Line:
    """One reading of a launcher: the engine's command as a template, its variables, and what was not read."""

    argv: list[str]
    env: dict[str, str]
    numa: str = ""
    unread: list[Hole] = field(default_factory=list)


@dataclass
class Read(Imported):
    """A profile's text; `assignments` and `options` were read, `unread` was not, `passed` needs no reading."""

    assignments: int = 0
    options: int = 0
    unread: list[str] = field(default_factory=list)
    passed: int = 0


def of_launcher(
    script: tuple[str, str], env_file: tuple[str, str] | None, path: str, base: dict[str, Any], name: str
) -> Read:
    """A launcher as the profile `name`, laid over the tree of `base`.

    `script` and `env_file`: (text, name for messages); `path`: what `$0` is. Raises ConfigError for text that is no
    shell script, for a script that starts no engine and for a value that no profile may have.
    """
    require_name(name)
    if base["engine"].get("kind") != "venv":
        raise ConfigError(f"base profile {base.get('name')}: its engine is no venv, and a launcher starts one")
    found = Read("")
    on, given, read = _follow(script, env_file, path, found, "1")
    off, _, _ = _follow(script, env_file, path, Read(""), "0")
    values = {key: value for key, value in given.items() if key in _SETTINGS or key == _DSPARK}
    if env_file is not None and env_file[1].endswith(".example") and (model := values.pop("DS41_MODEL", None)):
        found.changed.append(f"DS41_MODEL={model} is the example's: the pack stays where the profile has it")
    if python := values.pop("DS41_PYTHON", None):
        found.changed.append(f"DS41_PYTHON={python} is this machine's: export it to use that engine")
    values.pop("DS41_HOST", None)
    tree, _ = machine_values(values, base, found)
    serve = _serve(tree, on, off, found, given)
    found.assignments, found.passed = read.assignments, len(read.passed)
    found.options = sum(1 for word in (*serve["argv"], *serve["dspark_argv"]) if re.match(r"--?[A-Za-z]", word))
    found.unread = list(dict.fromkeys(str(hole) for hole in sorted(on.unread, key=lambda hole: hole.line)))
    _drafters(on, off, serve, found)
    serve["source"] = "partial" if found.unread else "imported"
    origin = f"{script[1]} (sha256 {hashlib.sha256(script[0].encode()).hexdigest()[:16]})"
    tree |= {
        "name": name,
        "title": f"{re.sub(_TITLE, '', base['title'])} (command line of {script[1]})",
        "serve": serve,
        "smoke": {**tree["smoke"], "image_limit": _images(serve["argv"], tree["smoke"].get("image_limit"))},
        "lacks": [
            *(text for text in base.get("lacks", ()) if REMEDY not in text and not text.startswith(_UNREAD)),
            *(f"{_UNREAD} {script[1]}, {text}" for text in found.unread),
            *(f"from {script[1]}, without a place in a profile: {text}" for text in found.unmapped),
        ],
        "provenance": _provenance(base, serve, origin),
    }
    found.text = f"# Imported by ds41ctl from {origin} over {base['name']}.\n" + toml.dumps(tree)
    parse_profile(found.text, f"{name}.toml")
    return found


# ---- from the script to a line
def _follow(
    script: tuple[str, str], env_file: tuple[str, str] | None, path: str, found: Read, dspark: str
) -> tuple[Line, dict[str, str], Reader]:
    """The line that the launcher starts with the drafter on ("1") or off ("0")."""
    fed = frozenset({env_file[1], env_file[1].removesuffix(".example")}) if env_file else frozenset()
    reader = Reader(path, _SETTINGS, {_DSPARK: dspark}, fed)
    if env_file is not None:
        reader.feed(parse(*env_file))
    tree = parse(*script)
    reader.run(tree)
    if not reader.starts:
        reader.assignments = 0
        reader.run(tree, ("--foreground",))
    if not reader.starts:
        raise ConfigError(
            f"{script[1]}: no line of it that can be followed starts an engine (python -m vllm..., vllm serve ...)",
            detail=[f"not read: {hole}" for hole in reader.unread],
            hints=("look at the script: a profile can be written by hand, ds41ctl profile show v100-pp2tp4",),
        )
    line = _line(reader, reader.starts[0], found)
    line.unread[:0] = reader.unread
    for other in reader.starts[1:]:
        if (other.argv, other.env) != (reader.starts[0].argv, reader.starts[0].env):
            line.unread.append(Hole(other.line, " ".join(other.argv[-2:]), "starts the engine with another line"))
    return line, reader.given, reader


def _line(reader: Reader, start: Start, found: Read) -> Line:
    line = Line([], {})
    words, kept = _wrapped(reader, list(start.argv), line)
    line.argv = [*kept, *_command(words, line, reader, found)]
    for name, value in start.env.items():
        _variable(name, value, reader, line, found)
    return line


def _wrapped(reader: Reader, words: list[str], line: Line) -> tuple[list[str], list[str]]:
    """The words from the interpreter on, and what stands before it (`numactl`, `taskset`)."""
    at = next(at for at, word in enumerate(words) if _is_python(word) or word.endswith("vllm") or words[at + 1] == "-m")
    before = words[:at]
    for word in before:
        line.unread += reader.holes.of(word)
    before = [word for word in before if not reader.holes.of(word)]
    text = " ".join(before)
    if re.fullmatch(r"(?:\S*/)?numactl (?:--interleave(?:=| )all|-i ?all)", text):
        line.numa, before = "interleave", []
    return words[at:], [_template(word) for word in before]


def _is_python(word: str) -> bool:
    return bool(re.fullmatch(r"(?:.*/)?python[0-9.]*", word)) or word == setting("python")


def _template(text: str) -> str:
    """Settings as placeholders, every other dollar doubled."""
    return MARK.sub(lambda match: f"${{{match[2]}}}", literal(text))


def _command(words: list[str], line: Line, reader: Reader, found: Read) -> list[str]:
    """The command as a template: interpreter, model and address by placeholder, options that a profile may not have
    left out."""
    out = ["${python}"]
    if words[0] == "vllm" or words[0].endswith("/vllm"):
        out += ["-m", "vllm.entrypoints.cli.main"]
    model = next((words[at + 1] for at, word in enumerate(words[:-1]) if word in ("--model", "serve")), "")
    model = model or next((word.partition("=")[2] for word in words if word.startswith("--model=")), "")
    if model and model != setting("model"):
        told = next((hole.source for hole in reader.holes.of(model)), model)
        found.changed.append(f"{told} is ${{model}}: the profile's pack, or DS41_MODEL")
    seen: set[str] = set()
    at = 1
    while at < len(words):
        word = words[at]
        name, equals, value = word.partition("=")
        name = _SHORT.get(name, name)
        option = word.startswith("-") and not re.fullmatch(r"-[0-9.]+", word)
        takes = option and not equals and at + 1 < len(words) and not words[at + 1].startswith("-")
        told = value if equals else words[at + 1] if takes else ""
        at += 1
        if not option:
            holes = [] if word == model else reader.holes.of(word)
            line.unread += holes
            if not holes:
                out.append("${model}" if word == model else _template(word))
            continue
        if takes and any(hole.many for hole in reader.holes.of(told)):
            takes, told = False, ""  # the unread words after an option without a value
        at += takes
        if name in ARGUMENTS_REFUSED:
            found.changed.append(f"{name} is left out: {ARGUMENTS_REFUSED[name]}")
        elif mask_argv([name, told]) != [name, told]:
            found.changed.append(f"{name} is left out: it holds a secret")
        elif reader.holes.of(word + told) and not (told == model or name in ("--host", "--port")):
            line.unread += [*reader.holes.of(word), *(reader.holes.of(told) if not equals else [])]
        else:
            shown = _told(name, told, model, found)
            seen.add(name)
            out += (
                [f"{_template(name)}={shown}"] if equals else [_template(word), shown] if takes else [_template(word)]
            )
    for name in ("--host", "--port"):
        if name not in seen:
            found.changed.append(f"{name} is added: the launcher leaves it to the engine")
            out += [name, f"${{{name[2:]}}}"]
    return out


def _told(name: str, value: str, model: str, found: Read) -> str:
    """An option's value as a template."""
    if value and value == model:
        return "${model}"
    if name == "--host":
        if not marked(value) and value not in ("127.0.0.1", "localhost"):
            found.changed.append(f"--host {value} would be reachable from other machines: 127.0.0.1 instead")
        return "${host}"
    if name == "--port":
        if not marked(value):
            found.changed.append(f"--port {value} is ${{port}}")
        return "${port}"
    return _template(value)


def _variable(name: str, value: str, reader: Reader, line: Line, found: Read) -> None:
    if name in _SETTINGS or name == _DSPARK:
        return
    ours = {env_name(setting) for setting in Settings.model_fields}
    if name in CACHE_VARIABLES:
        found.changed.append(f"{name} is left out: compiled code is kept apart by engine and driver")
    elif name == "VLLM_API_KEY" or mask_value(name, value) != value:
        found.changed.append(
            f"{name} is not passed on, it holds a secret: DS41_API_KEY_FILE names a 0600 file with one"
        )
    elif name in ours:
        found.unmapped.append(f"{name}={value}: a setting of this machine, not of a profile: export it")
    elif ENV_REFUSED.fullmatch(name) and value.lower() not in ("", "0", "false"):
        found.changed.append(f"{name} is not passed on: it opens the server or empties the Engram")
    elif not (ENV_ALLOWED.fullmatch(name) or _ALSO.fullmatch(name)):
        found.unmapped.append(f"{name} is not passed on: it is no variable of the engine")
    elif reader.holes.of(value):
        line.unread += [
            Hole(hole.line, hole.source, hole.why if name in hole.source + hole.why else f"{hole.why} ({name})")
            for hole in reader.holes.of(value)
        ]
    else:
        line.env[name] = _template(value)


# ---- from the line to a profile
def _serve(tree: dict[str, Any], on: Line, off: Line, found: Read, given: dict[str, str]) -> dict[str, Any]:
    base = tree["serve"]
    argv, drafter = _split(on.argv, off.argv)
    if "--speculative-config" in argv and not drafter:
        at = argv.index("--speculative-config")
        argv, drafter = argv[:at] + argv[at + 2 :], argv[at : at + 2]
    if [*argv, *drafter] != on.argv:
        found.changed.append(f"{' '.join(drafter)} stands at the end: it comes and goes with {_DSPARK}")
    common = {name: value for name, value in on.env.items() if off.env.get(name) == value}
    kept = {name: base["env"][name] for name in _OURS if name in base.get("env", {}) and name not in on.env}
    for name, value in kept.items():
        found.changed.append(f"{name}={value} is kept from {tree['name']}: the launcher does not set it")
    serve = {key: value for key, value in base.items() if key not in ("argv", "env", "dspark_argv", "dspark_env")}
    serve |= {
        "argv": _plain_numbers(argv),
        "dspark_argv": drafter,
        "env": dict(sorted((kept | common).items())),
        "dspark_env": {name: value for name, value in sorted(on.env.items()) if name not in common},
        "numa": on.numa or None,
        "host": "127.0.0.1",
    }
    if _DSPARK not in given:
        serve["dspark"] = bool(drafter)
    port = option_value(tuple(on.argv), "--port")
    literal_port = next((text.split()[1] for text in found.changed if text.startswith("--port ")), "")
    if port == "${port}" and literal_port.isdecimal() and 1 <= int(literal_port) <= 65535:
        serve["port"] = int(literal_port)
    whole = (*serve["argv"], *drafter)
    for name in _NUMBERS:
        serve[name] = _number(whole, name, base, tree["name"], found)
    share = _option(whole, "--gpu-memory-utilization")
    try:
        serve["gpu_memory_utilization"] = None if share is None else float(share)
        draft = _config(whole, "--speculative-config", "num_speculative_tokens")
        serve["spec_tokens"] = int(draft) if draft else 0
    except (ValueError, TypeError) as error:
        raise ConfigError(f"the launcher gives a value that cannot be read: {error}") from None
    serve["cudagraph_mode"] = str(_config(whole, "--compilation-config", "cudagraph_mode") or "").upper() or None
    cut = re.match(r"(\d+),\d+$", serve["env"].get("VLLM_PP_LAYER_PARTITION", ""))
    serve["pipeline_cut"] = int(cut[1]) if cut else None
    return serve


def _split(on: list[str], off: list[str]) -> tuple[list[str], list[str]]:
    """The words of both lines, and those that only the drafter's has; all of it when it is more than an insertion."""
    more = len(on) - len(off)
    head = next((at for at, (a, b) in enumerate(zip(on, off, strict=False)) if a != b), min(len(on), len(off)))
    if more > 0 and on[head + more :] == off[head:]:
        return off, on[head : head + more]
    return on, []


def _drafters(on: Line, off: Line, serve: dict[str, Any], found: Read) -> None:
    """What changes with the drafter and has no place in a profile."""
    if len(on.argv) <= len(off.argv) and on.argv != off.argv:
        found.unread.append(f"{_DSPARK}=0 changes more than the drafter's options: {' '.join(off.argv)[:200]}")
    for name, value in off.env.items():
        if on.env.get(name) != value:
            found.unread.append(f"{_DSPARK}=0 sets {name}={value}, for which a profile has no place")


def _plain_numbers(argv: list[str]) -> list[str]:
    """`--max-model-len 1M` as a number, which the profile's field can be compared with."""
    out = list(argv)
    for at in range(1, len(out)):
        match = re.fullmatch(r"(\d+)([kmgKMG])", out[at])
        if match and out[at - 1] in ("--max-model-len", "--max-num-batched-tokens"):
            out[at] = str(int(match[1]) * _UNITS[match[2]])
    return out


def _option(argv: tuple[str, ...], option: str) -> str | None:
    """Value of an option under any of its names."""
    for name in (option, *(short for short, long in _SHORT.items() if long == option)):
        value = option_value(argv, name)
        if value is not None:
            return value
    return None


def _number(argv: tuple[str, ...], name: str, base: dict[str, Any], owner: str, found: Read) -> int | None:
    option = "--" + name.replace("_", "-")
    told = _option(argv, option)
    if told is None:
        if name in ("max_model_len", "max_num_seqs"):
            found.unmapped.append(f"no {option} is given: serve.{name} {base[name]} is {owner}'s")
            return int(base[name])
        return None
    if not told.isdecimal():
        raise ConfigError(f"the launcher's {option} is {told!r}, a whole number expected")
    return int(told)


def _config(argv: tuple[str, ...], option: str, key: str) -> Any:
    """A key of a JSON option, also as `--option.key value`."""
    names = (option, *(short for short, long in _SHORT.items() if long == option))
    for name in names:
        dotted = option_value(argv, f"{name}.{key}")
        if dotted is not None:
            return dotted
    text = _option(argv, option)
    try:
        tree = json.loads((text or "{}").replace("$$", "$"))
    except ValueError:
        return None
    return tree.get(key) if isinstance(tree, dict) else None


def _images(argv: list[str], before: int | None) -> int | None:
    limit = _config(tuple(argv), "--limit-mm-per-prompt", "image")
    if isinstance(limit, str) and limit.isdecimal():
        limit = int(limit)
    return limit if isinstance(limit, int) and limit > 0 else before


def _provenance(base: dict[str, Any], serve: dict[str, Any], origin: str) -> dict[str, str]:
    """The base's sources; what the launcher says has the launcher."""
    old = base["serve"]
    taken = (*_NUMBERS, "gpu_memory_utilization", "spec_tokens", "pipeline_cut")
    from_launcher = {f"serve.{name}" for name in taken if serve.get(name) is not None}
    gone = {f"serve.env.{name}" for name in old.get("env", {}) if serve["env"].get(name) != old["env"][name]}
    found = {key: text for key, text in base["provenance"].items() if key not in from_launcher | gone}
    return {**found, **dict.fromkeys(sorted(from_launcher), f"launcher {origin}")}
