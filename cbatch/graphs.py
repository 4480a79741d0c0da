"""Owns the CUDA graphs of an engine: one whole step for each bucket, all in one memory pool, and what they read.

A graph knows fixed addresses. So there is one set of static inputs for all buffers: a step's slab is copied into it on
the compute stream, the graph runs from carry-over to state update, and its tokens are copied out.
"""

from __future__ import annotations

import gc
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cbatch.buffers import DeviceBatch, IOBuffer, Landing, round_up
from cbatch.memory import ran_out
from cbatch.runner import Runner
from cbatch.sampler import FILTERED, HELD, LOGPROBS, PROCESSED, RANDOM, Edit, drawing, edited
from cbatch.scheduler.plan import Bucket, StepPlan, StepShape, StepSizes, layout

T = TypeVar("T")

# Products of many rows come in tiles of 128: between two multiples, 448 rows took longer than 512 do. From 2,048 tokens
# on, the quarters of a power of two lie on such multiples too.
_MIXED = (
    *(16, 24, 32, 48, 64, 96, 128, 192),
    *range(256, 2048, 128),
    *(quarters << power - 2 for power in range(11, 31) for quarters in (4, 5, 6, 7)),
)


@dataclass(frozen=True)
class Buckets:
    """The step sizes that have a graph: decode steps (every row one token) and mixed ones.

    Decode steps come in steps of 1 up to 8, of 8 up to 32, of 16 up to 256, then coarser. Mixed steps have rows for
    every slot, and as many tokens as ``_MIXED`` has, or the most there may be.
    """

    max_num_tokens: int
    max_num_seqs: int
    decode: tuple[int, ...] = field(init=False)
    mixed: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        decode = sorted({min(round_up(n), self.max_num_seqs) for n in range(1, self.max_num_seqs + 1)})
        mixed = tuple(size for size in _MIXED if size < self.max_num_tokens)
        object.__setattr__(self, "decode", tuple(decode))
        object.__setattr__(self, "mixed", (*mixed, self.max_num_tokens))

    def choose(self, num_tokens: int, num_rows: int) -> Bucket:
        """The smallest bucket that a step fits into."""
        if num_tokens == num_rows:
            size = self.decode[bisect_left(self.decode, num_rows)]
            return Bucket(size, size)
        return self._mixed(self.mixed[bisect_left(self.mixed, num_tokens)])

    def _mixed(self, size: int) -> Bucket:
        rows = min(size, self.max_num_seqs)
        return Bucket(size, rows if rows != size else size - 1)  # as many rows as tokens would be a decode step

    def all(self) -> list[Bucket]:
        """Every bucket, largest first, so that smaller graphs find their memory in the pool already."""
        buckets = {Bucket(size, size) for size in self.decode}
        buckets |= {self._mixed(size) for size in self.mixed if size > 1}
        return sorted(buckets, key=lambda b: (b.num_tokens, b.num_rows), reverse=True)


@dataclass(frozen=True)
class _Step:
    """The graph of a bucket. It samples greedily; ``redraw`` has the graphs that sample again from its logits.

    The keys are what ``sampler.drawing`` says. PROCESSED does everything, so that it is one graph and not four; a row
    has the same token from any graph that does what it asks for.
    """

    words: torch.Tensor  # its part of the static slab
    landing: dict[bool, torch.Tensor]  # what is copied out, with logprobs and without
    graph: torch.cuda.CUDAGraph
    redraw: dict[int, torch.cuda.CUDAGraph]
    logprobs: torch.cuda.CUDAGraph
    logits: _Window


class _Window:
    """A tensor's memory without a share in it: the pool may give it to other graphs, whose replays overwrite it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._address, self._shape, self._strides = tensor.data_ptr(), tuple(tensor.shape), tensor.stride()
        self._dtype, self._device = tensor.dtype, tensor.device

    @property
    def tensor(self) -> torch.Tensor:
        """A tensor over it, made anew (some 10 µs): one that was kept would keep this object, which would keep it."""
        return torch.as_tensor(self, device=self._device).view(self._dtype)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Numba's protocol, which knows no bfloat16: as integers of the same size."""
        size = self._dtype.itemsize
        return {
            "shape": self._shape,
            "strides": tuple(stride * size for stride in self._strides),
            "typestr": f"<i{size}",
            "data": (self._address, False),
            "version": 3,
        }


class CaptureError(Exception):
    """A step cannot be captured; it still runs eagerly."""


