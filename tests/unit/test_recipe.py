"""Recipes in and out: the published one gives its own command line back, and a hostile one gives nothing."""

from __future__ import annotations

import copy
import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds41ctl.adapters import profiles
from ds41ctl.core import recipe, toml
from ds41ctl.core.envfile import parse as parse_env
from ds41ctl.core.errors import ConfigError
from ds41ctl.core.launch import Machine, launch
from ds41ctl.core.launchline import words
from ds41ctl.core.layout import Dirs, layout
from ds41ctl.core.profile import Profile, parse_profile
from ds41ctl.core.settings import Settings
from tests.facts.replay import FACTS
from tests.unit.test_launch import PLACEHOLDERS, recipe_lines

DIRS = Dirs(data=Path("/d"), state=Path("/s"), cache=Path("/c"), runtime=Path("/r"), uid=1000)
ON = Machine(driver="610.43.02", engine_digest="9f2c" * 16, runtime="docker")
STORE = "/opt/engram-ram/DeepSeek-V4.1-Flash-1017-engram"
Edit = Callable[[dict[str, Any]], None]


def published() -> dict[str, Any]:
    return json.loads((FACTS / "recipes" / "4x-cmp-170hx.json").read_text())  # type: ignore[no-any-return]


def taken(tree: dict[str, Any], name: str = "mine") -> tuple[Profile, recipe.Imported]:
    found = recipe.read(tree, name)
    return parse_profile(found.text, f"{name}.toml"), found


def argv_of(profile: Profile) -> list[str]:
    chosen = layout(profile, Settings(), DIRS, may_mount=False)
    return list(launch(chosen, ON, str(chosen.store_dirs[0])).argv)


def test_seed_004_imported_and_rendered_is_its_own_docker_line() -> None:
    profile, _ = taken(published())
    assert argv_of(profile) == [word for line in recipe_lines() for word in line]
    assert PLACEHOLDERS["<MODELS_DIR>"] in " ".join(argv_of(profile))


def test_the_imported_profile_says_what_the_hand_written_one_says() -> None:
    profile, found = taken(published())
    ours = profiles.read(profiles.find("cmp170hx-tp4"))
    assert profile.serve.argv == ours.serve.argv
    for part in ("max_model_len", "max_num_seqs", "gpu_memory_utilization", "kv_pool_tokens", "spec_tokens", "port"):
        assert getattr(profile.serve, part) == getattr(ours.serve, part), part
    assert profile.serve.cudagraph_mode == "FULL_AND_PIECEWISE"
    assert profile.model.graft == ours.model.graft and profile.model.engram == ours.model.engram
    assert {s.repo: s.revision for s in profile.model.hub_sources} == {
        s.repo: s.revision for s in ours.model.hub_sources
    }
    left_out = [s.leave_out for s in ours.model.hub_sources]
    assert [s.leave_out for s in profile.model.hub_sources] == left_out and any(left_out)
    assert profile.engine.build_repo == ours.engine.build_repo
    assert profile.engine.build_revision == ours.engine.build_revision and "AGPL" in profile.engine.notices[0]
    assert profile.hardware.gpus == 4 and profile.hardware.compute_capability == "8.0" and profile.hardware.p2p
    assert any("perf_points: 9" in text for text in found.unmapped) and found.changed == []


def test_out_and_in_again_is_the_same_command() -> None:
    ours = profiles.read(profiles.find("cmp170hx-tp4"))
    tree = recipe.write(ours, [{"concurrency": 1, "decode_tok_s": 99.5}])
    assert tree["perf_points"] == [{"concurrency": 1, "decode_tok_s": 99.5, "claimed_by": "submitter"}]
    assert tree["speeds"]["decode_tok_s"] == 99.5
    profile, _ = taken(json.loads(json.dumps(tree)))
    assert argv_of(profile) == argv_of(ours) and profile.bench.published == {"decode.code.c1": 99.5}


@pytest.mark.parametrize("name", ["cpu-tiny", "v100-pp2tp4", "cmp170hx-tp4"])
def test_every_profile_can_be_exported(name: str) -> None:
    tree = recipe.write(profiles.read(profiles.find(name)))
    assert json.loads(json.dumps(tree)) == tree and tree["config"]["launch"]


def with_line(number: int, text: str) -> Edit:
    def edit(tree: dict[str, Any]) -> None:
        tree["config"]["launch"].insert(number, text)

    return edit


def replaced(old: str, new: str) -> Edit:
    def edit(tree: dict[str, Any]) -> None:
        lines = tree["config"]["launch"]
        assert any(old in line for line in lines)
        tree["config"]["launch"] = [line.replace(old, new) for line in lines]

    return edit


