"""Report of a soak: figures, Markdown, one HTML page, PNG and Prometheus text. Pure; files are the CLI's.

Everything is made from the trace and the verdict, so that a report can be made again from the record of any run.
"""

from __future__ import annotations

import html
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from smoke import stats
from smoke.plots import Plot, Series, png, svg
from smoke.soak_judge import SoakVerdict
from smoke.trace import Trace

REPORT_SCHEMA = 1
COVERS = (
    "requests answered without an error, a broken stream, a silent empty answer or an unusable tool call",
    "speed and first tokens steady from the first to the last fifth",
    "memory, KV cache and queue back where they were whenever the load stopped",
    "canaries right in every round: 391, the tool call, exact copies, repeats, pictures",
)


@dataclass(frozen=True)
class Report:
    """A run, ready to be shown. `figures` holds plain numbers, None where nothing was measured."""

    run: str
    trace: Trace
    verdict: SoakVerdict
    figures: Mapping[str, float | int | None]

    def as_json(self) -> dict[str, Any]:
        """The report as one document."""
        start = self.trace.start
        return {
            "schema": REPORT_SCHEMA,
            "run": self.run,
            "verdict": self.verdict.word,
            "reasons": list(self.verdict.reasons),
            "started": start.ts if start else "",
            "profile": start.profile if start else "",
            "profile_digest": start.profile_digest if start else "",
            "engine_digest": start.engine_digest if start else "",
            "facts_digest": start.facts_digest if start else "",
            "mode": start.mode if start else "",
            "figures": dict(self.figures),
            "findings": [item.model_dump(mode="json") for item in self.verdict.findings],
            "not_proved": list(self.verdict.not_proved),
        }


def make(run: str, trace: Trace, verdict: SoakVerdict) -> Report:
    """Report of a judged trace."""
    return Report(run, trace, verdict, _figures(trace))


def _figures(trace: Trace) -> dict[str, float | int | None]:
    done = [turn for turn in trace.turns if turn.outcome == "ok"]
    rates = [turn.decode_tps for turn in done if turn.decode_tps is not None]
    waits = [turn.ttft_s for turn in done if turn.ttft_s is not None]
    rss = [item.rss_mib for item in trace.samples if item.rss_mib is not None]
    vram = [sum(g.used_mib or 0 for g in item.gpus) for item in trace.samples if item.gpus]
    return {
        "seconds": round(trace.seconds, 1),
        "requests": len(trace.turns),
        "answered": len(done),
        "hung_up": sum(turn.outcome == "cancelled" for turn in trace.turns),
        "failed": sum(turn.outcome not in ("ok", "cancelled", "unfinished") for turn in trace.turns),
        "tokens": sum(turn.completion_tokens or 0 for turn in trace.turns),
        "canaries": len(trace.canaries),
        "decode_tps_p50": _rounded(statistics.median(rates)) if rates else None,
        "ttft_s_p50": _rounded(statistics.median(waits)) if waits else None,
        "ttft_s_p95": _rounded(stats.p95(waits)) if waits else None,
        "rss_mib_first": _rounded(rss[0]) if rss else None,
        "rss_mib_last": _rounded(rss[-1]) if rss else None,
        "vram_mib_last": _rounded(vram[-1]) if vram else None,
        "longest_prompt": max((turn.prompt_tokens or 0 for turn in trace.turns), default=0),
    }


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def plots(trace: Trace) -> list[Plot]:
    """The pictures of a run; what was never measured has none."""
    done = [turn for turn in trace.turns if turn.outcome == "ok"]
    samples = trace.samples
    gpus = max((len(item.gpus or ()) for item in samples), default=0)
    wanted: list[tuple[str, list[Series]]] = [
        ("Decode of one stream (tok/s)", _by_kind(trace, "decode_tps")),
        ("Time to first token (s)", _by_kind(trace, "ttft_s")),
        (
            "Host memory of the engine (MiB)",
            [Series("", [(item.at, item.rss_mib) for item in samples if item.rss_mib is not None])],
        ),
        ("KV cache used (%)", [Series("", [(item.at, 100 * item.kv) for item in samples if item.kv is not None])]),
        (
            "GPU memory (MiB)",
            [
                Series(
                    f"GPU {i}",
                    [
                        (item.at, used)
                        for item in samples
                        if item.gpus and i < len(item.gpus) and (used := item.gpus[i].used_mib) is not None
                    ],
                )
                for i in range(gpus)
            ],
        ),
        (
            "SM clock (MHz)",
            [
                Series(
                    f"GPU {i}",
                    [
                        (item.at, float(mhz))
                        for item in samples
                        if item.gpus and i < len(item.gpus) and (mhz := item.gpus[i].sm_mhz) is not None
                    ],
                )
                for i in range(gpus)
            ],
        ),
        (
            "Context of a request (tokens)",
            [Series("", [(turn.at, float(turn.prompt_tokens)) for turn in done if turn.prompt_tokens], line=False)],
        ),
    ]
    found = []
    for title, series in wanted:
        kept = [item for item in series if item.points]
        if kept:
            found.append(Plot(title, trace.seconds, kept))
    return found


