"""What the scheduler promises, with a model that is a function of the whole history."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from cbatch.scheduler.kv_spec import KVSpec, group_layers
from cbatch.scheduler.scheduler import Scheduler
from cbatch.scheduler.sequence import Sequence, Status
from tests.scheduler.driver import Driver, make, solo


def run_all(driver: Driver, requests: list[tuple[list[int], int, tuple[int, ...]]]) -> None:
    sequences = [driver.add(*request) for request in requests]
    driver.run()
    for sequence, (prompt, max_len, stop) in zip(sequences, requests, strict=True):
        expected = solo(prompt, max_len, stop, driver.scheduler.windows)
        assert sequence.payload.tokens == expected
        assert sequence.payload.finish == ("stop" if expected[-1] in stop else "length")
    assert driver.scheduler.blocks.num_free == driver.scheduler.blocks.num_usable


def random_requests(rng: random.Random, count: int, max_len: int) -> list[tuple[list[int], int, tuple[int, ...]]]:
    requests = []
    for _ in range(count):
        prompt = [rng.randrange(97) for _ in range(rng.randint(1, max_len - 1))]
        stop = tuple(rng.sample(range(97), rng.choice((0, 1, 6))))
        requests.append((prompt, rng.randint(len(prompt) + 1, max_len), stop))
    return requests


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
@pytest.mark.parametrize("num_groups", [1, 3])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_every_sequence_equals_its_solo_run(depth: int, num_groups: int, prefix_caching: bool) -> None:
    """Chunked prefill, preemption and late landing change when a token is computed, never which."""
    scheduler = make(num_blocks=20 * num_groups, num_groups=num_groups, prefix_caching=prefix_caching)
    driver = Driver(scheduler, depth)
    run_all(driver, random_requests(random.Random(depth), 60, 64))
    assert scheduler.num_preemptions > 0


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_demand_of_five_times_the_pool_finishes(prefix_caching: bool) -> None:
    """Many long prompts are admitted by chunks into a pool that holds one of them.

    If each kept its blocks and waited for the others, nothing would move; if each threw the others out, nothing would
    end. The oldest always advances, and a sequence starts only when its whole prompt has room.
    """
    scheduler = make(num_blocks=17, max_num_seqs=8, max_num_batched_tokens=8, prefix_caching=prefix_caching)
    run_all(Driver(scheduler), [([i] * 50, 60 + i % 4, ()) for i in range(10)])
    assert scheduler.num_preemptions <= 10


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_preempted_sequences_wait_until_the_others_can_grow(prefix_caching: bool) -> None:
    """Outputs of 60 tokens in a pool of 30 blocks, in which two have room when they are long.

    One that comes back as soon as its tokens fit is the first to go when the others grow by a block. If it waits until
    each of them can, there are 41 preemptions; 58 if it does not.
    """
    scheduler = make(num_blocks=31, max_num_seqs=8, prefix_caching=prefix_caching)
    run_all(Driver(scheduler), [([i, i], 62, ()) for i in range(16)])
    assert scheduler.num_preemptions <= 45


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_preempted_sequence_is_overtaken_by_nobody_behind_it(policy: str) -> None:
    """What it gave back is more than the others needed to grow. A small one behind it must not start in its place."""
    for size in range(1, 12):
        driver = Driver(make(num_blocks=15, max_num_seqs=3, policy=policy))
        sequences = [driver.add([i] * 5, 40) for i in range(3)]
        sequences.append(driver.add([9] * size, size + 2))
        while not (preempted := [sequence for sequence in sequences if sequence.num_preemptions]):
            driver.step()
        assert sequences[3].status is Status.WAITING
        while preempted[0].status is Status.WAITING:
            driver.step()
            assert preempted[0].status is not Status.WAITING or sequences[3].status is Status.WAITING
        driver.run()


def test_length_finishes_waste_nothing() -> None:
    """A finish by length is known when the last step is planned, so no row is computed for the ended sequence."""
    driver = Driver(make())
    run_all(driver, [([1, 2, 3], 4, ()), ([4], 9, ()), ([5] * 7, 20, ())])
    assert driver.num_wasted == 0


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_stop_token_seen_late_wastes_at_most_depth_minus_one_rows(depth: int) -> None:
    """The stop token of step N is read after N+1 was launched: that row is computed, and must be in no output."""
    stop = (solo([3, 1], 30)[6],)
    driver = Driver(make(), depth)
    run_all(driver, [([3, 1], 30, stop)])
    assert driver.num_wasted == depth - 1


def test_request_with_a_thousand_stop_tokens_stops_and_burdens_nobody() -> None:
    """The table of stop tokens was once as wide as the longest list, for every row of every step to come."""
    scheduler = make()
    driver = Driver(scheduler)
    width = scheduler.slot_tables.stop_ids.shape
    stop = (*range(1000, 2000), solo([3, 1], 30)[6])
    run_all(driver, [([3, 1], 30, stop), ([5, 5], 20, ())])
    assert scheduler.slot_tables.stop_ids.shape == width


def test_stop_token_in_the_step_that_also_ends_by_length_is_a_stop() -> None:
    """The sequence left its slot when the last step was planned; the token before the last one turns out to stop it."""
    tokens = solo([9, 9], 12)
    for ending in (tokens[-1], tokens[-2]):
        driver = Driver(make())
        sequence = driver.add([9, 9], 12, (ending,))
        driver.run()
        assert sequence.payload.finish == "stop"
        assert sequence.payload.tokens == solo([9, 9], 12, (ending,))


def test_slot_and_blocks_pass_on_while_the_old_step_is_in_flight() -> None:
    """A finishes at N; its slot and blocks go to B for N+1 while N still runs: N lands as A's, B equals solo."""
    scheduler = make(max_num_seqs=1, num_blocks=4)
    driver = Driver(scheduler, depth=3)
    run_all(driver, [([1, 2], 5, ()), ([7, 8, 9], 8, ()), ([5], 6, ())])


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_abort_everywhere_gives_everything_back_and_lets_no_token_through(prefix_caching: bool) -> None:
    """An abort may come before the first step, inside a prefill, with tokens in flight, or in the last step."""
    for offset in range(16):
        driver = Driver(make(max_num_seqs=2, prefix_caching=prefix_caching))
        victim = driver.add([1] * 20, 28)
        others = [driver.add([i, 2], 12) for i in range(3)]
        for _ in range(offset):
            driver.step()
        before = list(victim.payload.tokens)
        ended = victim.payload.finish is not None
        driver.scheduler.abort(victim)
        driver.scheduler.abort(victim)
        driver.scheduler.check()
        driver.run()
        assert victim.payload.tokens == before or ended
        assert [o.payload.tokens for o in others] == [solo([i, 2], 12) for i in range(3)]
        assert driver.scheduler.blocks.num_free == driver.scheduler.blocks.num_usable


