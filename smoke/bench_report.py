"""Report of a bench: tables, comparison with published figures and earlier runs, export as a recipe. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ds41ctl.core.profile import Profile
from ds41ctl.core.recipe import write
from smoke.bench import Row

BENCH_SCHEMA = 1


def document(
    run: str,
    started: str,
    profile: Profile,
    digests: Mapping[str, str],
    rows: Sequence[Row],
    drift: Sequence[str],
    drafter: bool | None = None,
) -> dict[str, Any]:
    """What is saved: the rows, and what they belong to (`digests`: profile, engine, facts; `drafter`: on, off or not
    known)."""
    return {
        "schema": BENCH_SCHEMA,
        "run": run,
        "started": started,
        "profile": profile.name,
        **{f"{name}_digest": value for name, value in digests.items()},
        "drift": list(drift),
        "drafter": drafter,
        "rows": [row.as_json() for row in rows],
    }


def ratio(value: float | None, other: float | None) -> float | None:
    """value / other, None when either is missing."""
    return round(value / other, 3) if value is not None and other else None


def comparison(
    document_: Mapping[str, Any], profile: Profile, earlier: Mapping[str, Any] | None
) -> list[dict[str, Any]]:
    """One entry a row: the value, the published figure and the earlier run's, with ratios.

    A marked number is shown and not compared; an earlier run of another profile, engine, machine or setting of the
    drafter is not either, and neither is a figure that was published for another setting of the drafter.
    """
    same = earlier is not None and all(
        earlier.get(name) == document_.get(name)
        for name in ("profile_digest", "engine_digest", "facts_digest", "drafter")
    )
    figures = profile.figures(document_.get("drafter"))
    before = {row["name"]: row for row in earlier["rows"]} if earlier is not None and same else {}
    found = []
    for row in document_["rows"]:
        marked = bool(row["marks"])
        published = figures.get(row["name"])
        old = before.get(row["name"])
        old_value = old["value"] if old is not None and not old["marks"] else None
        found.append(
            {
                "name": row["name"],
                "value": row["value"],
                "published": published,
                "of_published": None if marked else ratio(row["value"], published),
                "earlier": old_value,
                "of_earlier": None if marked else ratio(row["value"], old_value),
                "marks": list(row["marks"]),
            }
        )
    return found


def lines(rows: Sequence[Row], compared: Sequence[Mapping[str, Any]]) -> list[str]:
    """The tables as text lines."""
    by_name = {item["name"]: item for item in compared}
    shown = []
    for row in rows:
        text = f"{row.name:<24} " + (f"{row.value:>9.4g} {row.unit}" if row.value is not None else f"-  ({row.note})")
        parts = [f"{name} {value:g}" for name, value in row.detail.items() if value is not None and name in _SHOWN]
        item = by_name.get(row.name)
        if item and item["of_published"] is not None:
            parts.append(f"{item['of_published']:.0%} of the published {item['published']:g}")
        if item and item["of_earlier"] is not None:
            parts.append(f"{item['of_earlier']:.0%} of the last run")
        if row.note and row.value is not None:
            parts.append(row.note)
        shown.append(text + ("   " + ", ".join(parts) if parts else ""))
        shown += [f"        mark: {mark}" for mark in row.marks]
    return shown


_SHOWN = ("stream_tps_p50", "ttft_s_p50", "ttft_s_p95", "inter_token_s_p50", "inter_token_s_p95", "drafter_acceptance",
          "prompt_tokens", "alone_tps")  # fmt: skip


def markdown(document_: Mapping[str, Any], profile: Profile, compared: Sequence[Mapping[str, Any]]) -> str:
    """The bench as Markdown."""
    head = [
        f"# Bench {document_['run']}",
        "",
        f"- profile {profile.name} `{document_['profile_digest'][:12]}`, engine "
        f"`{document_['engine_digest'][:12] or 'unknown'}`, machine `{document_['facts_digest'][:12]}`",
        f"- started {document_['started']}; temperature 0, thinking off, answers of {profile.bench.decode_tokens} "
        "tokens, first request discarded, tokens by the server's usage",
        "",
        "| row | tok/s | published | of it | earlier | of it | marks |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    notes = [f"- {row['name']}: {row['note']}" for row in document_["rows"] if row["note"]]
    rows = [
        "| "
        + " | ".join(
            [
                item["name"],
                *("-" if item[k] is None else f"{item[k]:g}" for k in ("value", "published", "of_published")),
                *("-" if item[k] is None else f"{item[k]:g}" for k in ("earlier", "of_earlier")),
                "; ".join(item["marks"]) or "-",
            ]
        )
        + " |"
        for item in compared
    ]
    return "\n".join([*head, *rows, *([""] if notes else []), *notes]) + "\n"


def recipe(document_: Mapping[str, Any], profile: Profile) -> dict[str, Any]:
    """The profile as a published recipe (seed 004's form) with the unmarked points of a run."""
    points: list[dict[str, Any]] = []
    for row in document_["rows"]:
        if row["marks"] or row["value"] is None:
            continue
        kind, _, rest = row["name"].partition(".")
        if kind == "decode":
            suite, _, place = rest.rpartition(".c")
            streams, _, behind = place.partition("@")
            point = {"concurrency": int(streams), "decode_tok_s": row["value"], "notes": f"{suite} decode, c{streams}"}
            point["context_len"] = int(behind) if behind else profile.serve.max_model_len
            if behind:
                point["notes"] += f", behind a prompt of {row['detail']['prompt_tokens']} tokens"
        elif row["name"] == "prefill.texts":
            size = f"{row['detail']['shortest']} to {row['detail']['longest']} tokens"
            notes = f"cold prefill, median of {row['detail']['runs']} runs of {size}; {row['note']}"
            point = {"context_len": row["detail"]["longest"], "prefill_tok_s": row["value"], "notes": notes}
        elif kind == "prefill":
            notes = f"cold prefill, median of {row['detail']['runs']}"
            point = {"context_len": int(rest), "prefill_tok_s": row["value"], "notes": notes}
        else:
            notes = f"one stream while a prompt of {rest} tokens is read"
            point = {"context_len": int(rest), "decode_tok_s": row["value"], "concurrency": 1, "notes": notes}
        points.append(point)
    return write(
        profile,
        points,
        f"measured by ds41ctl bench: temperature 0, thinking off, {profile.bench.decode_tokens}-token cap, tokens by "
        f"usage; profile {document_['profile_digest'][:12]}, engine {document_['engine_digest'][:12]}",
    )
