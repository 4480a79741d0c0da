"""Owns when a step runs: on three CUDA streams, or on a worker thread that stands for them on the CPU.

A lane launches steps without waiting, and waits until the tokens of one have landed. It knows no request and no model:
to it, a step is a buffer and a function that computes.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from cbatch.buffers import IOBuffer
from cbatch.marks import CpuMarks, CudaClock, CudaMarks, Marks, event_pair

THREAD_PREFIX = "cbatch-"  # of the names of an engine's threads
_idle_streams: dict[torch.device, list[torch.cuda.Stream]] = {}  # given back, and free to take


def take_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream for a long-lived object, which should ``give_back`` it at its end.

    torch has 32 for each device and hands them out in turn: the 33rd is the first again, even if that is in use. The
    eleventh engine beside a running one would capture its graphs on a stream that the other copies on.
    """
    try:
        return _idle_streams[device].pop()
    except (KeyError, IndexError):
        return torch.cuda.Stream(device)


def give_back(stream: torch.cuda.Stream) -> None:
    """Let others take a stream; their work runs behind what is still queued on it."""
    _idle_streams.setdefault(stream.device, []).append(stream)


class Lane(Protocol):
    kind: str  # "gpu" or "cpu_lane": what ``activity_pct`` is of

    def launch(self, io: IOBuffer, compute: Callable[[], None], marks: Any = None, held: bool = False) -> None:
        """Start copying the step's arrays in, computing, and copying its tokens out; returns at once.

        ``marks``, made by ``marks_maker``, record when each of these happens. A ``held`` step stops after ``compute``;
        the next launch must then be ``launch_rest``.
        """

    def launch_rest(self, io: IOBuffer, compute: Callable[[], None], words: tuple[Tensor, Tensor] | None) -> None:
        """Start the rest of a held step; returns at once. ``words`` (of host and device) are copied in first."""

    def wait(self, io: IOBuffer) -> tuple[float, float]:
        """Wait until the step of this buffer has landed. Returns its time, and the idle time before it, both in ms.

        The pause in a held step counts as idle. Raises what the step raised.
        """

    def copied_in(self, io: IOBuffer) -> bool:
        """Whether the host slab may be written again: its last copy to the device is over. Does not wait."""

    def idle(self) -> None:
        """There is no work: the time until the next launch does not count as idle."""

    def marks_maker(self) -> Callable[[], Marks]:
        """A function that makes the marks of a step. Waits some 100 µs for the device, to relate its clock to ours."""

    def close(self) -> None: ...


@dataclass
class _CpuStep:
    landed: threading.Event
    error: BaseException | None = None
    step_ms: float = 0.0
    gap_ms: float = 0.0
    marks: Any = None
    times: tuple[float, ...] = ()  # start, copied in, computed


@dataclass(frozen=True)
class _Job:
    """A step, or one of the two parts of a held one."""

    io: IOBuffer
    compute: Callable[[], None]
    words: tuple[Tensor, Tensor] | None  # to copy in before
    first: bool
    last: bool


class CpuLane:
    """A worker thread computes the steps in order; torch releases the interpreter lock inside its operators."""

    kind = "cpu_lane"

    def __init__(self, buffers: list[IOBuffer]) -> None:
        for io in buffers:
            io.lane_state = _CpuStep(threading.Event())
            io.lane_state.landed.set()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._last_end: float | None = None
        self._thread = threading.Thread(target=self._work, name=f"{THREAD_PREFIX}compute", daemon=True)

    def launch(self, io: IOBuffer, compute: Callable[[], None], marks: Any = None, held: bool = False) -> None:
        if self._thread.ident is None:  # not where the lane is made: a Ctrl-C there would leave the thread behind
            self._thread.start()
        io.lane_state.landed.clear()
        io.lane_state.marks = marks
        self._jobs.put(_Job(io, compute, io.h2d, True, not held))

    def launch_rest(self, io: IOBuffer, compute: Callable[[], None], words: tuple[Tensor, Tensor] | None) -> None:
        self._jobs.put(_Job(io, compute, words, False, True))

    def wait(self, io: IOBuffer) -> tuple[float, float]:
        step: _CpuStep = io.lane_state
        step.landed.wait()
        if step.error is not None:
            raise step.error
        return step.step_ms, step.gap_ms

    def copied_in(self, io: IOBuffer) -> bool:
        return bool(io.lane_state.landed.is_set())

    def idle(self) -> None:
        self._last_end = None

    def marks_maker(self) -> Callable[[], Marks]:
        return CpuMarks

    def close(self) -> None:
        self._jobs.put(None)
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join()

    @torch.inference_mode()
    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            step: _CpuStep = job.io.lane_state
            if job.first:
                step.error, step.step_ms, step.gap_ms = None, 0.0, 0.0
            start = time.perf_counter()
            try:
                if step.error is None:
                    self._run(job, step)
            except BaseException as error:  # ``wait`` raises it
                step.error = error
            end = time.perf_counter()
            step.step_ms += (end - start) * 1e3
            step.gap_ms += (start - self._last_end) * 1e3 if self._last_end is not None else 0.0
            self._last_end = end
            last = job.last
            del job
            if last:
                step.landed.set()

    def _run(self, job: _Job, step: _CpuStep) -> None:
        start = time.perf_counter()
        if job.words is not None:
            on_host, on_device = job.words
            on_device.copy_(on_host)
        copied = time.perf_counter()
        job.compute()
        computed = time.perf_counter()
        step.times = (start, copied, computed) if job.first else (*step.times[:2], computed)
        if job.last:
            on_host, on_device = job.io.d2h
            on_host.copy_(on_device)
            if step.marks is not None:
                step.marks.times = (*step.times, time.perf_counter())