def test_late_token_of_an_aborted_request_never_reaches_the_one_that_takes_its_place() -> None:
    """X is aborted with a step in flight, and X is submitted again: it gets the same slot before that step lands."""
    for offset in range(1, 12):
        driver = Driver(make(max_num_seqs=1, prefix_caching=offset % 2 == 0), depth=3)
        old = driver.add([1] * 20, 40)
        for _ in range(offset):
            driver.step()
        slot, before = old.slot, list(old.payload.tokens)
        driver.scheduler.abort(old)
        new = driver.add([1] * 20, 30)
        driver.step()
        assert new.slot == slot and len(driver.in_flight) > 1
        driver.run()
        assert old.payload.tokens == before and old.payload.finish is None
        assert new.payload.tokens == solo([1] * 20, 30)


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_preempted_in_the_middle_of_a_prefill_and_with_a_token_in_flight(depth: int, prefix_caching: bool) -> None:
    """What was in flight when a sequence lost its slot is void, and is sampled again: nothing lost, nothing doubled.

    Of a prefill, the whole blocks stay in the cache, and no partial one.
    """
    rng = random.Random(5)
    seen = set()
    scheduler = make(num_blocks=12, max_num_batched_tokens=9, prefix_caching=prefix_caching)
    driver = Driver(scheduler, depth)
    prompts = [[rng.randrange(97) for _ in range(rng.randint(5, 20))] for _ in range(12)]
    sequences = [driver.add(prompt, 40) for prompt in prompts]
    preempt = scheduler._preempt

    def spy(sequence: Sequence) -> None:
        slot, t = sequence.slot, scheduler.slot_tables
        computed, lag = int(t.num_computed[slot]), int(t.num_tokens[slot] - t.num_landed[slot])
        is_prefill = not t.decoding[slot]
        seen.add("prefill" if is_prefill else "in flight" if lag else "landed")
        preempt(sequence)
        if prefix_caching and is_prefill:
            assert sequence.node is not None and sequence.node.depth == computed // 4

    scheduler._preempt = spy  # type: ignore[method-assign]
    driver.run()
    for sequence, prompt in zip(sequences, prompts, strict=True):
        assert sequence.payload.tokens == solo(prompt, 40)
    assert seen >= {"in flight", "prefill"}


