"""The container runtime, its image, and the CDI specifications that name the GPUs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds41ctl.adapters import proc
from ds41ctl.adapters.textfile import text
from ds41ctl.core.facts import CdiSpec, ContainerFacts, ToolFacts

TIMEOUT_S = 5.0  # policy
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
    return ContainerFacts(
        runtime=tool.name,
        answers=True,
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


def _image_id(path: str, image: str, environ: Mapping[str, str]) -> str | None:
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
