"""vLLM plugin of ds41ctl: DeepSeek-V4.1 on CPU, with the Engram rows read from a shared store; a loader check on GPUs.

Importing the package imports nothing else: the mathematics (``backbone``, ``packed``, ``quant``, ``engram_hash``) needs
torch and numpy only, ``store`` needs numpy only, and vLLM is touched by :func:`register` alone.
"""

ARCHITECTURE = "DeepseekV41ForCausalLM"


def register() -> None:
    """Entry point of group ``vllm.general_plugins``; vLLM calls it in every process, possibly several times.

    On the CPU platform it puts our class in the place of upstream's, which has no CPU path, and adds the quantisation
    method ``exl3``. On a GPU it puts upstream's own class there with a check around its loading: a tensor that never
    came ends the start (:mod:`gpu_check`).
    """
    from vllm import ModelRegistry
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        ModelRegistry.register_model(ARCHITECTURE, "ds41_engine.gpu_check:CheckedDeepseekV41ForCausalLM")
        return

    from .cpu_platform import keep_scheduler_settings, use_exact_logprobs
    from .exl3_config import register_exl3

    keep_scheduler_settings(current_platform, ARCHITECTURE)
    use_exact_logprobs()
    register_exl3()
    ModelRegistry.register_model(ARCHITECTURE, "ds41_engine.model:DeepseekV41CPUForCausalLM")
