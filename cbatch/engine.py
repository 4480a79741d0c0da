"""The loop: the CPU plans batch N+1 while the device computes batch N.

    CPU   | plan 2 | land 1, deliver | plan 3 | land 2, deliver | plan 4 | land 3 ...
    H2D   |        '-2-.                      '-3-.                      '-4-.
    GPU   |  compute 1      | compute 2          | compute 3             | compute 4
    D2H   |                 '-1-.                '-2-.                   '-3-.

A token that batch N is still sampling stands in batch N+1 as a zero; the device fills it in from ``last_tokens`` by
slot. What batch N ended is learned while N+1 runs: its row in N+1 is dropped when that lands.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import queue
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from os import PathLike
from typing import Any

import numpy as np
import torch

from cbatch.buffers import IOBuffer, eager_bucket
from cbatch.config import EngineConfig, available_memory_bytes, parse_dtype
from cbatch.errors import (
    CBatchError,
    ConfigError,
    DuplicateRequestError,
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    PromptTooLongError,
    UnsupportedModelError,
)
from cbatch.graphs import Buckets, CaptureError, GraphSet
from cbatch.kernels.attention import make_backend
from cbatch.kv_cache import KVCache, page_bytes
from cbatch.models.base import Model
from cbatch.request import RequestHandle, Wakers
from cbatch.runner import Runner, measure_peak_bytes
from cbatch.sampler import NUM_PARAMS, encode
from cbatch.sampling_params import SamplingParams
from cbatch.scheduler.kv_spec import KVGroup, group_layers
from cbatch.scheduler.plan import Bucket, Landed, StepPlan, StepShape
from cbatch.scheduler.scheduler import Scheduler
from cbatch.scheduler.sequence import Sequence
from cbatch.stats import StepClock
from cbatch.streams import CpuLane, CudaLane, Lane

_GRAPH_BYTES = 1 << 30  # what the driver keeps for the graphs themselves
_log = logging.getLogger(__name__)
_open_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A step in flight: its plan, the buffer it travels in, and the host's time for it so far (µs)."""

    plan: StepPlan
    io: IOBuffer
    host_us: float


