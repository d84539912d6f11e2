"""Profiles: the three built-in ones load, and a wrong one is refused with every problem named."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import jsonschema
import pytest

from ds41ctl.adapters import profiles
from ds41ctl.core.engram import sub_tables
from ds41ctl.core.errors import ConfigError, NotFoundError
from ds41ctl.core.profile import Profile, json_schema, parse_profile

NAMES = ["cmp170hx-tp4", "cpu-tiny", "cpu-tiny-tp2", "v100-pp2tp4"]


def read(name: str) -> Profile:
    return profiles.read(profiles.find(name))


def text_of(name: str) -> str:
    return profiles.find(name).read_text()


def test_the_builtin_profiles_are_there_and_load() -> None:
    assert profiles.names() == NAMES
    for name in NAMES:
        assert read(name).name == name


def test_the_committed_schema_is_the_models_and_every_profile_satisfies_it() -> None:
    committed = json.loads((profiles.builtin_folder() / "schema.json").read_text())
    assert committed == json_schema(), "run: ds41ctl profile schema > profiles/schema.json"
    for name in NAMES:
        jsonschema.validate(tomllib.loads(text_of(name)), committed)


def test_profiles_never_run_on_the_real_card_say_so_and_what_they_lack() -> None:
    for name in ("cmp170hx-tp4", "v100-pp2tp4"):
        profile = read(name)
        assert profile.state == "never run on the real card" and profile.lacks


def test_engram_rows_of_the_real_model_are_the_sums_of_the_hash_primes() -> None:
    sums = [sum(table) for table in sub_tables(2, 16_000_000, 4, 8)]
    assert sums == [384_006_168, 384_016_682]
    for name in ("cmp170hx-tp4", "v100-pp2tp4"):
        assert [table.rows for table in read(name).model.engram] == sums


def test_an_unknown_key_is_named_with_the_near_one() -> None:
    broken = text_of("cpu-tiny").replace("max_num_seqs = 2", "max_num_seq = 2")
    with pytest.raises(ConfigError) as caught:
        parse_profile(broken, "x.toml")
    lines = "\n".join([caught.value.message, *caught.value.detail])
    assert "unknown key serve.max_num_seq; did you mean max_num_seqs" in lines
    assert "serve.max_num_seqs: Field required" in lines


@pytest.mark.parametrize(
    "revision",
    [
        "main",
        "1bae0e1",
        "1BAE0E1088993B9B82DE08F59DE5BE5A34E42170",
        "1" * 39,
        "1" * 41,
        "1" * 40 + " ",
        "1" * 40 + "\\n",
    ],
)
def test_only_a_full_lower_case_commit_pins_a_repository(revision: str) -> None:
    broken = text_of("v100-pp2tp4").replace("99d85a463b446e4ff07e173be6a8faf9b920b97d", revision)
    with pytest.raises(ConfigError, match=r"model\.sources|problems"):
        parse_profile(broken, "x.toml")


def test_a_number_without_a_source_is_refused() -> None:
    broken = text_of("v100-pp2tp4").replace('"clocks.sm_mhz" =', '"clocks.other" =')
    with pytest.raises(ConfigError, match=r"numbers without a source.*clocks\.sm_mhz"):
        parse_profile(broken, "x.toml")


def test_overlapping_gpu_groups_are_refused() -> None:
    broken = text_of("v100-pp2tp4").replace("c = [4, 5, 6, 7]", "c = [3, 5, 6, 7]")
    with pytest.raises(ConfigError, match="overlap"):
        parse_profile(broken, "x.toml")


def test_a_profile_of_another_schema_is_refused() -> None:
    with pytest.raises(ConfigError, match="schema 2 is not known"):
        parse_profile(text_of("cpu-tiny").replace("schema = 1", "schema = 2"), "x.toml")


def test_broken_toml_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"x\.toml: not valid TOML") as caught:
        parse_profile("a = [", "x.toml")
    assert "\n" not in caught.value.message


def test_an_unknown_profile_is_not_found_with_the_near_name() -> None:
    with pytest.raises(NotFoundError, match="did you mean cpu-tiny"):
        profiles.find("cpu-tyni")


def test_a_users_profile_is_found_by_name_and_its_name_must_be_its_files(isolated: Path) -> None:
    folder = isolated / "config" / "ds41ctl" / "profiles"
    folder.mkdir(parents=True)
    (folder / "mine.toml").write_text(text_of("cpu-tiny").replace('name = "cpu-tiny"', 'name = "mine"'))
    (folder / "other.toml").write_text(text_of("cpu-tiny"))
    assert profiles.read(profiles.find("mine")).name == "mine"
    with pytest.raises(ConfigError, match="expected the file's name 'other'"):
        profiles.read(profiles.find("other"))


def test_the_tiny_profile_says_what_its_packs_config_says() -> None:
    profile = read("cpu-tiny")
    folder = profiles.builtin_folder() / "packs" / "tiny-v41"
    text = json.loads((folder / "config.json").read_text())["text_config"]
    assert list(profile.model.engram_layers) == text["engram_layer_ids"]
    assert [table.rows for table in profile.model.engram] == text["engram_num_embeddings"]
    assert profile.model.vocab_size == text["vocab_size"]
    assert profile.model.compressed_vocab_size == text["engram_compressed_vocab_size"]
