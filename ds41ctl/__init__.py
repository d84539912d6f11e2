"""ds41ctl: launcher and ops CLI around a pinned vLLM engine for DeepSeek-V4.1-Flash."""

__version__ = "0.1.0"
