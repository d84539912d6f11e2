"""The EXL3 variant of the tiny pack on the real engine: the whole smoke, and a log that says what served it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.conftest import Cli

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
PROFILE = ("--profile", "cpu-tiny-exl3")


def test_the_exl3_pack_passes_the_whole_smoke_with_the_compiled_kernel(cli: Cli) -> None:
    answer = cli("up", *PROFILE)
    assert answer.code == 0, answer.out + answer.err
    assert "12 of 12" in answer.out
    log = Path(cli.record("cpu-tiny-exl3")["log"]).read_text(errors="replace")
    census = re.search(r"ds41: EXL3 experts: (.*)", log)
    assert census is not None
    assert census[1].startswith("144 matrices in 6 layers: K2 x 54, K3 x 54, K5 x 36 (mul1), by compiled loops (")
    assert "computed by numpy" not in log
    assert cli("stop", *PROFILE).code == 0
    assert cli("engram", "drop", *PROFILE).code == 0
