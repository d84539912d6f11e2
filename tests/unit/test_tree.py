"""The tests themselves: all of them can be collected together."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_no_two_modules_of_the_test_folders_have_one_name() -> None:
    """A folder without ``__init__.py`` is itself on the path: pytest imports what lies there by its bare name."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in TESTS.rglob("*.py"):
        # pytest unloads one folder's conftest before it loads the next one's
        if path.name != "conftest.py" and not (path.parent / "__init__.py").exists():
            found[path.name].append(str(path.relative_to(TESTS)))
    assert len(found) > 50, "the folders of the tests are not where this test looks"
    assert {name: sorted(paths) for name, paths in found.items() if len(paths) > 1} == {}
