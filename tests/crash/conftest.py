"""Every test here is isolated, and may open sockets to loopback only."""

from tests.isolation import homes, isolated, loopback_only

__all__ = ["homes", "isolated", "loopback_only"]
