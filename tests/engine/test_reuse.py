"""Prefixes, windows and forks through the whole engine: what is not computed again must not be seen in any token."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from cbatch import host_pages
from cbatch.engine import Engine
from cbatch.errors import ConfigError, EngineClosedError, InvalidRequestError
from cbatch.llm import LLM
from cbatch.request import RequestHandle
from cbatch.sampling_params import SamplingParams
from cbatch.scheduler.sequence import Sequence, Status
from cbatch.scheduler.swap import SwapSpace
from tests.counting import CountingModel, counted
from tests.engine.test_families import by_generate
from tests.models.families import VOCAB_SIZE, WINDOW, make_tiny

pytestmark = pytest.mark.usefixtures("checked")

Start = Callable[..., Engine]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(CountingModel, "default_device", request.param)
    return str(request.param)


@cache
def model(family: str = "llama", device: str = "cpu") -> Any:
    return make_tiny(family, device=device)


def start(family: str = "llama", device: str = "cpu", **options: Any) -> Engine:
    defaults = {
        "max_num_seqs": 6, "block_size": 4, "num_blocks": 200, "max_num_batched_tokens": 24,
        "enable_prefix_caching": True,
    }  # fmt: skip
    return Engine.from_model(model(family, device), **{**defaults, **options})


def greedy(max_tokens: int = 12, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **more)


def tokens(handle: RequestHandle) -> list[list[int]]:
    return [output.token_ids for output in handle.result(120).outputs]


def prompts() -> list[list[int]]:
    """Some share much, some little, one is another's beginning, two are the same, one is alone."""
    dice = torch.Generator().manual_seed(5)
    system = torch.randint(3, VOCAB_SIZE, (23,), generator=dice).tolist()
    tails = [torch.randint(3, VOCAB_SIZE, (n,), generator=dice).tolist() for n in (1, 2, 5, 9, 17)]
    shared = [system + tail for tail in tails]
    return [*shared, system[:16], system, system, system[:9] + tails[4], tails[3]]


def at_rest(engine: Engine) -> None:
    """Closed, and all that was taken is back."""
    engine.close()
    engine.scheduler.check()
    assert engine.scheduler.blocks.num_free == engine.scheduler.blocks.num_usable
    assert not engine.scheduler.num_running and not engine.scheduler.num_waiting and not engine._live


@cache
def alone(family: str = "llama", n: int = 1, device: str = "cpu") -> list[list[list[int]]]:
    """What each prompt gets with nobody beside it, nothing cached and one step in flight."""
    with start(family, device, schedule="sync", enable_prefix_caching=False) as engine:
        return [tokens(engine.submit(prompt, params(n), str(i))) for i, prompt in enumerate(prompts())]


def params(n: int) -> SamplingParams:
    return greedy() if n == 1 else SamplingParams(n=n, temperature=1.0, seed=3, max_tokens=6, ignore_eos=True)


def preempt_often(engine: Engine, times: int = 3) -> None:
    """Send every sequence back to the queue so often, at one offset or another, with its tokens in flight."""
    scheduler, plan, calls = engine.scheduler, engine.scheduler.plan, iter(range(10**6))

    def preempting(host_batch: Any) -> Any:
        call = next(calls)
        for sequence in scheduler.slot_tables.sequences.tolist():
            if sequence is not None and sequence.arrival % 3 == call % 3 and sequence.num_preemptions < times:
                scheduler._preempt(sequence)
        return plan(host_batch)

    scheduler.plan = preempting  # type: ignore[method-assign]


