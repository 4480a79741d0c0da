"""Sequences that pause behind each sampled token, as beams do, and go on with another token in its place."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from cbatch.scheduler.sequence import Sequence, Status
from tests.scheduler.driver import VOCAB, Driver, Result, make, solo

PROMPT = list(range(10, 20))  # two blocks of four and a half

caching = pytest.mark.parametrize("prefix_caching", [False, True])


def next_of(tokens: list[int], **options: Any) -> int:
    return solo(tokens, len(tokens) + 1, **options)[0]


@caching
@pytest.mark.parametrize("windows", [(0,), (6, 0)])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_pauses_behind_each_token_and_goes_on_with_the_one_it_is_told(
    prefix_caching: bool, windows: tuple[int, ...], depth: int
) -> None:
    """Blocks fill up, are published, and go out of the window meanwhile; a neighbour is in every step."""
    driver = Driver(make(prefix_caching=prefix_caching, windows=windows, num_groups=len(windows)), depth)
    neighbour = driver.add([1, 2, 3], 60)
    beam, tokens = driver.add(PROMPT, 60, pauses=True), list(PROMPT)
    for round_ in range(20):
        while len(beam.payload.tokens) == round_:
            driver.step()
        before = driver.num_computed
        driver.step()  # without it: only the neighbour's row, if it still runs
        assert driver.num_computed - before <= 1 and len(beam.payload.tokens) == round_ + 1
        assert beam.payload.tokens[-1] == next_of(tokens, windows=windows)
        tokens.append((beam.payload.tokens[-1] + 7 * round_) % VOCAB)
        driver.scheduler.unpause(beam, tokens[-1])
        driver.scheduler.check()
    driver.scheduler.abort(beam)
    driver.run()
    assert neighbour.payload.tokens == solo([1, 2, 3], 60, windows=windows)
    assert driver.scheduler.blocks.num_free == driver.scheduler.blocks.num_usable


def test_ends_by_length_like_any_other() -> None:
    driver = Driver(make(), 2)
    beam = driver.add(PROMPT, len(PROMPT) + 1, pauses=True)
    driver.run()
    assert beam.payload.tokens == solo(PROMPT, len(PROMPT) + 1) and beam.payload.finish == "length"


def test_preempted_while_it_pauses_or_its_token_is_in_flight() -> None:
    """It comes back with what has landed, pauses again, and what was in flight is sampled again."""
    for depth in (1, 2):
        driver = Driver(make(num_blocks=10, max_num_batched_tokens=8), depth)
        others = [driver.add([i] * 3, 16) for i in range(2)]
        beam = driver.add(PROMPT, 36, pauses=True)
        while beam.num_preemptions == 0:
            driver.step()
        num_known = len(beam.token_ids)
        assert beam.status is Status.WAITING and num_known in (len(PROMPT), len(PROMPT) + 1)
        for other in others:
            while other.payload.finish is None:
                driver.step()
        known = [*PROMPT, *beam.payload.tokens]
        while len(beam.payload.tokens) == len(known) - len(PROMPT):
            driver.step()
        assert beam.payload.tokens[-1] == next_of(known)
        assert driver.scheduler.plan(driver._host_batch) is None and driver.scheduler.num_running == 1
        driver.scheduler.abort(beam)
        driver.run()


def test_who_has_no_room_is_asked_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in front of each beam that it would go before, which walked over all beams for each: 128 took 2 ms more."""
    driver = Driver(make(num_blocks=30, max_num_seqs=24, max_num_batched_tokens=32), 1)
    first = Sequence(np.array([4], np.int32), 3, payload=Result())
    driver.scheduler.add(first, num_followers=1)
    beams = [driver.add([i, i], 30, pauses=True) for i in range(20)]
    while not all(beam.payload.tokens for beam in beams):
        driver.step()
    late = Sequence(np.arange(50, dtype=np.int32), 60, payload=Result())
    late.arrival = first.arrival + 1
    driver.scheduler.add(late)
    asked: list[Sequence] = []
    has_room = driver.scheduler._has_room
    monkeypatch.setattr(
        driver.scheduler, "_has_room", lambda sequence, *given: asked.append(sequence) or has_room(sequence, *given)
    )
    for beam in beams:
        driver.scheduler.unpause(beam, 7)
    before = driver.num_computed
    driver.step()
    assert driver.num_computed == before + len(beams) and asked == [late]


