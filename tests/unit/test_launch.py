"""The start of an engine: both seeds' command lines word for word on the recorded machines, and what may not reach it.

Each golden table names the seed's line for every argument. Seed 000 is the build log of the 8x V100 machine (its
"how-to" steps and its log entries by date), seed 004 the recipe of the 4x CMP 170HX machine (lines of config.launch).
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
from pathlib import Path

import pytest

from ds41ctl.adapters import keyfile, profiles
from ds41ctl.core.errors import ConfigError, DeniedError, Ds41Error, NotFoundError, UnsupportedError
from ds41ctl.core.launch import Launch, Machine, as_shell, cache_key, launch, masked
from ds41ctl.core.layout import Dirs, Layout, layout
from ds41ctl.core.settings import Settings
from tests.facts.replay import FACTS, machine

DIRS = Dirs(data=Path("/d"), state=Path("/s"), cache=Path("/c"), runtime=Path("/r"), uid=1000)
BARE = Machine()


def made(name: str, **settings: object) -> Layout:
    profile = profiles.read(profiles.find(name))
    return layout(profile, Settings.model_validate(settings), DIRS, may_mount=False)


def start(name: str, on: str, environ: dict[str, str] | None = None, **settings: object) -> Launch:
    """The profile's start on a recorded machine."""
    chosen = made(name, **settings)
    return launch(chosen, Machine.of(machine(on), environ or {}), str(chosen.store_dirs[0]))


# ---- seed 000
# (words of the command, the seed's line)
V100_ARGUMENTS: tuple[tuple[str, str], ...] = (
    (
        "/d/engines/ds41-vision-20261025b/venv/bin/python -m vllm.entrypoints.openai.api_server",
        "how-to 3: uv venv --python 3.12 .venv; how-to 4: DS41_PYTHON",
    ),
    ("--model /d/models/ds41-franken-v100", "how-to 2 and 4: DS41_MODEL, --local-dir ds41-franken-v100"),
    ("--served-model-name deepseek-v4.1-flash", "how-to 5: Served model name is deepseek-v4.1-flash"),
    ("--host 127.0.0.1 --port 8011", "how-to 5: curl http://127.0.0.1:$DS41_PORT, on DS41_PORT from ds41.env"),
    ("--pipeline-parallel-size 2 --tensor-parallel-size 4", "how-to 4: PP2xTP4"),
    ("--max-model-len 1048576", "how-to 4: --max-model-len 1048576"),
    ("--max-num-batched-tokens 1024", "how-to 4: --max-num-batched-tokens 1024"),
    ("--max-num-seqs 2", "how-to 4: --max-num-seqs 2"),
    ("--gpu-memory-utilization 0.943", "how-to 4: --gpu-memory-utilization 0.943"),
    ('--default-chat-template-kwargs {"thinking":false}', "how-to 5: Thinking is off by default; chat_template_kwargs"),
    ('--limit-mm-per-prompt {"image":64}', "how-to 5: up to 64 per prompt"),
    (
        "--enable-auto-tool-choice --tool-call-parser deepseek_v41",
        "how-to 5: a get_weather call, tool_calls",
    ),
    ("--reasoning-parser deepseek_v41", "how-to 5: it arrives in the reasoning field"),
    (
        '--speculative-config {"method":"dspark","num_speculative_tokens":5}',
        "how-to 4: DSpark with 5 draft tokens; DS41_DSPARK=0 switches to plain decode",
    ),
)
V100_ENVIRONMENT: tuple[tuple[str, str, str], ...] = (
    ("CUDA_VISIBLE_DEVICES", "GPU-0,GPU-1,GPU-2,GPU-3,GPU-4,GPU-5,GPU-6,GPU-7", "how-to 4: DS41_GPUS_A / DS41_GPUS_C"),
    ("CUDA_DEVICE_ORDER", "PCI_BUS_ID", "how-to 4: each quad is all-NVLink, by nvidia-smi's numbers"),
    ("VLLM_PP_LAYER_PARTITION", "20,20", "how-to 4: PP2xTP4 cut at layer 20 (of 40)"),
    ("MAX_JOBS", "16", "how-to 3: kernels compile on first start; the number is ours"),
    ("VLLM_ENGINE_READY_TIMEOUT_S", "3600", "how-to 4: a boot takes about 12 minutes; vLLM would give up after 10"),
    ("VLLM_WORKER_MULTIPROC_METHOD", "spawn", "not in the seed: CUDA in workers"),
    ("GLOO_SOCKET_IFNAME", "lo", "not in the seed: one machine, ranks meet on loopback"),
    ("HF_HUB_OFFLINE", "1", "not in the seed: a start never downloads"),
    ("VLLM_NO_USAGE_STATS", "1", "not in the seed: no telemetry"),
)
V100_CACHE = "/c/ds41-vision-20261025b/9f2c9f2c9f2c-580.173.02"


