"""gate: is this engine, with these patches, kernels and pack, still the same model?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ds41ctl import cli
from ds41ctl.cli import live, options
from ds41ctl.cli.app import group
from ds41ctl.cli.session import Session, open_running, open_session
from ds41ctl.cli.up import heading
from ds41ctl.core.errors import ConfigError, NotFoundError
from ds41ctl.core.exits import Exit

if TYPE_CHECKING:
    from ds41ctl.adapters.oracle import OracleRun
    from ds41ctl.core.gate import Comparison, Group
    from ds41ctl.core.reference import Reference

app = group("Compare engine or pack with the fp32 oracle: is it still the same model?")

PromptsOpt = Annotated[
    Path | None, typer.Option("--prompts", metavar="FILE", help="JSON Lines; default: the built-in.")
]
ActivationsOpt = Annotated[str, typer.Option("--activations", help="fp32 or mxfp8: how activations are rounded.")]
KeysOpt = Annotated[str, typer.Option("--keys", help="fp32 or trained: how keys are rounded.")]
ReadAheadOpt = Annotated[float, typer.Option("--read-ahead-gib", min=0.01, help="Memory for experts read ahead.")]
ThreadsOpt = Annotated[int, typer.Option("--threads", min=0, help="0: OMP_NUM_THREADS, else every core.")]
WorkOpt = Annotated[Path | None, typer.Option("--work", metavar="DIR", help="Where a killed run goes on from.")]
HtmlOpt = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Also write a page with plots.")]
ThresholdOpt = Annotated[
    float | None, typer.Option("--threshold", min=0, help="Mean nats a position; default: the profile's gate.kl_max.")
]


@app.command()
def record(
    profile: options.ProfileOpt = None,
    pack: Annotated[Path | None, typer.Option("--pack", metavar="DIR", help="Default: the profile's pack.")] = None,
    prompts: PromptsOpt = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Reference to write.")] = None,
    engine: Annotated[
        bool, typer.Option("--engine", help="Ask the running engine about an existing reference.")
    ] = False,
    reference: Annotated[
        Path | None, typer.Option("--reference", metavar="FILE", help="With --engine: whose prompts to ask.")
    ] = None,
    top_k: Annotated[int, typer.Option("--top-k", min=1, max=4096, help="Tokens kept of each position.")] = 128,
    activations: ActivationsOpt = "fp32",
    keys: KeysOpt = "fp32",
    layer_positions: Annotated[int, typer.Option("--layer-positions", min=0, help="Hidden states kept.")] = 64,
    checkpoint_every: Annotated[int, typer.Option("--checkpoint-every", min=1, help="Layers a saved state.")] = 1,
    read_ahead_gib: ReadAheadOpt = 2.0,
    threads: ThreadsOpt = 0,
    work: WorkOpt = None,
    json: options.JsonOpt = False,
) -> None:
    """Run the fp32 oracle over a pack, one layer in memory at a time, and keep what it says.

    Killed, it goes on from the last finished layer when the same command is run again.
    """
    from ds41ctl.steps import gate

    _choice("--activations", activations, ("fp32", "mxfp8"))
    _choice("--keys", keys, ("fp32", "trained"))
    if engine:
        _record_engine(profile, reference, out)
        return
    session = open_session(profile)
    cli.out.line(heading("gate record", session))
    target = out or gate.default_path(session.layout)
    wanted = _oracle(
        session, pack or session.layout.model_dir, prompts or gate.builtin_prompts(), target,
        work, read_ahead_gib, threads,
        top_k=top_k, activations=activations, keys=keys, layer_positions=layer_positions,
        checkpoint_every=checkpoint_every,
    )  # fmt: skip
    result = _run(session, wanted)
    cli.out.line(
        f"{target}   {result['bytes'] / 1e6:,.1f} MB, read {result['read'] / 1e9:,.2f} GB, "
        f"peak {result['peak_rss'] / 2**30:.1f} of {result['memory_bound'] / 2**30:.1f} GiB",
        mark="OK",
        tail=f"{result['seconds']:,.0f} s",
    )
    cli.out.data({"reference": str(target), **result})


def _record_engine(profile: str | None, reference: Path | None, out: Path | None) -> None:
    from ds41ctl.steps import gate

    session = open_running(profile)
    known = gate.read(reference or gate.default_path(session.layout))
    target = out or session.layout.dirs.state / "gate" / f"{session.layout.name}-engine.ref"
    said, _, left_out = gate.ask(
        live.client(session), session.profile, known, cli.out.progress, argv=live.started(session)
    )
    digest = gate.write(target, said)
    for text in left_out:
        cli.out.note(f"left out: {text}")
    cli.out.line(f"{target}   {len(said.prompts)} prompts of the running engine", mark="OK")
    cli.out.data({"reference": str(target), "sha256": digest, "prompts": len(said.prompts), "left_out": left_out})


@app.command()
def compare(
    reference: Annotated[Path | None, typer.Argument(help="Reference; default: the profile's.")] = None,
    other: Annotated[Path | None, typer.Argument(help="A second reference; default: the running engine.")] = None,
    profile: options.ProfileOpt = None,
    threshold: ThresholdOpt = None,
    html: HtmlOpt = None,
    json: options.JsonOpt = False,
) -> None:
    """Compare the running engine, or a second reference, with a reference. Exit 1 above the threshold, 3 when it
    cannot be judged."""
    from ds41ctl.core import gate as core
    from ds41ctl.core.gatehtml import page
    from ds41ctl.steps import gate

    session = open_running(profile) if other is None else open_session(profile)
    path = reference or gate.default_path(session.layout)
    known = gate.read(path)
    limit = threshold if threshold is not None else session.profile.gate.kl_max
    left_out: list[str] = []
    if other is not None:
        candidate, against = gate.read(other), str(other)
        if [p.ids for p in candidate.prompts] != [p.ids for p in known.prompts]:
            known, candidate = _common(known, candidate, other)
    else:
        candidate, chosen, left_out = gate.ask(
            live.client(session), session.profile, known, cli.out.progress, argv=live.started(session)
        )
        known, against = core.same_prompts(known, chosen, candidate.prompts), f"{session.layout.url}/v1"
    found = core.compare(known, candidate, limit, left_out)
    source = session.profile.source_of("gate.kl_max") if threshold is None and limit is not None else ""
    facts = _facts(known, path, candidate, against, limit, source)
    cli.out.data({"reference": known.sha256, "candidate": against, "threshold_source": source, **core.as_json(found)})
    cli.out.line(f"gate compare  {session.profile.name}  {against}")
    for label, text in facts:
        cli.out.line(f"  {label:<10} {text}")
    _show(found)
    if html is not None:
        _write(html, page(found, f"gate: {session.profile.name}", facts))
    _verdict(found)


@app.command()
def fidelity(
    reference: Annotated[
        Path | None, typer.Argument(help="Record of another engine or pack (its windows are asked).")
    ] = None,
    profile: options.ProfileOpt = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Restart the engine half-way: the numbers must be the same bits.")
    ] = False,
    texts: Annotated[
        Path | None, typer.Option("--texts", metavar="DIR", help="Text sets, one NAME.txt each; default: generated.")
    ] = None,
    windows: Annotated[int, typer.Option("--windows", min=1, max=4096, help="Windows of each text set.")] = 64,
    window_tokens: Annotated[
        int | None, typer.Option("--window-tokens", min=2, help="Tokens of a window; default: 1024, or what is safe.")
    ] = None,
    lists: Annotated[int, typer.Option("--lists", min=0, max=10_000, help="Lists of 40 identifiers to copy.")] = 100,
    passes: Annotated[int, typer.Option("--passes", min=1, max=99, help="How often each list is copied.")] = 3,
    junit: Annotated[Path | None, typer.Option("--junit", metavar="FILE", help="Also write JUnit XML.")] = None,
    json: options.JsonOpt = False,
) -> None:
    """Copies of lists, perplexity by text set, and with --restart the same bits after a restart: all in one go.

    Exit 1 when something is wrong, 3 when it cannot be judged; 11 when another load runs.
    """
    from ds41ctl.cli.fidelity import Wanted, measure

    wanted = Wanted(
        reference=reference, restart=restart, texts=texts, windows=windows, window_tokens=window_tokens, lists=lists,
        passes=passes, junit=junit,
    )  # fmt: skip
    session = open_running(profile)
    with live.only_load(session, f"a fidelity run of {session.profile.name}"):
        measure(session, wanted)


@app.command()
def packs(
    folders: Annotated[list[Path], typer.Argument(help="Folders of packs, or references made of them.")],
    reference: Annotated[
        Path | None, typer.Option("--reference", metavar="FILE", help="Default: the profile's.")
    ] = None,
    profile: options.ProfileOpt = None,
    read_ahead_gib: ReadAheadOpt = 2.0,
    threads: ThreadsOpt = 0,
    work: WorkOpt = None,
    html: HtmlOpt = None,
    json: options.JsonOpt = False,
) -> None:
    """Rank packs by how far the oracle says they are from a reference (of the official pack, say)."""
    from ds41ctl.core import gate as core
    from ds41ctl.core.gatehtml import ranking
    from ds41ctl.steps import gate

    session = open_session(profile)
    path = reference or gate.default_path(session.layout)
    known = gate.read(path)
    cli.out.line(heading("gate packs", session))
    compared: dict[str, core.Comparison] = {}
    for folder in folders:
        name = str(folder)
        if folder.is_dir():
            base = work or session.layout.dirs.state / "gate" / "packs"
            place = base / core_name(folder)
            target = place / "pack.ref"
            lines = gate.with_prompts_of(known, place / "prompts.jsonl")
            wanted = _oracle(session, folder, lines, target, place / "work", read_ahead_gib, threads)
            _run(session, gate.settings_of(known, wanted))
            candidate = gate.read(target)
        elif folder.exists():
            candidate = gate.read(folder)
        else:
            raise NotFoundError(f"no pack folder and no reference {folder}")
        compared[name] = core.compare(known, candidate, session.profile.gate.kl_max)
    ranked = core.rank(compared)
    facts = [("reference", f"{path}  sha256 {known.sha256[:12]}"), ("packs", str(len(ranked)))]
    cli.out.data(
        {
            "reference": known.sha256,
            "ranking": [
                {"pack": item.name, "behind": item.behind.mean, **core.as_json(item.comparison)} for item in ranked
            ],
        }
    )
    for number, item in enumerate(ranked, 1):
        kl, behind = item.comparison.overall.kl, item.behind
        cli.out.line(
            f"{number:>3}  {item.name}  KL {core.nats(kl.mean)} [{core.nats(kl.low)}, {core.nats(kl.high)}]"
            + (
                f"  +{core.nats(behind.mean)} [{behind.low:.2g}, {behind.high:.2g}] behind the first"
                if number > 1
                else ""
            )
            + f"  same best {item.comparison.overall.agreement:.2%}"
        )
    if html is not None:
        _write(html, ranking(ranked, f"packs against {path.name}", facts))


def core_name(folder: Path) -> str:
    """A folder name for a pack's path, the same each time."""
    import hashlib

    whole = str(folder.resolve())
    return f"{folder.resolve().name}-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"


