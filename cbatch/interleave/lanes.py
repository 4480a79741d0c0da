"""When a token is computed: on two CUDA streams in turn, ordered by events; on the CPU, at once.

    host    | launch 1 | launch 2 | read 1 | launch 3 | read 2 | launch 4 | read 3 ...
    lane 0   ==== 1 ====-copy-               ==== 3 ====-copy-
    lane 1              ==== 2 ====-copy-               ==== 4 ====-copy-

Token i+1 needs token i, so the steps never overlap: each begins by waiting for the event that the one before it
records. What overlaps with the steps is the host's work, and the copies to the host. Knows no model.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from cbatch.streams import give_back, take_stream


class Lanes(Protocol):
    depth: int  # steps that are launched before the first of them is read

    def open(self, report: Tensor, num_steps: int) -> None:
        """Begin a batch. ``report [at least num_steps, width]`` int64: step i writes row i, and only that."""

    def launch(self, index: int, compute: Callable[[], None]) -> None:
        """Queue step ``index`` behind the one before it, and the copy of its row to the host. Waits for nothing."""

    def land(self, index: int) -> Tensor:
        """Wait until the row of a step is on the host, and return it."""

    def close(self) -> None:
        """Let the caller's stream go on after all that was launched. The host does not wait."""


class HostLane:
    """One lane: ``launch`` computes at once."""

    depth = 1

    def open(self, report: Tensor, num_steps: int) -> None:
        self._report = report

    def launch(self, index: int, compute: Callable[[], None]) -> None:
        compute()

    def land(self, index: int) -> Tensor:
        return self._report[index]

    def close(self) -> None:
        del self._report


class _Lane:
    def __init__(self, device: torch.device) -> None:
        self.stream = take_stream(device)
        weakref.finalize(self, give_back, self.stream).atexit = False
        self.computed = torch.cuda.Event()
        self.landed = torch.cuda.Event()


class CudaLanes:
    """``depth`` streams in turn. ``land`` is the only place where the CPU waits.

    What a step allocates on its own stream, the next step may read on another. That needs no ``record_stream``: memory
    that is freed meanwhile goes back to the stream that it came from, and the next step on that stream begins by
    waiting for the step before it, which comes after every reader. Each row of the report is written once, so its copy
    to the host may come as late as it likes.
    """

    def __init__(self, depth: int, device: torch.device) -> None:
        self.depth, self.device = depth, device
        self._lanes = [_Lane(device) for _ in range(depth)]

    def open(self, report: Tensor, num_steps: int) -> None:
        """Allocates pinned memory, which torch does not reuse before the last copy into it is over."""
        caller = torch.cuda.current_stream(self.device)
        for lane in self._lanes:
            lane.stream.wait_stream(caller)  # which filled the prompt in
        self._report = report
        self._host = torch.full((num_steps, report.shape[1]), -1, dtype=torch.int64, device="cpu", pin_memory=True)

    def launch(self, index: int, compute: Callable[[], None]) -> None:
        lane = self._lanes[index % self.depth]
        with torch.cuda.device(self.device), torch.cuda.stream(lane.stream):
            if index:
                lane.stream.wait_event(self._lanes[(index - 1) % self.depth].computed)
            compute()
            lane.computed.record(lane.stream)
            self._host[index].copy_(self._report[index], non_blocking=True)
            lane.landed.record(lane.stream)

    def land(self, index: int) -> Tensor:
        self._lanes[index % self.depth].landed.synchronize()
        row = self._host[index]
        assert row[0] >= 0, "a row was read before it had landed"
        return row

    def close(self) -> None:
        """The lanes wait for each other, too: torch has 32 streams and hands them out in turn, so other code on one of
        ours may get the memory that this batch frees now, while the last step still reads it on another. A step that
        failed half way has recorded no event; hence ``wait_stream``."""
        caller = torch.cuda.current_stream(self.device)
        for lane in self._lanes:
            for other in self._lanes:
                lane.stream.wait_stream(other.stream)
            caller.wait_stream(lane.stream)
        del self._report, self._host
