"""Planning: the plan of a command, computed and printed; nothing is touched."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import typer

from ds41ctl import cli
from ds41ctl.adapters.supply import Supply
from ds41ctl.cli.output import verdict
from ds41ctl.cli.session import Session
from ds41ctl.core.exits import Exit
from ds41ctl.core.launch import Launch, as_shell, masked
from ds41ctl.core.masking import mask_argv
from ds41ctl.core.plan import Plan, PlannedStep, serve_plan

if TYPE_CHECKING:
    from preflight import Stage


def serve_step(session: Session) -> PlannedStep:
    """The start of the engine."""
    layout = session.layout
    how = "in a private tmux server" if session.profile.engine.kind == "venv" else "as a container"
    return PlannedStep(
        step="serve",
        what=f"start the engine {how} and wait for /health, one token and "
        f"{len(session.profile.serve.required_markers)} log markers",
        writes=(
            str(layout.record_path),
            str(layout.dirs.state / "logs" / layout.name),
            str(layout.socket_path),
        ),
        budget_s=session.profile.serve.ready_timeout_s,
    )


def up_plan(session: Session, given: Supply) -> Plan:
    """Plan of `up`."""
    from ds41ctl.adapters import pack, packsize

    layout, profile = session.layout, session.profile
    sizes = packsize.sources(layout)
    known = [size.to_come for size in sizes if size.to_come is not None]
    sources = ", ".join(source.what or source.kind for source in profile.model.sources)
    fetch = PlannedStep(
        step="fetch",
        what=f"get and verify the pack: {sources}",
        writes=tuple(dict.fromkeys(str(layout.source_dir(source.dir)) for source in profile.model.hub_sources))
        or (str(layout.model_dir),),
        bytes=sum(known) if sizes and len(known) == len(sizes) else None,
    )
    if pack.own_hybrid(layout):
        what = f"look through the hybrid of your own in {layout.model_dir}"
        fetch = PlannedStep(step="fetch", what=what, writes=(str(layout.own_pins_dir),))
    steps = [
        PlannedStep(step="preflight", what="check this machine (ds41ctl preflight --list)"),
        _engine(session, given),
        fetch,
        *_graft(session),
    ]
    if profile.engram.own_store:
        steps.append(_engram(session))
    steps += [*_start(session), PlannedStep(step="smoke", what="ask the engine (ds41ctl smoke --list)")]
    return serve_plan(layout, planned_launch(session), "up", tuple(steps))


def _engram(session: Session) -> PlannedStep:
    """The build of the store, with the mount it would make; or what keeps it from being made."""
    from ds41ctl.adapters import store, storeplace

    layout, engram = session.layout, session.profile.engram
    refused = storeplace.refusal(layout)
    what = f"put {len(session.profile.model.engram)} tables into {engram.storage} as {engram.format}, rows checked"
    if refused is not None:
        what = f"cannot be built: {refused.message}; first: {refused.hints[0]}"
    return PlannedStep(
        step="engram",
        what=what,
        writes=(str(store.served(layout)),) if refused is None else (),
        bytes=store.needed_bytes(layout),
        commands=storeplace.planned_commands(layout),
    )


def plan_of_build(session: Session) -> Plan:
    """Plan of `engram build`."""
    profile = session.profile
    return Plan(
        command="engram build", profile=profile.name, profile_digest=profile.digest(), steps=(_engram(session),)
    )


def _engine(session: Session, given: Supply) -> PlannedStep:
    from ds41ctl.adapters import supply

    layout, engine = session.layout, session.profile.engine
    origin = supply.look(layout, given)
    where = f"from {origin.text}" if origin.text else f"which cannot be had yet: {origin.problem}"
    writes = [layout.engine_dir] if engine.kind == "venv" else []
    if engine.wheel and given.folder is None:
        writes.append(supply.release_dir(layout))
    if engine.build_revision:
        writes.append(layout.dirs.cache / "sources")
    return PlannedStep(
        step="engine",
        what=f"install {engine.lock or engine.wheel or engine.image} {where}",
        writes=tuple(str(path) for path in writes),
        bytes=engine.image_bytes or None,
    )


def _graft(session: Session) -> list[PlannedStep]:
    from ds41ctl.adapters import pack

    spec = session.profile.model.graft
    if spec is None or pack.own_hybrid(session.layout):
        return []
    what = f"build the hybrid of links: {spec.tensors} tensors, {spec.grafted} from {spec.donor}"
    return [PlannedStep(step="graft", what=what, writes=(str(session.layout.model_dir),))]


def plan_of_serve(session: Session) -> Plan:
    """Plan of `serve`."""
    from ds41ctl.adapters import store

    checks = PlannedStep(step="preflight", what="check this machine for a start")
    missing = session.profile.engram.own_store and not store.inspect(session.layout).exists
    built = [_engram(session)] if missing else []  # not by serve: it asks for `engram build`, whose mount this shows
    built = [step.model_copy(update={"what": f"not built yet (ds41ctl engram build): {step.what}"}) for step in built]
    return serve_plan(session.layout, planned_launch(session), "serve", (checks, *built, *_start(session)))


def _start(session: Session) -> list[PlannedStep]:
    """The start of the engine, and the clock lease it then owns."""
    clocks = session.profile.clocks
    if not clocks.touched:
        return [serve_step(session)]
    parts = [f"lock SM clocks at {clocks.sm_mhz} MHz"] if clocks.sm_mhz is not None else []
    parts += [f"set the power limit to {clocks.power_limit_w:g} W"] if clocks.power_limit_w is not None else []
    parts += [f"set the clock offset to {clocks.offset_mhz:+d} MHz"] if clocks.offset_mhz is not None else []
    what = ", ".join(parts + ([f"governor {clocks.governor}"] if clocks.governor else []))
    journal = session.dirs.state / "clocks" / f"{session.profile.name}.json"
    return [
        serve_step(session),
        PlannedStep(step="clocks", what=f"{what}, until the engine ends", writes=(str(journal),)),
    ]


def planned_launch(session: Session) -> Launch:
    """The engine's start on this machine as it is now."""
    from ds41ctl.adapters import machine, store
    from ds41ctl.core.launch import launch

    layout = session.layout
    return launch(layout, machine.look(layout, os.environ), str(store.served(layout)))


