"""Loading recorded machines and the profiles they were looked at with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ds41ctl.core.facts import HostFacts
from ds41ctl.core.finding import Finding, Status
from ds41ctl.core.profile import Profile, parse_profile

FACTS = Path(__file__).parent
MACHINES = tuple(sorted(path.parent.name for path in FACTS.glob("*/facts.json")))


def machine(name: str) -> HostFacts:
    """One recorded machine."""
    return HostFacts.model_validate_json((FACTS / name / "facts.json").read_text())


def profile(name: str) -> Profile:
    """One test profile."""
    return parse_profile((FACTS / "profiles" / f"{name}.toml").read_text(), f"{name}.toml")


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