@pytest.mark.parametrize("schedule", ["async", "sync"])
@pytest.mark.parametrize("policy", ["fcfs", "priority", "longest_prefix"])
@pytest.mark.parametrize("caching", [True, False])
def test_tokens_equal_solo_with_the_cache_cold_and_warm(device: str, policy: str, schedule: str, caching: bool) -> None:
    if policy == "longest_prefix" and not caching:
        pytest.skip("needs the cache")
    with start(device=device, scheduling_policy=policy, schedule=schedule, enable_prefix_caching=caching) as engine:
        for temperature in ("cold", "warm"):
            handles = [
                engine.submit(prompt, greedy(), priority=i % 3 - 1 if policy == "priority" else 0)
                for i, prompt in enumerate(prompts())
            ]
            assert [tokens(handle) for handle in handles] == alone(device=device), temperature
        stats = engine.stats()
        assert bool(stats["num_hit_tokens"]) == caching and bool(stats["num_cached_blocks"]) == caching
        if caching:  # in the second round all whole blocks of all prompts were there
            cached = sum((len(prompt) - 1) // 4 * 4 for prompt in prompts())
            assert sum(handle.metrics.num_cached_tokens for handle in handles) == cached
        at_rest(engine)


@pytest.mark.parametrize("options", [{}, {"schedule": "sync"}, {"depth": 4}, {"enable_prefix_caching": False}])
def test_tokens_equal_solo_though_each_is_preempted_three_times(options: dict[str, Any]) -> None:
    """A resumed request finds its own blocks in the cache, as far as its tokens had landed: none is lost or doubled."""
    with start(**options) as engine:
        preempt_often(engine)
        handles = [engine.submit(prompt, greedy()) for prompt in prompts()]
        assert [tokens(handle) for handle in handles] == alone()
        assert [handle.metrics.num_preemptions for handle in handles] == [3] * len(handles)
        at_rest(engine)


@pytest.mark.parametrize("options", [{}, {"depth": 4}])
def test_slot_and_blocks_pass_on_while_the_step_that_reads_them_stands_still(
    device: str, options: dict[str, Any]
) -> None:
    """One slot, and blocks for one request: the next has both in step N+1, which is planned before N has computed.
    N must read the table of the one that it is planned for, and write into nobody else's blocks."""
    with start(device=device, max_num_seqs=1, num_blocks=14, enable_prefix_caching=False, **options) as engine:
        compute, numbers, overtaken = engine._executor.compute, iter(range(1, 10**6)), []

        def late(*args: Any) -> None:
            ahead = next(numbers) + engine.depth - 1
            if device == "cuda":
                torch.cuda._sleep(2_000_000)  # about 1 ms, in which the next steps are planned
            latest = time.monotonic() + 10
            while device == "cpu" and engine._num_launched < ahead and engine.scheduler.has_work:
                assert time.monotonic() < latest, "nothing is planned while a step runs"
                time.sleep(0.0001)
            overtaken.append(engine._num_launched >= ahead)
            compute(*args)

        engine._executor.compute = late  # type: ignore[method-assign]
        handles = [engine.submit(prompt, greedy()) for prompt in prompts()]
        assert [tokens(handle) for handle in handles] == alone(device=device)
        assert device == "cuda" or sum(overtaken) >= len(overtaken) - engine.depth  # all but the last ones
        at_rest(engine)


@pytest.mark.parametrize("way", ["swap", "recompute", "measured"])
@pytest.mark.parametrize("options", [{}, {"schedule": "sync"}, {"depth": 4}, {"enable_prefix_caching": False}])
def test_tokens_equal_solo_by_swapping_and_by_computing_again(
    device: str, options: dict[str, Any], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preempted with tokens in flight and amid its prompt; what comes back is what went out, in other blocks."""
    if way != "measured":
        monkeypatch.setattr(SwapSpace, "is_cheaper", lambda *_: way == "swap")
    with start(device=device, swap_space=0.01, **options) as engine:
        preempt_often(engine)
        handles = [engine.submit(prompt, greedy()) for prompt in prompts()]
        assert [tokens(handle) for handle in handles] == alone(device=device)
        assert [handle.metrics.num_preemptions for handle in handles] == [3] * len(handles)
        stats, swap = engine.stats(), engine.scheduler.swap
        assert swap is not None and swap.ms_per_block > 0 and swap.ms_per_token is not None
        if way != "measured":
            assert (stats["num_blocks_out"] > 10) == (stats["num_blocks_in"] > 10) == (way == "swap")
        at_rest(engine)
        assert swap.num_free == swap.num_blocks


@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_windows_equal_solo_when_they_are_swapped(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SwapSpace, "is_cheaper", lambda *_: True)
    with start(family, swap_space=0.01) as engine:
        preempt_often(engine)
        handles = [engine.submit(prompt, greedy()) for prompt in prompts()]
        assert [tokens(handle) for handle in handles] == alone(family)
        assert engine.stats()["num_blocks_in"] > 20
        at_rest(engine)


def test_penalties_and_seeds_survive_a_swap(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a slot keeps of its request is rebuilt from all of its tokens, wherever its keys and values come from."""
    monkeypatch.setattr(SwapSpace, "is_cheaper", lambda *_: True)
    picky = SamplingParams(temperature=0.8, seed=5, repetition_penalty=1.3, frequency_penalty=0.4, max_tokens=12)
    answers = []
    for options in ({"schedule": "sync"}, {"swap_space": 0.01}):
        with start(**options) as engine:
            if "swap_space" in options:
                preempt_often(engine)
            handles = [engine.submit(prompt, picky) for prompt in prompts()]
            answers.append([tokens(handle) for handle in handles])
            at_rest(engine)
    assert answers[0] == answers[1]


@pytest.mark.gpu
@pytest.mark.parametrize("late", ["copies", "compute"])
@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"depth": 4}], ids=str)
def test_swaps_equal_solo_though_a_stream_is_late(
    late: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies wait for the step before, and the steps behind wait for them: nobody is right by being quick."""
    monkeypatch.setattr(SwapSpace, "is_cheaper", lambda *_: True)
    with start(device="cuda", swap_space=0.01, **options) as engine:
        lane: Any = engine._lane
        stream = engine._executor._host_pages._stream if late == "copies" else lane.compute  # type: ignore[union-attr]
        launch, calls = lane.launch, iter(range(10**6))

        def delayed(*args: Any, **more: Any) -> None:
            if next(calls) % 3 == 0:
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(20_000_000)
            launch(*args, **more)

        lane.launch = delayed
        preempt_often(engine)
        handles = [engine.submit(prompt, greedy()) for prompt in prompts()]
        assert [tokens(handle) for handle in handles] == alone(device="cuda")
        assert engine.stats()["num_blocks_in"] > 10
        at_rest(engine)


@pytest.mark.parametrize("blocks", [1, 3])
def test_swaps_equal_solo_where_host_memory_is_in_pieces(blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch rounds pinned memory up to a power of two, 33 GiB to 64; in pieces, runs of blocks end with one."""
    monkeypatch.setattr(SwapSpace, "is_cheaper", lambda *_: True)
    monkeypatch.setattr(host_pages, "_PIECE_BYTES", 1)
    with start(swap_space=0.0001) as engine:
        pages = engine._executor._host_pages
        assert pages is not None and pages._per_piece == 1
        page = pages._pieces[0].nbytes
    monkeypatch.setattr(host_pages, "_PIECE_BYTES", blocks * page + 1)
    with start(swap_space=0.01) as engine:
        assert [len(piece) for piece in engine._executor._host_pages._pieces][:2] == [blocks] * 2  # type: ignore[union-attr]
        preempt_often(engine)
        handles = [engine.submit(prompt, greedy()) for prompt in prompts()]
        assert [tokens(handle) for handle in handles] == alone()
        assert engine.stats()["num_blocks_in"] > 10
        at_rest(engine)


def test_swap_space_beyond_the_machines_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pages, "available_memory_bytes", lambda: 2**20)
    with pytest.raises(ConfigError, match=r"swap_space of \d+ host blocks does not fit: it takes 0.0 GiB"):
        start(swap_space=0.01)


