"""What the scheduler promises, with a model that is a function of the whole history."""

from __future__ import annotations

import random

import numpy as np
import pytest

from cbatch.scheduler.kv_spec import KVSpec, group_layers
from cbatch.scheduler.scheduler import Scheduler
from cbatch.scheduler.sequence import Sequence
from tests.scheduler.driver import Driver, make, solo


def run_all(driver: Driver, requests: list[tuple[list[int], int, tuple[int, ...]]]) -> None:
    sequences = [driver.add(*request) for request in requests]
    driver.run()
    for sequence, (prompt, max_len, stop) in zip(sequences, requests, strict=True):
        expected = solo(prompt, max_len, stop)
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
def test_every_sequence_equals_its_solo_run(depth: int, num_groups: int) -> None:
    """Chunked prefill, preemption and late landing change when a token is computed, never which."""
    scheduler = make(num_blocks=20 * num_groups, num_groups=num_groups)
    driver = Driver(scheduler, depth)
    run_all(driver, random_requests(random.Random(depth), 60, 64))
    assert scheduler.num_preemptions > 0


def test_demand_of_five_times_the_pool_finishes() -> None:
    """Many long prompts are admitted by chunks into a pool that holds one of them.

    If each kept its blocks and waited for the others, nothing would move; if each threw the others out, nothing would
    end. The oldest always advances, and a sequence starts only when its whole prompt has room.
    """
    scheduler = make(num_blocks=17, max_num_seqs=8, max_num_batched_tokens=8)
    run_all(Driver(scheduler), [([i] * 50, 60 + i % 4, ()) for i in range(10)])
    assert scheduler.num_preemptions <= 10


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
    width = scheduler.tables.stop_ids.shape
    stop = (*range(1000, 2000), solo([3, 1], 30)[6])
    run_all(driver, [([3, 1], 30, stop), ([5, 5], 20, ())])
    assert scheduler.tables.stop_ids.shape == width


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


def test_abort_everywhere_gives_everything_back_and_lets_no_token_through() -> None:
    """An abort may come before the first step, inside a prefill, with tokens in flight, or in the last step."""
    for offset in range(16):
        driver = Driver(make(max_num_seqs=2))
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


def test_preempted_in_the_middle_of_a_prefill_and_with_a_token_in_flight() -> None:
    """What was in flight when a sequence lost its slot is void, and is sampled again: nothing lost, nothing doubled."""
    rng = random.Random(5)
    seen = set()
    for depth in (2, 3):
        scheduler = make(num_blocks=12, max_num_batched_tokens=9)
        driver = Driver(scheduler, depth)
        sequences = [driver.add([rng.randrange(97) for _ in range(rng.randint(5, 20))], 40) for _ in range(12)]
        preempt = scheduler._preempt

        def spy(sequence: Sequence, scheduler: Scheduler = scheduler, preempt=preempt) -> None:  # type: ignore[no-untyped-def]
            slot = sequence.slot
            lag = int(scheduler.tables.num_tokens[slot] - scheduler.tables.num_landed[slot])
            seen.add("in flight" if lag else "landed")
            preempt(sequence)

        scheduler._preempt = spy  # type: ignore[method-assign]
        driver.run()
        for s in sequences:
            assert s.payload.tokens == solo(s.token_ids[: s.num_prompt_tokens].tolist(), 40)
    assert "in flight" in seen


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
