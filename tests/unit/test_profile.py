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

NAMES = [
    "cmp170hx-tp4",
    "cpu-tiny",
    "cpu-tiny-exl3",
    "cpu-tiny-tp2",
    "gpu-tiny",
    "gpu-tiny-pp2",
    "gpu-tiny-tp2",
    "v100-pp2tp4",
]


def read(name: str) -> Profile:
    return profiles.read(profiles.find(name))


def text_of(name: str) -> str:
    return profiles.find(name).read_text()


def test_the_built_in_profiles_are_there_and_load() -> None:
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
    with pytest.raises(ConfigError, match="schema: 2 is not known"):
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


# ---- ranges, pins, and the command line against the fields


@pytest.mark.parametrize(
    ("old", "new", "where"),
    [
        ("gpus = 8", "gpus = -1", "hardware.gpus"),
        ("gpus = 8", "gpus = 65", "hardware.gpus"),
        ("ram_gib_min = 32.0", "ram_gib_min = -1", "hardware.ram_gib_min"),
        ("vram_mib_min = 31744", "vram_mib_min = 9999999", "hardware.vram_mib_min"),
        ("stage_weights_gib = [27.77, 25.29]", "stage_weights_gib = [0, 25.29]", "hardware.stage_weights_gib"),
        ("nvlinks_per_gpu = 6", "nvlinks_per_gpu = 37", "hardware.nvlinks_per_gpu"),
        ('driver_min = "570.26"', 'driver_min = "new"', "hardware.driver_min"),
        ('compute_capability = "7.0"', 'compute_capability = "sm_70"', "hardware.compute_capability"),
        ("a = [0, 1, 2, 3]", "a = [0, 1, 2, 99]", "hardware.gpu_groups"),
        ("vocab_size = 129280", "vocab_size = 0", "model.vocab_size"),
        ("rows = 384006168", "rows = 0", "model.engram"),
        ("port = 8011", "port = 0", "serve.port"),
        ("port = 8011", "port = 70000", "serve.port"),
        ("port = 8011", "port = true", "serve.port"),
        ("port = 8011", 'port = "8011"', "serve.port"),
        ("port = 8011", "port = 2026-11-12", "serve.port"),
        ("ready_timeout_s = 3600", "ready_timeout_s = 0", "serve.ready_timeout_s"),
        ("max_model_len = 1048576", "max_model_len = 0", "serve.max_model_len"),
        ("max_num_seqs = 2", "max_num_seqs = 5000", "serve.max_num_seqs"),
        ("gpu_memory_utilization = 0.943", "gpu_memory_utilization = 98", "serve.gpu_memory_utilization"),
        ("gpu_memory_utilization = 0.943", "gpu_memory_utilization = 1.0", "serve.gpu_memory_utilization"),
        ("gpu_memory_utilization = 0.943", 'gpu_memory_utilization = "0,943"', "serve.gpu_memory_utilization"),
        ("spec_tokens = 5", "spec_tokens = -1", "serve.spec_tokens"),
        ("sm_mhz = 1530", "sm_mhz = 15", "clocks.sm_mhz"),
        ('governor = "performance"', 'governor = "fast"', "clocks.governor"),
        ("copies = 20", "copies = 0", "smoke.copies"),
    ],
)
def test_a_number_out_of_its_range_is_refused_with_its_path(old: str, new: str, where: str) -> None:
    text = text_of("v100-pp2tp4")
    assert old in text
    with pytest.raises(ConfigError) as caught:
        parse_profile(text.replace(old, new, 1), "x.toml")
    assert where in "\n".join([caught.value.message, *caught.value.detail])


def test_all_problems_are_named_at_once_those_of_fields_and_those_between_fields() -> None:
    broken = (
        text_of("v100-pp2tp4")
        .replace("port = 8011", "port = 70000")
        .replace("99d85a463b446e4ff07e173be6a8faf9b920b97d", "main")
        .replace("max_num_seqs = 2", "max_num_seq = 2")
        .replace("c = [4, 5, 6, 7]", "c = [3, 5, 6, 7]")
        .replace('wheel_sums = "SHA256SUMS"\n', "")
        .replace('"clocks.sm_mhz" =', '"clocks.other" =')
        .replace('"--gpu-memory-utilization", "0.943"', '"--gpu-memory-utilization", "0.98"')
    )
    broken = broken.replace("max_num_seq = 2", "max_num_seqs = 2\nmax_num_seq = 2")
    with pytest.raises(ConfigError) as caught:
        parse_profile(broken, "x.toml")
    found = "\n".join(caught.value.detail)
    for words in (
        "serve.port",
        "model.sources",
        "unknown key serve.max_num_seq; did you mean max_num_seqs",
        "hardware.gpu_groups: overlap",
        "engine.wheel: nothing pins it",
        "provenance: numbers without a source: serve.max_num_seq, clocks.sm_mhz",
        "serve.gpu_memory_utilization: 0.943 here, --gpu-memory-utilization 0.98 in serve.argv",
    ):
        assert words in found, found
    assert "7 problems" in caught.value.message


