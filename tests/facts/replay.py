"""Loading recorded machines and the profiles they were looked at with: the shipped ones, and edited ones."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import profiles
from ds41ctl.core.facts import HostFacts
from ds41ctl.core.finding import Finding, Status
from ds41ctl.core.profile import Profile, parse_profile

FACTS = Path(__file__).parent
MACHINES = tuple(sorted(path.parent.name for path in FACTS.glob("*/facts.json")))


def machine(name: str) -> HostFacts:
    """One recorded machine."""
    return HostFacts.model_validate_json((FACTS / name / "facts.json").read_text())


# the V100 profile with an engine of ours: the store in hugepages is for somebody then
_OWN_STORE = {
    'storage = "engine"\nhost_copies = 1': 'storage = "hugetlb"\npage = "2M"',
    "[serve.env]\n": '[serve.env]\nDS41_ENGRAM_STORE = "${engram}"\n',
    "[engine]\n": "[engine]\nplugin = true\n",
}
# name -> (shipped profile, lines of it and what its owner made of them)
EDITED: dict[str, tuple[str, dict[str, str]]] = {
    "v100-own-store": (
        "v100-pp2tp4",
        {
            **_OWN_STORE,
            'source = "inferred"': 'source = "imported"',
            "[serve.env]\n": '[serve.env]\nVLLM_DS41_EXAMPLE = "1"\nDS41_ENGRAM_STORE = "${engram}"\n',
        },
    ),
    # a pack of another size, steps too big for the context, untrained draft tokens, fork, downloads, an open API
    "v100-careless": (
        "v100-pp2tp4",
        {
            **_OWN_STORE,
            'host = "127.0.0.1"': 'host = "0.0.0.0"',
            "size_bytes = 218_600_000_000": "size_bytes = 118_600_000_000",
            "max_num_batched_tokens = 1024": "max_num_batched_tokens = 2048",
            '"--max-num-batched-tokens", "1024"': '"--max-num-batched-tokens", "2048"',
            "spec_tokens = 5": "spec_tokens = 4",
            '"num_speculative_tokens": 5': '"num_speculative_tokens": 4',
            'CUDA_DEVICE_ORDER = "PCI_BUS_ID"\n': "",
            'GLOO_SOCKET_IFNAME = "lo"\n': "",
            'HF_HUB_OFFLINE = "1"\n': "",
            'MAX_JOBS = "16"\n': "",
            'VLLM_ENGINE_READY_TIMEOUT_S = "3600"': 'VLLM_ENGINE_READY_TIMEOUT_S = "600"',
            'VLLM_WORKER_MULTIPROC_METHOD = "spawn"\n': "",
        },
    ),
    # an open API, a container without shared memory, a pool and a tmpfs too small
    "cmp170hx-careless": (
        "cmp170hx-tp4",
        {
            "kv_pool_tokens = 2717420": "kv_pool_tokens = 200000\nprompt_logprobs = true",
            '  "--ipc=host",\n': "",
            '  "--ulimit", "memlock=-1",\n': "",
            '"-p", "${host}:${port}:${port}"': '"-p", "${port}:${port}"',
            "size_gib = 200": "size_gib = 100",
        },
    ),
    # no storage for the tables, and a diagnostic switch left on
    "cpu-tiny-unfilled": (
        "cpu-tiny",
        {"[serve.env]\n": '[serve.env]\nDS41_ENGRAM_UNFILLED = "1"\n', 'storage = "tmpfs"': 'storage = "none"'},
    ),
}
SHIPPED = tuple(sorted(path.stem for path in Path(profiles.__file__).parent.glob("*.toml")))


@cache
def profile(name: str) -> Profile:
    """A shipped profile, or an edited one."""
    base, edits = EDITED.get(name, (name, {}))
    text = (Path(profiles.__file__).parent / f"{base}.toml").read_text()
    for line, instead in {**edits, f'name = "{base}"': f'name = "{name}"'}.items():
        assert text.count(line) >= 1, f"{base}.toml has no {line!r}"
        text = text.replace(line, instead)
    return parse_profile(text, f"{name}.toml")


def changed(facts: HostFacts, part: str = "", **values: Any) -> HostFacts:
    """Facts with some fields of `part` (or of the whole) replaced."""
    if not part:
        return facts.model_copy(update=values)
    return facts.model_copy(update={part: getattr(facts, part).model_copy(update=values)})


def disk_changed(facts: HostFacts, role: str, **values: Any) -> HostFacts:
    """Facts with the filesystem behind one role replaced."""
    disks = tuple(d.model_copy(update=values) if d.role == role else d for d in facts.disks)
    return facts.model_copy(update={"disks": disks})


def statuses(findings: list[Finding]) -> dict[str, Status]:
    """Id -> status."""
    return {finding.id: finding.status for finding in findings}