def test_swap_space_without_room_for_a_block_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"swap_space is 1e-09 GiB, but a block takes .* MiB"):
        start(swap_space=1e-9)
    for wrong in (-1, True, "4"):
        with pytest.raises(ConfigError, match=f"swap_space is {wrong!r}"):
            start(swap_space=wrong)


@pytest.mark.parametrize("num_blocks", [15, 25])
def test_five_times_the_pool_is_served(num_blocks: int) -> None:
    """Blocks run out, cached ones are taken, running ones preempted: it shows in no token."""
    with start(num_blocks=num_blocks, max_model_len=55) as engine:
        handles = [engine.submit(prompt, greedy()) for prompt in prompts() * 3]
        assert [tokens(handle) for handle in handles] == alone() * 3
        at_rest(engine)


@pytest.mark.parametrize("caching", [True, False])
def test_parallel_answers_draw_as_without_a_cache(caching: bool) -> None:
    with start(enable_prefix_caching=caching, max_num_seqs=8) as engine:
        handles = [engine.submit(prompt, params(4), str(i)) for i, prompt in enumerate(prompts())]
        assert [tokens(handle) for handle in handles] == alone(n=4)
        at_rest(engine)


def test_wholly_cached_prompt_computes_its_last_token_alone(device: str) -> None:
    """One of k whole blocks computes its last block: the last token is written, and not into a shared block."""
    model = CountingModel()
    model.record = True
    engine = Engine.from_model(model, block_size=4, num_blocks=60, max_num_seqs=4, enforce_eager=True)
    for length, computed in ((17, 1), (16, 4), (15, 3), (1, 1)):
        assert tokens(engine.submit(list(range(length)), greedy(1))) == [counted(length - 1, 1)]
        model.seen.clear()
        handle = engine.submit(list(range(length)), greedy(1))
        assert tokens(handle) == [counted(length - 1, 1)]
        assert model.seen == [list(range(length - computed, length))]
        assert handle.metrics.num_cached_tokens == length - computed
    at_rest(engine)


