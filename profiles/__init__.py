"""Profiles as data: one TOML a machine and engine pin, their JSON Schema, and the embedded tiny pack's recipe."""
