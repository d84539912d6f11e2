"""The plugin's list of tensors, which needs neither torch nor vLLM: what a pack must have, and what it lacks."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ds41ctl.adapters.enginevenv import plugin_source
from ds41ctl.core.tensors import contract
from tests.fakes.v41 import REAL

OFFICIAL = {**REAL, "quantization_config": {"quant_method": "fp8"}}
TINY = Path(__file__).parents[2] / "profiles" / "packs" / "tiny-v41"


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The plugin's own module; its package imports nothing else."""
    monkeypatch.syspath_prepend(str(plugin_source()))
    yield importlib.import_module("ds41_engine.seen")
    for name in [name for name in sys.modules if name.split(".")[0] == "ds41_engine"]:
        del sys.modules[name]


def tiny() -> dict[str, Any]:
    return json.loads((TINY / "config.json").read_text())  # type: ignore[no-any-return]


def names(config: dict[str, Any]) -> set[str]:
    """What the CLI's contract says, less the drafter."""
    return {name for name in contract(config) if not name.startswith("mtp.")}


def watched(seen: ModuleType, given: set[str]) -> Any:
    found = seen.Seen()
    assert len(list(found.watch((name, None) for name in given))) == len(given)
    return found


def test_the_engines_list_is_the_packs_contract(seen: ModuleType) -> None:
    for config in (tiny(), OFFICIAL):
        assert watched(seen, names(config)).missing(config) == []
        assert watched(seen, set()).missing(config) == sorted(names(config))
    assert len(names(OFFICIAL)) == 93_684


def test_a_tensor_that_never_came_is_named(seen: ModuleType) -> None:
    gone = {"layers.1.engram.embed.weight", "layers.1.engram.embed.scale", "layers.2.attn.wo_a.scale"}
    found = watched(seen, names(tiny()) - gone)
    assert set(found.missing(tiny())) == gone
    assert found.missing(tiny(), tables_elsewhere=True) == ["layers.2.attn.wo_a.scale"]
    line = seen.complaint(found.missing(tiny()))
    assert "3 tensors are missing" in line and "layers.1.engram.embed.weight" in line and "ds41ctl fetch" in line


def test_many_missing_tensors_are_counted_not_listed(seen: ModuleType) -> None:
    line = seen.complaint(sorted(names(tiny())))
    assert line.count(",") == seen.NAMES_IN_MESSAGE - 1 and " more; run:" in line


def test_experts_of_another_format_are_not_asked_for_by_the_official_names(seen: ModuleType) -> None:
    config = {**tiny(), "quantization_config": {"quant_method": "exl3"}}
    assert not any(".experts." in name for name in watched(seen, set()).missing(config))


def test_a_model_that_is_no_folder_has_no_config(seen: ModuleType, tmp_path: Path) -> None:
    assert seen.config_of("deepseek-ai/X") is None
    (tmp_path / "config.json").write_text("{}")
    assert seen.config_of(str(tmp_path)) == {}