def test_a_long_hit_overflows_the_slab_and_still_reaches_the_device(device: str) -> None:
    """A hit of many blocks changes more of a block table than the arrays of a small step have room for."""
    with start(device=device, block_size=1, num_blocks=600) as engine:
        overflows = []
        plan = engine.scheduler.plan

        def noting(host_batch: Any) -> Any:
            step = plan(host_batch)
            overflows.append(step.sizes.num_overflow if step is not None else 0)
            return step

        engine.scheduler.plan = noting  # type: ignore[method-assign]
        for _ in range(2):
            for i, prompt in enumerate(prompts()):
                assert tokens(engine.submit(prompt, greedy())) == alone(device=device)[i]
        assert max(overflows) > 20
        at_rest(engine)


def test_a_fork_goes_on_from_a_copy_of_the_last_block(device: str) -> None:
    """The child shares whole blocks; the one that its parent goes on writing to is copied before its first step."""
    prompt = prompts()[4]
    (answer,) = alone(device=device)[4]
    with start(device=device) as engine:
        scheduler, add, parents = engine.scheduler, engine.scheduler.add, []
        plan, copies = scheduler.plan, []

        def forking(sequence: Sequence) -> None:
            parent = parents[0]
            assert parent.status is Status.RUNNING and scheduler.fork(parent, sequence)
            assert sequence.num_cached_tokens % 4, "the last block is whole: nothing would be copied"

        def noting(host_batch: Any) -> Any:
            step = plan(host_batch)
            if step is not None:
                copies.append(step.sizes.num_copies)
                if not parents and step.sequences.size and scheduler.slot_tables.num_landed[step.slots[0]] == 43:
                    parents.append(step.sequences[0])
                    scheduler.add = forking  # type: ignore[method-assign]
                    children.append(engine.submit(prompt + answer[:3] + [7], greedy()))
            return step

        children: list[RequestHandle] = []
        scheduler.plan = noting  # type: ignore[method-assign]
        parent = engine.submit(prompt, greedy())
        assert tokens(parent) == [answer]
        (forked,) = tokens(children[0])
        assert sum(copies) == 1
        scheduler.add = add  # type: ignore[method-assign]
        at_rest(engine)
    with start(device=device, schedule="sync", enable_prefix_caching=False) as engine:
        assert tokens(engine.submit(prompt + answer[:3] + [7], greedy())) == [forked]


@pytest.mark.parametrize("schedule", ["async", "sync"])
def test_tokens_equal_solo_with_chunks_sized_by_time(schedule: str) -> None:
    with start(schedule=schedule, itl_target_ms=1e-6, max_num_batched_tokens=200) as engine:
        sizes = []
        plan = engine.scheduler.plan

        def noting(host_batch: Any) -> Any:
            step = plan(host_batch)
            if step is not None and step.sizes.num_decodes:
                sizes.append(step.sizes.num_tokens - step.sizes.num_decodes)
            return step

        engine.scheduler.plan = noting  # type: ignore[method-assign]
        for _ in range(2):
            handles = [engine.submit(prompt, greedy()) for prompt in prompts()]
            assert [tokens(handle) for handle in handles] == alone()
        assert 0 < max(sizes[10:]) <= 32
        at_rest(engine)
    for wrong in (0, -1.0, float("inf"), "5", True):
        with pytest.raises(ConfigError, match=f"itl_target_ms is {wrong!r}"):
            start(itl_target_ms=wrong)


# ---- who shares with whom


