"""The loop over a model that counts: what each request gets is known in advance, so nothing has a tolerance."""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import pickle
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from cbatch.config import EngineConfig
from cbatch.engine import Engine
from cbatch.errors import (
    ConfigError,
    DuplicateRequestError,
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    PromptTooLongError,
)
from cbatch.intake import Draft
from cbatch.request import RequestHandle, Wakers
from cbatch.sampling_params import BeamSearchParams, SamplingParams
from tests.counting import CountingModel, counted
from tests.models.families import make_tiny
from tests.waiting import settle, tokens, wait_until

pytestmark = pytest.mark.usefixtures("device")

Start = Callable[..., Engine]
SCHEDULES = [{"schedule": "sync"}, {"schedule": "async"}, {"schedule": "async", "depth": 4}]


@pytest.fixture
def counting_engine(counting_engine: Start) -> Start:
    """Eager on the GPU too: these tests hold the model back, look into it and make it fail."""
    return lambda *args, **options: counting_engine(*args, **{"enforce_eager": True, **options})


def greedy(max_tokens: int | None = 8, **more: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **more)


@pytest.mark.parametrize("options", SCHEDULES)
def test_many_requests_each_get_their_own_tokens(counting_engine: Start, options: dict[str, object]) -> None:
    engine = counting_engine(**options)
    handles = [engine.submit([i, i + 1] * (1 + i % 5), greedy(1 + i % 17)) for i in range(60)]
    assert [tokens(h) for h in handles] == [counted(i + 1, 1 + i % 17) for i in range(60)]
    settle(engine)


def test_placeholder_is_zero_on_the_host_and_the_true_token_on_the_device(counting_engine: Start) -> None:
    """The host never knows the token it plans with: what the model sees must be filled in on the device."""
    model = CountingModel()
    model.record = True
    engine = counting_engine(model)
    assert tokens(engine.submit([7, 8], greedy(4))) == [9, 10, 11, 12]
    assert model.seen == [[7, 8], [9], [10], [11]]


def test_eos_one_batch_late_is_dropped(counting_engine: Start) -> None:
    """The token after EOS was computed before EOS was read. It is in no output and in no count."""
    engine = counting_engine(CountingModel(eos=(20,)))
    output = engine.submit([15], greedy(50)).result(30)
    assert output.outputs[0].token_ids == [16, 17, 18, 19, 20]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", None)
    settle(engine)
    assert engine.stats()["num_output_tokens"] == 5
    assert engine.stats()["num_wasted_rows"] == 1


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_eos_wastes_as_many_rows_as_there_are_steps_behind_it(counting_engine: Start, depth: int) -> None:
    engine = counting_engine(CountingModel(eos=(20,)), depth=depth)
    assert tokens(engine.submit([15], greedy(50))) == [16, 17, 18, 19, 20]
    settle(engine)
    stats = engine.stats()
    assert (stats["num_output_tokens"], stats["num_wasted_rows"]) == (5, depth - 1)


def test_eos_is_ignored_where_asked_and_stop_token_ids_still_stop(counting_engine: Start) -> None:
    engine = counting_engine(CountingModel(eos=(20,)))
    assert tokens(engine.submit([18], greedy(4, ignore_eos=True))) == [19, 20, 21, 22]
    output = engine.submit([18], greedy(9, ignore_eos=True, stop_token_ids=[20, 22])).result(30).outputs[0]
    assert (output.token_ids, output.finish_reason, output.stop_reason) == ([19, 20], "stop", 20)


@pytest.mark.parametrize("options", SCHEDULES)
def test_length_finishes_waste_no_row(counting_engine: Start, options: dict[str, object]) -> None:
    engine = counting_engine(**options)
    for count in (1, 2, 9):
        assert engine.submit([1], greedy(count)).result(30).outputs[0].finish_reason == "length"
    settle(engine)
    assert engine.stats()["num_wasted_rows"] == 0


def test_prompt_at_the_edge_of_max_model_len(counting_engine: Start) -> None:
    """One token less than the limit leaves room for one token; at the limit and beyond there is none."""
    engine = counting_engine(max_model_len=32)
    assert len(tokens(engine.submit([1] * 31, greedy(None)))) == 1
    assert len(tokens(engine.submit([1] * 30, greedy(50)))) == 2
    for length in (32, 33):
        with pytest.raises(PromptTooLongError, match=f"{length} prompt tokens.*max_model_len is 32"):
            engine.submit([1] * length, greedy())


