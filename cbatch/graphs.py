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
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cbatch.buffers import DeviceBatch, IOBuffer, Landing, round_up
from cbatch.memory import ran_out
from cbatch.models.base import Model
from cbatch.models.decoder import Decoder
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


class Buckets:
    """The step sizes that have a graph: of decode steps (every row has one token) and of mixed ones.

    The rows of decode steps are rounded as ``round_up`` says. Mixed steps have rows for every slot, and their tokens
    are padded to the next of ``_MIXED``, or to the most there may be.
    """

    def __init__(self, max_num_tokens: int, max_num_seqs: int) -> None:
        self.max_num_tokens, self.max_num_seqs = max_num_tokens, max_num_seqs
        self.decode = sorted({min(round_up(n), max_num_seqs) for n in range(1, max_num_seqs + 1)})
        self.mixed = [*(size for size in _MIXED if size < max_num_tokens), max_num_tokens]

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
class _BucketGraphs:
    """The graphs of a bucket: ``step`` samples greedily, those in ``redraw`` sample again from its logits.

    The keys are those of ``sampler.drawing``. PROCESSED does everything, so that it is one graph and not four; a row
    gets the same token from any graph that does what it asks for.
    """

    words: torch.Tensor  # the bucket's part of the static slab
    landing: dict[bool, torch.Tensor]  # what is copied out, with logprobs and without
    step: torch.cuda.CUDAGraph
    redraw: dict[int, torch.cuda.CUDAGraph]
    logprobs: torch.cuda.CUDAGraph
    logits: _Window


class _Window:
    """A tensor's memory, without keeping it alive: the pool may give it to other graphs, which overwrite it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._address, self._shape, self._strides = tensor.data_ptr(), tuple(tensor.shape), tensor.stride()
        self._dtype, self._device = tensor.dtype, tensor.device

    @property
    def tensor(self) -> torch.Tensor:
        """A new tensor over it (some 10 µs). Not cached: tensor and window would keep each other alive."""
        return torch.as_tensor(self, device=self._device).view(self._dtype)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Numba's protocol. It knows no bfloat16, so: integers of the same size."""
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
        model = runner.model
        rehearsed = model.shallow() if isinstance(model, Decoder) else model
        caller = torch.cuda.current_stream(device)  # zeroes the tensors below; ``stream`` waits for that
        self._slab = torch.zeros(layout(shape, limit)[1], dtype=torch.int32, device=device)
        self._landing = Landing(buckets.max_num_seqs, device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[Bucket, _BucketGraphs] = {}
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(device)[0]
        with torch.inference_mode(), torch.cuda.device(device), torch.cuda.stream(stream):
            stream.wait_stream(caller)
            sizes = [free]
            for bucket in buckets.all():
                self._graphs[bucket] = self._capture(bucket, rehearsed)
                sizes.append(torch.cuda.mem_get_info(device)[0])
            # What one more bucket costs: the first ones fill the pool, the later ones find their memory in it.
            self.bytes_per_bucket = float(np.median(-np.diff(sizes)))
            stream.synchronize()
        torch.cuda.empty_cache()  # what the warm-up runs left behind
        self.num_bytes = free - torch.cuda.mem_get_info(device)[0]  # of the card: pool, and the driver's share

    def __len__(self) -> int:
        return len(self._graphs)

    def launch(self, io: IOBuffer, plan: StepPlan) -> None:
        """Two small copies around one replay, and one replay more if some row is not greedy or wants logprobs.

        Of a HELD step, only the first copy and the first replay, whose tokens are ignored: ``finish`` draws again.
        """
        graphs = self._graphs[plan.host.bucket]
        graphs.words.copy_(io.device_words)
        graphs.step.replay()
        if not plan.flags & HELD:
            self.finish(io, plan)

    def finish(self, io: IOBuffer, plan: StepPlan, edits: Sequence[Edit] = ()) -> None:
        """What follows the step's graph. No other step's graph may run between them: it could overwrite the logits."""
        graphs = self._graphs[plan.host.bucket]
        if draw := drawing(plan.flags):
            with edited(graphs.logits.tensor, edits, plan.flags) if edits else nullcontext():
                graphs.redraw[draw].replay()
        if plan.flags & LOGPROBS:
            graphs.logprobs.replay()
        io.d2h[1].copy_(graphs.landing[io.lands_logprobs])

    def _capture(self, bucket: Bucket, rehearsed: Model) -> _BucketGraphs:
        """``rehearsed`` runs before the runner's model is captured: it launches the same kernels."""
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
        step = partial(self._runner.step, batch, sizes, landing, 0)
        graph, logits = self._record(step, rehearsal=partial(step, model=rehearsed))
        # The graphs below are replayed right behind the step's, before anything overwrites its logits. ``logits`` stays
        # alive until they are captured, so that none of them gets its memory.
        redraw = {}
        for flags in (RANDOM, RANDOM | FILTERED, RANDOM | FILTERED | PROCESSED):
            sample = partial(self._runner.sample, batch, bucket.num_rows, logits, landing, flags)
            redraw[drawing(flags)], _ = self._record(sample)
        logprobs, _ = self._record(partial(self._runner.logprobs, logits, landing))
        words = self._slab[: layout(self._shape, bucket)[1]]
        heads = {False: landing.head(0), True: landing.head(bucket.num_rows)}
        return _BucketGraphs(words, heads, graph, redraw, logprobs, _Window(logits))

    def _record(
        self, run: Callable[[], T], rehearsal: Callable[[], object] | None = None
    ) -> tuple[torch.cuda.CUDAGraph, T]:
        """Run once, so that kernels are compiled and libraries have their workspaces, then capture.

        ``rehearsal`` runs in place of the first: it launches the same kernels, fewer times. Returns the graph, and what
        the captured run returned.
        """
        (rehearsal or run)()
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

    cuBLAS has one workspace for each thread and stream, allocated at the first product there, and a graph holds only
    its address. torch frees all of them when torch.compile captures, or another engine starts; the graph would then
    write to memory that is not its own any more. So they are freed before a capture, which allocates one in its own
    pool, and again after it, so that nothing else uses that one.

    Garbage collection is off meanwhile: it could free tensors into the pool, or make calls that a capture forbids.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        torch._C._cuda_clearCublasWorkspaces()
        begin_capture(graph, pool)
        try:
            yield
        except BaseException:  # the error that counts; ending the capture fails because of it
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
        # In torch 2.11 the allocator then believes that the capture goes on, and never again frees cached memory to
        # make room. From 2.12 on there is nothing left to end, which is the error suppressed here.
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
        raise


_swapping = threading.Lock()  # of the process, as the generator is


def begin_capture(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """Begin a capture that confines itself to this thread, and leaves the default CUDA generator to the others.

    CUDA work that other threads do meanwhile is no part of the capture, by its error mode. But torch 2.11 marks the
    state of the default generator as captured until ``capture_end``, and drawing from it fails meanwhile in any thread:
    "Offset increment outside graph capture encountered unexpectedly." None of our graphs draws from it, so the capture
    gets a copy of the state. ``capture_begin`` reads the generator's state, allocates two numbers for it on the device,
    and only then marks it; so the first operator that it runs is where the generator gets its own state back. What
    remains: numbers that other threads draw between the two swaps come from the copy, and so come once more. torch 2.13
    marks nothing here.
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

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # by default the first operator imports torch._dynamo, 0.8 s on a fast CPU
