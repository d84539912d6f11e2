"""The gate's page: one HTML file with its plots inside, nothing to fetch. Pure."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from ds41ctl.core.gate import Comparison, Group, Ranked, Verdict, nats

WIDTH, HEIGHT = 760, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 16, 28, 30
_FLOOR = 1e-7  # nats: where the logarithmic axis begins
_BLUE, _RED, _GREY = "#1f63b4", "#c03020", "#ccc"
_STYLE = (
    "body{font:14px/1.45 sans-serif;margin:2em auto;max-width:64em;color:#222}table{border-collapse:collapse}"
    "td,th{padding:.2em .8em;border-bottom:1px solid #ddd;text-align:left}td.n{text-align:right;"
    "font-variant-numeric:tabular-nums}code{background:#f4f4f4;white-space:pre-wrap}.same{color:#167a3c}"
    ".different{color:#b02018}.unknown{color:#8a6d00}svg{display:block;margin:1em 0}"
)


def page(comparison: Comparison, title: str, facts: Sequence[tuple[str, str]]) -> str:
    """A comparison as a page. `facts`: (label, text) of what was compared."""
    parts = [_head(title), f"<h1>{_e(title)}</h1>", _verdict(comparison), _facts(facts)]
    parts.append(scatter(comparison))
    parts.append(bars("mean divergence by text set", comparison.sets, comparison.threshold))
    parts.append(bars("mean divergence by position", comparison.ranges, comparison.threshold))
    if comparison.cosines:
        parts.append(line("cosine of the hidden states after each layer", comparison.cosines))
    parts.append(_groups((comparison.overall, *comparison.sets, *comparison.ranges)))
    rows = "".join(
        f"<tr><td class=n>{nats(item.kl)}</td><td>{_e(item.prompt)}</td><td class=n>{item.position}</td>"
        f"<td><code>{_e(item.before)}</code></td><td><code>{_e(item.token)}</code></td>"
        f"<td><code>{_e(item.reference_best)}</code></td><td><code>{_e(item.candidate_best)}</code></td>"
        f"<td>{'toss-up' if item.fragile else ''}</td></tr>"
        for item in comparison.largest
    )
    parts.append(
        "<h2>Largest positions</h2><table><tr><th>nats<th>prompt<th>at<th>text before<th>next<th>reference's best"
        f"<th>candidate's best<th></tr>{rows}</table></body></html>\n"
    )
    return "".join(parts)


def ranking(ranked: Sequence[Ranked], title: str, facts: Sequence[tuple[str, str]]) -> str:
    """A ranking of packs as a page."""
    groups = [
        Group(item.name, item.comparison.overall.rows, item.comparison.overall.kl, item.comparison.overall.agreement)
        for item in ranked
    ]
    parts = [_head(title), f"<h1>{_e(title)}</h1>", _facts(facts), bars("mean divergence", groups, None)]
    parts.append(_groups(groups))
    for item in ranked:
        if item.comparison.cosines:
            parts.append(line(f"{item.name}: cosine after each layer", item.comparison.cosines))
    return "".join([*parts, "</body></html>\n"])


def _e(text: str) -> str:
    return html.escape("".join(c if c.isprintable() or c == "\n" else "?" for c in text))


def _head(title: str) -> str:
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{_e(title)}</title>'
        f"<style>{_STYLE}</style></head><body>"
    )


def _verdict(comparison: Comparison) -> str:
    words = {
        Verdict.SAME: "the same model",
        Verdict.DIFFERENT: "not the same model",
        Verdict.UNKNOWN: "cannot be judged",
    }
    reasons = "".join(f"<li>{_e(reason)}</li>" for reason in (*comparison.reasons, *comparison.left_out))
    return f'<p class="{comparison.verdict.value}"><b>{words[comparison.verdict]}</b></p><ul>{reasons}</ul>'


def _facts(facts: Sequence[tuple[str, str]]) -> str:
    return "<table>" + "".join(f"<tr><th>{_e(a)}</th><td>{_e(b)}</td></tr>" for a, b in facts) + "</table>"


def _groups(groups: Sequence[Group]) -> str:
    rows = "".join(
        f"<tr><td>{_e(item.name)}</td><td class=n>{item.rows}</td><td class=n>{nats(item.kl.mean)}</td>"
        f"<td class=n>{nats(item.kl.low)} to {nats(item.kl.high)}</td><td class=n>{item.agreement:.2%}</td></tr>"
        for item in groups
    )
    return (
        "<h2>Divergence</h2><table><tr><th>rows of<th>rows<th>mean, nats<th>95 % interval<th>same best token</tr>"
        f"{rows}</table>"
    )


def _frame(title: str, ticks: Sequence[tuple[float, str]]) -> list[str]:
    """Opening tag, title and horizontal lines; `ticks` are (share of the height, label)."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" '
        f'aria-label="{_e(title)}" font-family="sans-serif" font-size="11">',
        f'<text x="{_LEFT}" y="16" font-weight="bold">{_e(title)}</text>',
    ]
    for share, label in ticks:
        y = _y(share)
        parts.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{WIDTH - _RIGHT}" y2="{y:.1f}" stroke="{_GREY}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_e(label)}</text>')
    return parts


