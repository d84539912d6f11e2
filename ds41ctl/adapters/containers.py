"""The container runtime, its image, and the CDI specifications that name the GPUs."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds41ctl.adapters import distro, proc
from ds41ctl.adapters.textfile import text
from ds41ctl.core.errors import UnsupportedError
from ds41ctl.core.facts import CdiSpec, ContainerFacts, ToolFacts
from ds41ctl.core.layout import Layout

TIMEOUT_S = 5.0  # policy
START_S = 120.0  # policy: `run -d` returns when the container's process is started; a cold daemon takes some seconds
CLIENTS = ("docker", "podman")
SPEC_FOLDERS = ("etc/cdi", "var/run/cdi", "run/cdi")  # the CDI specification's own search path


def inspect(image: str, tools: tuple[ToolFacts, ...], environ: Mapping[str, str], root: Path) -> ContainerFacts:
    """Ask docker, else podman. Never raises: what could not be asked is None."""
    tool = next((tool for name in ("docker", "podman") for tool in tools if tool.name == name and tool.path), None)
    specs = cdi_specs(root)
    if tool is None:
        return ContainerFacts(specs=specs, image=image)
    info = proc.run([tool.path, "info", "--format", "{{json .}}"], timeout=TIMEOUT_S, env=environ)
    if not info.ok:
        said = (info.stderr or info.stdout).strip().splitlines()
        why = "no answer in time" if info.timed_out else (said[-1] if said else f"exit status {info.returncode}")
        return ContainerFacts(runtime=tool.name, answers=False, problem=why[:200], specs=specs, image=image)
    storage = _storage(info.stdout)
    return ContainerFacts(
        runtime=tool.name,
        answers=True,
        storage=storage,
        storage_free=_free(storage),
        cdi_enabled=_cdi_enabled(tool.name, info.stdout),
        specs=specs,
        image=image,
        image_id=_image_id(tool.path, image, environ),
        names=_names(tool.path, environ),
    )


def _cdi_enabled(runtime: str, info: str) -> bool | None:
    """podman reads CDI always; docker states its spec folders since 25, and has none while the feature is off."""
    if runtime == "podman":
        return True
    try:
        tree = json.loads(info)
    except ValueError:
        return None
    return bool(tree.get("CDISpecDirs")) if isinstance(tree, dict) else None


def _storage(info: str) -> str:
    """Where docker (DockerRootDir) or podman (store.graphRoot) keeps images, '' when it does not say."""
    try:
        tree = json.loads(info)
        found = tree.get("DockerRootDir") or (tree.get("store") or {}).get("graphRoot") or ""
    except (ValueError, AttributeError):
        return ""
    return found if isinstance(found, str) else ""


def _free(folder: str) -> int | None:
    """Bytes free there; None for a folder that is not on this machine or may not be looked at."""
    try:
        stat = os.statvfs(folder)
    except (OSError, ValueError):
        return None
    return stat.f_bavail * stat.f_frsize if folder else None


def storage_free(tool: str) -> tuple[str, int | None]:
    """(where the runtime keeps images, bytes free there or None)."""
    done = proc.run([tool, "info", "--format", "{{json .}}"], timeout=TIMEOUT_S * 2)
    folder = _storage(done.stdout) if done.ok else ""
    return folder, _free(folder)


def images(tool: str) -> dict[str, str]:
    """Name (repository:tag) -> id of every named image. Raises UnsupportedError when the runtime does not answer."""
    words = [tool, "image", "ls", "--no-trunc", "--format", "{{.Repository}}:{{.Tag}} {{.ID}}"]
    done = proc.run(words, timeout=TIMEOUT_S * 6)
    if not done.ok:
        said = (done.stderr.strip().splitlines() or ["no answer in time"])[-1]
        raise UnsupportedError(f"{tool} does not answer: {said[:200]}", hints=(f"{tool} info",))
    rows = (line.split() for line in done.stdout.splitlines())
    # podman puts `localhost/` before a name that was given without a registry
    found = {row[0].removeprefix("localhost/"): row[1].removeprefix("sha256:") for row in rows if len(row) == 2}
    return {name: id for name, id in found.items() if "<none>" not in name}


def tag(tool: str, image: str, name: str) -> None:
    """Give an image one more name. Raises UnsupportedError with the runtime's last words."""
    done = proc.run([tool, "tag", image, name], timeout=TIMEOUT_S * 6)
    if not done.ok:
        said = (done.stderr.strip().splitlines() or ["no answer in time"])[-1]
        raise UnsupportedError(f"{tool} tag {image} {name}: {said[:200]}")


