"""Redaction: facts without what identifies a person or a machine."""

from __future__ import annotations

import json
import re

from ds41ctl.core.facts import HostFacts

_HOME = re.compile(r"/home/[^/\"\s]+|/root(?=[/\"\s])")


def _without_person(process: dict[str, str]) -> None:
    """Leave the user's name out, and all of the command line but the program."""
    process["user"] = "USER" if process["user"] else ""
    process["command"] = process["command"].split(" ")[0]


def redacted(facts: HostFacts) -> HostFacts:
    """The same facts with host name, user names, home folders, command lines and GPU ids replaced."""
    tree = facts.model_dump(mode="json")
    tree["hostname"] = "HOST" if tree["hostname"] else ""
    port = tree.get("port") or {}
    if port.get("holder"):
        _without_person(port["holder"])
    for index, gpu in enumerate(tree.get("gpus") or []):
        gpu["uuid"] = f"GPU-{index}" if gpu.get("uuid") else ""
        for process in gpu.get("processes") or []:
            _without_person(process)
    for process in tree.get("others") or []:
        _without_person(process)
    tree["system"]["user"] = "USER" if tree["system"]["user"] else ""
    container = tree.get("container") or {}
    if container.get("names"):
        container["names"] = [f"container{index}" for index, _ in enumerate(container["names"])]
    text = _HOME.sub("/home/USER", json.dumps(tree))
    return HostFacts.model_validate(json.loads(text))
