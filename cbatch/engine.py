"""The loop: the CPU plans batch N+1 while the device computes batch N.

    CPU   | plan 2 | land 1, deliver | plan 3 | land 2, deliver | plan 4 | land 3 ...
    H2D   |        '-2-.                      '-3-.                      '-4-.
    GPU   |  compute 1      | compute 2          | compute 3             | compute 4
    D2H   |                 '-1-.                '-2-.                   '-3-.

A token that batch N is still sampling is a zero in batch N+1; the device fills it in from ``last_tokens``, by slot.
Which sequences batch N ended is learned while N+1 runs: their rows in N+1 are dropped when that lands. If a row of N+1
has a grammar or a logits processor, N+1 computes its logits, but samples only after batch N has landed (``held``).
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import logging
import os
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from typing import Any, NoReturn

import torch

from cbatch import debug, interpreter
from cbatch.backlog import Backlog
from cbatch.beams import BeamHandle, Beams
from cbatch.buffers import IOBuffer
from cbatch.config import EngineConfig
from cbatch.delivery import Delivery, Results
from cbatch.errors import (
    CBatchError,
    ConfigError,
    DuplicateRequestError,
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    described,
    short,
)
from cbatch.executor import Executor, suitable_backend
from cbatch.grammar import Grammars
from cbatch.held import Held
from cbatch.host_pages import num_host_blocks
from cbatch.intake import BeamDraft, Draft, Intake
from cbatch.limits import Limits
from cbatch.memory import num_blocks, ran_out
from cbatch.models.base import Model
from cbatch.models.resolve import resolve_model
from cbatch.precompile import precompile
from cbatch.prompt_logprobs import MAX_PROMPT_LOGITS, PromptRows, prompt_rows
from cbatch.request import RequestHandle
from cbatch.sampler import HELD, LOGPROBS
from cbatch.sampling_params import BeamSearchParams, SamplingParams
from cbatch.scheduler.kv_spec import KVGroup, group_layers
from cbatch.scheduler.pace import Pace
from cbatch.scheduler.plan import StepPlan
from cbatch.scheduler.scheduler import Scheduler
from cbatch.scheduler.sequence import Sequence
from cbatch.slot_state import Admission
from cbatch.stats import StepClock
from cbatch.streams import THREAD_PREFIX
from cbatch.timeline import StepTimes, Timeline
from cbatch.turns import alone, free

_MAX_ORDERS = 256  # of the inbox, in one round: 1.5 ms; many thousands at once would hold up the steps

_log = logging.getLogger(__name__)
_open_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


@dataclass(slots=True, eq=False)
class Step:
    """A step in flight: its plan, the buffer it travels in, and the host's time for it so far (µs)."""

    plan: StepPlan
    io: IOBuffer
    host_us: float
    times: StepTimes | None = None  # if a timeline records it
    prompts: PromptRows | None = None  # if it makes log-probabilities of prompts


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
        self.config = config = (config or EngineConfig()).resolve(model.max_model_len, model.device)
        self.startup_s: dict[str, float] = {}  # what building took, part by part, in seconds
        self.model, self.tokenizer = model, tokenizer
        groups = group_layers(model.kv_specs)
        backend = suitable_backend(config, model, groups)
        if model.device.type == "cuda":
            with self._building("kernels"):
                precompile(model, config, groups)
        with self._building("memory"):
            self.config = config = replace(config, num_blocks=num_blocks(config, model, groups))
        assert config.num_blocks and config.max_model_len and config.max_num_batched_tokens and config.depth
        self.depth = config.depth
        self.scheduler = _scheduler(config, model, groups)
        limits = Limits(
            vocab_size=model.vocab_size,
            max_model_len=config.max_model_len,
            num_usable_blocks=self.scheduler.blocks.num_usable,
            longest_len=self.scheduler.longest_len,
            blocks_for=self.scheduler.blocks_for,
            has_tokenizer=tokenizer is not None,
            policy=config.scheduling_policy,
        )
        max_blocks_per_seq = self.scheduler.slot_tables.max_blocks_per_seq
        max_spare_words = self.scheduler.num_spare_words
        with self._building("graphs"):
            self._executor = Executor(model, config, groups, backend, max_blocks_per_seq, max_spare_words)
        self._buffers, self._lane = self._executor.buffers, self._executor.lane
        self._graph_facts = self._executor.graph_facts()
        if self.scheduler.swap is not None:
            self.scheduler.swap.ms_per_block = self._executor.swap_ms_per_block
        if config.itl_target_ms is not None:
            self.scheduler.pace = Pace(config.itl_target_ms, self._executor.step_sizes)
        self._grammars = Grammars(tokenizer, model.vocab_size, model.eos_token_ids)
        self._held = Held(self._grammars)
        self._intake = Intake(model, tokenizer, limits, self._grammars, config.seed)
        self._clock = StepClock()
        self._timeline: Timeline | None = None
        self._checks = debug.LoopChecks(self.scheduler, self._lane) if debug.enabled() else None
        self._beams = Beams(self.scheduler)
        self._num_launched = 0
        self._num_wasted = 0
        # At the last ``reset_stats``: the scheduler's num_asked_tokens and num_hit_tokens; the delivery's num_given and
        # num_dropped.
        self._asked_before = self._given_before = 0, 0

        # Between threads. The lock guards what stands in this block; it is held for a few statements at a time.
        # Reentrant, since the garbage collector may close an engine inside any statement of ours.
        self._lock = threading.RLock()
        self._bell = threading.Lock()  # the sleeping loop acquires it; ``_ring`` releases it
        self._inbox: list[tuple[str, Sequence | None]] = []
        self._live: dict[str, RequestHandle] = {}
        self._backlog = Backlog(config.max_queue_size)
        self._closing = False
        self._error: BaseException | None = None
        self._ids = itertools.count()

        self._in_flight: deque[Step] = deque()
        self._delivery = Delivery(model.vocab_size, self._delivery_failed)
        self._thread = threading.Thread(target=self._main, name=f"{THREAD_PREFIX}engine", daemon=True)
        if self._lane.kind == "gpu":  # on the CPU a step is longer than any collection
            with self._building("interpreter"):
                interpreter.hold()
        try:
            self._thread.start()  # the only one that is started here, where a Ctrl-C may come at any moment
            _open_engines.add(self)
        except BaseException:
            self.close_soon()  # it may run already, and would keep the engine
            raise

    @classmethod
    def from_model(
        cls, model: str | PathLike[str] | torch.nn.Module | Model, tokenizer: Any = None, **options: Any
    ) -> Engine:
        """An engine for a model: an alias, a folder, a hub name, an ``nn.Module`` of transformers, or a ``Model``.

        A module that you hand in stays as it is and may be used, even trained, beside the engine. ``options`` are
        those of ``EngineConfig``.

        Raises:
            ConfigError: an unknown option, one out of range, or too little memory.
            ModelNotFoundError: nothing answers to the name.
            UnsupportedModelError: the model would not give right tokens here.
        """
        begin = time.perf_counter()
        config = EngineConfig.from_options(options)
        if isinstance(model, torch.nn.Module) and config.enable_prefix_caching is None:
            # The caller may train it beside the engine, which would make the cache stale without a sign.
            config = replace(config, enable_prefix_caching=config.scheduling_policy == "longest_prefix")
        try:
            loaded, tokenizer = resolve_model(model, tokenizer, config)
        except RuntimeError as error:
            if not ran_out(error):
                raise
            _forget_frames(error)  # which hold what was loaded
            if torch.cuda.device_count():
                free([])
            name = type(model).__name__ if isinstance(model, torch.nn.Module) else model
            raise ConfigError(
                f"{name}: no memory left for the model itself, with dtype={config.dtype}: {error}"
            ) from error
        seconds = time.perf_counter() - begin
        try:
            engine = cls(loaded, config, tokenizer)
        except BaseException as error:  # its frames hold the last references to the weights
            del loaded
            _forget_frames(error)
            raise
        engine.startup_s = {"model": seconds, **engine.startup_s}
        return engine

    @contextmanager
    def _building(self, part: str) -> Iterator[None]:
        """Times a part of it, which has the GPUs to itself.

        Where it fails, what it took is free again: the caller may build a smaller engine while it handles the error.
        """
        begin = time.perf_counter()
        try:
            with alone(self.model.device):
                yield
        except BaseException as error:
            _forget_frames(error)
            if self.model.device.type == "cuda":
                free([])
            if ran_out(error):
                config = self.config
                raise ConfigError(
                    f"{self.model.name}: no memory left on {self.model.device} for the engine's {part}, with "
                    f"gpu_memory_utilization={config.gpu_memory_utilization}, num_blocks={config.num_blocks}, "
                    f"max_num_seqs={config.max_num_seqs} and max_num_batched_tokens={config.max_num_batched_tokens}: "
                    f"one of them must be lower. {error}"
                ) from error
            raise
        self.startup_s[part] = time.perf_counter() - begin

    # ---- the loop

    def run(self) -> None:
        while self.admit() or self._in_flight:  # inbox -> scheduler
            if step := self.launch():  # batch N+1, before batch N has landed
                self._in_flight.append(step)
            if step and step.plan.flags & HELD:  # what the host decides of batch N+1 depends on batch N's tokens
                while self._in_flight[0] is not step:
                    self.deliver(self.land(self._in_flight.popleft()))
                self.sample(step)
            if self._in_flight and (len(self._in_flight) >= self.depth or not step):
                self.deliver(self.land(self._in_flight.popleft()))  # batch N: the only wait for the device

    def admit(self) -> bool:
        """Hand what was submitted and aborted to the scheduler. Sleeps without work; False once the engine closes."""
        self._backlog.expire()
        if not (self._inbox or self._closing) and (self._in_flight or self.scheduler.has_work):
            return True
        while not (self._inbox or self._closing or self._in_flight or self.scheduler.has_work):
            self._lane.idle()
            self._bell.acquire()
        with self._lock:
            inbox, self._inbox = self._inbox[:_MAX_ORDERS], self._inbox[_MAX_ORDERS:]
            closing = self._closing
        for order, sequence in inbox:
            if sequence is None:
                self.scheduler.reset_prefix_cache()
            elif isinstance(handle := sequence.payload, BeamHandle):
                if order == "abort":
                    self._beams.abort(handle)
                else:
                    self._beams.start(handle)
                    self._backlog.watch(handle)
            elif order == "abort":
                self.scheduler.abort(sequence)
            else:
                self.scheduler.add(sequence)
                self._backlog.watch(_handle(sequence))
        return not closing

    def _ring(self) -> None:
        """Wake the loop, or keep it from falling asleep: something is in the inbox, or the engine closes.

        In one step: a Ctrl-C inside a condition's ``notify`` can have the next one wake nobody.
        """
        with suppress(RuntimeError):  # it has been rung already
            self._bell.release()

    def launch(self) -> Step | None:
        """Plan the next batch and start it. Waits for nothing."""
        if self._closing:
            return None
        start = time.perf_counter()
        io = self._buffers[self._num_launched % self.depth]
        if self._checks is not None:
            self._checks.before_plan(io)
        if self._beams:
            self._beams.note_step()
        plan = self.scheduler.plan(io.host_batch)
        while plan is None and not self._in_flight and self._beams.make_room():  # paused beams hold what others need
            plan = self.scheduler.plan(io.host_batch)
        if plan is None:
            assert self._in_flight or not self.scheduler.has_work, "work is queued, but nothing can run"
            return None
        if self._checks is not None:
            self._checks.planned(io, plan)
        admissions = self._note_admitted(plan) if plan.admitted else []
        self._num_launched += 1
        io.set_plan(plan)
        times = marks = None
        if self._timeline is not None:  # the step before its window waits for the device, to set the clocks
            sizes, maker = plan.sizes, self._lane.marks_maker
            times = self._timeline.open(self._num_launched, sizes.num_tokens, sizes.num_rows, start, maker)
            marks = times and times.marks
        prompts = prompt_rows(plan, self.model.device) if plan.chunks else None
        compute = partial(self._executor.compute, io, plan, admissions, prompts)
        self._lane.launch(io, compute, marks, bool(plan.flags & HELD))
        return Step(plan, io, (time.perf_counter() - start) * 1e6, times, prompts)

    def _note_admitted(self, plan: StepPlan) -> list[Admission]:
        """Note when requests started. Returns what slots need before the step, if more than the plan's param_values."""
        now = time.monotonic()
        admissions = []
        # Not ``sequence.slot``: one that ends by length in this very step has given it back already.
        for sequence, slot in zip(plan.admitted, plan.host.param_slots.tolist(), strict=False):
            handle = _handle(sequence)
            self._backlog.leave(handle)
            handle.metrics.first_scheduled_time = handle.metrics.first_scheduled_time or now
            if sequence is handle.sequence:  # not a beam that was forked
                handle.metrics.num_preemptions = sequence.num_preemptions
                if not sequence.num_preemptions:
                    handle.metrics.num_cached_tokens = sequence.num_cached_tokens
            if (upload := handle.upload) is not None:
                admissions.append(Admission(slot, upload, sequence.token_ids, sequence.num_prompt_tokens))
        return admissions

    def sample(self, step: Step) -> None:
        """Start the rest of a held step, now that all before it have landed. Waits for nothing."""
        start = time.perf_counter()
        io, plan = step.io, step.plan
        num_masks, edits = self._held.prepare(plan, io.masks)
        words = io.masks.head(num_masks) if num_masks else None
        self._lane.launch_rest(io, partial(self._executor.sample, io, plan, num_masks, edits, step.prompts), words)
        step.host_us += (time.perf_counter() - start) * 1e6

    def land(self, step: Step) -> Results:
        """Wait for a batch, and take in what it sampled."""
        called = time.perf_counter()
        step_ms, gap_ms = self._lane.wait(step.io)
        start = time.perf_counter()
        self.scheduler.note_time(step.plan.sizes, step_ms)
        results = self._take_in(step)
        end = time.perf_counter()
        self._clock.record(step_ms, gap_ms, step.host_us + (end - start) * 1e6)
        if self._timeline is not None and step.times is not None:
            step.times.note(step.host_us, called, start, end)
            if not self._timeline.add(step.times):
                self._timeline = None
        return results

    def _take_in(self, step: Step) -> Results:
        """Match a landed batch's tokens to sequences; with log-probabilities, if some row or prompt wants them."""
        num_samples = step.plan.sizes.num_samples
        tokens = step.io.sampled[:num_samples].copy()  # the buffer is the next step's
        logprobs = step.io.logprobs(num_samples) if step.plan.flags & LOGPROBS else None
        if self._checks is not None:
            self._checks.landed(step.io, tokens, logprobs)
        landed = self.scheduler.land(step.plan, tokens)
        failed = self._held.accept(landed, step.io.masks) if step.plan.flags & HELD else ()
        if logprobs is not None and landed.rows is not None:
            logprobs = logprobs.of(landed.rows)
        searches: list[Any] = []  # that are over
        if self._beams:
            landed, logprobs, searches = self._beams.land(landed, logprobs)
        if self._checks is not None:
            self._checks.taken_in()
        self._num_wasted += landed.num_wasted
        return Results(landed, logprobs, () if step.prompts is None else step.prompts.land(), searches, failed)

    def deliver(self, results: Results) -> None:
        """Hand a batch of results over to the delivery thread; nothing a consumer does is waited for."""
        self._delivery.put(results)

    def _delivery_failed(self, error: BaseException) -> None:
        with self._lock:
            self._error, self._closing = error, True
            self._ring()

    def _main(self) -> None:
        try:
            self._delivery.start()
            self.run()
        except BaseException as error:
            _log.error("the engine's loop failed", exc_info=error)
            self._error = error
        self._delivery.close()
        with self._lock:
            self._closing = True
            handles = list(self._live.values())
            if self._timeline is not None:
                self._timeline.end()
        for handle in handles:
            for child in handle.children:
                child.fail(self._ending())
        try:
            self._lane.close()
        except RuntimeError as error:  # a device that failed says so here again
            self._error = self._error or error
            # Graphs and pinned memory of a device that failed cannot be freed: their destructors would end the process.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
        else:
            self._free()
        _open_engines.discard(self)
        if self._lane.kind == "gpu":
            interpreter.release()

    # ---- requests

    def submit(
        self,
        prompt_token_ids: Iterable[int],
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
    ) -> RequestHandle:
        """Queue a request, from any thread. ``params`` None means the model's own ``generation_config``.

        Where ``n`` is above 1, the handle's ``result`` has all answers, and each of its ``children`` streams one.

        Args:
            priority: with ``scheduling_policy="priority"``, the smaller goes first.
            cache_salt: cached prefixes are shared with requests of the same salt only.
            timeout_s: if it has not ended by then, it ends with ``"timeout"``, whether it waits or runs.

        Raises:
            InvalidRequestError: a prompt or parameter out of range; PromptTooLongError and DuplicateRequestError too.
            EngineOverloadedError: ``max_queue_size`` wait already.
            EngineClosedError, EngineDeadError: the engine runs no more.
        """
        options = {"priority": priority, "cache_salt": cache_salt, "timeout_s": timeout_s}
        return self.enter(self.draft(prompt_token_ids, params, request_id, **options), request_id)

    def draft(
        self, prompt_token_ids: Iterable[int], params: SamplingParams | None, request_id: str | None, **options: Any
    ) -> Draft:
        """The first half of ``submit``, with its arguments and errors; ``enter`` is the other one.

        It checks all and may take a while (grammars, many answers), and nothing is left of it if it is dropped: so an
        event loop has a thread do it.
        """
        self._check_open(request_id)
        return self._intake.request(prompt_token_ids, params, request_id, **options)

    def submit_beam_search(
        self,
        prompt_token_ids: Iterable[int],
        params: BeamSearchParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
    ) -> BeamHandle:
        """Queue a search for the most likely answers, from any thread. Its ``result`` has them, the best score first.

        Raises: as ``submit``.
        """
        options = {"priority": priority, "cache_salt": cache_salt, "timeout_s": timeout_s}
        self._check_open(request_id)
        draft = self._intake.beam_search(prompt_token_ids, params, request_id, **options)
        handle: BeamHandle = self.enter(draft, request_id)  # type: ignore[assignment]
        return handle

    def _check_open(self, request_id: str | None) -> None:
        """Raise what ``submit`` would for an ended engine or a full queue, before any work is done for the request."""
        if self._closing or self._error is not None:
            raise self._ending()
        self._backlog.check(1, request_id)

    def enter(self, draft: Draft | BeamDraft, request_id: str | None) -> RequestHandle:
        """Queue a draft; a draft can be queued once. Raises as ``submit``: the id, a full queue, an ended engine."""
        while True:
            name = self._new_id() if request_id is None else request_id
            handle = draft.open(name, self._ended)  # without the lock: ten thousand answers take 0.4 s
            with self._lock:
                if self._closing:
                    raise self._ending()
                if name in self._live:
                    if request_id is None:  # another request has chosen it meanwhile
                        continue
                    raise DuplicateRequestError(f"request {name}: a request with this id is still running")
                self._backlog.check(draft.num_answers, request_id)
                sequences = [child.sequence for child in handle.children]
                try:
                    self._live[name] = handle
                    self._backlog.enter(handle.children)
                    self._inbox += [("add", sequence) for sequence in sequences]
                    self._ring()
                except BaseException:  # Ctrl-C in the middle: it is taken whole, or not at all
                    self._live.pop(name, None)
                    for child in handle.children:
                        self._backlog.leave(child)
                    mine = set(sequences)
                    self._inbox = [order for order in self._inbox if order[1] not in mine]
                    raise
            return handle

    def _new_id(self) -> str:
        return next(name for i in self._ids if (name := str(i)) not in self._live)

    @property
    def default_sampling_params(self) -> SamplingParams:
        """What a request without ``SamplingParams`` gets: the model's ``generation_config``."""
        return self._intake.default_sampling_params

    def abort(self, request_id: str) -> bool:
        """End a request by its id, with all its answers; False if none of this id is running."""
        if not isinstance(request_id, str):
            raise InvalidRequestError(f"request_id is {short(request_id)}, but must be a string")
        with self._lock:
            handle = self._live.get(request_id)
        if handle is not None:
            handle.abort()
        return handle is not None

    def _ended(self, handle: RequestHandle, aborted: bool) -> None:
        """A handle's ``on_end``, called once for each answer before its consumer hears of it. The last frees the id."""
        self._backlog.leave(handle)
        with self._lock:
            whole = self._live[handle.parent_id]
            whole.num_unfinished -= 1
            if not whole.num_unfinished:
                del self._live[handle.parent_id]
            if aborted and not self._closing:
                self._inbox.append(("abort", handle.sequence))
                self._ring()
        if not isinstance(handle, BeamHandle):  # of a search the loop may still ask
            handle.sequence = None  # whose payload it is: they would hold each other until the collector comes by
            handle.held = None  # a grammar's state may be a MiB

    def _ending(self) -> CBatchError:
        """The error that a request gets from an engine that has ended; a new object each time, for its traceback."""
        if self._error is None:
            return EngineClosedError("the engine is closed")
        dead = EngineDeadError(f"the engine's loop failed: {described(self._error)}")
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
        ``activity_kind`` is ``"gpu"``, the compute thread's where it is ``"cpu_lane"``. Of ``num_asked_tokens`` of
        prompts that have started, ``num_hit_tokens`` were in the prefix cache. ``num_output_tokens`` are those that
        requests got, among them all that were read; what was sampled behind a request's end, or is void after a
        preemption, is ``num_wasted_rows``. ``num_cached_blocks`` of the free ones hold a prefix. ``num_preemptions``,
        and the ``num_blocks_out`` that went to the ``swap_space`` and ``num_blocks_in`` that came back, count since the
        start. Of a closed engine nothing runs or waits.
        """
        scheduler, delivery, lives = self.scheduler, self._delivery, self._thread.is_alive()
        num_new = sum(order == "add" for order, _ in list(self._inbox))
        return {
            "schedule": self.config.schedule,
            "device": self.config.device,
            "steps": self._clock.num_steps,
            "num_running": scheduler.num_running if lives else 0,
            "num_waiting": scheduler.num_waiting + num_new if lives else 0,
            "num_preemptions": scheduler.num_preemptions,
            "num_blocks_out": scheduler.swap.num_blocks_out if scheduler.swap else 0,
            "num_blocks_in": scheduler.swap.num_blocks_in if scheduler.swap else 0,
            "num_wasted_rows": self._num_wasted + delivery.num_dropped - self._given_before[1],
            "num_output_tokens": delivery.num_given - self._given_before[0],
            "num_blocks": scheduler.blocks.num_usable,
            "num_free_blocks": scheduler.blocks.num_free,
            "num_cached_blocks": scheduler.blocks.num_cached,
            "num_asked_tokens": scheduler.num_asked_tokens - self._asked_before[0],
            "num_hit_tokens": scheduler.num_hit_tokens - self._asked_before[1],
            **self._graph_facts,
            "activity_kind": self._lane.kind,
            "activity_pct": self._clock.activity_pct,
            **self._clock.summary(),
        }

    def record_timeline(self, num_steps: int, *, decode_only: bool = False) -> Timeline:
        """Record the next ``num_steps`` steps, from any thread; returns at once. ``wait`` for the timeline's end.

        With ``decode_only``, the window begins after the first step in which no prompt is computed.

        Raises:
            ConfigError: ``num_steps`` is no whole number of at least 1.
            EngineClosedError, EngineDeadError: the engine runs no more.
            CBatchError: another timeline is being recorded.
        """
        with self._lock:
            if self._closing:
                raise self._ending()
            if self._timeline is not None:
                raise CBatchError("a timeline is being recorded already; wait for its end")
            timeline = Timeline(num_steps, self.config.schedule, self.depth, self.model.name, decode_only=decode_only)
            timeline.device = self.config.device or timeline.device
            self._timeline = timeline
        return timeline

    def reset_stats(self) -> None:
        """Start the figures of the steps anew."""
        self._clock.reset()
        self._num_wasted = 0
        self._asked_before = self.scheduler.num_asked_tokens, self.scheduler.num_hit_tokens
        self._given_before = self._delivery.num_given, self._delivery.num_dropped

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, from any thread, as when weights have changed. Returns at once.

        Requests submitted from now on compute their prompts; running ones go on, and leave nothing in the cache.

        Raises:
            EngineClosedError, EngineDeadError: the engine runs no more.
        """
        with self._lock:
            if self._closing:
                raise self._ending()
            self._inbox.append(("reset", None))
            self._ring()

    def close(self) -> None:
        """End the loop and give the memory back. Requests that still run get ``EngineClosedError``.

        Waits for the steps in flight, not for the requests. While another engine is being built, the memory comes back
        at the next moment that allows it, which is not waited for. May be called twice, and from any thread.
        """
        self.close_soon()
        if not threading.current_thread().name.startswith(THREAD_PREFIX):  # which would wait for itself
            self._thread.join()

    def close_soon(self) -> None:
        """``close`` without waiting: for finalizers, which run in whatever thread collects, under whatever locks."""
        with self._lock:
            self._closing = True
            self._ring()

    def _free(self) -> None:
        """Drop weights, pages and buffers, or have it done by an engine that is being built at this moment.

        The scheduler's numbers stay for ``stats``.
        """
        parts = [self.__dict__.pop(name, None) for name in ("model", "_executor", "_buffers")]
        self._in_flight.clear()
        if self._error is not None:  # its frames hold the step that failed, and so weights and pages
            traceback.clear_frames(self._error.__traceback__)
        if self._lane.kind == "gpu":
            free(parts)

    def __enter__(self) -> Engine:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("an engine, and what belongs to it, cannot be pickled or copied: build one in each process")

    def __exit__(self, *_: object) -> None:
        self.close()