def test_step_that_lost_grown_sequences_fits_its_bucket() -> None:
    """Sequences grow by a block, and are preempted in the same step for a prefill that ranks before them.

    Their entries in the block tables were changed for nothing: with them, the step's bucket would have no room.
    """
    driver = Driver(make(num_blocks=14, max_num_seqs=4, policy="priority", max_num_batched_tokens=16), depth=1)
    lows = [driver.add([i] * 4, 12, priority=1) for i in range(2)]
    driver.step()  # each computes a whole block, and needs another one in the next step
    high = driver.add([9] * 47, 50)
    while driver.step():
        pass
    assert all(low.num_preemptions for low in lows)
    assert high.payload.tokens == solo([9] * 47, 50)
    assert [low.payload.tokens for low in lows] == [solo([i] * 4, 12) for i in range(2)]


@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 9])
def test_context_of_whole_blocks_one_less_and_one_more(length: int) -> None:
    driver = Driver(make(num_blocks=8))
    run_all(driver, [([2] * length, length + 5, ())])


def test_thousand_requests_fill_the_steps() -> None:
    """A thousand requests over 256 slots: steps stay full, so few are needed (benchmarks/host_cost.py times it)."""
    scheduler = Scheduler(
        num_blocks=4096, block_size=16, num_groups=1, max_num_seqs=256, max_num_batched_tokens=2048, max_model_len=1024
    )
    driver = Driver(scheduler, check=False)
    rng = np.random.default_rng(0)
    for length in rng.integers(8, 256, 1000).tolist():
        driver.add([1] * length, length + 64)
    sampled = np.zeros(256, np.int32)
    driver._compute = lambda plan: sampled[: plan.sizes.num_samples]  # type: ignore[method-assign]
    driver.run()
    assert driver.num_steps < 350  # 64 tokens for each of 1000 requests are 250 full steps, and the prefills


def test_layers_of_several_kinds_make_groups_of_equal_pages() -> None:
    local, world = KVSpec(1, 8, 8, window=16), KVSpec(1, 8, 8)
    groups = group_layers([local, local, world, local, local, world])
    assert [(g.spec.window, g.layers) for g in groups] == [(16, (0, 1)), (16, (3, 4)), (0, (2, 5))]
    assert len({g.elements_per_page(4) for g in groups}) == 1
    assert [g.layers for g in group_layers([world] * 3)] == [(0, 1, 2)]


def test_prompts_all_of_whose_logits_are_wanted_come_in_small_parts() -> None:
    """Of five such tokens a step, the first takes all; the second waits with a slot kept, and the third passes it."""
    driver = Driver(make(max_prompt_logits=5, max_num_seqs=3))
    first, second = (driver.add([i] * 12, 20, wants_prompt_logits=True) for i in (1, 2))
    others = [driver.add([i] * 6, 20) for i in (3, 4)]
    steps = []
    write = driver.scheduler._write

    def spy(host: Any, slots: Any, chunks: Any, admitted: Any) -> Any:
        steps.append([(sequence.arrival, count) for sequence, count in chunks])
        return write(host, slots, chunks, admitted)

    driver.scheduler._write = spy  # type: ignore[method-assign]
    driver.run()
    assert steps[:5] == [[(0, 5), (2, 6)], [(0, 5)], [(0, 2), (1, 3)], [(1, 5)], [(1, 4)]]
    assert [s.payload.tokens for s in (first, second)] == [solo([i] * 12, 20) for i in (1, 2)]
    assert [s.payload.tokens for s in others] == [solo([i] * 6, 20) for i in (3, 4)]