class GraphSet:
    """Captures everything when it is made, and waits for it. ``launch`` replays, and waits for nothing.

    Raises CaptureError if the model's forward cannot be captured after all.
    """

    def __init__(
        self, runner: Runner, buckets: Buckets, shape: StepShape, max_context_len: int, stream: torch.cuda.Stream
    ) -> None:
        device = runner.model.device
        limit = Bucket(buckets.max_num_tokens, buckets.max_num_seqs)
        self._runner, self._shape, self._max_context_len = runner, shape, max_context_len
        caller = torch.cuda.current_stream(device)  # fills in here what the graphs read there
        self._slab = torch.zeros(layout(shape, limit)[1], dtype=torch.int32, device=device)
        self._landing = Landing(buckets.max_num_seqs, device)
        self._pool = torch.cuda.graph_pool_handle()
        self._steps: dict[Bucket, _Step] = {}
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(device)[0]
        with torch.inference_mode(), torch.cuda.device(device), torch.cuda.stream(stream):
            stream.wait_stream(caller)
            sizes = [free]
            for bucket in buckets.all():
                self._steps[bucket] = self._capture(bucket)
                sizes.append(torch.cuda.mem_get_info(device)[0])
            # What one more bucket costs: the first ones fill the pool, the later ones find their memory in it.
            self.bytes_per_bucket = float(np.median(-np.diff(sizes)))
            stream.synchronize()
        torch.cuda.empty_cache()  # what the warm-up runs left behind
        self.num_bytes = free - torch.cuda.mem_get_info(device)[0]  # of the card: pool, and the driver's share

    def __len__(self) -> int:
        return len(self._steps)

    def launch(self, io: IOBuffer, plan: StepPlan) -> None:
        """Two small copies around one replay, and one replay more if some row is not greedy or wants logprobs.

        Of a HELD step the first copy and the first replay. What that draws nobody reads: ``finish`` draws again.
        """
        step = self._steps[plan.host.bucket]
        step.words.copy_(io.device_words)
        step.graph.replay()
        if not plan.flags & HELD:
            self.finish(io, plan)

    def finish(self, io: IOBuffer, plan: StepPlan, edits: Sequence[Edit] = ()) -> None:
        """What follows the step's graph. No other step's may have been replayed between: it could own the logits."""
        step = self._steps[plan.host.bucket]
        if draw := drawing(plan.flags):
            with edited(step.logits.tensor, edits, plan.flags) if edits else nullcontext():
                step.redraw[draw].replay()
        if plan.flags & LOGPROBS:
            step.logprobs.replay()
        io.landing[1].copy_(step.landing[io.lands_logprobs])

    def _capture(self, bucket: Bucket) -> _Step:
        batch = DeviceBatch(self._slab, self._shape, bucket)
        decode = bucket.num_tokens == bucket.num_rows
        sizes = StepSizes(
            num_tokens=bucket.num_tokens,
            num_rows=bucket.num_rows,
            num_decodes=bucket.num_rows if decode else 0,
            num_samples=bucket.num_rows,
            num_table_updates=batch.table_index.numel(),
            num_param_updates=bucket.num_rows,
            max_query_len=1 if decode else bucket.num_tokens,
            max_context_len=self._max_context_len,
        )

        landing = self._landing
        graph, logits = self._record(partial(self._runner.step, batch, sizes, landing, 0))
        # What follows is replayed right behind its step, whose logits nothing has overwritten by then. They are held
        # here until it is captured, so that it finds no room in their place.
        redraw = {}
        for flags in (RANDOM, RANDOM | FILTERED, RANDOM | FILTERED | PROCESSED):
            sample = partial(self._runner.sample, batch, bucket.num_rows, logits, landing, flags)
            redraw[drawing(flags)], _ = self._record(sample)
        logprobs, _ = self._record(partial(self._runner.logprobs, logits, landing))
        words = self._slab[: layout(self._shape, bucket)[1]]
        heads = {False: landing.head(0), True: landing.head(bucket.num_rows)}
        return _Step(words, heads, graph, redraw, logprobs, _Window(logits))

    def _record(self, run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """Run once, so that kernels are compiled and libraries have their workspaces, then capture.

        Returns what the captured run did, too. The error mode is the thread's own: CUDA work that other threads of the
        program do meanwhile is none of ours.
        """
        run()
        graph = torch.cuda.CUDAGraph()
        try:
            with capturing(graph, self._pool):
                out = run()
        except RuntimeError as error:  # an operator that waits for the device, or copies from it, in some dtype only
            if ran_out(error):
                raise
            raise CaptureError(f"the forward cannot be captured: {str(error).splitlines()[0]}") from error
        return graph, out


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """Capture what the block launches, with workspaces of cuBLAS that lie in the graph's own memory.

    cuBLAS has one workspace for each thread and stream, made by whoever multiplies first, and a graph holds its
    address alone. All of them are given back when torch.compile captures, or another engine starts; the graph would
    then write to memory that is somebody else's, or nobody's. So they are given back in front of a capture, which
    makes one of its own, and behind it, so that nobody else uses that.

    Nothing is collected meanwhile: it could free tensors into the pool, or call what a capture does not allow.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        torch._C._cuda_clearCublasWorkspaces()
        begin_capture(graph, pool)
        try:
            yield
        except BaseException:  # of which the caller is to hear, not that the end fails for it
            with suppress(RuntimeError):
                _end_capture(graph, pool)
            raise
        else:
            _end_capture(graph, pool)
        finally:
            torch._C._cuda_clearCublasWorkspaces()
    finally:
        if collecting:
            gc.enable()


def _end_capture(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    try:
        graph.capture_end()
    except RuntimeError:
        # Torch 2.11 leaves its allocator in the belief that the capture goes on, and it would never again free what it
        # caches to make room. From 2.12 on there is nothing left to end, which is the error suppressed here.
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
        raise


_swapping = threading.Lock()  # of the process, as the generator is


def begin_capture(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """Begin, and leave the default CUDA generator to the other threads of the program.

    torch 2.11 marks the state of that generator as captured from here to ``capture_end``, and until then whoever draws
    from it fails, in any thread: "Offset increment outside graph capture encountered unexpectedly." Nothing of ours
    draws, so the graph gets a copy of the state instead. ``capture_begin`` takes the state that the generator has,
    allocates two numbers for it on the device, and only then marks it; so the first operator that it runs gives the
    generator its own state back. What remains: what other threads do with the generator between the two swaps happens
    to the copy, so the numbers they draw there come once more. torch 2.13 marks nothing here.
    """
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    with _swapping:
        own = generator.graphsafe_get_state()
        restore = partial(generator.graphsafe_set_state, own)
        generator.graphsafe_set_state(generator.clone_state())
        try:
            with _BeforeOperators(restore):
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        finally:
            restore()


class _BeforeOperators(TorchDispatchMode):
    """Calls ``act`` before each torch operator that this thread runs inside the block."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__()
        self._act = act

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._act()
        return func(*args, **(kwargs or {}))
