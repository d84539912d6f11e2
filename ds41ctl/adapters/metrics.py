"""The engine's own metrics: /metrics of vLLM as one record, by name, never by position or label order.

Engines of different age name and miss different metrics, so each field may be None: unknown, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """One reading, summed over ranks (`kv`: the fullest one). Counters start from 0 with the engine.

    `kv`: used share of the KV cache, 0 to 1. `drafts`: steps that drafted; `first_accepted`: those of them whose first
    draft was accepted. The pairs are (seconds in all, how many): time to first token,
    between tokens, and whole requests.
    """

    running: float | None = None
    waiting: float | None = None
    kv: float | None = None
    generated: float | None = None
    prompted: float | None = None
    cached: float | None = None
    prefix_queries: float | None = None
    prefix_hits: float | None = None
    preemptions: float | None = None
    drafted: float | None = None
    accepted: float | None = None
    drafts: float | None = None
    first_accepted: float | None = None
    started: float | None = None
    ttft: tuple[float, float] | None = None
    inter_token: tuple[float, float] | None = None
    request: tuple[float, float] | None = None
    prefix_caching: bool | None = None


_COUNTS = {
    "running": ("vllm:num_requests_running",),
    "waiting": ("vllm:num_requests_waiting",),
    "generated": ("vllm:generation_tokens_total", "vllm:generation_tokens"),
    "prompted": ("vllm:prompt_tokens_total", "vllm:prompt_tokens"),
    "cached": ("vllm:prompt_tokens_cached_total",),
    "prefix_queries": ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_queries"),
    "prefix_hits": ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_hits"),
    "preemptions": ("vllm:num_preemptions_total", "vllm:num_preemptions"),
    "drafted": ("vllm:spec_decode_num_draft_tokens_total",),
    "accepted": ("vllm:spec_decode_num_accepted_tokens_total",),
    "drafts": ("vllm:spec_decode_num_drafts_total",),
    "first_accepted": ("vllm:spec_decode_num_accepted_tokens_per_pos_total",),
}
_LARGEST = {
    "kv": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "started": ("process_start_time_seconds",),
}
_TIMES = {
    "ttft": "vllm:time_to_first_token_seconds",
    "inter_token": "vllm:inter_token_latency_seconds",
    "request": "vllm:e2e_request_latency_seconds",
}
_INFO = "vllm:cache_config_info"


def parse(text: str) -> EngineMetrics:
    """Metrics of a page. What is absent, not a number, or on a line that cannot be read is None. Never raises."""
    wanted = {name for names in (*_COUNTS.values(), *_LARGEST.values()) for name in names} | {_INFO}
    wanted |= {name + end for name in _TIMES.values() for end in ("_sum", "_count")}
    found: dict[str, list[float]] = {}
    caching: bool | None = None
    for name, labels, value in _samples(text, wanted):
        if name == _INFO:
            said = labels.get("enable_prefix_caching", "").lower()
            caching = {"true": True, "false": False}.get(said, caching)
        elif math.isfinite(value) and labels.get("position", "0") == "0":
            found.setdefault(name, []).append(value)
    fields: dict[str, float | None] = {}
    for field, names in _COUNTS.items():
        fields[field] = next((sum(found[name]) for name in names if name in found), None)
    for field, names in _LARGEST.items():
        fields[field] = next((max(found[name]) for name in names if name in found), None)
    times: dict[str, tuple[float, float] | None] = {}
    for field, name in _TIMES.items():
        total, count = found.get(name + "_sum"), found.get(name + "_count")
        times[field] = (sum(total), sum(count)) if total and count else None
    return EngineMetrics(
        running=fields["running"],
        waiting=fields["waiting"],
        kv=fields["kv"],
        generated=fields["generated"],
        prompted=fields["prompted"],
        cached=fields["cached"],
        prefix_queries=fields["prefix_queries"],
        prefix_hits=fields["prefix_hits"],
        preemptions=fields["preemptions"],
        drafted=fields["drafted"],
        accepted=fields["accepted"],
        drafts=fields["drafts"],
        first_accepted=fields["first_accepted"],
        started=fields["started"],
        ttft=times["ttft"],
        inter_token=times["inter_token"],
        request=times["request"],
        prefix_caching=caching,
    )


def _samples(text: str, wanted: set[str]) -> Iterable[tuple[str, dict[str, str], float]]:
    """Samples of the wanted names, line by line: one bad line must not hide the others."""
    for raw in text.splitlines():
        name = raw.partition("{")[0].partition(" ")[0]
        if name not in wanted:
            continue
        try:
            for family in text_string_to_metric_families(raw + "\n"):
                for sample in family.samples:
                    yield sample.name, dict(sample.labels), float(sample.value)
        except (ValueError, IndexError, KeyError):
            continue