def _by_kind(trace: Trace, name: str) -> list[Series]:
    points: dict[str, list[tuple[float, float]]] = {}
    for turn in trace.turns:
        value = getattr(turn, name)
        if turn.outcome == "ok" and value is not None:
            points.setdefault(turn.kind, []).append((turn.at, value))
    return [Series(kind, found, line=False) for kind, found in sorted(points.items())]


def picture(trace: Trace) -> bytes:
    """All plots as one PNG."""
    return png(plots(trace))


def headline(report: Report) -> str:
    """The verdict in one line."""
    figures = report.figures
    text = (
        f"{report.verdict.word.upper()}: {(figures['seconds'] or 0) / 60:.1f} min, {figures['requests']} requests, "
        f"{figures['failed']} failed"
    )
    return f"{text} ({', '.join(report.verdict.reasons)})" if report.verdict.reasons else text


def markdown(report: Report) -> str:
    """The report as Markdown."""
    start = report.trace.start
    lines = [f"# Soak {report.run}", "", f"**{headline(report)}**", ""]
    lines += ["A pass covers:", "", *(f"- {item}" for item in COVERS), ""]
    lines += ["It does not prove:", "", *(f"- {item}" for item in report.verdict.not_proved), ""]
    lines += ["| criterion | status | limit | found |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {item.id} | {item.status.upper()} | {_cell(item.expected)} | {_cell(item.summary)} |"
        for item in report.verdict.findings
    ]
    lines += ["", "![plots](plots.png)", "", "| figure | value |", "| --- | --- |"]
    lines += [f"| {name} | {'not measured' if value is None else value} |" for name, value in report.figures.items()]
    lines += ["", "## Environment", ""]
    if start is not None:
        lines += [
            f"- profile {start.profile} `{start.profile_digest[:12]}`",
            f"- engine manifest `{start.engine_digest[:12] or 'unknown'}`",
            f"- machine facts `{start.facts_digest[:12] or 'unknown'}`",
            f"- started {start.ts}, mode {start.mode}, planned {start.planned_s / 60:g} min",
            *(f"- note: {item}" for item in start.notes),
            "",
            "Again:",
            "",
            f"    ds41ctl soak run --profile {start.profile} --minutes {start.planned_s / 60:g} --mode {start.mode}",
        ]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


_CSS = (
    "body{font:15px/1.45 sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse;width:100%}td,th{border-bottom:1px solid #ddd;padding:.25rem .5rem;"
    "text-align:left;vertical-align:top}.pass,.OK{color:#14703a}.fail,.FAIL,.CRASH{color:#b00020;font-weight:bold}"
    ".inconclusive,.UNKNOWN{color:#7a3e9d}.WARN{color:#9a6700}.SKIP{color:#777}svg{width:100%;height:auto}"
)


