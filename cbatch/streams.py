"""Owns the time of a step on the device: three CUDA streams, or a worker thread that stands for them on the CPU.

A lane launches a step without waiting for it, and says when its tokens have landed. It knows no request and no model:
a step is a buffer and a function that computes.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from cbatch.buffers import IOBuffer


class Lane(Protocol):
    kind: str  # "gpu" or "cpu_lane": whose activity it is

    def launch(self, io: IOBuffer, num_words: int, num_samples: int, compute: Callable[[], None]) -> None:
        """Start copying ``num_words`` in, computing, and copying ``num_samples`` tokens out; returns at once."""

    def wait(self, io: IOBuffer) -> tuple[float, float]:
        """Wait until the step of this buffer has landed; its milliseconds, and those the lane stood idle before it.

        Raises what the step raised.
        """

    def idle(self) -> None:
        """There is no work: the time until the next launch is not idleness."""

    def close(self) -> None: ...


@dataclass
class _CpuStep:
    landed: threading.Event
    error: BaseException | None = None
    step_ms: float = 0.0
    gap_ms: float = 0.0


class CpuLane:
    """A worker thread computes the steps in order; torch releases the interpreter lock inside its operators."""

    kind = "cpu_lane"

    def __init__(self, buffers: list[IOBuffer]) -> None:
        for io in buffers:
            io.lane_state = _CpuStep(threading.Event())
        self._jobs: queue.SimpleQueue[tuple[IOBuffer, int, int, Callable[[], None]] | None] = queue.SimpleQueue()
        self._last_end: float | None = None
        self._thread = threading.Thread(target=self._work, name="cbatch-compute", daemon=True)
        self._thread.start()

    def launch(self, io: IOBuffer, num_words: int, num_samples: int, compute: Callable[[], None]) -> None:
        io.lane_state.landed.clear()
        self._jobs.put((io, num_words, num_samples, compute))

    def wait(self, io: IOBuffer) -> tuple[float, float]:
        step: _CpuStep = io.lane_state
        step.landed.wait()
        if step.error is not None:
            raise step.error
        return step.step_ms, step.gap_ms

    def idle(self) -> None:
        self._last_end = None

    def close(self) -> None:
        self._jobs.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    @torch.inference_mode()
    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            io, num_words, num_samples, compute = job
            step: _CpuStep = io.lane_state
            start = time.perf_counter()
            try:
                io.device_slab[:num_words].copy_(io.host_slab[:num_words])
                compute()
                io.host_sampled[:num_samples].copy_(io.device_sampled[:num_samples])
                step.error = None
            except BaseException as error:  # handed over to whoever waits for the step
                step.error = error
            end = time.perf_counter()
            step.step_ms = (end - start) * 1e3
            step.gap_ms = (start - self._last_end) * 1e3 if self._last_end is not None else 0.0
            self._last_end = end
            del job, compute
            step.landed.set()


@dataclass
class _CudaStep:
    copied: torch.cuda.Event
    landed: torch.cuda.Event
    index: int = 0  # which pair of timing events is its own


class CudaLane:
    """Streams ``h2d``, ``compute`` and ``d2h``, ordered by events; ``wait`` is the only place the CPU waits."""

    kind = "gpu"

    def __init__(self, buffers: list[IOBuffer], device: torch.device) -> None:
        self.device = device
        self.h2d, self.compute, self.d2h = (torch.cuda.Stream(device) for _ in range(3))
        self.compute.wait_stream(torch.cuda.current_stream(device))  # weights and pages are filled there
        self.h2d.wait_stream(torch.cuda.current_stream(device))
        for io in buffers:
            io.lane_state = _CudaStep(torch.cuda.Event(), torch.cuda.Event())
        # One pair more than steps in flight: a landed step is timed against the end of the one before it, which the
        # launch of the next must not have recorded over.
        self._marks = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(len(buffers) + 2)
        ]
        self._num_launched = 0
        self._after_idle = {0}  # launches that follow idleness: no gap before them

    def launch(self, io: IOBuffer, num_words: int, num_samples: int, compute: Callable[[], None]) -> None:
        step: _CudaStep = io.lane_state
        step.index = self._num_launched
        start, end = self._marks[step.index % len(self._marks)]
        self._num_launched += 1
        with torch.inference_mode(), torch.cuda.device(self.device):
            with torch.cuda.stream(self.h2d):
                io.device_slab[:num_words].copy_(io.host_slab[:num_words], non_blocking=True)
                step.copied.record(self.h2d)
            with torch.cuda.stream(self.compute):
                self.compute.wait_event(step.copied)
                start.record(self.compute)
                compute()
                end.record(self.compute)
            with torch.cuda.stream(self.d2h):
                self.d2h.wait_event(end)
                io.host_sampled[:num_samples].copy_(io.device_sampled[:num_samples], non_blocking=True)
                step.landed.record(self.d2h)

    def wait(self, io: IOBuffer) -> tuple[float, float]:
        step: _CudaStep = io.lane_state
        step.landed.synchronize()
        start, end = self._marks[step.index % len(self._marks)]
        gap_ms = 0.0
        if step.index in self._after_idle:
            self._after_idle.discard(step.index)
        else:
            gap_ms = self._marks[(step.index - 1) % len(self._marks)][1].elapsed_time(start)
        return start.elapsed_time(end), gap_ms

    def idle(self) -> None:
        self._after_idle.add(self._num_launched)

    def close(self) -> None:
        self.compute.synchronize()
        self.d2h.synchronize()
