"""Plans: the two seeds' command lines, word for word, from profile and settings alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds41ctl.adapters import profiles
from ds41ctl.core.errors import ConfigError
from ds41ctl.core.layout import Dirs, Layout, layout
from ds41ctl.core.plan import engine_argv, engine_env, masked
from ds41ctl.core.settings import Settings

DIRS = Dirs(data=Path("/d"), state=Path("/s"), cache=Path("/c"), runtime=Path("/r"), uid=1000)


def made(name: str, **settings: object) -> Layout:
    profile = profiles.read(profiles.find(name))
    return layout(profile, Settings.model_validate(settings), DIRS, may_mount=False)


def options(argv: tuple[str, ...]) -> dict[str, str]:
    """--flag -> value ('' for switches)."""
    found: dict[str, str] = {}
    for index, part in enumerate(argv):
        if part.startswith("--"):
            follows = argv[index + 1] if index + 1 < len(argv) else "--"
            found[part] = "" if follows.startswith("--") else follows
    return found


def test_v100_has_the_build_logs_numbers() -> None:
    made_v100 = made("v100-pp2tp4")
    argv, env = engine_argv(made_v100, "/store"), engine_env(made_v100, "/store")
    given = options(argv)
    assert given["--pipeline-parallel-size"] == "2" and given["--tensor-parallel-size"] == "4"
    assert given["--max-model-len"] == "1048576"
    assert given["--max-num-batched-tokens"] == "1024"
    assert given["--max-num-seqs"] == "2"
    assert given["--gpu-memory-utilization"] == "0.943"
    assert given["--speculative-config"] == '{"method": "dspark", "num_speculative_tokens": 5}'
    assert given["--default-chat-template-kwargs"] == '{"thinking": false}'
    assert given["--served-model-name"] == "deepseek-v4.1-flash"
    assert given["--host"] == "127.0.0.1"
    assert env["VLLM_PP_LAYER_PARTITION"] == "20,20"
    assert env["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7"
    assert env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_v100_without_drafter_drops_the_speculative_config() -> None:
    assert "--speculative-config" not in engine_argv(made("v100-pp2tp4", dspark=False), "/store")


def test_v100_takes_the_quads_from_the_users_variables() -> None:
    crossed = made("v100-pp2tp4", gpus_a="0,2,4,6", gpus_c="1,3,5,7")
    assert engine_env(crossed, "/store")["CUDA_VISIBLE_DEVICES"] == "0,2,4,6,1,3,5,7"


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


SEED_004_LAUNCH = r"""
docker run -d --name ds41-flash --device nvidia.com/gpu=all --ipc=host --cap-add SYS_NICE
--ulimit memlock=-1 --ulimit stack=67108864
-v /d/models:/models:ro -v /opt/engram-ram/DeepSeek-V4.1-Flash-1017-engram:/engram:ro
-v /c/ds41-flash/root-cache:/root/.cache -v /c/ds41-flash/triton:/root/.triton -v /c/ds41-flash/tilelang:/root/.tilelang
-p 127.0.0.1:8011:8011
-e VLLM_PLUGINS=vllm_exl3 -e VLLM_ENGINE_READY_TIMEOUT_S=3600
-e VLLM_EXL3_MODEL_DIR=/models/DeepSeek-V4.1-Flash-1017-hybrid
-e VLLM_USE_V2_MODEL_RUNNER=0 -e DSV41_DSPARK_V1=1 -e VLLM_EXL3_COOP=1
-e VLLM_EXL3_TC_MOE_V2=1 -e VLLM_EXL3_TC_MOE_PREFILL=1 -e VLLM_EXL3_TC_PREFILL_ROWS=2048
-e VLLM_EXL3_TC_MOE_SO=/opt/dsv41-tc-moe/_dsv41_tc_moe_C.abi3.so -e VLLM_EXL3_TC_HOOK=/opt/dsv41-tc-moe/exl3_tc_hook.py
-e VLLM_EXL3_MOE_TP_ALIGN=128 -e VLLM_EXL3_MOE_TP_ROTATE=1
-e NCCL_CUMEM_ENABLE=0 -e NCCL_CUMEM_HOST_ENABLE=0 -e NCCL_P2P_LEVEL=SYS -e VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC=1
-e DSV41_ENGRAM_DIR=/engram -e DSV41_ENGRAM_STORAGE=ssd
-e DSV41_EXPERTS_ONLY_FILES_RE=^model-[0-9]+-of-000(43|44|39)\.safetensors$
-e TORCH_CUDA_ARCH_LIST=8.0 -e TORCHINDUCTOR_CACHE_DIR=/root/.cache/inductor
-e VLLM_DSV41_DECODE_SPLITK=1 -e DSV41_SHARED_HEAVY_BLOCKS=1 -e DSV41_DRAFT_HEAD_FP8=1
-e DSV41_PREFILL_CHUNK_REQS=1 -e DSV41_INDEXER_BUF_MULT=4 -e VLLM_EXL3_FAT_THRESHOLD=2048
--entrypoint vllm ds41-cmp170hx:1.2.0-fidelity serve /models/DeepSeek-V4.1-Flash-1017-hybrid
--quantization exl3 --load-format safetensors --safetensors-load-strategy lazy
--tensor-parallel-size 4 --pipeline-parallel-size 1
--served-model-name deepseek-v4.1-flash --host 0.0.0.0 --port 8011
--max-model-len 262144 --max-num-seqs 8 --max-num-batched-tokens 2048 --gpu-memory-utilization 0.98
--kv-cache-dtype fp8_ds_mla --enable-prefix-caching
--compilation-config @JSON@
--async-scheduling
--tokenizer-mode deepseek_v41 --enable-auto-tool-choice --tool-call-parser deepseek_v41 --reasoning-parser deepseek_v41
--enable-prompt-tokens-details
"""
GRAPHS = (
    '{"cudagraph_mode": "FULL_AND_PIECEWISE", '
    '"cudagraph_capture_sizes": [1,2,3,4,5,6,8,12,16,18,20,24,28,30,32,36,42,48]}'
)


def test_cmp170hx_prints_the_recipes_container_command_word_for_word() -> None:
    wanted = [GRAPHS if word == "@JSON@" else word for word in SEED_004_LAUNCH.split()]
    made_cmp = made("cmp170hx-tp4")
    assert list(engine_argv(made_cmp, str(made_cmp.store_dirs[0]))) == wanted
    assert engine_env(made_cmp, "/store") == {}


def test_an_unknown_placeholder_is_named_with_the_known_ones() -> None:
    tiny = made("cpu-tiny")
    serve = tiny.profile.serve.model_copy(update={"argv": ("${pyhton}",)})
    broken = Layout(**{**tiny.__dict__, "profile": tiny.profile.model_copy(update={"serve": serve})})
    with pytest.raises(ConfigError, match=r"serve\.argv: '\$\{pyhton\}': unknown placeholder.*\$\{python\}"):
        engine_argv(broken, "/store")


def test_secrets_of_the_environment_are_masked_and_other_names_are_not() -> None:
    given = {"VLLM_API_KEY": "abc", "HF_TOKEN": "x", "PORT": "1", "TOKENIZERS_PARALLELISM": "false"}
    assert masked(given) == {
        "VLLM_API_KEY": "***",
        "HF_TOKEN": "***",
        "PORT": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def test_without_the_right_to_mount_the_store_goes_to_shared_memory() -> None:
    profile = profiles.read(profiles.find("cpu-tiny"))
    free = layout(profile, Settings(), DIRS, may_mount=True)
    assert free.store_dirs == (Path("/s/engram/cpu-tiny"), Path("/dev/shm/ds41ctl-1000/cpu-tiny"))
    assert made("cpu-tiny").store_dirs == (Path("/dev/shm/ds41ctl-1000/cpu-tiny"),)
    assert made("cpu-tiny", engram_dir="/mine").store_dirs == (Path("/mine"),)
