"""The quantisation method ``exl3`` of config.json: EXL3 routed experts, FP8 in 32x32 blocks elsewhere."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

METHOD = "exl3"
REST = "deepseek_v4_fp8"
"""The only format of everything else that is supported: FP8 in 32x32 blocks with UE8M0 scales."""


class Exl3Config(QuantizationConfig):
    """What config.json says. Bits a weight are never read from here: a trellis' shape tells them."""

    @classmethod
    def get_name(cls) -> Any:
        return METHOD

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 70

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Exl3Config:
        """Raises ValueError (one line) for what is not supported."""
        rest = config.get("non_routed_quantization") or {}
        if rest.get("quant_method") != REST or list(rest.get("weight_block_size") or ()) != [32, 32]:
            raise ValueError(
                f"config field quantization_config.non_routed_quantization: expected {REST} with weight_block_size "
                f"[32, 32], found {rest.get('quant_method')} with {rest.get('weight_block_size')}; EXL3 is supported "
                "for routed experts only"
            )
        return cls()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """None: no layer of vLLM's own is quantised; the backbone holds its experts itself."""
        return None


def register_exl3() -> None:
    """Make the method known to vLLM; a second call changes nothing."""
    register_quantization_config(METHOD)(Exl3Config)