def _choice(option: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise typer.BadParameter(f"{option} is {' or '.join(known)}, found {value}")


def _oracle(
    session: Session, pack: Path, prompts: Path, out: Path, work: Path | None, read_ahead_gib: float, threads: int,
    **more: Any,
) -> OracleRun:  # fmt: skip
    from ds41ctl.adapters.oracle import OracleRun

    if not prompts.is_file():
        raise NotFoundError(f"no prompts {prompts}")
    return OracleRun(
        pack=pack,
        prompts=prompts,
        out=out,
        work=work or session.layout.dirs.state / "gate" / "work" / out.stem,
        read_ahead_gib=read_ahead_gib,
        threads=threads,
        **more,
    )


def _run(session: Session, wanted: OracleRun) -> dict[str, Any]:
    from ds41ctl.steps.gate import Record

    step = Record(session.layout, wanted)

    def progress(text: str, data: dict[str, Any]) -> None:
        if data.get("note"):
            cli.out.note(f"  {text}")
        else:
            cli.out.progress(f"  {text}")

    step.do(progress)
    return {**step.result, "memory_bound": step.memory_bound}


def _common(known: Reference, candidate: Reference, other: Path) -> tuple[Reference, Reference]:
    """Both with the prompts they share by set and name, cut to the shorter side."""
    from ds41ctl.core.reference import Reference as Made

    mine = {(p.set, p.name): p for p in known.prompts}
    pairs = [(mine[p.set, p.name], p) for p in candidate.prompts if (p.set, p.name) in mine]
    cut = [(a.head(n, known.k), b.head(n, candidate.k)) for a, b in pairs for n in [min(len(a.ids), len(b.ids))]]
    if not cut:
        raise ConfigError(
            f"{other}: shares no prompt with the reference", hints=("ds41ctl gate record --prompts FILE",)
        )
    return (
        Made(known.head, tuple(a for a, _ in cut), None, known.sha256),
        Made(candidate.head, tuple(b for _, b in cut), None, candidate.sha256),
    )


def _facts(
    known: Reference, path: Path, candidate: Reference, against: str, limit: float | None, source: str
) -> list[tuple[str, str]]:
    settings = known.head.get("settings", {})
    numbers = ", ".join(f"{key} {settings[key]}" for key in ("activations", "keys", "top_k") if key in settings)
    facts = [
        ("reference", f"{path}  {known.kind}, {numbers}, sha256 {known.sha256[:12]}"),
        ("candidate", f"{against}  {candidate.kind or 'reference'}, {candidate.k} tokens a position"),
    ]
    if limit is not None:
        facts.append(("threshold", f"{limit:g} nats" + (f": {source}" if source else "")))
    return facts


def _show(found: Comparison) -> None:
    from ds41ctl.core.gate import nats

    def row(item: Group) -> str:
        kl = item.kl
        return (
            f"{item.name:<14} {item.rows:>7} rows  KL {nats(kl.mean)} [{nats(kl.low)}, {nats(kl.high)}]"
            f"  same best token {item.agreement:.2%}"
        )

    for item in (found.overall, *found.sets, *found.ranges):
        cli.out.line("  " + row(item))
    cli.out.line(f"  both sides know {found.covered:.1%} of the probability")
    if found.cosines:
        lowest = min(range(len(found.cosines)), key=found.cosines.__getitem__)
        cli.out.line(
            f"  layer cosine   first {found.cosines[0]:.5f}, last {found.cosines[-1]:.5f}, "
            f"lowest {found.cosines[lowest]:.5f} after layer {lowest}"
        )
    for place in found.largest[:3]:
        note = ", a toss-up" if place.fragile else ""
        cli.out.line(
            f"  largest        {nats(place.kl)} at {place.prompt} position {place.position}{note}: "
            f"{place.before[-40:]!r} -> {place.reference_best!r} or {place.candidate_best!r}"
        )
    for text in found.left_out:
        cli.out.line(f"  left out       {text}")


def _write(path: Path, text: str) -> None:
    from ds41ctl.adapters import files

    files.publish(path, [text.encode()])


def _verdict(found: Comparison) -> None:
    from ds41ctl.core.gate import Verdict

    marks = {Verdict.SAME: "OK", Verdict.DIFFERENT: "FAIL", Verdict.UNKNOWN: "UNKNOWN"}
    cli.out.line("; ".join(found.reasons), mark=marks[found.verdict])
    if found.verdict is Verdict.DIFFERENT:
        raise typer.Exit(int(Exit.FINDINGS))
    if found.verdict is Verdict.UNKNOWN:
        raise typer.Exit(int(Exit.INCONCLUSIVE))
