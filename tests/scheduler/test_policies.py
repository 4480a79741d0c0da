"""Who starts, who is displaced, and who waits: in each policy the first in rank advances, and nobody starves."""

from __future__ import annotations

import random
from typing import Any

import pytest

from cbatch.scheduler.scheduler import LOOK_AHEAD
from cbatch.scheduler.sequence import MAX_PRIORITY, Sequence, Status
from cbatch.scheduler.waiting import WaitingQueue
from tests.scheduler.driver import Driver, make, solo


def by_priority(**options: Any) -> Driver:
    return Driver(make(policy="priority", **options))


def started(driver: Driver, sequences: list[Sequence]) -> list[int]:
    """Run to the end; the sequences' indices in the order in which they started first."""
    order: list[int] = []
    while driver.step():
        order += [i for i, s in enumerate(sequences) if s.status is not Status.WAITING and i not in order]
    return order


# ---- priority


def test_smaller_priority_starts_first_and_equal_ones_by_arrival() -> None:
    driver = by_priority(max_num_seqs=1)
    sequences = [driver.add([i], 4, priority=priority) for i, priority in enumerate((5, 0, -3, 0, 5))]
    assert started(driver, sequences) == [2, 1, 3, 0, 4]


def test_priority_is_heeded_by_its_policy_only() -> None:
    driver = Driver(make(max_num_seqs=1))
    sequences = [driver.add([i], 4, priority=-i) for i in range(3)]
    assert started(driver, sequences) == [0, 1, 2]


def test_important_request_takes_the_slot_of_the_least_important_one() -> None:
    """Of two running ones the later goes; its token in flight is void, and it comes back when a slot is free."""
    driver = by_priority(max_num_seqs=3)
    lows = [driver.add([i, i], 30, priority=priority) for i, priority in enumerate((1, 2, 2))]
    for _ in range(5):
        driver.step()
    high = driver.add([9], 12, priority=0)
    driver.step()
    assert high.status is Status.RUNNING
    assert [low.status for low in lows] == [Status.RUNNING, Status.RUNNING, Status.WAITING]
    assert lows[2].num_landed > 2, "what had landed is kept"
    driver.run()
    assert driver.scheduler.num_preemptions == 1
    assert [low.payload.tokens for low in lows] == [solo([i, i], 30) for i in range(3)]
    assert high.payload.tokens == solo([9], 12)


def test_important_request_takes_the_blocks_of_as_many_as_it_needs_the_last_first() -> None:
    """Three of 5 blocks each fill the pool. A prompt of 36 tokens needs 9: two must go, and the first may stay."""
    driver = by_priority(num_blocks=16, max_num_batched_tokens=64)
    lows = [driver.add([i] * 17, 20, priority=1) for i in range(3)]
    driver.step()
    assert driver.scheduler.blocks.num_free == 0
    high = driver.add([9] * 36, 38)
    driver.step()
    assert high.status is Status.RUNNING
    assert [low.status for low in lows] == [Status.RUNNING, Status.WAITING, Status.WAITING]
    driver.run()
    assert high.payload.tokens == solo([9] * 36, 38)
    assert [low.payload.tokens for low in lows] == [solo([i] * 17, 20) for i in range(3)]


def test_nobody_is_displaced_if_that_would_not_make_room() -> None:
    """The one of the same priority holds 10 of 15 blocks: without the other's 5 there is no room for 12 either."""
    driver = by_priority(num_blocks=16, max_num_batched_tokens=64)
    same, low = driver.add([1] * 37, 40), driver.add([2] * 17, 20, priority=1)
    driver.step()
    assert same.status is low.status is Status.RUNNING
    high = driver.add([9] * 46, 48)
    driver.step()
    assert high.status is Status.WAITING and low.status is Status.RUNNING
    assert driver.scheduler.num_preemptions == 0
    driver.run()


def test_equal_priorities_displace_nobody() -> None:
    driver = by_priority(max_num_seqs=2)
    for i in range(6):
        driver.add([i], 20, priority=3)
    driver.run()
    assert driver.scheduler.num_preemptions == 0


def test_displaced_one_does_not_come_back_at_the_cost_of_its_displacer() -> None:
    """Low ones wait for a slot while high ones come and go. Each is preempted at most once for each that came."""
    driver = by_priority(max_num_seqs=2, prefix_caching=True)
    lows = [driver.add([i], 40, priority=1) for i in range(2)]
    highs = []
    for i in range(10):
        for _ in range(3):
            driver.step()
        highs.append(driver.add([50 + i], 10))
    driver.run()
    assert driver.scheduler.num_preemptions <= 10
    assert all(high.num_preemptions == 0 for high in highs)
    assert [low.payload.tokens for low in lows] == [solo([i], 40) for i in range(2)]


def test_important_newcomers_prompt_goes_before_a_long_one_that_is_being_computed() -> None:
    """A prompt of 50 tokens takes seven steps of 8. The important one comes in the second and is done in the third."""
    driver = by_priority(max_num_batched_tokens=8)
    long = driver.add([1] * 50, 52, priority=1)
    driver.step()
    high = driver.add([2] * 8, 12)
    driver.step()
    t = driver.scheduler.slot_tables
    assert t.decoding[high.slot] and t.num_computed[long.slot] == 8
    driver.run()
    assert long.payload.tokens == solo([1] * 50, 52)