def test_followers_go_before_who_came_later() -> None:
    """A beam that was preempted, or is started anew, does not wait behind all that arrived since the first one."""
    driver = Driver(make(max_num_seqs=2), 1)
    beam = Sequence(np.array(PROMPT, np.int32), 40, pauses=True, payload=Result())
    driver.scheduler.add(beam, num_followers=3)
    driver.results[beam.arrival] = beam.payload  # type: ignore[assignment]
    later = [driver.add([i], 8) for i in range(3)]
    while not beam.payload.tokens:  # type: ignore[attr-defined]
        driver.step()
    driver.scheduler.abort(beam)
    known = [*PROMPT, 5]
    followers = [Sequence(np.array(known, np.int32), 20, payload=Result()) for _ in range(2)]
    for i, follower in enumerate(followers):
        follower.arrival = beam.arrival + 1 + i
        driver.scheduler.add(follower)
    assert [s.rank for s in (beam, *followers, *later)] == [0, 1, 2, 4, 5, 6]
    driver.step()
    assert followers[0].slot >= 0 and later[2].status is Status.WAITING
    driver.run()
    assert [f.payload.tokens for f in followers] == [solo(known, 20)] * 2  # type: ignore[attr-defined]


@caching
@pytest.mark.parametrize(("num_blocks", "num_host_blocks"), [(20, 0), (60, 0), (20, 12)])
@pytest.mark.parametrize("seed", range(6))
def test_random_beams_in_a_small_pool(seed: int, num_blocks: int, num_host_blocks: int, prefix_caching: bool) -> None:
    """Groups that branch, are preempted and started anew, beside ordinary sequences; checked after every call.

    With room on the host, what was preempted comes back from there.
    """
    rng = random.Random(seed)
    depth = rng.choice([1, 2, 3])
    options = {"num_blocks": num_blocks, "num_host_blocks": num_host_blocks, "prefix_caching": prefix_caching}
    driver = Driver(make(max_num_batched_tokens=12, **options), depth)
    s = driver.scheduler
    if s.swap is not None:
        s.swap.ms_per_token = 1.0  # and copies cost nothing
    plain = [driver.add([rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))], 40) for _ in range(6)]
    groups: list[list[tuple[Sequence, list[int]]]] = []
    for _ in range(2):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]
        groups.append([(driver.add(prompt, 50, pauses=True), prompt)])
    landed: dict[Sequence, int] = {}  # and the epoch in which it did
    rounds = [0, 0]
    for _ in range(3000):
        progress = driver.step()
        for number, group in enumerate(groups):
            for beam, tokens in group:
                if beam.payload.tokens and beam not in landed:
                    assert beam.payload.tokens[0] == next_of(tokens)
                    landed[beam] = beam.epoch
            if not group or any(beam not in landed for beam, _ in group):
                continue
            rounds[number] += 1
            if rounds[number] > 12:
                for beam, _ in group:
                    s.abort(beam)
                groups[number] = []
                continue
            chosen = [(rng.randrange(len(group)), rng.randrange(VOCAB)) for _ in range(rng.randint(1, 3))]
            usable = [beam.slot >= 0 and beam.epoch == landed[beam] for beam, _ in group]
            heirs: dict[int, int] = {}
            for child, (parent, _) in enumerate(chosen):
                heirs.setdefault(parent, child)
            for i, (beam, _) in enumerate(group):
                if i not in heirs or not usable[i]:
                    s.abort(beam)
            new: list[tuple[Sequence, list[int]]] = []
            for child, (parent, token) in enumerate(chosen):
                beam, tokens = group[parent]
                known = [*tokens, token]
                if heirs[parent] == child and usable[parent]:
                    s.unpause(beam, token)
                    beam.payload.tokens.clear()
                    del landed[beam]
                    new.append((beam, known))
                elif usable[parent]:
                    new.append((driver.fork(beam, known, 50, pauses=True), known))
                else:
                    new.append((driver.add(known, 50, pauses=True), known))
                s.check()
            groups[number] = new
        if not progress:
            paused = [b for group in groups for b, _ in group if b in landed and b.slot >= 0 and b.epoch == landed[b]]
            if not paused:
                break
            for beam in paused:
                s.abort(beam)
    assert rounds == [13, 13] and not s.has_work
    assert [p.payload.tokens for p in plain] == [solo(p.token_ids[: p.num_prompt_tokens].tolist(), 40) for p in plain]
    assert s.blocks.num_free == s.blocks.num_usable
    assert s.swap is None or s.swap.num_free == num_host_blocks
