"""An engine that is not ours, as the wheel of a release: tables of its own, a log of its own, answers of a real engine.

`vllm.entrypoints.openai.api_server` of this wheel takes the command line of the GPU profiles as the borrowed engine
does. It opens the pack's index, the shards' headers and every row of both Engram tables, keeps them in anonymous
memory, says in its log what its author's engine says, and lets the real CPU engine answer on the port it was given.
Without its tables it does not start; told to be `silent`, it starts with none, as the fault in the field does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.fakes.wheels import PLATFORMS, wheel

API_SERVER = '''
import hashlib, json, mmap, os, signal, struct, subprocess, sys
from pathlib import Path

TOLD = json.loads(Path(__file__).with_name("told.json").read_text())
print("foreign: argv " + json.dumps(sys.argv[1:]), flush=True)
print("foreign: env " + json.dumps(dict(os.environ)), flush=True)


def option(name):
    return sys.argv[sys.argv.index(name) + 1]


def header(path):
    with path.open("rb") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        return 8 + length, json.loads(file.read(length))


def table(model, index, layer):
    """The rows of one layer as its shard holds them, in memory of our own."""
    kept = []
    for part in ("weight", "scale"):
        name = f"layers.{layer}.engram.embed.{part}"
        shard = model / index[name]
        start, tensors = header(shard)
        begin, end = tensors[name]["data_offsets"]
        memory = mmap.mmap(-1, end - begin)
        with shard.open("rb") as file:
            file.seek(start + begin)
            memory.write(file.read(end - begin))
        print(f"foreign: {name} sha256 {hashlib.sha256(memory).hexdigest()}", flush=True)
        kept.append(memory)
    return kept


model = Path(option("--model"))
index = json.loads((model / "model.safetensors.index.json").read_text())["weight_map"]
tables = [] if TOLD["silent"] else [table(model, index, layer) for layer in TOLD["layers"]]
for line in TOLD["log"]:
    print(line, flush=True)
values = {"{model}": str(model), "{host}": option("--host"), "{port}": option("--port")}
argv = [values.get(word, word) for word in TOLD["argv"]]
keep = {name: os.environ[name] for name in ("PATH", "HOME", "DS41_ENGINE_RUN") if name in os.environ}
child = subprocess.Popen(argv, env={**keep, **TOLD["env"]})
signal.signal(signal.SIGTERM, lambda *_: child.terminate())
sys.exit(child.wait())
'''


def release(
    folder: Path,
    name: str,
    *,
    argv: Sequence[str],
    env: Mapping[str, str],
    layers: Sequence[int],
    log: Sequence[str],
    silent: bool = False,
) -> Path:
    """Write the wheel called `name`. `argv` and `env` start the engine that answers; its words `{model}`, `{host}` and
    `{port}` stand for what this one is told. `log`: the lines that follow the tables."""
    package, version, *tags = name.removesuffix(".whl").split("-")
    told = {"argv": list(argv), "env": dict(env), "layers": list(layers), "log": list(log), "silent": silent}
    files = {
        "vllm/__init__.py": f'__version__ = "{version}"\n',
        "vllm/platforms.py": PLATFORMS,
        "vllm/entrypoints/__init__.py": "",
        "vllm/entrypoints/openai/__init__.py": "",
        "vllm/entrypoints/openai/api_server.py": API_SERVER,
        "vllm/entrypoints/openai/told.json": json.dumps(told),
    }
    return wheel(folder, package, version, files, "-".join(tags), requires=("torch",))
