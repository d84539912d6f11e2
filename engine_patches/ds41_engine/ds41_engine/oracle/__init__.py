"""The fp32 oracle: DeepSeek-V4.1 forward from a pack's own tensors, one layer in memory at a time, without vLLM.

``python -m ds41_engine.oracle --help``. The mathematics is the engine's (:mod:`ds41_engine.backbone`); what is here is
reading a pack layer by layer (``shards``, ``stream``), attention over whole sequences (``sequence``), the optional
rounding of activations and keys (``rounding``), prompts (``prompts``), the loop that can be killed (``run``) and the
file it ends in (``reference``).
"""
