"""Launches steps on CUDA streams in turn, ordered by events; on the CPU, computes them at once.

    host    | launch 1 | launch 2 | read 1 | launch 3 | read 2 | launch 4 | read 3 ...
    lane 0   ==== 1 ====-copy-               ==== 3 ====-copy-
    lane 1              ==== 2 ====-copy-               ==== 4 ====-copy-

Token i+1 needs token i, so steps never overlap: each first waits for the event that the one before it records. The
host's work and the copies to the host overlap with the steps. Knows no model.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from cbatch.streams import give_back, take_stream


class Lanes(Protocol):
    depth: int  # steps launched before the first of them is read

    def open(self, report: Tensor, num_steps: int) -> None:
        """Begin a batch. ``report [at least num_steps, width]`` int64: step i writes row i, and only that."""

    def launch(self, index: int, compute: Callable[[], None]) -> None:
        """Queue step ``index`` behind the one before it, and the copy of its row to the host. Waits for nothing."""

    def land(self, index: int) -> Tensor:
        """Wait for a step's row on the host, and return it."""

    def close(self) -> None:
        """Make the caller's stream wait for all launched steps. The host does not wait."""


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

    A step may read what the step before it allocated on another stream. That needs no ``record_stream``: freed memory
    goes back to the stream that it came from, and the next step there first waits for the step before it, which comes
    after every reader. Each row of the report is written once, so its copy to the host may run late.
    """

    def __init__(self, depth: int, device: torch.device) -> None:
        self.depth, self.device = depth, device
        self._lanes = [_Lane(device) for _ in range(depth)]

    def open(self, report: Tensor, num_steps: int) -> None:
        """Allocates pinned memory, which torch does not reuse before the last copy into it has ended."""
        caller = torch.cuda.current_stream(self.device)
        for lane in self._lanes:
            lane.stream.wait_stream(caller)  # the caller's stream loaded the prompt
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
        """The lanes wait for each other, too: torch hands out 32 streams in turn, so other code on one of ours may get
        the memory that this batch frees now, while the last step still reads it on another. A step that failed has
        recorded no event; hence ``wait_stream``."""
        caller = torch.cuda.current_stream(self.device)
        for lane in self._lanes:
            for other in self._lanes:
                lane.stream.wait_stream(other.stream)
            caller.wait_stream(lane.stream)
        del self._report, self._host
