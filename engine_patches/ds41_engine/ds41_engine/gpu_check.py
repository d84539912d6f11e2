"""The engine's own GPU model with one thing added: a load that misses a tensor of the pack ends the start.

Only the hook around ``load_weights`` is ours; the class, its kernels and its weights are upstream's.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from torch import Tensor
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.models.deepseek_v41.nvidia.vl_model import DeepseekV41ForCausalLM

from .seen import MissingTensorsError, Seen, complaint, config_of

UNFILLED_ENV = "DS41_ENGRAM_UNFILLED"

# vLLM configures only loggers below "vllm".
logger = init_logger("vllm.ds41_engine")


class CheckedDeepseekV41ForCausalLM(DeepseekV41ForCausalLM):  # type: ignore[misc]
    """Upstream's model, whose load names every tensor that never came.

    ``DS41_ENGRAM_UNFILLED=1`` skips the check for the Engram tables: it plays the field's silent failure in tests.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self._ds41_model = str(vllm_config.model_config.model)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """As upstream; raises MissingTensorsError afterwards."""
        seen = Seen()
        loaded: set[str] = super().load_weights(seen.watch(weights))
        config = config_of(self._ds41_model)
        if config is None:
            logger.warning("ds41: WARNING: %s is no folder: its tensors were not checked", self._ds41_model)
            return loaded
        unfilled = os.environ.get(UNFILLED_ENV) == "1"
        if unfilled:
            logger.warning("ds41: WARNING: %s=1: missing Engram tables are not looked for", UNFILLED_ENV)
        missing = seen.missing(config, tables_elsewhere=unfilled)
        if missing:
            line = complaint(missing)
            logger.error("ds41: %s", line)
            raise MissingTensorsError(f"ds41: {line}")
        logger.info("ds41: every tensor the pack must have was loaded (%d seen)", len(seen.names))
        return loaded
