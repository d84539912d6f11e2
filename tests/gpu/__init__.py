"""Checks and benchmarks that need an NVIDIA GPU; run by hand or by script, never by pytest. See kernels/README.md."""