@dataclass
class _CudaStep:
    copied: torch.cuda.Event
    landed: torch.cuda.Event
    start: torch.cuda.Event | None = None
    end: torch.cuda.Event | None = None
    previous_end: torch.cuda.Event | None = None  # None: it is the first step, or the first after ``idle``
    marks: Any = None
    held: bool = False
    pause: tuple[torch.cuda.Event, torch.cuda.Event] | None = None  # of a held step; made for the buffer's first one


class CudaLane:
    """Streams ``h2d``, ``compute`` and ``d2h``, ordered by events; ``wait`` is the only place the CPU waits."""

    kind = "gpu"

    def __init__(self, buffers: list[IOBuffer], device: torch.device) -> None:
        self.device = device
        self.h2d, self.compute, self.d2h = (take_stream(device) for _ in range(3))
        self.compute.wait_stream(torch.cuda.current_stream(device))  # weights and pages are filled there
        self.h2d.wait_stream(torch.cuda.current_stream(device))
        for io in buffers:
            io.lane_state = _CudaStep(torch.cuda.Event(), torch.cuda.Event())
        # Two pairs more than steps in flight: a landed step is timed against the end of the step before it, which a
        # later launch must not have recorded again.
        self._pairs = itertools.cycle([event_pair() for _ in range(len(buffers) + 2)])
        self._last_end: torch.cuda.Event | None = None

    def launch(self, io: IOBuffer, compute: Callable[[], None], marks: Any = None, held: bool = False) -> None:
        step: _CudaStep = io.lane_state
        step.marks, step.held = marks, held
        if held and step.pause is None:
            step.pause = event_pair()
        start, end = next(self._pairs) if marks is None else marks.compute
        step.start, step.end, step.previous_end, self._last_end = start, end, self._last_end, end
        with torch.inference_mode(), torch.cuda.device(self.device):
            with torch.cuda.stream(self.h2d):
                if marks is not None:
                    marks.h2d[0].record(self.h2d)
                on_host, on_device = io.h2d
                on_device.copy_(on_host, non_blocking=True)
                if marks is not None:
                    marks.h2d[1].record(self.h2d)
                step.copied.record(self.h2d)
            with torch.cuda.stream(self.compute):
                self.compute.wait_event(step.copied)
                start.record(self.compute)
                compute()
                if held and step.pause is not None:
                    step.pause[0].record(self.compute)
                else:
                    end.record(self.compute)
            if not held:
                self._copy_out(io, step)

    def launch_rest(self, io: IOBuffer, compute: Callable[[], None], words: tuple[Tensor, Tensor] | None) -> None:
        step: _CudaStep = io.lane_state
        assert step.held and step.pause is not None and step.end is not None
        with torch.inference_mode(), torch.cuda.device(self.device):
            if words is not None:  # beside the first part, which is still running
                on_host, on_device = words
                with torch.cuda.stream(self.h2d):
                    on_device.copy_(on_host, non_blocking=True)
                    step.copied.record(self.h2d)
            with torch.cuda.stream(self.compute):
                if words is not None:
                    self.compute.wait_event(step.copied)
                step.pause[1].record(self.compute)
                compute()
                step.end.record(self.compute)
            self._copy_out(io, step)

    def _copy_out(self, io: IOBuffer, step: _CudaStep) -> None:
        assert step.end is not None
        marks = step.marks
        with torch.cuda.stream(self.d2h):
            self.d2h.wait_event(step.end)
            if marks is not None:
                marks.d2h[0].record(self.d2h)
            on_host, on_device = io.d2h
            on_host.copy_(on_device, non_blocking=True)
            if marks is not None:
                marks.d2h[1].record(self.d2h)
            step.landed.record(self.d2h)

    def wait(self, io: IOBuffer) -> tuple[float, float]:
        step: _CudaStep = io.lane_state
        step.landed.synchronize()
        assert step.start is not None and step.end is not None
        gap_ms = step.previous_end.elapsed_time(step.start) if step.previous_end is not None else 0.0
        step_ms = step.start.elapsed_time(step.end)
        if step.held and step.pause is not None:
            pause_ms = step.pause[0].elapsed_time(step.pause[1])
            step_ms, gap_ms = step_ms - pause_ms, gap_ms + pause_ms
        return step_ms, gap_ms

    def copied_in(self, io: IOBuffer) -> bool:
        return bool(io.lane_state.copied.query())

    def idle(self) -> None:
        self._last_end = None  # called with nothing in flight

    def marks_maker(self) -> Callable[[], Marks]:
        return partial(CudaMarks, CudaClock(self.h2d))  # idle between steps; ``compute`` would wait for a step

    def close(self) -> None:
        self.compute.synchronize()
        self.d2h.synchronize()
        for stream in (self.h2d, self.compute, self.d2h):
            give_back(stream)
