"""Secrets never get into facts, and facts round-trip through JSON."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ds41ctl.core.facts import HostFacts, MemoryFacts, SystemFacts
from ds41ctl.core.masking import MASK, mask_argv, mask_text, mask_value, secret_name


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "VLLM_API_KEY",
        "HUGGING_FACE_HUB_TOKEN",
        "--api-key",
        "AWS_SECRET_ACCESS_KEY",
        "DB_PASSWORD",
        "apikey",
    ],
)
def test_names_that_hold_secrets(name: str) -> None:
    assert secret_name(name)
    assert mask_value(name, "value") == MASK


@pytest.mark.parametrize(
    "name",
    [
        "CUDA_VISIBLE_DEVICES",
        "PYTHONPATH",
        "HF_HUB_OFFLINE",
        "TORCH_CUDA_ARCH_LIST",
        "MONKEY",
        "TOKENIZERS_PARALLELISM",
    ],
)
def test_names_that_do_not(name: str) -> None:
    assert not secret_name(name)
    assert mask_value(name, "value") == "value"


def test_an_empty_secret_is_shown_as_empty() -> None:
    assert mask_value("HF_TOKEN", "") == ""


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["serve", "--api-key", "abc", "--port", "1"], ["serve", "--api-key", MASK, "--port", "1"]),
        (["serve", "--api-key=abc"], ["serve", f"--api-key={MASK}"]),
        (["env", "HF_TOKEN=abc", "python"], ["env", f"HF_TOKEN={MASK}", "python"]),
        (["serve", "--api-key", "--port", "1"], ["serve", "--api-key", "--port", "1"]),
        (["curl", "https://me:pw@hub.example/x"], ["curl", f"https://{MASK}@hub.example/x"]),
        (["curl", "-H", "Authorization: Bearer abcdef"], ["curl", "-H", f"Authorization: Bearer {MASK}"]),
    ],
)
def test_secrets_in_a_command_line(argv: list[str], shown: list[str]) -> None:
    assert mask_argv(argv) == shown


@given(st.from_regex(r"\A(hf_|sk-|ghp_)[A-Za-z0-9]{20,40}\Z"), st.text(max_size=20))
def test_a_token_by_its_shape_is_masked_in_any_text(token: str, text: str) -> None:
    assert token not in mask_text(f"{text} {token} {text}")


def test_facts_round_trip_and_refuse_unknown_fields() -> None:
    facts = HostFacts(collected_at="now", profile="p", system=SystemFacts(), memory=MemoryFacts())
    assert HostFacts.model_validate_json(facts.model_dump_json()) == facts
    with pytest.raises(ValidationError, match="surprise"):
        HostFacts.model_validate({**facts.model_dump(), "surprise": 1})


def test_a_role_or_tool_that_was_not_looked_at() -> None:
    facts = HostFacts(collected_at="now", profile="p", system=SystemFacts(), memory=MemoryFacts())
    assert facts.disk("data") is None
    assert facts.tool("tmux").path == ""