def _forget_frames(error: BaseException) -> None:
    """Have an error hold nothing that its frames had, unless it may be the device that failed: see ``_main``."""
    if not isinstance(error, RuntimeError) or ran_out(error):
        traceback.clear_frames(error.__traceback__)


def _scheduler(config: EngineConfig, model: Model, groups: tuple[KVGroup, ...]) -> Scheduler:
    """Raises ConfigError where its tables do not fit into memory, or into 32-bit indices."""
    assert config.num_blocks and config.max_model_len and config.max_num_batched_tokens
    try:
        return Scheduler(
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            num_groups=len(groups),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            max_prompt_logits=MAX_PROMPT_LOGITS,
            windows=tuple(group.spec.window for group in groups),
            policy=config.scheduling_policy,
            prefix_caching=bool(config.enable_prefix_caching),
            num_host_blocks=num_host_blocks(config, model, groups),
        )
    except (MemoryError, OverflowError) as error:
        raise ConfigError(
            f"tables of max_num_seqs={config.max_num_seqs} rows for max_model_len={config.max_model_len} tokens "
            f"do not fit: {error}"
        ) from error


def _handle(sequence: Sequence) -> RequestHandle:
    """Whose sequence it is; the scheduler keeps it as an opaque payload."""
    handle: RequestHandle = sequence.payload  # type: ignore[assignment]
    return handle


def _forget_engines() -> None:
    """In a forked child no thread of ours runs, and a lock may be held for ever: the engines there are closed."""
    for engine in list(_open_engines):
        engine._lock = threading.RLock()
        engine._closing = True
        for handle in engine._live.values():
            for child in handle.children:
                child.forget(engine._ending())
    _open_engines.clear()


os.register_at_fork(after_in_child=_forget_engines)


@atexit.register
def _close_engines() -> None:
    """Stop the loops before the interpreter goes: a thread inside torch would crash it."""
    for engine in list(_open_engines):
        engine.close()