def _image_id(path: str, image: str, environ: Mapping[str, str] | None) -> str | None:
    if not image:
        return None
    done = proc.run([path, "image", "inspect", "--format", "{{.Id}}", image], timeout=TIMEOUT_S, env=environ)
    if done.ok:
        return done.stdout.strip()
    return "" if "no such" in done.stderr.lower() or "not found" in done.stderr.lower() else None


def _names(path: str, environ: Mapping[str, str]) -> tuple[str, ...] | None:
    done = proc.run([path, "ps", "-a", "--format", "{{.Names}}"], timeout=TIMEOUT_S, env=environ)
    return tuple(done.stdout.split()) if done.ok else None


def cdi_specs(root: Path) -> tuple[CdiSpec, ...] | None:
    """Every specification file, each file once; None when a folder that is there cannot be listed."""
    found: dict[Path, CdiSpec] = {}
    for folder in SPEC_FOLDERS:
        try:
            paths = sorted((root / folder).iterdir())
        except FileNotFoundError:
            continue
        except OSError:
            return None
        for path in paths:
            if path.suffix in (".yaml", ".json"):
                found.setdefault(path.resolve(), _spec(path, root))
    return tuple(found.values())


def _spec(path: Path, root: Path) -> CdiSpec:
    """One specification: its kind, its devices' names, and the host paths it names."""
    shown = "/" + str(path.relative_to(root))
    content = text(path)
    if content is None:
        return CdiSpec(path=shown, problem="cannot be read")
    try:
        kind, names, hosts = _of_json(content) if path.suffix == ".json" else _of_yaml(content)
    except ValueError as error:
        return CdiSpec(path=shown, problem=f"not valid JSON: {error}")
    if not kind or not names:
        return CdiSpec(path=shown, problem="states no kind or no device")
    missing = tuple(host for host in dict.fromkeys(hosts) if not (root / host.lstrip("/")).exists())
    return CdiSpec(path=shown, kind=kind, devices=tuple(dict.fromkeys(names)), missing=missing)


def _of_yaml(content: str) -> tuple[str, list[str], list[str]]:
    """What nvidia-ctk writes: block style, one key a line. No YAML library is worth three keys."""
    kind = re.search(r"""^["']?kind["']?:\s*["']?([^"'\s]+)""", content, re.MULTILINE)
    names = re.findall(r"""^\s*(?:-\s+)?name:\s*["']?([\w:.-]+)["']?\s*$""", content, re.MULTILINE)
    hosts = re.findall(r"""^\s*(?:-\s+)?hostPath:\s*["']?(/[^"'\n]+?)["']?\s*$""", content, re.MULTILINE)
    return (kind[1] if kind else "", names, hosts)


def _of_json(content: str) -> tuple[str, list[str], list[str]]:
    """Raises ValueError for what is no JSON."""
    tree = json.loads(content)
    if not isinstance(tree, dict):
        return "", [], []
    devices = tree.get("devices")
    names = (
        [str(item["name"]) for item in devices if isinstance(item, dict) and "name" in item]
        if isinstance(devices, list)
        else []
    )
    hosts: list[str] = []

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            if isinstance(node.get("hostPath"), str):
                hosts.append(node["hostPath"])
            for sub in node.values():
                walk(sub)
        elif isinstance(node, list):
            for sub in node:
                walk(sub)

    walk(tree)
    return str(tree.get("kind", "")), names, hosts


