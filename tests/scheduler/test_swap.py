"""What a preempted sequence keeps on the host: the right blocks, in the right order, no longer than it needs them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cbatch.scheduler.sequence import Sequence, Status
from cbatch.scheduler.swap import SwapSpace
from tests.scheduler.driver import Driver, make, solo

PROMPT = list(range(10, 33))


def swapping(depth: int = 2, ms_per_block: float = 0.0, **options: Any) -> Driver:
    scheduler = make(**{"num_host_blocks": 40, "max_num_batched_tokens": 32, **options})
    assert scheduler.swap is not None
    scheduler.swap.ms_per_block, scheduler.swap.ms_per_token = ms_per_block, 1.0
    return Driver(scheduler, depth)


def space(driver: Driver) -> SwapSpace:
    assert driver.scheduler.swap is not None
    return driver.scheduler.swap


def decode(driver: Driver, prompt: list[int], steps: int, **options: Any) -> Sequence:
    sequence = driver.add(prompt, 60, **options)
    for _ in range(steps):
        driver.step()
    return sequence


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("steps", [1, 2, 3, 6, 7, 8, 9])
@pytest.mark.parametrize("options", [{}, {"prefix_caching": True}, {"num_groups": 2, "windows": (6, 0)}], ids=str)
def test_a_resumed_sequence_computes_its_last_token_and_what_was_in_flight(
    depth: int, steps: int, options: dict[str, Any]
) -> None:
    driver = swapping(depth, **options)
    sequence = decode(driver, PROMPT, steps)
    landed = int(driver.scheduler.slot_tables.num_landed[sequence.slot])
    driver.scheduler._preempt(sequence)
    driver.scheduler.check()
    kept = sequence.swapped_len
    computed = driver.num_computed
    driver.step()
    assert driver.num_computed - computed == (landed - kept if sequence.slot >= 0 else 0)
    if kept:
        assert kept == landed - 1 or landed == len(PROMPT)
    driver.run()
    assert sequence.payload.tokens == solo(PROMPT, 60, windows=driver.scheduler.windows)  # type: ignore[attr-defined]
    assert space(driver).num_free == 40


def test_blocks_go_out_before_others_write_them() -> None:
    """The blocks are free at once: whoever takes them in the same step finds that they have gone out before it."""
    driver = swapping(num_blocks=17, max_model_len=64)  # 16 blocks of 4
    first = decode(driver, PROMPT, 3)
    second = driver.add([5] * 30, 60)
    third = driver.add([6] * 30, 60)
    driver.run()
    for sequence, prompt in ((first, PROMPT), (second, [5] * 30), (third, [6] * 30)):
        assert sequence.payload.tokens == solo(prompt, 60)  # type: ignore[attr-defined]
    assert driver.scheduler.num_preemptions and space(driver).num_blocks_in
    assert space(driver).num_free == 40


def test_what_the_cache_still_holds_does_not_come_in() -> None:
    driver = swapping(prefix_caching=True)
    sequence = decode(driver, PROMPT, 4)
    driver.scheduler._preempt(sequence)
    kept = sequence.swapped_len
    assert space(driver).num_blocks_out == -(-kept // 4)
    driver.run()
    assert space(driver).num_blocks_in == 1  # the last, partial one
    assert sequence.payload.tokens == solo(PROMPT, 60)  # type: ignore[attr-defined]


def test_the_cheaper_way_is_taken() -> None:
    """23 tokens are 6 blocks, out and in 12 copies: worth 22 tokens at 1 ms each, if a copy takes less than 1.8 ms."""
    for ms_per_block, is_swapped in ((1.7, True), (2.0, False)):
        driver = swapping(ms_per_block=ms_per_block, depth=1)
        sequence = decode(driver, PROMPT, 1)
        driver.scheduler._preempt(sequence)
        assert (sequence.swapped is not None) == is_swapped
    assert not SwapSpace(4).is_cheaper(1, 1000)  # before a prompt was measured


def test_cost_of_a_token_follows_the_steps_that_are_prompts_for_the_most_part() -> None:
    swap = SwapSpace(4)
    swap.note(num_prefill=0, num_tokens=32, ms=5.0)
    swap.note(num_prefill=16, num_tokens=48, ms=5.0)
    assert swap.ms_per_token is None
    swap.note(num_prefill=96, num_tokens=128, ms=6.4)
    assert swap.ms_per_token == pytest.approx(0.05)
    swap.note(num_prefill=1, num_tokens=1, ms=5.0)  # who comes back from the host: 5 ms are no token's price
    assert swap.ms_per_token == pytest.approx(0.05)


def test_too_little_room_on_the_host_means_computing_again() -> None:
    driver = swapping(num_host_blocks=3)
    sequence = decode(driver, PROMPT, 3)
    driver.scheduler._preempt(sequence)
    assert sequence.swapped is None and space(driver).num_free == 3
    driver.run()
    assert sequence.payload.tokens == solo(PROMPT, 60)  # type: ignore[attr-defined]


@pytest.mark.parametrize("before_the_copy", [True, False])
def test_who_is_aborted_while_it_waits_gives_the_host_blocks_back(before_the_copy: bool) -> None:
    """Also where they have not gone out yet: another one's blocks may go to the same place in the same step."""
    driver = swapping(max_num_seqs=2, num_host_blocks=8)
    keep, gone = driver.add(PROMPT, 60), driver.add([4] * 23, 60)
    for _ in range(4):
        driver.step()
    driver.scheduler._preempt(gone)
    assert gone.swapped is not None and space(driver).num_free <= 2
    if not before_the_copy:  # a step in which nobody starts
        queue = driver.scheduler._waiting
        queue.peek = lambda _: None  # type: ignore[method-assign, assignment]
        driver.step()
        del queue.peek
    driver.scheduler.abort(gone)
    assert gone.status is Status.FINISHED and space(driver).num_free == 8
    driver.scheduler._preempt(keep)
    assert keep.swapped is not None
    driver.run()
    assert keep.payload.tokens == solo(PROMPT, 60)  # type: ignore[attr-defined]
    assert space(driver).num_free == 8


