"""Trainer of the tiny DeepSeek-V4.1 pack; see README.md. Never installed for users."""
