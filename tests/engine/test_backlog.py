"""Too many who wait, too long a wait: refused at once, ended on time, and nothing of them stays behind."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable

import pytest

from cbatch.async_llm import AsyncLLM
from cbatch.backlog import Backlog
from cbatch.engine import Engine
from cbatch.errors import ConfigError, EngineOverloadedError, InvalidRequestError
from cbatch.llm import LLM
from cbatch.request import RequestHandle
from cbatch.sampling_params import SamplingParams
from tests.counting import CountingModel, counted
from tests.waiting import settle, tokens, wait_until

Start = Callable[..., Engine]


def greedy(max_tokens: int = 8, **more: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **more)


def held() -> CountingModel:
    """A model whose steps stand still until its gate is opened."""
    model = CountingModel()
    model.gate.clear()
    return model


# ---- how many may wait


def test_one_more_than_may_wait_is_refused_with_both_numbers(counting_engine: Start) -> None:
    model = held()
    engine = counting_engine(model, max_num_seqs=1, max_queue_size=3)
    first = engine.submit([1], greedy(1000))
    wait_until(lambda: engine.stats()["num_running"] == 1)
    waiting = [engine.submit([i], greedy()) for i in (2, 3, 4)]
    with pytest.raises(EngineOverloadedError, match="request x: 3 wait already, but max_queue_size is 3"):
        engine.submit([5], greedy(), "x")
    waiting[1].abort()
    last = engine.submit([6], greedy(), "x")  # its place is free at once, and so is the id
    with pytest.raises(EngineOverloadedError):
        engine.submit([7], greedy())
    model.gate.set()
    first.abort()
    assert [tokens(handle) for handle in (waiting[0], waiting[2], last)] == [counted(i, 8) for i in (2, 4, 6)]
    settle(engine)


def test_all_answers_of_a_request_wait_or_none(counting_engine: Start) -> None:
    engine = counting_engine(held(), max_num_seqs=1, max_queue_size=4)
    engine.submit([1], greedy(100))
    wait_until(lambda: engine.stats()["num_running"] == 1)
    parallel = SamplingParams(n=3, temperature=1.0, max_tokens=2)
    engine.submit([2], parallel)
    with pytest.raises(EngineOverloadedError, match="3 wait already and it has 3 answers, but max_queue_size is 4"):
        engine.submit([3], parallel)
    engine.submit([4], greedy())
    with pytest.raises(EngineOverloadedError):
        engine.submit([4], greedy())
    engine.model.gate.set()  # type: ignore[attr-defined]


def test_more_answers_than_may_ever_wait_are_no_overload(counting_engine: Start) -> None:
    """They were refused with the error that says to come again later, by an engine with nothing to do."""
    engine = counting_engine(max_queue_size=3)
    with pytest.raises(InvalidRequestError, match="request x: n is 4, but max_queue_size is 3: so many can never wait"):
        engine.submit([1], SamplingParams(n=4, max_tokens=2), "x")
    assert len(engine.submit([1], SamplingParams(n=3, max_tokens=2), "x").result(30).outputs) == 3
    settle(engine)


def test_threads_that_submit_together_never_pass_the_limit(counting_engine: Start) -> None:
    model = held()
    engine = counting_engine(model, max_num_seqs=1, max_queue_size=50)
    engine.submit([1], greedy(100))
    wait_until(lambda: engine.stats()["num_running"] == 1)
    taken, refused = [], []

    def submit() -> None:
        for i in range(20):
            try:
                taken.append(engine.submit([i], greedy(1)))
            except EngineOverloadedError:
                refused.append(i)

    threads = [threading.Thread(target=submit) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(taken), len(refused)) == (50, 110)
    model.gate.set()
    for handle in taken:
        handle.result(30)
    settle(engine)


async def test_a_stream_that_may_not_wait_hears_so_at_its_first_step() -> None:
    model = held()
    llm = AsyncLLM(model, num_blocks=33, block_size=4, max_num_seqs=1, max_queue_size=1)
    llm.engine.submit([1], greedy(100))
    wait_until(lambda: llm.stats()["num_running"] == 1)
    llm.engine.submit([2], greedy())
    with pytest.raises(EngineOverloadedError):
        async for _ in llm.generate([3], greedy()):
            pass
    model.gate.set()
    llm.close()


def test_the_limit_is_a_positive_number_or_none() -> None:
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(ConfigError, match=f"max_queue_size is {wrong}"):
            Engine.from_model(CountingModel(), max_queue_size=wrong)


# ---- by when


@pytest.mark.parametrize("schedule", ["async", "sync"])
def test_a_deadline_ends_who_waits_and_who_runs(counting_engine: Start, schedule: str) -> None:
    """Slot and blocks come back, the id is free, neighbours get their own tokens."""
    model = CountingModel()
    engine = counting_engine(model, max_num_seqs=2, schedule=schedule, max_model_len=128)
    slow = threading.Event()

    forward = model.forward

    def delayed(*args: object) -> object:
        time.sleep(0.0 if slow.is_set() else 0.02)
        return forward(*args)  # type: ignore[arg-type]

    model.forward = delayed  # type: ignore[method-assign, assignment]
    running = engine.submit([1], greedy(100), "running", timeout_s=0.3)
    neighbour = engine.submit([2], greedy(40))
    waiting = engine.submit([3], greedy(4), "waiting", timeout_s=0.1)
    patient = engine.submit([4], greedy(4), timeout_s=1e9)
    output = running.result(30).outputs[0]
    assert output.finish_reason == running.finish_reason == "timeout"
    assert 1 <= len(output.token_ids) < 100 and output.token_ids == counted(1, len(output.token_ids))
    chunk = waiting.next_chunk(30)
    assert (chunk.token_ids, chunk.finish_reason) == ([], "timeout")
    with pytest.raises(EOFError):
        waiting.next_chunk(1)
    assert waiting.metrics.finished_time < running.metrics.finished_time  # type: ignore[operator]
    again = engine.submit([5], greedy(3), "running")
    slow.set()
    assert tokens(neighbour) == counted(2, 40)
    assert tokens(patient) == counted(4, 4)
    assert tokens(again) == counted(5, 3)
    settle(engine)


def test_each_answer_of_a_request_ends_at_the_deadline(counting_engine: Start) -> None:
    engine = counting_engine(held(), max_num_seqs=2)
    handle = engine.submit([1], SamplingParams(n=3, temperature=1.0, max_tokens=100), timeout_s=0.05)
    time.sleep(0.1)
    engine.model.gate.set()  # type: ignore[attr-defined]
    assert {output.finish_reason for output in handle.result(30).outputs} == {"timeout"}
    settle(engine)


def test_llm_gives_what_there_is_when_time_is_over() -> None:
    model = CountingModel()
    forward = model.forward
    model.forward = lambda *args: (time.sleep(0.01), forward(*args))[1]  # type: ignore[method-assign, assignment]
    with LLM(model, num_blocks=65, block_size=4) as llm:
        short, long = llm.generate([[1], [2]], [greedy(2), greedy(120)], timeout_s=0.3)
    assert (short.outputs[0].finish_reason, long.outputs[0].finish_reason) == ("length", "timeout")
    assert long.outputs[0].token_ids == counted(2, len(long.outputs[0].token_ids))


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), "5", True])
def test_a_timeout_is_a_positive_number_of_seconds(counting_engine: Start, wrong: object) -> None:
    with pytest.raises(InvalidRequestError, match=r"request a: timeout_s is .*, but must be a positive number"):
        counting_engine().submit([1], greedy(), "a", timeout_s=wrong)  # type: ignore[arg-type]


def test_ended_requests_do_not_pile_up_until_their_deadlines() -> None:
    """A server that gives each an hour would otherwise hold an hour of handles."""

    def make(i: int) -> RequestHandle:
        handle = RequestHandle(str(i), [1], greedy(), None, lambda *_: None)
        handle.deadline = time.monotonic() + 3600
        return handle

    backlog = Backlog(None)
    alive = [make(i) for i in range(100)]
    for handle in alive:
        backlog.watch(handle)
    for i in range(4_000):
        handle = make(i)
        backlog.watch(handle)
        handle.abort()
    assert len(backlog._deadlines) <= 1300
    assert {id(entry[2]()) for entry in backlog._deadlines} >= {id(handle) for handle in alive}
    backlog.expire()
    assert not any(handle.finished for handle in alive)


def test_ended_requests_are_freed_before_their_deadlines(counting_engine: Start) -> None:
    """A thousand ended ones were kept, each with the tokens of what may have been a long prompt."""
    engine = counting_engine()
    ended = [weakref.ref(engine.submit([i] * 50, greedy(3), timeout_s=3600.0)) for i in range(5)]
    settle(engine)
    wait_until(lambda: gc.collect() >= 0 and not any(handle() for handle in ended))


# ---- very many


def test_twenty_thousand_are_taken_in_seconds_and_cost_those_who_run_nothing(counting_engine: Start) -> None:
    model = held()
    engine = counting_engine(model, max_num_seqs=2, num_blocks=65)
    running = engine.submit([1], greedy(120))
    wait_until(lambda: engine.stats()["num_running"] == 1)
    plan, plan_s = engine.scheduler.plan, []  # seconds, of the steps with most of them waiting

    def timed(host_batch):
        num_waiting = engine.scheduler.num_waiting
        begin = time.thread_time()  # of the processor: other work on the machine is none of ours
        planned = plan(host_batch)
        if num_waiting > 16_000:
            plan_s.append(time.thread_time() - begin)
        return planned

    engine.scheduler.plan = timed
    handles, submit_s = [], []
    for _ in range(20):
        start = time.thread_time()
        handles += [engine.submit([i % 100] * 50, greedy(4)) for i in range(1000)]
        submit_s.append(time.thread_time() - start)
    assert min(submit_s[10:]) < 0.1
    start = time.thread_time()
    for handle in handles[3:]:
        handle.abort()
    assert time.thread_time() - start < 1.0
    model.gate.set()
    assert tokens(running) == counted(1, 120)
    assert [tokens(handle) for handle in handles[:3]] == [counted(i, 4) for i in range(3)]
    settle(engine)
    # Some steps had 256 newly aborted to step over. A look at each who waits would take milliseconds of all steps; the
    # best takes 0.2 ms, and on a busy machine a tenth of them is above 0.5.
    assert len(plan_s) > 20 and min(plan_s) < 1e-3
