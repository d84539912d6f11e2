"""README: the reference is generated, so it cannot be stale, and it says what users must know."""

from __future__ import annotations

from tests.reference import README, rendered


def test_the_generated_blocks_are_fresh() -> None:
    text = README.read_text()
    assert rendered(text) == text, "run: python -m tests.reference"


def test_the_two_commands_and_the_honest_lines_are_there() -> None:
    text = README.read_text()
    for needed in (
        "make demo",
        "make test",
        "never run on the real card",
        "good for proving the pipeline and nothing else",
    ):
        assert needed in text