SUMS = 'wheel_sums = "SHA256SUMS"'
BUILD = 'build_revision = "2ad5741ab1a278d64f33b842706a41717dfbf181"'


@pytest.mark.parametrize(
    ("name", "old", "new", "where"),
    [
        ("v100-pp2tp4", SUMS, "", "engine.wheel: nothing pins it"),
        ("v100-pp2tp4", SUMS, 'wheel_sha256 = "12ab"', "engine.wheel_sha256"),
        ("v100-pp2tp4", SUMS, f'wheel_sha256 = "{"A" * 64}"', "engine.wheel_sha256"),
        ("cmp170hx-tp4", BUILD, "", "engine.image: nothing pins it"),
        ("cmp170hx-tp4", BUILD, 'build_revision = "2ad5741ab1"', "engine.build_revision"),
        ("cmp170hx-tp4", BUILD, 'image_digest = "latest"', "engine.image_digest"),
        ("cmp170hx-tp4", BUILD, f'image_digest = "sha256:{"F" * 64}"', "engine.image_digest"),
    ],
)
def test_an_engine_that_nothing_pins_is_refused(name: str, old: str, new: str, where: str) -> None:
    text = text_of(name)
    assert old in text
    with pytest.raises(ConfigError) as caught:
        parse_profile(text.replace(old, new), "x.toml")
    assert where in "\n".join([caught.value.message, *caught.value.detail])


@pytest.mark.parametrize(
    "pin", ['wheel_sha256 = "' + "a" * 64 + '"', 'wheel_sums = "SHA256SUMS"'], ids=["digest", "checksum file"]
)
def test_a_digest_or_a_checksum_files_entry_pins_a_wheel(pin: str) -> None:
    text = text_of("v100-pp2tp4").replace('wheel_sums = "SHA256SUMS"', pin)
    assert parse_profile(text, "x.toml").engine.wheel


def test_another_share_of_memory_has_the_pool_that_was_measured_at_it() -> None:
    text = text_of("cmp170hx-tp4").replace("0.98", "0.97")
    with pytest.raises(ConfigError) as caught:
        parse_profile(text, "x.toml")
    assert "2717420 here, 2417392 was measured at gpu_memory_utilization 0.97" in caught.value.message
    assert parse_profile(text.replace("2717420", "2417392"), "x.toml").serve.kv_pool_tokens == 2417392


def test_the_two_gpu_profiles_hold_every_number_of_their_sources() -> None:
    v100, cmp = read("v100-pp2tp4"), read("cmp170hx-tp4")
    assert v100.hardware.stage_weights_gib == (27.77, 25.29) and v100.serve.pipeline_cut == 20
    serve = v100.serve
    assert (serve.max_model_len, serve.max_num_batched_tokens, serve.gpu_memory_utilization) == (1_048_576, 1024, 0.943)
    assert (serve.spec_tokens, serve.max_num_seqs, v100.clocks.sm_mhz) == (5, 2, 1530)
    assert (serve.pipeline_parallel_size, serve.tensor_parallel_size) == (2, 4)
    serve = cmp.serve
    assert (serve.tensor_parallel_size, serve.max_model_len, serve.max_num_seqs) == (4, 262_144, 8)
    assert (serve.gpu_memory_utilization, serve.kv_pool_tokens, serve.kv_pool_tolerance) == (0.98, 2_717_420, 0.01)
    assert cmp.engram.size_gib == 200 and cmp.hardware.p2p and serve.spec_tokens == 0
    for profile in (v100, cmp):
        assert [marker.text for marker in profile.serve.required_markers]
        assert "offloaded to pinned" in [marker.text for marker in profile.serve.forbidden_markers]
        assert profile.source_of("serve.max_model_len") and profile.source_of("hardware.vram_mib_min")