def test_request_that_can_never_fit_is_refused_with_both_numbers(counting_engine: Start) -> None:
    engine = counting_engine(num_blocks=9)
    with pytest.raises(PromptTooLongError, match="need 10 KV blocks, but the pool has 8"):
        engine.submit([1] * 30, greedy(10))
    assert tokens(engine.submit([1] * 30, greedy(3))) == counted(1, 3)
    assert len(tokens(engine.submit([1] * 30, greedy(None)))) == 3  # up to the room, not beyond the pool


def test_bad_prompts_fail_alone(counting_engine: Start) -> None:
    """Each is refused at submission, by itself, and its neighbours never notice."""
    engine = counting_engine()
    before = engine.submit([1], greedy(40))
    wrong = [[], [-1], [100], [1.5], ["a"], "text", b"text", [[1, 2]], None, 5, [True, False], [2**70], {1: 2}, [None]]
    for prompt in wrong:
        with pytest.raises(InvalidRequestError):
            engine.submit(prompt, greedy())  # type: ignore[arg-type]
    assert tokens(engine.submit([3], greedy())) == counted(3, 8)
    assert tokens(before) == counted(1, 40)


def test_bad_parameters_and_ids_fail_alone(counting_engine: Start) -> None:
    engine = counting_engine()
    with pytest.raises(InvalidRequestError, match="stop_token_ids has 100"):
        engine.submit([1], greedy(stop_token_ids=[100]))
    with pytest.raises(InvalidRequestError, match="SamplingParams"):
        engine.submit([1], {"temperature": 0})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="request_id"):
        engine.submit([1], greedy(), request_id=7)  # type: ignore[arg-type]
    assert tokens(engine.submit([3], greedy())) == counted(3, 8)


def test_live_id_is_refused_and_the_first_goes_on(counting_engine: Start) -> None:
    engine = counting_engine()
    engine.model.gate.clear()
    first = engine.submit([1], greedy(20), request_id="x")
    with pytest.raises(DuplicateRequestError, match="request x"):
        engine.submit([50], greedy(), request_id="x")
    engine.model.gate.set()
    assert tokens(first) == counted(1, 20)
    assert tokens(engine.submit([50], greedy(), request_id="x")) == counted(50, 8)


def test_automatic_ids_avoid_those_of_the_caller(counting_engine: Start) -> None:
    engine = counting_engine()
    named = engine.submit([1], greedy(), request_id="0")
    assert engine.submit([1], greedy()).request_id != named.request_id


def test_abort_and_resubmit_of_one_id_keeps_the_tokens_apart(counting_engine: Start) -> None:
    """The late token of the old X, in flight while it was aborted, must never reach the new X."""
    engine = counting_engine()
    for round_ in range(20):
        old = engine.submit([10], greedy(60), request_id="x")
        for _ in range(round_ % 4):
            old.next_chunk(10)
        old.abort()
        new = engine.submit([70], greedy(5), request_id="x")
        assert tokens(new) == counted(70, 5)
        assert old.result(1).outputs[0].finish_reason == "abort"


@pytest.mark.parametrize("offset", range(12))
def test_abort_at_every_step_gives_one_end_and_everything_back(counting_engine: Start, offset: int) -> None:
    """Before the first step, in the prefill (3 chunks), while decoding, in the last step: one end, nothing after it."""
    engine = counting_engine(max_num_seqs=2, max_num_batched_tokens=4)
    model = engine.model
    neighbour = engine.submit([5], greedy(30))
    victim = engine.submit([1] * 12, greedy(6))
    while model.num_forwards < offset and not victim.finished:
        time.sleep(0.0005)
    victim.abort()
    victim.abort()
    chunks = []
    while not victim._end_read:
        chunks.append(victim.next_chunk(10))
    assert [c.finished for c in chunks] == [False] * (len(chunks) - 1) + [True]
    with pytest.raises(EOFError):
        victim.next_chunk(1)
    received = [t for c in chunks for t in c.token_ids]
    assert received == counted(1, 6)[: len(received)]
    assert tokens(neighbour) == counted(5, 30)
    settle(engine)


def test_aborted_request_is_computed_no_further(counting_engine: Start) -> None:
    """Its consumer had heard of the end, and its rows went on to the last: seen only where that is far away."""
    engine = counting_engine()
    for _ in range(3):
        victim = engine.submit([1], greedy(120))
        victim.next_chunk(10)
        victim.abort()
        settle(engine)
    assert engine.stats()["steps"] < 120
    assert engine.stats()["num_free_blocks"] == engine.stats()["num_blocks"]


