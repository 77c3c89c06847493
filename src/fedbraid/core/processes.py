"""Processes that this one starts, at a terminal whose Ctrl-C goes to all of them and is the parent's affair."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def born_deaf() -> Iterator[None]:
    """Inside, processes are born that hear no Ctrl-C before they have said `deaf`."""
    old = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)


def deaf() -> None:
    """Let this process, started by another one, hear no Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
