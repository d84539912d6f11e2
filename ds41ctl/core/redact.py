"""Redaction: facts without what identifies a person or a machine."""

from __future__ import annotations

import json
import re

from ds41ctl.core.facts import HostFacts

_HOME = re.compile(r"/home/[^/\"\s]+|/root(?=[/\"\s])")


def redacted(facts: HostFacts) -> HostFacts:
    """The same facts with host name, user names, home folders, command lines and GPU ids replaced."""
    tree = facts.model_dump(mode="json")
    tree["hostname"] = "HOST" if tree["hostname"] else ""
    port = tree.get("port") or {}
    if port.get("holder"):
        port["holder"]["user"] = "USER"
        port["holder"]["command"] = port["holder"]["command"].split(" ")[0]
    for index, gpu in enumerate(tree.get("gpus") or []):
        gpu["uuid"] = f"GPU-{index}" if gpu.get("uuid") else ""
    text = _HOME.sub("/home/USER", json.dumps(tree))
    return HostFacts.model_validate(json.loads(text))