class Engine:
    """Plans batch N+1 on the CPU while the device computes batch N.

    Any thread submits, reads and aborts; one thread of the engine's own runs the loop, another hands results to the
    consumers. Close it (or use ``with``) to give the memory back.
    """

    def __init__(self, model: Model, config: EngineConfig | None = None, tokenizer: Any = None) -> None:
        """Take memory and start the loop. Most callers want ``Engine.from_model``.

        Raises:
            ConfigError: an option that the model or the device cannot serve.
        """
        config = (config or EngineConfig()).resolve(model.max_model_len, model.device)
        self.model, self.tokenizer = model, tokenizer
        self._vocab_size, self._eos_token_ids = model.vocab_size, model.eos_token_ids
        groups = group_layers(model.kv_specs)
        try:
            backend = make_backend(config.attention, model.device)
        except (ValueError, ImportError) as error:
            raise ConfigError(f"attention={config.attention!r}: {error}") from error
        head_dim = max(max(group.spec.k_head_dim, group.spec.v_head_dim) for group in groups)
        if head_dim > backend.max_head_dim:
            raise UnsupportedModelError(
                f"{model.name}: heads of {head_dim}, but the kernels take up to {backend.max_head_dim}; "
                'attention="torch" takes any, slowly'
            )
        self.config = config = replace(config, num_blocks=_num_blocks(config, model, groups))
        assert config.num_blocks and config.max_model_len and config.max_num_batched_tokens and config.depth
        self.scheduler = Scheduler(
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            num_groups=len(groups),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
        )
        self.depth = config.depth
        cuda = model.device.type == "cuda"
        graphed = cuda and not config.enforce_eager and model.capturable and backend.capturable
        shape = StepShape(len(groups), config.block_size, NUM_PARAMS)
        limit = Bucket(config.max_num_batched_tokens, config.max_num_seqs)
        buckets = Buckets(limit.num_tokens, limit.num_rows)
        choose = buckets.choose if graphed else eager_bucket(limit)
        self._buffers = [IOBuffer(shape, limit, choose, model.device) for _ in range(self.depth)]
        self._graphs: GraphSet | None = None
        self._runner = Runner(
            model,
            KVCache(groups, config.num_blocks, config.block_size, model.dtype, model.device, backend),
            backend,
            num_groups=len(groups),
            max_num_seqs=config.max_num_seqs,
            max_blocks_per_seq=self.scheduler.tables.max_blocks_per_seq,
        )
        if cuda:
            lane = CudaLane(self._buffers, model.device)
            if graphed:
                try:
                    self._graphs = GraphSet(self._runner, buckets, shape, config.max_model_len, lane.compute)
                except CaptureError as error:
                    _log.warning("%s: steps are launched eagerly, since %s", model.name, error)
            self._lane: Lane = lane
        else:
            self._lane = CpuLane(self._buffers)
        self._compute = self._graphs.launch if self._graphs else self._runner.run
        self._num_graphs = len(self._graphs) if self._graphs else 0
        self._clock = StepClock()
        self._num_launched = 0
        self._num_wasted = 0
        self._num_output_tokens = 0

        # Between threads. The lock guards what stands in this block; it is held for a few statements at a time.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # something is in the inbox, or the engine closes
        self._inbox: list[tuple[str, Sequence]] = []
        self._live: dict[str, RequestHandle] = {}
        self._closing = False
        self._error: BaseException | None = None
        self._ids = itertools.count()
        self._seeds = np.random.default_rng(config.seed)

        self._in_flight: deque[Step] = deque()
        self._outbox: queue.SimpleQueue[tuple[Landed, float] | None] = queue.SimpleQueue()
        self._delivery = threading.Thread(target=self._hand_out, name="cbatch-delivery", daemon=True)
        self._thread = threading.Thread(target=self._main, name="cbatch-engine", daemon=True)
        self._delivery.start()
        self._thread.start()
        _open_engines.add(self)

    @classmethod
    def from_model(
        cls, model: str | PathLike[str] | torch.nn.Module | Model, tokenizer: Any = None, **options: Any
    ) -> Engine:
        """An engine for a model: an alias, a folder, a hub name, an ``nn.Module`` of transformers, or a ``Model``.

        A module that you hand in stays as it is and may be used, even trained, beside the engine. ``options`` are
        those of ``EngineConfig``.

        Raises:
            ConfigError: an unknown option, or one out of range.
            ModelNotFoundError: nothing answers to the name.
            UnsupportedModelError: the model would not give right tokens here.
        """
        config = EngineConfig.from_options(options)
        if isinstance(tokenizer, (str, PathLike)):
            from cbatch.models.loader import load_tokenizer

            tokenizer = load_tokenizer(tokenizer, trust_remote_code=config.trust_remote_code)
        if isinstance(model, (str, PathLike)):
            from cbatch.models.loader import load_model, load_tokenizer

            device = torch.device(config.device or ("cuda" if torch.cuda.is_available() else "cpu"))
            loaded: Model = load_model(
                model,
                dtype=config.dtype,
                device=device,
                load_format=config.load_format,
                trust_remote_code=config.trust_remote_code,
                seed=config.seed,
            )
            if tokenizer is None and config.load_format != "dummy":
                tokenizer = load_tokenizer(model, trust_remote_code=config.trust_remote_code)
        elif isinstance(model, torch.nn.Module):
            from cbatch.models.transformers_model import TransformersModel

            loaded = TransformersModel(model, device=config.device, dtype=parse_dtype(config.dtype))
        else:
            loaded = model
            _refuse_other(config, model)
        if config.load_format != "auto" and not isinstance(model, (str, PathLike)):
            raise ConfigError(f"load_format is {config.load_format!r}, but the model is in memory already")
        return cls(loaded, config, tokenizer)

    # ---- the loop

    def run(self) -> None:
        while self.admit() or self._in_flight:  # inbox -> scheduler
            if step := self.launch():  # batch N+1, before batch N has landed
                self._in_flight.append(step)
            if self._in_flight and (len(self._in_flight) >= self.depth or not step):
                self.deliver(self.land(self._in_flight.popleft()))  # batch N: the only wait for the device

    def admit(self) -> bool:
        """Take in what was submitted and aborted. Sleeps while there is nothing to do; False once the engine closes."""
        if not (self._inbox or self._closing) and (self._in_flight or self.scheduler.has_work):
            return True
        with self._changed:
            while not (self._inbox or self._closing or self._in_flight or self.scheduler.has_work):
                self._lane.idle()
                self._changed.wait()
            inbox, self._inbox = self._inbox, []
            closing = self._closing
        for order, sequence in inbox:
            if order == "abort":
                self.scheduler.abort(sequence)
            else:
                self.scheduler.add(sequence)
        return not closing

    def launch(self) -> Step | None:
        """Plan the next batch and start it. Waits for nothing."""
        if self._closing:
            return None
        start = time.perf_counter()
        io = self._buffers[self._num_launched % self.depth]
        plan = self.scheduler.plan(io.host_batch)
        if plan is None:
            assert self._in_flight or not self.scheduler.has_work, "work is queued, but nothing can run"
            return None
        if plan.admitted:
            now = time.monotonic()
            for sequence in plan.admitted:
                metrics = _handle(sequence).metrics
                metrics.first_scheduled_time = metrics.first_scheduled_time or now
                metrics.num_preemptions = sequence.num_preemptions
        self._num_launched += 1
        self._lane.launch(io, plan.host.num_words, plan.sizes.num_samples, partial(self._compute, io, plan))
        return Step(plan, io, (time.perf_counter() - start) * 1e6)

    def land(self, step: Step) -> Landed:
        """Wait for a batch, and take its tokens in."""
        step_ms, gap_ms = self._lane.wait(step.io)
        start = time.perf_counter()
        tokens = step.io.sampled[: step.plan.sizes.num_samples].copy()  # the buffer is the next step's
        landed = self.scheduler.land(step.plan, tokens)
        self._num_wasted += landed.num_wasted
        self._num_output_tokens += landed.tokens.size
        self._clock.record(step_ms, gap_ms, step.host_us + (time.perf_counter() - start) * 1e6)
        return landed

    def deliver(self, landed: Landed) -> None:
        """Hand a batch of results over to the delivery thread; nothing a consumer does is waited for."""
        self._outbox.put((landed, time.monotonic()))

    def _hand_out(self) -> None:
        try:
            while (batch := self._outbox.get()) is not None:
                self._push(*batch)
        except BaseException as error:  # without this thread nobody would hear anything again
            with self._changed:
                self._error, self._closing = error, True
                self._changed.notify()

    def _push(self, landed: Landed, now: float) -> None:
        wakers = Wakers()
        ends = {id(finish.sequence): finish for finish in landed.finished}
        for sequence, token in zip(landed.sequences.tolist(), landed.tokens.tolist(), strict=True):
            handle = _handle(sequence)
            if finish := ends.get(id(sequence)):
                own = finish.stop_token_id in handle.params.stop_token_ids  # else the model's end of sequence
                handle.push(token, now, finish.reason, finish.stop_token_id if own else None, wakers)
            else:
                handle.push(token, now, None, None, wakers)
        wakers.wake()

    def _main(self) -> None:
        try:
            self.run()
        except BaseException as error:
            self._error = error
        self._outbox.put(None)
        self._delivery.join()
        with self._lock:
            self._closing = True
            handles = list(self._live.values())
        for handle in handles:
            handle.fail(self._ending())
        try:
            self._lane.close()
        except RuntimeError as error:  # a device that failed says so here again
            self._error = self._error or error

    # ---- requests

    def submit(
        self, prompt_token_ids: Iterable[int], params: SamplingParams | None = None, request_id: str | None = None
    ) -> RequestHandle:
        """Queue a request, from any thread. ``params`` None means the model's own ``generation_config``.

        Raises:
            InvalidRequestError: a prompt or parameter out of range; PromptTooLongError and DuplicateRequestError too.
            EngineClosedError, EngineDeadError: the engine runs no more.
        """
        if self._closing or self._error is not None:
            raise self._ending()
        prompt = self._checked_prompt(prompt_token_ids, request_id)
        params = self._checked_params(params, request_id)
        max_len = self._checked_length(len(prompt), params, request_id)
        eos = () if params.ignore_eos else self._eos_token_ids
        with self._lock:
            if self._closing:
                raise self._ending()
            if request_id is None:
                request_id = next(name for i in self._ids if (name := str(i)) not in self._live)
            elif not isinstance(request_id, str):
                raise InvalidRequestError(f"request_id is {request_id!r}, but must be a string")
            elif request_id in self._live:
                raise DuplicateRequestError(f"request {request_id}: a request with this id is still running")
            seed = int(self._seeds.integers(2**64, dtype=np.uint64)) if params.seed is None else params.seed
            bits, flags = encode(params, seed)
            handle = RequestHandle(request_id, prompt.tolist(), params, self.tokenizer, self._ended)
            handle.sequence = Sequence(
                prompt,
                max_len,
                stop_token_ids=tuple(dict.fromkeys((*eos, *params.stop_token_ids))),
                sampling_bits=bits,
                flags=flags,
                payload=handle,
            )
            handle.metrics.arrival_time = time.monotonic()
            self._live[request_id] = handle
            self._inbox.append(("add", handle.sequence))
            self._changed.notify()
        return handle

    @cached_property
    def default_sampling_params(self) -> SamplingParams:
        """What a request without ``SamplingParams`` gets: the model's ``generation_config``."""
        generation_config = self.model.generation_config
        return SamplingParams.from_generation_config(generation_config) if generation_config else SamplingParams()

    def abort(self, request_id: str) -> bool:
        """End a request by its id; False if none of this id is running."""
        with self._lock:
            handle = self._live.get(request_id)
        if handle is not None:
            handle.abort()
        return handle is not None

    def _ended(self, handle: RequestHandle, aborted: bool) -> None:
        """Called once for each handle, before its consumer hears of the end: the id is free again."""
        with self._lock:
            if self._live.get(handle.request_id) is handle:
                del self._live[handle.request_id]
            if aborted and not self._closing:
                self._inbox.append(("abort", handle.sequence))
                self._changed.notify()

    def _checked_prompt(self, prompt_token_ids: Iterable[int], request_id: str | None) -> np.ndarray[Any, Any]:
        who, vocab_size = _name(request_id), self._vocab_size
        if isinstance(prompt_token_ids, (str, bytes)):
            raise InvalidRequestError(f"{who}: the prompt is text; submit takes token ids (LLM.generate takes text)")
        try:
            if isinstance(prompt_token_ids, torch.Tensor):
                prompt_token_ids = prompt_token_ids.tolist()
            prompt = np.array(prompt_token_ids if hasattr(prompt_token_ids, "__len__") else list(prompt_token_ids))
        except (TypeError, ValueError, RuntimeError) as error:
            raise InvalidRequestError(f"{who}: the prompt is no list of token ids: {error}") from None
        if prompt.ndim != 1:
            raise InvalidRequestError(f"{who}: the prompt has {prompt.ndim} dimensions, but must be a flat list")
        if prompt.size == 0:
            raise InvalidRequestError(f"{who}: the prompt is empty; at least one token is needed")
        if prompt.dtype.kind not in "iu":
            raise InvalidRequestError(f"{who}: token ids must be integers, not {_first_odd(prompt_token_ids)!r}")
        low, high = int(prompt.min()), int(prompt.max())
        if low < 0 or high >= vocab_size:
            bad = low if low < 0 else high
            raise InvalidRequestError(f"{who}: token id {bad} is out of range; the vocabulary has {vocab_size} tokens")
        return prompt.astype(np.int32)

    def _checked_params(self, params: SamplingParams | None, request_id: str | None) -> SamplingParams:
        if params is None:
            return self.default_sampling_params
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(
                f"{_name(request_id)}: params is a {type(params).__name__}, but must be SamplingParams"
            )
        for token in params.stop_token_ids:
            if token >= self._vocab_size:
                raise InvalidRequestError(
                    f"{_name(request_id)}: stop_token_ids has {token}, but the vocabulary has {self._vocab_size} tokens"
                )
        return params

    def _checked_length(self, num_prompt_tokens: int, params: SamplingParams, request_id: str | None) -> int:
        """Total length at which the request ends."""
        limit, blocks = self.config.max_model_len, self.scheduler.blocks
        assert limit is not None
        if num_prompt_tokens >= limit:
            raise PromptTooLongError(
                f"{_name(request_id)}: {num_prompt_tokens} prompt tokens, but max_model_len is {limit} "
                "and one token must have room"
            )
        # The last token is sampled and never fed, so it needs no room in the cache.
        room = blocks.num_usable // self.scheduler.num_groups * self.config.block_size + 1
        if params.max_tokens is None:
            limit = min(limit, max(room, num_prompt_tokens + 1))
            max_len = limit
        else:
            max_len = min(num_prompt_tokens + params.max_tokens, limit)
        if max_len > room:
            raise PromptTooLongError(
                f"{_name(request_id)}: {num_prompt_tokens} prompt tokens and up to {max_len - num_prompt_tokens} new "
                f"ones need {self.scheduler.blocks_for(max_len - 1)} KV blocks, but the pool has {blocks.num_usable}"
            )
        return max_len

    def _ending(self) -> CBatchError:
        """What a request hears of an engine that runs no more. A new object each time, for its own traceback."""
        if self._error is None:
            return EngineClosedError("the engine is closed")
        dead = EngineDeadError(f"the engine's loop failed: {type(self._error).__name__}: {self._error}")
        dead.__cause__ = self._error
        return dead

    # ---- state

    @property
    def is_healthy(self) -> bool:
        """Whether the loop runs and takes requests."""
        return self._thread.is_alive() and not self._closing and self._error is None

    def stats(self) -> dict[str, Any]:
        """Figures since the start or ``reset_stats``; a snapshot that waits for nothing.

        ``activity_pct`` is the share of time with work at hand that the device spent inside steps: the GPU's where
        ``activity_kind`` is ``"gpu"``, the compute thread's where it is ``"cpu_lane"``.
        """
        scheduler = self.scheduler
        return {
            "schedule": self.config.schedule,
            "device": self.config.device,
            "steps": self._clock.num_steps,
            "num_running": scheduler.num_running,
            "num_waiting": scheduler.num_waiting + sum(order == "add" for order, _ in list(self._inbox)),
            "num_preemptions": scheduler.num_preemptions,
            "num_wasted_rows": self._num_wasted,
            "num_output_tokens": self._num_output_tokens,
            "num_blocks": scheduler.blocks.num_usable,
            "num_free_blocks": scheduler.blocks.num_free,
            "num_graphs": self._num_graphs,
            "activity_kind": self._lane.kind,
            "activity_pct": self._clock.activity_pct,
            **self._clock.summary(),
        }

    def reset_stats(self) -> None:
        """Start the figures of the steps anew."""
        self._clock.reset()
        self._num_wasted = self._num_output_tokens = 0

    def close(self) -> None:
        """End the loop and give the memory back. Requests that still run get ``EngineClosedError``.

        Waits for the steps in flight, not for the requests. May be called twice, and from any thread.
        """
        with self._changed:
            self._closing = True
            self._changed.notify()
        if threading.current_thread() not in (self._thread, self._delivery):
            self._thread.join()
            self._free()
        _open_engines.discard(self)

    def _free(self) -> None:
        """Drop weights, pages and buffers; the scheduler's numbers stay for ``stats``."""
        for name in ("model", "_runner", "_buffers", "_graphs", "_compute"):
            self.__dict__.pop(name, None)
        self._in_flight.clear()
        if self._error is not None:  # its frames hold the step that failed, and so weights and pages
            traceback.clear_frames(self._error.__traceback__)
        if self._lane.kind == "gpu":
            torch.cuda.empty_cache()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _refuse_other(config: EngineConfig, model: Model) -> None:
    """A ``Model`` lives where it lives: an option that says otherwise is refused, not ignored."""
    if config.device is not None and torch.device(config.device).type != model.device.type:
        raise ConfigError(f"device is {config.device!r}, but the model is on {model.device}")
    dtype = parse_dtype(config.dtype)
    if dtype not in (None, model.dtype):
        raise ConfigError(f"dtype is {config.dtype!r}, but the model computes in {model.dtype}")


