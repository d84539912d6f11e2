"""The status as a node_exporter textfile."""

from __future__ import annotations

from typing import Any

STATES = ("stopped", "starting", "ready", "died", "not answering")


def render(tree: dict[str, Any], now: float) -> str:
    """Metrics of one status document; what is not known is left out, never 0. `now`: seconds since the epoch."""
    label = f'profile="{_quoted(str(tree.get("profile", "")))}"'
    state = str(tree.get("state", ""))
    lines: list[str] = []

    def metric(name: str, text: str, rows: list[tuple[str, Any]]) -> None:
        known = [(labels, value) for labels, value in rows if value is not None]
        if known:
            lines.append(f"# HELP ds41_{name} {text}")
            lines.append(f"# TYPE ds41_{name} gauge")
            lines.extend(f"ds41_{name}{{{label}{labels}}} {float(value):.10g}" for labels, value in known)

    metric("state", "1 for the state the engine is in", [
        (f',state="{name}"', state.startswith(name)) for name in STATES
    ])  # fmt: skip
    metric("uptime_seconds", "since the engine was ready", [("", tree.get("uptime_s"))])
    load = tree.get("load") or {}
    metric("requests_running", "requests being computed", [("", load.get("running"))])
    metric("requests_waiting", "requests in the queue", [("", load.get("waiting"))])
    metric("generated_tokens", "tokens generated since the start", [("", load.get("generated"))])
    metric("decode_tokens_per_second", "between the two looks of this status", [("", load.get("tokens_per_s"))])
    metric("kv_used_ratio", "used share of the KV cache", [("", load.get("kv"))])
    metric("drafter_accepted_ratio", "accepted over drafted tokens since the start", [("", load.get("acceptance"))])
    metric("drift", "differences between the live engine and its profile", [
        ("", None if tree.get("drift") is None else len(tree["drift"]))
    ])  # fmt: skip
    gpus = tree.get("gpus") or []
    for name, key, scale in (
        ("gpu_memory_used_bytes", "used_mib", 1 << 20),
        ("gpu_sm_clock_hertz", "sm_mhz", 1_000_000),
        ("gpu_power_limit_watts", "power_limit_w", 1),
        ("gpu_temperature_celsius", "temperature_c", 1),
    ):
        rows = [(f',gpu="{gpu["index"]}"', None if gpu.get(key) is None else gpu[key] * scale) for gpu in gpus]
        metric(name, "of each GPU of the profile", rows)
    metric("status_timestamp_seconds", "when this was written", [("", now)])
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
