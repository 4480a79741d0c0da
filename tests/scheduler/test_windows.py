"""Groups of layers with a window hold what it shows and no more: as they run, in the cache, and in what is reserved."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from cbatch.scheduler.blocks import BlockManager
from cbatch.scheduler.plan import StepPlan
from tests.scheduler.driver import Driver, make, solo


def run(windows: tuple[int, ...], requests: list[tuple[int, int]], depth: int = 2, **options: Any) -> Driver:
    """Run prompts of so many tokens to their ``max_len``, and compare each with itself alone."""
    driver = Driver(make(windows=windows, num_groups=len(windows), **options), depth)
    prompts = [[(7 * i + j) % 97 for j in range(length)] for i, (length, _) in enumerate(requests)]
    sequences = [driver.add(prompt, max_len) for prompt, (_, max_len) in zip(prompts, requests, strict=True)]
    driver.run()
    for sequence, prompt in zip(sequences, prompts, strict=True):
        assert sequence.payload.tokens == solo(prompt, sequence.max_len, windows=driver.scheduler.windows)
    assert driver.scheduler.blocks.num_free == driver.scheduler.blocks.num_usable
    return driver


@pytest.mark.parametrize("budget", [8, 11, 64])
@pytest.mark.parametrize("length", [9, 10, 11, 19, 20, 21])
def test_prompts_about_the_window_and_twice_the_window(length: int, budget: int) -> None:
    """Window 10: one less, equal, one more and twice that; chunked within blocks, across blocks, and not at all."""
    for prefix_caching in (False, True):
        run((10, 0), [(length, length + 25)], max_num_batched_tokens=budget, prefix_caching=prefix_caching)


@pytest.mark.parametrize("window", [1, 2, 4, 5, 8])
@pytest.mark.parametrize("depth", [1, 4])
def test_windows_of_a_token_and_of_whole_blocks(window: int, depth: int) -> None:
    """With a window shorter than what is in flight, a block is out of it before its tokens have landed."""
    run((window, 0), [(3, 40), (17, 33)], depth, prefix_caching=True)
    if window > 1:  # alone, a window of one token has no history to compare
        run((window,), [(3, 40), (17, 33)], depth, prefix_caching=True)


def test_long_sequence_holds_only_what_its_windows_show() -> None:
    """32 layers of a window of 4,096 at a context of 32,768, as the issue's model has: 512 blocks of 64 if kept whole.

    While the prompt is computed it holds the window and a chunk; then the window, which touches 65 blocks.
    """
    driver = Driver(
        make(
            num_blocks=400, block_size=64, windows=(4096,), max_num_batched_tokens=8192, max_model_len=40_000,
        ),
        check=False,
    )  # fmt: skip
    scheduler = driver.scheduler
    driver._compute = lambda plan: np.full(plan.sizes.num_samples, 5, np.int32)  # type: ignore[method-assign]
    sequence = driver.add([1] * 32_768, 32_768 + 200)
    most = 0
    while sequence.slot < 0 or not scheduler.slot_tables.decoding[sequence.slot]:
        driver.step()
        most = max(most, scheduler.blocks.num_usable - scheduler.blocks.num_free)
    assert most <= (4096 + 8192) // 64
    for _ in range(150):
        driver.step()
        assert scheduler.blocks.num_usable - scheduler.blocks.num_free <= 4096 // 64 + 1
    scheduler.check()


def test_what_is_out_of_the_window_serves_others_while_the_sequence_runs() -> None:
    """Four sequences of 60 tokens need 60 blocks of 4 if kept whole. With a window of 8 they run side by side in 16."""
    driver = run((8,), [(4, 60)] * 4, num_blocks=17)
    assert driver.scheduler.num_preemptions == 0
    assert driver.num_steps < 70


def test_prompts_start_side_by_side_when_their_windows_fit() -> None:
    """Reserving 13 blocks for each of these prompts of 50 tokens would run them one by one."""
    driver = Driver(make(windows=(8,), num_blocks=20, max_num_batched_tokens=8))
    for i in range(3):
        driver.add([i] * 50, 60)
    running = []
    while driver.step():
        running.append(driver.scheduler.num_running)
    assert max(running) == 3 and driver.scheduler.num_preemptions == 0


def test_alone_in_a_small_pool_a_prompt_goes_in_smaller_chunks() -> None:
    """Window 8 and chunks of 64 would hold 18 blocks. The pool has 4: as many tokens as fit are computed at a time."""
    driver = run((8,), [(50, 60), (30, 40)], num_blocks=5, max_num_batched_tokens=64)
    assert driver.num_steps >= 60 / 8


def test_windows_are_needed_in_full_by_nobody_who_is_longer_than_the_pool() -> None:
    """A pool of 4 blocks of 4 holds 16 tokens; with a window of 8, a sequence of any length."""
    assert make(num_blocks=5).longest_len == 17  # the last token is never computed
    assert make(num_blocks=5, windows=(8,)).longest_len == 64
    assert make(num_blocks=11, num_groups=2, windows=(8, 0)).longest_len == 29  # 3 blocks, and 7 for 28 tokens
    assert make(num_blocks=4, num_groups=4).longest_len == 1, "not even one token"


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 9])
def test_blocks_for_is_what_is_held_at_most(window: int, size: int) -> None:
    """Counted out: a chunk's queries see from window - 1 positions before its first token on."""
    tables = make(block_size=size, windows=(window,)).block_tables
    for chunk, length in itertools.product(range(1, 9), range(1, 30)):
        most = 0
        for offset in range(chunk):  # the chunks may begin anywhere
            for start in [0, *range(offset or chunk, length, chunk)]:
                end = min(length, start + chunk if start else offset or chunk)
                most = max(most, -(-end // size) - max(0, start - window + 1) // size)
        assert most <= tables.blocks_for(length, chunk) <= most + 1


def test_entries_out_of_the_window_point_to_the_dummy_block() -> None:
    """On the device too: the step after the one that drops a block carries the change over."""
    driver = Driver(make(windows=(6,), num_blocks=32))
    sequence = driver.add(list(range(9)), 40)
    for _ in range(12):
        driver.step()
    position = int(driver.scheduler.slot_tables.num_computed[sequence.slot]) - 1  # of the last query
    first = (position - 5) // 4
    assert first > 2
    assert not driver.tables[0, sequence.slot, :first].any()
    assert driver.tables[0, sequence.slot, first : position // 4 + 1].all()


def test_blocks_are_dropped_in_the_step_after_which_nobody_sees_them() -> None:
    """Position 13 sees 8 to 13. Once it is planned, block 1 is free for the next step; the step itself still has it."""
    driver = Driver(make(windows=(6,), block_size=4), depth=1)
    driver.add(list(range(12)), 40)
    s = driver.scheduler
    held = {}
    plan: StepPlan | None
    while (plan := s.plan(driver._host_batch)) is not None and plan.sizes.max_context_len < 20:
        driver._land(plan, driver._compute(plan))
        held[plan.sizes.max_context_len] = s.blocks.num_usable - s.blocks.num_free
    # after a context of n: positions n - 5 to n are seen next, in blocks (n - 5) // 4 to (n - 1) // 4
    assert held == {n: (n - 1) // 4 - (n - 5) // 4 + 1 for n in range(12, 20)}


def test_cached_prefix_of_a_hybrid_model_resumes_with_the_windows_blocks_only() -> None:
    """A hit holds all blocks of the global group, but of the local one only those that the next query sees."""
    driver = Driver(make(windows=(6, 0), num_groups=2, num_blocks=64, prefix_caching=True, max_num_batched_tokens=64))
    prompt = list(range(30))
    driver.add(prompt, 31)
    driver.run()
    sequence = driver.add(prompt, 31)
    plan = driver.scheduler.plan(driver._host_batch)
    assert plan is not None and sequence.num_cached_tokens == 28
    # the row as it was planned: 28 sees from 23 on, in column 5
    driver.in_flight.append((plan, driver._compute(plan)))
    assert np.flatnonzero(driver.tables[0, 0]).tolist() == [5, 6, 7]
    assert np.flatnonzero(driver.tables[1, 0]).tolist() == list(range(8))
    driver.run()
    assert sequence.payload.tokens == solo(prompt, 31, windows=(6, 0))


def test_lost_block_of_a_window_is_given_by_whoever_computes_it_again() -> None:
    """The local group's blocks went when they were needed. Who resumes further up computes them, and all get them."""
    driver = Driver(make(windows=(6, 0), num_groups=2, num_blocks=40, prefix_caching=True, max_num_batched_tokens=64))
    prompt = list(range(30))
    driver.add(prompt, 31)
    driver.run()
    cache = driver.scheduler.prefix_cache
    assert cache is not None
    node = cache.match(None, np.array(prompt, np.int32), b"")
    local = [above.blocks[0] for above in cache.path(node)]
    for block in local[5:]:  # as when the pool takes them
        driver.scheduler.blocks._cached.pop(block)
        driver.scheduler.blocks.published[block] = False
        driver.scheduler.blocks._put(np.array(cache._forget(block), np.int32))
    driver.scheduler.check()
    first = driver.add(prompt, 31)
    driver.run()
    second = driver.add(prompt, 31)
    driver.run()
    assert (first.num_cached_tokens, second.num_cached_tokens) == (20, 28)
    assert first.payload.tokens == second.payload.tokens == solo(prompt, 31, windows=(6, 0))


def test_shared_block_that_two_drop_at_once_is_released_twice() -> None:
    blocks = BlockManager(8, 4)
    held = blocks.allocate(2)
    blocks.published[held] = True
    blocks.add_refs(held)
    blocks.release(np.concatenate([held, held]), repeated=True)
    assert blocks.cached_blocks() == held.tolist()
    assert not blocks.ref_counts.any()


def test_windows_must_fit_the_groups() -> None:
    for windows in ((4,), (4, 4, 4), (-1, 0)):
        with pytest.raises(ValueError, match="one for each group"):
            make(num_groups=2, windows=windows)
    assert make(windows=(64,)).windows == (0,), "as wide as the longest sequence: no window"