def test_host_blocks_that_come_in_are_free_from_the_next_plan_on() -> None:
    """Within a plan what goes out is copied first, and would overwrite what has not come in yet."""
    swap = SwapSpace(2)
    first, second = (Sequence(np.zeros(9, np.int32), 20) for _ in range(2))
    swap.save(first, np.array([[5, 6]], np.int32), 8)
    swap.take_plan([])
    swap.load(first, 0, np.array([7, 8], np.int32))
    assert swap.num_free == 0
    plan = swap.take_plan([])
    assert plan is not None and plan.in_blocks.tolist() == [7, 8] and swap.num_free == 2
    swap.save(second, np.array([[3]], np.int32), 4)
    assert swap.num_free == 1


def test_host_blocks_of_who_was_to_come_in_and_did_not_are_free_with_the_next_plan() -> None:
    """Though nothing is copied for it: they were not, until something was."""
    swap = SwapSpace(2)
    sequence = Sequence(np.zeros(9, np.int32), 20)
    swap.save(sequence, np.array([[5, 6]], np.int32), 8)
    swap.take_plan([])
    swap.load(sequence, 0, np.array([7, 8], np.int32))
    swap.cancel(sequence)  # preempted in the step that it was to start in
    assert swap.take_plan([]) is None and swap.num_free == 2


def test_nothing_is_kept_of_who_must_compute_every_token() -> None:
    driver = swapping()
    sequence = decode(driver, PROMPT, 3, skip_reading_prefix_cache=True)
    driver.scheduler._preempt(sequence)
    assert sequence.swapped is None
    driver.run()
    assert sequence.payload.tokens == solo(PROMPT, 60)  # type: ignore[attr-defined]


@pytest.mark.parametrize("options", [{}, {"prefix_caching": True}, {"num_groups": 2, "windows": (6, 0)}], ids=str)
@pytest.mark.parametrize("depth", [1, 2])
def test_who_pauses_comes_back_to_its_pause(depth: int, options: dict[str, Any]) -> None:
    """A beam's token may be another than the sampled one: what went out knows nothing of it yet."""
    driver = swapping(depth, **options)
    windows = driver.scheduler.windows
    beam, tokens = driver.add(PROMPT, 60, pauses=True), list(PROMPT)
    got: list[int] = beam.payload.tokens  # type: ignore[attr-defined]

    def next_pause() -> int:
        """Its next token, once it has landed."""
        count = len(got)
        while len(got) == count:
            driver.step()
        assert got[-1] == solo(tokens, len(tokens) + 1, windows=windows)[0]
        return got[-1]

    for round_ in range(12):
        token = next_pause()
        if round_ % 2:  # it comes back with the token that it had, and pauses behind the next
            tokens.append(token)
            driver.scheduler._preempt(beam)
            driver.scheduler.check()
            token = next_pause()
        tokens.append((token + 7 * round_) % 97)
        driver.scheduler.unpause(beam, tokens[-1])
        driver.scheduler.check()
    assert space(driver).num_blocks_in
    driver.scheduler.abort(beam)
    driver.run()
    assert space(driver).num_free == 40


@pytest.mark.parametrize("reset_first", [False, True], ids=["preempted, then reset", "reset, then preempted"])
def test_what_old_weights_have_made_does_not_come_back_into_the_cache(reset_first: bool) -> None:
    """Host memory outlived a reset: who came back from there published its old keys, for prompts submitted since."""
    driver = swapping(prefix_caching=True)
    sequence = decode(driver, PROMPT, 5)
    if reset_first:
        driver.scheduler.reset_prefix_cache()
    driver.scheduler._preempt(sequence)
    if not reset_first:
        assert sequence.swapped is not None
        driver.scheduler.reset_prefix_cache()
    driver.scheduler.check()
    assert sequence.swapped is None and space(driver).num_free == 40
    driver.run()
    assert space(driver).num_blocks_in == 0
    assert sequence.payload.tokens == solo(PROMPT, 60)  # type: ignore[attr-defined]


def test_one_step_brings_in_no_more_columns_than_its_slab_carries() -> None:
    """Two that came in beside a decode had 15 columns each, and a slab room for 16: nobody had counted, and the engine
    ended."""
    driver = swapping(1, num_blocks=128, max_num_batched_tokens=128)
    driver.scheduler.max_shared_columns = 16
    prompts = [[i, *range(56)] for i in range(2)]
    sequences = [driver.add(prompt, 64) for prompt in prompts]
    decode(driver, [5], 2)
    for sequence in sequences:
        driver.scheduler._preempt(sequence)
    for count in (1, 1, 2):  # the second when the first has begun to compute
        driver.step()
        assert sum(sequence.status is not Status.WAITING for sequence in sequences) == count
    driver.run()
    assert space(driver).num_blocks_in == 30
    for sequence, prompt in zip(sequences, prompts, strict=True):
        assert sequence.payload.tokens == solo(prompt, 64)  # type: ignore[attr-defined]