def _x(share: float) -> float:
    return _LEFT + (WIDTH - _LEFT - _RIGHT) * share


def _y(share: float) -> float:
    return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * min(max(share, 0.0), 1.0)


def scatter(comparison: Comparison, most: int = 4000) -> str:
    """Divergence of every row (of at most `most`, evenly chosen) over its position, logarithmic."""
    rows = comparison.rows[:: max(1, -(-len(comparison.rows) // most))]
    top = max(0.0, math.ceil(math.log10(max(row.kl for row in rows) + _FLOOR)))
    low = math.log10(_FLOOR)

    def share(value: float) -> float:
        return (math.log10(max(value, _FLOOR)) - low) / (top - low)

    ticks = [((power - low) / (top - low), f"1e{power}") for power in range(int(low), int(top) + 1)]
    parts = _frame("divergence of each position, nats", ticks)
    last = max(row.position for row in rows) or 1
    parts += [
        f'<circle cx="{_x(row.position / last):.1f}" cy="{_y(share(row.kl)):.1f}" r="1.6" '
        f'fill="{_BLUE if row.agrees else _RED}" fill-opacity=".6"/>'
        for row in rows
    ]
    for part in (0.0, 0.5, 1.0):
        parts.append(f'<text x="{_x(part):.0f}" y="{HEIGHT - 10}" text-anchor="middle">{part * last:.0f}</text>')
    if comparison.threshold is not None:
        y = _y(share(comparison.threshold))
        parts.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{WIDTH - _RIGHT}" y2="{y:.1f}" stroke="{_RED}"/>')
    return "".join([*parts, "</svg>"])


def bars(title: str, groups: Sequence[Group], threshold: float | None) -> str:
    """Means with their intervals, one bar a group, and the threshold as a line."""
    tops = [item.kl.high if math.isfinite(item.kl.high) else item.kl.mean for item in groups]
    top = max([*tops, threshold or 0.0]) * 1.1 or 1.0
    parts = _frame(title, [(share, f"{top * share:.3g}") for share in (0.0, 0.5, 1.0)])
    width = (WIDTH - _LEFT - _RIGHT) / max(len(groups), 1)
    for number, item in enumerate(groups):
        x, y = _LEFT + width * (number + 0.2), _y(item.kl.mean / top)
        parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width * 0.6:.1f}" height="{_y(0) - y:.1f}" fill="{_BLUE}"/>'
        )
        if math.isfinite(item.kl.high):
            middle = x + width * 0.3
            parts.append(
                f'<line x1="{middle:.1f}" y1="{_y(item.kl.low / top):.1f}" x2="{middle:.1f}" '
                f'y2="{_y(item.kl.high / top):.1f}" stroke="#222"/>'
            )
        parts.append(
            f'<text x="{x + width * 0.3:.1f}" y="{HEIGHT - 10}" text-anchor="middle">{_e(item.name[:24])}</text>'
        )
    if threshold is not None:
        y = _y(threshold / top)
        parts.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{WIDTH - _RIGHT}" y2="{y:.1f}" stroke="{_RED}"/>')
    return "".join([*parts, "</svg>"])


def line(title: str, values: Sequence[float]) -> str:
    """One value a layer."""
    low = min(values)
    span = max(max(values) - low, 1e-9)
    parts = _frame(title, [(share, f"{low + span * share:.6f}") for share in (0.0, 0.5, 1.0)])
    last = max(len(values) - 1, 1)
    path = " ".join(f"{_x(n / last):.1f},{_y((value - low) / span):.1f}" for n, value in enumerate(values))
    parts.append(f'<polyline points="{path}" fill="none" stroke="{_BLUE}" stroke-width="1.5"/>')
    for part in (0.0, 1.0):
        parts.append(f'<text x="{_x(part):.0f}" y="{HEIGHT - 10}" text-anchor="middle">{part * last:.0f}</text>')
    return "".join([*parts, "</svg>"])