def page(report: Report) -> str:
    """The report as one HTML page that needs no other file and no network."""
    start, word = report.trace.start, report.verdict.word
    rows = "".join(
        f"<tr><td>{html.escape(item.id)}</td><td class={item.status.upper()}>{item.status.upper()}</td>"
        f"<td>{html.escape(item.expected)}</td><td>{html.escape(item.summary)}"
        + (f"<br><small>{html.escape(item.why)}</small>" if item.why else "")
        + "</td></tr>"
        for item in report.verdict.findings
    )
    figures = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{'not measured' if value is None else value}</td></tr>"
        for name, value in report.figures.items()
    )
    where = ""
    if start is not None:
        where = (
            f"<p>profile {html.escape(start.profile)} <code>{start.profile_digest[:12]}</code>, engine "
            f"<code>{start.engine_digest[:12] or 'unknown'}</code>, machine <code>{start.facts_digest[:12]}</code>, "
            f"started {html.escape(start.ts)}, mode {html.escape(start.mode)}</p>"
        )
    items = "".join(f"<li>{html.escape(item)}</li>" for item in report.verdict.not_proved)
    covers = "".join(f"<li>{html.escape(item)}</li>" for item in COVERS)
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>Soak {html.escape(report.run)}</title>"
        f"<style>{_CSS}</style><h1>Soak {html.escape(report.run)}</h1>"
        f"<p class={word}>{html.escape(headline(report))}</p><h2>A pass covers</h2><ul>{covers}</ul>"
        f"<h2>It does not prove</h2><ul>{items}</ul><h2>Criteria</h2>"
        f"<table><tr><th>criterion<th>status<th>limit<th>found</tr>{rows}</table><h2>Plots</h2>"
        + "".join(svg(plot) for plot in plots(report.trace))
        + f"<h2>Figures</h2><table>{figures}</table><h2>Environment</h2>{where}</html>\n"
    )


def prometheus(report: Report, *, now: float, last_success: float | None) -> bytes:
    """Text for a node exporter's textfile collector; a missed run shows as an old timestamp."""
    registry = CollectorRegistry()

    def gauge(name: str, what: str, value: float | None) -> None:
        if value is not None:
            Gauge(name, what, ["profile"], registry=registry).labels(profile).set(value)

    profile = report.trace.start.profile if report.trace.start else ""
    figures = report.figures
    gauge("ds41_soak_last_run_timestamp_seconds", "end of the last run", now)
    success = now if report.verdict.word == "pass" else last_success
    gauge("ds41_soak_last_success_timestamp_seconds", "end of the last run that passed", success)
    verdicts = Gauge(
        "ds41_soak_verdict", "1 for the verdict of the last run", ["profile", "verdict"], registry=registry
    )
    for word in ("pass", "fail", "inconclusive"):
        verdicts.labels(profile, word).set(float(word == report.verdict.word))
    gauge("ds41_soak_duration_seconds", "length of the last run", figures["seconds"])
    gauge("ds41_soak_requests", "requests of the last run", figures["requests"])
    gauge("ds41_soak_errors", "failed requests of the last run", figures["failed"])
    gauge("ds41_soak_decode_tokens_per_second", "median decode of one stream", figures["decode_tps_p50"])
    gauge("ds41_soak_ttft_seconds_p95", "time to first token, 95th percentile", figures["ttft_s_p95"])
    gauge("ds41_soak_host_memory_mib", "engine's host memory at the end", figures["rss_mib_last"])
    gauge("ds41_soak_gpu_memory_mib", "GPU memory at the end, all GPUs", figures["vram_mib_last"])
    text: bytes = generate_latest(registry)
    return text


def compare(reports: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Rows of a table over several runs' report documents, oldest first; the first row is its head."""
    names = ("requests", "failed", "decode_tps_p50", "ttft_s_p95", "rss_mib_first", "rss_mib_last", "seconds")
    rows: list[tuple[str, ...]] = [("run", "verdict", *names, "engine")]
    for item in sorted(reports, key=lambda found: str(found.get("started", ""))):
        figures = item.get("figures", {})
        shown = tuple("-" if figures.get(name) is None else f"{figures[name]:g}" for name in names)
        rows.append((str(item["run"]), str(item["verdict"]), *shown, str(item.get("engine_digest", ""))[:8] or "-"))
    return rows