def words(table: tuple[tuple[str, str], ...]) -> list[str]:
    """The table's words in order."""
    return [word for text, _ in table for word in text.split()]


def json_words(argv: tuple[str, ...]) -> list[str]:
    """Words, JSON ones normalised."""
    return [json.dumps(json.loads(word)) if word.startswith("{") else word for word in argv]


def test_v100_is_seed_000_argument_by_argument() -> None:
    found = start("v100-pp2tp4", "v100-8x-serving-ready")
    wanted = words(V100_ARGUMENTS)
    assert json_words(found.argv) == json_words(tuple(wanted))
    assert all(line.startswith(("how-to", "log")) for _, line in V100_ARGUMENTS)


def test_v100s_environment_is_the_table_and_the_compilers_caches_and_nothing_else() -> None:
    found = start("v100-pp2tp4", "v100-8x-serving-ready")
    caches = {name: path for name, path in found.env.items() if path.startswith(V100_CACHE)}
    assert {name: value for name, value in found.env.items() if name not in caches} == {
        name: value for name, value, _ in V100_ENVIRONMENT
    }
    assert {"TORCH_EXTENSIONS_DIR", "TILELANG_CACHE_DIR", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT"} <= set(caches)
    assert found.cache == V100_CACHE and found.limits == {"nofile": 65536, "core": 0, "memlock": -1}


def test_without_the_drafter_the_line_is_the_same_less_its_config() -> None:
    plain = start("v100-pp2tp4", "v100-8x-serving-ready", dspark=False)
    assert plain.argv == start("v100-pp2tp4", "v100-8x-serving-ready").argv[:-2]


def test_gpus_go_by_uuid_in_the_order_of_the_quads() -> None:
    crossed = start("v100-pp2tp4", "v100-8x-crossed-quads", gpus_a="0,2,4,6", gpus_c="1,3,5,7")
    assert crossed.env["CUDA_VISIBLE_DEVICES"] == "GPU-0,GPU-2,GPU-4,GPU-6,GPU-1,GPU-3,GPU-5,GPU-7"


def test_without_nvml_indices_are_printed_and_said_to_be_that() -> None:
    found = launch(made("v100-pp2tp4"), BARE, "/store")
    assert found.env["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7"
    assert found.notes == ("GPUs by index, not by UUID: NVML could not be asked",)


def test_a_gpu_that_is_not_there_is_named_and_a_real_start_refused() -> None:
    seven = start("v100-pp2tp4", "v100-7x-16gb")
    assert seven.notes == ("GPU 3 is not there: NVML lists 7",)
    with pytest.raises(UnsupportedError, match="GPU 3 is not there"):
        launch(made("v100-pp2tp4"), Machine.of(machine("v100-7x-16gb"), {}), "/store", strict=True)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"gpus_a": "0,1,2"}, "names 3 GPUs, profile v100-pp2tp4 needs 4"),
        ({"gpus_a": "0,1,2,3", "gpus_c": "3,4,5,6"}, "overlap"),
    ],
)
def test_quads_of_the_wrong_size_or_overlapping_are_refused(chosen: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made("v100-pp2tp4", **chosen)


def test_a_gpu_variable_for_a_profile_without_that_group_is_refused() -> None:
    with pytest.raises(ConfigError, match="DS41_GPUS_A is set, but profile cpu-tiny"):
        made("cpu-tiny", gpus_a="0")


# ---- seed 004
RECIPE = json.loads((FACTS / "recipes" / "4x-cmp-170hx.json").read_text())
CMP_CACHE = "/c/ds41-flash/9f2c9f2c9f2c-610.43.02"
# what the recipe leaves to its reader, and where its numbers stand again
PLACEHOLDERS = {"<MODELS_DIR>": "/d/models", "<CACHE_DIR>": CMP_CACHE}


def recipe_lines() -> list[list[str]]:
    """config.launch, each line as the words a shell would pass on (the one JSON value is one word)."""
    lines = []
    for line in RECIPE["config"]["launch"]:
        text = line
        for mark, value in PLACEHOLDERS.items():
            text = text.replace(mark, value)
        head, brace, tail = text.partition("{")
        lines.append([*head.split(), *([brace + tail] if brace else [])])
    return lines


def test_cmp170hx_is_seed_004_line_by_line() -> None:
    found = list(start("cmp170hx-tp4", "cmp170hx-4x-ready").argv)
    for number, line in enumerate(recipe_lines()):
        assert found[: len(line)] == line, f"config.launch[{number}]"
        del found[: len(line)]
    assert found == []


def test_cmp170hx_sets_nothing_around_the_container_client() -> None:
    found = start("cmp170hx-tp4", "cmp170hx-4x-ready")
    assert found.env == {} and found.limits == {} and found.secrets == {} and found.cache == CMP_CACHE
    assert as_shell(found)[1].startswith("docker run")


def test_the_same_line_with_podman_where_that_is_what_there_is() -> None:
    chosen = made("cmp170hx-tp4")
    docker, podman = (launch(chosen, Machine(runtime=name), "/e").argv for name in ("docker", "podman"))
    assert podman == ("podman", *docker[1:])


# ---- what may reach the engine
def test_only_the_profiles_variables_and_the_allow_list_reach_the_engine_and_strays_are_named() -> None:
    stray = {
        "VLLM_USE_V1": "0",
        "NCCL_P2P_DISABLE": "1",
        "CUDA_VISIBLE_DEVICES": "3",
        "LD_PRELOAD": "x",
        "EDITOR": "vi",
    }
    found = start("cpu-tiny", "ubuntu2404-ready", {**stray, "HOME": "/home/user"})
    assert found.dropped == ("CUDA_VISIBLE_DEVICES", "LD_PRELOAD", "NCCL_P2P_DISABLE", "VLLM_USE_V1")
    assert not set(stray) & set(found.env) and "HOME" in found.inherited and "EDITOR" not in found.inherited


def test_a_variable_the_profile_sets_itself_is_not_called_dropped() -> None:
    assert start("cpu-tiny", "ubuntu2404-ready", {"VLLM_PLUGINS": "x", "HF_HUB_OFFLINE": "0"}).dropped == ()


def test_compiled_code_is_kept_apart_by_engine_and_driver() -> None:
    assert cache_key(BARE) == "unpinned-no-driver"
    assert cache_key(Machine(driver="580.1", engine_digest="a" * 64)) == "aaaaaaaaaaaa-580.1"


def test_an_unknown_placeholder_is_named_with_the_known_ones() -> None:
    tiny = made("cpu-tiny")
    serve = tiny.profile.serve.model_copy(update={"argv": ("${pyhton}",)})
    broken = Layout(**{**tiny.__dict__, "profile": tiny.profile.model_copy(update={"serve": serve})})
    with pytest.raises(ConfigError, match=r"serve\.argv: '\$\{pyhton\}': unknown placeholder.*\$\{python\}"):
        launch(broken, BARE, "/store")


def test_host_memory_is_interleaved_over_the_nodes_when_the_profile_says_so() -> None:
    tiny = made("cpu-tiny")
    serve = tiny.profile.serve.model_copy(update={"numa": "interleave"})
    spread = Layout(**{**tiny.__dict__, "profile": tiny.profile.model_copy(update={"serve": serve})})
    assert launch(spread, BARE, "/store").argv[:3] == ("numactl", "--interleave=all", str(tiny.python))


def test_secrets_of_the_environment_are_masked_and_other_names_are_not() -> None:
    given = {"VLLM_API_KEY": "abc", "HF_TOKEN": "x", "PORT": "1", "TOKENIZERS_PARALLELISM": "false"}
    assert masked(given) == {
        "VLLM_API_KEY": "***",
        "HF_TOKEN": "***",
        "PORT": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


# ---- the printed script
def test_the_printed_script_starts_the_very_process_that_serve_starts(tmp_path: Path) -> None:
    spy = tmp_path / "py thon"
    spy.write_text(
        '#!/bin/sh\nfor a in "$@"; do printf "%s\\0" "$a"; done > "$SPY/argv"\nenv -0 > "$SPY/env"\npwd > "$SPY/cwd"\n'
        'ulimit -c > "$SPY/core"\n'
    )
    spy.chmod(0o755)
    dirs = Dirs(data=tmp_path / "d", state=tmp_path / "s", cache=tmp_path / "c", runtime=tmp_path / "r", uid=1000)
    key = tmp_path / "key"
    key.write_text("k" * 40 + "\n")
    profile = profiles.read(profiles.find("cpu-tiny"))
    serve = profile.serve.model_copy(
        update={"env": {**profile.serve.env, "SPY": str(tmp_path), "ODD": 'a\'b "$$HOME" `c`'}}
    )
    chosen = layout(
        profile.model_copy(update={"serve": serve}),
        Settings.model_validate({"python": spy, "api_key_file": key}),
        dirs,
        may_mount=False,
    )
    found = launch(chosen, BARE, str(tmp_path / "a store"))
    odd = {**os.environ, "VLLM_STRAY": "1", "TZ": "Mars/Base 1"}
    subprocess.run(["sh", "-c", "\n".join(as_shell(found))], env=odd, check=True, cwd=tmp_path)
    assert tuple((tmp_path / "argv").read_text().split("\0")[:-1]) == found.argv[1:]
    seen = dict(entry.split("=", 1) for entry in (tmp_path / "env").read_text().split("\0") if entry)
    for name in ("PWD", "OLDPWD", "SHLVL", "_"):
        seen.pop(name, None)
    passed = {name: odd[name] for name in found.inherited if name in odd}
    assert seen == {**passed, **found.env, "VLLM_API_KEY": "k" * 40}
    assert (tmp_path / "cwd").read_text().strip() == found.cwd and (tmp_path / "core").read_text().strip() == "0"
    assert "k" * 40 not in "\n".join(as_shell(found))


def test_a_container_gets_its_key_by_a_private_file_and_never_on_its_command_line(tmp_path: Path) -> None:
    found = start("cmp170hx-tp4", "cmp170hx-4x-ready", host="0.0.0.0", api_key_file="/home/user/key")
    assert found.argv[:5] == ("docker", "run", "--env-file", "/r/cmp170hx-tp4.env", "-d")
    assert "0.0.0.0:8011:8011" in found.argv
    script = "\n".join(as_shell(found))
    assert "umask 077" in script and '"VLLM_API_KEY=$(cat /home/user/key)" > /r/cmp170hx-tp4.env' in script


# ---- addresses and keys
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.4", "gpubox"])
def test_an_address_that_others_reach_needs_a_key(host: str) -> None:
    with pytest.raises(ConfigError, match="reachable from other machines"):
        made("cpu-tiny", host=host)
    assert made("cpu-tiny", host=host, api_key_file="/k").host == host


def test_a_server_on_every_address_is_asked_on_loopback() -> None:
    assert made("cpu-tiny", host="0.0.0.0", api_key_file="/k").url == "http://127.0.0.1:8011"
    assert made("cpu-tiny", host="::", api_key_file="/k").url == "http://[::1]:8011"
    assert made("cpu-tiny", host="127.0.0.2").url == "http://127.0.0.2:8011"


@pytest.mark.parametrize(
    ("text", "mode", "error", "message"),
    [
        ("k" * 31, 0o600, ConfigError, "31 characters, at least 32"),
        ("k" * 40, 0o640, DeniedError, "can be read by others"),
        ("k" * 40 + "\n" + "l" * 40, 0o600, ConfigError, "one line"),
        ("k" * 20 + " " + "l" * 20, 0o600, ConfigError, "one line"),
        ("", 0o600, ConfigError, "0 characters"),
        (None, 0o600, NotFoundError, "no API key file"),
    ],
)
def test_a_key_file_that_is_open_short_or_strange_is_refused(
    tmp_path: Path, text: str | None, mode: int, error: type[Ds41Error], message: str
) -> None:
    path = tmp_path / "key"
    if text is not None:
        path.write_text(text)
        path.chmod(mode)
    with pytest.raises(error, match=message):
        keyfile.read(path)


def test_a_good_key_file_gives_its_one_line(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("a" * 64 + "\n")
    path.chmod(stat.S_IRUSR)
    assert keyfile.read(path) == "a" * 64 and keyfile.read(None) is None
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(DeniedError):
        keyfile.read(link)


def test_without_the_right_to_mount_the_store_goes_to_shared_memory() -> None:
    profile = profiles.read(profiles.find("cpu-tiny"))
    free = layout(profile, Settings(), DIRS, may_mount=True)
    assert free.store_dirs == (Path("/s/engram/cpu-tiny"), Path("/dev/shm/ds41ctl-1000/cpu-tiny"))
    assert made("cpu-tiny").store_dirs == (Path("/dev/shm/ds41ctl-1000/cpu-tiny"),)
    assert made("cpu-tiny", engram_dir="/mine").store_dirs == (Path("/mine"),)
