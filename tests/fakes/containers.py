"""A docker (or podman) that is a script: it records every command line and plays the states of containers.

`FakeRuntime(tmp_path).install("docker")` puts it on a PATH folder. `runtime.play(...)` sets what happens next; `calls`
are the command lines it got. A started container is a real process: an engine that logs and answers like one.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import textwrap
from pathlib import Path
from typing import Any

from ds41ctl.adapters import proc
from tests.fakes import shardreader

SCRIPT = """
import hashlib, json, os, signal, subprocess, sys, time
from datetime import datetime, timezone
from pathlib import Path

root, engine = Path(@ROOT@), @ENGINE@
args = sys.argv[1:]
with (root / "calls.jsonl").open("a") as log:
    log.write(json.dumps([Path(sys.argv[0]).name, *args]) + "\\n")
scene = json.loads((root / "scene.json").read_text())
books = root / "containers.json"
held = json.loads(books.read_text()) if books.exists() else {}


def fail(text, status=1):
    sys.stderr.write(text + "\\n")
    sys.exit(status)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def find(name):
    for item in held.values():
        if name in (item["Name"], item["Id"]) or item["Id"].startswith(name):
            return item
    return None


def keep():
    new = books.with_name(f"containers.{os.getpid()}")
    new.write_text(json.dumps(held))
    new.replace(books)  # another call may be reading


if scene.get("down"):
    fail(scene["down"])
if args[:1] == ["info"]:
    print(json.dumps({"CDISpecDirs": ["/etc/cdi"], "DockerRootDir": scene.get("storage", str(root))}))
elif args[:2] == ["image", "ls"]:
    print("\\n".join(f"{name} {id}" for name, id in scene["images"].items()))
elif args[:1] == ["tag"]:
    known = {**scene["images"], **{id.removeprefix("sha256:"): id for id in scene["images"].values()}}
    if args[1] not in known:
        fail(f"Error response from daemon: No such image: {args[1]}")
    scene["images"][args[2]] = known[args[1]]
    (root / "scene.json").write_text(json.dumps(scene))
elif args[:1] == ["build"]:
    text = Path(args[-1], "Dockerfile").read_text() + scene.get("salt", "")
    number = hashlib.sha256(text.encode()).hexdigest()
    scene["images"][args[args.index("-t") + 1]] = "sha256:" + number
    (root / "scene.json").write_text(json.dumps(scene))
    print(f"naming to docker.io/library/{args[args.index('-t') + 1]}")
elif args[:2] == ["image", "inspect"]:
    found = scene["images"].get(args[-1])
    print(found) if found else fail(f"Error response from daemon: No such image: {args[-1]}")
elif args[:1] == ["pull"]:
    scene["images"][args[-1].partition("@")[0]] = args[-1].partition("@")[2]
    (root / "scene.json").write_text(json.dumps(scene))
elif args[:1] == ["ps"]:
    print("\\n".join(item["Name"] for item in held.values()))
elif args[:1] == ["run"]:
    name = args[args.index("--name") + 1]
    if find(name):
        fail(f'docker: Error response from daemon: Conflict. The container name "/{name}" is already in use', 125)
    number = hashlib.sha256(f"{name}{time.time_ns()}".encode()).hexdigest()
    item = {"Id": number, "Name": name, "Created": datetime.now(timezone.utc).isoformat(), "pid": 0}
    if "run_error" in scene:
        if scene.get("leaves_created"):
            held[number] = {**item, "Status": "created"}
            keep()
        fail(scene["run_error"], 125)
    port = next(word for word in args if word.startswith("127.0.0.1:")).split(":")[1]
    with (root / "container.log").open("w") as log:
        tables = [word.split(":")[0] for word in args if word.split(":")[1:2] == ["/engram"]]
        words = [sys.executable, "-IS", engine, port, str(root / "scene.json"), *tables]
        child = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)
    held[number] = {**item, "pid": child.pid, "argv": args}
    keep()
    print(number)
elif args[:2] == ["container", "inspect"]:
    item = find(args[2])
    if item is None:
        fail(f"Error: No such container: {args[2]}")
    runs = alive(item["pid"])
    told = scene.get("state", {}) if not runs or scene.get("state_while_running") else {}
    status = item.get("Status") or ("running" if runs else "exited")
    state = {"Status": status, "Pid": item["pid"] if runs else 0, "ExitCode": 0 if runs else 1, "OOMKilled": False}
    state |= told
    policy = scene.get("policy", "no")
    print(json.dumps([{
        "Id": item["Id"], "Name": "/" + item["Name"], "Created": item["Created"], "State": state,
        "RestartCount": scene.get("restarts", 0), "Image": "sha256:" + "1" * 64,
        "HostConfig": {"RestartPolicy": {"Name": policy}},
    }]))
elif args[:1] == ["logs"]:
    item = find(args[-1])
    with (root / "container.log").open() as log:
        while True:
            text = log.read()
            sys.stdout.write(text)
            sys.stdout.flush()
            if not text and not alive(item["pid"]):
                break
            time.sleep(0.05)
elif args[:1] == ["stop"]:
    item = find(args[-1])
    if item and item["pid"] and alive(item["pid"]):
        os.killpg(item["pid"], signal.SIGTERM)
        for _ in range(50):
            if not alive(item["pid"]):
                break
            time.sleep(0.05)