@dataclass(frozen=True)
class State:
    """One container as its runtime sees it. `pid`: its first process on this machine, 0 when it has none."""

    id: str
    name: str
    status: str
    pid: int
    exit_code: int
    oom_killed: bool
    restarts: int
    restart_policy: str
    error: str
    created: str
    image: str

    @property
    def running(self) -> bool:
        """True while its first process runs and nobody restarts it."""
        return self.status == "running"

    def ending(self) -> str | None:
        """None while it runs as it was started, else what became of it."""
        if self.restarts:
            return f"restarted {self.restarts} times by its restart policy {self.restart_policy!r}"
        if self.running:
            return None
        if self.status in ("created", "paused", "restarting", "removing", "dead"):
            return f"state {self.status!r}" + (f": {self.error}" if self.error else "")
        if self.oom_killed:
            return f"exit status {self.exit_code}, killed for memory: its memory limit or the machine's was reached"
        return f"exit status {self.exit_code}" + (f": {self.error}" if self.error else "")


def client() -> str:
    """The container client that is installed, docker before podman; '' for none."""
    return next((name for name in CLIENTS if shutil.which(name)), "")


def need_client() -> str:
    """As `client`. Raises UnsupportedError without one."""
    found = client()
    if not found:
        raise UnsupportedError("neither docker nor podman is installed", hints=(distro.install_line("podman"),))
    return found


def image_digest(layout: Layout) -> str:
    """Id of the profile's image without `sha256:`, '' when it is not there or nobody can be asked."""
    tool = client()
    found = _image_id(tool, layout.profile.engine.image, None) if tool else ""
    return (found or "").removeprefix("sha256:")


def state(tool: str, name: str) -> State | None:
    """A container by name or id, None when there is none. Raises UnsupportedError when the runtime does not answer."""
    done = proc.run([tool, "container", "inspect", name], timeout=TIMEOUT_S * 2)
    if not done.ok:
        said = done.stderr.strip() or done.stdout.strip()
        if "no such" in said.lower() or "no container with name" in said.lower():
            return None
        why = "no answer in time" if done.timed_out else (said.splitlines() or ["no reason given"])[-1][:200]
        raise UnsupportedError(f"{tool} does not answer: {why}", hints=(f"{tool} info",))
    try:
        tree = json.loads(done.stdout)[0]
        told, host = tree.get("State", {}), tree.get("HostConfig", {})
        return State(
            id=str(tree["Id"]),
            name=str(tree.get("Name", "")).lstrip("/"),
            status=str(told.get("Status", "")).lower(),
            pid=int(told.get("Pid") or 0),
            exit_code=int(told.get("ExitCode") or 0),
            oom_killed=bool(told.get("OOMKilled")),
            restarts=int(tree.get("RestartCount") or 0),
            restart_policy=str((host.get("RestartPolicy") or {}).get("Name") or "no"),
            error=str(told.get("Error") or "")[:200],
            created=str(tree.get("Created", "")),
            image=str(tree.get("Image", "")),
        )
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        raise UnsupportedError(f"{tool} container inspect gave something that is not its JSON") from None


def start(argv: Sequence[str], env: Mapping[str, str], cwd: Path) -> tuple[str, str]:
    """Run `docker run -d ...`: (container id, '') or ('', what the client said)."""
    done = proc.run(argv, timeout=START_S, env=env, cwd=cwd)
    found = done.stdout.strip().splitlines()[-1:] if done.ok else []
    if found and re.fullmatch(r"[0-9a-f]{12,64}", found[0]):
        return found[0], ""
    said = "no answer in time" if done.timed_out else (done.stderr.strip() or done.stdout.strip() or "nothing was said")
    return "", said


def stop(tool: str, name: str, grace_s: float) -> str:
    """Ask the container to end, end it after the grace, remove it; '' or what is left."""
    proc.run([tool, "stop", "-t", str(int(grace_s)), name], timeout=grace_s + 30)
    proc.run([tool, "rm", "-f", name], timeout=60)
    left = state(tool, name)
    return "" if left is None else f"container {left.name} ({left.id[:12]}) is {left.status} and cannot be removed"
