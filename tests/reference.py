"""The generated parts of README.md; `python -m tests.reference` rewrites them, a test fails while they are stale."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import preflight
import smoke
from ds41ctl.adapters import profiles
from ds41ctl.cli.app import COMMANDS
from ds41ctl.core.exits import MEANING
from ds41ctl.core.settings import Settings, env_name
from smoke import soak_judge
from tests.silent_faults import MATRIX

README = Path(__file__).parent.parent / "README.md"


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def blocks() -> dict[str, str]:
    """Name of a block -> its text."""
    found = [profiles.read(path) for path in profiles.paths().values()]
    fields = Settings.model_fields.items()
    return {
        "commands": table(("command", "does"), ((f"`ds41ctl {name}`", text) for name, (_, text) in COMMANDS.items())),
        "exit-codes": table(("code", "meaning"), ((str(int(code)), text) for code, text in MEANING.items())),
        "checks": table(
            ("id", "level", "looks at", "prevents"),
            ((f"`{row[0]}`", str(row[1]), row[2], row[3]) for row in preflight.table()),
        ),
        "smoke": table(("id", "level", "a pass proves"), ((f"`{row[0]}`", row[1], row[2]) for row in smoke.table())),
        "silent-faults": table(
            ("fault", "injected in the tests as", "seen by", "named as"),
            ((row.fault, row.injected, f"`{row.detected}`", row.says) for row in MATRIX),
        ),
        "soak": table(("id", "kept means"), ((f"`{name}`", keeps) for name, keeps in soak_judge.table())),
        "settings": table(
            ("variable", "key in config.toml", "what"),
            ((f"`{env_name(name)}`", f"`{name}`", field.description or "") for name, field in fields),
        ),
        "profiles": table(
            ("profile", "what", "state", "not in this version"),
            ((f"`{item.name}`", item.title, item.state, "; ".join(item.lacks) or "-") for item in found),
        ),
    }


def rendered(text: str) -> str:
    """`text` with every block between its marks replaced. Raises ValueError for a block without marks."""
    for name, block in blocks().items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"README.md has no block {name}")
        text = pattern.sub(lambda match, block=block: match.group(1) + block + "\n" + match.group(2), text)
    return text


if __name__ == "__main__":
    README.write_text(rendered(README.read_text()))
