"""Forks, as beams need them: whole blocks are shared, the partial one is copied, and both go on by themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cbatch.scheduler.sequence import Sequence, Status
from tests.scheduler.driver import Driver, make, solo

PROMPT = list(range(10, 20))  # two blocks of four and a half

caching = pytest.mark.parametrize("prefix_caching", [False, True])


def running(**options: Any) -> tuple[Driver, Sequence]:
    """A sequence that has landed a few tokens, with none in flight."""
    driver = Driver(make(**{"num_blocks": 64, **options}), depth=1)
    sequence = driver.add(PROMPT, 40)
    while len(sequence.payload.tokens) < 5:
        driver.step()
    return driver, sequence


def known(sequence: Sequence) -> list[int]:
    return [*PROMPT, *sequence.payload.tokens]


@caching
def test_fork_shares_whole_blocks_and_computes_one_token(prefix_caching: bool) -> None:
    """15 tokens have landed, 14 are computed: three blocks are shared, two tokens copied, and the new one computed."""
    driver, parent = running(prefix_caching=prefix_caching)
    child = driver.fork(parent, [*known(parent)[:14], 90], 30)
    s = driver.scheduler
    tables = s.block_tables.tables[0]
    assert child.status is Status.RUNNING and child.num_cached_tokens == 14
    assert (tables[child.slot, :3] == tables[parent.slot, :3]).all() and tables[child.slot, 3] != tables[parent.slot, 3]
    assert (s.blocks.ref_counts[tables[parent.slot, :3]] == 2).all()
    plan = s.plan(driver._host_batch)
    assert plan is not None and plan.admitted == [child]
    assert (plan.sizes.num_copies, plan.sizes.num_tokens, plan.sizes.num_decodes) == (1, 2, 1)
    driver.in_flight.append((plan, driver._compute(plan)))
    prompt = [*known(parent)[:14], 90]
    driver.run()
    assert parent.payload.tokens == solo(PROMPT, 40)
    assert child.payload.tokens == solo(prompt, 30)


@caching
@pytest.mark.parametrize("keep", [1, 4, 7, 8, 9, 12, 13, 15])
def test_child_may_leave_anywhere(keep: int, prefix_caching: bool) -> None:
    """On a boundary of blocks nothing is copied; before it, the copy holds tokens that the child writes over."""
    driver, parent = running(prefix_caching=prefix_caching)
    prompt = [*known(parent)[:keep], 91, 92, 93]
    child = driver.fork(parent, prompt, 32)
    driver.run()
    assert child.payload.tokens == solo(prompt, 32) and parent.payload.tokens == solo(PROMPT, 40)


@caching
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_fork_with_tokens_in_flight(depth: int, prefix_caching: bool) -> None:
    """The parent's steps in flight write behind what the child shares. What they sample is not the child's."""
    driver = Driver(make(num_blocks=64, prefix_caching=prefix_caching), depth)
    parent = driver.add(PROMPT, 40)
    children = []
    while driver.step():
        if parent.slot >= 0 and len(parent.payload.tokens) % 3 == 1:
            prompt = [*known(parent), 90]
            children.append((driver.fork(parent, prompt, len(prompt) + 6), prompt))
    assert sum(child.num_cached_tokens > 0 for child, _ in children) > 5
    for child, prompt in children:
        assert child.payload.tokens == solo(prompt, len(prompt) + 6)


def test_fork_of_a_block_that_another_has_published_takes_the_published_one() -> None:
    """The parent's last block is whole, but not published yet, and a twin ahead of it has published the same.

    The parent goes on with the twin's block. A child that had been given the parent's own would hang on a prefix that
    it does not hold.
    """
    driver = Driver(make(num_blocks=64, prefix_caching=True, max_num_batched_tokens=64), depth=2)
    twin = driver.add(PROMPT, 40)
    for _ in range(6):
        driver.step()
    parent = driver.add([*PROMPT, *twin.payload.tokens[:1]], 40)
    for _ in range(8):
        driver.step()
        prompt = [*PROMPT, *twin.payload.tokens[:1], *parent.payload.tokens]
        driver.fork(parent, [*prompt, 90], len(prompt) + 2)
    driver.run()
    assert parent.payload.tokens == solo([*PROMPT, *twin.payload.tokens[:1]], 40)


@caching
def test_fork_of_a_fork_whose_copy_is_not_made_yet(prefix_caching: bool) -> None:
    """All copies are made at once, before the step: what the grandchild needs is still in its grandparent's block."""
    driver, parent = running(prefix_caching=prefix_caching)
    prompts = [[*known(parent)[:14], 90], [*known(parent)[:14], 91], [*known(parent)[:13], 92]]
    child = driver.fork(parent, prompts[0], 30)
    others = [driver.fork(child, prompt, 30) for prompt in prompts[1:]]
    assert [other.num_cached_tokens for other in others] == [14, 13]
    driver.scheduler.abort(parent)
    driver.run()
    assert [s.payload.tokens for s in (child, *others)] == [solo(prompt, 30) for prompt in prompts]


