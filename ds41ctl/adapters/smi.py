"""nvidia-smi: topology as text, the fallback where NVML gives none and the cross-check where it does."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from ds41ctl.adapters import proc
from ds41ctl.core import smitext
from ds41ctl.core.facts import SmiTopology

TIMEOUT_S = 5.0  # policy: with persistence mode off a first answer takes seconds
_QUESTIONS = (("topo", "-m"), ("topo", "-p2p", "r"), ("nvlink", "-s"))


def topology(path: str, environ: Mapping[str, str]) -> SmiTopology:
    """Ask the three tables at the same time. Never raises: what went wrong is in `problem`."""
    with ThreadPoolExecutor(max_workers=len(_QUESTIONS)) as pool:
        answers = list(pool.map(lambda words: proc.run([path, *words], timeout=TIMEOUT_S, env=environ), _QUESTIONS))
    matrix, peers, links = answers
    if not matrix.ok:
        said = (matrix.stdout + matrix.stderr).strip().splitlines()
        why = "no answer in time" if matrix.timed_out else (said[0] if said else f"exit status {matrix.returncode}")
        return SmiTopology(problem=why[:200])
    return parse(matrix.stdout, peers.stdout if peers.ok else "", links.stdout if links.ok else "")


def parse(matrix: str, peers: str = "", links: str = "") -> SmiTopology:
    """The texts of `topo -m`, `topo -p2p r` and `nvlink -s` as facts."""
    found, read = smitext.topo_m(matrix), smitext.topo_p2p(peers)
    return SmiTopology(
        links=found.rows,
        numa=found.numa,
        p2p_read=read.rows,
        nvlinks_up=smitext.nvlink_status(links),
        odd=found.odd + read.odd,
        problem="" if found.rows else "nvidia-smi topo -m printed no matrix",
    )
