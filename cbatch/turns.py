"""Serialises graph captures, memory measurements and device-wide waits of all engines in this process. Knows no engine.

During a capture, CUDA refuses to wait for the whole device, and invalidates the capture; torch refuses to empty its
caches, on every device; and an engine that measures memory must not count what another frees. One lock covers all
devices.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

_turn = threading.Lock()
_left: deque[list[Any]] = deque()  # to be freed by the thread that holds the turn


@contextmanager
def alone(device: torch.device) -> Iterator[None]:
    """Waits for the turn, and holds it over the block; does nothing on the CPU. Must not be nested."""
    if device.type != "cuda":
        yield
        return
    try:
        with _turn:
            _free_all()
            yield
    finally:
        _free_if_possible()


def free(things: list[Any]) -> None:
    """Clear the list, and give back torch's cached GPU and pinned memory.

    Never waits: if another thread holds the turn, that thread does it at the end of its turn. It may be waiting for the
    caller, where the garbage collector runs a finalizer that closes an engine.
    """
    _left.append(things)
    _free_if_possible()


def _free_if_possible() -> None:
    while _left and _turn.acquire(blocking=False):
        try:
            _free_all()
        finally:
            _turn.release()


def _free_all() -> None:
    if not _left:
        return
    while _left:
        _left.popleft().clear()  # the caller may still hold the list
    with suppress(RuntimeError):  # the program captures a graph of its own: torch keeps the memory for reuse
        torch.cuda.empty_cache()
        # Pinned memory: ``swap_space`` may be large. torch 2.12 has a public name, 2.11 a private one.
        (getattr(torch.accelerator, "empty_host_cache", None) or torch._C._host_emptyCache)()


def _forget_turn() -> None:
    """In a forked child, the thread that held it does not exist."""
    global _turn
    _turn = threading.Lock()


os.register_at_fork(after_in_child=_forget_turn)