def test_parent_may_end_before_the_copy_is_made() -> None:
    """Its blocks are free, and the next step writes to any of them; but not to the one that it copies from."""
    driver, parent = running(num_blocks=12, max_num_batched_tokens=32)
    prompt = [*known(parent)[:14], 90]
    child = driver.fork(parent, prompt, 30)
    driver.scheduler.abort(parent)
    driver.scheduler.check()
    other = driver.add([1] * 24, 25)
    driver.run()
    assert child.payload.tokens == solo(prompt, 30) and other.payload.tokens == solo([1] * 24, 25)


def test_child_that_ends_before_the_step_is_copied_nothing() -> None:
    driver, parent = running()
    child = driver.fork(parent, [*known(parent)[:14], 90], 30)
    driver.scheduler.abort(child)
    driver.scheduler.check()
    plan = driver.scheduler.plan(driver._host_batch)
    assert plan is not None and plan.sizes.num_copies == 0 and not plan.admitted
    driver.in_flight.append((plan, driver._compute(plan)))
    driver.run()


def test_children_that_get_no_tokens_in_the_next_step_are_admitted_when_they_do() -> None:
    """A prompt before them takes the budget. Blocks are copied at once, but parameters travel with the first row."""
    driver = Driver(make(num_blocks=128, max_num_batched_tokens=10), depth=1)
    parent = driver.add(PROMPT, 40)
    for _ in range(3):
        driver.step()
    long = driver.add([1] * 40, 41)
    driver.step()
    prompts = [[*known(parent), 80 + i] for i in range(3)]
    children = [driver.fork(parent, prompt, 24) for prompt in prompts]
    plan = driver.scheduler.plan(driver._host_batch)
    assert plan is not None and plan.sizes.num_copies == 3 and not plan.admitted
    driver.in_flight.append((plan, driver._compute(plan)))
    while long.payload.finish is None or driver.scheduler.has_work:
        driver.step()
    assert [child.payload.tokens for child in children] == [solo(prompt, 24) for prompt in prompts]


def test_fork_is_refused_without_slot_or_room_and_changes_nothing() -> None:
    driver, parent = running(max_num_seqs=1)
    child = Sequence(np.array([*PROMPT, 90], np.int32), 20, payload=None)
    assert not driver.scheduler.fork(parent, child)
    driver, parent = running(num_blocks=11)
    driver.add([1] * 22, 40)
    driver.step()
    driver.step()
    assert driver.scheduler.blocks.num_free == 0
    assert not driver.scheduler.fork(parent, child)
    driver.scheduler.check()
    assert child.status is Status.WAITING and child.arrival == -1


@pytest.mark.parametrize("windows", [(5,), (12, 0, 5)])
def test_fork_is_refused_where_the_window_has_moved_on(windows: tuple[int, ...]) -> None:
    """The parent is at 14 and sees from 10 on: block 1 is gone, which a child that leaves at 8 would see.

    The wider window would still do, and what was done for it once stayed behind in the slot.
    """
    driver, parent = running(windows=windows, num_groups=len(windows))
    s = driver.scheduler
    child = Sequence(np.array([*PROMPT[:8], 90], np.int32), 20, payload=None)
    assert not s.fork(parent, child)
    s.check()
    prompt = [*known(parent)[:14], 90]
    late = driver.fork(parent, prompt, 30)
    assert late.num_cached_tokens == 14
    driver.run()
    assert late.payload.tokens == solo(prompt, 30, windows=windows)


@caching
@pytest.mark.parametrize("windows", [(0,), (6, 0)])
def test_beams(prefix_caching: bool, windows: tuple[int, ...]) -> None:
    """Four beams, of which two survive each round and branch, for 12 rounds; each goes on as it would alone.

    A round waits for the tokens of all. Who survives is decided by the tokens, so that an error in one shows in all.
    """
    driver = Driver(
        make(windows=windows, num_groups=len(windows), num_blocks=96, prefix_caching=prefix_caching), depth=1
    )
    beams = [driver.add([*PROMPT, i], 60) for i in range(4)]
    tokens = [[*PROMPT, i] for i in range(4)]
    for round_ in range(12):
        want = [len(beam.payload.tokens) + 1 for beam in beams]
        while any(len(beam.payload.tokens) < count for beam, count in zip(beams, want, strict=True)):
            driver.step()
        for i, beam in enumerate(beams):
            new = solo(tokens[i], 60, windows=windows)[: len(beam.payload.tokens)]
            assert beam.payload.tokens == new, round_
        order = sorted(range(4), key=lambda i: (beams[i].payload.tokens[-1], i))
        for loser, winner in zip(order[2:], order[:2], strict=True):
            driver.scheduler.abort(beams[loser])
            history = [*tokens[winner], *beams[winner].payload.tokens]
            tokens[loser] = [*history[:-1], (history[-1] + 1 + round_) % 97]
            beams[loser] = driver.fork(beams[winner], tokens[loser], 60)
            assert beams[loser].num_cached_tokens == len(history) - 1
    for beam in beams:
        driver.scheduler.abort(beam)
    driver.run()
    assert driver.scheduler.blocks.num_free == driver.scheduler.blocks.num_usable