REFUSED: list[tuple[str, Edit, str]] = [
    ("a second command", with_line(1, "; rm -rf /"), "shell syntax"),
    ("a command substitution", with_line(5, "-e VLLM_X=$(id)"), "shell syntax"),
    ("backticks", with_line(5, "-e VLLM_X=`id`"), "shell syntax"),
    ("a pipe", with_line(26, "| sh"), "shell syntax"),
    ("a line feed", with_line(5, "-e VLLM_X=1\nrm"), "control character"),
    ("a terminal escape", with_line(5, "-e VLLM_X=\x1b[2J"), "control character"),
    ("privileged", with_line(1, "--privileged"), "option --privileged"),
    ("the host's network", with_line(1, "--network host"), "option --network"),
    ("the host's processes", with_line(1, "--pid=host"), "option --pid"),
    ("another user file", with_line(1, "--env-file /etc/environment"), "option --env-file"),
    ("a capability", with_line(1, "--cap-add SYS_ADMIN"), "capability SYS_ADMIN"),
    ("a raw device", with_line(1, "--device /dev/mem"), "device /dev/mem"),
    ("the docker socket", with_line(3, "-v /var/run/docker.sock:/var/run/docker.sock"), "only the pack"),
    ("the root", with_line(3, "-v /:/host"), "only the pack"),
    ("the way up", with_line(3, "-v <CACHE_DIR>/../../etc:/root/.x"), "without `..`"),
    ("a writable pack", replaced(":/models:ro", ":/models"), "must be `:ro`"),
    ("another entrypoint", replaced("--entrypoint vllm", "--entrypoint bash"), "entrypoint is 'bash'"),
    ("a model out of the tree", replaced("serve /models/Deep", "serve /models/../Deep"), "folder below a mounted"),
    ("an image that is an option", replaced("vllm ds41-cmp170hx:1.2.0-fidelity", "vllm IMAGE!"), "image is 'IMAGE!'"),
    ("the Engram emptied", replaced("DSV41_ENGRAM_STORAGE=ssd", "DSV41_ENGRAM_STORAGE=host"), "would stay empty"),
    ("the Engram zeroed", with_line(5, "-e DSV41_ENGRAM_ZERO=1"), "DSV41_ENGRAM_ZERO"),
    (
        "a store in /etc",
        replaced("-v /opt/engram-ram/DeepSeek-V4.1-Flash-1017-engram", "-v /etc"),
        "Engram store is '/etc'",
    ),
    ("an inherited variable", with_line(5, "-e HOME"), "NAME=VALUE expected"),
    ("a template out of the pack", with_line(26, "--chat-template ../../x.jinja"), "path out of the pack"),
    ("a word where an option stands", with_line(26, "--max-num-seqs 8 evil"), "'evil' where an option"),
    ("a context of 1e6", replaced("--max-model-len 262144", "--max-model-len 1e6"), "whole number expected"),
    ("no docker", replaced("docker run", "sudo docker run"), "must begin with `docker run`"),
]


@pytest.mark.parametrize(("edit", "message"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_a_hostile_recipe_is_refused(edit: Edit, message: str) -> None:
    tree = copy.deepcopy(published())
    edit(tree)
    with pytest.raises(ConfigError, match=message.replace("(", r"\(").replace("[", r"\[")):
        recipe.read(tree, "mine")


NEUTRALISED: list[tuple[str, Edit, str, str]] = [
    ("0.0.0.0", replaced("-p 127.0.0.1:8011", "-p 0.0.0.0:8011"), "127.0.0.1 instead", "0.0.0.0:8011:8011"),
    ("no address", replaced("-p 127.0.0.1:8011:8011", "-p 8011:8011"), "127.0.0.1 instead", "-p 8011:8011"),
    ("a key", with_line(26, "--api-key sk-secretsecret"), "--api-key is left out", "sk-secretsecret"),
    ("remote code", with_line(26, "--trust-remote-code"), "--trust-remote-code is left out", "--trust-remote-code"),
    ("code by path", with_line(26, "--tool-parser-plugin /tmp/x.py"), "imports code", "/tmp/x.py"),
    ("an unknown variable", with_line(5, "-e FROBNICATE=1"), "FROBNICATE is not passed on", "FROBNICATE"),
    ("a preloaded library", with_line(5, "-e LD_PRELOAD=/x.so"), "LD_PRELOAD is not passed on", "LD_PRELOAD"),
    ("a token", with_line(5, "-e HF_TOKEN=hf_abcdefghijkl"), "HF_TOKEN is not passed on", "hf_abcdefghijkl"),
    ("a restart policy", with_line(1, "--restart always"), "--restart always is left out", "--restart"),
]


@pytest.mark.parametrize(
    ("edit", "said", "gone"), [row[1:] for row in NEUTRALISED], ids=[row[0] for row in NEUTRALISED]
)
def test_what_can_be_made_safe_is_and_is_said(edit: Edit, said: str, gone: str) -> None:
    tree = copy.deepcopy(published())
    edit(tree)
    profile, found = taken(tree)
    assert any(said in text for text in found.changed), found.changed
    assert gone not in " ".join(argv_of(profile)) and gone not in found.text
    assert profile.serve.host == "127.0.0.1"


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"[1]", "JSON object"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b" " * (1 << 21), "bytes"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused_in_one_line(raw: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe.load(raw, "x.json")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=9),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["config", "launch", "hardware", "artifacts", "models", "env"]), inner, max_size=4
            )
        ),
        max_leaves=12,
    )
)
def test_any_json_ends_in_a_profile_or_in_one_error(value: Any) -> None:
    tree = {**published(), **value} if isinstance(value, dict) else {"config": value}
    try:
        recipe.read(tree, "mine")
    except ConfigError as error:
        assert "\n" not in error.message


