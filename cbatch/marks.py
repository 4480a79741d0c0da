"""Notes when one step was copied in, computed and copied out, on the host's clock. Knows no engine and no drawing.

A lane fills marks in where it is given some, which is while a timeline records; else it makes no such events.
"""

from __future__ import annotations

import time
from typing import Protocol

import torch

_MAX_TRIES = 64
_NARROW_S = 20e-6

Interval = tuple[float, float]  # seconds of time.perf_counter


class Marks(Protocol):
    uncertainty_s: float  # how far all the times of ``intervals`` may lie off the host's clock, together

    def intervals(self) -> tuple[Interval, Interval, Interval]:
        """When the step was copied in, computed and copied out. Valid once it has landed."""


class CpuMarks:
    """The worker's own clock readings."""

    uncertainty_s = 0.0
    times: tuple[float, float, float, float]  # start, copied in, computed, copied out

    def intervals(self) -> tuple[Interval, Interval, Interval]:
        start, copied, computed, end = self.times
        return (start, copied), (copied, computed), (computed, end)


def event_pair() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Events that time what runs between them."""
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


class CudaMarks:
    """Timing events on the three streams.

    The copy in begins on an idle stream, so its interval has the host's few µs between two calls in it. The copy out
    and the step wait for an event that comes later than the calls do, so theirs are the device's alone.
    """

    def __init__(self, clock: CudaClock) -> None:
        self._clock = clock
        self.uncertainty_s = clock.uncertainty_s
        self.h2d, self.compute, self.d2h = (event_pair() for _ in range(3))

    def intervals(self) -> tuple[Interval, Interval, Interval]:
        at = self._clock.host_time
        h2d, compute, d2h = ((at(start), at(end)) for start, end in (self.h2d, self.compute, self.d2h))
        return h2d, compute, d2h


class CudaClock:
    """Brings events to the host's clock through one event whose host time is known."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        """Waits for the stream, some times: choose one that is idle (some 10 µs a time)."""
        self.uncertainty_s = float("inf")
        # The narrowest bracket: any may hold another thread's turn with the interpreter, or another process's with the
        # device (eight brackets beside eleven such processes were all wider than 200 µs).
        for _ in range(_MAX_TRIES):
            event = torch.cuda.Event(enable_timing=True)
            before = time.perf_counter()
            event.record(stream)
            event.synchronize()
            after = time.perf_counter()
            if (after - before) / 2 < self.uncertainty_s:
                self.uncertainty_s = (after - before) / 2
                self._base, self._base_time = event, (before + after) / 2
                if self.uncertainty_s < _NARROW_S:
                    break

    def host_time(self, event: torch.cuda.Event) -> float:
        return self._base_time + self._base.elapsed_time(event) * 1e-3