def _num_blocks(config: EngineConfig, model: Model, groups: tuple[KVGroup, ...]) -> int:
    """Blocks of the pool: as asked, or as memory allows, but no more than every slot at full length can use."""
    if config.num_blocks is not None:
        return config.num_blocks
    assert config.max_model_len and config.max_num_batched_tokens
    page = page_bytes(groups, config.block_size, model.dtype)
    blocks_per_seq = -(-config.max_model_len // config.block_size) * len(groups)
    useful = config.max_num_seqs * blocks_per_seq + 1
    if model.device.type == "cuda":
        peak = measure_peak_bytes(model, config.max_num_batched_tokens, config.max_num_seqs)
        if not config.enforce_eager:
            peak = 2 * peak + _GRAPH_BYTES  # the graphs' pool, beside the warm-up runs before each capture
        free, total = torch.cuda.mem_get_info(model.device)
        room = int(total * config.gpu_memory_utilization) - (total - free) - peak
    else:
        room = int(available_memory_bytes() * 0.25 * config.gpu_memory_utilization)
    fitting = room // page
    if fitting < 2:
        raise ConfigError(
            f"no room for the KV cache: {max(room, 0) / 2**30:.2f} GiB is left at gpu_memory_utilization="
            f"{config.gpu_memory_utilization}, and a block takes {page / 2**20:.2f} MiB"
        )
    return min(useful, fitting)


def _handle(sequence: Sequence) -> RequestHandle:
    """Whose sequence it is; the scheduler keeps it as an opaque payload."""
    handle: RequestHandle = sequence.payload  # type: ignore[assignment]
    return handle


def _name(request_id: object) -> str:
    return "request" if request_id is None else f"request {request_id}"


def _first_odd(prompt: Iterable[Any]) -> object:
    """What in a prompt is no token id: the first that is no integer, or else one that no array of integers holds."""
    items = list(prompt)
    odd = [item for item in items if isinstance(item, bool) or not isinstance(item, (int, np.integer))]
    return odd[0] if odd else max(items, key=abs)


@atexit.register
def _close_engines() -> None:
    """Stop the loops before the interpreter goes: a thread inside torch would crash it."""
    for engine in list(_open_engines):
        engine.close()