def show_plan(
    session: Session,
    plan: Plan,
    *,
    stage: Stage,
    strict: bool,
    skip: tuple[str, ...],
    given: Supply | None = None,
) -> None:
    """A dry run; `strict`: the checks of that stage first, as a launcher's own `--dry-run --strict`.

    Raises Exit 1, after the plan, when a check fails by the strict rules.
    """
    if not strict:
        print_plan(plan)
        return
    import preflight
    from ds41ctl.adapters.probe import probe
    from ds41ctl.cli.preflight import show

    facts = probe(session.layout, given)
    findings = preflight.run(session.profile, facts, stage=stage, skip=skip)
    unchecked = preflight.not_checked(session.profile, facts)
    cli.out.line(f"preflight  {session.profile.name}  for {stage}, strict")
    show(findings, preflight.groups(), unchecked)
    cli.out.line()
    rows = [item.model_dump(mode="json") for item in findings]
    print_plan(plan, {"strict": True, "findings": rows, "not_checked": unchecked})
    failed = any(item.failed(strict=True) for item in findings)
    cli.out.line(verdict(findings, strict=True), mark="FAIL" if failed else "OK")
    if failed:
        raise typer.Exit(int(Exit.FINDINGS))


def print_plan(plan: Plan, beside: Mapping[str, object] | None = None) -> None:
    """Show a plan: steps, then the exact start as a shell script; in JSON both, secrets masked in either.

    `beside`: what stands next to the plan in the JSON document.
    """
    start = plan.launch
    tree = {**plan.model_dump(mode="json"), "digest": plan.digest()}
    if start is not None:
        safe = {"argv": mask_argv(start.argv), "env": masked(start.env)}
        tree["launch"] = {**tree["launch"], **safe}
        tree |= {**safe, "shell": as_shell(start)}
    cli.out.data({**tree, **(beside or {})})
    cli.out.line(f"plan  {plan.command}  {plan.profile}  (dry run: nothing is touched)")
    for step in plan.steps:
        size = f", {step.bytes / 2**20:,.0f} MiB" if step.bytes is not None else ""
        budget = f", at most {step.budget_s:.0f} s" if step.budget_s else ""
        cli.out.line(f"  {step.step:<10} {step.what}{size}{budget}")
        for path in step.writes:
            cli.out.line(f"             writes {path}")
        for command in step.commands:
            cli.out.line(f"             runs   {' '.join(command)}")
    if start is not None:
        _print_launch(start)
    for text in plan.lacks:
        cli.out.line(f"not in this version: {text}")


def _print_launch(start: Launch) -> None:
    cli.out.line()
    cli.out.line("engine command, as a shell script that starts the same in this terminal:")
    for text in as_shell(start):
        cli.out.line(text)
    cli.out.line()
    for text in start.notes:
        cli.out.line(f"note: {text}")
    if start.dropped:
        cli.out.line(f"set in this shell and not passed on: {', '.join(start.dropped)}")