def test_prefixes_are_shared_within_a_salt_only() -> None:
    prompt = list(range(5, 30))
    with start() as engine:
        hits = []
        for salt in (None, "a", "b", "a", None):
            handle = engine.submit(prompt, greedy(1), cache_salt=salt)
            tokens(handle)
            hits.append(handle.metrics.num_cached_tokens)
        assert hits == [0, 0, 0, 24, 24]
        assert (engine.stats()["num_asked_tokens"], engine.stats()["num_hit_tokens"]) == (5 * 25, 2 * 24)
        engine.reset_stats()
        assert (engine.stats()["num_asked_tokens"], engine.stats()["num_hit_tokens"]) == (0, 0)
    for wrong in ("", 3, b"a"):
        with start() as engine, pytest.raises(InvalidRequestError, match=r"cache_salt is .* must be a string"):
            engine.submit(prompt, greedy(1), cache_salt=wrong)  # type: ignore[arg-type]


def test_after_a_reset_nothing_is_hit() -> None:
    """Weights have changed: what old ones have made must not be mixed with what the new ones make."""
    own = make_tiny("llama")
    prompt = prompts()[4]
    with Engine.from_model(own, block_size=4, num_blocks=60, enable_prefix_caching=True) as engine:
        old = tokens(engine.submit(prompt, greedy()))
        with torch.no_grad():
            for weight in own.parameters():
                weight.mul_(-1.25)
        engine.reset_prefix_cache()
        handle = engine.submit(prompt, greedy())
        new = tokens(handle)
        assert handle.metrics.num_cached_tokens == 0 and new != old
        at_rest(engine)
        with pytest.raises(EngineClosedError):
            engine.reset_prefix_cache()
    with Engine.from_model(own, block_size=4, num_blocks=60, enable_prefix_caching=False) as engine:
        assert tokens(engine.submit(prompt, greedy())) == new


def test_a_module_that_may_be_trained_beside_the_engine_has_no_cache_unless_asked() -> None:
    for options, caching in (({}, False), ({"enable_prefix_caching": True}, True)):
        with Engine.from_model(model(), num_blocks=9, **options) as engine:
            assert engine.config.enable_prefix_caching is caching
    with Engine.from_model(CountingModel(), num_blocks=9) as engine:
        assert engine.config.enable_prefix_caching is True


def test_options_that_contradict_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"longest_prefix.*enable_prefix_caching is False"):
        start(scheduling_policy="longest_prefix", enable_prefix_caching=False)
    with pytest.raises(ConfigError, match="scheduling_policy is 'lifo'"):
        start(scheduling_policy="lifo")
    with pytest.raises(ConfigError, match="enable_prefix_caching is 1"):
        start(enable_prefix_caching=1)
    with start() as engine, pytest.raises(InvalidRequestError, match="priority is 1, but scheduling_policy is 'fcfs'"):
        engine.submit([1], greedy(1), priority=1)
    with start(scheduling_policy="priority") as engine:
        # Of numpy's least int64, abs is negative: it passed, and the loop died of it with all its requests.
        for wrong in (2**22, -(2**22), 0.5, True, np.int64(-(2**63))):
            with pytest.raises(
                InvalidRequestError, match=r"priority is .* must be an integer from -4194303 to 4194303"
            ):
                engine.submit([1], greedy(1), priority=wrong)  # type: ignore[arg-type]


def test_the_smaller_priority_is_served_first() -> None:
    """One slot: a smaller number displaces the one that runs, which ends later with its own tokens."""
    model = CountingModel()
    model.gate.clear()
    engine = Engine.from_model(
        model, max_num_seqs=1, block_size=4, num_blocks=33, scheduling_policy="priority", depth=2
    )
    handles = [engine.submit([i], greedy(20), priority=p) for i, p in enumerate((5, 1, -3))]
    model.gate.set()
    assert [tokens(handle) for handle in handles] == [[counted(i, 20)] for i in range(3)]
    ends = [handle.metrics.finished_time for handle in handles]
    assert sorted(ends) == ends[::-1]
    at_rest(engine)


def test_llm_takes_priorities_and_salts() -> None:
    with LLM(CountingModel(), num_blocks=33, block_size=4, scheduling_policy="priority") as llm:
        prompts = [{"prompt_token_ids": list(range(9)), "cache_salt": salt} for salt in ("a", "b", "a")]
        outputs = [llm.generate(prompt, greedy(2), priority=1)[0] for prompt in prompts]
        assert [output.metrics.num_cached_tokens for output in outputs] == [0, 0, 8]
        llm.reset_prefix_cache()
        (output,) = llm.generate(prompts[:1], greedy(2), priority=[-1])
        assert output.metrics.num_cached_tokens == 0
        with pytest.raises(InvalidRequestError, match="3 prompts, but 2 priorities"):
            llm.generate(prompts, greedy(2), priority=[1, 2])


