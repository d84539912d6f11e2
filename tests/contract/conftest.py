"""Every test here is isolated, and may open sockets to loopback only."""

from __future__ import annotations

import pytest
from pytest_socket import socket_allow_hosts

from tests.isolation import isolated

__all__ = ["isolated"]


@pytest.fixture(autouse=True)
def loopback_only() -> None:
    """Anything but loopback raises."""
    socket_allow_hosts(["127.0.0.1", "::1", "localhost"], allow_unix_socket=True)
