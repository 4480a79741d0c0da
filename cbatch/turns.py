"""Whose turn it is with the GPUs of this process: while somebody captures a graph, others may do most things, not all.

CUDA forbids waiting for a whole device on which a graph is captured, and ends the capture too. Torch refuses to give
back what it caches, on every device, while one is captured on. And whoever measures memory must not see another's go.
So what does any of these takes turns, on all devices together. Knows no engine.
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
_left: deque[list[Any]] = deque()  # what is to be freed by whoever has the turn


@contextmanager
def alone(device: torch.device) -> Iterator[None]:
    """Waits for its turn, which the block then has; on the CPU there is nothing to wait for. Not to be nested."""
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
    """Drop what the list holds, and give back memory that torch caches, of GPUs and pinned.

    If somebody has the turn, he does it when he is done. So this waits for nobody: he may wait for its caller, where
    the garbage collector runs a finalizer that closes an engine.
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
        _left.popleft().clear()  # the list is the caller's too
    with suppress(RuntimeError):  # the program captures a graph of its own: then torch keeps it, and uses it again
        torch.cuda.empty_cache()
        # Pinned memory, of which ``swap_space`` may be much. The name is torch 2.11's; 2.12 has a public one.
        (getattr(torch.accelerator, "empty_host_cache", None) or torch._C._host_emptyCache)()


def _forget_turn() -> None:
    """In a forked child nobody would ever end it."""
    global _turn
    _turn = threading.Lock()


os.register_at_fork(after_in_child=_forget_turn)