# ---- windows


@pytest.fixture(params=["mistral", "gemma2", "gemma3_text"])
def windowed(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("caching", [True, False])
def test_windows_equal_generate_around_their_edge(
    windowed: str, device: str, caching: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of one less than the window, the window, one more, and far beyond; in one chunk and in many."""
    dice = torch.Generator().manual_seed(2)
    lengths = (1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 2 * WINDOW + 1, 40)
    several = [torch.randint(3, VOCAB_SIZE, (n,), generator=dice).tolist() for n in lengths]
    monkeypatch.setattr("tests.engine.test_families.prompts", lambda: several)
    expected = by_generate(model(windowed, device))
    for budget in (6, 64):
        options = {"max_num_batched_tokens": budget, "enable_prefix_caching": caching}
        with start(windowed, device, **options) as engine:
            for _ in range(2):
                handles = [engine.submit(prompt, greedy(24)) for prompt in several]
                assert [tokens(handle)[0] for handle in handles] == expected
            at_rest(engine)


def test_windows_survive_preemption_and_shared_prefixes(windowed: str) -> None:
    with start(windowed) as engine:
        preempt_often(engine)
        for _ in range(2):
            handles = [engine.submit(prompt, greedy()) for prompt in prompts()]
            assert [tokens(handle) for handle in handles] == alone(windowed)
        at_rest(engine)


def test_a_window_holds_its_blocks_alone(device: str) -> None:
    """All layers of this model see 8 positions: 200 tokens fit into a pool that could not hold a quarter of them."""
    with start("mistral", device, num_blocks=9, max_num_batched_tokens=8, enable_prefix_caching=False) as engine:
        most = []
        plan = engine.scheduler.plan

        def noting(host_batch: Any) -> Any:
            step = plan(host_batch)
            most.append(int((engine.scheduler.blocks.ref_counts > 0).sum()))
            return step

        engine.scheduler.plan = noting  # type: ignore[method-assign]
        assert len(tokens(engine.submit([5] * 100, greedy(100)))[0]) == 100
        assert max(most) <= engine.scheduler.block_tables.blocks_for(200, chunk=8) <= 5
        at_rest(engine)


# ---- ends at any time


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_abort_at_any_offset_gives_everything_back_and_spoils_no_prefix(family: str) -> None:
    """Of a request that ends amid its prompt, or with tokens in flight, the cache has whole blocks alone."""
    prompt = prompts()[4]
    with start(family, max_num_batched_tokens=6) as engine:
        for offset in range(14):
            engine.reset_prefix_cache()
            victim = engine.submit(prompt, greedy(), "x")
            steps = engine.stats()["steps"]
            while engine.stats()["steps"] < steps + offset and not victim.finished:
                time.sleep(0.0005)
            victim.abort()
            again = engine.submit(prompt, greedy(), "x")  # hits what the first has left
            assert tokens(again) == alone(family)[4]
        at_rest(engine)


def test_answers_and_children_that_are_aborted_leave_nothing() -> None:
    with start(max_num_seqs=8) as engine:
        handle = engine.submit(prompts()[3], params(4), "3")
        handle.children[1].abort()
        outputs = handle.result(60).outputs
        expected = alone(n=4)[3]
        assert [outputs[i].token_ids for i in (0, 2, 3)] == [expected[i] for i in (0, 2, 3)]
        engine.submit(prompts()[3], params(4), "4").abort()
        at_rest(engine)


def test_what_no_slot_can_use_is_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a cache, a pool beyond what all slots can hold would be of no use to anyone."""
    page = 2 * 4 * 4  # keys and values of one number, blocks of 4, float32
    monkeypatch.setattr("cbatch.memory.available_memory_bytes", lambda: int(5000 * page / 0.25 / 0.9) + page)
    for caching, num_blocks in ((False, 3 * 32 + 1), (True, 5000)):
        with Engine.from_model(CountingModel(), max_num_seqs=3, block_size=4, enable_prefix_caching=caching) as engine:
            assert engine.config.num_blocks == num_blocks
