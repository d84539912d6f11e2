"""What holds for every test: the signals that its children may die of."""

from __future__ import annotations

import signal

# `nohup` and a shell's `&` hand down ignored signals, and the children of the tests must be able to die of them
for _number, _usual in (
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _usual)
