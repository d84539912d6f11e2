"""The deeper looks of preflight: level 2 reads data and imports the engine, level 3 runs work on the cards."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from itertools import combinations, pairwise
from pathlib import Path

from ds41ctl.adapters import pack, peercopy, proc
from ds41ctl.core.facts import AbiFacts, DigestFacts, HostFacts, LoadFacts, PeerCopyFacts
from ds41ctl.core.launch import INHERITED
from ds41ctl.core.layout import Layout

IMPORT_TIMEOUT_S = 180.0  # policy: a first import without bytecode from a slow disk takes a minute
COPY_TIMEOUT_S = 300.0  # policy
COPY_MIB = 256  # policy: long against the latency of a copy, short against the memory of a card

_IMPORT = """
import json, torch
found = {"torch": torch.__version__, "torch_cuda": torch.version.cuda or "", "arch_list": torch.cuda.get_arch_list()}
import vllm
found["vllm_file"] = vllm.__file__
from vllm.platforms import current_platform
load = getattr(current_platform, "import_kernels", None)
if load is not None:
    load()
else:
    import vllm._C
print("ds41-abi " + json.dumps(found))
"""


def deepen(facts: HostFacts, layout: Layout, level: int, environ: Mapping[str, str]) -> HostFacts:
    """`facts` with what `level` adds. Takes seconds to minutes; only called when asked for."""
    found: dict[str, object] = {}
    venv = layout.profile.engine.kind == "venv" and os.access(layout.python, os.X_OK)
    clean = {name: environ[name] for name in INHERITED if name in environ}
    if level >= 2:
        found["abi"] = abi(layout.python, clean) if venv else None
        found["digests"] = digests(layout)
    if level >= 3 and layout.profile.hardware.gpus > 1:
        found["load"] = peer_copies(layout, clean) if venv else LoadFacts(problem="no engine Python on this host")
    return facts.model_copy(update=found)


def abi(python: Path, environ: Mapping[str, str]) -> AbiFacts:
    """Import torch, vLLM and its compiled parts in a process of its own: a crash there is an answer here."""
    done = proc.run([str(python), "-I", "-c", _IMPORT], timeout=IMPORT_TIMEOUT_S, env=environ, cwd=Path("/"))
    answer = next((line for line in done.stdout.splitlines() if line.startswith("ds41-abi ")), None)
    if done.ok and answer is not None:
        return AbiFacts(ok=True, **json.loads(answer.removeprefix("ds41-abi ")))
    if done.timed_out:
        return AbiFacts(ok=False, problem=f"no answer in {IMPORT_TIMEOUT_S:.0f} s")
    if done.returncode < 0:
        return AbiFacts(ok=False, problem=f"ended by signal {-done.returncode}")
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return AbiFacts(ok=False, problem=lines[-1][:200] if lines else f"exit status {done.returncode}")


def digests(layout: Layout) -> tuple[DigestFacts, ...]:
    """sha256 of every pinned file of the pack, now."""
    return tuple(
        DigestFacts(name=item.name, problem=pack.file_problem(layout.model_dir, item, hash_it=True))
        for item in pack.expected(layout)
    )


def peer_copies(layout: Layout, environ: Mapping[str, str]) -> LoadFacts:
    """A pattern copied between every pair of each group and from stage to stage, in the engine's Python: ds41ctl
    itself stays off the cards."""
    groups = [group for _, group in layout.gpu_groups] or [tuple(range(layout.profile.hardware.gpus))]
    inside = [pair for group in groups for pair in combinations(group, 2)]
    # a pipeline hands its hidden states from each rank of a stage to the same rank of the next
    across = [pair for stage, following in pairwise(groups) for pair in zip(stage, following, strict=False)]
    pairs = [f"{a},{b}" for a, b in (*inside, *across)]
    done = proc.run(
        [str(layout.python), "-I", str(Path(peercopy.__file__)), str(COPY_MIB), *pairs],
        timeout=COPY_TIMEOUT_S,
        env={**environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
        cwd=Path("/"),
    )
    if not done.ok:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        why = "no answer in time" if done.timed_out else (lines[-1] if lines else f"exit status {done.returncode}")
        return LoadFacts(problem=why[:200])
    try:
        rows = json.loads(done.stdout.strip().splitlines()[-1])
        return LoadFacts(copies=tuple(PeerCopyFacts.model_validate(row) for row in rows))
    except (ValueError, IndexError):
        return LoadFacts(problem="the copy program printed no result")