elif args[:1] == ["rm"]:
    item = find(args[-1])
    if item and not scene.get("rm_fails"):
        if item["pid"] and alive(item["pid"]):
            os.killpg(item["pid"], signal.SIGKILL)
        del held[item["Id"]]
        keep()
else:
    fail(f"unknown command {args}", 64)
"""

ENGINE = """
import json, os, signal, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

port, scene = int(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
for line in scene["log"]:
    print(line, flush=True)
if "dies_with" in scene:
    os._exit(scene["dies_with"])
if scene.get("silent"):
    time.sleep(600)

# "ssd": rows of both tables are read at the start, which fails where they are not; "host": memory is reserved, never
# filled and said to be offloaded; "mute": the same, and nothing is said
filled = scene.get("engram", "ssd-elsewhere") not in ("host", "mute")
if scene.get("engram") == "ssd":
    tables = [Table(sys.argv[3], layer) for layer in scene["layers"]]
    for table in tables:
        for number in (0, table.rows // 2, table.rows - 1):
            if not any(table.row(number)):
                raise ValueError("a row of zeros")
elif scene.get("engram") == "host":
    print("Engram table offloaded to pinned host memory: 384006168 rows x 256, 23.60 GiB per rank", flush=True)
if "answers" in scene:  # a better one goes on: it needs what this isolated process may not import
    os.environ["PYTHONPATH"] = scene["answers"]["path"]
    words = ["-m", "tests.fakes.contained", str(port), scene["answers"]["recipe"], "filled" if filled else "empty"]
    os.execv(sys.executable, [sys.executable, *words])


class Handler(BaseHTTPRequestHandler):
    def answer(self, tree):
        body = json.dumps(tree).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.answer({})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "messages" in asked:  # a copy: without its rows the model drops the underscores
            said = asked["messages"][-1]["content"].rsplit(" ", 1)[-1]
            choice = {
                "index": 0,
                "message": {"role": "assistant", "content": said if filled else said.replace("_", "")},
                "finish_reason": "stop",
            }
            self.answer({"usage": {"completion_tokens": 1, "prompt_tokens": 1}, "choices": [choice]})
            return
        self.answer({"usage": {"completion_tokens": 1}, "choices": [{"text": "1"}]})

    def log_message(self, *_):
        pass


print("INFO 11-29 10:00:00 Application startup complete.", flush=True)
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""

TOKEN_MAP = "Built engram token map (129280 -> 99092 ids) for layers (1, 14)"
# what the recipe's engine logs at its start, in vLLM 0.33's words
GOOD_LOG = (
    "INFO 11-29 10:00:00 non-default args: {'cudagraph_mode': <CUDAGraphMode.FULL_AND_PIECEWISE: (2, 1)>}",
    *(f"(Worker_TP{rank} pid=1) INFO 11-29 10:00:00 [engram.py:473] {TOKEN_MAP}" for rank in range(4)),
    "INFO 11-29 10:00:00 [kv_cache_utils.py:1148] GPU KV cache size: 2,717,420 tokens, Maximum concurrency 10.37x",
    "INFO 11-29 10:00:00 Graph capturing finished in 20 secs, took 1.10 GiB",
)
IMAGE = "ds41-cmp170hx:1.2.0-fidelity"


class FakeRuntime:
    """One fake runtime with its containers below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.bin = root / "bin"
        self.bin.mkdir(parents=True)
        (root / "engine.py").write_text(Path(shardreader.__file__).read_text() + ENGINE)
        self.scene: dict[str, Any] = {"images": {IMAGE: "sha256:" + "1" * 64}, "log": list(GOOD_LOG)}
        self.play()

    @property
    def images(self) -> dict[str, str]:
        """Name -> id of the images that are there now."""
        found: dict[str, str] = json.loads((self.root / "scene.json").read_text())["images"]
        return found

    def install(self, name: str = "docker") -> FakeRuntime:
        """Put it on the PATH folder under a name."""
        body = SCRIPT.replace("@ROOT@", repr(str(self.root))).replace("@ENGINE@", repr(str(self.root / "engine.py")))
        path = self.bin / name
        path.write_text(f"#!{sys.executable} -IS\n{textwrap.dedent(body)}")  # -IS: starts in half the time
        path.chmod(0o755)
        return self

    def play(self, **scene: Any) -> None:
        """What happens from now on."""
        self.scene |= scene
        (self.root / "scene.json").write_text(json.dumps(self.scene))

    @property
    def calls(self) -> list[list[str]]:
        """Command lines so far."""
        path = self.root / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def held(self) -> list[dict[str, Any]]:
        """Containers that exist."""
        path = self.root / "containers.json"
        return list(json.loads(path.read_text()).values()) if path.exists() else []

    def add(self, name: str, created: str) -> None:
        """A container of somebody else."""
        item = {"Id": "f" * 64, "Name": name, "Created": created, "pid": 0, "Status": "exited"}
        self._keep({item["Id"]: item})

    def remove_all(self) -> None:
        """As if somebody else had removed them; what ran in them goes on."""
        self._keep({})

    def _keep(self, held: dict[str, Any]) -> None:
        new = self.root / "containers.new"
        new.write_text(json.dumps(held))
        new.replace(self.root / "containers.json")  # a call may be reading

    def end(self) -> None:
        """Kill what still runs."""
        for item in self.held:
            if item["pid"] and proc.identify(item["pid"]) is not None:
                os.killpg(item["pid"], signal.SIGKILL)