def test_token_that_lands_after_an_abort_reaches_nobody(counting_engine: Start) -> None:
    """The delivery thread may be in the middle of a batch when the abort comes."""
    handle = counting_engine().submit([1], greedy(120))
    handle.abort()
    before, wakers = tokens(handle), Wakers()
    handle.push(70, 0.0, None, None, wakers)
    handle.push(80, 0.0, "length", None, wakers)
    answer = handle.result(10).outputs[0]
    assert (answer.token_ids, answer.finish_reason) == (before, "abort")
    chunk = handle.next_chunk(1)
    assert (chunk.token_ids, chunk.finish_reason) == (before, "abort")
    with pytest.raises(EOFError):
        handle.next_chunk(1)


def test_abort_while_waiting_never_runs(counting_engine: Start) -> None:
    engine = counting_engine(max_num_seqs=1)
    engine.model.gate.clear()
    running = engine.submit([1], greedy(5))
    waiting = [engine.submit([2], greedy(5)) for _ in range(10)]
    for handle in waiting[:9]:
        handle.abort()
    engine.model.gate.set()
    assert tokens(running) == counted(1, 5)
    assert tokens(waiting[9]) == counted(2, 5)
    assert all(h.result(1).outputs[0].token_ids == [] for h in waiting[:9])


def test_tokens_stream_as_they_come(counting_engine: Start) -> None:
    engine = counting_engine()
    assert list(engine.submit([1], greedy(10))) == counted(1, 10)

    async def read() -> list[int]:
        return [t async for t in engine.submit([1], greedy(10))]

    assert asyncio.run(read()) == counted(1, 10)


def test_timeout_leaves_the_request_running(counting_engine: Start) -> None:
    engine = counting_engine()
    engine.model.gate.clear()
    handle = engine.submit([1], greedy(5))
    with pytest.raises(TimeoutError):
        handle.next_chunk(0.05)
    with pytest.raises(TimeoutError):
        handle.result(0.05)
    engine.model.gate.set()
    assert tokens(handle) == counted(1, 5)


def test_hundred_streams_in_one_event_loop_with_a_slow_one(counting_engine: Start) -> None:
    """Each gets exactly its own tokens, and one that does not read holds back nobody."""
    engine = counting_engine(max_num_seqs=16, num_blocks=200, max_num_batched_tokens=64)

    async def read(i: int) -> list[int]:
        handle = engine.submit([i % 100], greedy(20))
        if i == 0:
            await asyncio.sleep(0.5)
        return [t async for t in handle]

    async def everyone() -> list[list[int]]:
        return await asyncio.gather(*(read(i) for i in range(100)))

    assert asyncio.run(everyone()) == [counted(i % 100, 20) for i in range(100)]


def test_many_threads_submit_read_and_abort(counting_engine: Start) -> None:
    engine = counting_engine(max_num_seqs=8, num_blocks=100, max_num_batched_tokens=32)

    def client(i: int) -> bool:
        handle = engine.submit([i % 50], greedy(5 + i % 20))
        if i % 7 == 0:
            handle.next_chunk(30)
            handle.abort()
            got = handle.result(30).outputs[0]
            return got.token_ids == counted(i % 50, 5 + i % 20)[: len(got.token_ids)]
        return list(handle) == counted(i % 50, 5 + i % 20)

    with ThreadPoolExecutor(24) as pool:
        assert all(pool.map(client, range(300)))
    settle(engine)


def test_many_reading_threads_are_woken_in_turn_and_lose_nothing(counting_engine: Start) -> None:
    """Threads that read on are woken at a limited rate; each still gets every token, and ends are heard at once."""
    engine = counting_engine(max_num_seqs=64, num_blocks=2000, max_num_batched_tokens=64)

    def read(i: int) -> list[int]:
        return list(engine.submit([i], greedy(60)))

    with ThreadPoolExecutor(64) as pool:
        assert list(pool.map(read, range(64))) == [counted(i, 60) for i in range(64)]
    engine.model.gate.clear()
    handles = [engine.submit([i], greedy(60)) for i in range(64)]
    with ThreadPoolExecutor(64) as pool:
        results = [pool.submit(list, handle) for handle in handles]
        engine.model.gate.set()
        time.sleep(0.01)
        engine.close()
        assert all(isinstance(r.exception(10), (EngineClosedError, type(None))) for r in results)


