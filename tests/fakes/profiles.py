"""Profiles that say no more than a test needs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ds41ctl.core.profile import Profile

PROFILES = Path(__file__).parents[2] / "profiles"


def without_speed(folder: Path) -> Path:
    """cpu-tiny without criteria of speed, in `folder`. Four streams, so that there is something to compare even in some
    seconds on a busy machine."""
    text = (PROFILES / "cpu-tiny.toml").read_text()
    for name, value in (
        ("decode_retention_min", "0.01"),
        ("decode_retention_warn", "0.01"),
        ("ttft_ratio_max", "999.0"),
        ("max_num_seqs", "4"),
    ):
        text = re.sub(rf"^{name} = .*$", f"{name} = {value}", text, flags=re.MULTILINE)
    path = folder / "cpu-tiny.toml"
    path.write_text(text.replace('"--max-num-seqs", "2"', '"--max-num-seqs", "4"'))
    return path


def least_profile(
    *,
    gpus: int = 2,
    drafter: bool = False,
    bench: dict[str, Any] | None = None,
    soak: dict[str, Any] | None = None,
    **smoke_values: Any,
) -> Profile:
    """The least profile, with GPUs at a locked clock when `gpus` is not 0; `drafter`: with one that can be left out."""
    values = {"canaries": "random", "needle_tokens": 300, "image_limit": 64, **smoke_values}
    return Profile.model_validate(
        {
            "schema": 1,
            "name": "fake",
            "title": "fake engine",
            "state": "measured",
            "hardware": {"gpus": gpus, "ram_gib_min": 0},
            "model": {
                "served_name": "deepseek-v4.1-flash",
                "dir": "x",
                "sources": [],
                "vocab_size": 1,
                "compressed_vocab_size": 1,
                "engram": [],
            },
            "engine": {"kind": "venv", "name": "x"},
            "serve": {
                "port": 8011,
                "argv": [],
                "ready_timeout_s": 1,
                "stall_timeout_s": 1,
                "max_model_len": 2000,
                "max_num_seqs": 4,
                "dspark": drafter,
                "dspark_argv": ["--speculative-config", "{}"] if drafter else [],
            },
            "engram": {"storage": "none"},
            "clocks": {"sm_mhz": 1530} if gpus else {},
            "smoke": values,
            "soak": ({"acceptance_min": 0.4} if gpus else {}) | (soak or {}),
            "bench": {"logprob_window": 512} | (bench or {}),
            "provenance": dict.fromkeys(("model", "serve", "smoke", "clocks", "soak", "bench"), "test"),
        }
    )
