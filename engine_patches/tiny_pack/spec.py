"""Shape of the tiny model: config.json of the pack, and the constants that the trainer and the recipe share."""

from __future__ import annotations

from typing import Any

VOCAB_SIZE = 129_280
IMAGE_TOKEN_ID = 129_264  # upstream hard-codes it (vllm deepseek_v41/common/mm_preprocess.py)
BOS_ID, EOS_ID, PAD_ID = 0, 1, 2
BASE_VOCAB = 2_048  # byte-level BPE ids; everything above is filler or one of the special ids
REVISION = "tiny-v41-r1"
SEED = "ds41ctl tiny-v41 r1"

ENGRAM_LAYERS = (1, 3)
ENGRAM_HEADS = 2
ENGRAM_VOCAB = 2_048
MAX_NGRAM = 4
ENGRAM_DIM = 256

SHARDS = (
    "model-00001-of-00003.safetensors",
    "model-00002-of-00003.safetensors",
    "model-00003-of-00003.safetensors",
)


def text_config(compressed_vocab_size: int, engram_rows: list[int]) -> dict[str, Any]:
    """The `text_config` block.

    hidden 128 / 4 heads x 512 / q_lora 64 / 2 groups x 32 / 8 experts top-2 x 64 ran on an H200 under stock vLLM
    0.33.0; index_n_heads 32 and index_head_dim 128 are what DeepGEMM's indexer kernels accept.
    """
    return {
        "model_type": "deepseek_v41_text",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 64,
        "o_lora_rank": 32,
        "o_groups": 2,
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-20,
        "max_position_embeddings": 1_048_576,
        "rope_theta": 10_000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 65_536,
        },
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "sliding_window": 128,
        "compress_ratios": [0, 0, 2, 2, 1, 1, 0],
        "compress_rope_theta": 160_000,
        "kv_source_layer_ids": [2, 4],
        "index_source_layer_ids": [2, 4, 5],
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 512,
        "candidate_source_layer_id": 4,
        "candidate_topk_blocks": 2_048,
        "candidate_block_size": 8,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "engram_layer_ids": list(ENGRAM_LAYERS),
        "engram_num_embeddings": engram_rows,
        "engram_max_ngram_size": MAX_NGRAM,
        "engram_vocab_size": ENGRAM_VOCAB,
        "engram_n_heads": ENGRAM_HEADS,
        "engram_head_dim": ENGRAM_DIM,
        "engram_pad_token_id": PAD_ID,
        "engram_compressed_vocab_size": compressed_vocab_size,
        "num_nextn_predict_layers": 1,
        "dspark_block_size": 5,
        "dspark_noise_token_id": 128_799,
        "dspark_target_layer_ids": [3, 4, 5],
        "dspark_markov_rank": 32,
        "dspark_n_routed_experts": 8,
        "dspark_num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    }


VISION_CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v41_vision",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "patch_size": 14,
    "rope_theta": 10_000,
    "downsample_ratio": 3,
    "max_image_tokens": 64,
    "min_pixels": 18_496,
    "max_wh_ratio": None,
}


def model_config(compressed_vocab_size: int, engram_rows: list[int]) -> dict[str, Any]:
    """The whole config.json, nested as in the real checkpoint."""
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "transformers_version": "5.19.0",  # 5.x: no false warning about another family's tokenizer regex
        "image_token_id": IMAGE_TOKEN_ID,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "text_config": text_config(compressed_vocab_size, engram_rows),
        "vision_config": VISION_CONFIG,
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
    }