def test_failing_step_reaches_every_waiter_at_once(counting_engine: Start) -> None:
    """The loop dies: readers in threads and in event loops, those that run and those that wait, all hear why."""
    model = CountingModel()
    engine = counting_engine(model, max_num_seqs=2)
    model.gate.clear()
    handles = [engine.submit([i], greedy(50)) for i in range(6)]
    model.fail_at = model.num_forwards + 4

    async def read(handle: RequestHandle) -> str:
        try:
            async for _ in handle:
                pass
        except EngineDeadError as error:
            return str(error.__cause__)
        return "no error"

    async def read_all() -> list[str]:
        readers = [asyncio.create_task(read(h)) for h in handles[:3]]
        await asyncio.sleep(0.05)
        model.gate.set()
        return await asyncio.wait_for(asyncio.gather(*readers), 10)

    assert asyncio.run(read_all()) == ["injected failure"] * 3
    for handle in handles[3:]:
        with pytest.raises(EngineDeadError, match="injected failure"):
            handle.result(10)
    assert not engine.is_healthy
    with pytest.raises(EngineDeadError):
        engine.submit([1], greedy())
    start = time.monotonic()
    engine.close()
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    "place",
    [
        "scheduler.add", "scheduler.plan", "scheduler.land", "scheduler.note_time", "_lane.launch", "_lane.wait",
        "_lane.launch_rest", "_held.prepare", "_held.accept", "_beams.land", "_backlog.expire", "admit", "deliver",
    ],
)  # fmt: skip
def test_failure_anywhere_in_the_loop_reaches_everyone(
    counting_engine: Start, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Not only where the model is: between steps, too, nobody may be left who waits for what will not come."""
    model = CountingModel()
    model.gate.clear()
    engine = counting_engine(model, max_num_seqs=8)
    handles: list[Any] = [
        engine.submit([1], greedy(110)),
        engine.submit([2], SamplingParams(n=2, max_tokens=110)),
        engine.submit([3], greedy(110, logits_processors=[lambda ids, logits: logits])),
        engine.submit_beam_search([4], BeamSearchParams(2, 110)),
    ]
    wait_until(lambda: engine._num_launched == 2)  # the loop stands still: it must not fail before all are there
    *path, name = place.split(".")
    owner: Any = engine if not path else getattr(engine, path[0])
    works = getattr(owner, name)
    calls = iter(range(10**6))

    def failing(*args: Any) -> Any:
        if next(calls) >= 2:
            raise RuntimeError(f"{place} failed")
        return works(*args)

    monkeypatch.setattr(owner, name, failing)
    later = [engine.submit([i], greedy(110)) for i in range(3)]
    model.gate.set()
    for handle in (*handles, *later):
        with pytest.raises(EngineDeadError, match=f"{place} failed"):
            handle.result(10)
    assert not engine.is_healthy and not engine._live
    engine.close()
    assert not engine._thread.is_alive()


def test_failing_delivery_is_heard_too(counting_engine: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results go through a thread of their own; if it dies in silence, every consumer hangs."""
    engine = counting_engine()

    def explode(*_: object) -> None:
        raise RuntimeError("delivery failed")

    monkeypatch.setattr(RequestHandle, "push", explode)
    with pytest.raises(EngineDeadError, match="delivery failed"):
        engine.submit([1], greedy(50)).result(10)
    assert not engine.is_healthy


def test_engine_without_a_thread_for_its_delivery_says_so(
    counting_engine: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the system gives no more threads, the loop's own ended without a word, and requests waited for ever."""
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "cbatch-delivery":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    engine = counting_engine()
    with pytest.raises(EngineDeadError, match="can't start new thread"):
        engine.submit([1], greedy()).result(10)
    engine.close()


def test_tokens_that_were_read_are_counted_and_not_again_after_a_reset(
    counting_engine: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were counted when the whole step had been handed out, for which a reader of its first row does not wait."""
    engine = counting_engine()
    push, go_on = RequestHandle.push, threading.Event()

    def slow(handle: RequestHandle, *args: Any) -> None:
        push(handle, *args)
        if handle.finished:
            go_on.wait(10)

    monkeypatch.setattr(RequestHandle, "push", slow)
    handle = engine.submit([1], greedy(3))
    wait_until(lambda: handle.finished)
    assert len(tokens(handle)) == engine.stats()["num_output_tokens"] == 3
    engine.reset_stats()
    go_on.set()
    settle(engine)
    stats = engine.stats()
    assert stats["num_output_tokens"] == stats["num_wasted_rows"] == 0


def test_a_draft_has_the_defaults_of_submit_and_leaves_nothing_if_it_is_dropped(counting_engine: Start) -> None:
    """Without its three options it failed with a TypeError about a method inside."""
    engine = counting_engine()
    engine.draft([2], greedy(8), None)
    handle = engine.enter(engine.draft([1], greedy(8), "x"), "x")
    assert tokens(handle) == counted(1, 8)
    settle(engine)


@pytest.mark.parametrize("where", ["enter", "_ring"])
def test_ctrl_c_while_it_is_queued_leaves_nothing_of_a_request(
    counting_engine: Start, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """It stayed among the live ones and was never run: its id was taken for good, a place in the queue too, and an
    abort of it ended the engine, whose queue was then shorter than nothing."""
    engine = counting_engine(max_queue_size=3)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine._backlog if where == "enter" else engine, where, interrupt)
        for params in (greedy(), SamplingParams(n=3, max_tokens=4)):
            with pytest.raises(KeyboardInterrupt):
                engine.submit([1], params, "mine")
        with pytest.raises(KeyboardInterrupt):
            engine.submit_beam_search([1], BeamSearchParams(2, 4), "mine")
    assert not engine.abort("mine") and not engine._live and not engine._inbox and not len(engine._backlog)
    assert tokens(engine.submit([1], greedy(), "mine")) == counted(1, 8)


def test_ctrl_c_as_the_loop_is_woken_loses_no_later_request(
    counting_engine: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside a condition's ``notify`` it left a waiter that nobody was: the next request woke that, and waited."""
    engine = counting_engine()
    ring = engine._ring

    def interrupted() -> None:
        ring()
        raise KeyboardInterrupt

    for _ in range(3):
        settle(engine)  # the loop is asleep
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(engine, "_ring", interrupted)
            engine.submit([1], greedy())
        assert tokens(engine.submit([1], greedy())) == counted(1, 8)


def test_ctrl_c_while_it_starts_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of the lane and of delivery waited for ever; the loop's own also kept the engine, and so its memory."""
    start, before = threading.Thread.start, set(threading.enumerate())

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if threading.current_thread() is threading.main_thread():  # which gets the signal
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            Engine(CountingModel(), EngineConfig(num_blocks=8))
    wait_until(lambda: set(threading.enumerate()) <= before)


def test_close_ends_what_runs_and_may_be_repeated(counting_engine: Start) -> None:
    engine = counting_engine(max_num_seqs=1)
    handles = [engine.submit([1], greedy(100)) for _ in range(3)]
    handles[0].next_chunk(10)
    engine.close()
    engine.close()
    for handle in handles:
        with pytest.raises(EngineClosedError):
            handle.result(5)
        handle.abort()
    with pytest.raises(EngineClosedError):
        engine.submit([1], greedy())
    assert not engine.is_healthy


def test_idle_engine_uses_no_cpu_and_wakes_at_once(counting_engine: Start) -> None:
    """Idle means asleep, not polling: the process must stay under 5% of one core, and a request finds it in 1 ms."""
    engine = counting_engine()
    tokens(engine.submit([1], greedy(2)))
    settle(engine)
    cpu = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - cpu < 0.05
    waits = []
    for _ in range(40):
        metrics = engine.submit([1], greedy(1)).result(30).metrics
        assert metrics.first_scheduled_time is not None and metrics.arrival_time is not None
        waits.append(metrics.first_scheduled_time - metrics.arrival_time)
        time.sleep(0.003)
    assert sorted(waits)[10] < 1e-3  # the others may have waited for a core


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_engine_cannot_be_copied_and_says_so(counting_engine: Start, copied: Callable[[object], object]) -> None:
    """As an argument of another process, it failed with "Cannot access storage of OpaqueTensorImpl"."""
    engine = counting_engine()
    with pytest.raises(TypeError, match="build one in each process"):
        copied(engine)
    assert tokens(engine.submit([1], greedy())) == counted(1, 8)


def test_first_request_may_come_late(counting_engine: Start) -> None:
    engine = counting_engine()
    time.sleep(0.2)
    assert tokens(engine.submit([1], greedy(3))) == [2, 3, 4]


def test_two_engines_together_and_one_after_the_other(counting_engine: Start) -> None:
    first, second = counting_engine(), counting_engine(CountingModel(vocab_size=50))
    a, b = first.submit([48], greedy(4)), second.submit([48], greedy(4))
    assert (tokens(a), tokens(b)) == ([49, 50, 51, 52], [49, 0, 1, 2])
    first.close()
    assert tokens(second.submit([1], greedy(2))) == [2, 3]
    assert tokens(counting_engine().submit([1], greedy(2))) == [2, 3]


def test_closed_engine_is_freed_without_the_garbage_collector() -> None:
    """Weights and pages must go when the last user does: a reference cycle would keep them until a collection."""
    model = CountingModel()
    gone = weakref.ref(model)
    engine = Engine(model, EngineConfig(max_num_seqs=2, num_blocks=9, block_size=4))
    tokens(engine.submit([1], greedy(2)))
    gc.collect()
    gc.disable()
    try:
        engine.close()
        del model
        assert gone() is None
    finally:
        gc.enable()
    assert not [t for t in threading.enumerate() if t.name.startswith("cbatch") and not t.is_alive()]


@pytest.mark.parametrize("how", ["end", "abort", "answers"])
def test_request_that_has_ended_is_freed_without_the_garbage_collector(counting_engine: Start, how: str) -> None:
    """The handle and its sequence held each other: prompts and log-probabilities, megabytes of few objects, stayed
    until a full collection, which comes by the number of objects."""
    params = SamplingParams(n=3, max_tokens=4) if how == "answers" else greedy(4 if how == "end" else 100)
    with counting_engine() as engine:
        handle = engine.submit([5], params)
        if how == "abort":
            handle.next_chunk()
            handle.abort()
        handle.result(20)
        left = [weakref.ref(each) for each in (handle, *handle.children)]
        gc.disable()
        try:
            del handle
            for _ in range(500):
                engine.submit([7], greedy(1)).result(20)  # has the slot, and the buffers
                if all(each() is None for each in left):
                    return
            raise AssertionError("somebody holds it")
        finally:
            gc.enable()


def test_random_joins_leaves_and_aborts_for_two_thousand_steps(counting_engine: Start) -> None:
    """Every request equals its solo run whatever joins and leaves beside it, with a pool that forces preemption."""
    engine = counting_engine(CountingModel(eos=(13,)), max_num_seqs=6, num_blocks=17, max_num_batched_tokens=12)
    churn(engine, 2000)
    assert engine.stats()["num_preemptions"] > 0
    settle(engine)


def churn(engine: Engine, num_steps: int) -> None:
    """Requests of all sizes to a counting model with EOS 13, a fifth of them aborted; each must equal its solo run."""
    rng = np.random.default_rng(3)
    pending: list[tuple[RequestHandle, list[int], bool]] = []
    while engine.stats()["steps"] < num_steps:
        prompt = rng.integers(0, 100, rng.integers(1, 20)).tolist()
        count = int(rng.integers(1, 25))
        expected = counted(prompt[-1], count)
        if 13 in expected:
            expected = expected[: expected.index(13) + 1]
        handle = engine.submit(prompt, greedy(count))
        abort = bool(rng.random() < 0.2)
        pending.append((handle, expected, abort))
        if abort and rng.random() < 0.5:
            handle.abort()
        if len(pending) > 12:
            handle, expected, abort = pending.pop(int(rng.integers(len(pending))))
            if abort:
                handle.abort()
            got = tokens(handle)
            assert got == expected[: len(got)]
            assert abort or got == expected
    for handle, expected, abort in pending:
        got = tokens(handle)
        assert got == expected[: len(got)]
        assert abort or got == expected


def test_metrics_are_in_order(counting_engine: Start) -> None:
    metrics = counting_engine().submit([1], greedy(5)).result(10).metrics
    times = [metrics.arrival_time, metrics.first_scheduled_time, metrics.first_token_time, metrics.finished_time]
    assert None not in times
    assert times == sorted(times)  # type: ignore[type-var]


def test_stats_name_the_lane_and_count(counting_engine: Start, device: str) -> None:
    engine = counting_engine()
    tokens(engine.submit([1], greedy(20)))
    settle(engine)
    stats = engine.stats()
    assert stats["activity_kind"] == ("gpu" if device == "cuda" else "cpu_lane")  # never called what it is not
    assert 0 < stats["activity_pct"] <= 100
    assert stats["steps"] == 20
    engine.reset_stats()
    assert engine.stats()["steps"] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "eager"}, "schedule is 'eager'"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 4}, "max_num_batched_tokens is 4"),
        ({"max_model_len": 999}, "max_model_len is 999, but the model takes at most 128"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization is 1.5"),
        ({"schedule": "sync", "depth": 2}, "depth is 2"),
        ({"schedule": "async", "depth": 1}, "depth is 1"),
        ({"num_blocks": 1}, "num_blocks is 1"),
        ({"block_size": 2.5}, "block_size is 2.5"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_bad_options_are_refused_with_their_value(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Engine(CountingModel(), EngineConfig(**options))  # type: ignore[arg-type]


def test_unknown_option_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="unknown option max_num_seq; known are attention"):
        Engine.from_model(CountingModel(), max_num_seq=3)


def test_close_from_a_finalizer_in_any_thread_never_waits(counting_engine: Start) -> None:
    """A finalizer runs in whatever thread collects: the one that computes a step, or one inside ``submit``.

    Joining there waited for itself for ever.
    """

    class Owner:
        def __init__(self, engine: Engine) -> None:
            self.cycle = self
            weakref.finalize(self, engine.close_soon)

    class Collecting(CountingModel):
        def forward(self, *args: object) -> torch.Tensor:  # type: ignore[override]
            gc.collect()
            return super().forward(*args)  # type: ignore[arg-type]

    engine = counting_engine(Collecting())
    owner = Owner(engine)
    handle = engine.submit([1], greedy(100))
    handle.next_chunk(10)
    del owner
    with pytest.raises(EngineClosedError):
        handle.result(10)

    engine = counting_engine()
    owner = Owner(engine)
    with engine._lock:  # as inside submit
        del owner
        gc.collect()
    engine._thread.join(10)
    assert not engine._thread.is_alive()


def test_many_answers_are_not_made_under_the_lock(counting_engine: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop, and every end of a request, waited for it: 0.4 s for 10,000 of them. And the id that one was made with
    may be somebody else's when it is queued."""
    model = CountingModel()
    model.gate.clear()
    engine = counting_engine(model)
    opened, make = [], Draft.open

    def meanwhile(draft: Draft, name: str, *given: Any) -> RequestHandle:
        opened.append(name)
        if len(opened) == 1:
            other = threading.Thread(target=engine.submit, args=([9], greedy(2), name))
            other.start()
            other.join(10)
            assert not other.is_alive(), "it waits for the lock"
        return make(draft, name, *given)

    monkeypatch.setattr(Draft, "open", meanwhile)
    handle = engine.submit([1], SamplingParams(n=3, max_tokens=2))
    assert opened == ["0", "0", "1"] and handle.request_id == "1"
    with pytest.raises(DuplicateRequestError, match="request 0: a request with this id is still running"):
        engine.submit([1], greedy(2), "0")
    model.gate.set()
    assert [len(output.token_ids) for output in handle.result(30).outputs] == [2] * 3
    settle(engine)


def test_abort_from_a_finalizer_under_the_engines_lock_while_the_request_ends_elsewhere(counting_engine: Start) -> None:
    """The finalizer waited for the handle's lock and held the engine's, who ended it the other way round: for ever."""
    model = CountingModel()
    model.gate.clear()
    engine = counting_engine(model)
    handle = engine.submit([1], greedy(5))
    done = threading.Event()

    def collect() -> None:
        with engine._lock:  # as in any statement under it that allocates
            elsewhere.start()
            while not handle._ending.locked():
                time.sleep(0.001)
            handle.abort()
        done.set()

    elsewhere = threading.Thread(target=handle.expire, daemon=True)
    threading.Thread(target=collect, daemon=True).start()
    assert done.wait(30), "a deadlock"
    elsewhere.join(30)
    assert handle.finish_reason == "timeout"
    model.gate.set()
    settle(engine)


def test_abort_from_a_finalizer_while_the_request_ends_changes_nothing(counting_engine: Start) -> None:
    """It ended twice, and the second end missed its id: the delivery thread died of it, and the engine with it."""
    engine = counting_engine()
    leave = engine._backlog.leave

    def collecting(handle: RequestHandle) -> None:
        if threading.current_thread().name.endswith("delivery"):
            handle.abort()  # as of an object that is collected here
        leave(handle)

    engine._backlog.leave = collecting  # type: ignore[method-assign]
    output = engine.submit([1], greedy(3)).result(30).outputs[0]
    assert (output.token_ids, output.finish_reason) == (counted(1, 3), "length")
    assert tokens(engine.submit([5], greedy(3))) == counted(5, 3)
    assert engine.is_healthy and not engine._live


def test_close_from_inside_a_step_does_not_wait_for_itself(counting_engine: Start) -> None:
    model = CountingModel()
    engine = counting_engine(model)
    forward = model.forward

    def closing(*args: object) -> torch.Tensor:
        engine.close()
        return forward(*args)  # type: ignore[arg-type]

    model.forward = closing  # type: ignore[method-assign, assignment]
    with pytest.raises(EngineClosedError):
        engine.submit([1], greedy(100)).result(10)


def test_a_closed_engine_has_nobody_running_or_waiting(counting_engine: Start) -> None:
    """Its figures still showed who had run and waited when it was closed."""
    model = CountingModel()
    model.gate.clear()
    engine = counting_engine(model, max_num_seqs=2)
    handles = [engine.submit([i], greedy(50)) for i in range(6)]
    while engine.stats()["num_running"] < 2:
        time.sleep(0.01)
    closing = threading.Thread(target=engine.close)
    closing.start()
    model.gate.set()
    closing.join(10)
    with pytest.raises(EngineClosedError):
        handles[-1].result(5)
    stats = engine.stats()
    assert (stats["num_running"], stats["num_waiting"]) == (0, 0)


def test_forked_child_says_that_the_engine_is_closed(counting_engine: Start, device: str) -> None:
    """No thread of ours runs in a forked child: a request there would wait for ever, and so would its exit.

    So does who waits there for requests of before the fork: each ends as in an engine that was closed.
    """
    if device == "cuda":
        pytest.skip("CUDA does not survive a fork")
    model = CountingModel()
    model.gate.clear()
    engine = counting_engine(model)
    running = [engine.submit([1], greedy(3)), engine.submit([1], SamplingParams(n=2, temperature=1.0, max_tokens=3))]
    running.append(engine.submit_beam_search([1], BeamSearchParams(beam_width=2, max_tokens=3)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking a process with threads
        pid = os.fork()
    if pid == 0:
        num_closed = 0
        for wait in (lambda: engine.submit([1], greedy()), *(partial(handle.result, 5) for handle in running)):
            try:
                wait()
            except EngineClosedError:
                num_closed += 1
            except BaseException:
                break
        for handle in running:
            handle.abort()
        engine.close()
        os._exit(num_closed)
    status = os.waitpid(pid, 0)[1]
    model.gate.set()
    assert os.waitstatus_to_exitcode(status) == 4
    assert [tokens(handle) for handle in running[:1]] == [counted(1, 3)]
    assert tokens(engine.submit([1], greedy(2))) == [2, 3]


def test_stream_in_a_closed_event_loop_is_aborted(counting_engine: Start) -> None:
    """Nobody can read on there, so nothing need be computed."""
    engine = counting_engine()
    handle = engine.submit([1], greedy(100))

    async def read() -> None:
        async for _ in handle:
            pass

    loop = asyncio.new_event_loop()
    engine.model.gate.clear()
    task = loop.create_task(read())
    loop.run_until_complete(asyncio.sleep(0.05))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loop.close()
    engine.model.gate.set()
    assert handle.result(10).outputs[0].finish_reason == "abort"
    task._log_destroy_pending = False  # type: ignore[attr-defined]


def test_timed_out_waits_leave_nothing_behind(counting_engine: Start) -> None:
    engine = counting_engine()
    engine.model.gate.clear()
    handle = engine.submit([1], greedy(3))

    async def impatient() -> None:
        for _ in range(20):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(handle.anext_chunk(), 0.001)

    asyncio.run(impatient())
    assert len(handle._async_waiters) <= 1
    engine.model.gate.set()
    assert handle.result(float("inf")).outputs[0].token_ids == [2, 3, 4]


def test_reading_on_after_an_error_raises_again(counting_engine: Start) -> None:
    model = CountingModel()
    model.fail_at = 3
    handle = counting_engine(model).submit([1], greedy(50))
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="injected failure"):
            list(handle)


def test_defaults_of_the_callers_torch_do_not_leak_in(counting_engine: Start, device: str) -> None:
    """A caller may have set a default dtype or device; every allocation of ours says what it is."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            engine = counting_engine()
        assert tokens(engine.submit([1], greedy(2))) == [2, 3]
        with Engine.from_model(make_tiny("llama", device), max_num_seqs=2, num_blocks=9, enforce_eager=True) as engine:
            assert len(tokens(engine.submit([1], greedy(5)))) == 5
    finally:
        torch.set_default_dtype(default)


@pytest.mark.parametrize("model", [None, 5, [1], b"abc", CountingModel])
def test_what_is_no_model_is_refused(model: object) -> None:
    with pytest.raises(ConfigError, match="model is"):
        Engine.from_model(model)  # type: ignore[arg-type]


@pytest.mark.parametrize(("num_blocks", "block_size"), [(2**30, 4096), (2**31 - 1, 1)])
def test_pool_that_does_not_fit_is_refused(num_blocks: int, block_size: int) -> None:
    """The system gives memory that nobody has, where it is not used at once, and ended the process without a word."""
    with pytest.raises(ConfigError, match=f"num_blocks is {num_blocks}, but a .*pool .* does not fit"):
        Engine(CountingModel(), EngineConfig(max_num_seqs=1, num_blocks=num_blocks, block_size=block_size))


def test_tables_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(**_: object) -> None:
        raise MemoryError("Unable to allocate 256 GiB")

    monkeypatch.setattr("cbatch.engine.Scheduler", too_large)
    with pytest.raises(ConfigError, match=r"max_num_seqs=3 rows for max_model_len=128 tokens.*256 GiB"):
        Engine(CountingModel(), EngineConfig(max_num_seqs=3, num_blocks=9))
