"""Every test here is isolated, and may open sockets to loopback only."""

import signal

from tests.isolation import homes, isolated, loopback_only

__all__ = ["homes", "isolated", "loopback_only"]

# `nohup` and a shell's `&` hand down ignored signals, and the children of these tests must die of them
for _number in (signal.SIGHUP, signal.SIGQUIT):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.SIG_DFL)