def test_most_important_one_always_advances() -> None:
    """However it came, whatever the pool: a token in each step from the step after its arrival on."""
    rng = random.Random(3)
    for seed in range(8):
        rng.seed(seed)
        driver = by_priority(
            num_blocks=rng.choice((17, 20, 30)), max_num_batched_tokens=64, prefix_caching=seed % 2 == 0
        )
        for _ in range(12):
            driver.add([rng.randrange(97) for _ in range(rng.randint(1, 30))], 60, priority=rng.randint(1, 3))
        for _ in range(rng.randint(1, 40)):
            driver.step()
        first = driver.add([5] * 10, 30)
        start = driver.num_steps
        while not first.payload.finish:
            driver.step()
        assert driver.num_steps - start <= 20 + driver.depth, seed
        assert first.num_preemptions == 0
        driver.run()


def test_priorities_at_the_ends_of_their_range() -> None:
    driver = by_priority(max_num_seqs=1)
    sequences = [driver.add([1], 4, priority=priority) for priority in (MAX_PRIORITY, -MAX_PRIORITY, 0)]
    assert started(driver, sequences) == [1, 2, 0]


# ---- longest prefix


def test_longest_cached_prefix_starts_first() -> None:
    driver = Driver(make(policy="longest_prefix", prefix_caching=True, max_num_seqs=1))
    driver.add(list(range(16)), 18)
    driver.run()
    prompts = [[90] * 9, [*range(8), 90], [*range(12), 90], list(range(16))]
    sequences = [driver.add(prompt, 18) for prompt in prompts]
    # The last is found in three blocks of its four, as the third is, which came before it.
    assert started(driver, sequences) == [2, 3, 1, 0]


def test_nobody_is_overtaken_by_more_than_the_sixty_four_behind_it() -> None:
    """A cold request among a stream that hits the cache: the bound is in arrivals, so a stream without end is none."""
    driver = Driver(make(policy="longest_prefix", prefix_caching=True, max_num_seqs=1, num_blocks=32), check=False)
    driver.add(list(range(8)), 10)
    driver.run()
    cold = driver.add([90] * 9, 10)
    warm = [driver.add([*range(8), i % 97], 10) for i in range(100)]
    while cold.status is Status.WAITING:
        driver.step()
    overtook = [sequence.arrival - cold.arrival for sequence in warm if sequence.status is not Status.WAITING]
    assert overtook == list(range(1, LOOK_AHEAD + 1))
    driver.run()


# ---- the queue


@pytest.mark.parametrize("policy", ["fcfs", "priority", "longest_prefix"])
def test_step_looks_at_few_of_fifty_thousand(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody behind the head is looked at while it has no room; a policy that compares looks at its 64."""
    driver = Driver(make(policy=policy, prefix_caching=True, max_num_seqs=2, num_blocks=16), check=False)
    for i in range(50_000):
        driver.add([i % 97, i % 89] * 20, 44, priority=i % 3)
    peeks = 0
    peek = WaitingQueue.peek

    def count(self: WaitingQueue, index: int) -> Sequence | None:
        nonlocal peeks
        peeks += 1
        return peek(self, index)

    monkeypatch.setattr(WaitingQueue, "peek", count)
    for _ in range(100):
        driver.step()
    assert peeks < 100 * (LOOK_AHEAD + 5 if policy == "longest_prefix" else 5)


def test_aborted_ones_leave_the_queue_before_they_surface() -> None:
    """Behind requests that always go first, tombstones would pile up, each with its request's prompt and handle."""
    driver = by_priority(max_num_seqs=1)
    driver.add([1], 60)
    driver.step()
    driver.add([2], 4)
    waiting = driver.scheduler._waiting
    most = 0
    for i in range(5000):
        sequence = driver.add([i % 97], 4, priority=1)
        driver.scheduler.abort(sequence)
        most = max(most, len(waiting.entries()))
    assert 40 < most <= 70
    driver.run()


def test_aborted_ones_do_not_stay_in_a_queue_where_nobody_waits() -> None:
    """An engine without work kept up to 64 of them until somebody else came."""
    driver = Driver(make(max_num_seqs=1), depth=1)
    driver.add([1], 4)
    driver.step()
    for sequence in [driver.add([i], 4) for i in range(40)]:
        driver.scheduler.abort(sequence)
    assert not driver.scheduler._waiting.entries()
    driver.run()


def test_queue_keeps_the_order_of_ranks_whatever_is_added_when() -> None:
    rng = random.Random(0)
    driver = Driver(make())
    queue = WaitingQueue()
    inside: list[Sequence] = []
    for rank in rng.sample(range(1000), 400):
        sequence = driver.add([1], 2)
        sequence.rank = rank
        queue.add(sequence)
        inside.append(sequence)
        inside.sort(key=lambda s: s.rank)
        for index in range(rng.randint(0, 5)):
            assert queue.peek(index) is (inside[index] if index < len(inside) else None)
        if inside and rng.random() < 0.3:
            first = queue.peek(0)
            assert first is inside.pop(0)
            queue.remove(first)
        if inside and rng.random() < 0.3:
            gone = inside.pop(rng.randrange(len(inside)))
            gone.status = Status.FINISHED
            queue.bury()
        assert len(queue) == len(inside)
        queue.entries()