def test_json_values_of_a_launch_line_stay_one_word() -> None:
    assert words(['--a {"x": [1, 2], "y": "}"} --b \'c d\' e']) == ["--a", '{"x": [1, 2], "y": "}"}', "--b", "c d", "e"]


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8),
        st.booleans()
        | st.integers(-9, 9)
        | st.text(max_size=20)
        | st.lists(st.text(max_size=5), max_size=4)
        | st.dictionaries(st.text(min_size=1, max_size=5), st.text(max_size=5), min_size=1, max_size=3),
        max_size=5,
    )
)
def test_written_toml_reads_back_as_it_was(tree: dict[str, Any]) -> None:
    assert tomllib.loads(toml.dumps(tree)) == tree


# ---- ds41.env
def test_an_environment_file_of_the_launcher_becomes_a_profile() -> None:
    text = (
        "\ufeff# my box\r\nexport DS41_MODEL=/data/franken\r\nDS41_PYTHON='/opt/e/bin/python'\r\n"
        'DS41_GPUS_A=0,2,4,6   # quad\r\nDS41_GPUS_C="1,3,5,7"\r\nDS41_PORT=8123\r\nDS41_DSPARK=0\r\n'
        "VLLM_DS41_FUSED_INDEXER=1\r\nLD_PRELOAD=/x.so\r\n"
    )
    values, remarks = parse_env(text, "ds41.env")
    assert len(remarks) == 2
    found = recipe.of_env_file(values, profiles.tree(profiles.find("v100-pp2tp4")), "mybox")
    profile = parse_profile(found.text, "mybox.toml")
    assert profile.model.dir == "/data/franken" and profile.serve.port == 8123 and not profile.serve.dspark
    assert profile.hardware.gpu_groups == {"a": (0, 2, 4, 6), "c": (1, 3, 5, 7)}
    assert profile.serve.env["VLLM_DS41_FUSED_INDEXER"] == "1" and "LD_PRELOAD" not in profile.serve.env
    assert any("DS41_PYTHON" in text for text in found.unmapped) and "LD_PRELOAD" in found.changed[0]
    ours = profiles.read(profiles.find("v100-pp2tp4"))
    assert profile.serve.argv == ours.serve.argv and profile.model.engram == ours.model.engram


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("DS41_PORT=$(cat port)", "a shell would work on"),
        ("DS41_MODEL=~/models", "~ is not a path"),
        ('DS41_MODEL="$HOME/models"', "a shell would work on"),
        ("DS41_MODEL=/a b", "a shell would work on"),
        ("DS41_MODEL='/a", "quote that does not end"),
        ("DS41_PORT=1\nDS41_PORT=2", "set twice"),
        ("rm -rf /", "NAME=VALUE expected"),
        ("DS41_PORT=1; rm x", "a shell would work on"),
    ],
)
def test_a_line_that_only_a_shell_understands_is_refused(line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("$", r"\$")):
        parse_env(line, "ds41.env")


@pytest.mark.parametrize(
    "line",
    [
        "DS41_PORT=80O0",
        "DS41_PORT=1_000",
        "DS41_PORT=70000",
        "DS41_DSPARK=yes",
        "DS41_GPUS_A=0-3",
        "DS41_MODEL=models",
        "DS41_MODEL=/a/../b",
    ],
)
def test_a_bad_value_is_refused_at_once(line: str) -> None:
    values, _ = parse_env(line, "ds41.env")
    with pytest.raises(ConfigError, match=line.split("=")[0]):
        recipe.of_env_file(values, profiles.tree(profiles.find("v100-pp2tp4")), "mybox")
